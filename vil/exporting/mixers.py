"""Forward functions of mixers and norms with only standard PyTorch operators, for export.

Dimension letters:

    G = 2 directions    B batch    L tokens    S scanned tokens    C model width    D inner width    N states
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from ..kernels.block.lines import Lines
from ..models.block import BidirectionalMixer, RMSNorm
from ..models.tokens import grid_of, row_means


def rms_norm(norm: RMSNorm, x_BLC: Tensor) -> Tensor:
    """Compute RMSNorm in the form that onnxruntime recognizes and fuses into one kernel."""
    return x_BLC / (x_BLC.pow(2).mean(-1, keepdim=True) + cast(float, norm.eps)).sqrt() * norm.weight


def mix(mixer: BidirectionalMixer, h_BLC: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """Run a mixer. The scan's tensors have the token dimension first, which saves transposes in the exported graph.

    A pooled mixer runs its recurrence over the rows or columns of the grid (h, w).
    """
    if mixer.pool is None:
        return _mix_tokens(mixer, h_BLC)
    return _mix_lines(mixer, h_BLC, grid)


def _mix_tokens(mixer: BidirectionalMixer, h_BLC: Tensor) -> Tensor:
    """Run a mixer without pooling, whose recurrence reads every token."""
    forward, backward = _directions(mixer)
    u_BLD, z_BLD = _project_in(mixer, h_BLC)
    y_LGBD, x_LGBD = scan_of(mixer, forward.convolve(u_BLD), backward.convolve(u_BLD.flip(1)))
    y_LGBD = y_LGBD + mixer.skip().unsqueeze(1) * x_LGBD

    forward_BLD, backward_BLD = y_LGBD.permute(2, 0, 1, 3).unbind(2)
    y_BLD = (forward_BLD + backward_BLD.flip(1)) / 2
    return mixer.out_proj(y_BLD * F.silu(z_BLD))


def _mix_lines(mixer: BidirectionalMixer, h_BLC: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """Run a pooled mixer, whose recurrence reads the mean of each line (row or column) of patches."""
    h, w = grid_of(h_BLC.shape[1], grid)
    lines = Lines.of(h, w, mixer.pool == "columns")
    if lines.columns:
        h_BLC = h_BLC.index_select(1, lines.order())

    forward, backward = _directions(mixer)
    u_BLD, z_BLD = _project_in(mixer, h_BLC)
    forward_v_BLD = forward.convolve(u_BLD)
    backward_v_BLD = backward.convolve(u_BLD)
    forward_v_BSD = row_means(forward_v_BLD, lines.number)
    backward_v_BSD = row_means(backward_v_BLD, lines.number).flip(1)

    y_SGBD, _ = scan_of(mixer, forward_v_BSD, backward_v_BSD)
    forward_BSD, backward_BSD = y_SGBD.permute(2, 0, 1, 3).unbind(2)
    skipped_BLD = forward.skip / 2 * forward_v_BLD + backward.skip / 2 * backward_v_BLD
    y_BSD = (forward_BSD + backward_BSD.flip(1)) / 2
    y_BLD = y_BSD.index_select(1, lines.pooled()) + skipped_BLD

    out_BLC = mixer.out_proj(y_BLD * F.silu(z_BLD))
    if lines.columns:
        out_BLC = out_BLC.index_select(1, Lines.of(w, h, True).order())
    return out_BLC


def _directions(mixer: BidirectionalMixer) -> tuple[Any, Any]:
    """Return the modules of the forward and the backward direction."""
    forward, backward = mixer.directions
    return forward, backward


def _project_in(mixer: BidirectionalMixer, h_BLC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of the convolution and the input of the output gate, each of shape (B, L, D)."""
    weight = mixer.in_proj.weight
    D = len(weight) // 2
    return F.linear(h_BLC, weight[:D]), F.linear(h_BLC, weight[D:])  # ONNX folds slices of weights, but not splits


def scan_of(mixer: BidirectionalMixer, forward_v_BLD: Tensor, backward_v_BLD: Tensor) -> tuple[Tensor, Tensor]:
    """Run the scans of both directions without skip connections. Return outputs and inputs, each (L, G, B, D).

    Args:
        mixer: The mixer.
        forward_v_BLD: Input of the forward direction.
        backward_v_BLD: Input of the backward direction in scan order, that is, with the last token first.
    """
    forward, backward = _directions(mixer)
    forward_parts = (forward_v_BLD, *forward.project(forward_v_BLD))
    backward_parts = (backward_v_BLD, *backward.project(backward_v_BLD))
    x_LGBD, step_logits_LGBD, k_LGBN, q_LGBN = (
        torch.stack(pair, dim=2).permute(1, 2, 0, 3) for pair in zip(forward_parts, backward_parts)
    )

    bias_G1D = mixer.step_bias().unsqueeze(1)
    if mixer.recurrence == "longhorn":
        norm_LGB1 = k_LGBN.square().sum(-1, keepdim=True)
        step_LGBD = torch.reciprocal(torch.exp(-bias_G1D - step_logits_LGBD) + (1 + norm_LGB1))
        A_GND = None
    else:
        step_LGBD = F.softplus(step_logits_LGBD + bias_G1D)
        A_GND = -torch.stack([forward.A_log, backward.A_log]).exp().mT.contiguous()
    return scan_by_steps(x_LGBD, step_LGBD, k_LGBN, q_LGBN, A_GND), x_LGBD


def scan_by_steps(
    x_LGBD: Tensor, step_LGBD: Tensor, k_LGBN: Tensor, q_LGBN: Tensor, A_GND: Tensor | None
) -> Tensor:  # fmt: skip
    """Run the recurrence over tokens with PyTorch's scan operator, which is exported as ONNX's `Scan`.

    Args:
        x_LGBD: Input tokens of each direction in scan order.
        step_LGBD: Longhorn's step size or Mamba's time step.
        k_LGBN: Keys.
        q_LGBN: Queries.
        A_GND: Mamba's A; None for Longhorn.
    """
    S_GBND = x_LGBD.new_zeros(*x_LGBD.shape[1:3], k_LGBN.shape[-1], x_LGBD.shape[-1])
    step: Any
    if A_GND is None:
        step = _longhorn_step
        drive_LGBD = x_LGBD
        constants = []
    else:
        step = _selective_step
        drive_LGBD = step_LGBD * x_LGBD
        constants = [A_GND.unsqueeze(1)]

    tokens = [drive_LGBD.unsqueeze(-2), step_LGBD.unsqueeze(-2), k_LGBN.unsqueeze(-1), q_LGBN.unsqueeze(-2)]
    # Call `scan_op`, because PyTorch's public `scan` calls torch.compile, which depends on earlier compilations.
    _, y_LGB1D = scan_op(step, [S_GBND], tokens, tuple(constants))
    return y_LGB1D.squeeze(-2)


def _longhorn_step(S_GBND, x_GB1D, step_GB1D, k_GBN1, q_GB1N, *_):
    S_GBND = S_GBND + k_GBN1 * step_GB1D * (x_GB1D - k_GBN1 * S_GBND)
    return [S_GBND, q_GB1N @ S_GBND]


def _selective_step(S_GBND, drive_GB1D, step_GB1D, k_GBN1, q_GB1N, A_G1ND):
    S_GBND = torch.exp(A_G1ND * step_GB1D) * S_GBND + k_GBN1 * drive_GB1D
    return [S_GBND, q_GB1N @ S_GBND]
