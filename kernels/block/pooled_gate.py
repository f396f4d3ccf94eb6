"""The gate of a pooled block, which reads the recurrence's lines and computes the convolutions again; its gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda import compiler
from ..cuda.elements import ELEMENT, vector_width
from .lines import Lines, cta_shape
from .pool import plain as plain_means
from .pool import plain_v

VECTOR, WARPS, WARPS_BACKWARD = 2, 24, {2: 18, 4: 12}  # of a multiprocessor; these by the size of elements


def pooled_gate(
    u_BLD: Tensor, z_BLD: Tensor, y_2BSD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, skip_2D: Tensor,
    scale_B: Tensor | None, lines: Lines,
) -> Tensor:  # fmt: skip
    """gated_BLD = scale * mean * silu(z), where mean is that of both directions' y + skip * silu(conv(u))."""
    gated_BLD = torch.empty(u_BLD.shape, device=u_BLD.device, dtype=u_BLD.dtype)
    arguments = _arguments(u_BLD, z_BLD, y_2BSD, conv_2DK, conv_bias_2D, skip_2D, scale_B) | dict(gated=gated_BLD)
    _launch("pooled_gate", arguments, vector_width(VECTOR, u_BLD, z_BLD), WARPS, lines)
    return gated_BLD


def pooled_gate_backward(
    dgated_BLD: Tensor, u_BLD: Tensor, z_BLD: Tensor, y_2BSD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor,
    skip_2D: Tensor, scale_B: Tensor | None, dz_BLD: Tensor, lines: Lines,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """gated_BLD once more, dy_BSD of either direction, and `pool`'s means_2BSD.

    Writes dz_BLD, and over dgated_BLD the gradient of what either direction puts out of each token.
    """
    (_, _, S, D), B = y_2BSD.shape, len(u_BLD)
    gated_BLD, means_2BSD = torch.empty_like(dgated_BLD), torch.empty_like(y_2BSD)
    dy_BSD = torch.empty(B, S, D, device=u_BLD.device, dtype=u_BLD.dtype)
    arguments = _arguments(u_BLD, z_BLD, y_2BSD, conv_2DK, conv_bias_2D, skip_2D, scale_B) | dict(
        dgated=dgated_BLD, dz=dz_BLD, dz_stride=dz_BLD.stride(1), gated=gated_BLD, dy=dy_BSD, means=means_2BSD
    )
    warps = WARPS_BACKWARD[u_BLD.element_size()]
    _launch("pooled_gate_backward", arguments, vector_width(VECTOR, u_BLD, z_BLD, dz_BLD), warps, lines)
    return gated_BLD, dy_BSD, means_2BSD


def _arguments(u_BLD, z_BLD, y_2BSD, conv_2DK, conv_bias_2D, skip_2D, scale_B) -> dict:
    return dict(
        u=u_BLD, u_stride=u_BLD.stride(1), z=z_BLD, z_stride=z_BLD.stride(1), y=y_2BSD, weights=conv_2DK,
        biases=conv_bias_2D, skip=skip_2D, scales=scale_B,
    )  # fmt: skip


def _launch(entry: str, arguments: dict, vector: int, warps: int, lines: Lines) -> None:
    u_BLD, taps = arguments["u"], arguments["weights"].shape[2]
    B, _, D = u_BLD.shape
    groups, threads = cta_shape(D, vector)
    macros = dict(INPUT=ELEMENT[u_BLD.dtype], VECTOR=vector, TAPS=taps, THREADS=threads, CTAS=warps * 32 // threads)
    arguments = {**arguments, "B": B, "D": D, **lines.arguments()}
    compiler.launch("block/pooled_gate", entry, macros, B * lines.S * groups, threads, arguments)


def plain(
    u_BLD: Tensor, z_BLD: Tensor, y_2BSD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, skip_2D: Tensor,
    scale_B: Tensor | None, lines: Lines,
) -> Tensor:  # fmt: skip
    """The definition of `pooled_gate`."""
    v_2BLD = plain_v(u_BLD, conv_2DK, conv_bias_2D, lines)
    mean_BLD = (y_2BSD[:, :, lines.pooled().to(u_BLD.device)] + skip_2D[:, None, None] * v_2BLD).mean(0)
    mean_BLD = mean_BLD[:, lines.order().argsort().to(u_BLD.device)]
    return mean_BLD * F.silu(z_BLD) * (1 if scale_B is None else scale_B[:, None, None])


def plain_backward(
    dgated_BLD: Tensor, u_BLD: Tensor, z_BLD: Tensor, y_2BSD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor,
    skip_2D: Tensor, scale_B: Tensor | None, dz_BLD: Tensor, lines: Lines,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The definition of `pooled_gate_backward`."""
    weights = conv_2DK, conv_bias_2D, skip_2D, scale_B, lines
    gated_BLD = plain(u_BLD, z_BLD, y_2BSD, *weights)
    with torch.enable_grad():
        z_BLD, y_2BSD = z_BLD.detach().requires_grad_(), y_2BSD.detach().requires_grad_()
        found_BLD, dy_2BSD = torch.autograd.grad(plain(u_BLD, z_BLD, y_2BSD, *weights), [z_BLD, y_2BSD], dgated_BLD)
    dz_BLD.copy_(found_BLD)
    scale = 1 if scale_B is None else scale_B[:, None, None]
    dgated_BLD.copy_(dgated_BLD * F.silu(z_BLD.detach()) * scale / 2)
    return gated_BLD, dy_2BSD[0], plain_means(u_BLD, conv_2DK, conv_bias_2D, lines)
