"""Reference implementation of the block's operator by PyTorch and the public scans, with gradients by autograd.

B batch    L tokens    C model width    D inner width    N states of a channel    R rank of the step projection
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import given
from ..scan.interface import longhorn_scan, selective_scan
from .weights import BlockWeights, DirectionWeights, Options


def block(x_BLC: Tensor, weights: BlockWeights, options: Options, scale_B: Tensor | None = None) -> Tensor:
    """Return x + scale * out_proj(mean of both directions * silu(z)).

    `weights`, `options` and `scale_B` are single items of the lists that `block_op.run_blocks` accepts. Of the options,
    only `recurrence` and `eps` are used.
    """
    h_BLC = F.rms_norm(x_BLC, weights.norm.shape, weights.norm, options.eps)
    u_BLD, z_BLD = F.linear(h_BLC, weights.in_proj).chunk(2, dim=-1)
    forward, backward = (direction(options.recurrence, u_BLD, weights.directions[g], reverse=g == 1) for g in (0, 1))
    branch_BLC = F.linear((forward + backward) / 2 * F.silu(z_BLD), weights.out_proj)
    return x_BLC + (branch_BLC if scale_B is None else scale_B[:, None, None] * branch_BLC)


def direction(recurrence: str, u_BLD: Tensor, weights: DirectionWeights, *, reverse: bool) -> Tensor:
    """Return the output (B, L, D) of one scan direction: convolution, SiLU, projections and recurrence."""
    D, _, taps = weights.conv.shape
    u_BDL = u_BLD.mT.flip(-1) if reverse else u_BLD.mT
    v_BDL = F.silu(F.conv1d(F.pad(u_BDL, (taps - 1, 0)), weights.conv, weights.conv_bias, groups=D))
    v_BLD = (v_BDL.flip(-1) if reverse else v_BDL).mT
    R = weights.step_proj.shape[1]
    N = (weights.x_proj.shape[0] - R) // 2
    step_BLR, k_BLN, q_BLN = F.linear(v_BLD, weights.x_proj).split((R, N, N), dim=-1)
    step_logits_BLD = F.linear(step_BLR, weights.step_proj)
    if recurrence == "longhorn":
        return longhorn_scan(v_BLD, step_logits_BLD, k_BLN, q_BLN, weights.skip, weights.step_bias, reverse=reverse)
    A_DN = -given(weights.A_log).exp()
    return selective_scan(v_BLD, step_logits_BLD, A_DN, k_BLN, q_BLN, weights.skip, weights.step_bias, reverse=reverse)


def gradients(function: Callable, inputs: Sequence[Tensor | None], dy: Tensor) -> list[Any]:
    """Return the gradients of `function(*inputs)` by autograd, one tensor or None per input."""
    inputs = [t if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        y = function(*inputs)
    found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy))
    return [None if t is None else next(found) for t in inputs]
