"""Bidirectional block on CPUs in fp32, with few passes over memory, and its gradient.

Norms, convolutions, gates and scans are kernels compiled by Numba, which also compute the projections of row and column
means. PyTorch computes the other matrix products. `fused_operator` decides for which tensors the block runs fused.
Under compilers, modes and functional transforms, the separate parts of the block run instead. `cpu_tokens` and
`cpu_lines` have the mixers of full and pooled blocks.

    B batch    L tokens    T tokens of the batch    C model width    D inner width    E 2D
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from ..checks import once_differentiable
from . import cpu_lines, cpu_tokens
from .cpu_launch import ROWS, addresses, kernel_of, over_tokens
from .tokens import Tokens
from .weights import BlockWeights, Normed, Options, needs_gradients

_kernel = functools.partial(kernel_of, "cpu_kernels")


def block(
    x_BLC: Tensor, weights: BlockWeights, options: Options, scale_B: Tensor | None = None, normed: Normed | None = None
) -> tuple[Tensor, None]:
    """Run a block on a CPU in fp32, as `block_op.block` does on a GPU, but without the norm for the next block."""
    x_BLC, scale_B, flat = x_BLC.contiguous(), None if scale_B is None else scale_B.contiguous(), weights.flat()
    if not all([t.is_contiguous() for t in flat]):  # noqa: C419  a list is faster than a generator
        weights = BlockWeights.of([t.contiguous() for t in flat])
    if needs_gradients(x_BLC, weights):
        y_BLC = _Block.apply(options, x_BLC, scale_B, *weights.flat())
    else:
        y_BLC, *_ = _forward(options, x_BLC, scale_B, weights, keep=False)
    return Tokens(y_BLC.shape[1], options.class_token_only).outputs(y_BLC), None


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, x_BLC, scale_B, *flat):
        y_BLC, *saved, mixer = _forward(options, x_BLC, scale_B, BlockWeights.of(flat), keep=True)
        ctx.options, ctx.weight_count, ctx.mixer_type = options, len(flat), type(mixer)
        ctx.save_for_backward(x_BLC, scale_B, *saved, *flat, *mixer)
        return y_BLC

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BLC):
        x_BLC, scale_B, rstd_T, h_TC, uz_BLE, *tensors = ctx.saved_tensors
        weights, mixer = BlockWeights.of(tensors[: ctx.weight_count]), ctx.mixer_type(*tensors[ctx.weight_count :])
        dy_BLC = dy_BLC.contiguous()
        with torch.autocast("cpu", enabled=False):  # the kernels read the products as fp32
            dx_BLC, dweights = _backward(ctx.options, dy_BLC, x_BLC, scale_B, weights, rstd_T, h_TC, uz_BLE, mixer)
        return None, dx_BLC, None, *dweights.flat()


def _forward(
    options: Options, x_BLC: Tensor, scale_B: Tensor | None, weights: BlockWeights, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, cpu_tokens.Saved | cpu_lines.Saved]:
    """Return the block's output and the tensors for backward: rstd, h, uz and those of the mixer.

    Unless `keep` is set, the tensors for backward are not valid.
    """
    (B, L, C), D = x_BLC.shape, weights.out_proj.shape[1]
    x_TC = x_BLC.view(B * L, C)
    h_TC, rstd_T = _norm(x_TC, weights.norm, options.eps)
    uz_BLE = torch.mm(h_TC, weights.in_proj.t()).view(B, L, 2 * D)
    mixer = cpu_tokens if options.lines is None else cpu_lines
    gated_BLD, saved = mixer.forward(options, uz_BLE, scale_B, weights, keep)
    y_TC = torch.mm(gated_BLD.view(B * L, D), weights.out_proj.t()).add_(x_TC)  # addmm is slower on some CPUs
    return y_TC.view(B, L, C), rstd_T, h_TC, uz_BLE, saved


def _backward(
    options: Options, dy_BLC: Tensor, x_BLC: Tensor, scale_B: Tensor | None, weights: BlockWeights, rstd_T: Tensor,
    h_TC: Tensor, uz_BLE: Tensor, saved: cpu_tokens.Saved | cpu_lines.Saved,
) -> tuple[Tensor, BlockWeights]:  # fmt: skip
    """Return the gradients of x and of all weights."""
    (B, L, C), D, duz_BLE = x_BLC.shape, weights.out_proj.shape[1], torch.empty_like(uz_BLE)
    x_TC, dout_TC, duz_TE = x_BLC.view(B * L, C), dy_BLC.view(B * L, C), duz_BLE.view(B * L, 2 * D)
    dgated_BLD = torch.mm(dout_TC, weights.out_proj).view(B, L, D)
    mixer = cpu_tokens if options.lines is None else cpu_lines
    gated_BLD, directions = mixer.backward(options, dgated_BLD, uz_BLE, scale_B, weights, saved, duz_BLE)
    dx_TC, dnorm_C = _norm_backward(x_TC, weights.norm, rstd_T, torch.mm(duz_TE, weights.in_proj), dout_TC)
    din_proj, dout_proj = torch.mm(duz_TE.t(), h_TC), torch.mm(dout_TC.t(), gated_BLD.view(B * L, D))
    return dx_TC.view(B, L, C), BlockWeights(dnorm_C, din_proj, dout_proj, directions)


def _norm(x_TC: Tensor, gamma_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of x, and the reciprocal of each token's root mean square."""
    T, C = x_TC.shape
    h_TC, rstd_T = torch.empty_like(x_TC), x_TC.new_empty(T)
    eps_bits = struct.unpack("i", struct.pack("f", eps))[0]
    over_tokens(_kernel("norm_forward"), T, C, T, eps_bits, *addresses(x_TC, gamma_C, h_TC, rstd_T))
    return h_TC, rstd_T


def _norm_backward(
    x_TC: Tensor, gamma_C: Tensor, rstd_T: Tensor, dh_TC: Tensor, dout_TC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gamma, given the gradients of the norm and of the residual stream."""
    T, C = x_TC.shape
    dx_TC, dgamma = torch.empty_like(x_TC), x_TC.new_empty(-(-T // ROWS), C)
    tensors = addresses(x_TC, gamma_C, rstd_T, dh_TC, dout_TC, dx_TC, dgamma)
    over_tokens(_kernel("norm_backward"), T, C, T, *tensors)
    return dx_TC, dgamma.sum(0)
