"""The scan in Triton, for any GPU that Triton supports. `TRITON_INTERPRET=1` runs it on a CPU.

One program scans BLOCK_D channels of a segment of a sequence, its states a tensor in registers. A segment is all of
the sequence, unless that leaves much of a large GPU without work: then sequences are cut into segments that run in
parallel, and a pass over each from a zero state finds the states between them. The recurrences and the names are those
of `cuda/common.cuh`, which says where the gradients come from.

Tensors have three dimensions, (H, N / H, BLOCK_D), of which a suffix names the first two N, or 1 if they are 1 or equal
along them: H threads share a channel's states. Backward sums over states and over channels, and is fastest with 4
channels a thread, 16 bytes in fp32; forward, which sums over states alone, has H = 1. What a channel has once, such as
x, each of its H threads loads, so that all tensors lie among the threads alike and no value has to change its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import CHUNK, chunk_state_count

PROGRAMS = 1024  # of backward, each with the states of a chunk in memory of its own
FUSE = True  # a product and a sum in one instruction: Triton's default until 3.9, which warns that 3.10 has another
CHANNELS = 2**16  # of all sequences: what fills a large GPU in blocks of 64


@triton.jit
def _gate(logit, kk, LONGHORN: tl.constexpr):
    """eps = 1 / (1 + exp(-logit) + k.k), or dt = softplus(logit)."""
    if LONGHORN:
        gate = 1 / (1 + kk + tl.exp(-logit))
    else:
        # log(1 + z) = 2 atanh(z / (2 + z)), whose series does not lose a small z
        z = tl.exp(-tl.abs(logit))
        s = z / (2 + z)
        s2 = s * s
        series = 2 * s * (1 + s2 * (1 / 3 + s2 * (1 / 5 + s2 * (1 / 7 + s2 * (1 / 9 + s2 * (1 / 11 + s2 / 13))))))
        gate = tl.maximum(logit, 0) + series
    return gate


@triton.jit
def _over_states(v_ND):
    return tl.sum(tl.sum(v_ND, axis=1, keep_dims=True), axis=0, keep_dims=True)


@triton.jit
def _states(N: tl.constexpr, H: tl.constexpr):
    """The number of each state."""
    return tl.arange(0, N // H)[None, :, None] * H + tl.arange(0, H)[:, None, None]


@triton.jit
def _decay(gate_1D, k_N1, A_ND, LONGHORN: tl.constexpr):
    """dS_t / dS_{t-1}."""
    return 1 - gate_1D * k_N1 * k_N1 if LONGHORN else tl.exp(A_ND * gate_1D)


@triton.jit
def _step(S_ND, x_1D, gate_1D, k_N1, A_ND, LONGHORN: tl.constexpr):
    """S_t from S_{t-1}."""
    if LONGHORN:
        S_ND += gate_1D * k_N1 * (x_1D - k_N1 * S_ND)
    else:
        S_ND = _decay(gate_1D, k_N1, A_ND, LONGHORN) * S_ND + gate_1D * x_1D * k_N1
    return S_ND


@triton.jit
def _channels(program, D, H: tl.constexpr, BLOCK_D: tl.constexpr):
    """The channels of a program, for each of the threads that share them."""
    d_D = (program % tl.cdiv(D, BLOCK_D)) * BLOCK_D + tl.arange(0, BLOCK_D)
    return tl.broadcast_to(d_D[None, None, :], (H, 1, BLOCK_D))


@triton.jit
def _place(program, B, L, D, span, reverse, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, CUT: tl.constexpr):
    """Segment and sequence of a program, where the sequence starts and which way it goes, and the segment's tokens.
    Segments, of `span` chunks, are numbered through all sequences."""
    blocks, segments = tl.cdiv(D, BLOCK_D), tl.cdiv(tl.cdiv(L, CHUNK), span) if CUT else 1
    segment = (program // blocks).to(tl.int64)
    sequence = segment // segments
    backwards = (reverse >> (sequence // B)) & 1
    first = sequence * L + tl.where(backwards == 1, L - 1, 0)
    begin = (segment % segments).to(tl.int32) * span * CHUNK
    end = tl.minimum(begin + span * CHUNK, L) if CUT else L
    return segment, sequence, first, tl.where(backwards == 1, -1, 1), begin, end


@triton.jit
def _channel(p, sequence, B, D, d_1D, HAVE: tl.constexpr):
    """A parameter of each channel, 0 if there is none."""
    v_1D = tl.zeros_like(d_1D).to(tl.float32)
    if HAVE:
        v_1D = tl.load(p + (sequence // B) * D + d_1D, mask=d_1D < D, other=0)
    return v_1D


@triton.jit
def _rates(rates, sequence, B, D, d_1D, n_N1, N: tl.constexpr, LONGHORN: tl.constexpr):
    A_ND = tl.zeros_like(n_N1 * d_1D).to(tl.float32)
    if not LONGHORN:
        A_ND = tl.load(rates + ((sequence // B) * D + d_1D) * N + n_N1, mask=d_1D < D, other=0)
    return A_ND


@triton.jit
def _carried(before, segment, D, d_1D, n_N1, N: tl.constexpr, CUT: tl.constexpr):
    """What a segment takes over from those that ran before it."""
    S_ND = tl.zeros_like(n_N1 * d_1D).to(tl.float32)
    if CUT:
        S_ND = tl.load(before + (segment * N + n_N1) * D + d_1D, mask=d_1D < D, other=0)
    return S_ND


@triton.jit
def _token(x, logits, k, q, row, D, d_1D, n_N1, bias_1D, N: tl.constexpr):
    x_1D = tl.load(x + row * D + d_1D, mask=d_1D < D, other=0).to(tl.float32)
    logit_1D = tl.load(logits + row * D + d_1D, mask=d_1D < D, other=0).to(tl.float32) + bias_1D
    k_N1 = tl.load(k + row * N + n_N1).to(tl.float32)
    return x_1D, logit_1D, k_N1, tl.load(q + row * N + n_N1).to(tl.float32)


@triton.jit
def _summary_kernel(
    values, logits, k, q, rates, biases, ends, decays, B, L, D, span, reverse, N: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, LONGHORN: tl.constexpr, BIAS: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Runs each segment from a zero state: the state it ends in and the product of its decays.

    With GRADIENTS the values are dy, and G = dL/dS runs from the last token to the first: G = decay (G + q dy).
    """
    program = tl.program_id(0)
    segment, sequence, row, stride, begin, end = _place(program, B, L, D, span, reverse, BLOCK_D, CHUNK, True)
    row += stride * begin
    if GRADIENTS:
        row += stride * (end - 1 - begin)
        stride = -stride
    d_1D, n_N1 = _channels(program, D, 1, BLOCK_D), _states(N, 1)
    A_ND = _rates(rates, sequence, B, D, d_1D, n_N1, N, LONGHORN)
    bias_1D = _channel(biases, sequence, B, D, d_1D, BIAS)
    S_ND = tl.zeros((1, N, BLOCK_D), tl.float32)
    product_ND = S_ND + 1
    value_1D, logit_1D, k_N1, q_N1 = _token(values, logits, k, q, row, D, d_1D, n_N1, bias_1D, N)
    for t in range(begin, end):
        row += tl.where(t + 1 < end, stride, 0)
        following = _token(values, logits, k, q, row, D, d_1D, n_N1, bias_1D, N)
        gate_1D = _gate(logit_1D, _over_states(k_N1 * k_N1), LONGHORN)
        decay_ND = _decay(gate_1D, k_N1, A_ND, LONGHORN)
        if GRADIENTS:
            S_ND = decay_ND * (S_ND + q_N1 * value_1D)
        else:
            S_ND = _step(S_ND, value_1D, gate_1D, k_N1, A_ND, LONGHORN)
        product_ND *= decay_ND
        value_1D, logit_1D, k_N1, q_N1 = following
    own_ND = (segment * N + n_N1) * D + d_1D
    tl.store(ends + own_ND, S_ND, mask=d_1D < D)
    tl.store(decays + own_ND, product_ND, mask=d_1D < D)


