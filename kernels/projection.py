"""Convolutions, SiLU and the small projections of both directions in one Triton kernel: what the recurrence reads.

T tokens of the batch    D channels    K taps    R rank of the step, N states, P = R + 2N    2 directions
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def project(
    u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For each direction v = silu(convolution(u)), projected = x_proj v and logits = step_proj projected[:R].

    Args:
        u_BLD: Tokens, the last dimension contiguous.
        conv_2DK: Weights of the convolutions, fp32; the last of the K taps is the token itself.
        conv_bias_2D: Their biases, fp32.
        x_proj_2PD: Projection to step, key and query.
        step_proj_2DR: Projection of the step to the channels' logits.

    Returns:
        v_2BLD, projected_2BLP and logits_2BLD in u's dtype.
    """
    (B, L, D), P, R = u_BLD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    new = {"device": u_BLD.device, "dtype": u_BLD.dtype}
    v_2BLD, logits_2BLD = torch.empty(2, B, L, D, **new), torch.empty(2, B, L, D, **new)
    projected_2BLP = torch.empty(2, B, L, P, **new)
    block_tokens = 64 if B * L > 8192 else 16
    _project[(triton.cdiv(B * L, block_tokens), 2)](
        u_BLD, conv_2DK, conv_bias_2D, x_proj_2PD, step_proj_2DR, v_2BLD, projected_2BLP, logits_2BLD, B * L, L, u_BLD.stride(1), D, P, R,
        BLOCK_P=triton.next_power_of_2(P), BLOCK_T=block_tokens, BLOCK_D=64, TAPS=conv_2DK.shape[2], num_warps=4,
    )  # fmt: skip
    return v_2BLD, projected_2BLP, logits_2BLD


@triton.jit
def _project(
    u, weights, biases, x_proj, step_proj, v, projected, logits, T, L, u_stride, D: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    # a program takes some tokens of one direction; tokens outside of their sequence are zero
    g = tl.program_id(1)
    toward = 1 - 2 * g  # the step to the next token in the order of reading
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists, place, row = t < T, t % L, t.to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    sums = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        here = d < D
        conv = tl.zeros([BLOCK_T, BLOCK_D], tl.float32) + tl.load(biases + g * D + d, here, 0.0)[None, :]
        for tap in tl.static_range(TAPS):
            offset = (tap - (TAPS - 1)) * toward
            inside = exists & (place + offset >= 0) & (place + offset < L)
            tokens = tl.load(u + (row + offset)[:, None] * u_stride + d[None, :], inside[:, None] & here[None, :], 0.0)
            conv += tl.load(weights + (g * D + d) * TAPS + tap, here, 0.0)[None, :] * tokens.to(tl.float32)
        value = (conv / (1 + tl.exp(-conv))).to(v.dtype.element_ty)
        tl.store(v + (g * T + row)[:, None] * D + d[None, :], value, exists[:, None] & here[None, :])
        weight = tl.load(x_proj + (g * P + p)[None, :] * D + d[:, None], (p < P)[None, :] & here[:, None], 0.0)
        sums = tl.dot(value, weight, sums, input_precision="ieee")
    rounded = sums.to(v.dtype.element_ty)
    tl.store(projected + (g * T + row)[:, None] * P + p[None, :], rounded, exists[:, None] & (p < P)[None, :])
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        here = d < D
        weight = tl.load(step_proj + (g * D + d)[None, :] * R + p[:, None], (p < R)[:, None] & here[None, :], 0.0)
        logit = tl.dot(rounded, weight, input_precision="ieee").to(v.dtype.element_ty)
        tl.store(logits + (g * T + row)[:, None] * D + d[None, :], logit, exists[:, None] & here[None, :])
