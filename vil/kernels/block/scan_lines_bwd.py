"""Backward pass of a pooled block's projections and scan, for at most 16 pooled tokens per image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from .add_slices import add_slices
from .projection_gradients import cta_bytes as other_cta_bytes
from .projection_gradients import projection_gradients
from .reference import gradients
from .scan_lines import reference as reference_forward

SOURCE = Source("block/scan_lines_bwd", {
    "scan_lines_backward": dict(
        means=In("Element"), x_proj=In("Element"), step_proj=In("Element"), step_bias=In("float"), dy=In("Element"),
        dmeans=Out("Element"), dstep_logits=Out("Element"), step=Out("Element"), dprojected=Out("Element"),
        dstep_biases=Out("float"), B=I64, parts=I64, projected=In("Element"), dprojected_parts=Out("float"),
    ),
})  # fmt: skip

ROWS, N = 16, 16  # maximum number of pooled tokens per image, and the supported number of states
WARPS = 8  # maximum number of warps per CTA; 12 warps are slower
NARROW = 384  # maximum number of channels per CTA for which the kernel is fast for any number of images
# If a CTA has more than NARROW channels, the kernel is used only if the GPU has at most IMAGES multiprocessors per
# image of the batch, because separate kernels are faster otherwise.
IMAGES = 8


class LineGradients(NamedTuple):
    """Gradients of the inputs of projections and scan, from which the gradients of x_proj and step_proj follow."""

    means: Tensor  # (2, B, S, D)
    step_logits: Tensor  # (2, B, S, D)
    projected: Tensor  # (2, B, S, P): gradient of x_proj's output
    step: Tensor  # (2, B, S, R): the recomputed step, not a gradient
    step_bias: Tensor  # (parts, 2, D), to be summed over parts


def fits(recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor) -> bool:
    """Return whether the kernel supports the recurrence and the inputs, and is fast for them.

    One multiprocessor processes all channels of a CTA, so few images with many channels per CTA are slow.
    """
    (_, B, S, D), P, R = means_2BSD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    device, shape = device_of(means_2BSD), S <= ROWS and D % 64 == R % 8 == 0 and P - R == 2 * N
    if recurrence != "longhorn" or means_2BSD.dtype.itemsize != 2 or not shape:
        return False
    slices, most = slices_of(D, R, device), hardware.shared_bytes(device)
    fast = D // slices <= NARROW or hardware.multiprocessors(device) <= IMAGES * B
    return fast and max(cta_bytes(D, R, slices), other_cta_bytes(P, R)) <= most


def slices_of(D: int, R: int, device: torch.device) -> int:
    """Return the number of CTAs that share an image in one direction. Each CTA processes a slice of the channels.

    One CTA processes all channels if the weights of a direction fit into shared memory.
    """
    most = hardware.shared_bytes(device)
    if cta_bytes(D, R) <= most:
        return 1
    wide = [n for n in range(2, D // 64 + 1) if D % (64 * n) == 0]
    return next((n for n in wide if D // n <= NARROW and cta_bytes(D, R, n) <= most), D // 64)


def scan_lines_backward(
    means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, step_bias_2D: Tensor, dy_BSD: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the means (2, B, S, D), x_proj, step_proj and step_bias.

    The forward pass is that of `scan_lines` for Longhorn. dy is the gradient of both directions' outputs. The first R
    of the P rows of x_proj project to the step. The gradients of the weights are fp32 partial sums: (2, parts, P, D),
    (2, parts, D, R) and (parts, 2, D), each with its own number of parts.
    """
    found = line_gradients(means_2BSD, x_proj_2PD, step_proj_2DR, step_bias_2D, dy_BSD)
    means_2TD, dprojected_2TP, dstep_logits_2TD, step_2TR = (
        t.flatten(1, 2) for t in (means_2BSD, found.projected, found.step_logits, found.step)
    )
    products = projection_gradients(means_2TD, dprojected_2TP, dstep_logits_2TD, step_2TR)
    return found.means, *products, found.step_bias


def line_gradients(
    means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, step_bias_2D: Tensor, dy_BSD: Tensor
) -> LineGradients:
    """Return all gradients of `scan_lines_backward` except those of the projections' weights."""
    (_, B, S, D), P, R = means_2BSD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    device = device_of(means_2BSD)
    slices = slices_of(D, R, device)
    parts = max(1, min(B, hardware.multiprocessors(device) // (2 * slices)))
    found = LineGradients(
        torch.empty_like(means_2BSD), torch.empty_like(means_2BSD), means_2BSD.new_empty(2, B, S, P),
        means_2BSD.new_empty(2, B, S, R), means_2BSD.new_empty(parts, 2, D, dtype=torch.float32),
    )  # fmt: skip
    projected_2TP = parts_N2TP = None
    if slices > 1:
        projected_2TP = torch.bmm(means_2BSD.flatten(1, 2), x_proj_2PD.mT)
        parts_N2TP = means_2BSD.new_empty(slices, 2, B * S, P, dtype=torch.float32)
    macros = macros_of(means_2BSD.dtype, S, D, R, slices)
    launches.launch(SOURCE, "scan_lines_backward", macros, 2 * parts * slices, 32 * macros["WARPS"], dict(
        means=means_2BSD, x_proj=x_proj_2PD if slices == 1 else None, step_proj=step_proj_2DR, step_bias=step_bias_2D,
        dy=dy_BSD, dmeans=found.means, dstep_logits=found.step_logits, step=found.step,
        dprojected=found.projected if slices == 1 else None, dstep_biases=found.step_bias, B=B, parts=parts,
        projected=projected_2TP, dprojected_parts=parts_N2TP,
    ), macros["CTA_BYTES"])  # fmt: skip
    if parts_N2TP is not None:
        dprojected_2TP = found.projected.flatten(1, 2)
        add_slices(parts_N2TP, dprojected_2TP)
        found.means.flatten(1, 2).baddbmm_(dprojected_2TP, x_proj_2PD)
    return found


def macros_of(dtype: torch.dtype, S: int, D: int, R: int, slices: int = 1) -> dict:
    return dict(
        INPUT=ELEMENT[dtype], LINES=S, WIDTH=D, SLICES=slices, RANK=R, WARPS=warps(D // slices),
        CTA_BYTES=cta_bytes(D, R, slices),
    )  # fmt: skip


def warps(channels: int) -> int:
    return min(WARPS, channels // 16)


def cta_bytes(D: int, R: int, slices: int = 1) -> int:
    P, W, channels = R + 2 * N, warps(D // slices), D // slices
    pitch, P_pitch, R_pitch = channels + 8, P + (0 if P % 16 else 8), R + (0 if R % 16 else 8)
    rows = 2 * ROWS + (P if slices == 1 else 0)  # means, dy and x_proj
    elements = rows * pitch + channels * R_pitch + ROWS * P_pitch
    floats = ROWS * 32 + W * ROWS + W * max(ROWS * P, ROWS * 32 + 8 * 20)
    return 2 * elements + 4 * floats


def reference(
    means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, step_bias_2D: Tensor, dy_BSD: Tensor
) -> list[Tensor]:
    """Reference implementation of `scan_lines_backward` that returns sums instead of partial sums."""

    def forward(means, x_proj, step_proj, step_bias):
        return reference_forward("longhorn", means, x_proj, step_proj, None, step_bias)

    return gradients(forward, [means_2BSD, x_proj_2PD, step_proj_2DR, step_bias_2D], dy_BSD)
