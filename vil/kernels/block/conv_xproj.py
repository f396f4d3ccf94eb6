"""Convolutions, x_proj and step_proj of a block, in one kernel if shapes allow, otherwise in up to three launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from . import conv as convolutions

SOURCE = Source("block/conv_xproj", {
    "conv_xproj": dict(
        u=In("Element"), u_stride=I64, weights=In("float"), biases=In("float"), x_proj=In("Element"),
        step_proj=In("Element"), v=Out("Element"), projected=Out("Element"), step_logits=Out("Element"), B=I64,
        length=I64, read=I64, channels=I64,
    ),
})  # fmt: skip

STRIPS = 48  # number of token pairs (strips) that a CTA processes
K_TILE = 64  # channels per pipeline stage in shared memory


def conv_xproj(
    u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, H: int,
    project_step: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Convolve the tokens in both directions, and project the convolved tokens.

    Return the convolved tokens v (2, B, H, D) after SiLU, the projections v @ x_proj^T (2, T, P), and the step logits
    (2, T, D), which are step @ step_proj^T. The step is the first R columns of the projections. If `project_step` is
    False, the step logits are None. All results are for the first H tokens of each direction (T tokens over the
    batch). The last of the K taps reads the current token.
    """
    (B, L, D), P, R, dtype = u_BLD.shape, x_proj_2PD.shape[1], step_proj_2DR.shape[2], u_BLD.dtype
    if not fits(u_BLD, P, conv_2DK.shape[2]):
        v_2BHD = convolutions.conv(u_BLD, conv_2DK, conv_bias_2D, H)
        projected_2TP = torch.bmm(v_2BHD.flatten(1, 2), x_proj_2PD.mT)
        return v_2BHD, projected_2TP, torch.bmm(projected_2TP[..., :R], step_proj_2DR.mT) if project_step else None
    macros = macros_of(dtype, P, R, conv_2DK.shape[2], project_step)
    v_2BHD = u_BLD.new_empty(2, B, H, D)
    projected_2TP = u_BLD.new_empty(2, B * H, P)
    step_logits_2TD = u_BLD.new_empty(2, B * H, D) if project_step else None
    launches.launch(SOURCE, "conv_xproj", macros, -(-_strips(u_BLD) // STRIPS), 192, dict(
        u=u_BLD, u_stride=u_BLD.stride(1), weights=conv_2DK, biases=conv_bias_2D, x_proj=x_proj_2PD,
        step_proj=step_proj_2DR, v=v_2BHD, projected=projected_2TP, step_logits=step_logits_2TD, B=B, length=L, read=H,
        channels=D,
    ), macros["CTA_BYTES"])  # fmt: skip
    return v_2BHD, projected_2TP, step_logits_2TD


def fits(u_BLD: Tensor, P: int, taps: int) -> bool:
    """Return whether one kernel can compute convolutions, projections and step logits.

    The kernel requires a 16-bit dtype, D divisible by `K_TILE`, at most 64 projections, 4 taps, at least 24 tokens,
    aligned copies, 32-bit offsets within two sequences, and at least one CTA for each multiprocessor.
    """
    _, L, D = u_BLD.shape
    shape = u_BLD.dtype.itemsize == 2 and D % K_TILE == 0 and P <= 64 and taps == 4 and L >= 24
    reached = vector_width(8, u_BLD) == 8 and 2 * L * u_BLD.stride(1) < 2**31
    return shape and reached and STRIPS * hardware.multiprocessors(device_of(u_BLD)) <= _strips(u_BLD)


def _strips(u_BLD: Tensor) -> int:
    return len(u_BLD) * -(-u_BLD.shape[1] // 2)


def macros_of(dtype: torch.dtype, P: int, R: int, taps: int, project_step: bool) -> dict:
    """Return the macros of conv_xproj.cu."""
    rows = 2 * STRIPS + 6 * (taps - 1)
    stage_bytes = rows * (K_TILE + 16) * 2 + 2 * K_TILE * (taps + 1) * 4 + 2 * P * K_TILE * 2
    return dict(
        INPUT=ELEMENT[dtype], TAPS=taps, PROJECTIONS=P, RANK=R, LOGITS=int(project_step),
        CTA_BYTES=2 * stage_bytes + rows * 4,
    )  # fmt: skip


def reference(
    u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, H: int,
    project_step: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Reference implementation of `conv_xproj` that always returns step logits."""
    v_2BHD = convolutions.reference(u_BLD, conv_2DK, conv_bias_2D, H)
    projected_2TP = v_2BHD.flatten(1, 2) @ x_proj_2PD.mT
    return v_2BHD, projected_2TP, projected_2TP[..., : step_proj_2DR.shape[2]] @ step_proj_2DR.mT
