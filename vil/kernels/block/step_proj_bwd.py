"""Backward pass of step_proj, the projection to step logits: one kernel, or matrix products by cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches, products
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source

SOURCE = Source("block/step_proj_bwd", {
    "step_proj_backward": dict(
        dstep_logits=In("Element"), step=In("Element"), step_stride=I64, step_directions=I64, step_proj=In("Element"),
        dk=In("Element"), dq=In("Element"), dprojected=Out("Element"), dstep_proj=Out("float"), tokens=I64, parts=I64,
    ),
})  # fmt: skip


def step_proj_backward(
    dstep_logits_2TD: Tensor, step_2TR: Tensor, step_proj_2DR: Tensor, dk_2TN: Tensor, dq_2TN: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x_proj's output (2, T, P), and partial sums of step_proj's gradient over tokens.

    The columns of the first result are dstep_logits @ step_proj, dk and dq. The second result is dstep_logits^T @ step
    for each part of the tokens, (2, parts, D, R) in fp32.
    """
    (_, T, D), R, N = dstep_logits_2TD.shape, step_proj_2DR.shape[2], dk_2TN.shape[2]
    if not fits(dstep_logits_2TD.dtype, D, R):
        dstep_2TR = torch.bmm(dstep_logits_2TD, step_proj_2DR)
        dprojected_2TP = torch.cat([dstep_2TR, dk_2TN, dq_2TN], dim=-1)
        return dprojected_2TP, products.batched_over_tokens(dstep_logits_2TD, step_2TR)
    parts = min(-(-T // 16), -(-hardware.multiprocessors(device_of(dstep_logits_2TD)) // 2))
    dprojected_2TP = dstep_logits_2TD.new_empty(2, T, R + 2 * N)
    dstep_proj = dstep_logits_2TD.new_empty(2, parts, D, R, dtype=torch.float32)
    macros = macros_of(dstep_logits_2TD.dtype, D, R, N)
    launches.launch(SOURCE, "step_proj_backward", macros, 2 * parts, 256, dict(
        dstep_logits=dstep_logits_2TD, step=step_2TR, step_stride=step_2TR.stride(1),
        step_directions=step_2TR.stride(0), step_proj=step_proj_2DR, dk=dk_2TN, dq=dq_2TN, dprojected=dprojected_2TP,
        dstep_proj=dstep_proj, tokens=T, parts=parts,
    ), macros["CTA_BYTES"])  # fmt: skip
    return dprojected_2TP, dstep_proj


def fits(dtype: torch.dtype, D: int, R: int) -> bool:
    """Return whether one kernel supports the dtype, D channels and rank R.

    The registers of a warp must hold the warp's part of step_proj and of its gradient.
    """
    return dtype.itemsize == 2 and D <= 768 and R <= 24 and D % 128 == R % 8 == 0


def macros_of(dtype: torch.dtype, D: int, R: int, N: int) -> dict:
    stages, warps, tile = 3, 8, 16
    stage = tile * (D + 8 + R + (8 if R % 16 == 0 else 0)) * 2
    block_bytes = stages * stage + 2 * warps * tile * R * 4
    return dict(INPUT=ELEMENT[dtype], CHANNELS=D, RANK=R, STATES=N, CTA_BYTES=block_bytes)


def reference(
    dstep_logits_2TD: Tensor, step_2TR: Tensor, step_proj_2DR: Tensor, dk_2TN: Tensor, dq_2TN: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `step_proj_backward` that returns a single partial sum."""
    dprojected_2TP = torch.cat([dstep_logits_2TD @ step_proj_2DR, dk_2TN, dq_2TN], dim=-1)
    return dprojected_2TP, reference_products(dstep_logits_2TD, step_2TR)


def reference_products(a_2TM: Tensor, b_2TN: Tensor) -> Tensor:
    """Reference implementation of `batched_over_tokens` that returns a single partial sum."""
    return (a_2TM.mT @ b_2TN)[:, None]
