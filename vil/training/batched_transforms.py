"""timm's training transforms on whole batches, on any device: PIL's arithmetic on uint8 tensors (B, 3, H, W).

A random crop is cut out, resized and flipped by two matrix products for many images at once. RandAugment and colour
jitter are applied operation by operation, each to all the images that drew it, with an argument of its own for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

ARGUMENTS = 6  # of an operation: the affine ones need a matrix, the others one number or none


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)  # pageable memory is copied before this returns


def crop_resize_flip(
    images: Sequence[Tensor], boxes: np.ndarray, flips: np.ndarray, size: tuple[int, int], interpolation: str
) -> Tensor:
    """Crops of images (3, h, w) uint8 of any sizes, resized as PIL does it with antialiasing.

    Args:
        images: Tensors on one device.
        boxes: (B, 4) integers: top, left, height and width of each crop.
        flips: (B,) booleans: which crops to mirror left to right.
        size: Height and width of the result.
        interpolation: 'bilinear' or 'bicubic'.

    Returns:
        (B, 3, *size) uint8.
    """
    device = images[0].device
    resized = torch.empty(len(images), 3, *size, dtype=torch.uint8, device=device)
    for rows in _rows_of_similar_size(boxes[:, 2:].max(axis=1)):
        height, width = boxes[rows, 2:].max(axis=0).tolist()
        crops = torch.empty(len(rows), 3, height, width, dtype=torch.uint8, device=device)
        for crop, row in zip(crops, rows.tolist()):
            top, left, h, w = boxes[row].tolist()
            crop[:, :h, :w] = images[row][:, top : top + h, left : left + w]
        extents = to_device(boxes[rows, 2:], device)
        vertical = _resize_weights(extents[:, 0], size[0], height, interpolation)
        horizontal = _resize_weights(extents[:, 1], size[1], width, interpolation)
        flipped = to_device(flips[rows], device)[:, None, None]
        horizontal = torch.where(flipped, horizontal.flip(1), horizontal)
        narrow = _round(crops.float() @ horizontal.mT[:, None])  # PIL, too, rounds between the two directions
        resized[to_device(rows, device)] = _round(vertical[:, None] @ narrow).to(torch.uint8)
    return resized


def _rows_of_similar_size(sides: np.ndarray, step: int = 256, most_pixels: int = 2**26) -> Iterator[np.ndarray]:
    """Rows to pad to one size: little of a batch is padding, and one huge image does not make it huge."""
    classes = -(-sides // step)
    for size_class in np.unique(classes):
        rows = np.flatnonzero(classes == size_class)
        count = max(1, most_pixels // int(size_class * step) ** 2)
        yield from np.split(rows, range(count, len(rows), count))


def _resize_weights(lengths_B: Tensor, size: int, longest: int, interpolation: str) -> Tensor:
    """(B, size, longest): the share of each input pixel in each output pixel; 0 beyond an image's own length."""
    scale = lengths_B[:, None, None] / size
    centre = (torch.arange(size, device=lengths_B.device)[:, None] + 0.5) * scale
    pixel = torch.arange(longest, device=lengths_B.device) + 0.5
    x = ((pixel - centre) / scale.clamp(min=1)).abs()
    weights = _kernel(x, interpolation, a=-0.5) * (pixel < lengths_B[:, None, None])
    return weights / weights.sum(-1, keepdim=True)


def _round(pixels: Tensor) -> Tensor:
    return pixels.add_(0.5).clamp_(0, 255).floor_()


def apply_operations(
    images: Tensor, names: np.ndarray, arguments: Tensor, fill: Sequence[int], interpolation: str
) -> Tensor:
    """Applies operations in turn, to each image its own.

    Args:
        images: (B, 3, H, W) uint8.
        names: (B, T) strings: each image's operation in each turn; empty for none.
        arguments: (B, T, ARGUMENTS) on the images' device: a number for the operations of `POINTWISE`, for 'Affine' the
            matrix that takes a pixel of the result to where it comes from, as PIL has it.
        fill: Colour of what an affine operation brings in from outside the image.
        interpolation: 'bilinear' or 'bicubic', for 'Affine'.
    """
    place = np.arange(len(images))  # of each image in the batch as it was given; sorting brings an operation's together
    for turn in range(names.shape[1]):
        order = np.argsort(names[place, turn], kind="stable")
        place = place[order]
        images = images[to_device(order, images.device)]
        values = arguments[to_device(place, images.device), turn]
        found, starts = np.unique(names[place, turn], return_index=True)
        for name, start, end in zip(found.tolist(), starts.tolist(), [*starts[1:].tolist(), len(place)]):
            group, value = images[start:end], values[start:end]
            if name == "Affine":
                images[start:end] = affine(group, value, fill, interpolation)
            elif name:
                images[start:end] = POINTWISE[name](group, value[:, 0, None, None, None])
    return images[to_device(np.argsort(place), images.device)]


