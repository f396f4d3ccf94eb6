# ruff: noqa: F401
"""Launch functions of a block's CUDA kernels except the scan, collected from one module per kernel.

Each kernel has a module with the name of its source file. The module contains the kernel's limits, macros, launch
function and reference implementation, `reference`. The reference implementation of gate_outproj_sm90 is in
gate_outproj, and the limits of gate_outproj_bwd_sm90 are in gate_outproj_sm90. If a kernel has dynamic shared memory,
the host passes the size of this memory as the macro CTA_BYTES, and the kernel asserts that CTA_BYTES is correct.
docs/kernels/block.md explains what each kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..scan.cuda_scan import forward_schedule
from ..scan.heuristics import Schedule
from .conv_backward import conv_backward
from .conv_xproj import conv_xproj
from .gate import GateInputs, gate, gate_backward
from .gate_outproj import add_product, fuses_product, gate_outproj
from .gate_outproj_bwd_sm90 import gate_outproj_backward
from .gate_outproj_sm90 import empty_tiles
from .gate_outproj_sm90 import fits as runs_hopper_kernels
from .in_proj_pool_sm90 import empty_tiles as empty_in_proj_tiles
from .in_proj_pool_sm90 import in_proj_pool
from .norm_backward import norm_backward
from .pack_weights import PackedWeights, pack_weights, packed_size
from .pool import pool
from .pooled_conv_backward import pooled_conv_backward
from .scan_image import fits as scans_images
from .scan_image import scan_image
from .scan_lines import fits as scans_lines
from .scan_lines import scan_lines
from .scan_lines_bwd import fits as backpropagates_lines
from .scan_lines_bwd import scan_lines_backward
from .step_proj_bwd import step_proj_backward
from .sum_lines import sum_lines
from .unpack_gradients import unpack_gradients


def schedule_scan(
    recurrence: str, u_BLD: Tensor, H: int, x_proj_2PD: Tensor, step_proj_2DR: Tensor
) -> tuple[Schedule, bool]:  # fmt: skip
    """Choose the scan's kernel variant and segments, and return whether this variant computes the step logits.

    The scan reads H tokens in both directions. Step logits are step sizes before bias and activation.
    """
    (_, P, _), (_, _, R) = x_proj_2PD.shape, step_proj_2DR.shape
    schedule = forward_schedule(recurrence, u_BLD[:, :H].expand(2, -1, -1, -1), (P - R) // 2, R)
    return schedule, schedule.projects_step(H, R)


def line_scan(
    recurrence: str, means_2BSD: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor
) -> Callable | None:  # fmt: skip
    """Return the launch function of a kernel that projects and scans row or column means, or None if no kernel fits."""
    inputs = means_2BSD, x_proj_2PD, step_proj_2DR
    return scan_lines if scans_lines(*inputs) else scan_image if scans_images(recurrence, *inputs) else None
