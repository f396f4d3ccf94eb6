"""Mixer of a full (not pooled) block on CPUs, between in_proj and out_proj, and its gradient.

B batch    L tokens    T tokens of the batch    D inner width    E 2D    N states    R rank    P = R + 2N    K taps
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpu.compiler import addresses, kernel_of
from ..scan import cpu_scan as scans
from .cpu_launch import (
    addresses_of_both,
    filter_addresses,
    over_channels,
    over_tokens,
    u_address,
    z_address,
)  # fmt: skip
from .weights import BlockWeights, DirectionWeights, Options

REVERSE = (False, True)
_kernel = functools.partial(kernel_of, f"{__package__}.cpu_kernels")


class Saved(NamedTuple):
    """Tensors that the mixer of a block without pooling saves for the backward pass."""

    v: Tensor  # (2, B, L, D): convolved tokens
    projected: Tensor  # (2, T, P): outputs of x_proj
    step_logits: Tensor  # (2, T, D): step sizes before bias and activation
    y: Tensor  # (2, B, L, D): outputs of both directions
    states: Tensor  # (2, B, S, N, D): states between chunks of tokens


class Scanned(NamedTuple):
    """Input tensors of `cpu_scan.forward` and `cpu_scan.backward`."""

    x: Tensor
    step_logits: Tensor
    k: Tensor
    q: Tensor
    A: Tensor | None
    skip: Tensor
    step_bias: Tensor


def forward(
    options: Options, uz_BLE: Tensor, scale_B: Tensor | None, weights: BlockWeights, keep: bool
) -> tuple[Tensor, Saved]:
    """Return the input of out_proj, (B, L, D), and the tensors for backward. The states are only saved if `keep`."""
    v_2BLD = convolve(uz_BLE, weights)
    projected_2TP, step_logits_2TD = project(v_2BLD.flatten(1, 2), weights)
    scanned = scan_inputs(v_2BLD, projected_2TP, step_logits_2TD, weights)
    y_2BLD, states = scans.forward(options.recurrence, *scanned, REVERSE, keep)
    return gate(y_2BLD, uz_BLE, scale_B), Saved(v_2BLD, projected_2TP, step_logits_2TD, y_2BLD, states)


def backward(
    options: Options, dgated_BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None, weights: BlockWeights, saved: Saved,
    duz_BLE: Tensor,
) -> tuple[Tensor, tuple[DirectionWeights, DirectionWeights]]:  # fmt: skip
    """Write the gradient of uz to `duz_BLE`. Return the input of out_proj, and the gradients of the weights."""
    (B, L, D), R, K = dgated_BLD.shape, weights.sizes().R, weights.sizes().K
    gated_BLD, dy_BLD = gate_backward(dgated_BLD, saved.y, uz_BLE, scale_B, duz_BLE)
    scanned = scan_inputs(saved.v, saved.projected, saved.step_logits, weights)
    dv_2BLD, dstep_logits_2BLD, dk_2BLN, dq_2BLN, dA_2DN, dchannels_22D = scans.backward(
        options.recurrence, dy_BLD.expand(2, B, L, D), *scanned, saved.states, REVERSE
    )
    v_2TD, dv_2TD, dstep_logits_2TD = (t.flatten(1, 2) for t in (saved.v, dv_2BLD, dstep_logits_2BLD))
    # on some CPUs, a matrix product whose result has few rows is twice as fast as one whose result has few columns
    dstep_2RT = torch.bmm(both(weights, "step_proj").mT, dstep_logits_2TD.mT)
    dprojected_2TP = torch.cat([dstep_2RT.mT, dk_2BLN.flatten(1, 2), dq_2BLN.flatten(1, 2)], dim=2)
    dv_2TD.baddbmm_(dprojected_2TP, both(weights, "x_proj"))
    dx_proj_2PD = torch.bmm(dprojected_2TP.mT, v_2TD)
    dstep_proj_2DR = torch.bmm(saved.projected[..., :R].mT, dstep_logits_2TD).mT
    dfilters_2KD = convolve_backward(dv_2BLD, uz_BLE, weights, duz_BLE)
    dskip_2D, dstep_bias_2D = dchannels_22D.unbind(1)
    dA_log = (None, None) if scanned.A is None else dA_2DN * scanned.A  # factor A, because A = -exp(A_log)
    first, second = (
        DirectionWeights(
            dfilters_2KD[g, :K].t().unsqueeze(1), dfilters_2KD[g, K], dx_proj_2PD[g], dstep_proj_2DR[g],
            dstep_bias_2D[g], dskip_2D[g], dA_log[g],
        ) for g in (0, 1)
    )  # fmt: skip
    return gated_BLD, (first, second)


def project(v_2TD: Tensor, weights: BlockWeights) -> tuple[Tensor, Tensor]:
    """Return both directions' x_proj outputs, and step sizes before bias and activation."""
    # the copy is row-major, so that a token's keys and queries are contiguous, as the scan's kernel requires
    projected_2TP = torch.bmm(both(weights, "x_proj"), v_2TD.mT).mT.contiguous()
    return projected_2TP, torch.bmm(projected_2TP[..., : weights.sizes().R], both(weights, "step_proj").mT)


