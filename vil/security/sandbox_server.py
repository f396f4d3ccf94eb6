"""Main loop of the sandbox process, which decodes image files within time and memory limits.

A request is the header `REQUEST`, followed by an image file. A reply is the header `REPLY`, followed by the pixels or
by the decoder's error message. This module must import only `vil.security`, Pillow, pillow-heif, NumPy and the standard
library, because the process runs without the rest of `vil` and without PyTorch.
"""

from __future__ import annotations

import contextlib
import io
import signal
import struct
import sys
from typing import BinaryIO

from .exif import to_upright_rgb
from .image_decoding import FORMATS, open_image, reason, to_rgb

SECONDS = 10  # timeout per image file
MEMORY = 5 * 2**28  # maximum address space for decoding, in bytes: 15 for each of `MOST_PIXELS` pixels
REQUEST = struct.Struct("<QB")  # header: number of bytes that follow, and whether to apply the EXIF orientation
REPLY = struct.Struct("<QII")  # header: number of bytes that follow, image width and height (0 and 0 for an error)
MOST_ERROR = 1000  # maximum length of an error message, in characters


def serve(requests: BinaryIO, replies: BinaryIO, seconds: int = SECONDS) -> None:
    """Decode image files until the stream of requests ends."""
    _ignore_scheduler_signals()
    _register_heic()
    _limit_threads()
    _limit_memory()
    replies.write(b"\n")  # tell the parent process that this process has started
    replies.flush()

    while header := requests.read(REQUEST.size):
        length, is_upright = REQUEST.unpack(header)
        data = requests.read(length)
        _set_alarm(2 * seconds)  # a second timeout, in case the parent process has died
        size, content = _decode_or_explain(data, is_upright)
        _set_alarm(0)
        replies.write(REPLY.pack(len(content), *size))
        replies.write(content)
        replies.flush()
        del data, content


def _decode_or_explain(data: bytes, is_upright: bool) -> tuple[tuple[int, int], bytes]:
    """Return the size and pixels of the image in `data`, or the size (0, 0) and the error message of the decoder."""
    try:
        opened = open_image(io.BytesIO(data))
        image = to_upright_rgb(opened) if is_upright else to_rgb(opened)
        return image.size, image.tobytes()
    except Exception as error:  # decoders have no common exception type
        return (0, 0), reason(error)[:MOST_ERROR].encode()


def _ignore_scheduler_signals() -> None:
    """Ignore signals that a cluster scheduler may send to every process of a job."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _register_heic() -> None:
    """Let Pillow open HEIC images if pillow-heif is installed."""
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener(decode_threads=1, thumbnails=False)


def _limit_threads() -> None:
    """Decode AVIF images in one thread, because the stack of each additional thread counts toward the memory limit."""
    if "AVIF" in FORMATS:
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1


def _limit_memory() -> None:
    """On Linux, limit the address space to its current size plus `MEMORY`, or to the hard limit if it is lower."""
    if sys.platform != "linux":  # macOS rejects the limit or does not enforce it
        return
    import resource

    with open("/proc/self/statm") as file:
        used_pages = int(file.read().split()[0])
    limit = used_pages * resource.getpagesize() + MEMORY
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def _set_alarm(seconds: int) -> None:
    """Terminate this process after `seconds`. 0 cancels the alarm."""
    if hasattr(signal, "alarm"):  # Windows has no signal.alarm
        signal.alarm(seconds)
