"""What the recurrence of a pooled block reads: the means of convolved tokens over lines of patches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import compiler
from ..cuda.elements import ELEMENT, vector_width
from . import conv
from .lines import Lines, cta_shape, in_order, line_means

VECTOR, WARPS = 2, 24  # of a multiprocessor


def pool(u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, lines: Lines) -> Tensor:
    """means_2BSD of silu(conv(u)), of tokens that are in memory row by row; the last tap is the token itself."""
    (B, _, D), S = u_BLD.shape, lines.S
    means_2BSD = torch.empty(2, B, S, D, device=u_BLD.device, dtype=u_BLD.dtype)
    vector = vector_width(VECTOR, u_BLD)
    groups, threads = cta_shape(D, vector)
    macros = dict(
        INPUT=ELEMENT[u_BLD.dtype], VECTOR=vector, TAPS=conv_2DK.shape[2], THREADS=threads, CTAS=WARPS * 32 // threads
    )
    compiler.launch("block/pool", "pool", macros, B * S * groups, threads, dict(
        u=u_BLD, u_stride=u_BLD.stride(1), weights=conv_2DK, biases=conv_bias_2D, means=means_2BSD, B=B, D=D,
        **lines.arguments(),
    ))  # fmt: skip
    return means_2BSD


def plain_v(u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, lines: Lines) -> Tensor:
    """v_2BLD of both directions, in the order of lines, as is u in memory."""
    return conv.plain(in_order(u_BLD, lines), conv_2DK, conv_bias_2D, lines.L)


def plain(u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, lines: Lines) -> Tensor:
    """The definition of `pool`."""
    return torch.stack([line_means(v_BLD, lines) for v_BLD in plain_v(u_BLD, conv_2DK, conv_bias_2D, lines)])