def scan_inputs(v_2BLD: Tensor, projected_2TP: Tensor, step_logits_2TD: Tensor, weights: BlockWeights) -> Scanned:
    (_, _, N, R, _), shape = weights.sizes(), v_2BLD.shape[1:3]
    k_2TN, q_2TN = projected_2TP[..., R : R + N], projected_2TP[..., R + N :]
    step_logits, k, q = (t.unflatten(1, shape) for t in (step_logits_2TD, k_2TN, q_2TN))
    A_2DN = None if weights.directions[0].A_log is None else -both(weights, "A_log").exp()
    return Scanned(v_2BLD, step_logits, k, q, A_2DN, both(weights, "skip"), both(weights, "step_bias"))


def both(weights: BlockWeights, name: str) -> Tensor:
    return torch.stack([getattr(direction, name) for direction in weights.directions])


def convolve(uz_BLE: Tensor, weights: BlockWeights) -> Tensor:
    """Return both directions' v = silu(conv(u)), (2, B, L, D)."""
    (_, D, _, _, K), (B, L, _) = weights.sizes(), uz_BLE.shape
    v_2BLD = uz_BLE.new_empty(2, B, L, D)
    tensors = *u_address(uz_BLE), *filter_addresses(weights), v_2BLD.data_ptr()
    over_channels(_kernel("conv_forward", K), B, L, D, *tensors)
    return v_2BLD


def convolve_backward(dv_2BLD: Tensor, uz_BLE: Tensor, weights: BlockWeights, duz_BLE: Tensor) -> Tensor:
    """Write the gradient of u to `duz_BLE`, and return the gradients of filters and biases, (2, K + 1, D)."""
    (_, D, _, _, K), (B, L, _) = weights.sizes(), uz_BLE.shape
    dfilters = uz_BLE.new_empty(B, 2, K + 1, D)
    tensors = *u_address(uz_BLE), *filter_addresses(weights), *addresses(dv_2BLD, duz_BLE, dfilters)
    over_channels(_kernel("conv_backward", K), B, L, D, *tensors)
    return dfilters.sum(0)


def gate(y_2BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None) -> Tensor:
    """Return scale * (y_0 + y_1) / 2 * silu(z), (B, L, D)."""
    _, B, L, D = y_2BLD.shape
    gated_BLD = torch.empty_like(y_2BLD[0])
    tensors = *z_address(uz_BLE), *addresses_of_both(y_2BLD), *addresses(scale_B, gated_BLD)
    over_tokens(_kernel("gate_forward"), B * L, D, B * L, L, *tensors)
    return gated_BLD


def gate_backward(
    dgated_BLD: Tensor, y_2BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None, duz_BLE: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradient of z to `duz_BLE`. Return the gate's output, and the gradient of each direction's y."""
    _, B, L, D = y_2BLD.shape
    gated_BLD, dy_BLD = torch.empty_like(dgated_BLD), torch.empty_like(dgated_BLD)
    inputs = *z_address(uz_BLE), *addresses_of_both(y_2BLD)
    tensors = *addresses(scale_B, gated_BLD, dgated_BLD, dy_BLD), z_address(duz_BLE)[0]
    over_tokens(_kernel("gate_backward"), B * L, D, B * L, L, *inputs, *tensors)
    return gated_BLD, dy_BLD
