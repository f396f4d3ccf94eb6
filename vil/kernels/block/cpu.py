"""Bidirectional block on CPUs in fp32, with few passes over memory, and its gradient.

Norm, convolutions, means, gate and the scan are kernels compiled by Numba (`passes`, `scans`); products are PyTorch's.
`fused_operator` decides for which tensors the block runs fused. Under compilers, modes and functional transforms, the
separate parts of the block run instead.

    B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
    E 2D    P columns of x_proj, R + 2N    l tokens that the recurrence reads: L, or the row means of a pooled block
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import given, once_differentiable
from ..scan import cpu_scan as scans
from . import cpu_passes as passes
from .lines import Lines
from .tokens import Tokens
from .weights import BlockWeights, DirectionWeights, Normed, Options, needs_gradients

REVERSE = (False, True)


class Saved(NamedTuple):
    """Tensors that forward saves for backward, in addition to its inputs."""

    rstd: Tensor  # (T,) of the norm
    h: Tensor  # (T, C), normed
    uz: Tensor  # (B, L, E)
    v: Tensor  # (2, B, l, D), convolved tokens, or their row or column means
    projected: Tensor  # (2, Bl, P)
    step_logits: Tensor  # (2, Bl, D)
    y: Tensor  # (2, B, l, D), outputs of both directions
    states: Tensor  # (2, B, S, N, D), states between chunks of tokens
    skipped: Tensor | None  # (B, L, D), mean of both directions' skip connections, only in a pooled block


class Scanned(NamedTuple):
    """Input tensors of `cpu_scan.forward` and `cpu_scan.backward`."""

    x: Tensor
    step_logits: Tensor
    k: Tensor
    q: Tensor
    A: Tensor | None
    skip: Tensor | None
    step_bias: Tensor


def block(
    x_BLC: Tensor, weights: BlockWeights, options: Options, scale_B: Tensor | None = None, normed: Normed | None = None
) -> tuple[Tensor, None]:
    """Run a block on a CPU in fp32, as `block_op.block` does on a GPU, but without the norm for the next block."""
    x_BLC, weights = x_BLC.contiguous(), BlockWeights.of([t.contiguous() for t in weights.flat()])
    scale_B = None if scale_B is None else scale_B.contiguous()
    if needs_gradients(x_BLC, weights):
        y_BLC = _Block.apply(options, x_BLC, scale_B, *weights.flat())
    else:
        y_BLC, _ = _forward(options, x_BLC, scale_B, weights, keep=False)
    return Tokens(y_BLC.shape[1], options.class_token_only).outputs(y_BLC), None


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, x_BLC, scale_B, *flat):
        y_BLC, saved = _forward(options, x_BLC, scale_B, BlockWeights.of(flat), keep=True)
        ctx.options = options
        ctx.save_for_backward(x_BLC, scale_B, *saved, *flat)
        return y_BLC

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BLC):
        x_BLC, scale_B, *tensors = ctx.saved_tensors
        saved, weights = Saved(*tensors[: len(Saved._fields)]), BlockWeights.of(tensors[len(Saved._fields) :])
        dx_BLC, dweights = _backward(ctx.options, dy_BLC.contiguous(), x_BLC, scale_B, weights, saved)
        return None, dx_BLC, None, *dweights.flat()


def _forward(
    options: Options, x_BLC: Tensor, scale_B: Tensor | None, weights: BlockWeights, keep: bool
) -> tuple[Tensor, Saved]:
    """Return the block's output, and the tensors for backward, which are only valid if `keep` is set."""
    (B, L, C), D, lines = x_BLC.shape, weights.out_proj.shape[1], options.lines
    x_TC = x_BLC.view(-1, C)
    h_TC, rstd_T = passes.norm_forward(x_TC, weights.norm, options.eps)
    uz_BLE = torch.mm(h_TC, weights.in_proj.t()).view(B, L, -1)
    v_2BlD, skipped_BLD = _convolve(uz_BLE, weights, lines, keep)
    projected_2TP, step_logits_2TD = _project(v_2BlD.view(2, -1, D), weights)
    scanned = _scanned(v_2BlD, projected_2TP, step_logits_2TD, weights, lines)
    y_2BlD, states = scans.forward(options.recurrence, *scanned, REVERSE, keep)
    gated_BLD = _gate(y_2BlD, skipped_BLD, uz_BLE, scale_B, lines, keep)
    y_TC = torch.addmm(x_TC, gated_BLD.view(-1, D), weights.out_proj.t())
    saved = Saved(rstd_T, h_TC, uz_BLE, v_2BlD, projected_2TP, step_logits_2TD, y_2BlD, states, skipped_BLD)
    return y_TC.view(B, L, C), saved


