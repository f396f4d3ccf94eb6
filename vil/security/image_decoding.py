"""Decoder of image files, which may come from anybody, to 8-bit pixels: the formats, the limits and the colours.

It runs in a loader's process for files whose structure bounds their cost. For other files `guard` runs it as a program
of its own, so it imports nothing of this package.
"""

from __future__ import annotations

import io
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

# Pillow reads some forty formats whatever a file is called, EPS among them by starting Ghostscript; MPO is a JPEG to it
Image.init()
FORMATS = tuple(f for f in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF") if f in Image.OPEN)
MOST_BYTES = 2**29  # bytes of a file, because some formats are read as a whole
MOST_PIXELS = 89_478_485  # Pillow's limit for warnings; RGB images of this size take 0.36 GB
MOST_ELONGATED = 100  # evaluation resizes the shorter side to some hundreds of pixels, and the longer one with it
MOST_SCANS = 100  # scans of a JPEG, each of which may cover all pixels; encoders write about ten
SECONDS = 10  # timeout for decoding a file whose structure does not bound its cost
MEMORY = 5 * 2**28  # bytes of address space for decoding such a file; files within the limits need less

MOST_PARTS = 1000  # segments of a JPEG before its scans, or chunks of a PNG besides those of its pixels
MOST_SCANNED = 2**28  # pixels that all scans of a JPEG go over: ten scans of 26 megapixels
FEWEST_BYTES = 2**10  # minimum bytes of a PNG for each of its chunks; most encoders write 8,192
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of a JPEG
# markers of Huffman, arithmetic-coding and quantization tables, and of the restart interval
TABLES = {0xC4, 0xCC, 0xDB, 0xDD}
COLOURS = {0xE0: b"JFIF", 0xEE: b"Adobe"}  # segments that specify the colour encoding
METADATA = {*range(0xE0, 0xF0), 0xFE}
REPLY = struct.Struct("<QII")  # number of bytes that follow, width, height (0 for errors)


class UnfitImageError(ValueError):
    """An image is damaged or beyond the limits, its pixels have no range, or its decoder came to an end."""


def length_of(file: BinaryIO) -> int:
    """Return the number of bytes of a file, or raise an UnfitImageError if they are too many."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    if length > MOST_BYTES:
        raise UnfitImageError(f"{length} bytes, more than {MOST_BYTES}")
    return length


def is_bounded(file: BinaryIO, length: int) -> bool:
    """Return whether the structure of a file of this length bounds its cost (see `essence`)."""
    data = file.read(length)
    file.seek(0)
    return essence(data) is not None


def essence(data: bytes) -> bytes | None:
    """Return a JPEG or PNG without metadata, or None if the structure of the file does not bound its cost.

    Only the parts that pixels depend on are kept, by an allow-list. So metadata cost nothing, whatever their kind.

    Raises:
        UnfitImageError: The file is a JPEG of too many scans.
    """
    if data[:3] == b"\xff\xd8\xff":
        return _essence_of_jpeg(data)
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 24:
        return _essence_of_png(data)
    return None


def _is_in_proportion(length: int, width: int, height: int) -> bool:
    return length <= 2**20 + 8 * width * height <= 8 * MOST_PIXELS


def _essence_of_jpeg(data: bytes) -> bytes | None:
    """Read the segments before the first scan one after the other: a decoder searches what lies between segments."""
    kept: list[bytes | memoryview] = [data[:2]]
    view, place, frame = memoryview(data), 2, None
    for _ in range(MOST_PARTS):
        start, marker, length = data[place : place + 1], data[place + 1 : place + 2], data[place + 2 : place + 4]
        end = place + 2 + int.from_bytes(length, "big")
        if start != b"\xff" or end < place + 4 or end + 6 > len(data):
            return None
        kind = marker[0]
        if kind == 0xDA:
            break
        if kind in FRAMES:
            if frame:
                return None
            frame = place
        if kind in FRAMES or kind in TABLES or (kind in COLOURS and data.startswith(COLOURS[kind], place + 4)):
            kept.append(view[place:end])
        elif kind not in METADATA:
            return None
        place = end
    else:
        return None
    if not frame:
        return None
    height, width, components = struct.unpack_from(">HHB", data, frame + 5)
    if not _is_in_proportion(len(data), width, height):
        return None
    if data[frame + 1] not in (0xC0, 0xC1) or data[place + 4] != components:
        if (scans := data.count(b"\xff\xda")) > MOST_SCANS:
            raise UnfitImageError(f"{scans} scans, more than {MOST_SCANS}")
        if scans * width * height > MOST_SCANNED:
            return None
    return b"".join([*kept, view[place:]])


def _essence_of_png(data: bytes) -> bytes | None:
    if not _is_in_proportion(len(data), *struct.unpack_from(">II", data, 16)):
        return None
    kept: list[bytes | memoryview] = [data[:8]]
    view, place, of_pixels, others = memoryview(data), 8, 0, 0
    while place < len(data) and others <= MOST_PARTS and of_pixels <= MOST_PARTS + len(data) // FEWEST_BYTES:
        kind, end = data[place + 4 : place + 8], place + 12 + int.from_bytes(data[place : place + 4], "big")
        if kind in (b"IHDR", b"PLTE", b"IDAT", b"IEND"):
            kept.append(view[place:end])
        if kind == b"IEND":
            return b"".join(kept)
        of_pixels += kind == b"IDAT"
        others += kind != b"IDAT"
        place = end
    return None


def decode(file: BinaryIO) -> Image.Image:
    """Return the first image of a file as 8-bit RGB. A file that is not an image may raise any exception."""
    return to_rgb(open_image(file))


def open_image(file: BinaryIO) -> Any:
    """Return Pillow's image of a file's header if the image is within the limits."""
    try:
        image: Any = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:  # Pillow's message contains only a memory address
        raise UnfitImageError(f"its content is not that of a {', '.join(FORMATS)} file") from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise UnfitImageError(f"{width}x{height} pixels, more than {MOST_PIXELS}")
    if max(width, height) > MOST_ELONGATED * min(width, height):
        raise UnfitImageError(f"{width}x{height} pixels, one side more than {MOST_ELONGATED} times the other")
    if image.format == "TIFF":  # libtiff decompresses whole parts, even if the image needs little of them
        part = image.tag_v2.get(322, 0) * image.tag_v2.get(323, 0)
        if part > max(width * height, 2**22):
            raise UnfitImageError(f"a TIFF tile of {part} pixels in an image of {width}x{height}")
    return image


def to_rgb(image: Any) -> Image.Image:
    """Convert Pillow's image of any mode to 8 bits. Of more bits the highest are kept; Pillow would clip at 255."""
    mode = image.mode
    if not mode.startswith(("I", "F")):
        if mode == "RGB" and image.format == "JPEG":
            image.load()
            return image  # converting would copy, which takes a tenth of the decoding time
        return image.convert("RGB")
    if mode == "F" or (mode == "I" and image.format not in ("PNG", "PPM")):
        raise UnfitImageError(f"pixels of mode {mode!r} in {image.format} have no range from black to white")
    tags = image.tag_v2 if image.format == "TIFF" else {}
    bits, white_is_zero = tags.get(258, (16,))[0], tags.get(262) == 0
    grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
    return Image.fromarray(~grey if white_is_zero else grey).convert("RGB")


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Decode files, each sent as its length in 8 bytes and its content, until there are no more."""
    # ignore signals that a scheduler may send to every process of a job
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if "AVIF" in FORMATS:
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each thread's stack uses address space
    _limit_memory()
    replies.write(b"\n")
    replies.flush()
    while length := requests.read(8):
        size, content = _decoded(requests.read(int.from_bytes(length, "little")))
        replies.write(REPLY.pack(len(content), *size))
        replies.write(content)
        replies.flush()
        del content


def _decoded(data: bytes) -> tuple[tuple[int, int], bytes]:
    if hasattr(signal, "alarm"):  # ends this process if its parent is gone
        signal.alarm(2 * SECONDS)
    try:
        image = decode(io.BytesIO(data))
        found = image.size, image.tobytes()
    except Exception as error:  # decoders raise various types
        said = str(error) if isinstance(error, UnfitImageError) else repr(error)
        found = (0, 0), said[:1000].encode()
    if hasattr(signal, "alarm"):
        signal.alarm(0)
    return found


def _limit_memory() -> None:
    if sys.platform != "linux":  # macOS accepts the limit but does not enforce it
        return
    import resource

    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
