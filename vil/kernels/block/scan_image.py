"""Projections and Longhorn's scan of up to 16 pooled tokens per image, with one or several CTAs per image."""

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
        B=I64, lines=I64, projected=In("Element"),
    ),
})  # fmt: skip

MOST_LINES = 16  # maximum number of pooled tokens per image: the rows of a matrix product on tensor cores
STATES = 16
# The kernel is used only if the number of channels per CTA, multiplied by the number of multiprocessors per image, is
# at most CHANNELS, because CTAs with many channels are slow if there are few images.
CHANNELS = 3072
MOST_WARPS = 12  # maximum number of warps per multiprocessor, because a thread needs up to 168 registers


def fits(recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor) -> bool:
    """Return whether `scan_image` supports the inputs and is fast for them.

    The kernel supports Longhorn with a 16-bit dtype, 16 states and at most `MOST_LINES` pooled tokens. D must be
    divisible by 64, and the rank R must be divisible by 8 and at most 64. The batch must be large, because each CTA
    runs on a single multiprocessor.
    """
    (_, B, S, D), P, R = means_2BSD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    if recurrence != "longhorn" or means_2BSD.dtype.itemsize != 2 or P - R != 2 * STATES or S > MOST_LINES:
        return False
    device, shape = device_of(means_2BSD), D % 64 == R % 8 == 0 and R <= 64
    return shape and hardware.multiprocessors(device) * (D // slices_of(D, R, device)) <= CHANNELS * B


def slices_of(D: int, R: int, device: torch.device) -> int:
    """Return the number of CTAs per image, each of which processes a slice of the channels.

    One CTA processes all channels if an image and the weights of a direction fit into shared memory. Otherwise, slices
    are so small that two CTAs fit on a multiprocessor of an H200.
    """
    if D <= 64 * MOST_WARPS and cta_bytes(D, R, 64) <= hardware.shared_bytes(device):
        return 1
    return next(n for n in range(2, D // 64 + 1) if D % (64 * n) == 0 and D // n <= 32 * MOST_WARPS)


def scan_image(
    recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, A_2DN: Tensor | None,
    step_bias_2D: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the scan's output (B, S, D) summed over both directions, and an empty tensor instead of saved states.

    The first R of the P rows of x_proj project to the step. A scan of one chunk saves no states. If several CTAs share
    an image, cuBLAS computes the matrix product with x_proj.
    """
    (_, B, S, D), R, device = means_2BSD.shape, step_proj_2DR.shape[2], device_of(means_2BSD)
    slices = slices_of(D, R, device)
    projected_2TP = None if slices == 1 else torch.bmm(means_2BSD.flatten(1, 2), x_proj_2PD.mT)
    y_BSD, channels = torch.empty_like(means_2BSD[0]), warp_channels(D // slices, B * slices, device)
    macros = macros_of(means_2BSD.dtype, D, R, channels, slices)
    launches.launch(SOURCE, "scan_image", macros, B * slices, D // slices // channels * 32, dict(
        means=means_2BSD, x_proj=x_proj_2PD if slices == 1 else None, step_proj=step_proj_2DR, step_bias=step_bias_2D,
        y=y_BSD, B=B, lines=S, projected=projected_2TP,
    ), macros["CTA_BYTES"])  # fmt: skip
    return y_BSD, means_2BSD.new_empty((2, B, 0, STATES, D), dtype=torch.float32)


def warp_channels(channels: int, ctas: int, device: torch.device) -> int:
    """Return the number of channels per warp, given the number of channels per CTA and the number of CTAs.

    If there is at most one CTA per multiprocessor, a CTA has more warps, which hide latencies. Otherwise, a CTA has
    fewer warps, so that two CTAs fit on a multiprocessor if a CTA has few channels.
    """
    return 32 if channels <= 32 * MOST_WARPS and hardware.multiprocessors(device) >= ctas else 64


def macros_of(dtype: torch.dtype, D: int, R: int, channels: int, slices: int = 1) -> dict:
    ctas = MOST_WARPS // (D // slices // channels)
    return dict(
        INPUT=ELEMENT[dtype], WIDTH=D, SLICES=slices, RANK=R, STATES=STATES, WARP_CHANNELS=channels, MIN_CTAS=ctas,
        CTA_BYTES=cta_bytes(D, R, channels, slices),
    )  # fmt: skip


def cta_bytes(D: int, R: int, channels: int, slices: int = 1) -> int:
    lines, P, pairs = MOST_LINES, R + 2 * STATES, MOST_LINES // 2
    warp = 2 * channels * (2 * lines + (R | 8))
    of_all_warps = pairs * 32 * 4 * (8 + 4) + lines * 8 + pairs * 4 + lines * (R | 8) * 2
    if slices > 1:
        return D // slices // channels * warp + of_all_warps + 2 * lines * P * 2
    x_proj, parts = 2 * channels * P, 4 * lines * (P | 8)
    return D // channels * (warp + x_proj + parts) + of_all_warps
