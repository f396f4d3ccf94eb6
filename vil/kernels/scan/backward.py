"""Variants of the CUDA kernel backward.cu, which computes all gradients of the scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..cuda.elements import vector_width
from ..cuda.hardware import CTA_BYTES, MULTIPROCESSOR_BYTES, SCHEDULERS
from ..cuda.source import I64, In, Out, Source
from .chunks import CHUNK
from .kernel import Kernel, align, common_macros, token_parameters

SOURCE = Source("scan/backward", {
    "scan_backward": dict(
        **token_parameters("dy", "x", "step_logits", "k", "q"), A=In("float"), skip=In("float"),
        step_bias=In("float"), chunk_states=In("float"), final_gradients=In("float"), dx=Out("Element"),
        **token_parameters("dstep_logits", const=False), key_partials=Out("float"), channel_partials=Out("float"),
        directions=I64, B=I64, L=I64, D=I64, reverse=I64, segment_chunks=I64, key_vectors=I64,
    ),
    "reduce_partials": dict(
        key_partials=In("float", restrict=False), dk=Out("Element", restrict=False),
        dq=Out("Element", restrict=False), key_parts=I64, tokens=I64, channel_partials=In("float", restrict=False),
        dchannels=Out("float", restrict=False), dA=Out("float", restrict=False), rows=I64, channels=I64, columns=I64,
    ),
})  # fmt: skip


class Cta(NamedTuple):
    """Warps and shared memory per CTA of backward.cu, and the number of CTAs that share a multiprocessor."""

    warps: int
    shared_bytes: int
    resident: int


@dataclass(frozen=True)
class Backward:
    """Variant of the kernel backward.cu in which each lane processes up to `channels` channels with 4 states each.

    `cycles` and `start` are inputs of the cost model (heuristics.py).
    """

    channels: int
    cycles: tuple[int, ...]
    start: ClassVar[int] = 3000

    def lane_channels(self, N: int) -> int:
        return min(self.channels, max(1, N // 4))

    def tile(self, N: int) -> int:
        """Return the number of tokens per tile in shared memory, at least one per lane that shares a channel."""
        return max(8, N // 4)

    def cta(self, N: int, itemsize: int, channels: int) -> Cta:
        """Return the `Cta` if each lane processes `channels` channels. At most 4 warps share the shared memory."""
        groups, parts, tile, warps = 128 // N, N // 4, self.tile(N), 4
        row = groups * channels
        # the summands have the order of the fields of WarpMemory in backward_memory.cuh
        warp_bytes = (
            2 * 3 * align(tile * row * itemsize)
            + 2 * align(4 * row)  # skip, bias
            + 2 * 4 * tile * (row + 8)  # step_size, slope
            + 2 * tile * (parts * (4 * groups + 8) + 4)  # channel_sums
            + 4 * tile * (parts * (row + 8) + 8)  # state_sums
            + 4 * 4 * tile * N + align(8 * tile)  # dkeys, norm
        )  # fmt: skip
        keys_bytes = 4 * CHUNK * (2 * N + 1)
        while keys_bytes + warps * warp_bytes > CTA_BYTES:
            warps //= 2
        shared_bytes = keys_bytes + warps * warp_bytes
        resident = (3 if itemsize == 2 and N in (16, 32) else 2) * 4 // warps  # registers limit the resident CTAs
        return Cta(warps, shared_bytes, min(resident, MULTIPROCESSOR_BYTES // (shared_bytes + 1024)))

    def occupancy(self, N: int, itemsize: int) -> tuple[float, float]:
        """Return the number of channels per warp, and the number of resident warps per scheduler."""
        cta = self.cta(N, itemsize, self.lane_channels(N))
        return 128 * self.lane_channels(N) / N, cta.warps * cta.resident / SCHEDULERS

    def kernel(self, recurrence: str, dy: Tensor, x: Tensor, step_logits: Tensor, N: int) -> Kernel:
        channels = vector_width(self.lane_channels(N), dy, x, step_logits)
        row = 128 // N * channels
        warps, shared_bytes, resident = self.cta(N, x.element_size(), channels)
        macros = common_macros(recurrence, x, N) | dict(
            LANE_STATES=4, LANE_CHANNELS=channels, TILE=self.tile(N), WARPS=warps, STAGES=2, MIN_CTAS=resident,
            VECTOR=min(vector_width(16 // x.element_size(), dy, x, step_logits), row), CTA_BYTES=shared_bytes,
        )  # fmt: skip
        return Kernel(SOURCE, macros, -(-x.shape[-1] // (warps * row)), 32 * warps, shared_bytes)
