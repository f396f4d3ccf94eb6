"""Which of the compiled variants runs, and into how many segments it cuts a sequence: a small cost model.

A variant is how the states of a channel are dealt to lanes. Many states and channels in a lane share the cost of
reading keys and of addressing, but leave fewer warps: too few for a small batch to keep the GPU busy. With `w` warps on
each of the GPU's schedulers a token takes a variant `max(alone, w * shared)` cycles, one of backward
`alone + (w - 1) * more`, as measured on an H200. As many warps as fit run at once, the others in waves after them.

Cutting sequences into segments that run in parallel multiplies the warps. It costs a pass of its own that scans each
segment from zero (`SUMMARY`), more launches (`LAUNCHES`), and what is passed between segments (`PASSED`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from .checkpoints import CHUNK

BLOCK_BYTES = 99 * 1024  # shared memory that a block may have on every GPU this is for
SHARED_BYTES = 228 * 1024  # that of an H200's multiprocessor, of which each block takes 1 KiB more than it asks for
SCHEDULERS = 4  # of a multiprocessor
LAUNCHES = 8000  # cycles
WAVE = 3000  # cycles before a wave's first token
PAIRS_WAVE = 19000  # the same of Pairs
PASSED = 20 / 13  # cycles of a multiprocessor for a state between segments: moved five times, at 13 bytes a cycle


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


class Quads(NamedTuple):
    """A variant of forward with tensor cores, for 16-bit inputs: quads.cu, where four lanes share a channel."""

    alone: int
    shared: int
    states: int = 4
    channels: int = 1
    stages: int = 4
    warps: int = 2
    min_blocks: int = 6


class Pairs(NamedTuple):
    """A variant of Longhorn's forward for 16-bit inputs with 16 states, two tokens at a time on tensor cores: pairs.cu.

    `roles` are the other warps' beside those that scan 16 channels each: 0 copies, -1 stages states, more are units.
    `alone` are cycles of a token of one block; a multiprocessor runs one after the other.
    """

    alone: int
    scanners: int
    roles: tuple[int, ...]
    tile: int = 16
    stages: int = 8

    @property
    def warps(self) -> int:
        return self.scanners + len(self.roles)

    def block_bytes(self, rank: int = 0) -> int:
        """Shared memory of a block that is given logits, or with a rank the step."""
        channels, pairs, states = 16 * self.scanners, self.tile // 2, 16
        inputs = self.tile * (channels + (rank or channels)) + (2 * self.tile + 4) * states
        factors = pairs * (6 * 32 + 8)
        staged = self.scanners * (pairs * 3 * 32 + self.tile * 16)
        return self.stages * 2 * inputs + 3 * 4 * factors + 2 * 4 * staged + 3 * 2 * self.tile * channels


class SummaryTriples(NamedTuple):
    """A variant of the summary of Longhorn's gradients for 16-bit inputs, three tokens at once: summary_triples.cu."""

    alone: int
    shared: int
    states: int = 4
    channels: int = 4
    warps: int = 2
    min_blocks: int = 6


