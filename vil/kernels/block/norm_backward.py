"""Backward pass of the RMSNorm without a weight. The forward pass is part of other kernels (norm.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import launches
from ..cuda.elements import ELEMENT
from ..cuda.source import I64, In, Out, Source

SOURCE = Source("block/norm_backward", {
    "norm_backward": dict(
        dxhat=In("Element"), xhat=In("Element"), rstd=In("float"), dresidual=In("float"), dx=Out("float"),
        rounded=Out("Element"), tokens=I64,
    ),
})  # fmt: skip


def norm_backward(dxhat_TC: Tensor, xhat_TC: Tensor, rstd_T: Tensor, dresidual_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x through the norm and the residual stream, in fp32 and as a copy in xhat's dtype."""
    (T, C), rounds = xhat_TC.shape, xhat_TC.dtype != dresidual_TC.dtype
    dx_TC = torch.empty_like(dresidual_TC)
    rounded_TC = torch.empty_like(xhat_TC) if rounds else dx_TC
    macros = dict(INPUT=ELEMENT[xhat_TC.dtype], VECTOR=4 if C % 4 == 0 else 1, WIDTH=C)
    launches.launch(SOURCE, "norm_backward", macros, -(-T // 8), 256, dict(
        dxhat=dxhat_TC, xhat=xhat_TC, rstd=rstd_T, dresidual=dresidual_TC, dx=dx_TC,
        rounded=rounded_TC if rounds else None, tokens=T,
    ))  # fmt: skip
    return dx_TC, rounded_TC


def empty_norm(x_TC: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Allocate RMSNorm's outputs: xhat (T, C) in `dtype`, and rstd (T,)."""
    return [torch.empty_like(x_TC, dtype=dtype), x_TC.new_empty(len(x_TC))]


def reference_norm(x_TC: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the normalized tokens xhat = x * rstd and the factors rstd = 1 / sqrt(mean(x^2) + eps)."""
    rstd_T = (x_TC.square().mean(-1) + eps).rsqrt()
    return (x_TC * rstd_T[:, None]).to(dtype), rstd_T


def reference(dxhat_TC: Tensor, xhat_TC: Tensor, rstd_T: Tensor, dresidual_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Reference implementation of `norm_backward`."""
    projected = xhat_TC * (dxhat_TC * xhat_TC).mean(-1, keepdim=True)
    dx_TC = dresidual_TC + rstd_T[:, None] * (dxhat_TC - projected)
    return dx_TC, dx_TC
