"""Sum of the partial sums of CTAs, each of which processes a slice of the channels."""

from __future__ import annotations

from torch import Tensor

from ..cuda import launches
from ..cuda.elements import ELEMENT
from ..cuda.source import I64, In, Out, Source

SOURCE = Source("block/add_slices", {
    "add_slices": dict(parts=In("float"), sums=Out("Element"), elements=I64),
})  # fmt: skip


def add_slices(parts: Tensor, sums: Tensor) -> None:
    """Add fp32 partial sums (slices, ...) over slices, and write the 16-bit result to `sums` (...).

    The last dimension is a multiple of 4.
    """
    macros = dict(INPUT=ELEMENT[sums.dtype], SLICES=len(parts))
    arguments = dict(parts=parts, sums=sums, elements=sums.numel())
    launches.launch(SOURCE, "add_slices", macros, -(-sums.numel() // 1024), 256, arguments)


def reference(parts: Tensor) -> Tensor:
    """Reference implementation of `add_slices` that returns the sums."""
    return parts.sum(0)
