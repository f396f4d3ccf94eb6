"""Passes over the tokens of a block on CPUs: one function per kernel of `cpu_kernels`, which allocates and launches.

B batch    L tokens    T tokens of the batch    S row means    C model width    D inner width    E 2D    K taps
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from ..cpu.compiler import LANES, Kernel
from .lines import Lines
from .weights import BlockWeights

ROWS = 16  # number of tokens that one task of a kernel processes
BYTES = 4  # bytes of a float


def norm_forward(x_TC: Tensor, gamma_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of x, and the reciprocal of each token's root mean square."""
    T, C = x_TC.shape
    h_TC, rstd_T = torch.empty_like(x_TC), x_TC.new_empty(T)
    _rows("norm_forward", T, C, T, _bits(eps), *_addresses(x_TC, gamma_C, h_TC, rstd_T))
    return h_TC, rstd_T


def norm_backward(
    x_TC: Tensor, gamma_C: Tensor, rstd_T: Tensor, dh_TC: Tensor, dout_TC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gamma, given the gradients of the norm and of the residual stream."""
    T, C = x_TC.shape
    dx_TC, dgamma = torch.empty_like(x_TC), x_TC.new_empty(-(-T // ROWS), C)
    _rows("norm_backward", T, C, T, *_addresses(x_TC, gamma_C, rstd_T, dh_TC, dout_TC, dx_TC, dgamma))
    return dx_TC, dgamma.sum(0)


def conv_forward(uz_BLE: Tensor, weights: BlockWeights) -> Tensor:
    """Return both directions' convolved tokens v = silu(conv(u)), (2, B, L, D)."""
    (_, D, _, _, K), (B, L, E) = weights.sizes(), uz_BLE.shape
    v_2BLD = uz_BLE.new_empty(2, B, L, D)
    _channels("conv_forward", (K,), B, L, D, uz_BLE.data_ptr(), BYTES * E, *_filters(weights), v_2BLD.data_ptr())
    return v_2BLD


def conv_backward(dv_2BLD: Tensor, uz_BLE: Tensor, weights: BlockWeights, duz_BLE: Tensor) -> Tensor:
    """Write the gradient of u to `duz_BLE`, and return the gradients of filters and biases, (2, K + 1, D)."""
    (_, D, _, _, K), (B, L, E) = weights.sizes(), uz_BLE.shape
    dfilters = uz_BLE.new_empty(B, 2, K + 1, D)
    tensors = _addresses(dv_2BLD, duz_BLE, dfilters)
    _channels("conv_backward", (K,), B, L, D, uz_BLE.data_ptr(), BYTES * E, *_filters(weights), *tensors)
    return dfilters.sum(0)


def gate_forward(y_2BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None) -> Tensor:
    """Return the input of out_proj, scale * (y_0 + y_1) / 2 * silu(z), (B, L, D)."""
    _, B, L, D = y_2BLD.shape
    gated_BLD = torch.empty_like(y_2BLD[0])
    _rows("gate_forward", B * L, D, B * L, L, *_z(uz_BLE), *_addresses(*y_2BLD, scale_B, gated_BLD))
    return gated_BLD


def gate_backward(
    dgated_BLD: Tensor, y_2BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None, duz_BLE: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradient of z to `duz_BLE`, and return the gate's output and the gradient of either direction's y."""
    _, B, L, D = y_2BLD.shape
    gated_BLD, dy_BLD = torch.empty_like(dgated_BLD), torch.empty_like(dgated_BLD)
    tensors = _addresses(*y_2BLD, scale_B, gated_BLD, dgated_BLD, dy_BLD)
    _rows("gate_backward", B * L, D, B * L, L, *_z(uz_BLE), *tensors, _z(duz_BLE)[0])
    return gated_BLD, dy_BLD


def pool_forward(uz_BLE: Tensor, weights: BlockWeights, lines: Lines, skipped_BLD: Tensor) -> Tensor:
    """Return the means of both directions' convolved tokens over rows or columns, (2, B, S, D).

    The mean of both directions' skip connections is written to `skipped_BLD`, which may be a view of u.
    """
    (_, D, _, _, K), (B, L, _) = weights.sizes(), uz_BLE.shape
    means_2BSD = uz_BLE.new_empty(2, B, lines.S, D)
    skipped = *_strided(skipped_BLD), means_2BSD.data_ptr()
    _channels("pool_forward", (K,), B, L, D, *_pooled(uz_BLE, weights, lines), *skipped)
    return means_2BSD


def pool_backward(
    dmeans_2BSD: Tensor, dskipped_BLD: Tensor, uz_BLE: Tensor, weights: BlockWeights, lines: Lines, duz_BLE: Tensor
) -> Tensor:
    """Write the gradient of u to `duz_BLE`.

    Return the gradients of filters, biases and skip weights, (2, K + 2, D).
    """
    (_, D, _, _, K), (B, L, _) = weights.sizes(), uz_BLE.shape
    dfilters = uz_BLE.new_empty(B, 2, K + 2, D)
    tensors = _addresses(dskipped_BLD, dmeans_2BSD, duz_BLE, dfilters)
    _channels("pool_backward", (K,), B, L, D, *_pooled(uz_BLE, weights, lines), *tensors)
    return dfilters.sum(0)


def pooled_gate_forward(
    y_2BSD: Tensor, skipped_BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None, lines: Lines, gated_BLD: Tensor
) -> None:
    """Write the input of out_proj to `gated_BLD`, which may be `skipped_BLD`."""
    B, L, D = gated_BLD.shape
    inputs = *_z(uz_BLE), *_addresses(*y_2BSD, scale_B, line_table(lines)), lines.S
    _rows("pooled_gate_forward", B * L, D, B * L, L, *inputs, *_strided(skipped_BLD), *_strided(gated_BLD))


def pooled_gate_backward(
    dgated_BLD: Tensor, y_2BSD: Tensor, skipped_BLD: Tensor, uz_BLE: Tensor, scale_B: Tensor | None, lines: Lines,
    duz_BLE: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the gradient of z to `duz_BLE`, and return the gate's output and the gradient of either direction's y.

    `dgated_BLD` is overwritten by the gradient of the skip connections.
    """
    (B, L, D), gated_BLD, dy_BSD = dgated_BLD.shape, torch.empty_like(dgated_BLD), torch.empty_like(y_2BSD[0])
    inputs = *_z(uz_BLE), *_addresses(*y_2BSD, scale_B, line_table(lines)), lines.S
    tensors = *_addresses(skipped_BLD, gated_BLD, dgated_BLD), _z(duz_BLE)[0], dy_BSD.data_ptr()
    _channels("pooled_gate_backward", (), B, L, D, *inputs, *tensors)
    return gated_BLD, dy_BSD


@functools.lru_cache(maxsize=64)
def line_table(lines: Lines) -> Tensor:
    """Return three rows of L integers.

    The first row is the order of tokens in which the patches of each row or column are consecutive. The others are the
    index of each token's mean, for tokens in this order and in row-major order.
    """
    with torch.device("cpu"), torch.inference_mode(False):
        return torch.stack([lines.order(), lines.pooled(), lines.pooled_in_memory()])


def _pooled(uz_BLE: Tensor, weights: BlockWeights, lines: Lines) -> tuple[int, ...]:
    skips = [direction.skip for direction in weights.directions]
    tensors = *_filters(weights), *_addresses(*skips, line_table(lines))
    return uz_BLE.data_ptr(), BYTES * uz_BLE.shape[2], *tensors, lines.S, lines.length


def _filters(weights: BlockWeights) -> list[int]:
    return [t.data_ptr() for direction in weights.directions for t in (direction.conv, direction.conv_bias)]


def _z(uz_BLE: Tensor) -> tuple[int, int]:
    """Return the address of z, and the byte stride between tokens."""
    E = uz_BLE.shape[2]
    return uz_BLE.data_ptr() + BYTES * E // 2, BYTES * E


def _strided(t_BLD: Tensor) -> tuple[int, int]:
    return t_BLD.data_ptr(), BYTES * t_BLD.stride(1)


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _bits(number: float) -> int:
    return struct.unpack("i", struct.pack("f", number))[0]


def _rows(factory: str, T: int, width: int, *numbers: int) -> None:
    """Launch a kernel whose tasks are ranges of tokens."""
    tasks = -(-T // ROWS)
    _kernel(factory).launch(tasks, tasks, ROWS, width, *numbers)


def _channels(factory: str, constants: tuple[int, ...], B: int, L: int, D: int, *numbers: int) -> None:
    """Launch a kernel whose tasks are blocks of channels of one image."""
    blocks = -(-D // LANES)
    _kernel(factory, *constants).launch(B * blocks, B * blocks, blocks, B, L, D, *numbers)


@functools.cache
def _kernel(factory: str, *constants: int) -> Kernel:
    return Kernel(f"{__package__}.cpu_kernels", factory, *constants)
