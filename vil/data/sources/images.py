"""Decoding of untrusted image files, and warnings that name unreadable files."""

from __future__ import annotations

import ctypes
import errno
import io
import logging
import multiprocessing
import os
import stat
import warnings
from typing import BinaryIO

from PIL import Image

from ...errors import reject_url
from ...fault_tolerance.machine_errors import WorkersError, retry_reading
from ...security.exif import exif_orientation, upright
from ...security.image_decoding import FORMATS, UnfitImageError, decode, length_of, reason
from ...security.image_structure import strip_metadata
from ...security.sandbox import LateImageError, decode_in_sandbox

_logger = logging.getLogger(__name__)

NAMED = 1  # state of an image that is unreadable and has been logged
LATE = 2  # state of an image that was logged because decoding exceeded the timeout
UNREADABLE = -1  # target of an unreadable image, which evaluation must not count


class UnreadableSplitError(WorkersError):
    """No readable image was found in a split."""


def open_file(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        UnfitImageError: The file is not regular. A pipe, for example, would block.
        OSError: The file cannot be opened.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UnfitImageError("not a regular file")
    return open(path, "rb")


def read_bytes(file: str | os.PathLike | BinaryIO) -> bytes:
    """Return the content of a file.

    Raises:
        UnfitImageError: The file is not regular or too large.
        OSError: The file cannot be read.
    """
    if isinstance(file, (str, os.PathLike)):
        with open_file(file) as opened:
            return read_bytes(opened)
    return file.read(length_of(file))


def read_image(file: str | os.PathLike | BinaryIO) -> Image.Image:
    """Return the first image of a file as 8-bit RGB, rotated by its EXIF orientation.

    A JPEG or PNG whose structure bounds the cost of decoding is decoded in this process, without its metadata. Any
    other file is decoded in the sandbox (see `vil.security.sandbox`).

    Raises:
        UnfitImageError: The file is not an image, damaged or beyond the limits, or the path is a URL.
        FileNotFoundError: There is no such file.
        MachineError: The file cannot be read because of an I/O error, or the sandbox cannot start or was killed. If
            `file` is an open file, an OSError is raised instead.
    """
    if not isinstance(file, (str, os.PathLike)):
        return image_of(read_bytes(file), is_upright=True)
    path = os.fspath(file)
    if not os.path.lexists(path):  # a missing path is most likely misspelled, so do not retry for ten seconds
        reject_url(path, UnfitImageError)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    data = retry_reading(path, lambda: read_bytes(path))
    return retry_reading(path, lambda: image_of(data, is_upright=True))


def image_of(data: bytes, is_upright: bool = False) -> Image.Image:
    """Return the first image of a file's content, rotated by its EXIF orientation if `is_upright`."""
    if (plain := strip_metadata(data)) is None:
        return decode_in_sandbox(data, is_upright)
    try:
        image = decode(io.BytesIO(plain))
    except Exception as error:  # decoders can raise any type of exception, including OSError
        raise UnfitImageError(reason(error)) from error
    return upright(image, exif_orientation(data)) if is_upright else image


def restrict_pillow() -> None:
    """Restrict the formats and pixel counts that Pillow decodes, for all users of Pillow in this process."""
    Image.ID[:] = FORMATS
    warnings.simplefilter("error", Image.DecompressionBombWarning)


class Unreadable:
    """Counter of unreadable images over all workers of a loader. A warning names each image once.

    An image that is read several times between two calls of `take` is counted once.

    Args:
        numbers: Number of different values of `number`, which identifies an image.
    """

    def __init__(self, numbers: int):
        self._count = multiprocessing.Value("q", 0)
        self._states = multiprocessing.RawArray("b", numbers)  # state of each image: 0, `NAMED` or `LATE`
        self._counted = multiprocessing.RawArray("b", numbers)  # 1 for an image counted since the last `take`

    @property
    def count(self) -> int:
        return self._count.value

    def add(self, number: int, name: str, error: Exception) -> None:
        """Count an unreadable image, and log its name and the reason unless its `number` has been logged before."""
        with self._count.get_lock():
            self._count.value += not self._counted[number]
            self._counted[number] = 1
            is_known = self._states[number]
            self._states[number] = LATE if isinstance(error, LateImageError) else NAMED
        if not is_known:  # %r escapes control characters in the name, which a terminal would obey
            _logger.warning("skipped an unreadable image: %r (%s)", name, reason(error))

    def refuse_late(self, number: int) -> None:
        """Raise a LateImageError if an earlier attempt to decode the image exceeded the timeout."""
        if self._states[number] == LATE:
            raise LateImageError("an earlier attempt to decode the image timed out")

    def take(self) -> int:
        """Return the number of unreadable images since the last call, and reset the number to 0."""
        with self._count.get_lock():
            count = self._count.value
            self._count.value = 0
            if count:
                ctypes.memset(self._counted, 0, len(self._counted))
        return count
