"""Launches the CUDA kernels: their macros, blocks and memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..cuda import hardware
from ..cuda.compiler import launch
from ..cuda.elements import ELEMENT, common_power_of_two, vector_width
from ..cuda.plan import place, planned
from .chunks import CHUNK, chunk_state_count
from .heuristics import (
    SEGMENT_STATES,
    Backward,
    ForwardMma,
    ForwardSimt,
    SegmentGradientsMma,
    align,
    choose,
    segment_variant,
)  # fmt: skip

RECURRENCE = {"longhorn": "Longhorn", "selective": "SelectiveStateSpace"}


def scan_forward(
    recurrence: str, x_GBLD: Tensor, logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor, rates_GDN: Tensor | None,
    skip_GD: Tensor | None, bias_GD: Tensor | None, reverse: list[bool], keep: bool,
    plan: tuple[ForwardSimt | ForwardMma, int] | None = None, step_proj_GDR: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """y_GBLD, and the states that backward needs if `keep`: those between chunks of `CHUNK` tokens.

    `plan`, a variant and the chunks of a segment, overrides the cost model's. If `forward_plan` says so, the step
    (G, B, L, R) may stand in place of the logits, with the weights that project it to them.
    """
    x, logits, k, q = _rows(x_GBLD, logits_GBLD, k_GBLN, q_GBLN)
    (G, B, L, D), N, chunks = x.shape, k.shape[-1], -(-x.shape[2] // CHUNK)
    variant, segment_chunks = plan or _choose("forward", recurrence, x, N, vector_width(8, x, logits, k, q) == 8)
    segments = -(-chunks // segment_chunks)
    y = torch.empty(G, B, L, D, device=x.device, dtype=x.dtype)
    kept = (G, B, chunk_state_count(L), N, D) if keep else 0
    checkpoints, initial_states = torch.empty(kept, device=x.device, dtype=torch.float32), None
    if segments > 1:
        tensors = x, logits, k, q, rates_GDN, bias_GD
        initial_states = _between_segments(recurrence, tensors, reverse, segment_chunks, gradients=False)
    arguments = dict(
        **_tokens(x=x, logit=logits, k=k, q=q), rates=rates_GDN, skips=skip_GD, biases=bias_GD,
        initial_states=initial_states, y=y, checkpoints=checkpoints if keep else None, B=B, L=L, D=D,
        reverse=_mask(reverse), segment_chunks=segment_chunks, keep=keep,
    )  # fmt: skip
    if isinstance(variant, ForwardMma):
        rank = 0 if step_proj_GDR is None else step_proj_GDR.shape[2]
        file, (macros, ctas, shared) = "scan/forward_mma", _forward_mma(variant, recurrence, x, N, rank)
        arguments["step_projs"] = step_proj_GDR
    else:
        file, (macros, ctas, shared) = "scan/forward_simt", _simt(variant, recurrence, x, logits, N)
        arguments["key_vectors"] = vector_width(4, k, q) == 4
    launch(file, "scan_forward", macros, G * B * segments * ctas, 32 * variant.warps, arguments, shared)
    return [y, checkpoints]


def forward_plan(
    recurrence: str, x_GBLD: Tensor, N: int, R: int
) -> tuple[tuple[ForwardSimt | ForwardMma, int], bool]:  # fmt: skip
    """A plan of `forward` for whole rows such as x where the step (G, B, L, R) is known, and whether it takes that."""
    plan = _choose("forward", recurrence, x_GBLD, N, x_GBLD.shape[-1] % 8 == 0, step=R % 8 == 0)
    variant, segment_chunks = plan
    return plan, isinstance(variant, ForwardMma) and segment_chunks * CHUNK >= x_GBLD.shape[2] and R % 8 == 0


def scan_backward(
    recurrence: str, dy_GBLD: Tensor, x_GBLD: Tensor, logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor,
    rates_GDN: Tensor | None, skip_GD: Tensor | None, bias_GD: Tensor | None, checkpoints_GBSND: Tensor,
    reverse: list[bool], plan: tuple[Backward, int] | None = None, over_logits: bool = False,
) -> list[Tensor]:  # fmt: skip
    """dx, dlogits, dk and dq like their inputs; drates_GDN (empty without rates) and dskip and dbias as (G, 2, D).

    With `over_logits` dlogits is written over the logits.
    """
    dy, x, logits, k, q = _rows(dy_GBLD, x_GBLD, logits_GBLD, k_GBLN, q_GBLN)
    (G, B, L, D), N, chunks = x.shape, k.shape[-1], -(-x.shape[2] // CHUNK)
    variant, segment_chunks = plan or _choose("backward", recurrence, x, N)
    segments = -(-chunks // segment_chunks)
    final_gradients = None
    if segments > 1:
        tensors = dy, logits, k, q, rates_GDN, bias_GD
        final_gradients = _between_segments(recurrence, tensors, reverse, segment_chunks, gradients=True)
    macros, ctas, shared = _backward(variant, recurrence, dy, x, logits, N)
    new = functools.partial(torch.empty, device=x.device)
    dx = new(x.shape, dtype=x.dtype)
    dlogits = logits if over_logits else new(x.shape, dtype=x.dtype)
    dk, dq = new(k.shape, dtype=x.dtype), new(k.shape, dtype=x.dtype)
    dkeys = new(ctas, G, B, L, 2, N, dtype=torch.float32)
    dchannels = new(G, 2, D, dtype=torch.float32)
    drates = new((G, D, N) if rates_GDN is not None else 0, dtype=torch.float32)
    rows, columns, tokens = B * segments, dchannels.numel() + drates.numel(), G * B * L
    sums = new(rows, columns, dtype=torch.float32)
    launch("scan/backward", "scan_backward", macros, G * B * segments * ctas, 32 * macros["WARPS"], dict(
        **_tokens(dy=dy, x=x, logit=logits, k=k, q=q, dlogit=dlogits), rates=rates_GDN, skips=skip_GD, biases=bias_GD,
        checkpoints=checkpoints_GBSND, final_gradients=final_gradients, dx=dx, dkeys=dkeys, sums=sums, directions=G,
        B=B, L=L, D=D, reverse=_mask(reverse), segment_chunks=segment_chunks, key_vectors=vector_width(4, k, q) == 4,
    ), shared)  # fmt: skip
    launch("scan/backward", "reduce_partials", macros, -(-tokens * N // 2 // 256) + -(-columns // 32), 256, dict(
        dkeys=dkeys, dk=dk, dq=dq, key_parts=ctas, tokens=tokens, sums=sums, dchannels=dchannels, drates=drates,
        rows=rows, channels=dchannels.numel(), columns=columns,
    ))  # fmt: skip
    return [dx, dlogits, dk, dq, drates, dchannels]


forward, backward = planned()(scan_forward), planned()(scan_backward)


def _between_segments(recurrence, tensors, reverse, segment_chunks, *, gradients: bool) -> Tensor:
    """The states between segments (G, B, segments - 1, N, D); with `gradients`, their gradients instead.

    While it runs it takes twice as much again, and of SegmentGradientsMma 176 bytes for a token of each direction.
    """
    value, logits, k, q, rates, bias = tensors
    (G, B, L, D), N, segments = value.shape, k.shape[-1], -(-value.shape[2] // (segment_chunks * CHUNK))
    kind = "backward" if gradients else "forward"
    variant = segment_variant(kind, recurrence, N, value.element_size())
    ends, decays = torch.empty(2, G, B, segments - 1, N, D, device=value.device, dtype=torch.float32)
    between = torch.empty_like(ends)
    arguments = dict(
        biases=bias, ends=ends, decays=decays, B=B, L=L, D=D, reverse=_mask(reverse), segment_chunks=segment_chunks
    )
    macros, ctas, shared = _simt(SEGMENT_STATES[recurrence], recurrence, value, logits, N)
    macros["GRADIENTS"] = str(gradients).lower()
    if isinstance(variant, SegmentGradientsMma):
        mma, ctas, shared = _segment_gradients_mma(variant, recurrence, value, logits)
        tiles = G * B * (segments - 1) * -(-segment_chunks * CHUNK // mma["TILE"])
        factors = torch.empty(tiles, mma["FACTOR_BYTES"] // 4, device=value.device, dtype=torch.float32)
        launch("scan/segment_gradients_mma", "stage_factors", mma, -(-tiles // 2), 128, dict(
            **_tokens(k=k, q=q), factors=factors, count=tiles, B=B, L=L, reverse=_mask(reverse),
            boundaries=segments - 1, segment_tokens=segment_chunks * CHUNK,
        ))  # fmt: skip
        kernel = "scan/segment_gradients_mma", "segment_gradients", mma
        arguments |= dict(**_tokens(dy=value, logit=logits, q=q), factors=factors)
    else:
        kernel, key_vectors = ("scan/segment_states", "segment_states", macros), vector_width(4, k, q) == 4
        arguments |= dict(**_tokens(value=value, logit=logits, k=k, q=q), rates=rates, key_vectors=key_vectors)
    launch(*kernel, G * B * (segments - 1) * ctas, 32 * variant.warps, arguments, shared)
    arguments = dict(ends=ends, decays=decays, between=between, sequences=G * B, segments=segments, ND=N * D)
    launch("scan/segment_states", "pass_states", macros, -(-G * B * N * D // 128), 128, arguments)
    return between


def _simt(variant: ForwardSimt, recurrence: str, x: Tensor, logits: Tensor, N: int) -> tuple[dict, int, int]:
    """Macros of the kernels of simt_scan.cuh, the CTAs that cover the channels, and the shared memory of each."""
    states = min(variant.states, N)
    groups = 32 * states // N
    # a warp's row of channels is copied by at most 32 lanes
    vector = vector_width(16 // x.element_size(), x, logits)
    channels = min(common_power_of_two(variant.channels, x.shape[-1]), max(1, 32 * vector // groups))
    vector = min(vector, groups * channels)
    unroll, warps, stages = variant.unroll if N <= 16 else 4, variant.warps, 3
    tile = max(min(variant.tile, 1024 // N), unroll, 32 // groups)
    # wider inputs and longer keys take more registers, which fewer CTAs leave
    min_blocks = variant.ctas if x.element_size() * N <= 32 else variant.ctas * 2 // 3
    row = tile * groups * channels
    warp_bytes = (2 if variant.ahead else 1) * 4 * row + stages * 2 * align(row * x.element_size())
    block_bytes = 2 * 4 * tile * (2 * N + 1) + warps * warp_bytes
    macros = dict(
        _common(recurrence, x, N), LANE_STATES=states, LANE_CHANNELS=channels, TILE=tile, WARPS=warps,
        MIN_BLOCKS=min_blocks, UNROLL=unroll, AHEAD=int(variant.ahead), STAGES=stages, VECTOR=vector,
        BLOCK_BYTES=block_bytes,
    )  # fmt: skip
    return macros, -(-x.shape[-1] // (warps * groups * channels)), block_bytes


def _forward_mma(variant: ForwardMma, recurrence: str, x: Tensor, N: int, rank: int):
    """The same for forward_mma.cu."""
    shared = variant.block_bytes(rank)
    macros = dict(
        _common(recurrence, x, N), LANE_STATES=N // 4, LANE_CHANNELS=2, TILE=variant.tile, CONSUMERS=variant.consumers,
        PRODUCERS=len(variant.producers), ROLES="{" + ", ".join(map(str, variant.producers)) + "}",
        STAGES=variant.stages, VECTOR=8, RANK=rank, BLOCK_BYTES=shared,
    )  # fmt: skip
    return macros, -(-x.shape[-1] // (16 * variant.consumers)), shared


def _segment_gradients_mma(variant: SegmentGradientsMma, recurrence: str, dy: Tensor, logits: Tensor):
    """The same for segment_gradients_mma.cu."""
    N, tile, warps, warp_channels = 16, 24, variant.warps, 8 * variant.channels
    block_bytes = warps * warp_channels * (2 * 2 * tile + 4 * 33)
    macros = dict(
        _common(recurrence, dy, N), LANE_STATES=N // 4, LANE_CHANNELS=variant.channels, TILE=tile, WARPS=warps,
        MIN_BLOCKS=variant.ctas, VECTOR=vector_width(8, dy, logits), BLOCK_BYTES=block_bytes,
        FACTOR_BYTES=tile // 3 * (32 * N + 16),
    )  # fmt: skip
    return macros, -(-dy.shape[-1] // (warps * warp_channels)), block_bytes


def _backward(variant: Backward, recurrence: str, dy: Tensor, x: Tensor, logits: Tensor, N: int):
    """The same for backward.cu."""
    channels = vector_width(variant.lane_channels(N), dy, x, logits)
    row = 128 // N * channels
    vector = min(vector_width(16 // x.element_size(), dy, x, logits), row)
    warps, block_bytes, min_blocks = variant.block(N, x.element_size(), channels)
    macros = dict(
        _common(recurrence, x, N), LANE_STATES=4, LANE_CHANNELS=channels, TILE=variant.tile(N), WARPS=warps, STAGES=2,
        MIN_BLOCKS=min_blocks, BLOCK_BYTES=block_bytes, VECTOR=vector,
    )  # fmt: skip
    return macros, -(-x.shape[-1] // (warps * row)), block_bytes


def _common(recurrence: str, x: Tensor, N: int) -> dict:
    return dict(INPUT=ELEMENT[x.dtype], RECURRENCE=RECURRENCE[recurrence], STATES=N, CHUNK=CHUNK)


def _rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors as the kernels read them: last dimension contiguous, tokens fewer than 2^31 bytes apart."""
    return [
        t if t.stride(-1) == 1 and abs(t.stride(-2)) * t.element_size() < 2**31 else t.contiguous() for t in tensors
    ]


def _tokens(**tensors: Tensor) -> dict:
    """Arguments for parameters TOKENS(T, name)."""
    arguments = {}
    for name, t in tensors.items():
        arguments[f"{name}_data"] = t
        arguments |= zip((f"{name}_stride_G", f"{name}_stride_B", f"{name}_stride_L"), t.stride())
    return arguments


def _mask(reverse: list[bool]) -> int:
    return sum(1 << g for g, r in enumerate(reverse) if r)


def _choose(kind: str, recurrence: str, x_GBLD: Tensor, N: int, vectors: bool = False, step: bool = False):
    (G, B, L, D), device = x_GBLD.shape, place(x_GBLD)
    size, multiprocessors, shared = (
        x_GBLD.element_size(),
        hardware.multiprocessors(device),
        hardware.shared_bytes(device),
    )
    return choose(kind, recurrence, G * B, D, L, N, size, multiprocessors, vectors, shared, step)
