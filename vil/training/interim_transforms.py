"""The interface of the batched kernels in plain PyTorch, until the branch with the kernels is merged."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageFilter

from . import batched_transforms as old
from .batched_transforms import ARGUMENTS, GEOMETRIC, POINTWISE, affine_matrix, to_device  # noqa: F401

OPERATIONS = ("", "Affine", *POINTWISE, "GaussianBlur")


def crop_resize_flip(images, boxes, flips, size, interpolation, resized_B2=None, offsets_B2=None):
    if resized_B2 is None:
        return old.crop_resize_flip(images, boxes, flips, size, interpolation)
    found = torch.zeros(len(images), 3, *size, dtype=torch.uint8, device=images[0].device)
    for i, image in enumerate(images):
        rh, rw = resized_B2[i].tolist()
        top, left = (int(v) for v in offsets_B2[i])
        whole = old.crop_resize_flip([image], boxes[i : i + 1], flips[i : i + 1], (rh, rw), interpolation)[0]
        y0, y1, x0, x1 = max(0, top), min(rh, top + size[0]), max(0, left), min(rw, left + size[1])
        found[i, :, y0 - top : y1 - top, x0 - left : x1 - left] = whole[:, y0:y1, x0:x1]
    return found


def _blur(images, radius):
    blurred = []
    for image, r in zip(images, radius.flatten().tolist()):
        pil = Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).filter(ImageFilter.GaussianBlur(r))
        blurred.append(torch.from_numpy(np.array(pil)).permute(2, 0, 1))
    return torch.stack(blurred).to(images.device)


def apply_operations(images, codes_BT, arguments_BTA, fill, interpolation):
    POINTWISE["GaussianBlur"] = _blur
    try:
        names = np.array(OPERATIONS)[codes_BT]
        return old.apply_operations(images, names, to_device(arguments_BTA, images.device), fill, interpolation)
    finally:
        del POINTWISE["GaussianBlur"]


def finish(images, mean, std, erasing_B4, keys_B, mode, mixing_B6, partners_B):
    device = images.device
    scale = [torch.tensor([255 * v for v in values], device=device).view(3, 1, 1) for values in (mean, std)]
    images = images.float().sub_(scale[0]).div_(scale[1])
    if erasing_B4 is not None:
        for i in np.flatnonzero(erasing_B4[:, 2]):
            top, left, h, w = erasing_B4[i].tolist()
            generator = torch.Generator().manual_seed(int(keys_B[i]))
            shape = dict(pixel=images[i].shape, rand=(3, 1, 1)).get(mode)
            noise = torch.randn(shape, generator=generator) if shape else torch.zeros(images[i].shape)
            noise = noise.to(device).expand(images[i].shape)
            images[i, :, top : top + h, left : left + w] = noise[:, top : top + h, left : left + w]
    if mixing_B6 is None:
        return images
    top, bottom, left, right, share, _ = to_device(mixing_B6, device)[:, :, None, None, None].unbind(1)
    y = torch.arange(images.shape[-2], device=device)[:, None]
    x = torch.arange(images.shape[-1], device=device)
    kept = torch.where((y >= top) & (y < bottom) & (x >= left) & (x < right), share, 1)
    return images * kept + images[to_device(partners_B, device)] * (1 - kept)
