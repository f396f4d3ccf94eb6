"""Insertion of the class token and addition of bias and position embeddings, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import hardware, launches
from ..cuda.elements import ELEMENT
from ..cuda.plan import device_of
from ..cuda.source import I64, In, Out, Source

SOURCE = Source("embedding/add_embeddings", {
    "add_embeddings": dict(
        projected=In("Element"), bias=In("PARAMETER"), class_token=In("PARAMETER"), positions=In("PARAMETER"),
        x=Out("float"), B=I64, L=I64,
    ),
    "embedding_gradients": dict(
        dx=In("float"), dprojected=Out("Element"), sums=Out("float"), B=I64, L=I64, parts=I64,
    ),
})  # fmt: skip

IMAGES = 4  # images that a thread processes at the same time
CTAS = 6  # number of CTAs per multiprocessor for which `parts` is chosen


def add_embeddings(projected_BnC: Tensor, bias_C: Tensor, class_token_C: Tensor, positions_LC: Tensor) -> Tensor:
    """Insert the class token in the middle of the patches, add bias and position embeddings, and return (B, L, C).

    The sum is computed in fp32. C is a multiple of 4.
    """
    B, (L, C) = len(projected_BnC), positions_LC.shape
    x_BLC = projected_BnC.new_empty(B, L, C, dtype=torch.float32)
    macros = macros_of(projected_BnC.dtype, bias_C.dtype, C)
    launches.launch(SOURCE, "add_embeddings", macros, _ctas(L, C) * -(-B // IMAGES), 256, dict(
        projected=projected_BnC, bias=bias_C, class_token=class_token_C, positions=positions_LC, x=x_BLC, B=B, L=L,
    ))  # fmt: skip
    return x_BLC


def embedding_gradients(dx_BLC: Tensor, dtype: torch.dtype, parameter_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gradient of projected patches (B, n, C) in `dtype`, and partial sums of dx over images (parts, L, C).

    `parameter_dtype` is the dtype of the model's parameters.
    """
    (B, L, C), ctas = dx_BLC.shape, _ctas(*dx_BLC.shape[1:])
    parts = max(1, min(-(-B // IMAGES), CTAS * hardware.multiprocessors(device_of(dx_BLC)) // ctas))
    dprojected_BnC = dx_BLC.new_empty(B, L - 1, C, dtype=dtype)
    sums_PLC = dx_BLC.new_empty(parts, L, C)
    launches.launch(SOURCE, "embedding_gradients", macros_of(dtype, parameter_dtype, C), ctas * parts, 256, dict(
        dx=dx_BLC, dprojected=dprojected_BnC, sums=sums_PLC, B=B, L=L, parts=parts,
    ))  # fmt: skip
    return dprojected_BnC, sums_PLC


def macros_of(dtype: torch.dtype, parameter_dtype: torch.dtype, C: int) -> dict:
    return dict(INPUT=ELEMENT[dtype], PARAMETER=ELEMENT[parameter_dtype], WIDTH=C, IMAGES=IMAGES)


def _ctas(L: int, C: int) -> int:
    """Return the number of CTAs that process one image."""
    return -(-L * C // (4 * 256))


def reference(projected_BnC: Tensor, bias_C: Tensor, class_token_C: Tensor, positions_LC: Tensor) -> Tensor:
    """Reference implementation of `add_embeddings`."""
    before, after = (projected_BnC + bias_C).tensor_split([(len(positions_LC) - 1) // 2], dim=1)
    return torch.cat([before, class_token_C.expand(len(before), 1, -1), after], 1) + positions_LC


def reference_gradients(dx_BLC: Tensor) -> tuple[Tensor, Tensor]:
    """Reference implementation of `embedding_gradients` that returns a single partial sum."""
    middle = (dx_BLC.shape[1] - 1) // 2
    return torch.cat([dx_BLC[:, :middle], dx_BLC[:, middle + 1 :]], 1), dx_BLC.sum(0, keepdim=True)
