"""Decoding of untrusted image files to 8-bit RGB, with limits on formats and sizes.

This module must not import modules of `vil` outside `vil.security`, because the sandbox process runs without PyTorch.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

# Only `FORMATS` are allowed: Pillow detects about forty formats by content, and an EPS file would start Ghostscript.
Image.init()
HEIC = "HEIF"  # Pillow's name of the HEIC format; only the decoding sandbox registers the format
FORMATS = tuple(f for f in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF") if f in Image.OPEN)

MOST_BYTES = 2**29  # maximum file size in bytes, because some decoders read the whole file into memory
MOST_PIXELS = 89_478_485  # maximum number of pixels, above which Pillow would warn; Pillow's RGB image takes 0.36 GB
MOST_ELONGATED = 100  # maximum aspect ratio; a narrower image would be huge once its shorter side has the model's size
HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")  # bytes 8 to 11 of a HEIC file
LEAST_TILE = 2**22  # TIFF tiles of up to 2^22 pixels may be larger than the image

# numbers of TIFF tags
BITS_PER_SAMPLE = 258
PHOTOMETRIC_INTERPRETATION = 262
TILE_WIDTH = 322
TILE_LENGTH = 323
WHITE_IS_ZERO = 0  # value of the tag PHOTOMETRIC_INTERPRETATION


class UnfitImageError(ValueError):
    """An image is damaged, exceeds a limit, has no defined range of pixel values, or makes its decoder fail."""


def reason(error: Exception) -> str:
    """Return the reason for a decoding error, in printable characters."""
    if isinstance(error, UnfitImageError):
        return str(error)
    if isinstance(error, OSError) and str(error):  # Pillow's messages need no type, such as "image file is truncated"
        return repr(str(error))[1:-1]
    return repr(error)


def length_of(file: BinaryIO) -> int:
    """Return the size of a file in bytes. Raise an UnfitImageError if the file is larger than `MOST_BYTES`."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    if length > MOST_BYTES:
        raise UnfitImageError(f"file size must be at most {MOST_BYTES} bytes, got {length}")
    return length


def decode(file: BinaryIO) -> Image.Image:
    """Return the first image of a file as 8-bit RGB. Decoders can raise any exception for a damaged file."""
    return to_rgb(open_image(file))


def open_image(file: BinaryIO) -> Any:
    """Open a file as a Pillow image without decoding the pixels.

    Raises:
        UnfitImageError: The file is not an image in a supported format, or its header exceeds a limit.
        Exception: Pillow rejects the header, for example because the image has too many pixels.
    """
    try:
        image: Any = Image.open(file, formats=[*FORMATS, HEIC] if HEIC in Image.OPEN else FORMATS)
    except UnidentifiedImageError as error:  # Pillow's message names only the file object
        if not file.seek(0, os.SEEK_END):
            raise UnfitImageError("the file is empty") from error
        file.seek(4)
        if file.read(4) == b"ftyp" and file.read(4) in HEIC_BRANDS and HEIC not in Image.OPEN:
            raise UnfitImageError("HEIC images need the package pillow-heif: pip install pillow-heif") from error
        raise UnfitImageError(f"file must be an image in one of the formats {', '.join(FORMATS)}") from error

    width, height = image.size
    if width * height > MOST_PIXELS:
        raise UnfitImageError(f"image must have at most {MOST_PIXELS} pixels, got {width}x{height}")
    if max(width, height) > MOST_ELONGATED * min(width, height):
        raise UnfitImageError(f"aspect ratio must be at most {MOST_ELONGATED}, got {width}x{height} pixels")
    if image.format == "TIFF":
        # libtiff decompresses a whole tile, even if the image covers only a small part of the tile
        tile = image.tag_v2.get(TILE_WIDTH, 0) * image.tag_v2.get(TILE_LENGTH, 0)
        limit = max(width * height, LEAST_TILE)
        if tile > limit:
            raise UnfitImageError(
                f"TIFF tiles of a {width}x{height} image must have at most {limit} pixels, got {tile}"
            )
    return image


def to_rgb(image: Any) -> Image.Image:
    """Convert a Pillow image of any mode to 8-bit RGB.

    Raises:
        UnfitImageError: The range of pixel values is undefined, for example for floating-point pixels.
    """
    if image.mode.startswith(("I", "F")):
        return _grey_to_rgb(image)
    if image.mode == "RGB" and image.format == "JPEG":
        image.load()
        return image  # not converted, because `convert` would copy the image
    return image.convert("RGB")


def _grey_to_rgb(image: Any) -> Image.Image:
    """Convert a greyscale image of more than 8 bits to RGB by its highest 8 bits, because Pillow would clip at 255."""
    has_range = image.mode != "F" and (image.mode != "I" or image.format in ("PNG", "PPM"))
    if not has_range:
        raise UnfitImageError(
            f"{image.format} images of mode {image.mode!r} do not define the value of white; convert to 8 bits"
        )

    tags = image.tag_v2 if image.format == "TIFF" else {}
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
    if tags.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO:
        grey = ~grey
    return Image.fromarray(grey).convert("RGB")