class Backward(NamedTuple):
    """A variant of backward, whose lanes hold 4 states each."""

    channels: int
    tile: int
    alone: int
    more: int
    states: int = 4
    warps: int = 4
    min_blocks: int = 2
    stages: int = 2

    def lane_channels(self, N: int) -> int:
        return min(self.channels, max(1, N // 4))

    def block(self, N: int, itemsize: int, channels: int) -> tuple[int, int, int]:
        """A block's warps and bytes of shared memory, and how many blocks share a multiprocessor."""
        groups, quads, tile, warps = 128 // N, N // 4, self.tile, self.warps
        row = groups * channels
        warp_bytes = (
            self.stages * 3 * align(tile * row * itemsize)
            + 2 * align(4 * row) + 2 * 4 * tile * (row + 8)  # skip and bias; gate and slope
            + 2 * tile * (quads * (4 * groups + 8) + 4)  # sums over channels
            + 4 * tile * (quads * (row + 8) + 8)  # sums over states
            + 4 * 4 * tile * N + align(8 * tile)  # dk and dq of two tiles; norm
        )  # fmt: skip
        keys_bytes = 4 * CHUNK * (2 * N + 1)
        while keys_bytes + warps * warp_bytes > BLOCK_BYTES:
            warps //= 2
        block_bytes = keys_bytes + warps * warp_bytes
        blocks = (self.min_blocks if itemsize == 2 and N >= 16 else 2) * self.warps // warps
        return warps, block_bytes, min(blocks, SHARED_BYTES // (block_bytes + 1024))


def align(n: int) -> int:
    return -(-n // 16) * 16


FORWARD = {
    "longhorn": [Lanes(16, 4, 4, 12, 540, 455), Lanes(16, 2, 8, 12, 305, 255),
                 Lanes(4, 1, 32, 6, 69, 52, warps=2, ahead=True)],
    "selective": [Lanes(8, 2, 16, 8, 320, 220), Lanes(4, 2, 32, 8, 190, 128, unroll=8)],
}  # fmt: skip
# of 16-bit inputs with 16 states, or 32 of Longhorn; for more registers do not suffice
QUADS = {"longhorn": [Quads(65, 48)], "selective": [Quads(105, 64)]}
# the second for what the first leaves multiprocessors idle with, and for GPUs with less shared memory
PAIRS = [
    Pairs(87, 6, (2, 2, -1, -1, 2, 2, 0, 2, 2)),
    Pairs(52, 3, (2, -1, -1, 0, 2, 1, 1)),
]
SUMMARY = {"longhorn": Lanes(8, 2, 16, 8, 180, 130), "selective": Lanes(8, 2, 16, 8, 350, 167)}
# of 16-bit inputs with 16 states
SUMMARY_TRIPLES = SummaryTriples(130, 58)
BACKWARD = {
    "longhorn": [Backward(4, 8, 670, 365, min_blocks=3), Backward(2, 8, 465, 205, min_blocks=3)],
    "selective": [Backward(2, 8, 620, 298, min_blocks=3)],
}
# with 64 states a tile of 8 tokens would leave lanes without work
BACKWARD_64 = {name: [Backward(2, 16, 800, 400)] for name in BACKWARD}


def forward_variants(
    recurrence: str, N: int, itemsize: int, vectors: bool = True, shared_bytes: int = 227 * 1024
) -> list[Lanes | Quads | Pairs]:
    """`vectors`: whether 8 neighbours of every row can be moved as one; `shared_bytes`: what a block may have."""
    variants = list(FORWARD[recurrence])
    if itemsize == 2 and N in {"longhorn": (16, 32), "selective": (16,)}[recurrence]:
        variants += QUADS[recurrence]
    if itemsize == 2 and N == 16 and recurrence == "longhorn" and vectors:
        variants += [v for v in PAIRS if v.block_bytes() <= shared_bytes]
    return variants


def summary_variant(kind: str, recurrence: str, N: int, itemsize: int) -> Lanes | SummaryTriples:
    triples = kind == "backward" and recurrence == "longhorn" and N == 16 and itemsize == 2
    return SUMMARY_TRIPLES if triples else SUMMARY[recurrence]


def cycles(
    variant: Lanes | Quads | Pairs | SummaryTriples | Backward, channels: int, N: int, itemsize: int, tokens: int,
    multiprocessors: int, short: int = 0,
) -> float:  # fmt: skip
    """Estimated cycles for `tokens` tokens of `channels` independent channels (directions, batch, D and segments).

    `short` more have so few tokens that none waits for them, but share schedulers with warps that start beside them.
    """
    if isinstance(variant, Pairs):
        each = math.ceil(channels / (16 * variant.scanners * multiprocessors))  # blocks of a multiprocessor
        return each * (PAIRS_WAVE + tokens * variant.alone)
    of_lane, warps, blocks = variant.channels, variant.warps, variant.min_blocks
    if isinstance(variant, Backward):
        of_lane = variant.lane_channels(N)
        warps, _, blocks = variant.block(N, itemsize, of_lane)
    lanes = max(1, N // variant.states)  # of as many channels as a lane has
    one_each = 32 * of_lane / lanes * SCHEDULERS * multiprocessors  # channels that give every scheduler a warp
    at_once = blocks * warps / SCHEDULERS  # warps of a scheduler
    waves = math.ceil(channels / (one_each * at_once))
    # blocks of a last wave that is not full are where blocks end first, side by side on few multiprocessors
    each = min(math.ceil((channels + short) / one_each), math.ceil(at_once))
    if isinstance(variant, Backward):
        token = variant.alone + (each - 1) * variant.more
    else:
        token = max(variant.alone, each * variant.shared)
    return waves * (WAVE + tokens * token)


@functools.lru_cache(maxsize=4096)
def choose(
    kind: str, recurrence: str, sequences: int, D: int, L: int, N: int, itemsize: int, multiprocessors: int,
    vectors: bool = True, shared_bytes: int = 227 * 1024,
) -> tuple[Lanes | Quads | Pairs | Backward, int]:  # fmt: skip
    """The variant that the model expects to be fastest, and the chunks of a segment.

    Args:
        kind: "forward" or "backward".
        recurrence: "longhorn" or "selective".
        sequences: Directions times batch.
        D, L, N: Channels, tokens and states.
        itemsize: Bytes of an input's element.
        multiprocessors: Of the GPU.
        vectors, shared_bytes: As `forward_variants` takes them.
    """
    chunks = -(-L // CHUNK)
    if kind == "forward":
        candidates = forward_variants(recurrence, N, itemsize, vectors, shared_bytes)
    else:
        candidates = (BACKWARD if N < 64 else BACKWARD_64)[recurrence]
    summary = summary_variant(kind, recurrence, N, itemsize)
    best = None
    # a long sequence need not be tried in every way
    for segment_chunks in range(chunks, 0, -max(1, chunks // 128)):
        segments = -(-chunks // segment_chunks)
        tokens, channels = min(L, segment_chunks * CHUNK), sequences * D
        long = max(1, -(-(L - tokens // 8) // tokens))  # segments: the last may have few tokens
        between = 0.0
        if segments > 1:
            passed = channels * N * (segments - 1) * PASSED / multiprocessors
            between = LAUNCHES + passed
            between += cycles(summary, channels * (segments - 1), N, itemsize, tokens, multiprocessors)
        for variant in candidates:
            short = channels * (segments - long)
            cost = between + cycles(variant, channels * long, N, itemsize, tokens, multiprocessors, short)
            if best is None or cost < best[0]:
                best = cost, variant, segment_chunks
    return best[1:]
