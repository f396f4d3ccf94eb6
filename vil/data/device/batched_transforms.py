"""Reference implementation of timm's transforms on batches of uint8 images (B, 3, H, W).

The results equal PIL's results except for rounding. Two matrix products resize and flip many crops at once. Each
operation of augmentation policies and colour jitter is applied at once to all images that sampled the operation, with
each image's own arguments. At the end, the batch is normalized, erased and mixed. For images on an NVIDIA GPU, the
functions of this module call the kernels of `vil/kernels/augment`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as TF

from ...kernels import augment, cuda
from ...kernels.augment import CODES, OPERATIONS
from .decoded import DecodedImages

ARGUMENTS = 6  # maximum number of arguments of an operation; an affine transform has a matrix of 6 numbers


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device."""
    # CUDA reads pageable memory before `to` returns, so copies to CUDA may be non-blocking
    return torch.from_numpy(array).to(device, non_blocking=device.type == "cuda")


def crop_resize_flip(
    images: DecodedImages,
    boxes: np.ndarray,
    flips: np.ndarray,
    size: tuple[int, int],
    interpolation: str,
    resized: np.ndarray | None = None,
    offsets: np.ndarray | None = None,
) -> Tensor:
    """Crop images of any sizes and resize the crops with antialiasing, as PIL does.

    Args:
        images: (B,) images, none of which is missing.
        boxes: (B, 4) integers: top, left, height and width of each crop.
        flips: (B,) booleans: whether to flip the result horizontally.
        size: Height and width of the result.
        interpolation: 'bilinear' or 'bicubic'.
        resized: (B, 2) integers: height and width that each crop is resized to; `size` if None.
        offsets: (B, 2) integers: row and column of the resized crop at which the result begins; 0 if None. Pixels
            outside the resized crop are 0, as in torchvision's centre crop.

    Returns:
        (B, 3, *size) uint8.

    Raises:
        ValueError: A box is empty or exceeds its image.
    """
    count, device = len(images), images.device
    _check_boxes(boxes, images.sizes)
    resized = np.full((count, 2), size) if resized is None else resized
    offsets = np.zeros((count, 2), dtype=np.int64) if offsets is None else offsets
    if cuda.runs_on(device):
        return augment.crop_resize_flip(
            images.addresses, images.sizes, boxes, flips, size, interpolation, resized, offsets, device
        )

    resized_crops = torch.empty(count, 3, *size, dtype=torch.uint8, device=device)
    for rows in _rows_of_similar_size(boxes[:, 2:].max(axis=1)):
        crops = _padded_crops(images.pixels[rows], boxes[rows])
        height, width = crops.shape[2:]

        axes = to_device(np.stack([boxes[rows, 2:], resized[rows], offsets[rows]]), device)
        vertical = _resize_weights(axes[..., 0], size[0], height, interpolation)
        horizontal = _resize_weights(axes[..., 1], size[1], width, interpolation)
        flipped = to_device(flips[rows], device)[:, None, None]
        horizontal = torch.where(flipped, horizontal.flip(1), horizontal)

        narrow = _round(crops.float() @ horizontal.mT[:, None])  # PIL rounds between the two passes of resizing
        resized_crops[rows] = _round(vertical[:, None] @ narrow).to(torch.uint8)
    return resized_crops


def _check_boxes(boxes: np.ndarray, sizes: np.ndarray) -> None:
    """Raise a ValueError if a box (B, 4) is empty or exceeds the size (B, 2) of its image."""
    starts = boxes[:, :2]
    lengths = boxes[:, 2:]
    inside = (starts >= 0) & (lengths > 0) & (starts + lengths <= sizes)
    if inside.all():
        return

    i = np.flatnonzero(~inside.all(axis=1))[0]
    top, left, height, width = boxes[i]
    h, w = sizes[i]
    raise ValueError(
        f"crop box must be inside the {h}x{w} image and not empty, got {height}x{width} pixels at ({top}, {left})"
    )


def _padded_crops(images: np.ndarray, boxes: np.ndarray) -> Tensor:
    """Crop each image to its box, and pad all crops to the largest height and width. The padding is uninitialized."""
    height, width = boxes[:, 2:].max(axis=0)
    crops = torch.empty(len(images), 3, height, width, dtype=torch.uint8, device=images[0].device)
    for crop, image, (top, left, h, w) in zip(crops, images, boxes.tolist()):
        crop[:, :h, :w] = image[:, top : top + h, left : left + w]
    return crops