@triton.jit
def _combine_kernel(ends, decays, segments, states, BLOCK: tl.constexpr, GRADIENTS: tl.constexpr):
    """Replaces the ends by the state before each segment, or with GRADIENTS by the gradient after it."""
    state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    carried = tl.zeros((BLOCK,), tl.float32)
    for i in range(segments):
        segment = segments - 1 - i if GRADIENTS else i
        at = (tl.program_id(0).to(tl.int64) * segments + segment) * states + state
        end = tl.load(ends + at, mask=state < states)
        tl.store(ends + at, carried, mask=state < states)
        carried = end + tl.load(decays + at, mask=state < states) * carried


@triton.jit
def _forward_kernel(
    x, logits, k, q, rates, skips, biases, before, y, states, B, L, D, span, reverse,
    N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, LONGHORN: tl.constexpr, KEEP: tl.constexpr,
    SKIP: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    segment, sequence, first, stride, begin, end = _place(program, B, L, D, span, reverse, BLOCK_D, CHUNK, CUT)
    row = first + stride * begin
    d_1D, n_N1 = _channels(program, D, 1, BLOCK_D), _states(N, 1)
    A_ND = _rates(rates, sequence, B, D, d_1D, n_N1, N, LONGHORN)
    skip_1D = _channel(skips, sequence, B, D, d_1D, SKIP)
    bias_1D = _channel(biases, sequence, B, D, d_1D, BIAS)
    S_ND = _carried(before, segment, D, d_1D, n_N1, N, CUT)
    x_1D, logit_1D, k_N1, q_N1 = _token(x, logits, k, q, row, D, d_1D, n_N1, bias_1D, N)
    for t in range(begin, end):
        # the next token is on its way while this one is worked on
        next_row = row + tl.where(t + 1 < end, stride, 0)
        following = _token(x, logits, k, q, next_row, D, d_1D, n_N1, bias_1D, N)
        if KEEP:  # noqa: SIM102 (Triton leaves out what a constant rules out only if nothing else is in the condition)
            if (t % CHUNK == 0) & (t > 0):
                kept_ND = states + ((sequence * (tl.cdiv(L, CHUNK) - 1) + t // CHUNK - 1) * N + n_N1) * D + d_1D
                tl.store(kept_ND, S_ND, mask=d_1D < D)
        gate_1D = _gate(logit_1D, _over_states(k_N1 * k_N1), LONGHORN)
        S_ND = _step(S_ND, x_1D, gate_1D, k_N1, A_ND, LONGHORN)
        y_1D = _over_states(S_ND * q_N1) + skip_1D * x_1D
        tl.store(y + row * D + d_1D, y_1D, mask=d_1D < D)
        row = next_row
        x_1D, logit_1D, k_N1, q_N1 = following


@triton.jit
def _backward_kernel(
    dy, x, logits, k, q, rates, skips, biases, states, after, scratch, dx, dlogits, dkeys, dchannels, drates,
    G, B, L, D, span, reverse, N: tl.constexpr, H: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    LONGHORN: tl.constexpr, SKIP: tl.constexpr, BIAS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    blocks, chunks = tl.cdiv(D, BLOCK_D), tl.cdiv(L, CHUNK)
    segments = tl.cdiv(chunks, span) if CUT else 1
    n_N1 = _states(N, H)
    own_N1 = tl.program_id(0).to(tl.int64) * CHUNK * N + n_N1
    own_ND = scratch + own_N1 * BLOCK_D + tl.arange(0, BLOCK_D)[None, None, :]
    for program in range(tl.program_id(0), G * B * segments * blocks, tl.num_programs(0)):
        segment, sequence, first, stride, begin, end = _place(program, B, L, D, span, reverse, BLOCK_D, CHUNK, CUT)
        d_1D = _channels(program, D, H, BLOCK_D)
        inside = d_1D < D
        writes = inside & (tl.arange(0, H)[:, None, None] == 0)  # one of the H threads that have the same
        A_ND = _rates(rates, sequence, B, D, d_1D, n_N1, N, LONGHORN)
        skip_1D = _channel(skips, sequence, B, D, d_1D, SKIP)
        bias_1D = _channel(biases, sequence, B, D, d_1D, BIAS)
        G_ND = _carried(after, segment, D, d_1D, n_N1, N, CUT)
        dA_ND = tl.zeros_like(G_ND)
        dskip_1D, dbias_1D = tl.zeros_like(skip_1D), tl.zeros_like(bias_1D)
        segment_chunks = tl.cdiv(end - begin, CHUNK)
        for i in range(segment_chunks):
            start = begin + (segment_chunks - 1 - i) * CHUNK
            tokens = tl.minimum(CHUNK, end - start)
            # the chunk once more, keeping the state before each token
            kept_ND = states + ((sequence * (chunks - 1) + start // CHUNK - 1) * N + n_N1) * D + d_1D
            S_ND = tl.load(kept_ND, mask=d_1D < tl.where(start > 0, D, 0), other=0)
            row = first + stride * start
            x_1D, logit_1D, k_N1, _ = _token(x, logits, k, q, row, D, d_1D, n_N1, bias_1D, N)
            tl.debug_barrier()
            for j in range(tokens):
                tl.store(own_ND + j * N * BLOCK_D, S_ND)
                row += tl.where(j + 1 < tokens, stride, 0)
                following = _token(x, logits, k, q, row, D, d_1D, n_N1, bias_1D, N)
                gate_1D = _gate(logit_1D, _over_states(k_N1 * k_N1), LONGHORN)
                S_ND = _step(S_ND, x_1D, gate_1D, k_N1, A_ND, LONGHORN)
                x_1D, logit_1D, k_N1, _ = following
            tl.debug_barrier()
            # the loads of two tokens, but of keys and queries, are on their way while one is worked on
            for back in tl.range(tokens, num_stages=3):
                j = tokens - 1 - back
                row = first + stride * (start + j)
                x_1D, logit_1D, k_N1, q_N1 = _token(x, logits, k, q, row, D, d_1D, n_N1, bias_1D, N)
                dy_1D = tl.load(dy + row * D + d_1D, mask=inside, other=0).to(tl.float32)
                before_ND = tl.load(own_ND + j * N * BLOCK_D)
                gate_1D = _gate(logit_1D, _over_states(k_N1 * k_N1), LONGHORN)
                dq_N1 = tl.sum(S_ND * dy_1D, axis=2, keep_dims=True)
                G_ND += q_N1 * dy_1D
                if LONGHORN:
                    residual_ND = x_1D - k_N1 * before_ND
                    eps_G_ND = gate_1D * G_ND
                    dx_1D = _over_states(k_N1 * eps_G_ND)
                    eps_deps_1D = _over_states(k_N1 * eps_G_ND * residual_ND)
                    # eps * exp(-logit), whose limit is 1 where exp overflows
                    dlogit_1D = eps_deps_1D * gate_1D * tl.minimum(tl.exp(-logit_1D), 3e38)
                    # the sum over channels takes in that of dL/d(k.k) = -eps^2 deps
                    dk_ND = eps_G_ND * (2 * residual_ND - x_1D) - 2 * k_N1 * (gate_1D * eps_deps_1D)
                    dk_N1 = tl.sum(dk_ND, axis=2, keep_dims=True)
                    G_ND -= k_N1 * k_N1 * eps_G_ND
                else:
                    dinput_1D = _over_states(k_N1 * G_ND)
                    dk_N1 = tl.sum(gate_1D * x_1D * G_ND, axis=2, keep_dims=True)
                    G_ND *= _decay(gate_1D, k_N1, A_ND, LONGHORN)
                    dexponent_ND = G_ND * before_ND
                    dA_ND += gate_1D * dexponent_ND
                    dx_1D = gate_1D * dinput_1D
                    ddt_1D = x_1D * dinput_1D + _over_states(A_ND * dexponent_ND)
                    dlogit_1D = ddt_1D / (1 + tl.exp(-logit_1D))
                tl.store(dx + row * D + d_1D, dx_1D + skip_1D * dy_1D, mask=writes)
                tl.store(dlogits + row * D + d_1D, dlogit_1D, mask=writes)
                part_N1 = dkeys + ((program % blocks) * G * B * L + row) * 2 * N + n_N1
                tl.store(part_N1, dk_N1)
                tl.store(part_N1 + N, dq_N1)
                dskip_1D += dy_1D * x_1D
                dbias_1D += dlogit_1D
                S_ND = before_ND
        tl.store(dchannels + segment * 2 * D + d_1D, dskip_1D, mask=writes)
        tl.store(dchannels + (segment * 2 + 1) * D + d_1D, dbias_1D, mask=writes)
        if not LONGHORN:
            tl.store(drates + (segment * D + d_1D) * N + n_N1, dA_ND, mask=inside)


def forward(
    recurrence: str, x_GBLD: Tensor, logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor, rates_GDN: Tensor | None,
    skip_GD: Tensor | None, bias_GD: Tensor | None, reverse: list[bool], keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y_GBLD, and the states between chunks of `CHUNK` tokens if `keep`."""
    x, logits, k, q = (t.contiguous() for t in (x_GBLD, logits_GBLD, k_GBLN, q_GBLN))
    (G, B, L, D), N = x.shape, k.shape[-1]
    y, before = torch.empty_like(x), None
    span, segments, block_d = _cut(x, 32)
    states = x.new_empty((G, B, chunk_state_count(L), N, D) if keep else 0, dtype=torch.float32)
    with _on(x.device):
        if segments > 1:
            before = _summarize(recurrence, x, logits, k, q, rates_GDN, bias_GD, reverse, gradients=False)
        _forward_kernel[(G * B * segments * triton.cdiv(D, block_d),)](
            x, logits, k, q, rates_GDN, skip_GD, bias_GD, before, y, states, B, L, D, span, _mask(reverse), N, block_d,
            CHUNK, recurrence == "longhorn", keep, skip_GD is not None, bias_GD is not None, segments > 1,
            num_warps=1, enable_fp_fusion=FUSE,
        )  # fmt: skip
    return y, states


def backward(
    recurrence: str, dy_GBLD: Tensor, x_GBLD: Tensor, logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor,
    rates_GDN: Tensor | None, skip_GD: Tensor | None, bias_GD: Tensor | None, states_GBSND: Tensor,
    reverse: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dlogits, dk and dq like their inputs; drates_GDN (empty without rates) and dskip and dbias as (G, 2, D)."""
    dy, x, logits, k, q = (t.contiguous() for t in (dy_GBLD, x_GBLD, logits_GBLD, k_GBLN, q_GBLN))
    (G, B, L, D), N = x.shape, k.shape[-1]
    span, segments, block_d = _cut(x, 16)
    block_d = min(block_d, 1024 // N)  # 32 registers for a tensor of states, of which several are live
    blocks = triton.cdiv(D, block_d)
    programs = min(PROGRAMS, G * B * segments * blocks)
    dx, dlogits, after = torch.empty_like(x), torch.empty_like(x), None
    scratch, dkeys, dchannels, drates = (
        x.new_empty(shape, dtype=torch.float32)
        for shape in (
            (programs, CHUNK, N, block_d), (blocks, G, B, L, 2, N), (G, B * segments, 2, D),
            0 if rates_GDN is None else (G, B * segments, D, N),
        )
    )  # fmt: skip
    with _on(x.device):
        if segments > 1:
            after = _summarize(recurrence, dy, logits, k, q, rates_GDN, bias_GD, reverse, gradients=True)
        _backward_kernel[(programs,)](
            dy, x, logits, k, q, rates_GDN, skip_GD, bias_GD, states_GBSND, after, scratch, dx, dlogits, dkeys,
            dchannels, drates, G, B, L, D, span, _mask(reverse), N, min(N, 128 // block_d), block_d, CHUNK,
            recurrence == "longhorn", skip_GD is not None, bias_GD is not None, segments > 1,
            num_warps=1, enable_fp_fusion=FUSE,
        )  # fmt: skip
    dk, dq = (t.sum(0).to(x.dtype) for t in dkeys.unbind(-2))
    return dx, dlogits, dk, dq, drates if rates_GDN is None else drates.sum(1), dchannels.sum(1)


def _summarize(recurrence, values, logits, k, q, rates, biases, reverse, *, gradients: bool) -> Tensor:
    """The state before each segment as (G, B, segments, N, D); with `gradients`, its gradient after each segment."""
    (G, B, L, D), N = values.shape, k.shape[-1]
    span, segments, block_d = _cut(values, 32)
    ends, decays = values.new_empty((2, G, B, segments, N, D), dtype=torch.float32)
    _summary_kernel[(G * B * segments * triton.cdiv(D, block_d),)](
        values, logits, k, q, rates, biases, ends, decays, B, L, D, span, _mask(reverse), N, block_d, CHUNK,
        recurrence == "longhorn", biases is not None, gradients, num_warps=1, enable_fp_fusion=FUSE,
    )  # fmt: skip
    _combine_kernel[(G * B, triton.cdiv(N * D, 128))](
        ends, decays, segments, N * D, 128, gradients, num_warps=4, enable_fp_fusion=FUSE
    )
    return ends


def _cut(x_GBLD: Tensor, narrow: int) -> tuple[int, int, int]:
    """The chunks of a segment, the segments of a sequence, and the channels of a block: `narrow`, or 64, which costs
    less, if those fill a large GPU.

    Scanning twice pays if the sequences fill less than a quarter of it. Then segments fill it up to four times, which
    leaves no processor without work for long.
    """
    G, B, L, D = x_GBLD.shape
    channels, chunks = G * B * D, triton.cdiv(L, CHUNK)
    span = triton.cdiv(chunks, 4 * CHANNELS // channels) if channels < CHANNELS // 4 else chunks
    segments = triton.cdiv(chunks, span)
    return span, segments, 64 if channels * segments >= CHANNELS else narrow


def _mask(reverse: list[bool]) -> int:
    return sum(1 << g for g, r in enumerate(reverse) if r)


def _on(device: torch.device):
    """Launches go to the current device, which need not be that of the tensors."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
