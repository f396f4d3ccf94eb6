"""Triton backend of the scan, for any GPU that Triton supports. `TRITON_INTERPRET=1` runs the kernels on a CPU.

The kernels have run on H200s only, and are experimental on all other GPUs (docs/hardware.md).

One program scans BLOCK_D channels of a segment of a sequence, with the states as a tensor in registers. A segment is
the whole sequence, unless whole sequences would leave most of a large GPU idle. In that case, sequences are cut into
segments that run in parallel, and a pass over each segment from a zero state computes the states between segments
(state passing). The recurrences are those of `reference.py`; docs/kernels derives their gradients.

Tensors have three dimensions, (H, N / H, BLOCK_D). In a tensor's suffix, the first two dimensions are written N, or 1
if they have size 1 or equal values. H threads share a channel's states. Backward sums over states and over channels,
and is fastest with 4 channels per thread, 16 bytes in fp32; forward, which sums only over states, has H = 1. Each of a
channel's H threads loads the channel's values, such as x, so that all tensors have the same layout and no value has to
move between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import CHUNK, chunk_state_count

PROGRAMS = 1024  # maximum number of backward program instances, each of which needs memory for a chunk's states
FUSE = True  # value of enable_fp_fusion, set explicitly so that results do not depend on Triton's default
CHANNELS = 2**16  # number of channels, counted over all directions and images, that fills a large GPU


@triton.jit
def _step_size(step_logit, kk, LONGHORN: tl.constexpr):
    """Compute Longhorn's step size 1 / (1 + exp(-step_logit) + k.k) or Mamba's step size softplus(step_logit)."""
    if LONGHORN:
        step = 1 / (1 + kk + tl.exp(-step_logit))
    else:
        # log(1 + z) = 2 atanh(z / (2 + z)), whose series is precise for small z, unlike the logarithm of 1 + z
        z = tl.exp(-tl.abs(step_logit))
        s = z / (2 + z)
        s2 = s * s
        series = 2 * s * (1 + s2 * (1 / 3 + s2 * (1 / 5 + s2 * (1 / 7 + s2 * (1 / 9 + s2 * (1 / 11 + s2 / 13))))))
        step = tl.maximum(step_logit, 0) + series
    return step


@triton.jit
def _over_states(v_ND):
    return tl.sum(tl.sum(v_ND, axis=1, keep_dims=True), axis=0, keep_dims=True)


@triton.jit
def _state_numbers(N: tl.constexpr, H: tl.constexpr):
    """Return the indices of a channel's N states in the shape (H, N / H, 1), because H threads share the states."""
    return tl.arange(0, N // H)[None, :, None] * H + tl.arange(0, H)[:, None, None]


@triton.jit
def _decay(step_1D, k_N1, A_ND, LONGHORN: tl.constexpr):
    """Compute the decay factor by which a token multiplies each element of the state."""
    return 1 - step_1D * k_N1 * k_N1 if LONGHORN else tl.exp(A_ND * step_1D)


@triton.jit
def _update(S_ND, x_1D, step_1D, k_N1, A_ND, LONGHORN: tl.constexpr):
    """Update the state by one token of the recurrence."""
    if LONGHORN:
        S_ND += step_1D * k_N1 * (x_1D - k_N1 * S_ND)
    else:
        S_ND = _decay(step_1D, k_N1, A_ND, LONGHORN) * S_ND + step_1D * x_1D * k_N1
    return S_ND


@triton.jit
def _channel_numbers(program, D, H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the indices of a program instance's channels, repeated for each thread that shares a channel."""
    d_D = (program % tl.cdiv(D, BLOCK_D)) * BLOCK_D + tl.arange(0, BLOCK_D)
    return tl.broadcast_to(d_D[None, None, :], (H, 1, BLOCK_D))


@triton.jit
def _locate(
    program, B, L, D, segment_chunks, reverse, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, SEGMENTED: tl.constexpr
):  # fmt: skip
    """Return the segment and the sequence that a program instance processes, and the positions of the segment's tokens.

    The results are the segment, the sequence, the row of the sequence's first token read, the stride between rows, and
    the begin and end of the segment. Segments of `segment_chunks` chunks are numbered across all sequences.
    """
    blocks, segments = tl.cdiv(D, BLOCK_D), tl.cdiv(tl.cdiv(L, CHUNK), segment_chunks) if SEGMENTED else 1
    segment = (program // blocks).to(tl.int64)
    sequence = segment // segments
    backwards = (reverse >> (sequence // B)) & 1
    first = sequence * L + tl.where(backwards == 1, L - 1, 0)
    begin = (segment % segments).to(tl.int32) * segment_chunks * CHUNK
    end = tl.minimum(begin + segment_chunks * CHUNK, L) if SEGMENTED else L
    return segment, sequence, first, tl.where(backwards == 1, -1, 1), begin, end


@triton.jit
def _load_parameter(p, sequence, B, D, d_1D, HAVE: tl.constexpr):
    """Load a per-channel parameter, or return zeros unless HAVE."""
    v_1D = tl.zeros_like(d_1D).to(tl.float32)
    if HAVE:
        v_1D = tl.load(p + (sequence // B) * D + d_1D, mask=d_1D < D, other=0)
    return v_1D


@triton.jit
def _load_A(A, sequence, B, D, d_1D, n_N1, N: tl.constexpr, LONGHORN: tl.constexpr):
    A_ND = tl.zeros_like(n_N1 * d_1D).to(tl.float32)
    if not LONGHORN:
        A_ND = tl.load(A + ((sequence // B) * D + d_1D) * N + n_N1, mask=d_1D < D, other=0)
    return A_ND


@triton.jit
def _initial(initial_states, segment, D, d_1D, n_N1, N: tl.constexpr, SEGMENTED: tl.constexpr):
    """Load the initial state (or gradient) of a segment, which is zero if the segment is the whole sequence."""
    S_ND = tl.zeros_like(n_N1 * d_1D).to(tl.float32)
    if SEGMENTED:
        S_ND = tl.load(initial_states + (segment * N + n_N1) * D + d_1D, mask=d_1D < D, other=0)
    return S_ND


@triton.jit
def _load_token(x, step_logits, k, q, row, D, d_1D, n_N1, step_bias_1D, N: tl.constexpr):
    x_1D = tl.load(x + row * D + d_1D, mask=d_1D < D, other=0).to(tl.float32)
    step_logit_1D = tl.load(step_logits + row * D + d_1D, mask=d_1D < D, other=0).to(tl.float32) + step_bias_1D
    k_N1 = tl.load(k + row * N + n_N1).to(tl.float32)
    return x_1D, step_logit_1D, k_N1, tl.load(q + row * N + n_N1).to(tl.float32)


@triton.jit
def _segment_states_kernel(
    values, step_logits, k, q, A, step_bias, ends, decays, B, L, D, segment_chunks, reverse,
    N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, LONGHORN: tl.constexpr, STEP_BIAS: tl.constexpr,
    GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Scan each segment starting from zeros, and store the segment's final state and product of decays.

    With GRADIENTS, the values are dy, and G = dL/dS runs from the last token to the first: G = decay (G + q dy).
    """
    program = tl.program_id(0)
    segment, sequence, first, stride, begin, end = _locate(
        program, B, L, D, segment_chunks, reverse, BLOCK_D, CHUNK, True
    )  # fmt: skip
    row = first + stride * begin
    if GRADIENTS:
        row += stride * (end - 1 - begin)
        stride = -stride
    d_1D, n_N1 = _channel_numbers(program, D, 1, BLOCK_D), _state_numbers(N, 1)
    A_ND = _load_A(A, sequence, B, D, d_1D, n_N1, N, LONGHORN)
    step_bias_1D = _load_parameter(step_bias, sequence, B, D, d_1D, STEP_BIAS)
    S_ND = tl.zeros((1, N, BLOCK_D), tl.float32)
    product_ND = S_ND + 1
    value_1D, step_logit_1D, k_N1, q_N1 = _load_token(values, step_logits, k, q, row, D, d_1D, n_N1, step_bias_1D, N)
    for t in range(begin, end):
        row += tl.where(t + 1 < end, stride, 0)
        following = _load_token(values, step_logits, k, q, row, D, d_1D, n_N1, step_bias_1D, N)
        step_1D = _step_size(step_logit_1D, _over_states(k_N1 * k_N1), LONGHORN)
        decay_ND = _decay(step_1D, k_N1, A_ND, LONGHORN)
        if GRADIENTS:
            S_ND = decay_ND * (S_ND + q_N1 * value_1D)
        else:
            S_ND = _update(S_ND, value_1D, step_1D, k_N1, A_ND, LONGHORN)
        product_ND *= decay_ND
        value_1D, step_logit_1D, k_N1, q_N1 = following
    own_ND = (segment * N + n_N1) * D + d_1D
    tl.store(ends + own_ND, S_ND, mask=d_1D < D)
    tl.store(decays + own_ND, product_ND, mask=d_1D < D)


@triton.jit
def _pass_states_kernel(ends, decays, segments, states, BLOCK: tl.constexpr, GRADIENTS: tl.constexpr):
    """Replace the segments' own final states by the state before each segment, in place.

    With GRADIENTS, the result is the gradient of the state after each segment.
    """
    state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state_before = tl.zeros((BLOCK,), tl.float32)
    for i in range(segments):
        segment = segments - 1 - i if GRADIENTS else i
        at = (tl.program_id(0).to(tl.int64) * segments + segment) * states + state
        end = tl.load(ends + at, mask=state < states)
        tl.store(ends + at, state_before, mask=state < states)
        state_before = end + tl.load(decays + at, mask=state < states) * state_before


@triton.jit
def _forward_kernel(
    x, step_logits, k, q, A, skip, step_bias, initial_states, y, chunk_states, B, L, D, segment_chunks, reverse,
    N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, LONGHORN: tl.constexpr, KEEP: tl.constexpr,
    SKIP: tl.constexpr, STEP_BIAS: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    segment, sequence, first, stride, begin, end = _locate(
        program, B, L, D, segment_chunks, reverse, BLOCK_D, CHUNK, SEGMENTED
    )  # fmt: skip
    row = first + stride * begin
    d_1D, n_N1 = _channel_numbers(program, D, 1, BLOCK_D), _state_numbers(N, 1)
    A_ND = _load_A(A, sequence, B, D, d_1D, n_N1, N, LONGHORN)
    skip_1D = _load_parameter(skip, sequence, B, D, d_1D, SKIP)
    step_bias_1D = _load_parameter(step_bias, sequence, B, D, d_1D, STEP_BIAS)
    S_ND = _initial(initial_states, segment, D, d_1D, n_N1, N, SEGMENTED)
    x_1D, step_logit_1D, k_N1, q_N1 = _load_token(x, step_logits, k, q, row, D, d_1D, n_N1, step_bias_1D, N)
    for t in range(begin, end):
        # prefetch the next token's inputs
        next_row = row + tl.where(t + 1 < end, stride, 0)
        following = _load_token(x, step_logits, k, q, next_row, D, d_1D, n_N1, step_bias_1D, N)
        if KEEP:  # noqa: SIM102 (Triton evaluates a condition of constants when it compiles the kernel)
            if (t % CHUNK == 0) & (t > 0):
                saved_ND = chunk_states + ((sequence * (tl.cdiv(L, CHUNK) - 1) + t // CHUNK - 1) * N + n_N1) * D + d_1D
                tl.store(saved_ND, S_ND, mask=d_1D < D)
        step_1D = _step_size(step_logit_1D, _over_states(k_N1 * k_N1), LONGHORN)
        S_ND = _update(S_ND, x_1D, step_1D, k_N1, A_ND, LONGHORN)
        y_1D = _over_states(S_ND * q_N1) + skip_1D * x_1D
        tl.store(y + row * D + d_1D, y_1D, mask=d_1D < D)
        row = next_row
        x_1D, step_logit_1D, k_N1, q_N1 = following


@triton.jit
def _backward_kernel(
    dy, x, step_logits, k, q, A, skip, step_bias, chunk_states, final_gradients, scratch, dx, dstep_logits, dk_dq,
    dchannels, dA, G, B, L, D, segment_chunks, reverse,
    N: tl.constexpr, H: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, LONGHORN: tl.constexpr,
    SKIP: tl.constexpr, STEP_BIAS: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    blocks, chunks = tl.cdiv(D, BLOCK_D), tl.cdiv(L, CHUNK)
    segments = tl.cdiv(chunks, segment_chunks) if SEGMENTED else 1
    n_N1 = _state_numbers(N, H)
    own_N1 = tl.program_id(0).to(tl.int64) * CHUNK * N + n_N1
    own_ND = scratch + own_N1 * BLOCK_D + tl.arange(0, BLOCK_D)[None, None, :]
    for program in range(tl.program_id(0), G * B * segments * blocks, tl.num_programs(0)):
        segment, sequence, first, stride, begin, end = _locate(
            program, B, L, D, segment_chunks, reverse, BLOCK_D, CHUNK, SEGMENTED
        )  # fmt: skip
        d_1D = _channel_numbers(program, D, H, BLOCK_D)
        inside = d_1D < D
        writes = inside & (tl.arange(0, H)[:, None, None] == 0)  # of H threads with equal values, the first one writes
        A_ND = _load_A(A, sequence, B, D, d_1D, n_N1, N, LONGHORN)
        skip_1D = _load_parameter(skip, sequence, B, D, d_1D, SKIP)
        step_bias_1D = _load_parameter(step_bias, sequence, B, D, d_1D, STEP_BIAS)
        G_ND = _initial(final_gradients, segment, D, d_1D, n_N1, N, SEGMENTED)
        dA_ND = tl.zeros_like(G_ND)
        dskip_1D, dstep_bias_1D = tl.zeros_like(skip_1D), tl.zeros_like(step_bias_1D)
        own_chunks = tl.cdiv(end - begin, CHUNK)
        for i in range(own_chunks):
            start = begin + (own_chunks - 1 - i) * CHUNK
            tokens = tl.minimum(CHUNK, end - start)
            # recompute the chunk's states, and store the state before each token
            saved_ND = chunk_states + ((sequence * (chunks - 1) + start // CHUNK - 1) * N + n_N1) * D + d_1D
            S_ND = tl.load(saved_ND, mask=d_1D < tl.where(start > 0, D, 0), other=0)
            row = first + stride * start
            x_1D, step_logit_1D, k_N1, _ = _load_token(x, step_logits, k, q, row, D, d_1D, n_N1, step_bias_1D, N)
            tl.debug_barrier()
            for j in range(tokens):
                tl.store(own_ND + j * N * BLOCK_D, S_ND)
                row += tl.where(j + 1 < tokens, stride, 0)
                following = _load_token(x, step_logits, k, q, row, D, d_1D, n_N1, step_bias_1D, N)
                step_1D = _step_size(step_logit_1D, _over_states(k_N1 * k_N1), LONGHORN)
                S_ND = _update(S_ND, x_1D, step_1D, k_N1, A_ND, LONGHORN)
                x_1D, step_logit_1D, k_N1, _ = following
            tl.debug_barrier()
            # num_stages=3 prefetches the inputs of two tokens, unless a load has less than 4 bytes per thread
            for back in tl.range(tokens, num_stages=3):
                j = tokens - 1 - back
                row = first + stride * (start + j)
                x_1D, step_logit_1D, k_N1, q_N1 = _load_token(x, step_logits, k, q, row, D, d_1D, n_N1, step_bias_1D, N)
                dy_1D = tl.load(dy + row * D + d_1D, mask=inside, other=0).to(tl.float32)
                before_ND = tl.load(own_ND + j * N * BLOCK_D)
                step_1D = _step_size(step_logit_1D, _over_states(k_N1 * k_N1), LONGHORN)
                dq_N1 = tl.sum(S_ND * dy_1D, axis=2, keep_dims=True)
                G_ND += q_N1 * dy_1D
                if LONGHORN:
                    residual_ND = x_1D - k_N1 * before_ND
                    eps_G_ND = step_1D * G_ND
                    dx_1D = _over_states(k_N1 * eps_G_ND)
                    eps_deps_1D = _over_states(k_N1 * eps_G_ND * residual_ND)
                    # exp is clamped, because 0 times infinity would be NaN
                    dstep_logit_1D = eps_deps_1D * step_1D * tl.minimum(tl.exp(-step_logit_1D), 3e38)
                    # the last term is the gradient through k.k, because dL/d(k.k) = -eps^2 * dL/deps
                    dk_ND = eps_G_ND * (2 * residual_ND - x_1D) - 2 * k_N1 * (step_1D * eps_deps_1D)
                    dk_N1 = tl.sum(dk_ND, axis=2, keep_dims=True)
                    G_ND -= k_N1 * k_N1 * eps_G_ND
                else:
                    dinput_1D = _over_states(k_N1 * G_ND)
                    dk_N1 = tl.sum(step_1D * x_1D * G_ND, axis=2, keep_dims=True)
                    G_ND *= _decay(step_1D, k_N1, A_ND, LONGHORN)
                    dexponent_ND = G_ND * before_ND
                    dA_ND += step_1D * dexponent_ND
                    dx_1D = step_1D * dinput_1D
                    ddt_1D = x_1D * dinput_1D + _over_states(A_ND * dexponent_ND)
                    dstep_logit_1D = ddt_1D / (1 + tl.exp(-step_logit_1D))
                tl.store(dx + row * D + d_1D, dx_1D + skip_1D * dy_1D, mask=writes)
                tl.store(dstep_logits + row * D + d_1D, dstep_logit_1D, mask=writes)
                part_N1 = dk_dq + ((program % blocks) * G * B * L + row) * 2 * N + n_N1
                tl.store(part_N1, dk_N1)
                tl.store(part_N1 + N, dq_N1)
                dskip_1D += dy_1D * x_1D
                dstep_bias_1D += dstep_logit_1D
                S_ND = before_ND
        tl.store(dchannels + segment * 2 * D + d_1D, dskip_1D, mask=writes)
        tl.store(dchannels + (segment * 2 + 1) * D + d_1D, dstep_bias_1D, mask=writes)
        if not LONGHORN:
            tl.store(dA + (segment * D + d_1D) * N + n_N1, dA_ND, mask=inside)


def forward(
    recurrence: str, x_GBLD: Tensor, step_logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor, A_GDN: Tensor | None,
    skip_GD: Tensor | None, step_bias_GD: Tensor | None, reverse: tuple[bool, ...], keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y (G, B, L, D) and, if `keep`, the states between chunks. `scan_op` explains the arguments."""
    x, step_logits, k, q = (t.contiguous() for t in (x_GBLD, step_logits_GBLD, k_GBLN, q_GBLN))
    (G, B, L, D), N = x.shape, k.shape[-1]
    y, initial_states = torch.empty_like(x), None
    segment_chunks, segments, block_d = _schedule(x, 32)
    states = x.new_empty((G, B, chunk_state_count(L), N, D) if keep else 0, dtype=torch.float32)
    with _on(x.device):
        if segments > 1:
            tensors = x, step_logits, k, q, A_GDN, step_bias_GD
            initial_states = _between_segments(recurrence, tensors, reverse, gradients=False)
        _forward_kernel[(G * B * segments * triton.cdiv(D, block_d),)](
            x, step_logits, k, q, A_GDN, skip_GD, step_bias_GD, initial_states, y, states, B, L, D, segment_chunks,
            _mask(reverse), N, block_d, CHUNK, recurrence == "longhorn", keep, skip_GD is not None,
            step_bias_GD is not None, segments > 1, num_warps=1, enable_fp_fusion=FUSE,
        )  # fmt: skip
    return y, states


def backward(
    recurrence: str, dy_GBLD: Tensor, x_GBLD: Tensor, step_logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor,
    A_GDN: Tensor | None, skip_GD: Tensor | None, step_bias_GD: Tensor | None, states_GBSND: Tensor,
    reverse: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, step_logits, k, q and A, and one tensor with the gradients of skip and step_bias.

    The last tensor has the shape (G, 2, D) for G directions. Without A, the gradient of A is an empty tensor.
    """
    dy, x, step_logits, k, q = (t.contiguous() for t in (dy_GBLD, x_GBLD, step_logits_GBLD, k_GBLN, q_GBLN))
    (G, B, L, D), N = x.shape, k.shape[-1]
    segment_chunks, segments, block_d = _schedule(x, 16)
    block_d = min(block_d, 1024 // N)  # a tensor of states must not need more than 32 registers per thread
    blocks = triton.cdiv(D, block_d)
    programs = min(PROGRAMS, G * B * segments * blocks)
    dx, dstep_logits, final_gradients = torch.empty_like(x), torch.empty_like(x), None
    scratch, dk_dq, dchannels, dA = (
        x.new_empty(shape, dtype=torch.float32)
        for shape in (
            (programs, CHUNK, N, block_d), (blocks, G, B, L, 2, N), (G, B * segments, 2, D),
            0 if A_GDN is None else (G, B * segments, D, N),
        )
    )  # fmt: skip
    with _on(x.device):
        if segments > 1:
            tensors = dy, step_logits, k, q, A_GDN, step_bias_GD
            final_gradients = _between_segments(recurrence, tensors, reverse, gradients=True)
        _backward_kernel[(programs,)](
            dy, x, step_logits, k, q, A_GDN, skip_GD, step_bias_GD, states_GBSND, final_gradients, scratch, dx,
            dstep_logits, dk_dq, dchannels, dA, G, B, L, D, segment_chunks, _mask(reverse), N,
            min(N, 128 // block_d), block_d, CHUNK, recurrence == "longhorn", skip_GD is not None,
            step_bias_GD is not None, segments > 1, num_warps=1, enable_fp_fusion=FUSE,
        )  # fmt: skip
    dk, dq = (t.sum(0).to(x.dtype) for t in dk_dq.unbind(-2))
    return dx, dstep_logits, dk, dq, dA if A_GDN is None else dA.sum(1), dchannels.sum(1)


def _between_segments(recurrence: str, tensors: tuple, reverse: tuple[bool, ...], *, gradients: bool) -> Tensor:
    """Return the state before each segment or, with `gradients`, the gradient of the state after each segment.

    The result is (G, B, segments, N, D).
    """
    values, step_logits, k, q, A, step_bias = tensors
    (G, B, L, D), N = values.shape, k.shape[-1]
    segment_chunks, segments, block_d = _schedule(values, 32)
    ends, decays = values.new_empty((2, G, B, segments, N, D), dtype=torch.float32)
    _segment_states_kernel[(G * B * segments * triton.cdiv(D, block_d),)](
        values, step_logits, k, q, A, step_bias, ends, decays, B, L, D, segment_chunks, _mask(reverse), N, block_d,
        CHUNK, recurrence == "longhorn", step_bias is not None, gradients, num_warps=1, enable_fp_fusion=FUSE,
    )  # fmt: skip
    _pass_states_kernel[(G * B, triton.cdiv(N * D, 128))](
        ends, decays, segments, N * D, 128, gradients, num_warps=4, enable_fp_fusion=FUSE
    )
    return ends


def _schedule(x_GBLD: Tensor, narrow: int) -> tuple[int, int, int]:
    """Return the numbers of chunks per segment, segments per sequence, and channels per program instance (BLOCK_D).

    BLOCK_D is 64, which costs least, if blocks of 64 channels fill a large GPU, and otherwise `narrow`. If the
    sequences fill less than a quarter of the GPU, they are cut into segments that fill the GPU up to four times.
    """
    G, B, L, D = x_GBLD.shape
    channels, chunks = G * B * D, triton.cdiv(L, CHUNK)
    segment_chunks = triton.cdiv(chunks, 4 * CHANNELS // channels) if channels < CHANNELS // 4 else chunks
    segments = triton.cdiv(chunks, segment_chunks)
    return segment_chunks, segments, 64 if channels * segments >= CHANNELS else narrow


def _mask(reverse: tuple[bool, ...]) -> int:
    return sum(1 << g for g, r in enumerate(reverse) if r)


def _on(device: torch.device):
    """Return a context manager that makes the device current, because Triton launches on the current device."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
