"""Forward pass of one fused block on NVIDIA GPUs. Plans of `forward_blocks` record the launches and matrix products.

B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
M output tokens    H tokens that each direction reads    E columns of uz
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import given
from ..scan import cuda_scan as scans
from . import kernels
from .kernels import PackedWeights
from .tokens import Tokens
from .weights import BlockWeights, Inputs, Options, SavedForBackward

REVERSE = (False, True)


class Projected(NamedTuple):
    """Inputs of both directions' scans, computed from u by the convolution and the projections."""

    v: Tensor  # (2, B, H, D): outputs of the convolution or, in a pooled block, their row or column means
    k: Tensor  # (2, B, H, N): keys
    q: Tensor  # (2, B, H, N): queries
    step: Tensor  # (2, B, H, R): low-rank steps, which step_proj expands to step logits
    step_logits: Tensor | None  # (2, B, H, D): step sizes before bias and activation


def forward_block(options: Options, keep: bool, inputs: Inputs, overwrite: bool = False) -> list[Tensor | None]:
    """Return the block's output, xhat and rstd of the output's RMSNorm and, if `keep`, the tensors for backward.

    xhat and rstd are None if the output's norm is not computed. The tensors for backward are those of
    `SavedForBackward`. If `overwrite` is set, the output may overwrite the input x.
    """
    x_BLC, scale_B, normed, weights = inputs
    (B, L, C), D, dtype = x_BLC.shape, weights.out_proj.shape[1], options.dtype
    tokens, x_TC = Tokens(L, options.class_token_only), x_BLC.view(-1, C)
    tiles = None if options.class_token_only else kernels.empty_tiles(B * L, weights.out_proj, dtype)
    lines, in_proj_tiles = options.lines, None
    if lines and not options.class_token_only:
        in_proj_tiles = kernels.empty_in_proj_tiles(B, weights.in_proj, weights.sizes().K, dtype, lines)
    # cuBLAS adds the matrix product with out_proj to the residual stream in place, so copy x if x must be preserved
    copy = not (overwrite or options.class_token_only or kernels.fuses_product(x_TC, D, dtype))
    packed, norm = kernels.pack_weights(
        weights, dtype, tiles, None if normed else x_TC, options.eps, copy, in_proj_tiles
    )  # fmt: skip
    w, A_2DN = PackedWeights.of(packed, weights.sizes()), A_of(weights)
    if normed:
        norm = [*normed, x_TC.clone() if copy else x_TC]
    xhat_TC, rstd_T, x_TC = map(given, norm)
    pooled = None  # row or column means and skip connections, if `in_proj_pool` computes both
    if lines and in_proj_tiles is not None:
        uz_BLE, *pooled = kernels.in_proj_pool(xhat_TC, in_proj_tiles, w.conv, w.conv_bias, w.skip, lines, keep)
    else:
        uz_BLE = torch.mm(xhat_TC, w.in_proj[: tokens.columns(D)].t()).view(B, L, -1)
    u_BLD, z_BMD = split(uz_BLE, xhat_TC, w, tokens)
    kept = (None, None) if normed else (xhat_TC, rstd_T)
    means_2BSD: Tensor | None = None
    if options.lines is None:
        y, states = _read_tokens(options, keep, u_BLD, w, A_2DN, tokens)
    else:
        means_2BSD, skipped_BLD = pooled or kernels.pool(u_BLD, w.conv, w.conv_bias, w.skip, options.lines)
        y, states = _read_lines(options, keep, means_2BSD, skipped_BLD, w, A_2DN, tokens)
    if options.class_token_only:
        x_TC = tokens.outputs(x_BLC).clone(memory_format=torch.contiguous_format).view(B, C)
    eps = options.eps if options.norm_next and not options.class_token_only else None
    out_TC, mean_BMD, next_normed = kernels.gate_outproj(x_TC, y, z_BMD, scale_B, w.out_proj, tiles, keep, eps)
    results = [out_TC.view(B, -1, C), *(next_normed or (None, None))]
    if not keep:
        return results
    return [*results, *SavedForBackward(uz_BLE, mean_BMD, states, packed, A_2DN, means_2BSD, *kept)]


