"""Variants of the CUDA kernel forward_simt.cu, the forward scan without tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..cuda.elements import common_power_of_two, vector_width
from ..cuda.hardware import SCHEDULERS
from ..cuda.source import I64, In, Out, Source
from .kernel import Kernel, align, common_macros, token_parameters

SOURCE = Source("scan/forward_simt", {
    "scan_forward": dict(
        **token_parameters("x", "step_logits", "k", "q"), A=In("float"), skip=In("float"), step_bias=In("float"),
        initial_states=In("float"), y=Out("Element"), chunk_states=Out("float"), B=I64, L=I64, D=I64, reverse=I64,
        segment_chunks=I64, keep=I64, key_vectors=I64,
    ),
})  # fmt: skip


class Lanes:
    """Occupancy of a kernel variant whose lanes process `channels` neighbouring channels with `states` states each."""

    states: int
    channels: int
    cycles: tuple[int, ...]
    warps: int
    start: ClassVar[int] = 3000

    @property
    def resident(self) -> int:
        """Number of CTAs that share a multiprocessor, for 16-bit inputs and 16 states per channel."""
        return SCHEDULERS * len(self.cycles) // self.warps

    def occupancy(self, N: int, itemsize: int) -> tuple[float, float]:
        """Return the number of channels per warp, and the number of resident warps per scheduler."""
        return 32 * self.channels / max(1, N // self.states), len(self.cycles)


@dataclass(frozen=True)
class ForwardSimt(Lanes):
    """Variant of forward_simt.cu in which a lane processes `states` states of each of `channels` adjacent channels.

    `unroll` tokens are interleaved. If `ahead`, tokens are loaded before they are needed. For 16 states, a tile has
    `tile` tokens.
    `cycles` and `start` are inputs of the cost model (heuristics.py).
    """

    states: int
    channels: int
    tile: int
    cycles: tuple[int, ...]
    unroll: int = 4
    warps: int = 1
    ahead: bool = False

    def kernel(
        self, recurrence: str, x: Tensor, step_logits: Tensor, N: int, source: Source = SOURCE, **macros
    ) -> Kernel:  # fmt: skip
        """Return this variant's kernel in `source`, with macros for the dtype, shape and alignment of the tensors."""
        states = min(self.states, N)
        groups = 32 * states // N
        # limit a warp's channels so that 32 lanes can copy a token with one vector each
        vector = vector_width(16 // x.element_size(), x, step_logits)
        channels = min(common_power_of_two(self.channels, x.shape[-1]), max(1, 32 * vector // groups))
        vector = min(vector, groups * channels)
        unroll, stages = self.unroll if N <= 16 else 4, 3
        tile = max(min(self.tile, 1024 // N), unroll, 32 // groups)
        # more than 16 states, or 8 for fp32 inputs, need more registers, so fewer CTAs share a multiprocessor
        resident = self.resident if x.element_size() * N <= 32 else self.resident * 2 // 3
        row = tile * groups * channels
        warp_bytes = (2 if self.ahead else 1) * 4 * row + stages * 2 * align(row * x.element_size())
        shared_bytes = 2 * 4 * tile * (2 * N + 1) + self.warps * warp_bytes
        macros |= common_macros(recurrence, x, N) | dict(
            LANE_STATES=states, LANE_CHANNELS=channels, TILE=tile, WARPS=self.warps, MIN_CTAS=resident, UNROLL=unroll,
            AHEAD=int(self.ahead), STAGES=stages, VECTOR=vector, CTA_BYTES=shared_bytes,
        )  # fmt: skip
        ctas = -(-x.shape[-1] // (self.warps * groups * channels))
        return Kernel(source, macros, ctas, 32 * self.warps, shared_bytes)
