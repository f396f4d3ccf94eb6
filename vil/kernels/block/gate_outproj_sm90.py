"""Gate, matrix product with out_proj, residual addition and norm in one kernel on Hopper, for many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import DOUBLE, I64, In, Out, Source
from .gate import GateInputs, token_stride
from .lines import LINE_PARAMETERS
from .norm_backward import empty_norm

SOURCE = Source("block/gate_outproj_sm90", {
    "gate_outproj": dict(
        y_0=In("Element"), y_1=In("Element"), z=In("Element"), scales=In("float"), tiles=In("Element"), x=In("float"),
        out=Out("float"), means=Out("Element"), xhat=Out("Element"), rstd=Out("float"), eps=DOUBLE, tokens=I64,
        L_=I64, **LINE_PARAMETERS, tokens_of_group=I64, rounds=I64,
    ),
}, only_hopper=True)  # fmt: skip

STAGES, SLOTS = 5, 3  # number of pipeline stages for weights, and for the gated tokens of each group of warps
AHEAD = 8  # number of tokens whose inputs a lane loads in advance


def fits(T: int, C: int, D: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the GPU, the dtype and the sizes T, C and D fit the Hopper kernels of gate and out_proj.

    The backward kernel also requires certain strides and alignments.
    """
    shape = dtype.itemsize == 2 and C in (192, 384) and D == 2 * C
    return shape and hardware.is_hopper(device) and 64 * hardware.multiprocessors(device) <= T


def empty_tiles(T: int, out_proj: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Allocate memory for out_proj in the Hopper kernel's tiled layout, or return None if the kernel does not run."""
    C, D = out_proj.shape
    takes = fits(T, C, D, dtype, device_of(out_proj))
    return torch.empty_like(out_proj, dtype=dtype, memory_format=torch.contiguous_format) if takes else None


def gate_outproj_sm90(
    x_TC: Tensor, y: GateInputs, z_BLD: Tensor, scale_B: Tensor | None, tiles: Tensor, mean_BLD: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Return the block's output x + gated @ out_proj^T and, if `eps` is given, xhat and rstd of the output's norm.

    The mean of both directions is written to `mean_BLD` if given. x must be aligned to 16 bytes, and z must be the
    last half of uz.
    """
    (_, L, D), (T, C), dtype = y.first.shape, x_TC.shape, z_BLD.dtype
    assert token_stride(z_BLD) == 2 * D
    assert x_TC.data_ptr() % 16 == 0
    out_TC, norm = torch.empty_like(x_TC), [] if eps is None else empty_norm(x_TC, dtype)
    macros = macros_of(dtype, C, mean_BLD is not None, y.lines is not None)
    multiprocessors = hardware.multiprocessors(device_of(x_TC))
    rounds, tokens = shares(T, multiprocessors)
    xhat_TC, rstd_T = norm or (None, None)
    launches.launch(SOURCE, "gate_outproj", macros, multiprocessors, 384, dict(
        **y.arguments(), z=z_BLD, scales=scale_B, tiles=tiles, x=x_TC, out=out_TC, means=mean_BLD, xhat=xhat_TC,
        rstd=rstd_T, eps=eps or 0.0, tokens=T, L_=L, tokens_of_group=tokens, rounds=rounds,
    ), macros["CTA_BYTES"])  # fmt: skip
    return out_TC, norm


def macros_of(dtype: torch.dtype, C: int, keep: bool, pooled: bool) -> dict:
    barriers, inputs, tokens = 2 * STAGES + 2 * 2 * SLOTS, 3 * AHEAD * 3 * 512, 3 * 2 * 64 * 8
    cta_bytes = STAGES * C * 32 * 2 + 2 * SLOTS * 64 * 64 * 2 + inputs + tokens + barriers * 8
    kind = dict(INPUT=ELEMENT[dtype], WIDTH=C, KEEP=int(keep), POOLED=int(pooled))
    return dict(**kind, STAGES=STAGES, SLOTS=SLOTS, AHEAD=AHEAD, CTA_BYTES=cta_bytes)


def shares(T: int, blocks: int) -> tuple[int, int]:
    """Return how many rounds a CTA's two groups of consumer warps run, and a group's tokens per round (at most 64)."""
    rounds = -(-T // (2 * 64 * blocks))
    return rounds, -(-T // (2 * rounds * blocks))
