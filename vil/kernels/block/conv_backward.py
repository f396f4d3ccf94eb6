"""Gradients of a block's convolutions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source
from . import conv
from .reference import gradients

SOURCE = Source("block/conv_backward", {
    "conv_backward": dict(
        u=In("Element"), u_stride=I64, dv=In("Element"), dprojected=In("Element"), x_proj=In("Element"),
        weights=In("float"), biases=In("float"), du=Out("Element"), du_stride=I64, dfilters=Out("float"), B=I64,
        L=I64, H=I64, D=I64, stretch=I64, parts=I64,
    ),
})  # fmt: skip

WARPS = 4  # number of warps per CTA, equal to WARPS in conv_backward.cu


def conv_backward(
    u_BLD: Tensor, dv_2BHD: Tensor, dprojected_2TP: Tensor, x_proj_2PD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor,
    du_BLD: Tensor,
) -> Tensor:  # fmt: skip
    """Write u's gradient to `du_BLD`, and return the filters' and biases' gradients as partial sums over tokens.

    The partial sums have shape (parts, 2, K + 1, D), in which index K of dimension K + 1 holds the biases' gradients.

    `dv_2BHD` is the gradient of v without the contribution of v's projections, and `dprojected_2TP` is the gradient of
    the projections. Both are for the first H tokens of each direction. Other tokens have zero gradients.
    """
    B, L, D = u_BLD.shape
    P, taps, size = dprojected_2TP.shape[2], conv_2DK.shape[2], u_BLD.element_size()
    if size == 4:
        dv_2BHD.flatten(1, 2).baddbmm_(dprojected_2TP, x_proj_2PD)
    macros = macros_of(u_BLD.dtype, vector_width(16 // size, u_BLD), taps, P)
    blocks, resident = -(-D // (8 * WARPS * min(2, macros["VECTOR"]))), 3 if size == 4 or P <= 80 else 2
    stretch, parts = share(B, L, resident * hardware.multiprocessors(device_of(u_BLD)) // blocks)
    dfilters = u_BLD.new_empty(parts, 2, taps + 1, D, dtype=torch.float32)
    launches.launch(SOURCE, "conv_backward", macros, parts * blocks, 32 * WARPS, dict(
        u=u_BLD, u_stride=u_BLD.stride(1), dv=dv_2BHD, dprojected=dprojected_2TP, x_proj=x_proj_2PD, weights=conv_2DK,
        biases=conv_bias_2D, du=du_BLD, du_stride=du_BLD.stride(1), dfilters=dfilters, B=B, L=L, H=dv_2BHD.shape[2],
        D=D, stretch=stretch, parts=parts,
    ), macros["CTA_BYTES"])  # fmt: skip
    return dfilters


def share(B: int, L: int, most: int) -> tuple[int, int]:
    """Return the number of tokens that a lane processes (a stretch), and the number of partial sums of dfilters.

    The CTAs are divided into parts. A part processes a share of the tokens and writes one partial sum. There are at
    most `most` parts, because `most` parts keep the GPU busy and another kernel must add the partial sums. A part
    processes groups of four stretches, but not more groups than with stretches of 256 tokens. The stretches are as
    short as this limit allows, but not shorter than 8 tokens.
    """
    most = max(1, most)
    rounds = -(-B * -(-L // 256) // (4 * most))
    stretch = max(8, -(-L // (4 * max(1, 4 * most * rounds // B))) * 4)
    return stretch, min(-(-B * -(-L // stretch) // 4), most)


def macros_of(dtype: torch.dtype, vector: int, taps: int, P: int) -> dict:
    span, products = 8 * WARPS * min(2, vector), -(-P // 16) if dtype.itemsize == 2 else 0
    rows = 3 * (span * dtype.itemsize + 16) + 2 * (16 * products + 8) * dtype.itemsize
    return dict(INPUT=ELEMENT[dtype], VECTOR=vector, TAPS=taps, PROJECTIONS=P, CTA_BYTES=2 * 32 * rows)


def reference(
    u_BLD: Tensor, dv_2BHD: Tensor, dprojected_2TP: Tensor, x_proj_2PD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor,
    du_BLD: Tensor,
) -> Tensor:  # fmt: skip
    """Reference implementation of `conv_backward` that returns a single partial sum."""
    dv_2BHD = dv_2BHD + (dprojected_2TP @ x_proj_2PD).view_as(dv_2BHD)
    inputs, H = [u_BLD, conv_2DK, conv_bias_2D], dv_2BHD.shape[2]
    found_BLD, dconv, dconv_bias = gradients(lambda u, w, b: conv.reference(u, w, b, H), inputs, dv_2BHD)
    du_BLD.copy_(found_BLD)
    return torch.cat([dconv.mT, dconv_bias[:, None]], 1)[None]
