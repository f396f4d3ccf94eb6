"""Matrix products with results in fp32 (or fp64 for fp64 matrices). Products of 16-bit matrices run only on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from . import hardware
from .recording import device_of

TILE = 128  # approximate number of rows and columns of a result that one multiprocessor computes at a time
TOKENS = 1024  # minimum number of tokens of a partial sum of `over_tokens`


def mm_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a @ b in at least fp32."""
    return torch.mm(a, b) if a.dtype.itemsize >= 4 else torch.mm(a, b, out_dtype=torch.float32)


def bmm_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched matrix product a @ b in at least fp32."""
    return torch.bmm(a, b) if a.dtype.itemsize >= 4 else torch.bmm(a, b, out_dtype=torch.float32)


def over_tokens(a_TM: Tensor, b_TN: Tensor) -> Tensor:
    """Return a^T @ b in at least fp32 as partial sums (parts, M, N) over consecutive tokens.

    The number of parts is chosen so that the tiles of all partial sums fill the GPU.
    """
    (T, M), N = a_TM.shape, b_TN.shape[1]
    parts = T // TOKENS
    if parts > 1:
        tiles = -(-M // TILE) * -(-N // TILE)
        parts = min(parts, -(-hardware.multiprocessors(device_of(a_TM)) // tiles))
    if parts <= 1:
        return mm_in_fp32(a_TM.t(), b_TN)[None]
    return batched_over_tokens(a_TM[None], b_TN[None], parts)[0]


def batched_over_tokens(a_GTM: Tensor, b_GTN: Tensor, parts: int = 16) -> Tensor:
    """Return a^T @ b in at least fp32 as partial sums (G, parts, M, N) over consecutive tokens.

    The tokens are split into at most `parts` parts of equal size, because one matrix product with a small result would
    leave most of the GPU idle.
    """
    G, T, _ = a_GTM.shape
    parts = next(n for n in range(min(T, parts), 0, -1) if T % n == 0)
    a, b = (t.unflatten(1, (parts, -1)).flatten(0, 1) for t in (a_GTM, b_GTN))
    return bmm_in_fp32(a.mT, b).unflatten(0, (G, parts))
