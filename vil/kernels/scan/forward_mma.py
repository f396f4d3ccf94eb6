"""Variants of the CUDA kernel forward_mma.cu, Longhorn's forward scan of two tokens at a time on tensor cores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..cuda.hardware import SCHEDULERS
from ..cuda.source import I64, In, Out, Source
from .kernel import Kernel, common_macros, token_parameters

SOURCE = Source("scan/forward_mma", {
    "scan_forward": dict(
        **token_parameters("x", "step_logits", "k", "q"), A=In("float"), skip=In("float"), step_bias=In("float"),
        initial_states=In("float"), y=Out("Element"), chunk_states=Out("float"), B=I64, L=I64, D=I64, reverse=I64,
        segment_chunks=I64, keep=I64, step_proj=In("Element"),
    ),
})  # fmt: skip


def has_mma(recurrence: str, N: int, itemsize: int) -> bool:
    """Return whether the tensor-core kernels support a recurrence, number of states and element size."""
    return recurrence == "longhorn" and N == 16 and itemsize == 2


class ForwardMma(NamedTuple):
    """Variant of the kernel forward_mma.cu in which `consumers` warps run the recurrence for 16 channels each.

    The other warps prepare the inputs of the consumers. A multiprocessor runs one CTA.

    `producers` has the role of each other warp. Role 0 copies, role -1 prepares factors of states, and role n > 0
    prepares the factors of n units. A unit is 8 tokens of one consumer's channels, so each consumer needs `tile` / 8
    units.
    `cycles` and `start` are inputs of the cost model (heuristics.py).
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
        """Return the channels and the resident warps per scheduler, if a CTA counts as one warp per scheduler."""
        return 16 * self.consumers / SCHEDULERS, 1

    def shared_bytes(self, rank: int = 0) -> int:
        """Return the bytes of shared memory per CTA.

        With a rank, the kernel reads steps of this rank instead of step logits.
        """
        channels, pairs, states = 16 * self.consumers, self.tile // 2, 16
        inputs = self.tile * (channels + (rank or channels)) + (2 * self.tile + 4) * states
        state_factors = pairs * (6 * 32 + 8)
        channel_factors = self.consumers * (pairs * 3 * 32 + self.tile * 16)
        outputs = 2 * self.tile * channels
        return self.stages * 2 * inputs + 3 * 4 * state_factors + 2 * 4 * channel_factors + 3 * outputs

    def kernel(self, recurrence: str, x: Tensor, N: int, rank: int = 0) -> Kernel:
        shared_bytes = self.shared_bytes(rank)
        macros = common_macros(recurrence, x, N) | dict(
            LANE_STATES=N // 4, LANE_CHANNELS=2, TILE=self.tile, CONSUMERS=self.consumers,
            PRODUCERS=len(self.producers), ROLES="{" + ", ".join(map(str, self.producers)) + "}", STAGES=self.stages,
            VECTOR=8, RANK=rank, CTA_BYTES=shared_bytes,
        )  # fmt: skip
        return Kernel(SOURCE, macros, -(-x.shape[-1] // (16 * self.consumers)), 32 * self.warps, shared_bytes)
