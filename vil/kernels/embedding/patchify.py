"""Copy of an image batch's patches to the rows of a 16-bit matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import launches
from ..cuda.elements import ELEMENT
from ..cuda.source import I64, In, Out, Source

SOURCE = Source("embedding/patchify", {
    "patchify": dict(images=In("PIXEL"), patches=Out("Element"), grid_h=I64, grid_w=I64, count=I64),
})  # fmt: skip


def patchify(images_BXHW: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the non-overlapping patches (B, n, K) of images (B, X, H, W), with K = X * size[0] * size[1].

    The images are contiguous, and consist of whole patches. The patch width is a multiple of 4.
    """
    (B, X, H, W), (height, width) = images_BXHW.shape, size
    h, w = H // height, W // width
    patches_BnK = images_BXHW.new_empty(B, h * w, X * height * width, dtype=dtype)
    threads = B * H * W // 4
    launches.launch(SOURCE, "patchify", macros_of(dtype, images_BXHW.dtype, X, size), -(-threads // 256), 256, dict(
        images=images_BXHW, patches=patches_BnK, grid_h=h, grid_w=w, count=threads,
    ))  # fmt: skip
    return patches_BnK


def macros_of(dtype: torch.dtype, pixel: torch.dtype, channels: int, size: tuple[int, int]) -> dict:
    return dict(INPUT=ELEMENT[dtype], PIXEL=ELEMENT[pixel], CHANNELS=channels, PATCH_H=size[0], PATCH_W=size[1])


def reference(images_BXHW: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Reference implementation of `patchify`."""
    patches = images_BXHW.unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0])).permute(0, 2, 4, 1, 3, 5)
    return patches.flatten(1, 2).flatten(2).to(dtype)
