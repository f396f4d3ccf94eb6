"""Gradients of a pooled block's x_proj and step_proj, which are sums over all pooled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from .step_proj_bwd import reference_products

SOURCE = Source("block/projection_gradients", {
    "projection_gradients": dict(
        x=In("Element"), dprojected=In("Element"), dstep_logits=In("Element"), step=In("Element"),
        dx_projs=Out("float"), dsteps=Out("float"), tokens=I64, parts=I64,
    ),
})  # fmt: skip

CHANNELS, TOKENS = 64, 64  # channels per CTA, and tokens per pipeline stage in shared memory


def projection_gradients(
    x_2TD: Tensor, dprojected_2TP: Tensor, dstep_logits_2TD: Tensor, step_2TR: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dprojected^T @ x (2, parts, P, D) and dstep_logits^T @ step (2, parts, D, R), in fp32.

    The results are partial sums over tokens. The inputs are contiguous.
    """
    (_, T, D), P, R = x_2TD.shape, dprojected_2TP.shape[2], step_2TR.shape[2]
    slabs = D // CHANNELS
    parts = max(1, min(-(-T // TOKENS), hardware.multiprocessors(device_of(x_2TD)) // (2 * slabs)))
    dx_projs = x_2TD.new_empty(2, parts, P, D, dtype=torch.float32)
    dsteps = x_2TD.new_empty(2, parts, D, R, dtype=torch.float32)
    macros = macros_of(x_2TD.dtype, D, P, R)
    launches.launch(SOURCE, "projection_gradients", macros, 2 * slabs * parts, 256, dict(
        x=x_2TD, dprojected=dprojected_2TP, dstep_logits=dstep_logits_2TD, step=step_2TR, dx_projs=dx_projs,
        dsteps=dsteps, tokens=T, parts=parts,
    ), macros["CTA_BYTES"])  # fmt: skip
    return dx_projs, dsteps


def macros_of(dtype: torch.dtype, D: int, P: int, R: int) -> dict:
    return dict(INPUT=ELEMENT[dtype], WIDTH=D, RANK=R, OUTPUTS=P, CTA_BYTES=cta_bytes(P, R))


def cta_bytes(P: int, R: int) -> int:
    stages, pitches = 5, 2 * (CHANNELS + 8) + P + (0 if P % 16 else 8) + R + (0 if R % 16 else 8)
    return max(stages * TOKENS * pitches * 2, 4 * 32 * (-(-P // 16) * 32 + R * 2))


def reference(
    x_2TD: Tensor, dprojected_2TP: Tensor, dstep_logits_2TD: Tensor, step_2TR: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `projection_gradients` that returns single partial sums."""
    return reference_products(dprojected_2TP, x_2TD), reference_products(dstep_logits_2TD, step_2TR)
