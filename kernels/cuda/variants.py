"""Which of the compiled variants runs, and into how many segments it cuts a sequence: a small cost model.

A variant is how the states of a channel are dealt to lanes. Many states and channels in a lane share the cost of
reading keys and of addressing, but leave fewer warps: too few for a small batch to keep the GPU busy. With `w` warps on
each of the GPU's schedulers a token takes a variant `max(alone, w * shared)` cycles, both measured on an H200.

Cutting sequences into segments that run in parallel multiplies the warps. It costs a pass of its own that scans each
segment from zero (`SUMMARY`), and two more launches (`LAUNCHES`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

CHUNK = 64  # tokens between kept states, as in common.cuh; a segment is some of these
SCHEDULERS = 4  # of a multiprocessor
LAUNCHES = 8000  # cycles


class Lanes(NamedTuple):
    """A variant of forward and of the summary: lanes.cuh says what the numbers are."""

    states: int
    channels: int
    tile: int
    min_blocks: int
    alone: int
    shared: int
    unroll: int = 4
    stages: int = 3
    warps: int = 1
    ahead: bool = False


class Backward(NamedTuple):
    """A variant of backward, whose lanes hold 4 states each."""

    channels: int
    tile: int
    alone: int
    shared: int
    states: int = 4
    warps: int = 4
    min_blocks: int = 2
    stages: int = 1


FORWARD = {
    "longhorn": [Lanes(16, 4, 4, 12, 500, 475), Lanes(16, 2, 8, 12, 300, 260),
                 Lanes(4, 1, 32, 6, 70, 52, warps=2, ahead=True)],
    "selective": [Lanes(8, 2, 16, 8, 320, 220), Lanes(4, 2, 32, 8, 190, 150, unroll=8)],
}  # fmt: skip
SUMMARY = {"longhorn": Lanes(8, 2, 16, 8, 240, 200), "selective": Lanes(8, 2, 16, 8, 320, 280)}
BACKWARD = {
    "longhorn": [Backward(4, 8, 750, 540, min_blocks=3), Backward(2, 8, 500, 330, stages=2)],
    "selective": [Backward(2, 8, 800, 410, min_blocks=3, stages=2)],
}
# with 64 states a tile of 8 tokens would leave lanes without work
BACKWARD_64 = {name: [Backward(2, 16, 800, 600, stages=2)] for name in BACKWARD}


def cycles(variant: Lanes | Backward, channels: int, state_size: int, tokens: int, multiprocessors: int) -> float:
    """Estimated cycles for `tokens` tokens of `channels` independent channels (directions, batch, D and segments)."""
    warps = channels * max(1, state_size // variant.states) / (32 * variant.channels)
    rounds = -(-warps // (SCHEDULERS * multiprocessors))
    return tokens * max(variant.alone, rounds * variant.shared)


@functools.lru_cache(maxsize=4096)
def choose(
    kind: str, recurrence: str, sequences: int, D: int, L: int, N: int, multiprocessors: int
) -> tuple[Lanes | Backward, int]:
    """The variant that the model expects to be fastest, and the chunks of a segment.

    Args:
        kind: "forward" or "backward".
        recurrence: "longhorn" or "selective".
        sequences: Directions times batch.
        D, L, N: Channels, tokens and states.
        multiprocessors: Of the GPU.
    """
    chunks = -(-L // CHUNK)
    table = FORWARD if kind == "forward" else BACKWARD if N < 64 else BACKWARD_64
    best = None
    for segment_chunks in sorted({chunks, *(2**i for i in range(6) if 2**i < chunks)}, reverse=True):
        segments = -(-chunks // segment_chunks)
        tokens = min(L, segment_chunks * CHUNK)
        for variant in table[recurrence]:
            cost = cycles(variant, sequences * segments * D, N, tokens, multiprocessors)
            if segments > 1:
                cost += LAUNCHES + cycles(SUMMARY[recurrence], sequences * segments * D, N, tokens, multiprocessors)
            if best is None or cost < best[0]:
                best = cost, variant, segment_chunks
    return best[1:]
