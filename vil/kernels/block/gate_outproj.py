"""Gate, matrix product with out_proj and residual addition: one kernel if `fuses_product`, otherwise two launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from . import gate as gates
from . import gate_outproj_sm90 as on_hopper
from .gate import GateInputs
from .lines import LINE_PARAMETERS
from .norm_backward import reference_norm

SOURCE = Source("block/gate_outproj", {
    "gate_outproj_of_few": dict(
        y_0=In("Element"), y_1=In("Element"), z=In("Element"), z_stride=I64, scales=In("float"),
        out_proj=In("Element"), x=In("float"), out=Out("float"), means=Out("Element", pack=8), tokens=I64, L_=I64,
        **LINE_PARAMETERS,
    ),
})  # fmt: skip


def fuses_product(x_TC: Tensor, D: int, dtype: torch.dtype) -> bool:
    """Return whether one kernel runs gate and out_proj, for few tokens on any GPU or for many tokens on Hopper.

    The kernels require a 16-bit dtype, C = 192 or 384, D = 2C, and x aligned to 16 bytes.
    """
    T, C = x_TC.shape
    if dtype.itemsize > 2 or C not in (192, 384) or D != 2 * C or vector_width(4, x_TC) < 4:
        return False
    return cta_count(T, C) <= hardware.multiprocessors(device_of(x_TC)) or on_hopper.fits(
        T, C, D, dtype, device_of(x_TC)
    )


def gate_outproj(
    x_TC: Tensor, y: GateInputs, z_BLD: Tensor, scale_B: Tensor | None, out_proj_CD: Tensor, tiles: Tensor | None,
    keep: bool, eps: float | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Multiply the mean of both directions' y by scale and silu(z), and add the matrix product with out_proj to x.

    Returns the sum, the mean of y, and the norm of the sum.

    The output overwrites x unless `fuses_product`. The mean is empty unless `keep`. If `eps` and `tiles` are given, the
    norm is a list of xhat and rstd, as in `pack_weights`. Otherwise, the list is empty.
    """
    (B, L, D), (T, C), dtype = y.first.shape, x_TC.shape, z_BLD.dtype
    if not fuses_product(x_TC, D, dtype):
        gated_BLD, mean_BLD = gates.gate(y, z_BLD, scale_B, keep)
        return add_product(x_TC, gated_BLD.flatten(0, 1), out_proj_CD.t()), mean_BLD, []
    mean_BLD = z_BLD.new_empty((B, L, D) if keep else 0)
    means = mean_BLD if keep else None
    if tiles is not None:
        out_TC, norm = on_hopper.gate_outproj_sm90(x_TC, y, z_BLD, scale_B, tiles, means, eps)
        return out_TC, mean_BLD, norm
    out_TC, macros = torch.empty_like(x_TC), dict(INPUT=ELEMENT[dtype], WIDTH=C, POOLED=int(y.lines is not None))
    launches.launch(SOURCE, "gate_outproj_of_few", macros, cta_count(T, C), D // 2, dict(
        **y.arguments(), z=z_BLD, z_stride=gates.token_stride(z_BLD), scales=scale_B, out_proj=out_proj_CD, x=x_TC,
        out=out_TC, means=means, tokens=T, L_=L,
    ))  # fmt: skip
    return out_TC, mean_BLD, []


def cta_count(T: int, C: int) -> int:
    """Return the number of CTAs of the kernel `gate_outproj_of_few`. Each CTA computes 16 tokens x 48 outputs."""
    return -(-T // 16) * (C // 48)


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute x += a @ b without rounding the product before the addition."""
    if a.dtype == x.dtype:
        return torch.addmm(x, a, b, out=x)
    return torch.addmm(x, a, b, out_dtype=x.dtype, out=x)


def reference(
    x_TC: Tensor, y: GateInputs, z_BLD: Tensor, scale_B: Tensor | None, out_proj_CD: Tensor, tiles: Tensor | None,
    keep: bool, eps: float | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Reference implementation of `gate_outproj` that returns the output's norm whenever `eps` is given."""
    gated_BLD, mean_BLD = gates.reference(y, z_BLD, scale_B, keep)
    out_TC = x_TC + gated_BLD.flatten(0, 1) @ out_proj_CD.t()
    return out_TC, mean_BLD, [] if eps is None else list(reference_norm(out_TC, eps, out_TC.dtype))
