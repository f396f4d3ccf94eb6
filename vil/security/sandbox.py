"""Sandbox: a process with limits of time and memory that decodes images whose structure does not bound their cost."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import signal
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


class Sandbox:
    """A process that decodes files, one at a time. It starts with the first file, and restarts after a fatal one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def decode(self, data: bytes) -> Image.Image:
        """Return the first image of a file as 8-bit RGB.

        Raises:
            LateImageError: Decoding took too long.
            UnfitImageError: There is no image within the limits; the message has the decoder's error.
            OSError: The process does not start, or the machine has killed it.
        """
        with self._lock:
            try:
                size, content = self._request(data)
            except BaseException:
                self.close()
                raise
        if 0 in size:
            raise UnfitImageError(content.decode())
        return Image.frombytes("RGB", size, content)

    def _request(self, data: bytes) -> tuple[tuple[int, int], bytes]:
        """Return the size and pixels of a file's image; a side of 0 pixels and the decoder's error if it has none."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
        process = self._process
        assert process.stdin
        assert process.stdout

        start = time.monotonic()
        count, width, height, content = 0, 0, 0, b""
        timeout = threading.Timer(image_decoding.SECONDS, process.kill)
        timeout.start()
        try:
            process.stdin.write(len(data).to_bytes(8, "little") + data)
            process.stdin.flush()
            header = process.stdout.read(REPLY.size)
            count, width, height = REPLY.unpack(header.ljust(REPLY.size, b"\0"))
            content = process.stdout.read(min(count, 3 * MOST_PIXELS))
        except BrokenPipeError:  # the process ended before it had the file, which can be too large for its memory
            pass
        finally:
            timeout.cancel()
            timeout.join()

        if len(content) == count > 0:
            return (width, height), content
        if time.monotonic() - start >= image_decoding.SECONDS:
            raise LateImageError(f"not decoded in {image_decoding.SECONDS} s")
        status = process.wait()
        if status == -getattr(signal, "SIGKILL", 0):  # the sandbox's own limit of memory does not kill
            raise OSError(errno.ENOMEM, "the process that decodes images was killed, probably for lack of memory")
        raise UnfitImageError(f"its decoder ended with status {status}")

    def close(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(OSError):  # ignore data that the process has not read
                pipe.close()
        self._process = None


def _start() -> subprocess.Popen:
    """Start the process with this process's Pillow and NumPy.

    The interpreter is isolated (-I, -S) and runs in the root folder, because it would import modules from the current
    folder, which may hold untrusted files.
    """
    folders = [str(Path(str(package.__file__)).absolute().parents[1]) for package in (PIL, np)]
    program = image_decoding.__file__
    code = f"import sys; sys.path += {folders!r}; import runpy; runpy.run_path({program!r}, run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=os.path.abspath(os.sep),
        env=os.environ | {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
    )
    assert process.stdout
    if not process.stdout.read(1):
        raise OSError(errno.ENOEXEC, f"the process that decodes images does not start: {sys.executable} {program}")
    return process


@functools.cache
def sandbox_of(process_id: int) -> Sandbox:
    """Return the sandbox of a process, which a process forked from it must not share."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


def decode_in_sandbox(data: bytes) -> Image.Image:
    """Return `image_decoding.decode` of a file, within its `SECONDS` and, on Linux, its `MEMORY`."""
    return sandbox_of(os.getpid()).decode(data)
