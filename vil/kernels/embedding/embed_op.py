"""Embedding of images as tokens on NVIDIA GPUs: patches, class token and position embeddings in fp32.

The kernels round patches and their product with the patch weights to 16 bits, like PyTorch under autocast, and compute
sums in fp32. torch.compile fuses the same PyTorch operators itself, so the kernels run only in eager mode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..block.block_op import is_eager
from ..block.fused import is_plain
from ..checks import aligned, given, once_differentiable
from ..cuda import products
from ..cuda.elements import ELEMENT
from ..cuda.plan import planned
from .add_embeddings import add_embeddings, embedding_gradients
from .patchify import patchify


class EmbeddingWeights(NamedTuple):
    """Parameters of the embedding, which have the same dtype."""

    patches: Tensor  # (C, X, height, width) for X image channels
    bias: Tensor  # (C,)
    class_token: Tensor  # (1, 1, C)
    positions: Tensor  # (1, L, C)


def embed(images_BXHW: Tensor, weights: EmbeddingWeights) -> Tensor:
    """Embed images, for which `fits` must be True, as fp32 tokens (B, L, C). The class token is the middle token.

    Products run in the autocast dtype if autocast is enabled, otherwise in the dtype of the images.
    """
    dtype = product_dtype(images_BXHW)
    if torch.is_grad_enabled() and weights.bias.requires_grad:
        return _Embedding.apply(dtype, images_BXHW, *weights)
    return given(forward(dtype, False, images_BXHW, *weights)[0])


def fits(images_BXHW: Tensor, weights: EmbeddingWeights) -> bool:
    """Return whether the kernels support the images and parameters, given that `runs_kernels` returns True."""
    if images_BXHW.requires_grad or images_BXHW.numel() == 0:
        return False
    (C, _, height, width), (H, W), dtype = weights.patches.shape, images_BXHW.shape[2:], weights.bias.dtype
    product = product_dtype(images_BXHW)
    read_by_kernels = images_BXHW, *weights[1:]
    return (
        product in (torch.bfloat16, torch.float16)
        and (product == dtype == images_BXHW.dtype or torch.is_autocast_enabled(images_BXHW.device.type))
        and images_BXHW.dtype in ELEMENT
        and dtype in ELEMENT
        and all(t.dtype == dtype and t.device == images_BXHW.device and is_plain(t) for t in weights)
        and len({t.requires_grad for t in weights}) == 1
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in read_by_kernels)
        and width % 4 == C % 4 == H % height == W % width == 0
        and [t.shape for t in weights[1:]] == [(C,), (1, 1, C), (1, H // height * (W // width) + 1, C)]
        and images_BXHW.numel() < 2**34  # the kernel `patchify` has 32-bit thread indices
    )


def runs_kernels(images_BXHW: Tensor) -> bool:
    """Return whether CUDA kernels support the device, and no compiler, dispatch mode or transformation is active."""
    return is_eager(images_BXHW) and backends.backend_for(images_BXHW.device) == "cuda"


def product_dtype(images_BXHW: Tensor) -> torch.dtype:
    device = images_BXHW.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else images_BXHW.dtype


@planned()
def forward(
    dtype: torch.dtype, keep: bool, images: Tensor, weight: Tensor, bias: Tensor, class_token: Tensor, positions: Tensor
) -> list[Tensor | None]:
    """Return the tokens (B, L, C) and, if `keep`, the patches (B, n, K)."""
    patches_BnK = patchify(images, (weight.shape[2], weight.shape[3]), dtype)
    projected_TC = torch.mm(patches_BnK.flatten(0, 1), weight.flatten(1).to(dtype).t())
    projected_BnC = projected_TC.unflatten(0, patches_BnK.shape[:2])
    return [add_embeddings(projected_BnC, bias, class_token, positions[0]), patches_BnK if keep else None]


@planned()
def backward(parameter_dtype: torch.dtype, dx_BLC: Tensor, patches_BnK: Tensor) -> list[Tensor | None]:
    """Return the gradients of the parameters, (C, K), (C,), (C,) and (L, C), in `parameter_dtype`."""
    dx_BLC = given(aligned(dx_BLC))
    dprojected_BnC, sums_PLC = embedding_gradients(dx_BLC, patches_BnK.dtype, parameter_dtype)
    dpatches_CK = products.mm_in_fp32(dprojected_BnC.flatten(0, 1).t(), patches_BnK.flatten(0, 1))
    sums_LC, middle = sums_PLC.sum(0), (dx_BLC.shape[1] - 1) // 2
    # Subtracting the class token's gradient from the sum over all tokens would lose precision if this gradient is much
    # larger than the other gradients.
    dbias_C = sums_LC[:middle].sum(0) + sums_LC[middle + 1 :].sum(0)
    dclass_token_C = sums_LC[middle].clone()  # gradients must not share memory
    return [t.to(parameter_dtype) for t in (dpatches_CK, dbias_C, dclass_token_C, sums_LC)]


class _Embedding(torch.autograd.Function):
    """Autograd function of the embedding, whose images do not need a gradient."""

    @staticmethod
    def forward(ctx, dtype, images_BXHW, *weights):
        x_BLC, patches_BnK = forward(dtype, True, images_BXHW, *weights)
        ctx.shapes, ctx.parameter_dtype = [t.shape for t in weights], weights[0].dtype
        ctx.save_for_backward(patches_BnK)
        return x_BLC

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_BLC):
        gradients = backward(ctx.parameter_dtype, dx_BLC, *ctx.saved_tensors)
        return None, None, *[t.view(shape) for t, shape in zip(gradients, ctx.shapes)]
