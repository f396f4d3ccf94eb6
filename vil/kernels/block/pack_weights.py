"""Packing of a block's weights into one tensor. The same kernel launch also normalizes the block's input."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda import launches
from ..cuda.elements import ELEMENT
from ..cuda.source import DOUBLE, I64, In, Out, Parameters, Pointer, Source
from .norm_backward import empty_norm, reference_norm
from .weights import BlockWeights, Sizes

WEIGHTS = "conv", "conv_bias", "x_proj", "step", "step_bias", "skip"  # names of a direction's weights in kernels


def direction_parameters(prefix: str, pointer: Pointer) -> Parameters:
    """Declare kernel parameters for both directions' weights, such as `conv_0` and `conv_1`."""
    return {f"{prefix}{name}_{g}": pointer for name in WEIGHTS for g in (0, 1)}


EarlyIn, EarlyOut = (functools.partial(pointer, restrict=False, early=True) for pointer in (In, Out))
SOURCE = Source("block/pack_weights", {
    "pack_weights": dict(
        norm=EarlyIn("PARAMETER"), in_proj=EarlyIn("PARAMETER"), out_proj=EarlyIn("PARAMETER"),
        **direction_parameters("", EarlyIn("PARAMETER")), packed_in=EarlyOut("Element"),
        packed_out=EarlyOut("Element"), tiles=EarlyOut("Element"), in_proj_tiles=EarlyOut("Element"),
        packed_conv=EarlyOut("float"), packed_conv_bias=EarlyOut("float"), packed_x=EarlyOut("Element"),
        packed_step=EarlyOut("Element"), packed_step_bias=EarlyOut("float"), packed_skip=EarlyOut("float"),
        channels=I64, projections_=I64, rank_=I64, padded_rank_=I64,
        x=In("float"), xhat=Out("Element"), rstd=Out("float"), copy=Out("float"), tokens=I64, eps=DOUBLE, packing=I64,
    ),
})  # fmt: skip

ALIGNMENT = 64  # alignment, in elements, of each weight within the tensor of packed weights


class PackedWeights(NamedTuple):
    """A block's weights as kernels read them: projections in the dtype of matrix products, all others in fp32."""

    in_proj: Tensor  # (2D, C): weight of in_proj times the norm's weight, so that the norm itself needs no weight
    out_proj: Tensor  # (C, D)
    x_proj: Tensor  # (2, padded R + 2N, D): weights of x_proj, in which rows of zeros pad R to a multiple of 8
    step_proj: Tensor  # (2, D, padded R)
    conv: Tensor  # (2, D, K)
    conv_bias: Tensor  # (2, D)
    step_bias: Tensor  # (2, D)
    skip: Tensor  # (2, D)

    @classmethod
    def of(cls, packed: Tensor, sizes: Sizes) -> PackedWeights:
        """Return the weights as views of the tensor `packed`, which `pack_weights` has filled."""
        views, start = [], 0
        for shape, fp32 in _parts(sizes):
            length = _length(shape, packed.dtype, fp32)
            part = packed[start : start + length]
            start += length
            if fp32 and packed.dtype.itemsize < 4:
                part = part.view(torch.float32)
            views.append(part[: math.prod(shape)].view(shape))
        return cls(*views)


def _parts(sizes: Sizes) -> list[tuple[tuple[int, ...], bool]]:
    """Return the shape of each field of `PackedWeights`, and whether the field is stored in at least fp32."""
    C, D, _, _, K = sizes
    products = (2 * D, C), (C, D), (2, sizes.padded_P, D), (2, D, sizes.padded_R)
    return [*((shape, False) for shape in products), ((2, D, K), True), *3 * [((2, D), True)]]


def _length(shape: tuple[int, ...], dtype: torch.dtype, fp32: bool) -> int:
    """Return the number of elements of `dtype` that a packed weight occupies, including padding for alignment."""
    elements = math.prod(shape) * (2 if fp32 and dtype.itemsize < 4 else 1)
    return elements + -elements % ALIGNMENT


def packed_size(sizes: Sizes, dtype: torch.dtype) -> int:
    """Return the size of all packed weights in elements of `dtype`."""
    return sum(_length(shape, dtype, fp32) for shape, fp32 in _parts(sizes))


