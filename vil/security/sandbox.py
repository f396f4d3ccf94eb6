"""Decoding of image files whose structure does not bound their cost, in a process with limits of time and memory."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

from . import image_decoding
from .image_decoding import MOST_PIXELS, REPLY, UnfitImageError


class LateImageError(UnfitImageError):
    """An image was not decoded in time."""


class Guard:
    """A process that decodes files, one at a time. It starts with the first file, and restarts after a fatal one."""

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def decode(self, data: bytes) -> Image.Image:
        """Return the first image of a file as 8-bit RGB.

        Raises:
            LateImageError: Decoding took too long.
            UnfitImageError: There is no image within the limits; the message has the decoder's error.
            OSError: The process does not start.
        """
        with self._lock:
            try:
                size, content = self._ask(data)
            except BaseException:
                self.close()
                raise
        if 0 in size:
            raise UnfitImageError(content.decode())
        return Image.frombytes("RGB", size, content)

    def _ask(self, data: bytes) -> tuple[tuple[int, int], bytes]:
        if self._child is None or self._child.poll() is not None:
            self._child = _start()
        requests, replies = self._child.stdin, self._child.stdout
        assert requests
        assert replies
        count, width, height, content = 0, 0, 0, b""
        start_time, clock = time.monotonic(), threading.Timer(image_decoding.SECONDS, self._child.kill)
        clock.start()
        try:
            requests.write(len(data).to_bytes(8, "little") + data)
            requests.flush()
            count, width, height = REPLY.unpack(replies.read(REPLY.size).ljust(REPLY.size, b"\0"))
            content = replies.read(min(count, 3 * MOST_PIXELS))
        except BrokenPipeError:  # the process ended before it had the file, which can be too large for its memory
            pass
        finally:
            clock.cancel()
            clock.join()
        is_whole, is_late = len(content) == count > 0, time.monotonic() - start_time >= image_decoding.SECONDS
        if not is_whole:
            if is_late:
                raise LateImageError(f"not decoded in {image_decoding.SECONDS} s")
            raise UnfitImageError(f"its decoder ended with status {self._child.wait()}")
        if is_late:  # the clock may have ended the process just then
            self.close()
        return (width, height), content

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in filter(None, (self._child.stdin, self._child.stdout)):
                with contextlib.suppress(OSError):  # ignore data that the process has not read
                    pipe.close()
            self._child = None


def _start() -> subprocess.Popen:
    """Start `image_decoding` with this process's Pillow and NumPy.

    The interpreter is isolated (-I, -S) and runs in the root folder, because it would import modules from the current
    folder, which may hold files from anybody.
    """
    folders = [str(Path(str(package.__file__)).absolute().parents[1]) for package in (PIL, np)]
    program = image_decoding.__file__
    code = f"import sys; sys.path += {folders!r}; import runpy; runpy.run_path({program!r}, run_name='__main__')"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=os.path.abspath(os.sep),
        env=os.environ | {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
    )
    assert child.stdout
    if not child.stdout.read(1):
        raise OSError(errno.ENOEXEC, f"the process that decodes images does not start: {sys.executable} {program}")
    return child


@functools.cache
def of_process(process: int) -> Guard:
    """Return the guard of a process, which a process forked from it must not share."""
    guard = Guard()
    atexit.register(guard.close)
    return guard


def decode_guarded(data: bytes) -> Image.Image:
    """Return `image_decoding.decode` of a file, within its `SECONDS` and, on Linux, its `MEMORY`."""
    return of_process(os.getpid()).decode(data)
