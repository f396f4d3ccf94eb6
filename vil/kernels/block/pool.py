"""Row or column means of a pooled block's convolved tokens, which the recurrence scans instead of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from . import conv
from .lines import LINE_PARAMETERS, SEGMENT, Lines, cta_shape, in_order, line_means, widths

SOURCE = Source("block/pool", {
    "pool": dict(
        u=In("Element"), u_stride=I64, weights=In("float"), biases=In("float"), skip=In("float"),
        means=Out("Element"), skipped=Out("Element"), B=I64, D=I64, **LINE_PARAMETERS, lines_per_cta=I64,
    ),
})  # fmt: skip

VECTOR, THREADS = 2, 96  # maximum vector width in elements, and maximum threads per CTA
WARPS = {2: 24, 4: 18}  # resident warps per multiprocessor, by element size in bytes
START = 16  # estimated time before the first token of a CTA, in units of the time per token


def pool(
    u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, skip_2D: Tensor, lines: Lines
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return row or column means (2, B, S, D) of v = silu(conv(u)), and skip * v summed over both directions.

    The last tap of a filter reads the current token. Tokens of inputs and results are in memory order (row-major).
    """
    B, L, D = u_BLD.shape
    means_2BSD = u_BLD.new_empty(2, B, lines.S, D)
    skipped_BLD = u_BLD.new_empty(B, L, D)
    vector, piece = widths(VECTOR, u_BLD)
    groups, threads = cta_shape(D, vector, THREADS)
    ctas, taps = WARPS[u_BLD.element_size()] * 32 // threads, conv_2DK.shape[2]
    stretch = choose_stretch(B * groups, lines, ctas * hardware.multiprocessors(device_of(u_BLD)))
    macros = dict(
        INPUT=ELEMENT[u_BLD.dtype], VECTOR=vector, PIECE=piece, TAPS=taps, SEGMENT=SEGMENT, THREADS=threads, CTAS=ctas
    )
    launches.launch(SOURCE, "pool", macros, B * -(-lines.number // stretch) * groups, threads, dict(
        u=u_BLD, u_stride=u_BLD.stride(1), weights=conv_2DK, biases=conv_bias_2D, skip=skip_2D, means=means_2BSD,
        skipped=skipped_BLD, B=B, D=D, **lines.arguments(), lines_per_cta=stretch,
    ))  # fmt: skip
    return means_2BSD, skipped_BLD


def choose_stretch(images: int, lines: Lines, resident: int) -> int:
    """Return how many consecutive lines of an image a CTA should process if `resident` CTAs run at the same time."""

    def time(stretch: int) -> int:
        return -(-images * -(-lines.number // stretch) // resident) * (stretch * lines.length + START)

    return min(range(1, lines.number + 1), key=time)


def reference_v(u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, lines: Lines) -> Tensor:
    """Return v = silu(conv(u)) of both directions (2, B, L, D), with tokens row by row or column by column."""
    return conv.reference(in_order(u_BLD, lines), conv_2DK, conv_bias_2D, lines.L)


def reference(
    u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, skip_2D: Tensor, lines: Lines
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Reference implementation of `pool`."""
    v_2BLD = reference_v(u_BLD, conv_2DK, conv_bias_2D, lines)
    skipped_BLD = (skip_2D[:, None, None] * v_2BLD).sum(0)[:, lines.order().argsort().to(u_BLD.device)]
    return torch.stack([line_means(v_BLD, lines) for v_BLD in v_2BLD]), skipped_BLD
