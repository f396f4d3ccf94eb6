"""Gate of a block: forward (mean of both directions times silu(z)) and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda import launches
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.source import I64, In, Out, Source
from .lines import LINE_PARAMETERS, Lines
from .reference import gradients

SOURCE = Source("block/gate", {
    "gate": dict(
        y_0=In("Element"), y_1=In("Element"), z=In("Element"), z_stride=I64, scales=In("float"), gated=Out("Element"),
        means=Out("Element"), tokens=I64, L=I64, D=I64, **LINE_PARAMETERS,
    ),
    "gate_backward": dict(
        dgated=In("Element"), means=In("Element"), z=In("Element"), z_stride=I64, scales=In("float"),
        dy=Out("Element"), dy_stride=I64, dz=Out("Element"), dz_stride=I64, gated=Out("Element"), tokens=I64, L=I64,
        D=I64,
    ),
})  # fmt: skip

WARPS = 4  # number of warps per CTA, equal to WARPS in gate.cu


class GateInputs(NamedTuple):
    """Two tensors that the gate averages and multiplies by silu(z)."""

    first: Tensor  # (B, L, D): output of the first direction or, in a pooled block, the summed skip connections
    second: Tensor  # output (B, L, D) of the second direction or, in a pooled block, summed scan outputs (B, S, D)
    lines: Lines | None = None  # rows or columns whose tokens a pooled block averages

    def arguments(self) -> dict:
        """Return the fields of the gate's inputs as arguments of a CUDA kernel."""
        lines = (self.lines or Lines(0, 0, False)).arguments()
        return dict(y_0=self.first, y_1=self.second, **lines)


def gate(y: GateInputs, z_BLD: Tensor, scale_B: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Return scale * mean * silu(z), and `mean`, the average of both directions (empty unless `keep`)."""
    B, L, D = y.first.shape
    gated_BLD = z_BLD.new_empty(B, L, D)
    mean_BLD = torch.empty_like(gated_BLD) if keep else gated_BLD.new_empty(0)
    arguments = dict(
        **y.arguments(), z=z_BLD, z_stride=token_stride(z_BLD), scales=scale_B, gated=gated_BLD,
        means=mean_BLD if keep else None, tokens=B * L, L=L, D=D,
    )  # fmt: skip
    _launch("gate", z_BLD.dtype, vector_width(4, z_BLD), B * L, arguments, POOLED=int(y.lines is not None))
    return gated_BLD, mean_BLD


def gate_backward(
    dgated_BLD: Tensor, mean_BLD: Tensor, z_BLD: Tensor, scale_B: Tensor | None, dy_BLD: Tensor, dz_BLD: Tensor
) -> Tensor:
    """Write the gradient of either direction's output to `dy_BLD` and of z to `dz_BLD`. Return the gate's output."""
    B, L, D = mean_BLD.shape
    gated_BLD = torch.empty_like(mean_BLD)
    arguments = dict(
        dgated=dgated_BLD, means=mean_BLD, z=z_BLD, z_stride=token_stride(z_BLD), scales=scale_B, dy=dy_BLD,
        dy_stride=token_stride(dy_BLD), dz=dz_BLD, dz_stride=token_stride(dz_BLD), gated=gated_BLD, tokens=B * L,
        L=L, D=D,
    )  # fmt: skip
    _launch("gate_backward", mean_BLD.dtype, vector_width(4, z_BLD, dy_BLD, dz_BLD), B * L, arguments)
    return gated_BLD


def token_stride(t_BLD: Tensor) -> int:
    """Return the stride between tokens, computed from the batch stride, because t.stride(1) is arbitrary if L = 1."""
    return t_BLD.stride(0) // t_BLD.shape[1]


def _launch(entry: str, dtype: torch.dtype, vector: int, tokens: int, arguments: dict, POOLED: int = 0) -> None:
    macros = dict(INPUT=ELEMENT[dtype], VECTOR=vector, POOLED=POOLED)
    launches.launch(SOURCE, entry, macros, -(-tokens // WARPS), 32 * WARPS, arguments)


def reference(y: GateInputs, z_BLD: Tensor, scale_B: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Reference implementation of `gate`."""
    second_BLD = y.second if y.lines is None else y.second[:, y.lines.pooled_in_memory().to(z_BLD.device)]
    mean_BLD = (y.first + second_BLD) / 2
    return mean_BLD * F.silu(z_BLD) * (1 if scale_B is None else scale_B[:, None, None]), mean_BLD


def reference_backward(
    dgated_BLD: Tensor, mean_BLD: Tensor, z_BLD: Tensor, scale_B: Tensor | None, dy_BLD: Tensor, dz_BLD: Tensor
) -> Tensor:
    """Reference implementation of `gate_backward`."""

    def gated(mean_BLD, z_BLD):
        return reference(GateInputs(mean_BLD, mean_BLD), z_BLD, scale_B, True)[0]

    dmean_BLD, found_BLD = gradients(gated, [mean_BLD, z_BLD], dgated_BLD)
    dy_BLD.copy_(dmean_BLD / 2)
    dz_BLD.copy_(found_BLD)
    return gated(mean_BLD, z_BLD)
