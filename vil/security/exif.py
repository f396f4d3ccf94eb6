"""EXIF orientation of images, read without decoding other EXIF tags, which can be crafted to exhaust memory."""

from __future__ import annotations

import struct
from typing import Any

from PIL import Image

from .image_decoding import to_rgb
from .image_structure import CHUNK_BYTES, JPEG_START, MOST_PARTS, PNG_START, SCAN

EXIF_SEGMENT = 0xE1  # JPEG marker of the segment with EXIF tags
ORIENTATION = 0x0112  # number of the EXIF tag for the image's orientation
TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def exif_orientation(data: bytes) -> int:
    """Return the EXIF orientation (1 to 8) of a JPEG or PNG file, and 1 if the file specifies none.

    `data` may be only the first part of the file. Other formats have orientation 1, because their orientation is known
    only after decoding (see `to_upright_rgb`).
    """
    if data.startswith(JPEG_START):
        return _orientation_of_tags(_exif_of_jpeg(data))
    if data.startswith(PNG_START):
        return _orientation_of_tags(_exif_of_png(data))
    return 1


def to_upright_rgb(image: Any) -> Image.Image:
    """Convert a Pillow image of any mode to 8-bit RGB and apply its EXIF orientation.

    Raises:
        UnfitImageError: As for `to_rgb`.
    """
    rgb = to_rgb(image)  # Pillow applies the orientation of TIFF files, and pillow-heif that of HEIC files
    tags = image.info.get("exif")
    return upright(rgb, _orientation_of_tags(tags.removeprefix(b"Exif\0\0")) if isinstance(tags, bytes) else 1)


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Rotate or mirror an image according to its EXIF orientation."""
    return image if orientation == 1 else image.transpose(TRANSPOSES[orientation])


def _orientation_of_tags(tags: bytes) -> int:
    """Return the orientation stored in EXIF tags, and 1 if the tags are damaged or contain no orientation."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tags[:4])
    if not order or len(tags) < 8:
        return 1
    (start,) = struct.unpack_from(order + "I", tags, 4)
    if start + 2 > len(tags):
        return 1
    (count,) = struct.unpack_from(order + "H", tags, start)
    first = start + 2
    for position in range(first, min(first + 12 * count, len(tags) - 11), 12):
        tag, _, _, value = struct.unpack_from(order + "HHIH", tags, position)
        if tag == ORIENTATION:
            return value if value in TRANSPOSES else 1
    return 1


def _exif_of_jpeg(data: bytes) -> bytes:
    """Return the EXIF tags of a JPEG, and no bytes if there are none before the first scan."""
    position = 2
    for _ in range(MOST_PARTS):
        header = data[position : position + 4]
        if len(header) < 4 or header[0] != 0xFF or header[1] == SCAN:
            break
        end = position + 2 + int.from_bytes(header[2:], "big")
        if header[1] == EXIF_SEGMENT and data.startswith(b"Exif\0\0", position + 4):
            return data[position + 10 : end]
        position = end
    return b""


def _exif_of_png(data: bytes) -> bytes:
    """Return the EXIF tags of a PNG, and no bytes if there are none."""
    position = len(PNG_START)
    for _ in range(MOST_PARTS + len(data) // CHUNK_BYTES):
        length, kind = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        if kind == b"eXIf":
            return data[position + 8 : position + 8 + length]
        position += 12 + length
    return b""
