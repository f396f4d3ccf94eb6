"""Backward pass of the gate and of the matrix product with out_proj.

The backward pass is one kernel on Hopper for many tokens and model width 192 or 384, otherwise a matrix product and a
gate kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from . import gate as gates
from . import gate_outproj_sm90 as forward

SOURCE = Source("block/gate_outproj_bwd_sm90", {
    "gate_outproj_backward": dict(
        dout=In("Element"), out_proj=In("Element"), means=In("Element"), z=In("Element"), scales=In("float"),
        dy=Out("Element"), dy_stride=I64, dz=Out("Element"), gated=Out("Element"), tokens=I64, length=I64,
        tokens_of_group=I64, rounds=I64,
    ),
}, only_hopper=True)  # fmt: skip


def gate_outproj_backward(
    dout_TC: Tensor, out_proj_CD: Tensor, mean_BLD: Tensor, z_BLD: Tensor, scale_B: Tensor | None, dy_BLD: Tensor,
    dz_BLD: Tensor,
) -> Tensor:  # fmt: skip
    """Backpropagate through out_proj and the gate: write `dy_BLD` and `dz_BLD`, and return the gate's output.

    The matrix product with out_proj and the gate's backward pass are one kernel if `gate_outproj_sm90.fits`, all
    tensors are aligned, z is half of uz and dz is half of the gradient of uz.
    """
    (T, C), (_, L, D) = dout_TC.shape, mean_BLD.shape
    dout_TC = dout_TC.contiguous()
    halves = all(gates.token_stride(t) == 2 * D for t in (z_BLD, dz_BLD))
    aligned = vector_width(8, dout_TC, out_proj_CD, mean_BLD, z_BLD, dy_BLD, dz_BLD) == 8
    if not (forward.fits(T, C, D, dout_TC.dtype, device_of(dout_TC)) and halves and aligned):
        dgated_BLD = torch.mm(dout_TC, out_proj_CD).view_as(mean_BLD)
        return gates.gate_backward(dgated_BLD, mean_BLD, z_BLD, scale_B, dy_BLD, dz_BLD)
    gated_BLD = torch.empty_like(mean_BLD)
    slices = D // 128  # number of slices of 128 channels, of which each CTA processes one
    blocks = max(1, hardware.multiprocessors(device_of(dout_TC)) // slices)  # number of CTAs for each slice of channels
    rounds, tokens = forward.shares(T, blocks)
    macros = macros_of(dout_TC.dtype, C)
    launches.launch(SOURCE, "gate_outproj_backward", macros, blocks * slices, 384, dict(
        dout=dout_TC, out_proj=out_proj_CD, means=mean_BLD, z=z_BLD, scales=scale_B, dy=dy_BLD,
        dy_stride=gates.token_stride(dy_BLD), dz=dz_BLD,
        gated=gated_BLD, tokens=T, length=L, tokens_of_group=tokens, rounds=rounds,
    ), macros["CTA_BYTES"])  # fmt: skip
    return gated_BLD


def macros_of(dtype: torch.dtype, C: int) -> dict:
    """Return the kernel's macros, with as many input buffers per warp group as fit in shared memory."""
    weights, slot = C * 128 * 2, 64 * 128 + 2 * 8
    slots = (227 * 1024 - weights - 8) // (2 * slot)
    return dict(INPUT=ELEMENT[dtype], WIDTH=C, SLOTS=slots, CTA_BYTES=weights + 2 * slots * slot + 8)


def reference(
    dout_TC: Tensor, out_proj_CD: Tensor, mean_BLD: Tensor, z_BLD: Tensor, scale_B: Tensor | None, dy_BLD: Tensor,
    dz_BLD: Tensor,
) -> Tensor:  # fmt: skip
    """Reference implementation of `gate_outproj_backward`."""
    dgated_BLD = (dout_TC @ out_proj_CD).view_as(mean_BLD)
    return gates.reference_backward(dgated_BLD, mean_BLD, z_BLD, scale_B, dy_BLD, dz_BLD)