def _rows_of_similar_size(sides: np.ndarray, step: int = 256, most_pixels: int = 2**26) -> Iterator[np.ndarray]:
    """Group the indices of crops of similar size, so that one huge crop does not enlarge the padding of all crops."""
    classes = -(-sides // step)
    for size_class in np.unique(classes):
        rows = np.flatnonzero(classes == size_class)
        count = max(1, most_pixels // int(size_class * step) ** 2)
        yield from np.split(rows, range(count, len(rows), count))


def _resize_weights(axis_3B: Tensor, size: int, longest: int, interpolation: str) -> Tensor:
    """Return the matrix (B, size, longest) of weights that resizes one axis from input pixels to output pixels.

    Input pixels beyond a crop's own length have weight 0. `axis_3B` contains lengths, resized lengths and offsets.
    """
    lengths, resized, offsets = axis_3B[:, :, None, None]
    position = torch.arange(size, device=axis_3B.device)[:, None] + offsets
    pixel = torch.arange(longest, device=axis_3B.device) + 0.5
    scale = lengths / resized
    x = ((pixel - (position + 0.5) * scale) / scale.clamp(min=1)).abs()
    weights = _kernel(x, interpolation, a=-0.5) * (pixel < lengths)

    # zero weights make output pixels outside the resized crop black
    return torch.where((position >= 0) & (position < resized), weights / weights.sum(-1, keepdim=True), 0)


def _round(pixels: Tensor) -> Tensor:
    """Round pixel values to integers from 0 to 255, in place."""
    return pixels.add_(0.5).clamp_(0, 255).floor_()


def apply_operations(
    images: Tensor, operations: np.ndarray, arguments: np.ndarray, fill: Sequence[int], interpolation: str
) -> Tensor:
    """Apply augmentation operations to a batch, with a separate sequence of operations for each image.

    Args:
        images: (B, 3, H, W) uint8, not modified.
        operations: (B, T) opcodes, which are indices in `OPERATIONS`, of up to T operations per image. Opcode 0 means
            no operation.
        arguments: (B, T, ARGUMENTS): at most one number for `SIMPLE_OPERATIONS`; for 'Affine', PIL's matrix from output
            to input coordinates; for 'GaussianBlur', PIL's radius.
        fill: Colour of pixels that an affine operation reads outside the image.
        interpolation: 'bilinear' or 'bicubic', for 'Affine'.
    """
    blurs = operations == CODES["GaussianBlur"]
    if blurs.any():
        arguments = arguments.copy()
        arguments[blurs, :3] = _boxes_of_gaussians(arguments[blurs, 0])
    if cuda.runs_on(images.device):
        return augment.apply_operations(images, operations, arguments, fill, interpolation)

    # `turn` is a column of `operations`. Each turn sorts the images by operation, and `indices` contains the index of
    # each sorted image in the input batch.
    indices = np.arange(len(images))
    for turn in range(operations.shape[1]):
        order = np.argsort(operations[indices, turn])
        indices = indices[order]
        images = images[to_device(order, images.device)]

        values = arguments[indices, turn].astype(np.float32)
        found, starts = np.unique(operations[indices, turn], return_index=True)
        for code, start, end in zip(found, starts, [*starts[1:], len(indices)]):
            _apply_operation(OPERATIONS[code], images[start:end], values[start:end], fill, interpolation)
    return images[to_device(np.argsort(indices), images.device)]


def _apply_operation(
    name: str, images: Tensor, arguments_BA: np.ndarray, fill: Sequence[int], interpolation: str
) -> None:
    """Apply one operation to all images in place, with the arguments of each image."""
    if name == "Affine":
        images[:] = affine(images, to_device(arguments_BA, images.device), fill, interpolation)
    elif name == "GaussianBlur":
        for image, box in zip(images, arguments_BA[:, :3].astype(int)):
            image.copy_(_blur(image, *box))
    elif name:
        values = to_device(arguments_BA[:, 0].copy(), images.device)
        images[:] = SIMPLE_OPERATIONS[name](images, values.view(-1, 1, 1, 1))


def affine_matrix(name: str, argument: float, width: int, height: int) -> tuple[float, ...]:
    """Return PIL's affine matrix (a, b, c, d, e, f) for an operation of timm's augmentation policies.

    The output position (x, y) reads the input at (ax + by + c, dx + ey + f). A pixel's position is its centre.
    """
    if name == "Rotate":
        angle = math.radians(argument % 360)
        cos = round(math.cos(angle), 15)
        sin = round(math.sin(angle), 15)
        x = width / 2
        y = height / 2
        return cos, -sin, sin * y - cos * x + x, sin, cos, -sin * x - cos * y + y

    shear_x = argument if name == "ShearX" else 0
    shear_y = argument if name == "ShearY" else 0
    shift_x = {"TranslateX": argument, "TranslateXRel": argument * width}.get(name, 0)
    shift_y = {"TranslateY": argument, "TranslateYRel": argument * height}.get(name, 0)
    return 1, shear_x, shift_x, shear_y, 1, shift_y


GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "TranslateXRel", "TranslateYRel")


def affine(images: Tensor, matrices_B6: Tensor, fill: Sequence[int], interpolation: str) -> Tensor:
    """Apply PIL's affine transform, and return float32 images with values from 0 to 255."""
    height, width = images.shape[-2:]
    a, b, c, d, e, f = matrices_B6[:, :, None, None].unbind(1)
    output_x = torch.arange(width, device=images.device) + 0.5
    output_y = torch.arange(height, device=images.device)[:, None] + 0.5
    x = a * output_x + b * output_y + c
    y = d * output_x + e * output_y + f
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)

    columns, column_weights = _taps(x - 0.5, width, interpolation)
    rows, row_weights = _taps(y - 0.5, height, interpolation)
    pixels = images.flatten(2)
    moved = torch.zeros((), device=images.device)
    for row, row_weight in zip(rows.split(1, dim=1), row_weights.split(1, dim=1)):
        index = (row * width + columns).flatten(1)[:, None].expand(-1, 3, -1)
        taps = pixels.gather(2, index).view(-1, 3, *columns.shape[1:])
        moved = moved + (taps * (row_weight * column_weights)[:, None]).sum(2)

    outside = torch.tensor(fill, dtype=torch.float32, device=images.device).view(3, 1, 1)
    # PIL truncates to integers, so 1e-3 compensates rounding errors just below an integer
    return torch.where(inside[:, None], (moved + 1e-3).clamp_(0, 255), outside)


