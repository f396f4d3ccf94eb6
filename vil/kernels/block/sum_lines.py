"""Sums of tokens over rows or columns of the patch grid."""

from __future__ import annotations

from torch import Tensor

from ..cuda import launches
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.source import I64, In, Out, Source
from .lines import LINE_PARAMETERS, Lines, cta_shape

SOURCE = Source("block/sum_lines", {
    "sum_lines": dict(dy=In("Element"), sums=Out("Element"), D=I64, **LINE_PARAMETERS),
})  # fmt: skip


def sum_lines(dy_BLD: Tensor, lines: Lines) -> Tensor:
    """Sum row-major tokens (B, L, D) over each row or column of the patch grid, and return (B, S, D)."""
    B, _, D = dy_BLD.shape
    sums_BSD = dy_BLD.new_empty(B, lines.S, D)
    vector = vector_width(16 // dy_BLD.element_size(), dy_BLD)
    groups, threads = cta_shape(D, vector)
    macros = dict(INPUT=ELEMENT[dy_BLD.dtype], VECTOR=vector, THREADS=threads)
    arguments = dict(dy=dy_BLD, sums=sums_BSD, D=D, **lines.arguments())
    launches.launch(SOURCE, "sum_lines", macros, B * lines.S * groups, threads, arguments)
    return sums_BSD


def reference(dy_BLD: Tensor, lines: Lines) -> Tensor:
    """Reference implementation of `sum_lines`."""
    pooled = lines.pooled_in_memory().to(dy_BLD.device)
    return dy_BLD.new_zeros(dy_BLD.shape[0], lines.S, dy_BLD.shape[2]).index_add(1, pooled, dy_BLD)
