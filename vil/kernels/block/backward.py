"""Backward pass of one fused block on NVIDIA GPUs, which recomputes convolutions, projections and gate.

B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
M output tokens    H tokens that each direction reads    E columns of uz
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import given
from ..cuda import products
from ..scan import cuda_scan as scans
from . import kernels
from .forward import REVERSE, project, project_pooled, split
from .kernels import PackedWeights
from .lines import Lines
from .tokens import Tokens
from .weights import BackwardInputs, BackwardOptions, SavedForBackward, Sizes


class DirectionGradients(NamedTuple):
    """Gradients of both directions' weights, some of them as partial sums that `unpack_gradients` adds up."""

    filters: Tensor
    x_proj: Tensor
    step_proj: Tensor
    skips: Tensor
    step_bias: Tensor  # (parts, 2, D): partial sums
    A: Tensor | None  # (2, D, N) for the selective recurrence, otherwise empty or None


def backward_block(
    options: BackwardOptions, sizes: Sizes, inputs: BackwardInputs, dx_TC: Tensor, dout_TC: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:  # fmt: skip
    """Return the gradients of a block's input x and of its weights.

    Args:
        options: Options of the forward pass.
        sizes: Sizes of the weights, which the forward pass saves in packed form.
        inputs: Tensors of the forward pass.
        dx_TC: Gradient of the block's output, fp32.
        dout_TC: Copy of dx_TC in the dtype of matrix products. If the argument is None, the copy is computed.

    Returns:
        The gradient of x, a copy of the gradient of x in the dtype of matrix products, the gradient of xhat (the
        RMSNorm of x), and a list of the gradients of the weights. If xhat was an input of the block, the gradient of x
        does not include the gradient through xhat, and the copy is None. Otherwise, the gradient of xhat is None. The
        list contains the gradient of A_log (selective recurrence only), and one flat tensor with the gradients of all
        other weights.
    """
    scale_B, norm_C, in_proj, saved = inputs
    xhat_TC, rstd_T = given(saved.xhat), given(saved.rstd)
    (B, L, _), C, dtype = saved.uz.shape, sizes.C, saved.uz.dtype
    dout_TC = dx_TC.to(dtype) if dout_TC is None else dout_TC
    tokens = Tokens(L, options.class_token_only)
    w = PackedWeights.of(saved.packed, sizes)
    u_BLD, z_BMD = split(saved.uz, xhat_TC, w, tokens)
    # in a pooled block, dy needs its own memory, because `pooled_conv_backward` reads neighbours of dy while writing du
    if options.class_token_only:
        dy_BLD = torch.zeros_like(saved.uz)
        duz_BLE = du_BLD = dy_BLD if options.lines is None else torch.empty_like(dy_BLD)
        dz_BMD = torch.empty_like(z_BMD)
    else:
        duz_BLE = torch.empty_like(saved.uz)
        du_BLD, dz_BMD = duz_BLE.chunk(2, dim=-1)
        dy_BLD = du_BLD if options.lines is None else torch.empty_like(saved.mean)
    gated_BMD = kernels.gate_outproj_backward(
        dout_TC, w.out_proj, saved.mean, z_BMD, scale_B, tokens.outputs(dy_BLD), dz_BMD
    )
    dout_proj = products.over_tokens(dout_TC, gated_BMD.flatten(0, 1))
    if options.lines is None:
        of_directions = _through_directions(options.recurrence, u_BLD, dy_BLD, du_BLD, w, saved, tokens)
    else:
        of_directions = _through_lines(options.recurrence, options.lines, u_BLD, dy_BLD, du_BLD, w, saved)
    dfolded, dxhat_TC = _through_in_proj(duz_BLE, dz_BMD, w, xhat_TC, tokens)
    dfilters, dx_proj, dstep_proj, dskips, dstep_bias, dA_2DN = of_directions
    dweights = kernels.unpack_gradients(
        norm_C, in_proj, sizes, dfolded, dout_proj, dfilters, dx_proj, dstep_proj, dskips, dstep_bias, dtype
    )
    # the gradient of A_log is dA * A, because A = -exp(A_log)
    dA_log = [] if saved.A is None else [(given(dA_2DN) * saved.A).to(norm_C.dtype)]
    gradients = [*dA_log, dweights]

    if options.class_token_only:  # the residual streams of all tokens except the class token have zero gradients
        dx_TC = F.pad(dx_TC.view(B, 1, C), (0, 0, tokens.class_token, L // 2)).view(-1, C)
    if options.norm_given:
        return dx_TC, None, dxhat_TC, gradients
    return *kernels.norm_backward(dxhat_TC, xhat_TC, rstd_T, dx_TC), None, gradients


def _through_directions(
    recurrence: str, u_BLD: Tensor, dy_BLD: Tensor, du_BLD: Tensor, w: PackedWeights, saved: SavedForBackward,
    tokens: Tokens,
) -> DirectionGradients:  # fmt: skip
    """Backpropagate through the scans, projections and convolutions of both directions, and write `du_BLD`."""
    p = project(u_BLD, w, tokens.H, True)
    dv_2BHD, dstep_logits_2BHD, dk_2BHN, dq_2BHN, dA_2DN, dchannels = scans.scan_backward(
        recurrence, tokens.read_by_both(dy_BLD), p.v, given(p.step_logits), p.k, p.q, saved.A, w.skip,
        w.step_bias, saved.states, REVERSE, overwrite_step_logits=True,
    )  # fmt: skip
    v_2TD, dstep_logits_2TD, step_2TR, dk_2TN, dq_2TN = (
        t.flatten(1, 2) for t in (p.v, dstep_logits_2BHD, p.step, dk_2BHN, dq_2BHN)
    )
    dprojected_2TP, dstep_proj = kernels.step_proj_backward(dstep_logits_2TD, step_2TR, w.step_proj, dk_2TN, dq_2TN)
    dx_proj = products.batched_over_tokens(dprojected_2TP, v_2TD)
    dfilters = kernels.conv_backward(u_BLD, dv_2BHD, dprojected_2TP, w.x_proj, w.conv, w.conv_bias, du_BLD)
    return DirectionGradients(dfilters, dx_proj, dstep_proj, dchannels[None, :, 0], dchannels[None, :, 1], dA_2DN)


def _through_lines(
    recurrence: str, lines: Lines, u_BLD: Tensor, dy_BLD: Tensor, du_BLD: Tensor, w: PackedWeights,
    saved: SavedForBackward,
) -> DirectionGradients:  # fmt: skip
    """Backpropagate through a pooled block's scan, projections and convolutions, and write `du_BLD`."""
    means_2BSD, dy_BSD = given(saved.line_means), kernels.sum_lines(dy_BLD, lines)
    dA_2DN: Tensor | None
    if kernels.backpropagates_lines(recurrence, means_2BSD, w.x_proj, w.step_proj):
        dmeans_2BSD, dx_proj, dstep_proj, dstep_bias = kernels.scan_lines_backward(
            means_2BSD, w.x_proj, w.step_proj, w.step_bias, dy_BSD
        )
        dA_2DN = None
    else:
        dmeans_2BSD, dx_proj, dstep_proj, dstep_bias, dA_2DN = _through_scan(recurrence, means_2BSD, dy_BSD, w, saved)
    dfilters, dskips = kernels.pooled_conv_backward(
        u_BLD, dy_BLD, dmeans_2BSD, w.conv, w.conv_bias, w.skip, du_BLD, lines
    )
    # the scan of a pooled block has no skip connection
    return DirectionGradients(dfilters, dx_proj, dstep_proj, dskips, dstep_bias, dA_2DN)


def _through_scan(
    recurrence: str, means_2BSD: Tensor, dy_BSD: Tensor, w: PackedWeights, saved: SavedForBackward
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backpropagate through a pooled block's scan and projections with separate kernels.

    Returns the gradients of the means, x_proj, step_proj, step_bias and A, in the form of `DirectionGradients`.
    """
    p = project_pooled(means_2BSD, w)
    dmeans_2BSD, dstep_logits_2BSD, dk_2BSN, dq_2BSN, dA_2DN, dchannels = scans.scan_backward(
        recurrence, dy_BSD.expand(2, -1, -1, -1), p.v, given(p.step_logits), p.k, p.q, saved.A, None, w.step_bias,
        saved.states, REVERSE, overwrite_step_logits=True,
    )  # fmt: skip
    means_2TD, dmeans_2TD, dstep_logits_2TD, step_2TR, dk_2TN, dq_2TN = (
        t.flatten(1, 2) for t in (p.v, dmeans_2BSD, dstep_logits_2BSD, p.step, dk_2BSN, dq_2BSN)
    )
    dprojected_2TP, dstep_proj = kernels.step_proj_backward(dstep_logits_2TD, step_2TR, w.step_proj, dk_2TN, dq_2TN)
    dx_proj = products.batched_over_tokens(dprojected_2TP, means_2TD)
    dmeans_2TD.baddbmm_(dprojected_2TP, w.x_proj)
    return dmeans_2BSD, dx_proj, dstep_proj, dchannels[None, :, 1], dA_2DN


def _through_in_proj(
    duz_BLE: Tensor, dz_BMD: Tensor, w: PackedWeights, xhat_TC: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the matrix in_proj * norm weight and of its input xhat, the normalized tokens.

    The first result (parts, 2D, C) consists of partial sums over tokens.
    """
    (B, L, E), duz_TE = duz_BLE.shape, duz_BLE.flatten(0, 1)
    if not tokens.class_token_only:
        return products.over_tokens(duz_TE, xhat_TC), torch.mm(duz_TE, w.in_proj)
    # the gradient of z has fewer tokens than the gradient of u, so `duz_BLE` contains only the gradient of u
    dfolded, dxhat_TC = products.mm_in_fp32(duz_TE.t(), xhat_TC), torch.mm(duz_TE, w.in_proj[:E])
    dz_BD = dz_BMD.squeeze(1)
    xhat_BC, dxhat_BC = (tokens.outputs(t_TC.view(B, L, -1)).squeeze(1) for t_TC in (xhat_TC, dxhat_TC))
    dfolded = torch.cat([dfolded, products.mm_in_fp32(dz_BD.t(), xhat_BC)])
    dxhat_BC.addmm_(dz_BD, w.in_proj[E:])
    return dfolded[None], dxhat_TC