def _read_tokens(
    options: Options, keep: bool, u_BLD: Tensor, w: PackedWeights, A_2DN: Tensor | None, tokens: Tokens
) -> tuple[kernels.GateInputs, Tensor]:
    """Scan all tokens. Return the gate's inputs, and the states that backward needs."""
    schedule, from_step = kernels.schedule_scan(options.recurrence, u_BLD, tokens.H, w.x_proj, w.step_proj)
    p = project(u_BLD, w, tokens.H, not from_step)
    y_2BHD, states = scans.scan_forward(
        options.recurrence, p.v, p.step if from_step else given(p.step_logits), p.k, p.q, A_2DN,
        w.skip, w.step_bias, REVERSE, keep, schedule=schedule, step_proj_GDR=w.step_proj if from_step else None,
    )  # fmt: skip
    return kernels.GateInputs(*tokens.outputs_of_both(y_2BHD)), states


def _read_lines(
    options: Options, keep: bool, means_2BSD: Tensor, skipped_BLD: Tensor, w: PackedWeights, A_2DN: Tensor | None,
    tokens: Tokens,
) -> tuple[kernels.GateInputs, Tensor]:  # fmt: skip
    """Scan row or column means. Return the inputs of the gate, and the states that backward needs."""
    lines = options.lines
    assert lines is not None
    if scan := kernels.line_scan(options.recurrence, means_2BSD, w.x_proj, w.step_proj):
        y_BSD, states = scan(options.recurrence, means_2BSD, w.x_proj, w.step_proj, A_2DN, w.step_bias)
    else:
        p = project_pooled(means_2BSD, w)
        y_2BSD, states = scans.scan_forward(
            options.recurrence, p.v, given(p.step_logits), p.k, p.q, A_2DN, None, w.step_bias, REVERSE, keep
        )
        y_BSD = y_2BSD[0] + y_2BSD[1]
    if tokens.class_token_only:
        skipped_BMD, y_BMD = tokens.outputs(skipped_BLD), y_BSD.narrow(1, lines.class_token, 1)
        return kernels.GateInputs(skipped_BMD.contiguous(), y_BMD.contiguous()), states
    return kernels.GateInputs(skipped_BLD, y_BSD, lines), states


def project_pooled(means_2BSD: Tensor, w: PackedWeights) -> Projected:
    """Project row or column means (2, B, S, D) to the inputs of the recurrence."""
    R, P = w.step_proj.shape[2], w.x_proj.shape[1]
    projected_2TP = torch.bmm(means_2BSD.flatten(1, 2), w.x_proj.mT)
    step_logits_2TD = torch.bmm(projected_2TP[..., :R], w.step_proj.mT)
    parts = (*projected_2TP.tensor_split((R, (R + P) // 2), dim=-1), step_logits_2TD)
    step, k, q, step_logits = (t.unflatten(1, means_2BSD.shape[1:3]) for t in parts)
    return Projected(means_2BSD, k, q, step, step_logits)


def A_of(weights: BlockWeights) -> Tensor | None:
    """Return the decay rates A (2, D, N) of the selective recurrence, or None for Longhorn."""
    first, second = (direction.A_log for direction in weights.directions)
    return None if first is None or second is None else -torch.stack([first.float(), second.float()]).exp()


def split(uz_BLE: Tensor, xhat_TC: Tensor, w: PackedWeights, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return u of all tokens and z of the output tokens, which are the two halves of in_proj's output."""
    if not tokens.class_token_only:
        u_BLD, z_BLD = uz_BLE.chunk(2, dim=-1)
        return u_BLD, z_BLD
    B, L, D = uz_BLE.shape
    xhat_BC = tokens.outputs(xhat_TC.view(B, L, -1)).squeeze(1)
    return uz_BLE, torch.mm(xhat_BC, w.in_proj[D:].t()).unsqueeze(1)


def project(u_BLD: Tensor, w: PackedWeights, H: int, project_step: bool) -> Projected:
    """Return the scan's inputs for the first H tokens of each direction, with step logits only if `project_step`."""
    B, R, P = len(u_BLD), w.step_proj.shape[2], w.x_proj.shape[1]
    v_2BHD, projected_2TP, step_logits_2TD = kernels.conv_xproj(
        u_BLD, w.conv, w.conv_bias, w.x_proj, w.step_proj, H, project_step
    )
    parts = projected_2TP.tensor_split((R, (R + P) // 2), dim=-1)
    step_2BHR, k_2BHN, q_2BHN = (t.unflatten(1, (B, -1)) for t in parts)
    step_logits_2BHD = None if step_logits_2TD is None else step_logits_2TD.unflatten(1, (B, -1))
    return Projected(v_2BHD, k_2BHN, q_2BHN, step_2BHR, step_logits_2BHD)
