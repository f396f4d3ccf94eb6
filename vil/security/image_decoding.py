"""Decoding of untrusted image files to 8-bit RGB: the formats, the limits and the colours.

Files whose structure bounds their cost are decoded in a loader's process. For other files, `sandbox` runs this module
as a program of its own, so the module imports nothing of this package.
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
SECONDS = 10  # timeout for decoding a file whose structure does not bound its cost
MEMORY = 5 * 2**28  # bytes of address space for decoding such a file; files within the limits need less

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
        size, content = _decode_or_explain(requests.read(int.from_bytes(length, "little")))
        replies.write(REPLY.pack(len(content), *size))
        replies.write(content)
        replies.flush()
        del content


def _decode_or_explain(data: bytes) -> tuple[tuple[int, int], bytes]:
    """Return the size and the pixels of an image; size (0, 0) and the reason if the file cannot be decoded."""
    if hasattr(signal, "alarm"):  # ends this process if its parent is gone
        signal.alarm(2 * SECONDS)
    try:
        image = decode(io.BytesIO(data))
        size, content = image.size, image.tobytes()
    except Exception as error:  # decoders raise various types
        reason = str(error) if isinstance(error, UnfitImageError) else repr(error)
        size, content = (0, 0), reason[:1000].encode()
    if hasattr(signal, "alarm"):
        signal.alarm(0)
    return size, content


def _limit_memory() -> None:
    if sys.platform != "linux":  # macOS accepts the limit but does not enforce it
        return
    import resource

    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
