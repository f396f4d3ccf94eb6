"""Launches of a block's CPU kernels, and the arguments that several kernels have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.compiler import BYTES, LANES, Kernel
from .weights import BlockWeights

ROWS = 16  # maximum number of tokens per task of `over_tokens`


def over_tokens(kernel: Kernel, T: int, width: int, *numbers: int) -> None:
    """Launch a kernel whose tasks are ranges of tokens."""
    tasks = -(-T // ROWS)
    kernel.launch(tasks, tasks, ROWS, width, *numbers)


def over_channels(kernel: Kernel, B: int, L: int, D: int, *numbers: int) -> None:
    """Launch a kernel whose tasks are blocks of channels of one image."""
    blocks = -(-D // LANES)
    kernel.launch(B * blocks, B * blocks, blocks, B, L, D, *numbers)


def addresses_of_both(t_2X: Tensor) -> tuple[int, int]:
    """Return the addresses of both directions' halves of a contiguous tensor."""
    address = t_2X.data_ptr()
    return address, address + t_2X.nbytes // 2


def filter_addresses(weights: BlockWeights) -> list[int]:
    return [t.data_ptr() for direction in weights.directions for t in (direction.conv, direction.conv_bias)]


def u_address(uz_BLE: Tensor) -> tuple[int, int]:
    """Return the address of u (the first half of the columns of uz), and the byte stride between tokens."""
    return uz_BLE.data_ptr(), BYTES * uz_BLE.shape[2]


def z_address(uz_BLE: Tensor) -> tuple[int, int]:
    """Return the address of z (the second half of the columns of uz), and the byte stride between tokens."""
    E = uz_BLE.shape[2]
    return uz_BLE.data_ptr() + BYTES * E // 2, BYTES * E


def scratch_memory(like: Tensor, tasks: int, floats: int) -> Tensor:
    """Allocate scratch memory with `floats` elements for each thread of a launch."""
    return like.new_empty(min(torch.get_num_threads(), tasks), floats)