def affine_matrix(name: str, argument: float, width: int, height: int) -> tuple[float, ...]:
    """PIL's matrix (a, b, c, d, e, f) of timm's geometric operations: (x, y) comes from (ax + by + c, dx + ey + f)."""
    if name == "Rotate":
        cos, sin = math.cos(math.radians(argument)), math.sin(math.radians(argument))
        x, y = width / 2, height / 2
        return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y
    shear_x = argument if name == "ShearX" else 0
    shear_y = argument if name == "ShearY" else 0
    shift_x = {"TranslateX": argument, "TranslateXRel": argument * width}.get(name, 0)
    shift_y = {"TranslateY": argument, "TranslateYRel": argument * height}.get(name, 0)
    return 1, shear_x, shift_x, shear_y, 1, shift_y


GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "TranslateXRel", "TranslateYRel")


def affine(images: Tensor, matrices_B6: Tensor, fill: Sequence[int], interpolation: str) -> Tensor:
    """PIL's affine transform about the centres of pixels."""
    height, width = images.shape[-2:]
    a, b, c, d, e, f = matrices_B6[:, :, None, None].unbind(1)
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    x, y = a * x + b * y + c, d * x + e * y + f
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    columns, column_weights = _taps(x - 0.5, width, interpolation)
    rows, row_weights = _taps(y - 0.5, height, interpolation)
    pixels, moved = images.flatten(2), 0
    for row, row_weight in zip(rows.split(1, dim=1), row_weights.split(1, dim=1)):
        index = (row * width + columns).flatten(1)[:, None].expand(-1, 3, -1)
        taps = pixels.gather(2, index).view(-1, 3, *columns.shape[1:])
        moved = moved + (taps * (row_weight * column_weights)[:, None]).sum(2)
    outside = torch.tensor(fill, dtype=torch.float32, device=images.device).view(3, 1, 1)
    # PIL does not round here; the little that is added undoes rounding to below a whole number
    return torch.where(inside[:, None], (moved + 1e-3).clamp_(0, 255), outside).to(torch.uint8)


def _taps(position_BHW: Tensor, length: int, interpolation: str) -> tuple[Tensor, Tensor]:
    """(B, taps, H, W): the pixels about a position along one axis, the edge's in place of those beyond; their weights.

    PIL's cubic is another one here than where it resizes.
    """
    first = position_BHW.floor()[:, None]
    offsets = torch.arange(2) if interpolation == "bilinear" else torch.arange(-1, 3)
    pixels = first + offsets.to(first.device, non_blocking=True)[:, None, None]
    weights = _kernel((position_BHW[:, None] - pixels).abs(), interpolation, a=-1)
    return pixels.clamp(0, length - 1).long(), weights


def _kernel(x: Tensor, interpolation: str, a: float) -> Tensor:
    """The weight of a pixel at a distance of x >= 0 pixels; `a` is the parameter of Keys' cubic (1981)."""
    if interpolation == "bilinear":
        return (1 - x).clamp(min=0)
    return torch.where(x < 1, ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a) * (x < 2)


def _grey(images: Tensor) -> Tensor:
    """PIL's luma."""
    red, green, blue = images.to(torch.int32).unbind(1)
    return (19595 * red + 38470 * green + 7471 * blue + 2**15).unsqueeze(1) >> 16


def _enhance(images: Tensor, plain: Tensor, factor: Tensor) -> Tensor:
    """PIL's ImageEnhance: 0 gives the plain image, 1 the image, 2 goes as far beyond."""
    plain = plain.float()
    return torch.addcmul(plain, factor, images - plain).clamp_(0, 255).to(torch.uint8)


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(images).float().mean(dim=(1, 2, 3), keepdim=True)
    return _enhance(images, (mean + 0.5).floor(), factor)


# timm's operations (batch, argument (B, 1, 1, 1)) that leave each pixel where it is
POINTWISE = {
    "AutoContrast": lambda images, _: TF.autocontrast(images),
    "Equalize": lambda images, _: TF.equalize(images),
    "Invert": lambda images, _: TF.invert(images),
    "Posterize": lambda images, bits: images & (256 - 2 ** (8 - bits)).to(torch.uint8),
    "Solarize": lambda images, threshold: torch.where(images < threshold, images, ~images),
    "SolarizeAdd": lambda images, add: torch.where(images < 128, (images + add).clamp(max=255).to(torch.uint8), images),
    "Color": lambda images, factor: _enhance(images, _grey(images), factor),
    "Contrast": _contrast,
    "Brightness": lambda images, factor: _enhance(images, torch.zeros_like(images[:1]), factor),
    "Sharpness": lambda images, factor: _enhance(images, TF.adjust_sharpness(images, 0.0), factor),
}
