"""Sums over lines of patches."""

from __future__ import annotations

from torch import Tensor

from ..cuda import compiler
from ..cuda.elements import ELEMENT, vector_width
from .lines import Lines, cta_shape


def sum_lines(e_BLD: Tensor, lines: Lines) -> Tensor:
    """Return the sums over lines (B, S, D) of tokens that are row-major in memory."""
    B, _, D = e_BLD.shape
    sums_BSD = e_BLD.new_empty(B, lines.S, D)
    vector = vector_width(16 // e_BLD.element_size(), e_BLD)
    groups, threads = cta_shape(D, vector)
    macros = dict(INPUT=ELEMENT[e_BLD.dtype], VECTOR=vector, THREADS=threads)
    arguments = dict(e=e_BLD, sums=sums_BSD, D=D, **lines.arguments())
    compiler.launch("block/sum_lines", "sum_lines", macros, B * lines.S * groups, threads, arguments)
    return sums_BSD


def reference(e_BLD: Tensor, lines: Lines) -> Tensor:
    """Reference implementation of `sum_lines`."""
    pooled = lines.pooled_in_memory().to(e_BLD.device)
    return e_BLD.new_zeros(e_BLD.shape[0], lines.S, e_BLD.shape[2]).index_add(1, pooled, e_BLD)
