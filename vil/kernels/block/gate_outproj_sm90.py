"""Gate, product with out_proj, residual addition and norm in one kernel on Hopper, for many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import compiler, hardware
from ..cuda.elements import ELEMENT
from ..cuda.plan import place
from .gate import Read, token_stride
from .norm_backward import empty_norm

STAGES, SLOTS = 5, 2  # weights and tokens on their way at once


def fits(T: int, C: int, D: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this kernel and its backward take these tokens."""
    shape = dtype.itemsize == 2 and C in (192, 384) and D == 2 * C
    return shape and hardware.is_hopper(device) and 64 * hardware.multiprocessors(device) <= T


def empty_tiles(T: int, out_proj: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Room for out_proj as this kernel wants it and `pack_weights` writes it, if it is to run."""
    C, D = out_proj.shape
    takes = fits(T, C, D, dtype, place(out_proj))
    return torch.empty_like(out_proj, dtype=dtype, memory_format=torch.contiguous_format) if takes else None


def gate_outproj_sm90(
    x_TC: Tensor, y: Read, z_BLD: Tensor, scale_B: Tensor | None, tiles: Tensor, mean_BLD: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """x + gated out_proj^T and, with `eps`, its norm and factors, else an empty list; writes `mean_BLD` if given.

    x is to be at a multiple of 16 bytes and z the last half of uz.
    """
    (_, L, D), (T, C), dtype = y.first.shape, x_TC.shape, z_BLD.dtype
    assert token_stride(z_BLD) == 2 * D
    assert x_TC.data_ptr() % 16 == 0
    out_TC, norm = torch.empty_like(x_TC), [] if eps is None else empty_norm(x_TC, dtype)
    macros = macros_of(dtype, C, mean_BLD is not None, y.lines is not None)
    multiprocessors = hardware.multiprocessors(place(x_TC))
    rounds, tokens = shares(T, multiprocessors)
    xhat_TC, rstd_T = norm or (None, None)
    compiler.launch("block/gate_outproj_sm90", "gate_outproj", macros, multiprocessors, 384, dict(
        **y.arguments(), z=z_BLD, scales=scale_B, tiles=tiles, x=x_TC, out=out_TC, means=mean_BLD, xhat=xhat_TC,
        rstd=rstd_T, eps=eps or 0.0, tokens=T, L_=L, tokens_of_group=tokens, rounds=rounds,
    ), macros["CTA_BYTES"])  # fmt: skip
    return out_TC, norm


def macros_of(dtype: torch.dtype, C: int, keep: bool, pooled: bool) -> dict:
    barriers, rows = 2 * STAGES + 2 * 2 * SLOTS, 2 * 64 if pooled else 0
    cta_bytes = STAGES * C * 32 * 2 + 2 * SLOTS * 3 * 64 * 64 * 2 + barriers * 8 + rows * 4
    kind = dict(INPUT=ELEMENT[dtype], WIDTH=C, KEEP=int(keep), POOLED=int(pooled))
    return dict(**kind, STAGES=STAGES, SLOTS=SLOTS, CTA_BYTES=cta_bytes)


def shares(T: int, blocks: int) -> tuple[int, int]:
    """How often each of two groups of every block on Hopper takes tokens, at most 64 at a time, and how many."""
    rounds = -(-T // (2 * 64 * blocks))
    return rounds, -(-T // (2 * rounds * blocks))
