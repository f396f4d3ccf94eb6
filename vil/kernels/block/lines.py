"""Rows or columns of the patch grid, whose means a pooled block scans instead of single patches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.elements import vector_width
from ..cuda.source import I64, Parameters

# kernel parameters that lines.cuh expects; `Lines.arguments` returns their values
LINE_PARAMETERS: Parameters = dict(count=I64, length=I64, next=I64, next_line=I64)
SEGMENT = 256  # number of tokens per table of memory indices in along_lines.cuh


class Lines(NamedTuple):
    """Number, length and orientation of the lines (rows or columns) of the patch grid.

    Each line is one pooled token. The class token is another pooled token, at index `number // 2`. Among all tokens,
    the class token has index `number * length // 2`, both in the order of lines and in row-major memory order.
    """

    number: int
    length: int
    columns: bool  # True for columns of the patch grid, False for rows

    @classmethod
    def of(cls, h: int, w: int, columns: bool) -> Lines:
        """Return the rows, or with `columns` the columns, of a grid of h x w patches."""
        return cls(w, h, True) if columns else cls(h, w, False)

    @property
    def S(self) -> int:
        """Number of tokens after pooling: one mean per row or column, and the class token."""
        return self.number + 1

    @property
    def class_token(self) -> int:
        """Index of the class token among the pooled tokens."""
        return self.number // 2

    @property
    def L(self) -> int:
        """Number of tokens before pooling: all patches and the class token."""
        return self.number * self.length + 1

    def arguments(self) -> dict[str, int]:
        """Return the values of the kernel parameters `LINE_PARAMETERS`."""
        next, next_line = (self.number, 1) if self.columns else (1, self.length)
        return dict(count=self.number, length=self.length, next=next, next_line=next_line)

    def order(self) -> Tensor:
        """Return row-major token indices in an order in which the patches of each row or column are consecutive."""
        patches = torch.arange(self.L - 1)
        if self.columns:
            patches = patches.view(self.length, self.number).t().flatten()
        center = (self.L - 1) // 2
        patches = patches + (patches >= center)
        return torch.cat([patches[:center], torch.tensor([center]), patches[center:]])

    def pooled(self) -> Tensor:
        """Return the index of each token's row or column mean, for tokens in the order that `order` returns."""
        lines = torch.arange(self.L - 1) // self.length
        lines, center = lines + (lines >= self.class_token), (self.L - 1) // 2
        return torch.cat([lines[:center], torch.tensor([self.class_token]), lines[center:]])

    def pooled_in_memory(self) -> Tensor:
        """Return the index of each token's row or column mean, for tokens in row-major order."""
        return self.pooled()[self.order().argsort()]


def cta_shape(D: int, vector: int, most: int = 192) -> tuple[int, int]:
    """Return the number of CTAs that share a token's channels, and the number of threads per CTA.

    The number of threads per CTA is a multiple of 32 and does not exceed `most`.
    """
    groups = -(-D // (vector * most))
    return groups, -(-D // (vector * groups * 32)) * 32


def widths(limit: int, u_BLD: Tensor, *others: Tensor) -> tuple[int, int]:
    """Return the number of adjacent channels per thread (at most `limit`), and the number per copy to shared memory."""
    vector = vector_width(limit, u_BLD, *others)
    return vector, min(vector_width(16 // u_BLD.element_size(), u_BLD, *others), 4 * vector)


def in_order(t_BLX: Tensor, lines: Lines) -> Tensor:
    """Reorder row-major tokens (B, L, X) so that the patches of each row or column are consecutive."""
    return t_BLX[:, lines.order().to(t_BLX.device)]


def line_means(v_BLD: Tensor, lines: Lines) -> Tensor:
    """Average each row or column of tokens that `in_order` has reordered, and return the means (B, S, D)."""
    pooled = lines.pooled().to(v_BLD.device)
    sums_BSD = v_BLD.new_zeros(v_BLD.shape[0], lines.S, v_BLD.shape[2]).index_add(1, pooled, v_BLD)
    return sums_BSD / pooled.bincount(minlength=lines.S)[:, None]
