"""Backward pass of a pooled block's projections and scan, in one kernel for at most 16 pooled tokens per image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from .projection_gradients import cta_bytes as other_cta_bytes
from .projection_gradients import projection_gradients
from .reference import gradients
from .scan_lines import reference as reference_forward

SOURCE = Source("block/scan_lines_bwd", {
    "scan_lines_backward": dict(
        means=In("Element"), x_proj=In("Element"), step_proj=In("Element"), step_bias=In("float"), dy=In("Element"),
        dmeans=Out("Element"), dstep_logits=Out("Element"), step=Out("Element"), dprojected=Out("Element"),
        dstep_biases=Out("float"), B=I64, parts=I64,
    ),
})  # fmt: skip

ROWS, N = 16, 16  # maximum number of pooled tokens per image, and the supported number of states
WARPS = 12  # maximum number of warps per CTA
NARROW = 384  # number of channels up to which the kernel is fast for any number of images
IMAGES = 8  # for more than NARROW channels, separate kernels are faster with more than IMAGES multiprocessors per image


class LineGradients(NamedTuple):
    """Gradients of the inputs of projections and scan, from which the gradients of x_proj and step_proj follow."""

    means: Tensor  # (2, B, S, D)
    step_logits: Tensor  # (2, B, S, D)
    projected: Tensor  # (2, B, S, P): gradient of x_proj's output
    step: Tensor  # (2, B, S, R): the recomputed step, not a gradient
    step_bias: Tensor  # (parts, 2, D), to be summed over parts


def fits(recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor) -> bool:
    """Return whether the kernel supports the recurrence and the inputs, and is fast for them.

    One multiprocessor processes all channels of an image, so few images with many channels are slow.
    """
    (_, B, S, D), P, R = means_2BSD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    device, shape = device_of(means_2BSD), S <= ROWS and D % 64 == R % 8 == 0 and P - R == 2 * N
    if recurrence != "longhorn" or means_2BSD.dtype.itemsize != 2 or not shape:
        return False
    fast = D <= NARROW or hardware.multiprocessors(device) <= IMAGES * B
    return fast and max(cta_bytes(D, R), other_cta_bytes(P, R)) <= hardware.shared_bytes(device)


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
    parts = max(1, min(B, hardware.multiprocessors(device_of(means_2BSD)) // 2))
    found = LineGradients(
        torch.empty_like(means_2BSD), torch.empty_like(means_2BSD), means_2BSD.new_empty(2, B, S, P),
        means_2BSD.new_empty(2, B, S, R), means_2BSD.new_empty(parts, 2, D, dtype=torch.float32),
    )  # fmt: skip
    macros = macros_of(means_2BSD.dtype, S, D, R)
    launches.launch(SOURCE, "scan_lines_backward", macros, 2 * parts, 32 * macros["WARPS"], dict(
        means=means_2BSD, x_proj=x_proj_2PD, step_proj=step_proj_2DR, step_bias=step_bias_2D, dy=dy_BSD,
        dmeans=found.means, dstep_logits=found.step_logits, step=found.step, dprojected=found.projected,
        dstep_biases=found.step_bias, B=B, parts=parts,
    ), macros["CTA_BYTES"])  # fmt: skip
    return found


def macros_of(dtype: torch.dtype, S: int, D: int, R: int) -> dict:
    return dict(INPUT=ELEMENT[dtype], LINES=S, WIDTH=D, RANK=R, WARPS=warps(D), CTA_BYTES=cta_bytes(D, R))


def warps(D: int) -> int:
    return min(WARPS, D // 16)


def cta_bytes(D: int, R: int) -> int:
    P, W = R + 2 * N, warps(D)
    pitch, P_pitch, R_pitch = D + 8, P + (0 if P % 16 else 8), R + (0 if R % 16 else 8)
    elements = (P + 2 * ROWS) * pitch + D * R_pitch + ROWS * P_pitch
    floats = ROWS * 32 + W * ROWS + W * ROWS * max(P, 68)
    return 2 * elements + 4 * floats


def reference(
    means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, step_bias_2D: Tensor, dy_BSD: Tensor
) -> list[Tensor]:
    """Reference implementation of `scan_lines_backward` that returns sums instead of partial sums."""

    def forward(means, x_proj, step_proj, step_bias):
        return reference_forward("longhorn", means, x_proj, step_proj, None, step_bias)

    return gradients(forward, [means_2BSD, x_proj_2PD, step_proj_2DR, step_bias_2D], dy_BSD)
