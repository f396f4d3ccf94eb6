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

from . import sandbox_server
from .image_decoding import MOST_PIXELS, UnfitImageError
from .sandbox_server import REPLY

SIGKILL = getattr(signal, "SIGKILL", 0)  # Windows has no signals


class LateImageError(UnfitImageError):
    """An image was not decoded in time."""


def decode_in_sandbox(data: bytes) -> Image.Image:
    """Decode a file in this process's sandbox (see `Sandbox.decode`)."""
    return sandbox_of(os.getpid()).decode(data)


@functools.cache
def sandbox_of(process_id: int) -> Sandbox:
    """Return the sandbox of a process. A forked process gets another sandbox than its parent."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


class Sandbox:
    """A process that decodes one file at a time.

    The process starts with the first file, and is restarted after a file that ended the process.
    """

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
        """Return the reply of the process: the image's size and pixels, or a size of 0 and the decoder's error."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
        process = self._process

        start = time.monotonic()
        timeout = threading.Timer(sandbox_server.SECONDS, process.kill)
        timeout.start()
        try:
            reply = _exchange(process, data)
        finally:
            timeout.cancel()
            timeout.join()

        if reply is not None:
            return reply
        if time.monotonic() - start >= sandbox_server.SECONDS:
            raise LateImageError(f"not decoded in {sandbox_server.SECONDS} s")
        status = process.wait()
        if status == -SIGKILL:  # not by the sandbox's own limit of memory, which makes allocations fail
            raise OSError(errno.ENOMEM, "the process that decodes images was killed, probably for lack of memory")
        raise UnfitImageError(f"its decoder ended with status {status}")

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # ignore data that the process has not read
                if pipe:
                    pipe.close()
        self._process = None


def _exchange(process: subprocess.Popen, data: bytes) -> tuple[tuple[int, int], bytes] | None:
    """Send a file to the process and return the reply, or None if the process ended before its reply was complete."""
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()
    except BrokenPipeError:  # the file can be too large for the memory of the process
        return None

    header = process.stdout.read(REPLY.size)
    if len(header) < REPLY.size:
        return None
    count, width, height = REPLY.unpack(header)
    content = process.stdout.read(min(count, 3 * MOST_PIXELS))
    return ((width, height), content) if len(content) == count > 0 else None


def _start() -> subprocess.Popen:
    """Start the process with this process's Pillow and NumPy.

    The interpreter is isolated (-I, -S) and runs in the root folder. Otherwise the interpreter would import modules
    from the current folder, which may hold untrusted files. `security` is a top-level package of the process, because
    importing `vil` would import PyTorch.
    """
    # folders that hold the packages, after those of the standard library
    folders = [str(Path(str(file)).absolute().parents[1]) for file in (__file__, PIL.__file__, np.__file__)]
    code = (
        f"import sys; sys.path += {folders!r}; from security.sandbox_server import serve; "
        "serve(sys.stdin.buffer, sys.stdout.buffer)"
    )
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
        program = f"{sys.executable} {sandbox_server.__file__}"
        raise OSError(errno.ENOEXEC, f"the process that decodes images does not start: {program}")
    return process
