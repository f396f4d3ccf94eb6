"""Gradient of in_proj's input, and backward pass of the norm before in_proj.

Both are one kernel on Hopper for many tokens and model width 192 or 384, otherwise a matrix product and norm_backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from . import norm_backward as norms

SOURCE = Source("block/in_proj_bwd_sm90", {
    "in_proj_backward": dict(
        duz=In("Element"), in_proj=In("Element"), xhat=In("Element"), rstd=In("float"), dresidual=In("float"),
        dx=Out("float"), rounded=Out("Element"), tokens=I64,
    ),
}, only_hopper=True)  # fmt: skip

COLUMNS = 192  # number of columns of dxhat that a CTA computes, equal to COLUMNS in the .cu file
GROUPS = 3  # number of groups of four warps, each of which computes dxhat of 64 tokens of a tile


def fits(T: int, C: int, E: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel supports the sizes, dtype and GPU, and is faster than two kernels for T tokens.

    A cluster processes one tile at a time, so the last round of tiles must not leave many multiprocessors idle.
    """
    shape = dtype.itemsize == 2 and C in (COLUMNS, 2 * COLUMNS) and E == 4 * C
    if not (shape and hardware.is_hopper(device)):
        return False
    clusters, tiles = hardware.multiprocessors(device) // (C // COLUMNS), -(-T // (64 * GROUPS))
    return 0.75 * -(-tiles // clusters) * clusters <= tiles


def in_proj_backward(
    duz_TE: Tensor, in_proj_EC: Tensor, xhat_TC: Tensor, rstd_T: Tensor, dresidual_TC: Tensor
) -> tuple[Tensor, Tensor]:
    """Backpropagate through in_proj and the norm: return what `norm_backward` returns for dxhat = duz @ in_proj.

    The matrix product and `norm_backward` are one kernel if the sizes fit and all tensors are aligned.
    """
    (T, C), E = xhat_TC.shape, len(in_proj_EC)
    tensors = duz_TE, in_proj_EC, xhat_TC, dresidual_TC
    aligned = all(t.is_contiguous() for t in tensors) and vector_width(8, *tensors) == 8
    if not (fits(T, C, E, xhat_TC.dtype, device_of(xhat_TC)) and aligned):
        return norms.norm_backward(torch.mm(duz_TE, in_proj_EC), xhat_TC, rstd_T, dresidual_TC)
    return launch(duz_TE, in_proj_EC, xhat_TC, rstd_T, dresidual_TC, macros_of(xhat_TC.dtype, C))


def launch(
    duz_TE: Tensor, in_proj_EC: Tensor, xhat_TC: Tensor, rstd_T: Tensor, dresidual_TC: Tensor, macros: dict,
    rounds: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel. The rounded copy of dx is empty unless `rounds`."""
    T, C = xhat_TC.shape
    dx_TC, rounded_TC = torch.empty_like(dresidual_TC), torch.empty_like(xhat_TC)
    clusters = hardware.multiprocessors(device_of(xhat_TC)) // macros["CLUSTER"]
    clusters = max(1, min(clusters, -(-T // (64 * macros["GROUPS"]))))
    launches.launch(SOURCE, "in_proj_backward", macros, clusters * macros["CLUSTER"], 512, dict(
        duz=duz_TE, in_proj=in_proj_EC, xhat=xhat_TC, rstd=rstd_T, dresidual=dresidual_TC, dx=dx_TC,
        rounded=rounded_TC if rounds else None, tokens=T,
    ), macros["CTA_BYTES"])  # fmt: skip
    return dx_TC, rounded_TC


def macros_of(
    dtype: torch.dtype, C: int, groups: int = GROUPS, norms: int = 2, together: int = 3, prefetch: bool = True
) -> dict:
    """Return the kernel's macros, with as many stages as fit in shared memory."""
    cluster = C // COLUMNS
    stage, rows = (64 * groups + COLUMNS) * 64 * 2, 64 * groups // cluster * (C * 2 + 16)
    stages = (227 * 1024 - rows - 16) // (stage + 16)
    return dict(
        INPUT=ELEMENT[dtype], WIDTH=C, CLUSTER=cluster, GROUPS=groups, NORMS=norms, STAGES=stages, TOGETHER=together,
        PREFETCH=int(prefetch), CTA_BYTES=stages * (stage + 16) + rows + 16,
    )  # fmt: skip


def reference(
    duz_TE: Tensor, in_proj_EC: Tensor, xhat_TC: Tensor, rstd_T: Tensor, dresidual_TC: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `in_proj_backward`."""
    return norms.reference(duz_TE @ in_proj_EC, xhat_TC, rstd_T, dresidual_TC)