def _backward(
    options: Options, dy_BLC: Tensor, x_BLC: Tensor, scale_B: Tensor | None, weights: BlockWeights, saved: Saved
) -> tuple[Tensor, BlockWeights]:
    """Return the gradients of x and of all weights."""
    (_, L, C), D, lines, duz_BLE = x_BLC.shape, weights.out_proj.shape[1], options.lines, torch.empty_like(saved.uz)
    dout_TC = dy_BLC.view(-1, C)
    dgated_BLD = torch.mm(dout_TC, weights.out_proj).view(-1, L, D)
    gated_BLD, dy_BlD, dskipped_BLD = _gate_backward(dgated_BLD, saved, scale_B, lines, duz_BLE)
    dv_2BlD, incomplete = _scan_backward(options.recurrence, dy_BlD, weights, saved, lines)
    directions = _convolve_backward(dv_2BlD, dskipped_BLD, saved.uz, weights, lines, incomplete, duz_BLE)
    duz_TE = duz_BLE.view(-1, 2 * D)
    dh_TC = torch.mm(duz_TE, weights.in_proj)
    dx_TC, dnorm = passes.norm_backward(x_BLC.view(-1, C), weights.norm, saved.rstd, dh_TC, dout_TC)
    din_proj, dout_proj = torch.mm(duz_TE.t(), saved.h), torch.mm(dout_TC.t(), gated_BLD.view(-1, D))
    return dx_TC.view_as(x_BLC), BlockWeights(dnorm, din_proj, dout_proj, directions)


