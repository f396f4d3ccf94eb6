"""Decoding of untrusted image files to 8-bit RGB: the formats, the limits and the colours.

The module imports nothing of this package, because the process of `sandbox_server` imports the module without PyTorch.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

# Pillow reads some forty formats whatever the file's name; for EPS, Pillow would start Ghostscript
Image.init()
FORMATS = tuple(f for f in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF") if f in Image.OPEN)

MOST_BYTES = 2**29  # bytes of a file, because some formats are read as a whole
MOST_PIXELS = 89_478_485  # Pillow's limit for warnings; RGB images of this size take 0.36 GB
MOST_ELONGATED = 100  # ratio of the sides, because resizing the shorter side to a fixed length scales the longer side
LEAST_TILE = 2**22  # pixels of a TIFF tile that may be larger than its image

# tags of a TIFF file
BITS_PER_SAMPLE = 258
PHOTOMETRIC_INTERPRETATION = 262
TILE_WIDTH = 322
TILE_LENGTH = 323
WHITE_IS_ZERO = 0  # a photometric interpretation


class UnfitImageError(ValueError):
    """An image is damaged, beyond the limits, or without a range of pixel values, or its decoder has failed."""


def length_of(file: BinaryIO) -> int:
    """Return the number of bytes of a file, or raise an UnfitImageError if they are too many."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    if length > MOST_BYTES:
        raise UnfitImageError(f"{length} bytes, more than {MOST_BYTES}")
    return length


def decode(file: BinaryIO) -> Image.Image:
    """Return the first image of a file as 8-bit RGB. A file that is not an image may raise any exception."""
    return to_rgb(open_image(file))


def open_image(file: BinaryIO) -> Any:
    """Return Pillow's image of a file, whose pixels are not decoded yet.

    Raises:
        UnfitImageError: The file is not an image of `FORMATS`, or its header is beyond the limits.
    """
    try:
        image: Any = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:  # Pillow's message contains only a memory address
        raise UnfitImageError(f"its content is not that of a {', '.join(FORMATS)} file") from error

    width, height = image.size
    if width * height > MOST_PIXELS:
        raise UnfitImageError(f"{width}x{height} pixels, more than {MOST_PIXELS}")
    if max(width, height) > MOST_ELONGATED * min(width, height):
        raise UnfitImageError(f"{width}x{height} pixels, one side more than {MOST_ELONGATED} times the other")
    if image.format == "TIFF":
        # libtiff decompresses whole tiles, even if the image needs little of them
        tile = image.tag_v2.get(TILE_WIDTH, 0) * image.tag_v2.get(TILE_LENGTH, 0)
        if tile > max(width * height, LEAST_TILE):
            raise UnfitImageError(f"a TIFF tile of {tile} pixels in an image of {width}x{height}")
    return image


def to_rgb(image: Any) -> Image.Image:
    """Convert Pillow's image of any mode to 8-bit RGB.

    Raises:
        UnfitImageError: The format does not specify which value is white, as for floats.
    """
    if image.mode.startswith(("I", "F")):
        return _grey_to_rgb(image)
    if image.mode == "RGB" and image.format == "JPEG":
        image.load()
        return image  # `convert` would copy, which takes a tenth of the decoding time
    return image.convert("RGB")


def _grey_to_rgb(image: Any) -> Image.Image:
    """Convert a grey image of more than 8 bits. The highest 8 bits are kept, because Pillow would clip at 255."""
    has_range = image.mode != "F" and (image.mode != "I" or image.format in ("PNG", "PPM"))
    if not has_range:
        raise UnfitImageError(f"pixels of mode {image.mode!r} in {image.format} have no range from black to white")

    tags = image.tag_v2 if image.format == "TIFF" else {}
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
    if tags.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO:
        grey = ~grey
    return Image.fromarray(grey).convert("RGB")
