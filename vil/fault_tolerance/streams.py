"""stdout and stderr that never hold up the program: what nobody reads is lost."""

from __future__ import annotations

import atexit
import os
import queue
import select
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, NoReturn

MOST_PENDING = 2**10  # pieces of text that wait for a reader; the oldest are dropped
PIECE = 2**12  # characters
PATIENCE = 0.5  # seconds that writers wait at once, at most, for their text to be written
SHARE = 0.01  # of the time that writers may spend waiting
LAST_WORDS = 1.0  # seconds that pending text gets when the process ends
_streams: weakref.WeakSet[BackgroundStream] = weakref.WeakSet()


class BackgroundStream:
    """A text stream whose text a thread writes, so that a full disk, a closed terminal or a stuck reader is harmless.

    A writer normally waits until its line is written, which keeps the order of lines of several streams. Waiting takes
    at most a hundredth of the time, and memory is bounded.

    Args:
        stream: sys.stdout or sys.stderr.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        self._reset()
        _streams.add(self)

    def _reset(self) -> None:
        """Start without pending text, in a forked process without a thread."""
        self._lock = threading.RLock()  # a signal handler may print while its thread does
        self._line: list[str] = []
        self._pieces: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._patience, self._asked = PATIENCE, time.monotonic()

    def write(self, text: str) -> int:
        with self._lock:
            self._line.append(text)
        if "\n" in text or "\r" in text or len(self._line) > MOST_PENDING:
            self.flush()
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand the text to the thread, and wait for as long as there is patience left."""
        with self._lock:
            text = "".join(self._line)
            self._line.clear()
            if not text:
                return
            now = time.monotonic()
            self._patience = min(PATIENCE, self._patience + SHARE * (now - self._asked))
            self._asked = now
            done = self._hand_over(text)
        done.acquire(timeout=self._patience)
        self._patience = max(0.0, self._patience - (time.monotonic() - now))

    def finish(self, seconds: float) -> None:
        """Wait until all text is written, at most for some seconds."""
        self.flush()
        if self._thread is not None:
            self._hand_over("").acquire(timeout=seconds)

    def _hand_over(self, text: str) -> Any:
        """Queue text for the thread. The lock that is returned can be acquired once the text is written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._pieces,), daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending
                self._thread = None
                self._put(text)
                return threading.Lock()
        for start in range(0, max(1, len(text)), PIECE):
            done = threading.Lock()
            done.acquire()
            self._pieces.put((text[start : start + PIECE], done))
        while self._pieces.qsize() > MOST_PENDING:
            with suppress(queue.Empty):
                self._pieces.get_nowait()[1].release()
        return done

    def _run(self, pieces: queue.SimpleQueue) -> None:
        while True:
            text, done = pieces.get()
            self._put(text)
            done.release()

    def _put(self, text: str) -> None:
        """Write text below Python's buffers, whose locks would be waited for when the interpreter ends."""
        buffer = getattr(self.stream, "buffer", None)
        with suppress(OSError, ValueError):  # a full disk, a closed terminal or file
            if buffer is None:
                self.stream.write(text)
                return
            raw = getattr(buffer, "raw", buffer)
            encoded = text.replace("\n", os.linesep).encode(self.stream.encoding or "utf-8", "backslashreplace")
            data = memoryview(encoded)
            while data:
                if (count := raw.write(data)) is None:  # another program made the pipe non-blocking, and it is full
                    select.select([], [raw], [])
                data = data[count or 0 :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def outlive_output(*names: str) -> None:
    """Let the process continue when nobody reads what it writes to sys.`names`, by default stdout and stderr.

    A stream that was closed from the start is opened on the null device. Otherwise a file would get its descriptor, and
    with it what C libraries print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # names of files need not be UTF-8
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    for name in names or ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), BackgroundStream):
            with suppress(OSError, ValueError):
                stream.flush()
            setattr(sys, name, BackgroundStream(stream))


def finish_output() -> None:
    """Give pending text a short time to be written."""
    end = time.monotonic() + LAST_WORDS
    for stream in list(_streams):
        stream.finish(max(0.0, end - time.monotonic()))


def exit_at_once(status: int) -> NoReturn:
    """End the process without cleaning up, which might wait for other processes."""
    finish_output()
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, BackgroundStream):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
    os._exit(status)


def _after_fork() -> None:
    for stream in list(_streams):
        stream._reset()


atexit.register(finish_output)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
