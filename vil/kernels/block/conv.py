"""Causal convolutions of a block in both scan directions, followed by SiLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source

SOURCE = Source("block/conv", {
    "conv": dict(
        u=In("Element"), u_stride=I64, weights=In("float"), biases=In("float"), v=Out("Element"), B=I64, L=I64, H=I64,
        D=I64, stretch=I64,
    ),
})  # fmt: skip

WARPS = 4  # number of warps per CTA, equal to WARPS in conv.cu


def conv(u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, H: int) -> Tensor:
    """Return silu(conv(u)) of both scan directions, (2, B, H, D), for the H tokens that each direction reads first.

    The last tap of a filter reads the current token.
    """
    (B, L, D), dtype, taps = u_BLD.shape, u_BLD.dtype, conv_2DK.shape[2]
    v_2BHD, vector = u_BLD.new_empty(2, B, H, D), vector_width(16 // dtype.itemsize, u_BLD)
    macros = dict(INPUT=ELEMENT[dtype], VECTOR=vector, TAPS=taps)
    threads = B * D // min(4, vector)
    stretch = stretch_of(threads, L, hardware.multiprocessors(device_of(u_BLD)))
    blocks = -(-threads * -(-L // stretch) // (32 * WARPS))
    launches.launch(SOURCE, "conv", macros, blocks, 32 * WARPS, dict(
        u=u_BLD, u_stride=u_BLD.stride(1), weights=conv_2DK, biases=conv_bias_2D, v=v_2BHD, B=B, L=L, H=H, D=D,
        stretch=stretch,
    ))  # fmt: skip
    return v_2BHD


def stretch_of(threads: int, L: int, multiprocessors: int) -> int:
    """Return the number of tokens per thread, a multiple of 4.

    The number is halved from 64 down to 8 until each multiprocessor has at least 512 threads. The number is then
    reduced if fewer tokens per thread suffice for the same number of threads.
    """
    stretch = 64
    while stretch > 8 and threads * -(-L // stretch) < 512 * multiprocessors:
        stretch //= 2
    return -(-L // (4 * -(-L // stretch))) * 4


def reference(u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, H: int) -> Tensor:
    """Reference implementation of `conv`."""

    def one(u_BLD, weight_DK, bias_D):
        padded_BDL = F.pad(u_BLD.mT, (weight_DK.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded_BDL, weight_DK[:, None], bias_D, groups=len(weight_DK)).mT)

    backward_BLD = one(u_BLD.flip(1), conv_2DK[1], conv_bias_2D[1]).flip(1)
    return torch.stack([one(u_BLD, conv_2DK[0], conv_bias_2D[0])[:, :H], backward_BLD[:, -H:]])
