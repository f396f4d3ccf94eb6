"""Launches the CUDA kernels: which variant, how many blocks, which memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiler import launch

CHUNK = 64  # tokens between kept states, as in common.cuh
INPUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}
RECURRENCE = {"longhorn": "Longhorn", "selective": "SelectiveStateSpace"}


def _align(n: int) -> int:
    return -(-n // 16) * 16


def _vector(limit: int, *tensors: Tensor) -> int:
    """Neighbouring elements, at most `limit`, that one instruction can move in every row of every tensor."""
    while limit > 1 and any(
        t.data_ptr() % (limit * t.element_size()) or any(s % limit for s in (*t.stride()[:3], t.shape[-1]))
        for t in tensors
    ):
        limit //= 2
    return limit


def _tokens(t: Tensor) -> list:
    return [t, *t.stride()[:3]]


def _rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors with their last dimension contiguous and token strides of 32 bits, as the kernels read them."""
    return [t if t.stride(-1) == 1 and abs(t.stride(-2)) < 2**31 else t.contiguous() for t in tensors]


def _mask(reverse) -> int:
    return sum(1 << g for g, r in enumerate(reverse) if r)


def _lanes(recurrence, x, k, variant, *more) -> tuple[dict, int, int]:
    """Macros of the kernels in lanes.cuh, channels of a block and its shared memory."""
    lane_states, lane_channels, tile, warps, min_blocks, stages = variant
    N = k.shape[-1]
    lane_states = min(lane_states, N)
    lane_channels = _vector(lane_channels, *more)
    warp_channels = 32 * lane_states // N * lane_channels
    vector = _vector(min(16 // x.element_size(), warp_channels), x, *more[1:])
    macros = dict(
        INPUT=INPUT[x.dtype], RECURRENCE=RECURRENCE[recurrence], STATES=N, LANE_STATES=lane_states,
        LANE_CHANNELS=lane_channels, TILE=tile, WARPS=warps, MIN_BLOCKS=min_blocks, STAGES=stages, VECTOR=vector,
    )  # fmt: skip
    macros["WARP_BYTES"] = (
        _align((2 * tile * N + tile) * 4) + _align(tile * warp_channels * 4)
        + stages * 2 * _align(tile * warp_channels * x.element_size())
    )  # fmt: skip
    return macros, warps * warp_channels, macros["WARP_BYTES"] * warps


def summarize(recurrence, value, logits, k, q, rates, bias, reverse, segment_chunks, gradients, before, spacing, entries, variant):
    G, B, L, D = value.shape
    N = k.shape[-1]
    segments = -(-(-(-L // CHUNK)) // segment_chunks)
    ends = torch.empty(G, B, segments, N, D, device=value.device, dtype=torch.float32)
    decays = torch.empty_like(ends)
    before = ends if before is None else before
    macros, channels, shared = _lanes(recurrence, value, k, variant, value, logits)
    macros["GRADIENTS"] = str(gradients).lower()
    launch("summary", "scan_summary", macros, G * B * segments * -(-D // channels), 32 * macros["WARPS"], [
        *_tokens(value), *_tokens(logits), *_tokens(k), *_tokens(q), rates, bias, ends, decays,
        B, L, D, _mask(reverse), segment_chunks, _vector(4, k, q) == 4,
    ], shared)  # fmt: skip
    launch("summary", "scan_combine", macros, -(-G * B * N * D // 128), 128,
           [ends, decays, before, G * B, segments, N * D, spacing, entries], 0)  # fmt: skip
    return before


def forward(recurrence, x, logits, k, q, rates, skip, bias, reverse, keep, variant=None, segment_chunks=None, summary_variant=(8, 1, 16, 2, 8, 3)):
    x, logits, k, q = _rows(x, logits, k, q)
    G, B, L, D = x.shape
    N = k.shape[-1]
    y = torch.empty(G, B, L, D, device=x.device, dtype=x.dtype)
    chunks = -(-L // CHUNK)
    segment_chunks = segment_chunks or chunks
    segments = -(-chunks // segment_chunks)
    states = torch.empty((G, B, chunks, N, D) if keep or segments > 1 else 0, device=x.device, dtype=torch.float32)
    if segments > 1:
        summarize(recurrence, x, logits, k, q, rates, bias, reverse, segment_chunks, False, states, segment_chunks, chunks, summary_variant)
    macros, channels, shared = _lanes(recurrence, x, k, variant, y, x, logits)
    launch("forward", "scan_forward", macros, G * B * segments * -(-D // channels), 32 * macros["WARPS"], [
        *_tokens(x), *_tokens(logits), *_tokens(k), *_tokens(q), rates, skip, bias, y, states,
        B, L, D, _mask(reverse), segment_chunks, keep, _vector(4, k, q) == 4,
    ], shared)  # fmt: skip
    return y, states


def backward(recurrence, dy, x, logits, k, q, rates, skip, bias, states, reverse, variant=None, segment_chunks=None, summary_variant=(8, 1, 16, 2, 8, 3)):
    dy, x, logits, k, q = _rows(dy, x, logits, k, q)
    G, B, L, D = x.shape
    N = k.shape[-1]
    lane_channels, tile, warps, min_blocks = variant
    lane_channels = _vector(lane_channels, dy, x, logits)
    groups = 128 // N
    wc = groups * lane_channels
    warp_bytes = (
        2 * _align(wc * 4) + 4 * tile * wc * 4 + tile * N // 4 * (groups + 1) * 16 + tile * N // 4 * wc * 4
        + 4 * tile * N * 4 + _align(tile * 2)
    )  # fmt: skip
    block_bytes = _align((2 * CHUNK * N + CHUNK) * 4) + warps * _align(warp_bytes)
    blocks = -(-D // (warps * wc))
    chunks = -(-L // CHUNK)
    segment_chunks = segment_chunks or chunks
    segments = -(-chunks // segment_chunks)
    later = None
    if segments > 1:
        later = summarize(recurrence, dy, logits, k, q, rates, bias, reverse, segment_chunks, True, None, 1, segments, summary_variant)
    dx = torch.empty(G, B, L, D, device=x.device, dtype=x.dtype)
    dlogits = torch.empty_like(dx)
    dkeys = torch.empty(blocks, G, B, L, 2, N, device=x.device, dtype=torch.float32)
    dchannels = torch.empty(B * segments, G, 2, D, device=x.device, dtype=torch.float32)
    drates = torch.empty((B * segments, G, D, N) if rates is not None else 0, device=x.device, dtype=torch.float32)
    macros = dict(
        INPUT=INPUT[x.dtype], RECURRENCE=RECURRENCE[recurrence], STATES=N, LANE_STATES=4, LANE_CHANNELS=lane_channels,
        TILE=tile, WARPS=warps, MIN_BLOCKS=min_blocks, BLOCK_BYTES=block_bytes
    )  # fmt: skip
    launch("backward", "scan_backward", macros, G * B * segments * blocks, 32 * warps, [
        *_tokens(dy), *_tokens(x), *_tokens(logits), *_tokens(k), *_tokens(q), rates, skip, bias, states, later,
        dx, dlogits, dkeys, dchannels, drates, G, B, L, D, _mask(reverse), segment_chunks, _vector(4, k, q) == 4,
    ], block_bytes)  # fmt: skip
    return dx, dlogits, dkeys, dchannels, drates
