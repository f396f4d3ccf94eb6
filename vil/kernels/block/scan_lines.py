"""Projections and scan of row or column means, in one kernel for few images, otherwise in several launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from ..scan.chunks import CHUNK
from ..scan.kernel import common_macros
from ..scan.reference import longhorn, selective

SOURCE = Source("block/scan_lines", {
    "scan_lines": dict(
        means=In("Element"), x_proj=In("Element"), step_proj=In("Element"), A=In("float"), step_bias=In("float"),
        y=Out("Element"), B=I64, lines=I64,
    ),
})  # fmt: skip

CHANNELS = 32  # number of channels per CTA
MOST_LINES = CHUNK  # maximum number of pooled tokens: one chunk, because `scan_lines` saves no states between chunks


def fits(means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor) -> bool:
    """Return whether `scan_lines` supports the inputs and is fast for them.

    The batch must be small, because each CTA computes the projections of all channels of an image.
    """
    (_, B, S, D), P, R = means_2BSD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    shape = means_2BSD.dtype.itemsize == 2 and D % 128 == R % 8 == 0 and P - R == 32 and S <= MOST_LINES
    device = device_of(means_2BSD)
    few = hardware.multiprocessors(device) >= B * (D // CHANNELS)
    return shape and few and cta_bytes(S, P) <= hardware.shared_bytes(device)


def scan_lines(
    recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, A_2DN: Tensor | None,
    step_bias_2D: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the scan's output (B, S, D) summed over both directions, and an empty tensor, because no state is saved.

    The first R of the P rows of x_proj project to the step.
    """
    (_, B, S, D), P, R = means_2BSD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    y_BSD, macros = torch.empty_like(means_2BSD[0]), macros_of(recurrence, means_2BSD, P, R)
    launches.launch(SOURCE, "scan_lines", macros, B * (D // CHANNELS), 256, dict(
        means=means_2BSD, x_proj=x_proj_2PD, step_proj=step_proj_2DR, A=A_2DN, step_bias=step_bias_2D, y=y_BSD, B=B,
        lines=S,
    ), macros["CTA_BYTES"])  # fmt: skip
    return y_BSD, means_2BSD.new_empty((2, B, 0, (P - R) // 2, D), dtype=torch.float32)


def macros_of(recurrence: str, means_2BSD: Tensor, P: int, R: int) -> dict:
    *_, S, D = means_2BSD.shape
    macros = common_macros(recurrence, means_2BSD, (P - R) // 2)
    return macros | dict(LANE_STATES=4, LANE_CHANNELS=1, WIDTH=D, RANK=R, TILES=-(-S // 16), CTA_BYTES=cta_bytes(S, P))


def cta_bytes(S: int, P: int) -> int:
    return 4 * (8 * 16 * (P | 8) + 2 * -(-S // 16) * 16 * (P + 2 * CHANNELS))


def reference(
    recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, A_2DN: Tensor | None,
    step_bias_2D: Tensor,
) -> Tensor:  # fmt: skip
    """Reference implementation of `scan_lines` that returns only the scan's output."""
    P, R = x_proj_2PD.shape[1], step_proj_2DR.shape[2]
    projected_2BSP = means_2BSD @ x_proj_2PD.mT[:, None]
    step, k, q = projected_2BSP.split((R, (P - R) // 2, (P - R) // 2), dim=-1)
    step_logits = step @ step_proj_2DR.mT[:, None]
    y_BSD = torch.zeros_like(means_2BSD[0])
    for g in (0, 1):
        x, logits, bias = means_2BSD[g], step_logits[g], step_bias_2D[g]
        if A_2DN is None:
            found_BSD = longhorn(x, logits, k[g], q[g], None, bias, reverse=g == 1)
        else:
            found_BSD = selective(x, logits, A_2DN[g], k[g], q[g], None, bias, reverse=g == 1)
        assert isinstance(found_BSD, Tensor)  # scans return a tuple only with a final state
        y_BSD += found_BSD
    return y_BSD
