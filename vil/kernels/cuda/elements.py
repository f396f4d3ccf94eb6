"""Names of element types in elements.cuh, and vector widths of loads and stores."""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}


def common_power_of_two(limit: int, *sizes: int) -> int:
    """Return the largest power of 2 up to `limit` that divides every number in `sizes`. `limit` is a power of 2."""
    while any(size % limit for size in sizes):
        limit //= 2
    return limit


def vector_width(limit: int, *tensors: Tensor) -> int:
    """Return the vector width, at most `limit` elements, for which every row of every tensor is aligned."""
    return min(
        common_power_of_two(limit, t.data_ptr() // t.element_size(), *t.stride()[:-1], t.shape[-1]) for t in tensors
    )
