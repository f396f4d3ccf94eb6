"""Image files that may cost more than their headers say, decoded in a process with limits of time and memory."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import threading
import time
from typing import BinaryIO

from PIL import Image

from . import decoder
from .decoder import REPLY, UnfitImageError

AT_ONCE = 2**20  # bytes


class LateImageError(UnfitImageError):
    """A decoder has not come to an end."""


class Guard:
    """A process that decodes files, one at a time. It starts with the first of them, and again after a fatal one."""

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def decode(self, file: BinaryIO, length: int) -> Image.Image:
        """The first picture of a file as 8-bit RGB.

        Raises:
            LateImageError: It took too long.
            UnfitImageError: It has none within the limits; the message has the decoder's error.
        """
        with self._lock:
            try:
                size, content = self._ask(file, length)
            except BaseException:
                self.close()
                raise
        if 0 in size:
            raise UnfitImageError(content.decode())
        return Image.frombytes("RGB", size, content)

    def _ask(self, file: BinaryIO, length: int) -> tuple[tuple[int, int], bytes]:
        if self._child is None or self._child.poll() is not None:
            self._child = _start()
        requests, replies = self._child.stdin, self._child.stdout
        assert requests
        assert replies
        requests.write(length.to_bytes(8, "little"))
        for start in range(0, length, AT_ONCE):
            requests.write(file.read(min(AT_ONCE, length - start)))
        requests.flush()
        # from here on, since reading a file may take long on a slow disk
        start_time, clock = time.monotonic(), threading.Timer(decoder.SECONDS, self._child.kill)
        clock.start()
        try:
            header = replies.read(REPLY.size)
            count, width, height = REPLY.unpack(header.ljust(REPLY.size, b"\0"))
            content = replies.read(count)
        finally:
            clock.cancel()
            clock.join()
        is_whole, is_late = len(content) == count > 0, time.monotonic() - start_time >= decoder.SECONDS
        if not is_whole:
            if is_late:
                raise LateImageError(f"not decoded in {decoder.SECONDS} s")
            raise UnfitImageError(f"its decoder ended with status {self._child.wait()}")
        if is_late:  # the clock may have ended it just then
            self.close()
        return (width, height), content

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _start() -> subprocess.Popen:
    """Runs `decoder` with the modules that this process finds, of which it imports Pillow and NumPy alone."""
    code = f"import runpy, sys; sys.path[:] = {sys.path!r}; runpy.run_path({decoder.__file__!r}, run_name='__main__')"
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | one_thread,
    )
    assert child.stdout
    if not child.stdout.read(1):
        raise RuntimeError(f"the program that decodes images does not start: {sys.executable} {decoder.__file__}")
    return child


@functools.cache
def of_process(process: int) -> Guard:
    """That of a process, which one forked from it must not share."""
    guard = Guard()
    atexit.register(guard.close)
    return guard


def decode_guarded(file: BinaryIO, length: int) -> Image.Image:
    """As `decoder.decode`, at most `decoder.SECONDS` and, on Linux, `decoder.MEMORY` later."""
    return of_process(os.getpid()).decode(file, length)