def _taps(position_BHW: Tensor, length: int, interpolation: str) -> tuple[Tensor, Tensor]:
    """Return the pixel indices and weights (B, taps, H, W) that interpolate each position along one axis.

    Indices are clamped to the edge. PIL's bicubic kernel for affine transforms differs from the kernel for resizing.
    """
    first = position_BHW.floor()[:, None]
    offsets = torch.arange(2) if interpolation == "bilinear" else torch.arange(-1, 3)
    pixels = first + offsets.to(first.device, non_blocking=True)[:, None, None]
    weights = _kernel((position_BHW[:, None] - pixels).abs(), interpolation, a=-1)
    return pixels.clamp(0, length - 1).long(), weights


def _kernel(x: Tensor, interpolation: str, a: float) -> Tensor:
    """Return the bilinear or bicubic weight of a pixel at distance x. `a` is the parameter of the bicubic kernel."""
    if interpolation == "bilinear":
        return (1 - x).clamp(min=0)
    return torch.where(x < 1, ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a) * (x < 2)


def _boxes_of_gaussians(radii_N: np.ndarray) -> np.ndarray:
    """Convert standard deviations of Gaussians to the box filters (N, 3) that PIL applies three times instead.

    The columns are the number of whole pixels on each side, the weight of each pixel, and the weight of the next pixel
    at both ends. Weights are multiples of 2^-24. The dtypes are those of PIL, which implements Gwosdek et al. (2011).
    """
    variance = np.square(radii_N.astype(np.float32)) / 3
    length = np.sqrt(12.0 * variance.astype(np.float64) + 1).astype(np.float32)
    whole = np.floor((length.astype(np.float64) - 1) / 2).astype(np.float32)
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - np.square(whole + 1)))
    radius = (whole + part).astype(np.int64)
    weight = (2**24 / (2 * (whole + part) + 1)).astype(np.int64)
    return np.stack([radius, weight, (2**24 - (2 * radius + 1) * weight) // 2], axis=1)


def _blur(image_CHW: Tensor, radius: int, weight: int, end_weight: int) -> Tensor:
    """Approximate a Gaussian blur as PIL does, with a box filter that is applied three times in each direction."""
    for axis in (2, 1):
        length = image_CHW.shape[axis]
        pixels = torch.arange(-radius - 1, length + radius + 1, device=image_CHW.device).clamp(0, length - 1)
        for _ in range(3):
            boxes = image_CHW.index_select(axis, pixels).long().unfold(axis, 2 * radius + 3, 1)
            ends = boxes[..., 0] + boxes[..., -1]
            sums = boxes.sum(-1) - ends
            image_CHW = (sums * weight + ends * end_weight + 2**23 >> 24).to(torch.uint8)
    return image_CHW


def _grey(images: Tensor) -> Tensor:
    """Convert RGB images to luma with PIL's weights."""
    red, green, blue = images.to(torch.int32).unbind(1)
    return (19595 * red + 38470 * green + 7471 * blue + 2**15).unsqueeze(1) >> 16


def _enhance(images: Tensor, plain: Tensor, factor: Tensor) -> Tensor:
    """Interpolate like PIL's ImageEnhance from a plain image (factor 0) to the image (factor 1) and beyond."""
    plain = plain.float()
    return (plain + factor * (images - plain)).clamp_(0, 255)


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Change the contrast around the mean luma of each image."""
    mean = _grey(images).float().mean(dim=(1, 2, 3), keepdim=True)
    return _enhance(images, (mean + 0.5).floor(), factor)


# operations with at most one argument, as functions of images and of arguments with shape (B, 1, 1, 1)
SIMPLE_OPERATIONS = {
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


def finish(
    images: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    erasing: np.ndarray | None = None,
    keys: np.ndarray | None = None,
    mode: str = "const",
    mixing: np.ndarray | None = None,
    partners: np.ndarray | None = None,
) -> Tensor:
    """Normalize images, erase a box of each image, and mix each image with its partner, in this order.

    In mode 'pixel', erasing noise is a function of the image's key, the size of the box and the position in the box.
    The kernel for NVIDIA GPUs computes different noise, which in mode 'pixel' is a function of the key and the position
    in the image.

    Args:
        images: (B, 3, H, W) uint8.
        mean: Mean of each channel, for pixel values from 0 to 1.
        std: Standard deviation of each channel, for pixel values from 0 to 1.
        erasing: (B, 4) int32: top, left, height and width of the erased box. Height 0 means no box.
        keys: (B,) uint32: RNG seed of the noise in each image's box.
        mode: 'pixel' for standard normal noise, 'rand' for one normal number for each channel of an image, 'const' for
            0.
        mixing: (B, 6) float32: top, bottom, left and right of a box, and the image's share inside the box; the partner
            has the remaining share. `finish` ignores the sixth number, which is the image's share in the target.
        partners: (B,) int64: index of each image's mixing partner.

    Returns:
        (B, 3, H, W) float32.
    """
    if cuda.runs_on(images.device):
        return augment.finish(images, mean, std, erasing, keys, mode, mixing, partners)

    shift = torch.tensor([255 * value for value in mean], device=images.device).view(3, 1, 1)
    scale = torch.tensor([255 * value for value in std], device=images.device).view(3, 1, 1)
    normalized = images.float().sub_(shift).div_(scale)
    if erasing is not None:
        assert keys is not None
        _erase(normalized, erasing, keys, mode)
    if mixing is not None:
        assert partners is not None
        _mix(normalized, mixing, partners)
    return normalized


def _erase(images: Tensor, boxes: np.ndarray, keys: np.ndarray, mode: str) -> None:
    """Fill a box of each image with the values of `_noise`, in place."""
    for image, (top, left, height, width), key in zip(images, boxes.tolist(), keys.tolist()):
        if height:
            image[:, top : top + height, left : left + width] = _noise(key, mode, height, width, images.device)


def _mix(images: Tensor, mixing: np.ndarray, partners: np.ndarray) -> None:
    """Mix each image with its partner, in place."""
    height, width = images.shape[-2:]
    top, bottom, left, right, share, _ = to_device(mixing, images.device)[:, :, None, None, None].unbind(1)
    y = torch.arange(height, device=images.device)[:, None]
    x = torch.arange(width, device=images.device)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)

    kept = torch.where(inside, share, 1)
    others = images[to_device(partners, images.device)].mul_(1 - kept)
    images.mul_(kept).add_(others)


def _noise(key: int, mode: str, height: int, width: int, device: torch.device) -> Tensor:
    """Return the values that fill an erased box."""
    if mode == "const":
        return torch.zeros(3, 1, 1, device=device)
    shape = (3, height, width) if mode == "pixel" else (3, 1, 1)
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(key))
