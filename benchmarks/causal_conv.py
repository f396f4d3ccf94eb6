"""SiLU of a causal depthwise convolution of tokens, forward and backward, as two Triton kernels for one direction.

What a compiler makes of shifted products keeps fp32 copies of the sequence and reads it once for every tap; these read
and write each element once or twice, in the dtype of u. `TRITON_INTERPRET=1` runs them on a CPU.

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

TOKENS, CHANNELS, WARPS = 32, 128, 8  # of a program


def silu_of_causal_conv(u_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor) -> Tensor:
    """v (B, T, D) in u's dtype, where the sums are fp32."""
    if u_BTD.is_cuda:
        return silu_conv(u_BTD, weight_DK, bias_D)
    return silu_of_shifted_products(u_BTD, weight_DK, bias_D)


def silu_of_shifted_products(u_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor) -> Tensor:
    taps = weight_DK.shape[-1]
    padded = F.pad(u_BTD, (0, 0, taps - 1, 0))
    products = [padded[:, i : i + u_BTD.shape[1]] * weight_DK[:, i] for i in range(taps)]
    return F.silu(sum(products, start=bias_D)).to(u_BTD.dtype)


@triton.jit
def _place(T, D, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Where a program's sequence starts, its tokens, and its channels."""
    strips = tl.cdiv(T, TOKENS)
    sequence = tl.program_id(0) // strips
    t = (tl.program_id(0) % strips) * TOKENS + tl.arange(0, TOKENS)
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return sequence.to(tl.int64) * T * D, t[:, None], d[None, :]


@triton.jit
def _at(p, t, d, T, D):
    """Elements of a sequence (TOKENS, CHANNELS) in fp32, zero outside of it."""
    return tl.load(p + t * D + d, mask=(t >= 0) & (t < T) & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _conv(u, weight, bias, t, d, T, D, K: tl.constexpr):
    c = tl.zeros_like(_at(u, t, d, T, D)) + tl.load(bias + d, mask=d < D, other=0.0)
    for i in tl.static_range(K):
        c += tl.load(weight + d * K + i, mask=d < D, other=0.0) * _at(u, t - K + 1 + i, d, T, D)
    return c


@triton.jit
def _forward(u, weight, bias, v, T, D, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    start, t, d = _place(T, D, TOKENS, CHANNELS)
    c = _conv(u + start, weight, bias, t, d, T, D, K)
    value = c / (1 + tl.exp(-c))
    tl.store(v + start + t * D + d, value.to(v.dtype.element_ty), mask=(t < T) & (d < D))


@triton.jit
def _conv_gradient(
    u, weight, bias, dv, s, parts, T, D, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """s, and the program's parts (K + 1, D) of the gradients of weights and bias."""
    start, t, d = _place(T, D, TOKENS, CHANNELS)
    c = _conv(u + start, weight, bias, t, d, T, D, K)
    gate = 1 / (1 + tl.exp(-c))
    gradient = gate * (1 + c * (1 - gate)) * _at(dv + start, t, d, T, D)
    tl.store(s + start + t * D + d, gradient.to(s.dtype.element_ty), mask=(t < T) & (d < D))
    parts += tl.program_id(0).to(tl.int64) * (K + 1) * D
    for i in tl.static_range(K):
        of_tap = tl.sum(gradient * _at(u + start, t - K + 1 + i, d, T, D), axis=0, keep_dims=True)
        tl.store(parts + i * D + d, of_tap, mask=d < D)
    tl.store(parts + K * D + d, tl.sum(gradient, axis=0, keep_dims=True), mask=d < D)


@triton.jit
def _input_gradient(weight, s, du, T, D, K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    start, t, d = _place(T, D, TOKENS, CHANNELS)
    value = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for i in tl.static_range(K):
        value += tl.load(weight + d * K + i, mask=d < D, other=0.0) * _at(s + start, t + K - 1 - i, d, T, D)
    tl.store(du + start + t * D + d, value.to(du.dtype.element_ty), mask=(t < T) & (d < D))


def _grid(u: Tensor) -> tuple[int, int]:
    B, T, D = u.shape
    return B * triton.cdiv(T, TOKENS), triton.cdiv(D, CHANNELS)


@torch.library.custom_op("recall::silu_conv", mutates_args=())
def silu_conv(u_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor) -> Tensor:
    u, (_, T, D), K = u_BTD.contiguous(), u_BTD.shape, weight_DK.shape[1]
    v = torch.empty_like(u)
    _forward[_grid(u)](u, weight_DK.contiguous(), bias_D, v, T, D, K, TOKENS, CHANNELS, num_warps=WARPS)
    return v


@torch.library.custom_op("recall::silu_conv_backward", mutates_args=())
def silu_conv_backward(
    u_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor, dv_BTD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    u, dv, weight = u_BTD.contiguous(), dv_BTD.contiguous(), weight_DK.contiguous()
    (_, T, D), K, grid = u.shape, weight.shape[1], _grid(u)
    s, du = torch.empty_like(u), torch.empty_like(u)
    parts = u.new_empty(grid[0], K + 1, D, dtype=torch.float32)
    _conv_gradient[grid](u, weight, bias_D, dv, s, parts, T, D, K, TOKENS, CHANNELS, num_warps=WARPS)
    _input_gradient[grid](weight, s, du, T, D, K, TOKENS, CHANNELS, num_warps=WARPS)
    of_weight, of_bias = parts.sum(0).split([K, 1])
    return du, of_weight.T.contiguous(), of_bias[0].clone()


@silu_conv.register_fake
def _(u_BTD, weight_DK, bias_D):
    return torch.empty_like(u_BTD, memory_format=torch.contiguous_format)


@silu_conv_backward.register_fake
def _(u_BTD, weight_DK, bias_D, dv_BTD):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (u_BTD, weight_DK, bias_D))


def _backward(ctx, dv_BTD):
    return silu_conv_backward(*ctx.saved_tensors, dv_BTD)


silu_conv.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
