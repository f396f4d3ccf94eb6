"""Removal of metadata from JPEG and PNG files, and a check that the file structure bounds the cost of decoding."""

from __future__ import annotations

import struct

from .image_decoding import MOST_PIXELS, UnfitImageError

MOST_SCANS = 100  # maximum scans per JPEG, because each scan may cover all pixels; encoders write about ten
MOST_SCANNED = 2**28  # maximum total number of pixels in a JPEG's scans; each scan may cover the whole image
MOST_PARTS = 1000  # maximum number of segments of a JPEG up to the first scan
CHUNK_BYTES = 2**10  # a PNG may have MOST_PARTS chunks, and one more chunk per CHUNK_BYTES of the file
# JPEG markers
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
BASELINE_FRAMES = {0xC0, 0xC1}
TABLES = {0xC4, 0xCC, 0xDB, 0xDD}  # markers of decoding tables (Huffman, arithmetic, quantization, restart interval)
COLOURS = {0xE0: b"JFIF", 0xEE: b"Adobe"}  # JPEG segments that specify the colour encoding
METADATA = {*range(0xE0, 0xF0), 0xFE}
SCAN = 0xDA
PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n\x1a\n"


def strip_metadata(data: bytes) -> bytes | None:
    """Return a JPEG or PNG without metadata, or None if the time to decode the file cannot be bounded.

    An allow-list keeps only the parts that the pixels depend on, so that no kind of metadata is decoded. A JPEG is kept
    unchanged from the first scan on, where Pillow reads no metadata. For other formats, return None.

    Raises:
        UnfitImageError: The file is a JPEG with more than `MOST_SCANS` scans.
    """
    if data.startswith(JPEG_START):
        return _strip_jpeg(data)
    if data.startswith(PNG_START) and len(data) > 24:
        return _strip_png(data)
    return None


def _is_in_proportion(length: int, width: int, height: int) -> bool:
    """Return whether the number of pixels is within the limit, and the file has at most 1 MiB + 8 bytes per pixel."""
    return length <= 2**20 + 8 * width * height <= 8 * MOST_PIXELS


def _strip_jpeg(data: bytes) -> bytes | None:
    """Return a JPEG file without metadata, or None if the cost of decoding the file cannot be bounded."""
    view = memoryview(data)
    kept: list[bytes | memoryview] = [view[:2]]
    position, frame = 2, None
    for _ in range(MOST_PARTS):
        header = data[position : position + 4]
        end = position + 2 + int.from_bytes(header[2:], "big")
        if header[:1] != b"\xff" or end < position + 4 or end + 6 > len(data):
            return None
        marker = header[1]
        if marker == SCAN:
            break
        if marker in FRAMES:
            if frame:
                return None
            frame = position
        has_colours = marker in COLOURS and data.startswith(COLOURS[marker], position + 4)
        if marker in FRAMES or marker in TABLES or has_colours:
            kept.append(view[position:end])
        elif marker not in METADATA:
            return None
        position = end
    else:
        return None
    if not frame:
        return None

    height, width, components = struct.unpack_from(">HHB", data, frame + 5)
    if not _is_in_proportion(len(data), width, height):
        return None
    has_one_scan = data[frame + 1] in BASELINE_FRAMES and data[position + 4] == components
    if not has_one_scan:
        scans = data.count(b"\xff\xda")
        if scans > MOST_SCANS:
            raise UnfitImageError(f"JPEG must have at most {MOST_SCANS} scans, got {scans}")
        if scans * width * height > MOST_SCANNED:
            return None
    return b"".join([*kept, view[position:]])


def _strip_png(data: bytes) -> bytes | None:
    width, height = struct.unpack_from(">II", data, 16)
    if not _is_in_proportion(len(data), width, height):
        return None
    view = memoryview(data)
    kept: list[bytes | memoryview] = [view[:8]]
    position = 8
    for _ in range(MOST_PARTS + len(data) // CHUNK_BYTES):
        length, kind = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        end = position + 12 + length
        if kind in PIXEL_CHUNKS:
            kept.append(view[position:end])
        if kind == b"IEND":
            return b"".join(kept)
        position = end
        if position >= len(data):
            return None
    return None
