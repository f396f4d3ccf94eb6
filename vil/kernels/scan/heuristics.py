"""Cost model that selects the variant of a kernel and the number of segments of a sequence.

A variant distributes channels and their states among the lanes of a warp. More channels and states per lane share the
cost of reading keys and of addressing, but result in fewer warps, which leave the GPU partly idle for a small batch.
Times were measured on an H200 in cycles: `cycles[w - 1]` is the time per token of w warps that share a scheduler, and
`start` is the time before the warps' first token. A scheduler runs at most as many warps at once as `cycles` has
numbers, and runs further warps in later waves. A CTA of `ForwardMma` counts as one warp per scheduler. A scan takes
this number of cycles:

    waves * (start + tokens * cycles[warps of a scheduler - 1])

Cutting sequences into segments that run in parallel multiplies the number of warps. Segments cost another pass over all
segments except one (`SEGMENT_STATES` or `SEGMENT_GRADIENTS_MMA`), more launches (`LAUNCHES`), and passing states from
one segment to the next (`PASSED`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..cuda.hardware import SCHEDULERS
from .backward import Backward
from .chunks import CHUNK
from .forward_mma import ForwardMma, has_mma
from .forward_simt import ForwardSimt
from .segments import SegmentGradientsMma, SegmentStates

LAUNCHES = 8000  # cost in cycles of the additional kernel launches if a sequence is split into segments
STEP_LOGITS = 8000  # cycles saved by the ForwardMma kernel, which also computes the matrix product for step logits
PASSED = 20 / 13  # cycles of a multiprocessor to pass a state between segments: 20 bytes at 13 bytes per cycle


class Schedule(NamedTuple):
    """Variant of a scan's kernel, and the number of chunks in each segment."""

    variant: ForwardSimt | ForwardMma | Backward
    segment_chunks: int

    def segments(self, L: int) -> int:
        """Return the number of segments of a sequence of L tokens."""
        return -(-L // (self.segment_chunks * CHUNK))

    def projects_step(self, L: int, R: int) -> bool:
        """Return whether the scan kernel can compute the step logits of L tokens from low-rank steps (rank R)."""
        return isinstance(self.variant, ForwardMma) and self.segments(L) == 1 and R % 8 == 0


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
# 3 instead of 6 consumers are for small inputs, and for GPUs with too little shared memory for 6
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
) -> Sequence[ForwardSimt | ForwardMma]:
    """Return the forward kernel variants that support a recurrence, number of states and dtype.

    Args:
        recurrence: "longhorn" or "selective".
        N: Number of states.
        itemsize: Bytes per input element.
        vectors: Whether one instruction can load 8 neighbouring elements of every row.
        shared_bytes: Maximum shared memory per CTA in bytes.
    """
    if not (has_mma(recurrence, N, itemsize) and vectors):
        return FORWARD_SIMT[recurrence]
    return FORWARD_SIMT[recurrence] + [v for v in FORWARD_MMA if v.shared_bytes() <= shared_bytes]


def segment_variant(kind: str, recurrence: str, N: int, itemsize: int) -> SegmentStates | SegmentGradientsMma:
    """Return the kernel variant that computes the states between segments or, for "backward", the states' gradients."""
    mma = kind == "backward" and has_mma(recurrence, N, itemsize)
    return SEGMENT_GRADIENTS_MMA if mma else SEGMENT_STATES[recurrence]


def backward_variants(recurrence: str, N: int) -> list[Backward]:
    # with N >= 64, tiles have 16 tokens and need more registers, so lanes can have at most 2 channels
    return [v for v in BACKWARD[recurrence] if N < 64 or v.channels <= 2]


def cycles(
    variant: ForwardSimt | ForwardMma | SegmentGradientsMma | Backward, channels: int, N: int, itemsize: int,
    tokens: int, multiprocessors: int, short: int = 0,
) -> float:  # fmt: skip
    """Estimate the cycles in which a kernel variant scans `tokens` tokens of `channels` channels.

    `channels` counts the channels of all directions, images and segments. `short` is the number of additional channels
    with so few tokens that no warp waits for the warps of these channels. Warps of the additional channels share
    schedulers with the warps that start at the same time.
    """
    warp_channels, resident_warps = variant.occupancy(N, itemsize)
    one_each = warp_channels * SCHEDULERS * multiprocessors  # number of channels that gives each scheduler one warp
    waves = math.ceil(channels / (one_each * resident_warps))
    # count an incomplete last wave as full, because its CTAs share the few multiprocessors that are already idle
    warps = min(math.ceil((channels + short) / one_each), math.ceil(resident_warps))
    return waves * (variant.start + tokens * variant.cycles[warps - 1])


@functools.lru_cache(maxsize=4096)
def choose(
    kind: str, recurrence: str, sequences: int, D: int, L: int, N: int, itemsize: int, multiprocessors: int,
    vectors: bool = True, shared_bytes: int = 227 * 1024, step: bool = False,
) -> Schedule:  # fmt: skip
    """Return the schedule that the cost model expects to be fastest.

    Args:
        kind: "forward" or "backward".
        recurrence: "longhorn" or "selective".
        sequences: Directions times batch.
        D, L, N: Numbers of channels, tokens and states.
        itemsize: Bytes per input element.
        multiprocessors: Number of the GPU's multiprocessors.
        vectors, shared_bytes: Arguments of `forward_variants`.
        step: Whether the caller can pass the step instead of the step logits.
    """
    chunks, channels = -(-L // CHUNK), sequences * D
    candidates: Sequence[ForwardSimt | ForwardMma | Backward]
    if kind == "forward":
        candidates = forward_variants(recurrence, N, itemsize, vectors, shared_bytes)
    else:
        candidates = backward_variants(recurrence, N)
    segment = segment_variant(kind, recurrence, N, itemsize)
    costs = {}
    # try at most 255 segment lengths
    for segment_chunks in range(chunks, 0, -max(1, chunks // 128)):
        segments = -(-chunks // segment_chunks)
        tokens = min(L, segment_chunks * CHUNK)
        long = max(1, -(-(L - tokens // 8) // tokens))  # number of segments, not counting a short last segment
        between = 0.0
        if segments > 1:
            passed = channels * N * (segments - 1) * PASSED / multiprocessors
            between = LAUNCHES + passed
            between += cycles(segment, channels * (segments - 1), N, itemsize, tokens, multiprocessors)
        for variant in candidates:
            short = channels * (segments - long)
            scan = cycles(variant, channels * long, N, itemsize, tokens, multiprocessors, short)
            saved = STEP_LOGITS if step and segments == 1 and isinstance(variant, ForwardMma) else 0
            costs[Schedule(variant, segment_chunks)] = between + scan - saved
    return min(costs, key=costs.__getitem__)
