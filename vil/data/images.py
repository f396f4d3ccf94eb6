"""Image files, which may come from anybody: which of them are read, within which limits, and to which pixels."""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from ..config import ConfigError

_logger = logging.getLogger(__name__)

# Pillow reads some forty formats whatever a file is called, EPS among them by starting Ghostscript; MPO is a JPEG to it
Image.init()
FORMATS = tuple(f for f in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF") if f in Image.OPEN)
MOST_BYTES = 2**29  # of a file: some formats are read as a whole
MOST_PIXELS = 89_478_485  # where Pillow begins to warn: 0.36 GB as it stores RGB
MOST_ELONGATED = 100  # evaluation resizes the shorter side to some hundreds of pixels, and the longer one with it
MOST_SCANS = 100  # of a JPEG: each may go over all of its pixels; encoders write about ten
UNREADABLE = -1  # target of an image that evaluation could not read and must not count


class UnfitImageError(ValueError):
    """An image is beyond the limits, or its pixels have no range."""


class WorkersError(ConfigError):
    """An error that a loader's process may meet, whose message is one line in the training process, too."""

    def __init__(self, message: str):
        # PyTorch makes another of one that comes from a loader's process, with the traceback for its message
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class UnreadableSplitError(WorkersError):
    """No image of a split can be read."""


def read_image(file: BinaryIO) -> Image.Image:
    """The first picture of a file as 8-bit RGB. From a file that is none, or not fit, there may be any exception."""
    return _to_rgb(open_image(file))


def check_length(file: BinaryIO) -> None:
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    if length > MOST_BYTES:
        raise UnfitImageError(f"{length} bytes, more than {MOST_BYTES}")


def open_image(file: BinaryIO) -> Any:
    """Pillow's image of a file's header, if what it announces is within the limits."""
    check_length(file)
    image: Any = Image.open(file, formats=FORMATS)
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise UnfitImageError(f"{width}x{height} pixels, more than {MOST_PIXELS}")
    if max(width, height) > MOST_ELONGATED * min(width, height):
        raise UnfitImageError(f"{width}x{height} pixels, one side more than {MOST_ELONGATED} times the other")
    if image.format == "TIFF":  # its parts are decompressed whole, whatever the image needs of them
        part = image.tag_v2.get(322, 0) * image.tag_v2.get(323, 0)
        if part > max(width * height, 2**22):
            raise UnfitImageError(f"tiles of {part} pixels in an image of {width}x{height}")
    elif image.format in ("JPEG", "MPO") and (scans := _scans(image, file)) > MOST_SCANS:
        raise UnfitImageError(f"{scans} scans, more than {MOST_SCANS}")
    return image


def _scans(image: Any, file: BinaryIO) -> int:
    """How often a JPEG may have its decoder go over all pixels; Pillow has read it up to the first scan's data."""
    place = file.tell()
    file.seek(max(0, place - 8 - 2 * image.layers))
    has_all_components = file.read(5) == bytes((0xFF, 0xDA, 0, 6 + 2 * image.layers, image.layers))
    file.seek(0)
    scans = 1 if has_all_components and "progressive" not in image.info else file.read().count(b"\xff\xda")
    file.seek(place)
    return scans


def _to_rgb(image: Any) -> Image.Image:
    """An image of any mode in 8 bits: the higher ones of more, which Pillow would clip at 255."""
    mode = image.mode
    if not mode.startswith(("I", "F")):
        if mode == "RGB" and image.format == "JPEG":
            image.load()
            return image  # its conversion is a copy, which would take a tenth of the time
        return image.convert("RGB")
    if mode == "F" or (mode == "I" and image.format not in ("PNG", "PPM")):
        raise UnfitImageError(f"pixels of mode {mode!r} in {image.format} have no range from black to white")
    tags = image.tag_v2 if image.format == "TIFF" else {}
    bits, white_is_zero = tags.get(258, (16,))[0], tags.get(262) == 0
    grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
    return Image.fromarray(~grey if white_is_zero else grey).convert("RGB")


def restrict_pillow() -> None:
    """Leaves the same formats and number of pixels to who else opens images in this process."""
    Image.ID[:] = FORMATS
    warnings.simplefilter("error", Image.DecompressionBombWarning)


class Unreadable:
    """How many images could not be read, over all processes of a loader; a warning names each the first time.

    Args:
        numbers: Images are told apart by their numbers below this.
    """

    def __init__(self, numbers: int):
        self._count = multiprocessing.Value("q", 0)
        self._named = multiprocessing.RawArray("b", max(1, numbers))

    @property
    def count(self) -> int:
        return self._count.value

    def add(self, number: int, name: str, error: Exception) -> None:
        with self._count.get_lock():
            self._count.value += 1
            known, self._named[number] = self._named[number], True
        if not known:  # with `repr`, since a name can have anything in it that a terminal obeys
            _logger.warning("skipped an unreadable image: %r (%r)", name, error)

    def take(self) -> int:
        """The count, which begins at 0 again."""
        with self._count.get_lock():
            count, self._count.value = self._count.value, 0
        return count
