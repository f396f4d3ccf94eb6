"""State passing for sequences that are split into segments, and variants of the CUDA kernels that compute states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..cuda.elements import vector_width
from ..cuda.source import I64, In, Out, Source
from .chunks import CHUNK
from .forward_simt import ForwardSimt, Lanes
from .kernel import Kernel, common_macros, mask, token_parameters, tokens

GRADIENTS_SOURCE = Source("scan/segment_gradients_mma", {
    "stage_factors": dict(
        **token_parameters("k", "q"), factors=Out("StateFactors"), count=I64, B=I64, L=I64, reverse=I64,
        boundaries=I64, segment_tokens=I64,
    ),
    "segment_gradients": dict(
        **token_parameters("dy", "step_logits", "q"), factors=In("StateFactors"), step_bias=In("float"),
        ends=Out("float"), decays=Out("float"), B=I64, L=I64, D=I64, reverse=I64, segment_chunks=I64,
    ),
})  # fmt: skip

STATES_SOURCE = Source("scan/segment_states", {
    "segment_states": dict(
        **token_parameters("value", "step_logits", "k", "q"), A=In("float"), step_bias=In("float"), ends=Out("float"),
        decays=Out("float"), B=I64, L=I64, D=I64, reverse=I64, segment_chunks=I64, key_vectors=I64,
    ),
    "pass_states": dict(
        ends=In("float"), decays=In("float"), between=Out("float"), sequences=I64, segments=I64, ND=I64,
    ),
})  # fmt: skip


class SegmentStates(ForwardSimt):
    """Variant of the kernel segment_states.cu, with channels and states per lane as in `ForwardSimt`."""


@dataclass(frozen=True)
class SegmentGradientsMma(Lanes):
    """Variant of the tensor-core kernel segment_gradients_mma.cu whose warps process 8 * `channels` channels."""

    cycles: tuple[int, ...]
    states: int = 4
    channels: int = 4
    warps: int = 2
    tile: ClassVar[int] = 24

    def kernel(self, recurrence: str, dy: Tensor, step_logits: Tensor) -> Kernel:
        N, warp_channels = 16, 8 * self.channels
        shared_bytes = self.warps * warp_channels * (2 * 2 * self.tile + 4 * 33)
        macros = common_macros(recurrence, dy, N) | dict(
            LANE_STATES=N // 4, LANE_CHANNELS=self.channels, TILE=self.tile, WARPS=self.warps, MIN_CTAS=self.resident,
            VECTOR=vector_width(8, dy, step_logits), CTA_BYTES=shared_bytes,
            FACTOR_BYTES=self.tile // 3 * (32 * N + 16),
        )  # fmt: skip
        ctas = -(-dy.shape[-1] // (self.warps * warp_channels))
        return Kernel(GRADIENTS_SOURCE, macros, ctas, 32 * self.warps, shared_bytes)


def states_between_segments(
    variant: SegmentStates | SegmentGradientsMma, passing: SegmentStates, recurrence: str, value: Tensor,
    step_logits: Tensor, k: Tensor, q: Tensor, A: Tensor | None, step_bias: Tensor | None, reverse: Sequence[bool],
    segment_chunks: int, *, gradients: bool,
) -> Tensor:  # fmt: skip
    """Return the states between the segments of each sequence or, with `gradients`, the gradients of these states.

    The result is (G, B, segments - 1, N, D).

    `variant` computes the states at the ends of segments, and `passing` is the variant of the kernel that joins these
    states. `value` is x or, with `gradients`, dy. The call temporarily allocates twice the memory of the result and,
    for SegmentGradientsMma, 176 bytes per token and direction.
    """
    (G, B, L, D), N, segments = value.shape, k.shape[-1], -(-value.shape[2] // (segment_chunks * CHUNK))
    sequences = G * B * (segments - 1)
    ends, decays = value.new_empty(2, G, B, segments - 1, N, D, dtype=torch.float32)
    between = torch.empty_like(ends)
    common = dict(
        step_bias=step_bias, ends=ends, decays=decays, B=B, L=L, D=D, reverse=mask(reverse),
        segment_chunks=segment_chunks,
    )  # fmt: skip
    simt = passing.kernel(
        recurrence, value, step_logits, N, STATES_SOURCE, GRADIENTS=str(gradients).lower()
    )  # fmt: skip
    if isinstance(variant, SegmentGradientsMma):
        kernel = variant.kernel(recurrence, value, step_logits)
        tiles = sequences * -(-segment_chunks * CHUNK // variant.tile)
        factors = value.new_empty(tiles, kernel.macros["FACTOR_BYTES"] // 4, dtype=torch.float32)
        kernel.launch_beside(
            "stage_factors", -(-tiles // 2), 128, **tokens(k=k, q=q), factors=factors, count=tiles, B=B, L=L,
            reverse=mask(reverse), boundaries=segments - 1, segment_tokens=segment_chunks * CHUNK,
        )  # fmt: skip
        of_tokens = tokens(dy=value, step_logits=step_logits, q=q)
        kernel.launch("segment_gradients", sequences, **of_tokens, factors=factors, **common)
    else:
        of_tokens = tokens(value=value, step_logits=step_logits, k=k, q=q)
        vectors = vector_width(4, k, q) == 4
        simt.launch("segment_states", sequences, **of_tokens, A=A, key_vectors=vectors, **common)
    simt.launch_beside(
        "pass_states", -(-G * B * N * D // 128), 128, ends=ends, decays=decays, between=between, sequences=G * B,
        segments=segments, ND=N * D,
    )  # fmt: skip
    return between