def pack_weights(
    weights: BlockWeights, dtype: torch.dtype, tiles: Tensor | None, x_TC: Tensor | None, eps: float, copy: bool,
    in_proj_tiles: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Pack a block's weights into one tensor for `PackedWeights`, and write tiled copies of out_proj and in_proj.

    Also return a list of xhat = x * rstd in `dtype`, rstd = 1 / sqrt(mean(x^2) + eps) of shape (T,) in fp32, and x. If
    `copy` is set, the last item is a copy of x, which the same kernel writes at little extra cost. If `x_TC` is None,
    all items are None.
    """
    C, D, _, R, K = sizes = weights.sizes()
    packed = weights.norm.new_empty(packed_size(sizes, dtype), dtype=dtype)
    views = PackedWeights.of(packed, sizes)
    T, (xhat_TC, rstd_T, copy_TC) = 0, (None, None, None)
    if x_TC is not None:
        T, (xhat_TC, rstd_T) = len(x_TC), empty_norm(x_TC, dtype)
        copy_TC = torch.empty_like(x_TC) if copy else None
    vector = 4 if C % 4 == D % 4 == 0 else 1
    macros = dict(INPUT=ELEMENT[dtype], PARAMETER=ELEMENT[weights.norm.dtype], VECTOR=vector, WIDTH=C, TAPS=K)
    packing = -(-((3 * C * D + 2 * sizes.padded_P * D) // vector + 2 * D * (sizes.padded_R + K + 1)) // 256)
    launches.launch(SOURCE, "pack_weights", macros, packing + -(-T // 8), 256, dict(
        norm=weights.norm, in_proj=weights.in_proj, out_proj=weights.out_proj, **by_direction("", weights.directions),
        packed_in=views.in_proj, packed_out=views.out_proj, tiles=tiles, in_proj_tiles=in_proj_tiles,
        packed_conv=views.conv,
        packed_conv_bias=views.conv_bias, packed_x=views.x_proj, packed_step=views.step_proj,
        packed_step_bias=views.step_bias, packed_skip=views.skip, channels=D, projections_=sizes.padded_P, rank_=R,
        padded_rank_=sizes.padded_R, x=x_TC, xhat=xhat_TC, rstd=rstd_T, copy=copy_TC, tokens=T, eps=eps,
        packing=packing,
    ))  # fmt: skip
    return packed, [xhat_TC, rstd_T, copy_TC if copy else x_TC]


def by_direction(prefix: str, directions: Sequence[Sequence[Tensor | None]]) -> dict:
    """Return both directions' weights except A_log as a dict from kernel parameter names, such as `conv_0`, to tensors.

    `prefix` is "d" for gradients.
    """
    return {f"{prefix}{name}_{g}": t for g, weights in enumerate(directions) for name, t in zip(WEIGHTS, weights)}


def reference_packed(weights: BlockWeights, dtype: torch.dtype) -> PackedWeights:
    """Return the packed weights as separate tensors. in_proj and out_proj keep their dtype, all others have `dtype`."""
    first, second = weights.directions
    conv, conv_bias, x_proj, step_proj, step_bias, skip = [
        torch.stack(pair).to(dtype) for pair in zip(first[:6], second[:6])
    ]
    R = step_proj.shape[2]
    x_proj = torch.cat([F.pad(x_proj[:, :R], (0, 0, 0, -R % 8)), x_proj[:, R:]], 1)
    projections = weights.in_proj * weights.norm, weights.out_proj.clone(), x_proj, F.pad(step_proj, (0, -R % 8))
    return PackedWeights(*projections, conv.squeeze(2), conv_bias, step_bias, skip)


def reference(
    weights: BlockWeights, dtype: torch.dtype, tiles: Tensor | None, x_TC: Tensor | None, eps: float, copy: bool,
    in_proj_tiles: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Reference implementation of `pack_weights` that does not write tiles."""
    packed = weights.norm.new_zeros(packed_size(weights.sizes(), dtype), dtype=dtype)
    for part, value in zip(PackedWeights.of(packed, weights.sizes()), reference_packed(weights, dtype)):
        part.copy_(value)
    return packed, [None] * 3 if x_TC is None else [*reference_norm(x_TC, eps, dtype), x_TC.clone()]
