"""An image file, which may come from anybody, to 8-bit pixels: the formats, the limits and the colours.

It runs in a loader's process for files whose headers bound what they cost, and as a program of its own, which `guard`
starts, for all others. So it imports nothing of this package.
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
MOST_BYTES = 2**29  # of a file: some formats are read as a whole
MOST_PIXELS = 89_478_485  # where Pillow begins to warn: 0.36 GB as it stores RGB
MOST_ELONGATED = 100  # evaluation resizes the shorter side to some hundreds of pixels, and the longer one with it
MOST_SCANS = 100  # of a JPEG: each may go over all of its pixels; encoders write about ten
SECONDS = 10  # in which a file is decoded that is not bounded
MEMORY = 5 * 2**28  # bytes of address space that its decoder may take: more than a file within the limits needs

MOST_PARTS = 100  # segments of a JPEG before its scans, or chunks of a PNG beside those of its pixels
MOST_SCANNED = 2**28  # pixels that all scans of a JPEG go over: ten scans of 26 megapixels
FEWEST_BYTES = 2**10  # of a PNG for each of its chunks: most encoders write 8,192
FRAMES = range(0xC0, 0xD0)  # markers of a JPEG's frames, but for three of tables
TABLES = (0xC4, 0xC8, 0xCC)
REPLY = struct.Struct("<QII")  # bytes that follow, width, height; an error has no size


class UnfitImageError(ValueError):
    """An image is beyond the limits, its pixels have no range, or its decoder came to an end."""


def length_of(file: BinaryIO) -> int:
    """Bytes of a file, if they are within the limit."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    if length > MOST_BYTES:
        raise UnfitImageError(f"{length} bytes, more than {MOST_BYTES}")
    return length


def is_bounded(file: BinaryIO, length: int) -> bool:
    """Whether a file is a JPEG or PNG of few parts, and so costs no more than its pixels do.

    Raises:
        UnfitImageError: It is a JPEG of too many scans.
    """
    start = file.read(24)
    bounded = False
    if start[:3] == b"\xff\xd8\xff":
        bounded = _is_bounded_jpeg(file, length)
    elif start[:8] == b"\x89PNG\r\n\x1a\n" and len(start) == 24:
        bounded = _is_in_proportion(length, *struct.unpack_from(">II", start, 16)) and _has_few_chunks(file, length)
    file.seek(0)
    return bounded


def _is_in_proportion(length: int, width: int, height: int) -> bool:
    return length <= 2**20 + 8 * width * height <= 8 * MOST_PIXELS


def _is_bounded_jpeg(file: BinaryIO, length: int) -> bool:
    """By its segments up to the first scan, one after the other: a decoder looks for them in whatever lies between."""
    place, notes, frame = 2, 0, b""
    for _ in range(MOST_PARTS):
        file.seek(place)
        segment = file.read(10)
        if len(segment) < 10 or segment[0] != 0xFF:
            return False
        marker = segment[1]
        if marker == 0xDA:
            break
        if marker < 0xC0 or 0xD0 <= marker < 0xDA or marker == 0xFF:
            return False
        notes += segment[4:8] == b"Exif"  # a TIFF, whose tags may share bytes
        if marker in FRAMES and marker not in TABLES:
            if frame:
                return False
            frame = segment
        place += 2 + int.from_bytes(segment[2:4], "big")
    else:
        return False
    if not frame or notes > 1:
        return False
    height, width, components = struct.unpack(">HHB", frame[5:])
    if not _is_in_proportion(length, width, height):
        return False
    if frame[1] in (0xC0, 0xC1) and segment[4] == components:
        return True
    file.seek(0)
    if (scans := file.read().count(b"\xff\xda")) > MOST_SCANS:
        raise UnfitImageError(f"{scans} scans, more than {MOST_SCANS}")
    return scans * width * height <= MOST_SCANNED


def _has_few_chunks(file: BinaryIO, length: int) -> bool:
    place, of_pixels, others = 8, 0, 0
    while place < length and others <= MOST_PARTS and of_pixels <= MOST_PARTS + length // FEWEST_BYTES:
        file.seek(place)
        chunk = file.read(8)
        if chunk[4:] == b"IEND":
            return True
        if chunk[4:] == b"IDAT":
            of_pixels += 1
        else:
            others += 1
        place += 12 + int.from_bytes(chunk[:4], "big")
    return False


def decode(file: BinaryIO) -> Image.Image:
    """The first picture of a file as 8-bit RGB. From a file that is none, or not fit, there may be any exception."""
    return to_rgb(open_image(file))


def open_image(file: BinaryIO) -> Any:
    """Pillow's image of a file's header, if what it announces is within the limits."""
    try:
        image: Any = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:  # whose message is an address in memory
        raise UnfitImageError(f"none of {', '.join(FORMATS)} by its content") from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise UnfitImageError(f"{width}x{height} pixels, more than {MOST_PIXELS}")
    if max(width, height) > MOST_ELONGATED * min(width, height):
        raise UnfitImageError(f"{width}x{height} pixels, one side more than {MOST_ELONGATED} times the other")
    if image.format == "TIFF":  # its parts are decompressed whole, whatever the image needs of them
        part = image.tag_v2.get(322, 0) * image.tag_v2.get(323, 0)
        if part > max(width * height, 2**22):
            raise UnfitImageError(f"tiles of {part} pixels in an image of {width}x{height}")
    return image


def to_rgb(image: Any) -> Image.Image:
    """Pillow's image of any mode in 8 bits: the higher ones of more, which Pillow would clip at 255."""
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


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Decodes one file after the other, each by its length in 8 bytes and its content, until there are no more."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):  # a scheduler may signal every process of a job
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if "AVIF" in FORMATS:
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each has a stack in the address space
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
    if hasattr(signal, "alarm"):  # ends this process if nobody is left to do it
        signal.alarm(2 * SECONDS)
    try:
        image = decode(io.BytesIO(data))
        found = image.size, image.tobytes()
    except Exception as error:  # decoders raise all kinds
        said = str(error) if isinstance(error, UnfitImageError) else repr(error)
        found = (0, 0), said[:1000].encode()
    if hasattr(signal, "alarm"):
        signal.alarm(0)
    return found


def _limit_memory() -> None:
    if sys.platform != "linux":  # macOS knows such a limit and does not keep it
        return
    import resource

    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
