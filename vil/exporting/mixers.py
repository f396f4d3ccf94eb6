"""Forward functions of mixers and norms with only standard PyTorch operators, for export.

The functions use few operators that copy all tokens, because copies are as slow as arithmetic in onnxruntime.

Dimension letters:

    G = 2 directions    B batch    L tokens    S scanned tokens    C model width    D inner width    N states
    K convolution width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from ..kernels.block.lines import Lines
from ..models.block import BidirectionalMixer, Block, RMSNorm
from ..models.tokens import grid_of, middle_token

Convolve = Callable[[BidirectionalMixer, Tensor], list[Tensor]]


def rms_norm(norm: RMSNorm, x_BLC: Tensor) -> Tensor:
    """Compute RMSNorm in the form that onnxruntime recognizes and fuses into one kernel."""
    return x_BLC / (x_BLC.pow(2).mean(-1, keepdim=True) + cast(float, norm.eps)).sqrt() * norm.weight


class ClassTokenBlock(Block):
    """Block that returns only the class token (B, 1, C), for the last block of a classifier."""

    def forward(self, x_BLC: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        return middle_token(x_BLC) + self.mixer(self.norm(x_BLC), grid, class_token_only=True)


def convolve(mixer: BidirectionalMixer, h_BLC: Tensor) -> list[Tensor]:
    """Return the input v (B, L, D) of each direction: input projection, causal convolution and SiLU."""
    weight = mixer.in_proj.weight
    u_BLD = F.linear(h_BLC, weight[: len(weight) // 2])
    return [direction.convolve(u_BLD) for direction in mixer.directions]


def convolve_images(mixer: BidirectionalMixer, h_BLC: Tensor) -> list[Tensor]:
    """Compute `convolve` with 2-D convolutions, which are faster in onnxruntime and slower in PyTorch.

    The input projection is also a 2-D convolution, because onnxruntime then keeps one memory layout for both
    convolutions. Permuted tensors have four dimensions, because onnxruntime merges only four-dimensional permutations
    with changes of the layout.
    """
    weight = mixer.in_proj.weight
    h_BC1L = h_BLC.unsqueeze(1).permute(0, 3, 1, 2)
    u_BD1L = F.conv2d(h_BC1L, weight[: len(weight) // 2, :, None, None])
    v_BLD = []
    for direction in mixer.directions:
        conv = direction.conv1d
        lookback = conv.kernel_size[0] - 1
        padding, weight_D1K = ((0, lookback), conv.weight.flip(-1)) if conv.reverse else ((lookback, 0), conv.weight)
        v_BD1L = F.conv2d(F.pad(u_BD1L, padding), weight_D1K.unsqueeze(2), conv.bias, groups=conv.groups)
        v_BLD.append(F.silu(v_BD1L.permute(0, 2, 3, 1).squeeze(1)))
    return v_BLD


def mix(
    mixer: BidirectionalMixer,
    h_BLC: Tensor,
    grid: tuple[int, int] | None = None,
    class_token_only: bool = False,
    convolve: Convolve = convolve,
) -> Tensor:
    """Run a mixer. A pooled mixer runs its recurrence over the rows or columns of the grid (h, w).

    Args:
        mixer: The mixer.
        h_BLC: Tokens.
        grid: Patch grid, which a pooled mixer needs unless the grid is square.
        class_token_only: Return only the class token (B, 1, C).
        convolve: `convolve`, or `convolve_images` for onnxruntime.
    """
    if mixer.pool is None:
        return _mix_tokens(mixer, h_BLC, class_token_only, convolve)
    return _mix_lines(mixer, h_BLC, grid, class_token_only, convolve)


def _mix_tokens(mixer: BidirectionalMixer, h_BLC: Tensor, class_token_only: bool, convolve: Convolve) -> Tensor:
    """Run a mixer without pooling, whose recurrence reads every token."""
    forward_v_BLD, backward_v_BLD = convolve(mixer, h_BLC)
    y_LBGD = scan_of(mixer, forward_v_BLD, backward_v_BLD.flip(1))
    forward_BLD, backward_BLD = y_LBGD.transpose(0, 1).unbind(2)
    y_BLD = (forward_BLD + backward_BLD.flip(1)) / 2
    tokens = (h_BLC, forward_v_BLD, backward_v_BLD, y_BLD)
    return _project_out(mixer, *(map(middle_token, tokens) if class_token_only else tokens))


def _mix_lines(
    mixer: BidirectionalMixer,
    h_BLC: Tensor,
    grid: tuple[int, int] | None,
    class_token_only: bool,
    convolve: Convolve,
) -> Tensor:
    """Run a pooled mixer, whose recurrence reads the mean of each line (row or column) of patches."""
    h, w = grid_of(h_BLC.shape[1], grid)
    lines = Lines.of(h, w, mixer.pool == "columns")
    if lines.columns:
        h_BLC = h_BLC.index_select(1, lines.order())

    forward_v_BLD, backward_v_BLD = convolve(mixer, h_BLC)
    mean_SL = _mean_matrix(lines)
    y_SBGD = scan_of(mixer, mean_SL @ forward_v_BLD, mean_SL.flip(0) @ backward_v_BLD)
    y_BSD = _direction_mean_matrix(lines.S) @ y_SBGD.transpose(0, 1).flatten(1, 2)
    if class_token_only:
        return _project_out(mixer, *map(middle_token, (h_BLC, forward_v_BLD, backward_v_BLD, y_BSD)))

    y_BLD = y_BSD.index_select(1, lines.pooled())
    out_BLC = _project_out(mixer, h_BLC, forward_v_BLD, backward_v_BLD, y_BLD)
    if lines.columns:
        out_BLC = out_BLC.index_select(1, Lines.of(w, h, True).order())
    return out_BLC


def _project_out(
    mixer: BidirectionalMixer, h_BLC: Tensor, forward_v_BLD: Tensor, backward_v_BLD: Tensor, y_BLD: Tensor
) -> Tensor:
    """Add the skip connections to the mean output y of both directions, gate, and project to the model width."""
    weight = mixer.in_proj.weight
    z_BLD = F.linear(h_BLC, weight[len(weight) // 2 :])  # sliced, because onnxscript does not constant-fold splits
    forward, backward = mixer.directions
    skipped_BLD = forward.skip / 2 * forward_v_BLD + backward.skip / 2 * backward_v_BLD
    return mixer.out_proj(mixer.gate(skipped_BLD + y_BLD, z_BLD))


def _mean_matrix(lines: Lines) -> Tensor:
    """Return the matrix (S, L) that averages each row or column of patches and keeps the class token."""
    is_member_LS = F.one_hot(lines.pooled(), lines.S).float()
    return (is_member_LS / is_member_LS.sum(0)).mT


def _direction_mean_matrix(S: int) -> Tensor:
    """Return the matrix (S, S G) that averages both directions after reversing the backward direction."""
    forward_SS = torch.eye(S, dtype=torch.float32)
    return torch.stack([forward_SS, forward_SS.flip(0)], dim=2).flatten(1) / 2


def scan_of(mixer: BidirectionalMixer, forward_v_BSD: Tensor, backward_v_BSD: Tensor) -> Tensor:
    """Run the scans of both directions without skip connections. Return the outputs (S, B, G, D) in scan order.

    Args:
        mixer: The mixer.
        forward_v_BSD: Input of the forward direction.
        backward_v_BSD: Input of the backward direction in scan order, that is, with the last token first.
    """
    parts = []
    for direction, v_BSD in zip(mixer.directions, (forward_v_BSD, backward_v_BSD)):
        x_SB1D = v_BSD.unsqueeze(1).permute(2, 0, 1, 3)
        parts.append((x_SB1D, *direction.project(x_SB1D)))
    x_SBGD, step_logits_SBGD, k_SBGN, q_SBGN = (torch.cat(pair, dim=2) for pair in zip(*parts))

    bias_GD = mixer.step_bias()
    if mixer.recurrence == "longhorn":
        norm_SBG1 = k_SBGN.square().sum(-1, keepdim=True)
        step_SBGD = torch.reciprocal(torch.exp(-bias_GD - step_logits_SBGD) + (1 + norm_SBG1))
        A_GND = None
    else:
        step_SBGD = F.softplus(step_logits_SBGD + bias_GD)
        directions: Any = mixer.directions
        A_GND = -torch.stack([direction.A_log for direction in directions]).exp().mT.contiguous()
    return scan_by_steps(x_SBGD, step_SBGD, k_SBGN, q_SBGN, A_GND)


def scan_by_steps(
    x_SBGD: Tensor, step_SBGD: Tensor, k_SBGN: Tensor, q_SBGN: Tensor, A_GND: Tensor | None
) -> Tensor:  # fmt: skip
    """Run the recurrence over tokens with PyTorch's scan operator, which is exported as ONNX's `Scan`.

    Args:
        x_SBGD: Input tokens of each direction in scan order.
        step_SBGD: Longhorn's step size or Mamba's time step.
        k_SBGN: Keys.
        q_SBGN: Queries.
        A_GND: Mamba's A; None for Longhorn.
    """
    state_BGND = x_SBGD.new_zeros(*x_SBGD.shape[1:3], k_SBGN.shape[-1], x_SBGD.shape[-1])
    step: Any
    if A_GND is None:
        step = _longhorn_step
        drive_SBGD = x_SBGD
        constants = []
    else:
        step = _selective_step
        drive_SBGD = step_SBGD * x_SBGD
        constants = [A_GND]

    tokens = [drive_SBGD.unsqueeze(-2), step_SBGD.unsqueeze(-2), k_SBGN.unsqueeze(-1), q_SBGN.unsqueeze(-2)]
    # Call `scan_op`, because PyTorch's public `scan` calls torch.compile, which depends on earlier compilations.
    _, y_SBG1D = scan_op(step, [state_BGND], tokens, tuple(constants))
    return y_SBG1D.squeeze(-2)


def _longhorn_step(state_BGND, x_BG1D, step_BG1D, k_BGN1, q_BG1N, *_):
    state_BGND = state_BGND + k_BGN1 * step_BG1D * (x_BG1D - k_BGN1 * state_BGND)
    return [state_BGND, q_BG1N @ state_BGND]


def _selective_step(state_BGND, drive_BG1D, step_BG1D, k_BGN1, q_BG1N, A_GND):
    state_BGND = torch.exp(A_GND * step_BG1D) * state_BGND + k_BGN1 * drive_BG1D
    return [state_BGND, q_BG1N @ state_BGND]