def _convolve(uz_BLE: Tensor, weights: BlockWeights, lines: Lines | None, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Return both directions' convolved tokens or their line means, and the skip connections of a pooled block."""
    if lines is None:
        return passes.conv_forward(uz_BLE, weights), None
    u_BLD = uz_BLE[..., : uz_BLE.shape[2] // 2]
    skipped_BLD = torch.empty_like(u_BLD, memory_format=torch.contiguous_format) if keep else u_BLD
    return passes.pool_forward(uz_BLE, weights, lines, skipped_BLD), skipped_BLD


def _convolve_backward(
    dv_2BlD: Tensor, dskipped_BLD: Tensor | None, uz_BLE: Tensor, weights: BlockWeights, lines: Lines | None,
    directions: list[DirectionWeights], duz_BLE: Tensor,
) -> tuple[DirectionWeights, DirectionWeights]:  # fmt: skip
    """Write the gradient of u to `duz_BLE`, and add the gradients of filters to those of both directions' weights."""
    K = weights.sizes().K
    if lines is None:
        dfilters = passes.conv_backward(dv_2BlD, uz_BLE, weights, duz_BLE)
    else:
        dfilters = passes.pool_backward(dv_2BlD, given(dskipped_BLD), uz_BLE, weights, lines, duz_BLE)
        directions = [direction._replace(skip=dskip_D) for direction, dskip_D in zip(directions, dfilters[:, K + 1])]
    first, second = (
        direction._replace(conv=d[:K].t().unsqueeze(1), conv_bias=d[K]) for direction, d in zip(directions, dfilters)
    )
    return first, second


def _gate(
    y_2BlD: Tensor, skipped_BLD: Tensor | None, uz_BLE: Tensor, scale_B: Tensor | None, lines: Lines | None, keep: bool
) -> Tensor:
    """Return the input of out_proj. Unless `keep` is set, it overwrites the skip connections of a pooled block."""
    if lines is None:
        return passes.gate_forward(y_2BlD, uz_BLE, scale_B)
    skipped_BLD = given(skipped_BLD)
    gated_BLD = torch.empty_like(skipped_BLD) if keep else skipped_BLD
    passes.pooled_gate_forward(y_2BlD, skipped_BLD, uz_BLE, scale_B, lines, gated_BLD)
    return gated_BLD


def _gate_backward(
    dgated_BLD: Tensor, saved: Saved, scale_B: Tensor | None, lines: Lines | None, duz_BLE: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write the gradient of z to `duz_BLE`.

    Return the input of out_proj, the gradient of each direction's y, and the gradient of a pooled block's skip
    connections, which overwrites `dgated_BLD`.
    """
    if lines is None:
        return *passes.gate_backward(dgated_BLD, saved.y, saved.uz, scale_B, duz_BLE), None
    skipped_BLD = given(saved.skipped)
    gated_BLD, dy_BSD = passes.pooled_gate_backward(dgated_BLD, saved.y, skipped_BLD, saved.uz, scale_B, lines, duz_BLE)
    return gated_BLD, dy_BSD, dgated_BLD


def _project(v_2TD: Tensor, weights: BlockWeights) -> tuple[Tensor, Tensor]:
    """Return both directions' x_proj outputs, and step sizes before bias and activation."""
    # the copy is row-major, so that a token's keys and queries are contiguous, as the scan's kernel requires
    projected_2TP = torch.bmm(_both(weights, "x_proj"), v_2TD.mT).mT.contiguous()
    return projected_2TP, torch.bmm(projected_2TP[..., : weights.sizes().R], _both(weights, "step_proj").mT)


def _scanned(
    v_2BlD: Tensor, projected_2TP: Tensor, step_logits_2TD: Tensor, weights: BlockWeights, lines: Lines | None
) -> Scanned:
    """Return the inputs of the scan, which does not add the skip connections of a pooled block."""
    (_, _, N, R, _), shape = weights.sizes(), v_2BlD.shape[1:3]
    k_2TN, q_2TN = projected_2TP[..., R : R + N], projected_2TP[..., R + N :]
    step_logits, k, q = (t.unflatten(1, shape) for t in (step_logits_2TD, k_2TN, q_2TN))
    A_2DN = None if weights.directions[0].A_log is None else -_both(weights, "A_log").exp()
    skip_2D = _both(weights, "skip") if lines is None else None
    return Scanned(v_2BlD, step_logits, k, q, A_2DN, skip_2D, _both(weights, "step_bias"))


def _scan_backward(
    recurrence: str, dy_BlD: Tensor, weights: BlockWeights, saved: Saved, lines: Lines | None
) -> tuple[Tensor, list[DirectionWeights]]:
    """Backpropagate through scans and projections to v. The gradient of y is equal for both directions.

    Also return the gradients of both directions' weights, where the gradients of filters are missing.
    """
    (B, L, D), T, R = dy_BlD.shape, saved.projected.shape[1], weights.sizes().R
    scanned = _scanned(saved.v, saved.projected, saved.step_logits, weights, lines)
    dv_2BlD, dstep_logits_2BlD, dk_2BlN, dq_2BlN, dA_2DN, dchannels_22D = scans.backward(
        recurrence, dy_BlD.expand(2, B, L, D), *scanned, saved.states, REVERSE
    )
    v_2TD, dv_2TD, dstep_logits_2TD = (t.view(2, T, D) for t in (saved.v, dv_2BlD, dstep_logits_2BlD))
    # a product with few rows takes half as long as one with few columns
    dstep_2RT = torch.bmm(_both(weights, "step_proj").mT, dstep_logits_2TD.mT)
    dprojected_2TP = torch.cat([dstep_2RT.mT, dk_2BlN.view(2, T, -1), dq_2BlN.view(2, T, -1)], dim=2)
    dv_2TD.baddbmm_(dprojected_2TP, _both(weights, "x_proj"))
    dx_proj_2PD = torch.bmm(dprojected_2TP.mT, v_2TD)
    dstep_proj_2DR = torch.bmm(saved.projected[..., :R].mT, dstep_logits_2TD).mT
    dskip_2D, dstep_bias_2D = dchannels_22D.unbind(1)
    dA_log = (None, None) if scanned.A is None else dA_2DN * scanned.A  # because A = -exp(A_log)
    missing = dx_proj_2PD.new_empty(0)
    return dv_2BlD, [
        DirectionWeights(missing, missing, dx_proj_2PD[g], dstep_proj_2DR[g], dstep_bias_2D[g], dskip_2D[g], dA_log[g])
        for g in (0, 1)
    ]


def _both(weights: BlockWeights, name: str) -> Tensor:
    return torch.stack([getattr(direction, name) for direction in weights.directions])
