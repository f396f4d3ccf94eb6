"""SiLU of a causal depthwise convolution over tokens, by one Triton kernel for forward and one for backward.

The fallback `silu_of_shifted_products` writes a padded copy of the sequence and reads the copy once per tap. In the
kernels of this file, a warp processes a strip of TOKENS consecutive tokens and CHANNELS channels. Every element is read
once, except K - 1 tokens at the ends of a strip. Neighbouring tokens and the sums of the weight gradients stay in
registers. The loop over tokens is unrolled after the loads, so that all loads are in flight at once. The weights are
stored as (taps, channels), so that neighbouring threads read neighbouring elements; strided loads would take most of
the time.
`TRITON_INTERPRET=1` runs the kernels on a CPU.

    B batch    T tokens    D channels    K taps
    c(t) = bias + sum_i weight[i] u(t - K + 1 + i)        v = silu(c)
    s(t) = silu'(c(t)) dv(t)
    du(t) = sum_i weight[i] s(t + K - 1 - i)        dweight[i] = sum_t u(t - K + 1 + i) s(t)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# A program processes STRIPS strips of TOKENS tokens and CHANNELS channels. Longer strips need more registers.
STRIPS, TOKENS, CHANNELS = 4, 32, 64


def silu_of_causal_conv(u_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor) -> Tensor:
    """Return the SiLU of a causal depthwise convolution, in the dtype of u. Weights and sums are fp32."""
    function = silu_by_kernels if u_BTD.is_cuda else silu_of_shifted_products
    return function(u_BTD, weight_DK, bias_D)


def silu_of_shifted_products(u_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor) -> Tensor:
    taps = weight_DK.shape[-1]
    padded = F.pad(u_BTD, (0, 0, taps - 1, 0))
    products = [padded[:, i : i + u_BTD.shape[1]] * weight_DK[:, i] for i in range(taps)]
    return F.silu(sum(products, start=bias_D)).to(u_BTD.dtype)


def silu_by_kernels(u_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor) -> Tensor:
    return silu_conv(u_BTD, torch.cat([weight_DK.T, bias_D.unsqueeze(0)]))


@triton.jit
def _strips(B, T, D, STRIPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the strips of TOKENS tokens that this program processes.

    Returns:
        Offset of each strip's first elements (STRIPS, CHANNELS), numbers of tokens in the sequence before each strip's
        first token and from that token on (STRIPS, 1), and channel indices (1, CHANNELS).
    """
    strips = tl.cdiv(T, TOKENS)
    strip = tl.program_id(0) * STRIPS + tl.arange(0, STRIPS)[:, None]
    sequence, before = strip // strips, (strip % strips) * TOKENS
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    first = (sequence.to(tl.int64) * T + before) * D + d
    return first, before, tl.where(sequence < B, T, 0) - before, d


@triton.jit
def _tokens(p, before, left, d, D, START: tl.constexpr, END: tl.constexpr):
    """Return tokens START to END - 1 of each strip as a tuple of fp32 (STRIPS, CHANNELS), zero outside the sequence."""
    tokens = ()
    for i in tl.static_range(START, END):
        inside = (-i <= before) & (i < left) & (d < D)
        tokens += (tl.load(p + i * D, mask=inside, other=0.0).to(tl.float32),)
    return tokens


@triton.jit
def _filter(rows, d, D, K: tl.constexpr):
    """Return the filter weights of each tap, followed by the bias, each of shape (1, CHANNELS)."""
    values = ()
    for i in tl.static_range(K + 1):
        values += (tl.load(rows + i * D + d, mask=d < D, other=0.0),)
    return values


@triton.jit
def _conv(us, taps, t: tl.constexpr, K: tl.constexpr):
    """Return the convolution at token t of each strip. The input tokens `us` begin K - 1 tokens before the strip."""
    c = taps[K]
    for i in tl.static_range(K):
        c += taps[i] * us[t + i]
    return c


