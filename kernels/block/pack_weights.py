"""A block's weights as its kernels and products take them, packed into one tensor; and the norm of its input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda import compiler
from ..cuda.elements import ELEMENT
from .norm_backward import empty_norm, plain_norm

ALIGNMENT = 64  # elements, where weights and gradients that share memory begin


class Weights(NamedTuple):
    """The weights as the kernels and products take them: projections in the products' dtype, others in fp32."""

    in_proj: Tensor  # (2D, C), the norm's weight in it: in_proj @ (norm * xhat) = (in_proj * norm) @ xhat
    out_proj: Tensor  # (C, D)
    x_proj: Tensor  # (2, R + 2N, D), with R padded by zeros to a multiple of 8, which fast matrix products need
    step_proj: Tensor  # (2, D, R)
    conv: Tensor  # (2, D, K)
    conv_bias: Tensor  # (2, D)
    step_bias: Tensor  # (2, D)
    skip: Tensor  # (2, D)

    @classmethod
    def of(cls, packed: Tensor, C: int, D: int, P: int, R: int, taps: int) -> Weights:
        """Views of what `pack_weights` has written: `packed_size` elements of the products' dtype. P and R padded."""
        views, start = [], 0
        for shape, fp32 in _packed_parts(C, D, P, R, taps):
            length = _length(shape, packed.dtype, fp32)
            part = packed[start : start + length]
            start += length
            if fp32 and packed.dtype.itemsize < 4:
                part = part.view(torch.float32)
            views.append(part[: math.prod(shape)].view(shape))
        return cls(*views)


def _packed_parts(C: int, D: int, P: int, R: int, taps: int) -> list[tuple[tuple[int, ...], bool]]:
    """The shapes of `Weights`, and which are in fp32 at least."""
    products = (2 * D, C), (C, D), (2, P, D), (2, D, R)
    return [*((shape, False) for shape in products), ((2, D, taps), True), *3 * [((2, D), True)]]


def _length(shape: tuple[int, ...], dtype: torch.dtype, fp32: bool) -> int:
    """Elements of `dtype` that a part takes, so that the next begins where vectors do."""
    elements = math.prod(shape) * (2 if fp32 and dtype.itemsize < 4 else 1)
    return elements + -elements % ALIGNMENT


def packed_size(C: int, D: int, P: int, R: int, taps: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that all weights take."""
    return sum(_length(shape, dtype, fp32) for shape, fp32 in _packed_parts(C, D, P, R, taps))


def packed_sizes(out_proj: Tensor, directions: list[Tensor]) -> tuple[int, int, int, int, int]:
    """C, D, P, R and taps of these, with R padded."""
    (C, D), (conv, _, x_proj, step, *_) = out_proj.shape, directions
    padding = -step.shape[1] % 8
    return C, D, x_proj.shape[0] + padding, step.shape[1] + padding, conv.shape[-1]


def pack_weights(
    norm_C: Tensor, in_proj: Tensor, out_proj: Tensor, directions: list[Tensor], dtype: torch.dtype,
    tiles: Tensor | None, x_TC: Tensor | None, eps: float, copy: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The weights of a block, all of one dtype, as `Weights.of` sees them; and `tiles` as `gate_outproj` does.

    And the norm of x_TC but for its weight, if it is given: x / sqrt(mean(x^2) + eps) in `dtype`, the factors (T,) in
    fp32, and x or a copy, which costs little here.
    """
    C, D, P, padded, taps = sizes = packed_sizes(out_proj, directions)
    packed = torch.empty(packed_size(*sizes, dtype), device=out_proj.device, dtype=dtype)
    views = Weights.of(packed, *sizes)
    T, (xhat_TC, scale_T, copy_TC) = 0, (None, None, None)
    if x_TC is not None:
        T, (xhat_TC, scale_T) = len(x_TC), empty_norm(x_TC, dtype)
        copy_TC = torch.empty_like(x_TC) if copy else None
    vector = 4 if C % 4 == D % 4 == 0 else 1
    macros = dict(
        INPUT=ELEMENT[dtype], PARAMETER=ELEMENT[norm_C.dtype], VECTOR=vector, WIDTH=C, TAPS=taps
    )  # fmt: skip
    packing = -(-((3 * C * D + 2 * P * D) // vector + 2 * D * (padded + taps + 1)) // 256)
    compiler.launch("block/pack_weights", "pack_weights", macros, packing + -(-T // 8), 256, dict(
        norm=norm_C, in_proj=in_proj, out_proj=out_proj, **by_direction("", directions), packed_in=views.in_proj,
        packed_out=views.out_proj, tiles=tiles, packed_conv=views.conv, packed_conv_bias=views.conv_bias,
        packed_x=views.x_proj, packed_step=views.step_proj, packed_step_bias=views.step_bias, packed_skip=views.skip,
        channels=D, projections_=P, rank_=directions[3].shape[1], padded_rank_=padded, x=x_TC, xhat=xhat_TC,
        scale=scale_T, copy=copy_TC, tokens=T, eps=eps, packing=packing,
    ))  # fmt: skip
    return packed, [xhat_TC, scale_T, copy_TC if copy else x_TC]


def by_direction(prefix: str, directions: list[Tensor | None]) -> dict:
    """The first six weights of both directions as kernels call them, with the prefix d for gradients."""
    names, half = ("conv", "conv_bias", "x_proj", "step", "step_bias", "skip"), len(directions) // 2
    both = enumerate((directions[:half], directions[half:]))
    return {f"{prefix}{name}_{g}": t for g, weights in both for name, t in zip(names, weights)}


def plain_packed(
    norm_C: Tensor, in_proj: Tensor, out_proj: Tensor, directions: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The definition of `Weights`, in the dtype of the parameters or, of both directions' weights, in `dtype`."""
    half = len(directions) // 2
    conv, conv_bias, x_proj, step, step_bias, skip = [
        torch.stack(pair).to(dtype) for pair in list(zip(directions[:half], directions[half:]))[:6]
    ]
    rank = step.shape[2]
    x_proj = torch.cat([F.pad(x_proj[:, :rank], (0, 0, 0, -rank % 8)), x_proj[:, rank:]], 1)
    step = F.pad(step, (0, -rank % 8))
    return [in_proj * norm_C, out_proj.clone(), x_proj, step, conv.squeeze(2), conv_bias, step_bias, skip]


def plain(
    norm_C: Tensor, in_proj: Tensor, out_proj: Tensor, directions: list[Tensor], dtype: torch.dtype,
    tiles: Tensor | None, x_TC: Tensor | None, eps: float, copy: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The definition of `pack_weights`, but for tiles."""
    sizes = packed_sizes(out_proj, directions)
    packed = out_proj.new_zeros(packed_size(*sizes, dtype), dtype=dtype)
    for part, value in zip(Weights.of(packed, *sizes), plain_packed(norm_C, in_proj, out_proj, directions, dtype)):
        part.copy_(value)
    return packed, [None] * 3 if x_TC is None else [*plain_norm(x_TC, eps, dtype), x_TC.clone()]
