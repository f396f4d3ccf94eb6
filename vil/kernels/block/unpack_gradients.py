"""Gradients of a block's weights from the gradients of the packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import launches
from ..cuda.elements import ELEMENT
from ..cuda.source import I64, In, Out, Source
from .pack_weights import by_direction, direction_parameters, reference_packed
from .reference import gradients as by_autograd
from .weights import BlockWeights, Sizes

SOURCE = Source("block/unpack_gradients", {
    "unpack_gradients": dict(
        norm=In("PARAMETER"), in_proj=In("PARAMETER"), dfolded=In("float"), dout_projs=In("float"),
        dfilters=In("float", restrict=False), dx_projs=In("float", restrict=False),
        dsteps=In("float", restrict=False), folded_parts=I64, out_parts=I64, filter_parts=I64, x_parts=I64,
        step_parts=I64, dskips=In("float", restrict=False), skip_parts=I64, next_part=I64, next_direction=I64,
        dstep_biases=In("float", restrict=False), bias_parts=I64, next_bias_part=I64, next_bias=I64,
        dnorm=Out("PARAMETER"), din_proj=Out("PARAMETER"), dout_proj=Out("PARAMETER"),
        **direction_parameters("d", Out("PARAMETER", restrict=False)), channels=I64, projections_=I64, rank_=I64,
        padded_rank_=I64,
    ),
})  # fmt: skip


def unpack_gradients(
    norm_C: Tensor, in_proj: Tensor, sizes: Sizes, dfolded: Tensor, dout_proj: Tensor, dfilters: Tensor,
    dx_proj: Tensor, dstep_proj: Tensor, dskips: Tensor, dstep_bias: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return one flat tensor with the gradients of all weights except A_log.

    The flat tensor contains the gradients in the order of `Sizes.shapes`.
    Gradients with a dimension `parts` are partial sums to be added, and their numbers of parts may differ.

    Args:
        norm_C, in_proj: Weights whose product is the packed in_proj.
        sizes: Sizes of the weights.
        dfolded: Gradient (parts, 2D, C) of the packed in_proj.
        dout_proj: Gradient (parts, C, D) of out_proj.
        dfilters: Gradients (parts, 2, taps + 1, D) of filters and biases, with the bias after the taps.
        dx_proj: Gradient (2, parts, padded R + 2N, D) of x_proj.
        dstep_proj: Gradient (2, parts, D, padded R) of step_proj.
        dskips: Gradient (parts, 2, D) of the skip weights.
        dstep_bias: Gradient (parts, 2, D) of the step bias.
        dtype: Dtype of the matrix products.
    """
    C, D, _, R, K = sizes
    flat = norm_C.new_empty(sizes.flat_size())
    dnorm, din_proj, dout, *ddirections = sizes.split(flat)
    vector = 4 if C % 4 == 0 else 1
    blocks = -(-C // 8) + -(-C * D // (256 * vector)) + -(-2 * D * (sizes.padded_P + sizes.padded_R + K + 3) // 256)
    macros = dict(INPUT=ELEMENT[dtype], PARAMETER=ELEMENT[norm_C.dtype], VECTOR=vector, WIDTH=C, TAPS=K)
    launches.launch(SOURCE, "unpack_gradients", macros, blocks, 256, dict(
        norm=norm_C, in_proj=in_proj, dfolded=dfolded, dout_projs=dout_proj, dfilters=dfilters,
        dx_projs=dx_proj, dsteps=dstep_proj, folded_parts=len(dfolded), out_parts=len(dout_proj),
        filter_parts=dfilters.shape[0], x_parts=dx_proj.shape[1], step_parts=dstep_proj.shape[1],
        dskips=dskips, skip_parts=dskips.shape[0], next_part=dskips.stride(0), next_direction=dskips.stride(1),
        dstep_biases=dstep_bias, bias_parts=dstep_bias.shape[0], next_bias_part=dstep_bias.stride(0),
        next_bias=dstep_bias.stride(1), dnorm=dnorm, din_proj=din_proj, dout_proj=dout,
        **by_direction("d", (ddirections[:6], ddirections[6:])), channels=D, projections_=sizes.padded_P,
        rank_=R, padded_rank_=sizes.padded_R,
    ))  # fmt: skip
    return flat


def reference(
    norm_C: Tensor, in_proj: Tensor, sizes: Sizes, dfolded: Tensor, dout_proj: Tensor, dfilters: Tensor,
    dx_proj: Tensor, dstep_proj: Tensor, dskips: Tensor, dstep_bias: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Reference implementation of `unpack_gradients`."""

    def packed_weights(norm_C, in_proj, out_proj, *directions):
        packed = reference_packed(BlockWeights.of([norm_C, in_proj, out_proj, *directions]), dtype)
        return torch.cat([t.flatten() for t in packed])

    dskip, dfilters, dstep_bias = dskips.sum(0), dfilters.sum(0), dstep_bias.sum(0)
    dpacked = (
        dfolded.sum(0), dout_proj.sum(0), dx_proj.sum(1), dstep_proj.sum(1), dfilters[:, :-1].mT, dfilters[:, -1],
        dstep_bias, dskip,
    )  # fmt: skip
    others = [torch.zeros(shape, dtype=dtype) for shape in sizes.shapes()[2:]]
    found = by_autograd(packed_weights, [norm_C, in_proj, *others], torch.cat([t.flatten() for t in dpacked]))
    return torch.cat([t.flatten() for t in found])
