"""Element types of elements.cuh, and numbers of elements that one instruction moves."""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}


def common_power_of_two(limit: int, *sizes: int) -> int:
    """Return the largest power of 2, at most `limit`, that divides all sizes."""
    while any(size % limit for size in sizes):
        limit //= 2
    return limit


def vector_width(limit: int, *tensors: Tensor) -> int:
    """Return how many neighbouring elements, at most `limit`, one instruction can move in every row of every tensor."""
    return min(
        common_power_of_two(limit, t.data_ptr() // t.element_size(), *t.stride()[:-1], t.shape[-1]) for t in tensors
    )
