"""Sandbox: a process with limits on time and memory that decodes images of unpredictable cost."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib.util
import os
import shlex
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
from .sandbox_server import REPLY, REQUEST

SIGKILL = getattr(signal, "SIGKILL", 0)  # Windows has no SIGKILL


class LateImageError(UnfitImageError):
    """Decoding an image exceeded the timeout."""


def decode_in_sandbox(data: bytes, is_upright: bool = False) -> Image.Image:
    """Decode an image file in the sandbox of this process (see `Sandbox.decode`)."""
    return sandbox_of(os.getpid()).decode(data, is_upright)


@functools.cache
def sandbox_of(process_id: int) -> Sandbox:
    """Return the sandbox of a process. A forked process does not share the sandbox of its parent."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


class Sandbox:
    """Process that decodes one image file at a time.

    The process starts with the first file, and restarts after a file that ended the process or exceeded the timeout.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def decode(self, data: bytes, is_upright: bool = False) -> Image.Image:
        """Return the first image of a file as 8-bit RGB, rotated by its EXIF orientation if `is_upright`.

        Raises:
            LateImageError: Decoding exceeded the timeout.
            UnfitImageError: The file is not an image, is damaged or exceeds a limit. The message contains the decoder's
                error or exit status.
            OSError: The sandbox process does not start, or was killed, probably because memory ran out.
        """
        with self._lock:
            try:
                size, content = self._request(data, is_upright)
            except BaseException:
                self.close()
                raise
        if 0 in size:
            raise UnfitImageError(content.decode())
        return Image.frombytes("RGB", size, content)

    def _request(self, data: bytes, is_upright: bool) -> tuple[tuple[int, int], bytes]:
        """Decode the image in `data`. Return the image's size and pixels, or the size (0, 0) and an error message."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
        process = self._process

        start = time.monotonic()
        timeout = threading.Timer(sandbox_server.SECONDS, process.kill)
        timeout.start()
        try:
            reply = _exchange(process, data, is_upright)
        finally:
            timeout.cancel()
            timeout.join()

        if reply is not None:
            return reply
        if time.monotonic() - start >= sandbox_server.SECONDS:
            raise LateImageError(f"image was not decoded in {sandbox_server.SECONDS} s")
        status = process.wait()
        if status == -SIGKILL:  # the sandbox's memory limit makes allocations fail, and does not send SIGKILL
            raise OSError(errno.ENOMEM, "the image decoding process was killed, probably because memory ran out")
        raise UnfitImageError(f"image decoder crashed with exit status {status}; the file may be damaged")

    def close(self) -> None:
        """Kill the sandbox process if it is running."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unsent data in the pipe cannot be written anymore
                if pipe:
                    pipe.close()
        self._process = None


def _exchange(process: subprocess.Popen, data: bytes, is_upright: bool) -> tuple[tuple[int, int], bytes] | None:
    """Send a file to the process and return its reply, or None if the process exits before sending a complete reply."""
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(REQUEST.pack(len(data), is_upright) + data)
        process.stdin.flush()
    except BrokenPipeError:  # the process exited, for example because the file exceeds its memory limit
        return None

    header = process.stdout.read(REPLY.size)
    if len(header) < REPLY.size:
        return None
    count, width, height = REPLY.unpack(header)
    content = process.stdout.read(min(count, 3 * MOST_PIXELS))
    return ((width, height), content) if len(content) == count > 0 else None


def _start() -> subprocess.Popen:
    """Start the sandbox process with the Pillow, pillow-heif and NumPy installations of this process.

    The interpreter runs isolated (-I, -S) and in the root folder, so that it imports no modules from the current
    folder, which may contain untrusted files. The process imports `security` as a top-level package, because importing
    `vil` would import PyTorch.
    """
    # folders of the packages, searched after the standard library
    heif = importlib.util.find_spec("pillow_heif")
    files = [__file__, PIL.__file__, np.__file__, *([heif.origin] if heif else [])]
    folders = [*dict.fromkeys(str(Path(str(file)).absolute().parents[1]) for file in files)]
    code = (
        f"import sys; sys.path += {folders!r}; from security.sandbox_server import serve; "
        "serve(sys.stdin.buffer, sys.stdout.buffer)"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=os.path.abspath(os.sep),
        env=os.environ | {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
    )
    assert process.stdout
    if not process.stdout.read(1):
        raise OSError(errno.ENOEXEC, f"the image decoding process does not start; try to run: {shlex.join(command)}")
    return process
