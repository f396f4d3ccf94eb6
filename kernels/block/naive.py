"""The definition of the block's operator in plain PyTorch, on any device: what `op` computes by fewer kernels.

B batch    L tokens    C model width    D inner width    N states of a channel    R rank of the step projection
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..scan.interface import longhorn_scan, selective_scan


def block(
    recurrence: str, x_BLC: Tensor, scale_B: Tensor | None, eps: float, norm_C: Tensor, in_proj: Tensor,
    out_proj: Tensor, directions: list[Tensor],
) -> Tensor:  # fmt: skip
    """x + scale * out_proj(mean of both directions * silu(z)); the arguments are those of `op.block`."""
    h_BLC = F.rms_norm(x_BLC, norm_C.shape, norm_C, eps)
    u_BLD, z_BLD = F.linear(h_BLC, in_proj).chunk(2, dim=-1)
    half = len(directions) // 2
    y_BLD = sum(
        _direction(recurrence, u_BLD, *weights, reverse=reverse)
        for weights, reverse in ((directions[:half], False), (directions[half:], True))
    )
    branch_BLC = F.linear(y_BLD / 2 * F.silu(z_BLD), out_proj)
    return x_BLC + (branch_BLC if scale_B is None else scale_B[:, None, None] * branch_BLC)


def _direction(
    recurrence, u_BLD, conv_D1K, conv_bias_D, x_proj_PD, step_proj_DR, step_bias_D, skip_D, A_log_DN=None, *, reverse
) -> Tensor:  # fmt: skip
    """y_BLD of one direction: convolution and SiLU, projections of each token, and the recurrence over them."""
    D, _, taps = conv_D1K.shape
    u_BDL = u_BLD.mT.flip(-1) if reverse else u_BLD.mT
    v_BDL = F.silu(F.conv1d(F.pad(u_BDL, (taps - 1, 0)), conv_D1K, conv_bias_D, groups=D))
    v_BLD = (v_BDL.flip(-1) if reverse else v_BDL).mT
    R = step_proj_DR.shape[1]
    N = (x_proj_PD.shape[0] - R) // 2
    step_BLR, k_BLN, q_BLN = F.linear(v_BLD, x_proj_PD).split((R, N, N), dim=-1)
    logits_BLD = F.linear(step_BLR, step_proj_DR)
    if recurrence == "longhorn":
        return longhorn_scan(v_BLD, logits_BLD, k_BLN, q_BLN, skip_D, step_bias_D, reverse=reverse)
    A_DN = -torch.exp(A_log_DN)
    return selective_scan(v_BLD, logits_BLD, A_DN, k_BLN, q_BLN, skip_D, step_bias_D, reverse=reverse)
