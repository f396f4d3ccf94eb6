"""CUDA backend of the scan, from tensors to kernel launches.

`heuristics.choose` selects the variant of a kernel and the segments of a sequence. Each kernel has its limits and
macros in a module:

| kernels | source and module | result |
| --- | --- | --- |
| scan_forward | forward_simt or forward_mma, .cu and .py | y, and the states between chunks |
| scan_backward, reduce_partials | backward.cu, backward.py | all gradients |
| segment_states, pass_states | segment_states.cu, segments.py | states between segments, or their gradients |
| stage_factors, segment_gradients | segment_gradients_mma.cu, segments.py | gradients between segments (tensor cores) |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cuda import hardware
from ..cuda.elements import vector_width
from ..cuda.plan import device_of, planned
from . import heuristics
from .backward import Backward
from .chunks import chunk_state_count
from .forward_mma import ForwardMma
from .heuristics import Schedule
from .kernel import mask, rows, tokens
from .segments import states_between_segments


def scan_forward(
    recurrence: str, x_GBLD: Tensor, step_logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor, A_GDN: Tensor | None,
    skip_GD: Tensor | None, step_bias_GD: Tensor | None, reverse: Sequence[bool], keep: bool,
    schedule: Schedule | None = None, step_proj_GDR: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return y (G, B, L, D) of G scan directions and, if `keep`, the states between chunks of tokens for backward.

    The states are (G, B, chunks - 1, N, D). `schedule` overrides the cost model's choice. If the schedule
    `projects_step`, the step (G, B, L, R) and the weights that project the step may replace the step logits.
    """
    x, step_logits, k, q = rows(x_GBLD, step_logits_GBLD, k_GBLN, q_GBLN)
    (G, B, L, D), N = x.shape, k.shape[-1]
    vectors = vector_width(8, x, step_logits, k, q) == 8
    variant, segment_chunks = schedule = schedule or _choose("forward", recurrence, x, N, vectors)
    segments = schedule.segments(L)
    y = x.new_empty(G, B, L, D)
    kept = (G, B, chunk_state_count(L), N, D) if keep else 0
    chunk_states, initial_states = x.new_empty(kept, dtype=torch.float32), None
    if segments > 1:
        read = x, step_logits, k, q, A_GDN, step_bias_GD
        initial_states = between_segments(recurrence, *read, reverse, segment_chunks, gradients=False)
    arguments = dict(
        **tokens(x=x, step_logits=step_logits, k=k, q=q), A=A_GDN, skip=skip_GD, step_bias=step_bias_GD,
        initial_states=initial_states, y=y, chunk_states=chunk_states if keep else None, B=B, L=L, D=D,
        reverse=mask(reverse), segment_chunks=segment_chunks, keep=keep,
    )  # fmt: skip
    if isinstance(variant, ForwardMma):
        kernel = variant.kernel(recurrence, x, N, 0 if step_proj_GDR is None else step_proj_GDR.shape[2])
        arguments["step_proj"] = step_proj_GDR
    else:
        assert not isinstance(variant, Backward)
        kernel = variant.kernel(recurrence, x, step_logits, N)
        arguments["key_vectors"] = vector_width(4, k, q) == 4
    kernel.launch("scan_forward", G * B * segments, **arguments)
    return [y, chunk_states]


def forward_schedule(recurrence: str, x_GBLD: Tensor, N: int, R: int) -> Schedule:
    """Choose the kernel variant and the segments of `scan_forward` for an input shaped like x.

    Some variants can compute the step logits from low-rank steps if the rank R is a multiple of 8.
    """
    return _choose("forward", recurrence, x_GBLD, N, x_GBLD.shape[-1] % 8 == 0, step=R % 8 == 0)


