"""Mixer of a pooled block on CPUs, between in_proj and out_proj, and its gradient.

Forward and backward each pass over the tokens twice, before and after the scan of the row (or column) means.

B batch    L tokens    S pooled tokens    D inner width    E 2D    N states    R rank    P = R + 2N    K taps
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import given
from ..cpu.compiler import BYTES, KEPT, LANES, addresses, kernel_of
from .cpu_launch import (
    addresses_of_both,
    filter_addresses,
    over_channels,
    over_tokens,
    scratch_memory,
    u_address,
    z_address,
)  # fmt: skip
from .lines import Lines
from .tokens import Tokens
from .weights import BlockWeights, DirectionWeights, Options

_kernel = functools.partial(kernel_of, f"{__package__}.cpu_line_kernels")
_scan_kernel = functools.partial(kernel_of, f"{__package__}.cpu_line_scan_kernels")


class Saved(NamedTuple):
    """Tensors that the forward pass of a pooled block's mixer saves for the backward pass."""

    means: Tensor  # (2, B, S, D): row or column means of the convolved tokens
    projected: Tensor  # (2, B, S, P): outputs of x_proj
    y: Tensor  # (2, B, S, D): outputs of both directions
    skipped: Tensor  # (B, L, D): mean of both directions' skip connections


class SavedOfClassToken(NamedTuple):
    """Tensors that a pooled block's mixer saves for the backward pass if only the class token is needed."""

    means: Tensor  # (2, B, S, D): row or column means of the convolved tokens
    projected: Tensor  # (2, B, S, P): outputs of x_proj
    value: Tensor  # (B, D): mean of both directions' outputs with skip connections, times the image's scale
    z: Tensor  # (B, D): class token's input of the gate


class Scanned(NamedTuple):
    """Gradients of the inputs of a pooled block's projections and scan, and of the scan's weights."""

    means: Tensor  # (2, B, S, D)
    projected: Tensor  # (2, B, S, P)
    step_logits: Tensor  # (2, B, S, D), step sizes before bias and activation
    step_bias: Tensor  # (2, D)
    A: Tensor | None  # (2, N, D)


