"""Assignment of a plan's temporary buffers to memory, given the buffers' lifetimes.

All buffers are allocated before the first step. Temporary buffers are parts of one allocation, in which buffers with
disjoint lifetimes share memory. A temporary buffer whose last use precedes the first use of a result uses the result's
memory instead, if the result is large enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 256  # alignment of buffers in bytes


class Lifetime(NamedTuple):
    """Size of a buffer in bytes, and the first and last step that use the buffer."""

    buffer: int
    size: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


class Place(NamedTuple):
    """Memory of a temporary buffer: a byte offset in a result, or in the common allocation if `result` is None."""

    result: int | None
    start: int


def assign(temporary: Sequence[Lifetime], results: Sequence[Lifetime]) -> tuple[dict[int, Place], int]:
    """Return the memory of each temporary buffer, and the bytes of the common allocation.

    Buffers are placed in order of decreasing size. Of buffers of equal size, the buffers that are used last are placed
    first. Each buffer is placed at the lowest offset that is free during the buffer's lifetime.
    """
    places: dict[int, Place] = {}
    placed: dict[int | None, list[tuple[int, Lifetime]]] = {None: [], **{r.buffer: [] for r in results}}
    for buffer in sorted(temporary, key=lambda b: (-rounded(b.size), -b.last)):
        hosts = [r for r in results if buffer.last < r.first and rounded(buffer.size) <= r.size]
        for host in sorted(hosts, key=lambda r: r.size):
            start = _lowest(buffer, placed[host.buffer])
            if start + rounded(buffer.size) <= host.size:
                places[buffer.buffer] = Place(host.buffer, start)
                break
        else:
            places[buffer.buffer] = Place(None, _lowest(buffer, placed[None]))
        result, start = places[buffer.buffer]
        placed[result].append((start, buffer))
    return places, max((start + rounded(b.size) for start, b in placed[None]), default=0)


def peak(temporary: Sequence[Lifetime], results: Sequence[Lifetime]) -> int:
    """Return the peak memory in bytes, if temporary buffers are freed after their last use and results are kept."""
    changes: list[tuple[float, int]] = []
    for buffer in temporary:
        changes += [(buffer.first, buffer.size), (buffer.last + 0.5, -buffer.size)]
    changes += [(result.first, result.size) for result in results]
    total = most = 0
    for _, change in sorted(changes):
        total += change
        most = max(most, total)
    return most


def rounded(size: int) -> int:
    return -(-max(1, size) // ALIGNMENT) * ALIGNMENT


def _lowest(buffer: Lifetime, placed: Sequence[tuple[int, Lifetime]]) -> int:
    """Return the lowest offset at which a buffer does not overlap with any placed buffer."""
    start = 0
    for other_start, other in sorted(placed):
        if other.overlaps(buffer) and other_start < start + rounded(buffer.size):
            start = max(start, other_start + rounded(other.size))
    return start
