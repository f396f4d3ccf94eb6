"""Gradients of the convolutions and skip connections of a pooled block, which scans row or column means."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from .lines import LINE_PARAMETERS, SEGMENT, Lines, cta_shape, in_order, line_means, widths
from .pool import reference_v
from .reference import gradients

SOURCE = Source("block/pooled_conv_backward", {
    "pooled_conv_backward": dict(
        u=In("Element"), u_stride=I64, dy=In("Element"), dmeans=In("Element"), weights=In("float"), biases=In("float"),
        skip=In("float"), du=Out("Element"), du_stride=I64, dfilters=Out("float"), dskips=Out("float"), B=I64, D=I64,
        **LINE_PARAMETERS, stretch=I64, parts=I64,
    ),
})  # fmt: skip

VECTOR, WARPS = 2, 12  # maximum vector width in elements, and number of resident warps per multiprocessor
START = 12  # estimated time before the first of several consecutive tokens, in units of the time per token


def pooled_conv_backward(
    u_BLD: Tensor, dy_BLD: Tensor, dmeans_2BSD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, skip_2D: Tensor,
    du_BLD: Tensor, lines: Lines,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write u's gradient to `du_BLD`, and return partial sums of the gradients of filters, biases and skip weights.

    The partial sums have shape (parts, 2, K + 1, D) for filters and biases, and (parts, 2, D) for skips. Index K of
    dimension K + 1 holds the biases' gradients. `dy_BLD` is the gradient of the output, equal for both directions, and
    `dmeans_2BSD` is the gradient of the recurrence's input.
    """
    (B, L, D), taps = u_BLD.shape, conv_2DK.shape[2]
    vector, piece = widths(VECTOR, u_BLD, dy_BLD, du_BLD)
    groups, threads = cta_shape(D, vector)
    ctas = WARPS * 32 // threads
    stretch, parts = stretch_and_parts(B, L, ctas * hardware.multiprocessors(device_of(u_BLD)) // groups)
    dfilters = u_BLD.new_empty(parts, 2, taps + 1, D, dtype=torch.float32)
    dskips = u_BLD.new_empty(parts, 2, D, dtype=torch.float32)
    macros = dict(
        INPUT=ELEMENT[u_BLD.dtype], VECTOR=vector, PIECE=piece, TAPS=taps, SEGMENT=SEGMENT, THREADS=threads, CTAS=ctas
    )
    launches.launch(SOURCE, "pooled_conv_backward", macros, parts * groups, threads, dict(
        u=u_BLD, u_stride=u_BLD.stride(1), dy=dy_BLD, dmeans=dmeans_2BSD, weights=conv_2DK, biases=conv_bias_2D,
        skip=skip_2D, du=du_BLD, du_stride=du_BLD.stride(1), dfilters=dfilters, dskips=dskips, B=B, D=D,
        **lines.arguments(), stretch=stretch, parts=parts,
    ))  # fmt: skip
    return dfilters, dskips


def stretch_and_parts(B: int, L: int, most: int) -> tuple[int, int]:
    """Return the number of consecutive tokens that a CTA processes at a time, and the number of CTAs for all tokens.

    The number of tokens is a multiple of 4. There are at most `most` CTAs, because `most` CTAs keep the GPU busy and
    each CTA writes one partial sum.
    """
    most = max(1, most)

    def time(stretch: int) -> int:
        return -(-B * -(-L // stretch) // most) * (stretch + START)

    stretch = min(range(8, SEGMENT + 1, 4), key=time)
    return stretch, min(B * -(-L // stretch), most)


def reference(
    u_BLD: Tensor, dy_BLD: Tensor, dmeans_2BSD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, skip_2D: Tensor,
    du_BLD: Tensor, lines: Lines,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Reference implementation of `pooled_conv_backward` that returns a single partial sum."""

    def read_and_skipped(u_BLD, conv_2DK, conv_bias_2D, skip_2D):
        v_2BLD = reference_v(u_BLD, conv_2DK, conv_bias_2D, lines)
        means = [line_means(v_BLD, lines) for v_BLD in v_2BLD]
        return torch.cat([torch.stack(means).flatten(), (skip_2D[:, None, None] * v_2BLD).sum(0).flatten()])

    dboth = torch.cat([dmeans_2BSD.flatten(), in_order(dy_BLD, lines).flatten()])
    found = gradients(read_and_skipped, [u_BLD, conv_2DK, conv_bias_2D, skip_2D], dboth)
    du_BLD.copy_(found[0])
    return torch.cat([found[1].mT, found[2][:, None]], 1)[None], found[3][None]
