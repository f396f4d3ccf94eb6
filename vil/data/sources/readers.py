"""Access by index to the files of timm's readers, and estimates about a split from a sample of the files."""

from __future__ import annotations

import contextlib
import io
import math
import os
from typing import BinaryIO

from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.data.readers.reader_image_tar import ReaderImageTar

from ...security.exif import exif_orientation
from ...security.image_decoding import open_image
from ...security.image_structure import strip_metadata
from .images import open_file, read_bytes

TAR_READERS = (ReaderImageTar, ReaderImageInTar)
SAMPLE = 32  # maximum number of files that are inspected before a split is loaded
ROTATION_SAMPLE = 1000  # maximum number of files whose EXIF orientation is read before a split is loaded
HEAD_BYTES = 2**14  # number of bytes at the start of a file, where cameras write the EXIF orientation


def open_indexed(reader, index: int) -> tuple[BinaryIO, int]:
    """Open the file of an image, and return the file and the target."""
    if isinstance(reader, ReaderImageFolder):
        path, target = reader.samples[index]
        return open_file(path), target
    return reader[index]


def file_version(reader, index: int) -> tuple[int, int]:
    """Return the size and modification time of an image's file, or zeros unless the reader reads a folder."""
    if not isinstance(reader, ReaderImageFolder):
        return 0, 0
    status = os.stat(reader.samples[index][0])
    return status.st_size, status.st_mtime_ns % 2**63  # modulo, because some file systems store times beyond 64 bits


def has_jpegs(dataset) -> bool:
    """Return whether most files are JPEGs, estimated from a sample of the files."""
    reader = dataset.reader
    are_jpegs = []
    for i in _sample(dataset):
        if isinstance(reader, TAR_READERS):  # do not open: workers would share the tar file's read position
            are_jpegs.append(reader.filename(i).lower().endswith((".jpg", ".jpeg")))
            continue
        with contextlib.suppress(Exception):  # an unreadable image is reported when a batch contains it
            file, _ = open_indexed(reader, i)
            with file:
                are_jpegs.append(file.read(3) == b"\xff\xd8\xff")
    return 2 * sum(are_jpegs) > len(are_jpegs)


def typical_pixels(dataset) -> float:
    """Return the mean number of pixels of a folder's images, estimated from sampled headers; infinity if unknown."""
    if not isinstance(dataset.reader, ReaderImageFolder):
        return math.inf
    pixels = []
    for i in _sample(dataset):
        with contextlib.suppress(Exception):  # an unreadable image is reported when a batch contains it
            file, _ = open_indexed(dataset.reader, i)
            with file:
                plain = strip_metadata(read_bytes(file))
            if plain is not None:
                pixels.append(math.prod(open_image(io.BytesIO(plain)).size))
    return sum(pixels) / len(pixels) if pixels else math.inf


def count_rotated(dataset) -> tuple[int, int]:
    """Return the number of inspected files whose EXIF orientation is not 1, and the number of all inspected files.

    At most `ROTATION_SAMPLE` files are inspected, by their first `HEAD_BYTES` bytes. Only the files of a folder are
    inspected; for other sources, both numbers are 0.
    """
    if not isinstance(dataset.reader, ReaderImageFolder):
        return 0, 0
    sample = _sample(dataset, ROTATION_SAMPLE)
    rotated = 0
    for i in sample:
        with contextlib.suppress(Exception):  # an unreadable image is reported when a batch contains it
            file, _ = open_indexed(dataset.reader, i)
            with file:
                rotated += exif_orientation(file.read(HEAD_BYTES)) != 1
    return rotated, len(sample)


def _sample(dataset, most: int = SAMPLE) -> list[int]:
    """Return the indices of at most `most` images at equal distances, starting with the first image."""
    return list(range(0, len(dataset), max(1, len(dataset) // most)))[:most]
