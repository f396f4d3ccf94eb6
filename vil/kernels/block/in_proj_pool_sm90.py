"""Hopper kernel for large batches that fuses a pooled block's in_proj, convolutions, pooling and skip connections."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from . import pool
from .lines import LINE_PARAMETERS, Lines

SOURCE = Source("block/in_proj_pool_sm90", {
    "in_proj_pool": dict(
        xhat=In("Element"), tiles=In("Element"), filters=In("float"), biases=In("float"), skip=In("float"),
        uz=Out("Element"), means=Out("Element"), skipped=Out("Element"), B=I64, **LINE_PARAMETERS,
    ),
}, only_hopper=True)  # fmt: skip

COLUMNS = 200  # columns of a matrix product, equal to COLUMNS in the .cu file: the tokens of an image, then zeros
STAGES, SLOTS = 6, 6  # pipeline stages for the weights, and for 64-column chunks of an image's normalized input xhat
# Convolutions read three zeros after the last token. With 128 tokens, 36% of the columns would be unused.
MIN_TOKENS, MAX_TOKENS = 129, COLUMNS - 3
LINES = 16  # maximum number of pooled tokens of an image, because each of 8 warps processes two lines


def fits(B: int, in_proj_EC: Tensor, taps: int, dtype: torch.dtype, lines: Lines) -> bool:
    """Return whether the kernel supports the sizes, dtype and GPU, and is faster than in_proj and `pool` for B images.

    A multiprocessor processes one image at a time, so the last round of images must not leave many multiprocessors
    idle.
    """
    (E, C), device = in_proj_EC.shape, device_of(in_proj_EC)
    shape = dtype.itemsize == 2 and C in (192, 384) and E == 4 * C and taps == 4
    if not (shape and MIN_TOKENS <= lines.L <= MAX_TOKENS and lines.S <= LINES and hardware.is_hopper(device)):
        return False
    multiprocessors = hardware.multiprocessors(device)
    rounds = -(-B // multiprocessors)
    return 0.75 * rounds * multiprocessors <= B


def empty_tiles(B: int, in_proj_EC: Tensor, taps: int, dtype: torch.dtype, lines: Lines) -> Tensor | None:
    """Allocate memory for in_proj in the kernel's tiled layout, or return None if the kernel does not run."""
    if not fits(B, in_proj_EC, taps, dtype, lines):
        return None
    return torch.empty_like(in_proj_EC, dtype=dtype, memory_format=torch.contiguous_format)


def in_proj_pool(
    xhat_TC: Tensor, tiles: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, skip_2D: Tensor, lines: Lines, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uz (B, L, 2D), and row or column means and skip connections as `pool` does.

    The first half of uz, which is u, is written only if `keep`. `tiles` has the layout of `tiled_in` in tiles.cuh.
    """
    (T, C), dtype = xhat_TC.shape, xhat_TC.dtype
    assert xhat_TC.data_ptr() % 16 == 0
    B, D = T // lines.L, 2 * C
    uz_BLE = xhat_TC.new_empty(B, lines.L, 2 * D)
    means_2BSD = xhat_TC.new_empty(2, B, lines.S, D)
    skipped_BLD = xhat_TC.new_empty(B, lines.L, D)
    macros = macros_of(dtype, C, keep)
    ctas = min(B, hardware.multiprocessors(device_of(xhat_TC)))
    launches.launch(SOURCE, "in_proj_pool", macros, ctas, 512, dict(
        xhat=xhat_TC, tiles=tiles, filters=conv_2DK, biases=conv_bias_2D, skip=skip_2D, uz=uz_BLE, means=means_2BSD,
        skipped=skipped_BLD, B=B, **lines.arguments(),
    ), macros["CTA_BYTES"])  # fmt: skip
    return uz_BLE, means_2BSD, skipped_BLD


def macros_of(dtype: torch.dtype, C: int, keep: bool) -> dict:
    barriers = 2 * STAGES + 2 * SLOTS + 2
    tile_and_rows = COLUMNS * (64 * 2 + 16) + (COLUMNS + 8) * 2 + barriers * 8
    cta_bytes = -(-tile_and_rows // 1024) * 1024 + SLOTS * COLUMNS * 64 * 2 + STAGES * 64 * 64 * 2
    kind = dict(INPUT=ELEMENT[dtype], WIDTH=C, TAPS=4, KEEP=int(keep))
    return dict(**kind, STAGES=STAGES, SLOTS=SLOTS, CTA_BYTES=cta_bytes)


def reference_tiles(in_proj_EC: Tensor) -> Tensor:
    """Return in_proj in the layout of the kernel, which `pack_weights` writes.

    Blocks of 64 rows and 64 columns are contiguous. Groups of 64 rows of u and of z alternate. Rows are permuted
    by `row_of` in tiles.cuh. In row r of a block, the 16-byte piece with index i is stored at index i ^ r % 8.
    """
    E, C = in_proj_EC.shape
    # dimensions of the view: u or z, block of 64 rows, group of 16 rows, row % 16 // 4, row % 4 // 2, row % 2, block of
    # 64 columns, 16-byte piece, column of a piece
    rows = (
        in_proj_EC.view(2, E // 128, 4, 4, 2, 2, C // 64, 8, 8).permute(1, 0, 6, 2, 4, 3, 5, 7, 8).reshape(-1, 64, 8, 8)
    )
    pieces = torch.arange(8) ^ torch.arange(64)[:, None] % 8
    return rows.gather(2, pieces.to(rows.device)[None, :, :, None].expand_as(rows)).view(E, C)


def reference(
    xhat_TC: Tensor, in_proj_EC: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, skip_2D: Tensor, lines: Lines
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference implementation of `in_proj_pool` that reads in_proj itself and always writes u."""
    uz_BLE = (xhat_TC @ in_proj_EC.t()).view(-1, lines.L, len(in_proj_EC))
    return uz_BLE, *pool.reference(uz_BLE.chunk(2, dim=-1)[0], conv_2DK, conv_bias_2D, skip_2D, lines)
