"""Bidirectional block on CPUs in fp32, with few passes over memory, and its gradient.

Norms, convolutions, gates and scans are kernels compiled by Numba, which also compute the projections of row and column
means. PyTorch computes the other matrix products. `fused_operator` decides for which tensors the block runs fused.
Under compilers, dispatch modes and functional transforms, a block runs unfused. `cpu_tokens` has the mixer of full
blocks, which scan all tokens, and `cpu_lines` has the mixer of pooled blocks.

    B batch    L tokens    T tokens of the batch    C model width    D inner width    E 2D
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import once_differentiable
from ..cpu.compiler import addresses, kernel_of
from . import cpu_lines, cpu_tokens
from .cpu_launch import ROWS, over_tokens
from .tokens import Tokens
from .weights import BlockWeights, Normed, Options, needs_gradients

MixerSaved = cpu_tokens.Saved | cpu_lines.Saved | cpu_lines.SavedOfClassToken

_kernel = functools.partial(kernel_of, f"{__package__}.cpu_kernels")


def run_blocks(
    x_BLC: Tensor,
    weights: Sequence[BlockWeights],
    options: Sequence[Options],
    scales: Sequence[Tensor | None],
    normed: Normed | None = None,
) -> tuple[Tensor, None]:
    """Run consecutive blocks on a CPU in fp32, as `block_op.run_blocks` does on a GPU, but return no norm."""
    for own in zip(weights, options, scales):
        x_BLC = _block(x_BLC, *own)
    return x_BLC, None


def _block(x_BLC: Tensor, weights: BlockWeights, options: Options, scale_B: Tensor | None) -> Tensor:
    x_BLC, scale_B, flat = x_BLC.contiguous(), None if scale_B is None else scale_B.contiguous(), weights.flat()
    if not all([t.is_contiguous() for t in flat]):  # noqa: C419  all() is faster on a list than on a generator
        weights = BlockWeights.of([t.contiguous() for t in flat])
    if needs_gradients(x_BLC, weights):
        y_BMC = _Block.apply(options, x_BLC, scale_B, *weights.flat())
    else:
        y_BMC, *_ = _forward(options, x_BLC, scale_B, weights, keep=False)
    # a block without pooling computes all tokens, so select the tokens to return
    return y_BMC if options.lines else Tokens(x_BLC.shape[1], options.class_token_only).outputs(y_BMC)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, x_BLC, scale_B, *flat):
        y_BMC, *saved, mixer = _forward(options, x_BLC, scale_B, BlockWeights.of(flat), keep=True)
        ctx.options, ctx.weight_count, ctx.mixer_type = options, len(flat), type(mixer)
        ctx.save_for_backward(x_BLC, scale_B, *saved, *flat, *mixer)
        return y_BMC

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BMC):
        x_BLC, scale_B, rstd_T, h_TC, uz_BLE, *tensors = ctx.saved_tensors
        weights, mixer = BlockWeights.of(tensors[: ctx.weight_count]), ctx.mixer_type(*tensors[ctx.weight_count :])
        dy_BMC = dy_BMC.contiguous()
        with torch.autocast("cpu", enabled=False):  # the kernels need fp32 matrix products
            dx_BLC, dweights = _backward(ctx.options, dy_BMC, x_BLC, scale_B, weights, rstd_T, h_TC, uz_BLE, mixer)
        return None, dx_BLC, None, *dweights.flat()


def _forward(
    options: Options, x_BLC: Tensor, scale_B: Tensor | None, weights: BlockWeights, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, MixerSaved]:
    """Return the block's output and the tensors for backward: rstd, h, uz and the mixer's tensors.

    If only the class token is needed, a pooled block computes z and the output only for the class token, and uz
    contains only u, (B, L, D). Unless `keep` is set, the tensors for backward are not valid.
    """
    (B, L, C), D, tokens = x_BLC.shape, weights.out_proj.shape[1], _tokens(options, x_BLC)
    h_TC, rstd_T = _norm(x_BLC.view(B * L, C), weights.norm, options.eps)
    uz_BLE = torch.mm(h_TC, weights.in_proj[: tokens.columns(D)].t()).view(B, L, -1)
    saved: MixerSaved
    if tokens.class_token_only:
        z_BD = torch.mm(_class_tokens(h_TC, tokens), weights.in_proj[D:].t())
        gated, saved = cpu_lines.forward_of_class_token(options, uz_BLE, z_BD, scale_B, weights)
    else:
        mixer = cpu_tokens if options.lines is None else cpu_lines
        gated, saved = mixer.forward(options, uz_BLE, scale_B, weights, keep)
    x = tokens.outputs(x_BLC).reshape(-1, C)
    y = torch.mm(gated.view(-1, D), weights.out_proj.t()).add_(x)  # on some CPUs, addmm is slower than mm and add_
    return y.view(B, -1, C), rstd_T, h_TC, uz_BLE, saved


def _backward(
    options: Options, dy_BMC: Tensor, x_BLC: Tensor, scale_B: Tensor | None, weights: BlockWeights, rstd_T: Tensor,
    h_TC: Tensor, uz_BLE: Tensor, saved: MixerSaved,
) -> tuple[Tensor, BlockWeights]:  # fmt: skip
    """Return the gradients of x and of all weights."""
    (B, L, C), D, tokens = x_BLC.shape, weights.out_proj.shape[1], _tokens(options, x_BLC)
    dout, duz_BLE = dy_BMC.view(-1, C), torch.empty_like(uz_BLE)
    dgated = torch.mm(dout, weights.out_proj)
    if isinstance(saved, cpu_lines.SavedOfClassToken):
        gated, dz_BD, directions = cpu_lines.backward_of_class_token(
            options, dgated, uz_BLE, scale_B, weights, saved, duz_BLE
        )
    else:
        mixer = cpu_tokens if options.lines is None else cpu_lines
        gated, directions = mixer.backward(options, dgated.view(B, L, D), uz_BLE, scale_B, weights, saved, duz_BLE)
    duz_TE = duz_BLE.view(B * L, -1)
    dh_TC, din_proj = torch.mm(duz_TE, weights.in_proj[: tokens.columns(D)]), torch.mm(duz_TE.t(), h_TC)
    dout_proj = torch.mm(dout.t(), gated.view(-1, D))
    if tokens.class_token_only:
        _class_tokens(dh_TC, tokens).add_(torch.mm(dz_BD, weights.in_proj[D:]))
        din_proj = torch.cat([din_proj, torch.mm(dz_BD.t(), _class_tokens(h_TC, tokens))])
        dout, dout_BC = x_BLC.new_zeros(B * L, C), dout
        _class_tokens(dout, tokens).copy_(dout_BC)
    dx_TC, dnorm_C = _norm_backward(x_BLC.view(B * L, C), weights.norm, rstd_T, dh_TC, dout)
    return dx_TC.view(B, L, C), BlockWeights(dnorm_C, din_proj, dout_proj, directions)


def _tokens(options: Options, x_BLC: Tensor) -> Tokens:
    """Return the tokens whose output `_forward` computes, which are always all tokens in a block without pooling."""
    return Tokens(x_BLC.shape[1], options.class_token_only and options.lines is not None)


def _class_tokens(t_TX: Tensor, tokens: Tokens) -> Tensor:
    """Return a view (B, X) of the class token of each image."""
    return t_TX.view(-1, tokens.L, t_TX.shape[1])[:, tokens.class_token]


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
    """Return the gradients of x and of the weight gamma, given the gradients of the norm and of the residual stream."""
    T, C = x_TC.shape
    dx_TC, dgamma = torch.empty_like(x_TC), x_TC.new_empty(-(-T // ROWS), C)
    tensors = addresses(x_TC, gamma_C, rstd_T, dh_TC, dout_TC, dx_TC, dgamma)
    over_tokens(_kernel("norm_backward"), T, C, T, *tensors)
    return dx_TC, dgamma.sum(0)
