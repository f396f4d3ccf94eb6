"""Server of the sandbox: a process that decodes image files within limits of time and memory.

A request is the length of a file in 8 bytes and the file. A reply is `REPLY` and the pixels or the decoder's error.
`sandbox` starts the process with the packages Pillow and NumPy only, so the module imports nothing else.
"""

from __future__ import annotations

import io
import signal
import struct
import sys
from typing import BinaryIO

from .image_decoding import FORMATS, UnfitImageError, decode

SECONDS = 10  # timeout for decoding a file
MEMORY = 5 * 2**28  # bytes of address space for decoding a file; files within the limits need less
REPLY = struct.Struct("<QII")  # number of bytes that follow, width, height (0 for errors)
MOST_ERROR = 1000  # characters of an error


def serve(requests: BinaryIO, replies: BinaryIO, seconds: int = SECONDS) -> None:
    """Decode files until there are no more requests."""
    _ignore_scheduler_signals()
    _limit_threads()
    _limit_memory()
    replies.write(b"\n")  # the process has started
    replies.flush()

    while length := requests.read(8):
        data = requests.read(int.from_bytes(length, "little"))
        _set_alarm(2 * seconds)  # `sandbox` kills the process earlier, unless its own process is gone
        size, content = _decode_or_explain(data)
        _set_alarm(0)
        replies.write(REPLY.pack(len(content), *size))
        replies.write(content)
        replies.flush()
        del data, content


def _decode_or_explain(data: bytes) -> tuple[tuple[int, int], bytes]:
    """Return the size and the pixels of an image, or size (0, 0) and the decoder's error."""
    try:
        image = decode(io.BytesIO(data))
        return image.size, image.tobytes()
    except Exception as error:  # decoders raise various types
        reason = str(error) if isinstance(error, UnfitImageError) else repr(error)
        return (0, 0), reason[:MOST_ERROR].encode()


def _ignore_scheduler_signals() -> None:
    """Ignore signals that a scheduler may send to every process of a job."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _limit_threads() -> None:
    """Decode AVIF images in one thread, because each thread's stack uses address space."""
    if "AVIF" in FORMATS:
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1


def _limit_memory() -> None:
    """Limit the address space to `MEMORY` more than the process uses now."""
    if sys.platform != "linux":  # macOS accepts the limit but does not enforce it
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
    """End this process after some seconds. 0 cancels the alarm."""
    if hasattr(signal, "alarm"):  # Windows has no alarms
        signal.alarm(seconds)
