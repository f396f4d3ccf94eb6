"""Matrix products with results in fp32 (or fp64 for fp64 matrices). Products of 16-bit matrices run only on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def mm_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a @ b in at least fp32."""
    return torch.mm(a, b) if a.dtype.itemsize >= 4 else torch.mm(a, b, out_dtype=torch.float32)


def bmm_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched matrix product a @ b in at least fp32."""
    return torch.bmm(a, b) if a.dtype.itemsize >= 4 else torch.bmm(a, b, out_dtype=torch.float32)
