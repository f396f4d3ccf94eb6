"""Which variant of a kernel runs, and into how many segments it cuts a sequence: a small cost model.

A variant says how channels and their states are dealt to the lanes of a warp. Many in a lane share the cost of reading
keys and of addressing, but leave fewer warps, too few for a small batch to keep the GPU busy. What a variant takes is
measured on an H200, in cycles: `cycles[w - 1]` for a token of w warps that share a scheduler, and `start` before their
first token. As many warps of a scheduler as there are numbers run at once, the others in waves after them. A scan takes

    waves * (start + tokens * cycles[warps of a scheduler - 1])

Cutting sequences into segments that run in parallel multiplies the warps. It costs a pass of its own over all segments
but one (`SEGMENT_STATES`), more launches (`LAUNCHES`), and what is passed from one segment to the next (`PASSED`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from .chunks import CHUNK

BLOCK_BYTES = 99 * 1024  # shared memory that a CTA may have on every GPU this is for
SHARED_BYTES = 228 * 1024  # that of an H200's multiprocessor, of which each CTA takes 1 KiB more than it asks for
SCHEDULERS = 4  # of a multiprocessor
LAUNCHES = 8000  # cycles
LOGITS = 8000  # cycles that their product takes, which ForwardMma does itself if it is given the step
PASSED = 20 / 13  # cycles of a multiprocessor for a state between segments: moved five times, at 13 bytes a cycle


class ForwardSimt(NamedTuple):
    """forward_simt.cu: a lane has `channels` neighbours, and `states` of the states of each."""

    states: int
    channels: int
    tile: int
    cycles: tuple[int, ...]
    unroll: int = 4
    warps: int = 1
    ahead: bool = False
    start = 3000

    @property
    def ctas(self) -> int:
        """How many CTAs of 16-bit inputs with 16 states share a multiprocessor."""
        return SCHEDULERS * len(self.cycles) // self.warps

    def occupancy(self, N: int, itemsize: int) -> tuple[float, float]:
        """Channels of a scheduler's warp, and how many such warps it runs at once."""
        return 32 * self.channels / max(1, N // self.states), len(self.cycles)


class SegmentStates(ForwardSimt):
    """segment_states.cu, whose lanes are those of forward_simt.cu."""


class ForwardMma(NamedTuple):
    """forward_mma.cu, Longhorn of 16-bit inputs with 16 states: 16 channels for each of the `consumers`.

    `producers` are the roles of the other warps: 0 copies, -1 prepares factors of states, n > 0 those of n units of 8
    tokens of a consumer's channels, of which each consumer has `tile` / 8. A multiprocessor runs one CTA.
    """

    consumers: int
    producers: tuple[int, ...]
    cycles: tuple[int, ...]
    start: int
    tile: int = 16
    stages: int = 8

    @property
    def warps(self) -> int:
        return self.consumers + len(self.producers)

    def occupancy(self, N: int, itemsize: int) -> tuple[float, float]:
        return 16 * self.consumers / SCHEDULERS, 1

    def block_bytes(self, rank: int = 0) -> int:
        """Shared memory of a CTA that is given logits, or with a rank the step."""
        channels, pairs, states = 16 * self.consumers, self.tile // 2, 16
        inputs = self.tile * (channels + (rank or channels)) + (2 * self.tile + 4) * states
        factors = pairs * (6 * 32 + 8)
        staged = self.consumers * (pairs * 3 * 32 + self.tile * 16)
        return self.stages * 2 * inputs + 3 * 4 * factors + 2 * 4 * staged + 3 * 2 * self.tile * channels


class SegmentGradientsMma(NamedTuple):
    """segment_gradients_mma.cu, Longhorn of 16-bit inputs with 16 states: 8 times `channels` a warp."""

    cycles: tuple[int, ...]
    states: int = 4
    channels: int = 4
    warps: int = 2
    start, ctas, occupancy = 3000, ForwardSimt.ctas, ForwardSimt.occupancy


class Backward(NamedTuple):
    """backward.cu: a lane has 4 states of each of its `channels`."""

    channels: int
    cycles: tuple[int, ...]
    start = 3000

    def lane_channels(self, N: int) -> int:
        return min(self.channels, max(1, N // 4))

    def tile(self, N: int) -> int:
        """Tokens, of which each of the N / 4 lanes that share a channel prepares at least one."""
        return max(8, N // 4)

    def block(self, N: int, itemsize: int, channels: int) -> tuple[int, int, int]:
        """A CTA's warps and bytes of shared memory, and how many CTAs share a multiprocessor."""
        groups, parts, tile, warps = 128 // N, N // 4, self.tile(N), 4
        row = groups * channels
        warp_bytes = (
            2 * 3 * align(tile * row * itemsize)
            + 2 * align(4 * row) + 2 * 4 * tile * (row + 8)  # skip and bias; step sizes and slopes
            + 2 * tile * (parts * (4 * groups + 8) + 4)  # sums over channels
            + 4 * tile * (parts * (row + 8) + 8)  # sums over states
            + 4 * 4 * tile * N + align(8 * tile)  # dk and dq of two tiles; norm
        )  # fmt: skip
        keys_bytes = 4 * CHUNK * (2 * N + 1)
        while keys_bytes + warps * warp_bytes > BLOCK_BYTES:
            warps //= 2
        block_bytes = keys_bytes + warps * warp_bytes
        ctas = (3 if itemsize == 2 and N in (16, 32) else 2) * 4 // warps  # as registers suffice
        return warps, block_bytes, min(ctas, SHARED_BYTES // (block_bytes + 1024))

    def occupancy(self, N: int, itemsize: int) -> tuple[float, float]:
        warps, _, ctas = self.block(N, itemsize, self.lane_channels(N))
        return 128 * self.lane_channels(N) / N, warps * ctas / SCHEDULERS


def align(n: int) -> int:
    return -(-n // 16) * 16


FORWARD_SIMT = {
    "longhorn": [
        ForwardSimt(16, 4, tile=4, cycles=(540, 910, 1365)),
        ForwardSimt(16, 2, tile=8, cycles=(305, 510, 765)),
        ForwardSimt(4, 1, tile=32, cycles=(69, 104, 156), warps=2, ahead=True),
    ],
    "selective": [
        ForwardSimt(8, 2, tile=16, cycles=(320, 440)),
        ForwardSimt(4, 2, tile=32, cycles=(190, 256), unroll=8),
    ],
}
# the second for what the first leaves multiprocessors idle with, and for GPUs with less shared memory
FORWARD_MMA = [
    ForwardMma(6, (2, 2, -1, -1, 2, 2, 0, 2, 2), cycles=(87,), start=19000),
    ForwardMma(3, (2, -1, -1, 0, 2, 1, 1), cycles=(52,), start=6500),
]
SEGMENT_STATES = {
    "longhorn": SegmentStates(8, 2, tile=16, cycles=(180, 260)),
    "selective": SegmentStates(8, 2, tile=16, cycles=(350, 350)),
}
SEGMENT_GRADIENTS_MMA = SegmentGradientsMma(cycles=(130, 130, 174))
BACKWARD = {
    "longhorn": [Backward(4, cycles=(670, 1035, 1400)), Backward(2, cycles=(465, 670, 875))],
    "selective": [Backward(2, cycles=(620, 918, 1216))],
}


def forward_variants(
    recurrence: str, N: int, itemsize: int, vectors: bool = True, shared_bytes: int = 227 * 1024
) -> list[ForwardSimt | ForwardMma]:
    """`vectors`: whether 8 neighbours of every row can be moved as one; `shared_bytes`: what a CTA may have."""
    if not (_has_mma(recurrence, N, itemsize) and vectors):
        return FORWARD_SIMT[recurrence]
    return FORWARD_SIMT[recurrence] + [v for v in FORWARD_MMA if v.block_bytes() <= shared_bytes]


def segment_variant(kind: str, recurrence: str, N: int, itemsize: int) -> SegmentStates | SegmentGradientsMma:
    """What finds the states between segments for `kind` "forward", or their gradients for "backward"."""
    mma = kind == "backward" and _has_mma(recurrence, N, itemsize)
    return SEGMENT_GRADIENTS_MMA if mma else SEGMENT_STATES[recurrence]


def backward_variants(recurrence: str, N: int) -> list[Backward]:
    return [v for v in BACKWARD[recurrence] if N < 64 or v.channels <= 2]  # tiles of 16 tokens take more registers


def _has_mma(recurrence: str, N: int, itemsize: int) -> bool:
    return recurrence == "longhorn" and N == 16 and itemsize == 2


def cycles(
    variant: ForwardSimt | ForwardMma | SegmentGradientsMma | Backward, channels: int, N: int, itemsize: int,
    tokens: int, multiprocessors: int, short: int = 0,
) -> float:  # fmt: skip
    """Estimated cycles for `tokens` tokens of `channels` independent channels (directions, batch, D and segments).

    `short` more have so few tokens that none waits for them, but share schedulers with warps that start beside them.
    """
    of_warp, at_once = variant.occupancy(N, itemsize)
    one_each = of_warp * SCHEDULERS * multiprocessors  # channels that give every scheduler a warp
    waves = math.ceil(channels / (one_each * at_once))
    # CTAs of a last wave that is not full are where CTAs end first, side by side on few multiprocessors
    warps = min(math.ceil((channels + short) / one_each), math.ceil(at_once))
    return waves * (variant.start + tokens * variant.cycles[warps - 1])


@functools.lru_cache(maxsize=4096)
def choose(
    kind: str, recurrence: str, sequences: int, D: int, L: int, N: int, itemsize: int, multiprocessors: int,
    vectors: bool = True, shared_bytes: int = 227 * 1024, step: bool = False,
) -> tuple[ForwardSimt | ForwardMma | Backward, int]:  # fmt: skip
    """The variant that the model expects to be fastest, and the chunks of a segment.

    Args:
        kind: "forward" or "backward".
        recurrence: "longhorn" or "selective".
        sequences: Directions times batch.
        D, L, N: Channels, tokens and states.
        itemsize: Bytes of an input's element.
        multiprocessors: Of the GPU.
        vectors, shared_bytes: As `forward_variants` takes them.
        step: Whether the step may stand in place of the logits.
    """
    chunks, channels = -(-L // CHUNK), sequences * D
    if kind == "forward":
        candidates = forward_variants(recurrence, N, itemsize, vectors, shared_bytes)
    else:
        candidates = backward_variants(recurrence, N)
    segment = segment_variant(kind, recurrence, N, itemsize)
    costs = {}
    # a long sequence need not be tried in every way
    for segment_chunks in range(chunks, 0, -max(1, chunks // 128)):
        segments = -(-chunks // segment_chunks)
        tokens = min(L, segment_chunks * CHUNK)
        long = max(1, -(-(L - tokens // 8) // tokens))  # segments: the last may have few tokens
        between = 0.0
        if segments > 1:
            passed = channels * N * (segments - 1) * PASSED / multiprocessors
            between = LAUNCHES + passed
            between += cycles(segment, channels * (segments - 1), N, itemsize, tokens, multiprocessors)
        for variant in candidates:
            short = channels * (segments - long)
            scan = cycles(variant, channels * long, N, itemsize, tokens, multiprocessors, short)
            saved = LOGITS if step and segments == 1 and isinstance(variant, ForwardMma) else 0
            costs[variant, segment_chunks] = between + scan - saved
    return min(costs, key=costs.get)