def scan_backward(
    recurrence: str, dy_GBLD: Tensor, x_GBLD: Tensor, step_logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor,
    A_GDN: Tensor | None, skip_GD: Tensor | None, step_bias_GD: Tensor | None, chunk_states_GBSND: Tensor,
    reverse: Sequence[bool], schedule: Schedule | None = None, overwrite_step_logits: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x, step_logits, k, q and A, and of skip and step_bias as one tensor (G, 2, D).

    Without A, the gradient of A is an empty tensor. With `overwrite_step_logits`, the gradient of the step logits
    overwrites the step logits.
    """
    dy, x, step_logits, k, q = rows(dy_GBLD, x_GBLD, step_logits_GBLD, k_GBLN, q_GBLN)
    (G, B, L, D), N = x.shape, k.shape[-1]
    variant, segment_chunks = schedule = schedule or _choose("backward", recurrence, x, N)
    segments, final_gradients = schedule.segments(L), None
    if segments > 1:
        read = dy, step_logits, k, q, A_GDN, step_bias_GD
        final_gradients = between_segments(recurrence, *read, reverse, segment_chunks, gradients=True)
    assert isinstance(variant, Backward)
    kernel = variant.kernel(recurrence, dy, x, step_logits, N)
    new = x.new_empty
    dx, dk, dq = new(x.shape), new(k.shape), new(k.shape)
    dstep_logits = step_logits if overwrite_step_logits else new(x.shape)
    dchannels = new(G, 2, D, dtype=torch.float32)
    dA = new((G, D, N) if A_GDN is not None else 0, dtype=torch.float32)
    # CTAs write partial sums: dk and dq over the CTA's channels, parameter gradients over the CTA's tokens
    segments_of_all, columns, tokens_of_all = B * segments, dchannels.numel() + dA.numel(), G * B * L
    key_partials = new(kernel.ctas, G, B, L, 2, N, dtype=torch.float32)
    channel_partials = new(segments_of_all, columns, dtype=torch.float32)
    kernel.launch(
        "scan_backward", G * B * segments, **tokens(dy=dy, x=x, step_logits=step_logits, k=k, q=q),
        **tokens(dstep_logits=dstep_logits), A=A_GDN, skip=skip_GD, step_bias=step_bias_GD,
        chunk_states=chunk_states_GBSND, final_gradients=final_gradients, dx=dx, key_partials=key_partials,
        channel_partials=channel_partials, directions=G, B=B, L=L, D=D, reverse=mask(reverse),
        segment_chunks=segment_chunks, key_vectors=vector_width(4, k, q) == 4,
    )  # fmt: skip
    kernel.launch_beside(
        "reduce_partials", -(-tokens_of_all * N // 2 // 256) + -(-columns // 32), 256, key_partials=key_partials,
        dk=dk, dq=dq, key_parts=kernel.ctas, tokens=tokens_of_all, channel_partials=channel_partials,
        dchannels=dchannels, dA=dA, rows=segments_of_all, channels=dchannels.numel(), columns=columns,
    )  # fmt: skip
    return [dx, dstep_logits, dk, dq, dA, dchannels]


forward, backward = planned()(scan_forward), planned()(scan_backward)


def between_segments(recurrence, value, step_logits, k, q, A, step_bias, reverse, segment_chunks, *, gradients: bool):
    """Run `states_between_segments` with the kernel variants for the recurrence, number of states and dtype."""
    kind = "backward" if gradients else "forward"
    variant = heuristics.segment_variant(kind, recurrence, k.shape[-1], value.element_size())
    read = value, step_logits, k, q, A, step_bias
    passing = heuristics.SEGMENT_STATES[recurrence]
    return states_between_segments(
        variant, passing, recurrence, *read, reverse, segment_chunks, gradients=gradients
    )  # fmt: skip


def _choose(
    kind: str, recurrence: str, x_GBLD: Tensor, N: int, vectors: bool = False, step: bool = False
) -> Schedule:  # fmt: skip
    (G, B, L, D), device = x_GBLD.shape, device_of(x_GBLD)
    gpu = hardware.multiprocessors(device), vectors, hardware.shared_bytes(device)
    return heuristics.choose(kind, recurrence, G * B, D, L, N, x_GBLD.element_size(), *gpu, step)
