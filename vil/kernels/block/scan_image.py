"""Projections and Longhorn's scan of up to 16 pooled tokens per image, with one CTA per image."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from .scan_lines import reference as reference

SOURCE = Source("block/scan_image", {
    "scan_image": dict(
        means=In("Element"), x_proj=In("Element"), step_proj=In("Element"), step_bias=In("float"), y=Out("Element"),
        B=I64, lines=I64,
    ),
})  # fmt: skip

MOST_LINES = 16  # maximum number of pooled tokens per image: the rows of a matrix product on tensor cores
STATES = 16
CHANNELS = 3072  # with fewer than D / CHANNELS images per multiprocessor, separate kernels are faster
MOST_WARPS = 12  # maximum number of warps per multiprocessor, because a thread needs up to 168 registers


def fits(recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor) -> bool:
    """Return whether `scan_image` supports the inputs and is fast for them.

    The kernel supports Longhorn with 16-bit types and 16 states, if an image and the weights of a direction fit into
    shared memory. The batch must be large, because each image runs on a single multiprocessor.
    """
    (_, B, S, D), P, R = means_2BSD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    if recurrence != "longhorn" or means_2BSD.dtype.itemsize != 2 or P - R != 2 * STATES or S > MOST_LINES:
        return False
    device, shape = device_of(means_2BSD), D % 64 == R % 8 == 0 and R <= 64 and D <= 64 * MOST_WARPS
    many = hardware.multiprocessors(device) * D <= CHANNELS * B
    return shape and many and cta_bytes(D, R, 64) <= hardware.shared_bytes(device)


def scan_image(
    recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, A_2DN: Tensor | None,
    step_bias_2D: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the scan's output (B, S, D) summed over both directions, and an empty tensor instead of saved states.

    The first R of the P rows of x_proj project to the step. A scan of one chunk saves no states.
    """
    (_, B, S, D), R = means_2BSD.shape, step_proj_2DR.shape[2]
    y_BSD, channels = torch.empty_like(means_2BSD[0]), warp_channels(D, B, device_of(means_2BSD))
    macros = macros_of(means_2BSD.dtype, D, R, channels)
    launches.launch(SOURCE, "scan_image", macros, B, D // channels * 32, dict(
        means=means_2BSD, x_proj=x_proj_2PD, step_proj=step_proj_2DR, step_bias=step_bias_2D, y=y_BSD, B=B, lines=S,
    ), macros["CTA_BYTES"])  # fmt: skip
    return y_BSD, means_2BSD.new_empty((2, B, 0, STATES, D), dtype=torch.float32)


def warp_channels(D: int, B: int, device: torch.device) -> int:
    """Return the number of channels per warp.

    If there is at most one CTA per multiprocessor, a CTA has more warps, which hide latencies. Otherwise, a CTA has
    fewer warps, so that two CTAs fit on a multiprocessor if D is small.
    """
    return 32 if D <= 32 * MOST_WARPS and hardware.multiprocessors(device) >= B else 64


def macros_of(dtype: torch.dtype, D: int, R: int, channels: int) -> dict:
    ctas = 2 if channels == 64 and D <= 32 * MOST_WARPS else 1
    return dict(
        INPUT=ELEMENT[dtype], WIDTH=D, RANK=R, STATES=STATES, WARP_CHANNELS=channels, MIN_CTAS=ctas,
        CTA_BYTES=cta_bytes(D, R, channels),
    )  # fmt: skip


def cta_bytes(D: int, R: int, channels: int) -> int:
    lines, P, pairs = MOST_LINES, R + 2 * STATES, MOST_LINES // 2
    warp = 2 * channels * (2 * lines + P + (R | 8)) + 4 * lines * (P | 8)
    states = pairs * 32 * 4 * (8 + 4) + lines * 8 + pairs * 4
    return D // channels * warp + states + lines * (R | 8) * 2