@triton.jit
def _forward(
    u, rows, v, B, T, D,
    K: tl.constexpr, STRIPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    first, before, left, d = _strips(B, T, D, STRIPS, TOKENS, CHANNELS)
    taps = _filter(rows, d, D, K)
    us = _tokens(u + first, before, left, d, D, 1 - K, TOKENS)
    for t in tl.static_range(TOKENS):
        c = _conv(us, taps, t, K)
        value = c / (1 + tl.exp(-c))
        tl.store(v + first + t * D, value.to(v.dtype.element_ty), mask=(t < left) & (d < D))


@triton.jit
def _gradients(
    u, rows, dv, du, parts, B, T, D,
    K: tl.constexpr, STRIPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the input's gradient, and partial sums (programs over strips, K + 1, D) of the filter's gradients."""
    first, before, left, d = _strips(B, T, D, STRIPS, TOKENS, CHANNELS)
    taps = _filter(rows, d, D, K)
    us = _tokens(u + first, before, left, d, D, 1 - K, TOKENS + K - 1)
    dvs = _tokens(dv + first, before, left, d, D, 0, TOKENS + K - 1)
    zero = tl.zeros((STRIPS, CHANNELS), tl.float32)
    sums = (zero,) * (K + 1)
    s = ()
    for t in tl.static_range(TOKENS + K - 1):
        c = _conv(us, taps, t, K)
        sigmoid = 1 / (1 + tl.exp(-c))
        s += (sigmoid * (1 + c * (1 - sigmoid)) * dvs[t],)
        if t < TOKENS:
            added = ()
            for i in tl.static_range(K):
                added += (sums[i] + s[t] * us[t + i],)
            sums = added + (sums[K] + s[t],)
        if t >= K - 1:
            value = zero
            for i in tl.static_range(K):
                value += taps[i] * s[t - i]
            tl.store(du + first + (t - K + 1) * D, value.to(du.dtype.element_ty), mask=(t - K + 1 < left) & (d < D))
    parts += tl.program_id(0).to(tl.int64) * (K + 1) * D
    for i in tl.static_range(K + 1):
        tl.store(parts + i * D + d, tl.sum(sums[i], axis=0, keep_dims=True), mask=d < D)


def _grid(u: Tensor) -> tuple[int, int]:
    B, T, D = u.shape
    return triton.cdiv(B * triton.cdiv(T, TOKENS), STRIPS), triton.cdiv(D, CHANNELS)


@torch.library.custom_op("recall::silu_conv", mutates_args=())
def silu_conv(u_BTD: Tensor, filter_RD: Tensor) -> Tensor:
    """Run the forward kernel. The rows of the fp32 tensor `filter_RD` are the K taps and then the bias."""
    u, v = u_BTD.contiguous(), torch.empty_like(u_BTD, memory_format=torch.contiguous_format)
    constants = len(filter_RD) - 1, STRIPS, TOKENS, CHANNELS
    _forward[_grid(u)](u, filter_RD.contiguous(), v, *u.shape, *constants, num_warps=STRIPS, enable_fp_fusion=True)
    return v


@torch.library.custom_op("recall::silu_conv_backward", mutates_args=())
def silu_conv_backward(u_BTD: Tensor, filter_RD: Tensor, dv_BTD: Tensor) -> tuple[Tensor, Tensor]:
    u, dv = u_BTD.contiguous(), dv_BTD.contiguous()
    du, parts = torch.empty_like(u), filter_RD.new_empty(_grid(u)[0], *filter_RD.shape)
    constants = len(filter_RD) - 1, STRIPS, TOKENS, CHANNELS
    _gradients[_grid(u)](
        u, filter_RD.contiguous(), dv, du, parts, *u.shape, *constants, num_warps=STRIPS, enable_fp_fusion=True
    )
    return du, parts.sum(0)


@silu_conv.register_fake
def _(u_BTD, filter_RD):
    return torch.empty_like(u_BTD, memory_format=torch.contiguous_format)


@silu_conv_backward.register_fake
def _(u_BTD, filter_RD, dv_BTD):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (u_BTD, filter_RD))


def _backward(ctx, dv_BTD):
    return silu_conv_backward(*ctx.saved_tensors, dv_BTD)


silu_conv.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