def forward(
    options: Options, uz_BLE: Tensor, scale_B: Tensor | None, weights: BlockWeights, keep: bool
) -> tuple[Tensor, Saved]:
    """Return the input of out_proj, (B, L, D), and the tensors for backward.

    Unless `keep` is set, the skip connections and the input of out_proj overwrite u.
    """
    (B, L, E), lines = uz_BLE.shape, given_lines(options)
    tables = line_tables(lines)  # kernels receive only the address, so this reference keeps the tables alive
    skipped_BLD = uz_BLE.new_empty(B, L, E // 2) if keep else uz_BLE[..., : E // 2]
    gated_BLD = torch.empty_like(skipped_BLD) if keep else skipped_BLD
    means_2BSD = pool(uz_BLE, weights, lines, tables, skipped_BLD)
    projected_2BSP, y_2BSD = scan(options.recurrence, means_2BSD, weights)
    gate(y_2BSD, skipped_BLD, uz_BLE, scale_B, tables, gated_BLD)
    return gated_BLD, Saved(means_2BSD, projected_2BSP, y_2BSD, skipped_BLD)


def backward(
    options: Options, dgated_BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None, weights: BlockWeights, saved: Saved,
    duz_BLE: Tensor,
) -> tuple[Tensor, tuple[DirectionWeights, DirectionWeights]]:  # fmt: skip
    """Write the gradient of uz to `duz_BLE`. Return the input of out_proj, and the gradients of the weights."""
    tables = line_tables(given_lines(options))  # kernels receive only the address, so keep the tables alive
    gated_BLD, dy_BSD = gate_backward(dgated_BLD, saved, uz_BLE, scale_B, tables, duz_BLE)
    dskipped_BLD = dgated_BLD  # `gate_backward` has overwritten dgated with the gradient of the skip connections
    return gated_BLD, directions_backward(options, dy_BSD, dskipped_BLD, uz_BLE, weights, saved, duz_BLE)


def forward_of_class_token(
    options: Options, u_BLD: Tensor, z_BD: Tensor, scale_B: Tensor | None, weights: BlockWeights
) -> tuple[Tensor, SavedOfClassToken]:
    """Return the class token's input of out_proj, (B, D), and the tensors for backward."""
    (_, L, _), lines = u_BLD.shape, given_lines(options)
    tables, skipped_BLD = line_tables(lines), torch.empty_like(u_BLD)
    means_2BSD = pool(u_BLD, weights, lines, tables, skipped_BLD)
    projected_2BSP, y_2BSD = scan(options.recurrence, means_2BSD, weights)
    value_BD = y_2BSD[:, :, lines.class_token].mean(0) + skipped_BLD[:, Tokens(L, True).class_token]
    if scale_B is not None:
        value_BD *= scale_B[:, None]
    return value_BD * F.silu(z_BD), SavedOfClassToken(means_2BSD, projected_2BSP, value_BD, z_BD)


def backward_of_class_token(
    options: Options, dgated_BD: Tensor, u_BLD: Tensor, scale_B: Tensor | None, weights: BlockWeights,
    saved: SavedOfClassToken, du_BLD: Tensor,
) -> tuple[Tensor, Tensor, tuple[DirectionWeights, DirectionWeights]]:  # fmt: skip
    """Write the gradient of u to `du_BLD`.

    Return the class token's input of out_proj, the gradient of z, and the gradients of the weights.
    """
    (_, B, S, D), (_, L, _), lines = saved.means.shape, u_BLD.shape, given_lines(options)
    gate_BD, silu_BD = saved.z.sigmoid(), F.silu(saved.z)
    dz_BD = dgated_BD * saved.value * (gate_BD + silu_BD * (1 - gate_BD))
    dmean_BD = dgated_BD * silu_BD
    if scale_B is not None:
        dmean_BD *= scale_B[:, None]
    dy_BSD, dskipped_BLD = u_BLD.new_zeros(B, S, D), torch.zeros_like(u_BLD)
    dy_BSD[:, lines.class_token] = dmean_BD / 2
    dskipped_BLD[:, Tokens(L, True).class_token] = dmean_BD
    directions = directions_backward(options, dy_BSD, dskipped_BLD, u_BLD, weights, saved, du_BLD)
    return saved.value * silu_BD, dz_BD, directions


def directions_backward(
    options: Options, dy_BSD: Tensor, dskipped_BLD: Tensor, uz_BLE: Tensor, weights: BlockWeights,
    saved: Saved | SavedOfClassToken, duz_BLE: Tensor,
) -> tuple[DirectionWeights, DirectionWeights]:  # fmt: skip
    """Write the gradient of u to `duz_BLE`, and return the gradients of both directions' weights.

    Args:
        dy_BSD: Gradient of the forward scan's outputs, which equals that of the backward scan's outputs.
        dskipped_BLD: Gradient of the mean of both directions' skip connections.
        uz_BLE: Output of in_proj, whose first D columns are u.
    """
    (_, _, _, R, K), lines = weights.sizes(), given_lines(options)
    tables = line_tables(lines)  # kernels receive only the address, so this reference keeps the tables alive
    d = scan_backward(options.recurrence, dy_BSD, saved, weights)
    dfilters_2KD = pool_backward(d.means, dskipped_BLD, uz_BLE, weights, lines, tables, duz_BLE)
    dx_proj_2PD = torch.bmm(d.projected.flatten(1, 2).mT, saved.means.flatten(1, 2))
    dstep_proj_2DR = torch.bmm(d.step_logits.flatten(1, 2).mT, saved.projected.flatten(1, 2)[..., :R])
    dconv_2D1K = dfilters_2KD[:, :K].mT.unsqueeze(2).contiguous()
    gradients = dconv_2D1K, dfilters_2KD[:, K], dx_proj_2PD, dstep_proj_2DR, d.step_bias, dfilters_2KD[:, K + 1]
    first, second = (DirectionWeights(*of_direction) for of_direction in zip(*(t.unbind() for t in gradients)))
    if d.A is not None:
        first, second = (
            gradient._replace(A_log=dA_ND.t() * -given(direction.A_log).exp())  # factor A, because A = -exp(A_log)
            for gradient, dA_ND, direction in zip((first, second), d.A, weights.directions)
        )
    return first, second


def pool(uz_BLE: Tensor, weights: BlockWeights, lines: Lines, tables: Tensor, skipped_BLD: Tensor) -> Tensor:
    """Return the means of both directions' convolved tokens v = silu(conv(u)) over rows or columns, (2, B, S, D).

    The mean of both directions' skip connections is written to `skipped_BLD`, which may be a view of u.
    """
    (D, _, K), (B, L, _) = weights.directions[0].conv.shape, uz_BLE.shape
    means_2BSD = uz_BLE.new_empty(2, B, lines.S, D)
    outputs = *strided(skipped_BLD), means_2BSD.data_ptr()
    over_channels(_kernel("pool_forward", K), B, L, D, *pool_inputs(uz_BLE, weights, lines, tables), *outputs)
    return means_2BSD


def pool_backward(
    dmeans_2BSD: Tensor, dskipped_BLD: Tensor, uz_BLE: Tensor, weights: BlockWeights, lines: Lines, tables: Tensor,
    duz_BLE: Tensor,
) -> Tensor:  # fmt: skip
    """Write the gradient of u to `duz_BLE`. Return the gradients of filters, biases and skip weights, (2, K + 2, D)."""
    (D, _, K), (B, L, _) = weights.directions[0].conv.shape, uz_BLE.shape
    dfilters = uz_BLE.new_empty(B, 2, K + 2, D)
    tensors = addresses(dskipped_BLD, dmeans_2BSD, duz_BLE, dfilters)
    over_channels(_kernel("pool_backward", K), B, L, D, *pool_inputs(uz_BLE, weights, lines, tables), *tensors)
    return dfilters.sum(0)


def pool_inputs(uz_BLE: Tensor, weights: BlockWeights, lines: Lines, tables: Tensor) -> tuple[int, ...]:
    skips = [direction.skip for direction in weights.directions]
    tensors = *filter_addresses(weights), *addresses(*skips, tables)
    return *u_address(uz_BLE), *tensors, lines.S, lines.length


def scan(recurrence: str, means_2BSD: Tensor, weights: BlockWeights) -> tuple[Tensor, Tensor]:
    """Return both directions' x_proj outputs (2, B, S, P), and scan outputs without skip connections (2, B, S, D)."""
    (_, B, S, D), P, R = means_2BSD.shape, len(weights.directions[0].x_proj), weights.directions[0].step_proj.shape[1]
    projected_2BSP, y_2BSD, N = means_2BSD.new_empty(2, B, S, P), torch.empty_like(means_2BSD), (P - R) // 2
    scratch = scratch_memory(means_2BSD, 2 * B, R * LANES)
    inputs = means_2BSD.data_ptr(), *scan_weights(weights)
    _scan_kernel("scan_forward", recurrence, N).launch(
        2 * B, 2 * B, B, S, D, R, *inputs, *addresses(projected_2BSP, y_2BSD, scratch)
    )
    return projected_2BSP, y_2BSD


def scan_backward(
    recurrence: str, dy_BSD: Tensor, saved: Saved | SavedOfClassToken, weights: BlockWeights
) -> Scanned:  # fmt: skip
    """Return the gradients of the scan and of both projections, given the gradient of each direction's output."""
    (_, B, S, D), (_, _, N, R, _), new = saved.means.shape, weights.sizes(), dy_BSD.new_empty
    dmeans_2BSD, dstep_logits_2BSD = new(2, 2, B, S, D)
    dprojected_2BSP, dstep_bias = torch.empty_like(saved.projected), new(B, 2, D)
    dA = new((B, 2, N, D) if recurrence == "selective" else 0)
    floats = LANES * (R + 2 * S + R + 2 * N + KEPT[recurrence] * S * N)
    inputs = saved.means.data_ptr(), *scan_weights(weights), *addresses(saved.projected, dy_BSD)
    outputs = addresses(dmeans_2BSD, dprojected_2BSP, dstep_logits_2BSD, dstep_bias, dA)
    scratch = scratch_memory(dy_BSD, 2 * B, floats)
    _scan_kernel("scan_backward", recurrence, N).launch(
        2 * B, 2 * B, B, S, D, R, *inputs, *outputs, scratch.data_ptr(), floats
    )
    dA_2ND = dA.sum(0) if recurrence == "selective" else None
    return Scanned(dmeans_2BSD, dprojected_2BSP, dstep_logits_2BSD, dstep_bias.sum(0), dA_2ND)


def scan_weights(weights: BlockWeights) -> list[int]:
    return [
        address
        for direction in weights.directions
        for address in addresses(direction.x_proj, direction.step_proj, direction.step_bias, direction.A_log)
    ]


def gate(
    y_2BSD: Tensor, skipped_BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None, tables: Tensor, gated_BLD: Tensor
) -> None:
    """Write scale * ((y_0 + y_1) / 2 + s) * silu(z) to `gated_BLD`, which may overwrite the skip connections s."""
    (B, L, D), S = gated_BLD.shape, y_2BSD.shape[2]
    inputs = *z_address(uz_BLE), *addresses_of_both(y_2BSD), *addresses(scale_B, tables), S
    outputs = *strided(skipped_BLD), *strided(gated_BLD)
    over_tokens(_kernel("pooled_gate_forward"), B * L, D, B * L, L, *inputs, *outputs)


def gate_backward(
    dgated_BLD: Tensor, saved: Saved, uz_BLE: Tensor, scale_B: Tensor | None, tables: Tensor, duz_BLE: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradient of z to `duz_BLE`, and return the gate's output and the gradient of each direction's y.

    `dgated_BLD` is overwritten with the gradient of the skip connections.
    """
    (_, _, S, _), (B, L, D), gated_BLD = saved.y.shape, dgated_BLD.shape, torch.empty_like(dgated_BLD)
    dy_BSD = dgated_BLD.new_empty(B, S, D)
    inputs = *z_address(uz_BLE), *addresses_of_both(saved.y), *addresses(scale_B, tables), S
    outputs = *addresses(saved.skipped, gated_BLD, dgated_BLD), z_address(duz_BLE)[0], dy_BSD.data_ptr()
    over_channels(_kernel("pooled_gate_backward"), B, L, D, *inputs, *outputs)
    return gated_BLD, dy_BSD


@functools.lru_cache(maxsize=64)
def line_tables(lines: Lines) -> Tensor:
    """Return a table (3, L) of token indices and mean indices for the kernels.

    The first row is line order: the order of tokens in which the patches of each row or column are consecutive. The
    second and third row hold the index of each token's mean, for tokens in line order and in row-major order.
    """
    with torch.device("cpu"), torch.inference_mode(False):
        return torch.stack([lines.order(), lines.pooled(), lines.pooled_in_memory()])


def given_lines(options: Options) -> Lines:
    assert options.lines is not None
    return options.lines


def strided(t_BLD: Tensor) -> tuple[int, int]:
    """Return the address of a tensor, and the byte stride between tokens."""
    return t_BLD.data_ptr(), BYTES * t_BLD.stride(1)
