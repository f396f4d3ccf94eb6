"""stdout and stderr that never block the program: text that nobody reads is dropped."""

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
from typing import Any, NamedTuple, NoReturn

PIECE = 2**12  # maximum characters that are queued as one piece
MOST_PENDING = 2**10  # maximum pieces in the queue; the oldest are dropped
MOST_WAIT = 0.5  # seconds; maximum wait of one flush
WAIT_SHARE = 0.01  # maximum share of the time that flushes may wait
EXIT_WAIT = 1.0  # seconds that pending text gets when the process exits


class Piece(NamedTuple):
    """A text in the queue of the writer thread, and the event that is set once the text is written or dropped."""

    text: str
    done: threading.Event


class BackgroundStream:
    """A text stream that is written by a thread, so that a full disk, a closed terminal or a stuck reader is harmless.

    A flush normally waits until its text is written, which keeps the order of the lines of several streams. If the
    reader is stuck, flushes wait for at most `WAIT_SHARE` of the time, and the queue is bounded.

    Args:
        stream: sys.stdout or sys.stderr.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        self.reset()
        _streams.add(self)

    def reset(self) -> None:
        """Drop pending text. A forked process must call this, because the process has no writer thread."""
        self._lock = threading.RLock()  # reentrant, because a signal handler may print while its thread prints
        self._line: list[str] = []
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._wait_budget = MOST_WAIT
        self._last_flush = time.monotonic()

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
        """Queue the text, and wait until the text is written or the budget of waiting is spent."""
        with self._lock:
            text = "".join(self._line)
            self._line.clear()
            if not text:
                return
            now = time.monotonic()
            self._wait_budget = min(MOST_WAIT, self._wait_budget + WAIT_SHARE * (now - self._last_flush))
            self._last_flush = now
            done = self._enqueue(text)

        done.wait(self._wait_budget)
        self._wait_budget = max(0.0, self._wait_budget - (time.monotonic() - now))

    def finish(self, timeout: float) -> None:
        """Wait until all text is written, or until the timeout in seconds."""
        self.flush()
        if self._writer is not None:
            self._enqueue("").wait(timeout)

    def _enqueue(self, text: str) -> threading.Event:
        """Queue a text for the writer thread, and return the event of its last piece."""
        if not self._start_writer():
            self._write_now(text)
            done = threading.Event()
            done.set()
            return done

        for start in range(0, max(1, len(text)), PIECE):
            done = threading.Event()
            self._pieces.put(Piece(text[start : start + PIECE], done))
        while self._pieces.qsize() > MOST_PENDING:
            with suppress(queue.Empty):
                self._pieces.get_nowait().done.set()
        return done

    def _start_writer(self) -> bool:
        """Start the writer thread unless it runs. Return False if the interpreter exits and starts no more threads."""
        if self._writer is not None:
            return True
        writer = threading.Thread(target=self._write_pieces, args=(self._pieces,), daemon=True)
        self._writer = writer  # before `start`, which a signal handler that prints may interrupt
        try:
            writer.start()
        except RuntimeError:
            self._writer = None
            return False
        return True

    def _write_pieces(self, pieces: queue.SimpleQueue[Piece]) -> None:
        while True:
            piece = pieces.get()
            self._write_now(piece.text)
            piece.done.set()

    def _write_now(self, text: str) -> None:
        """Write a text without Python's buffers, because the interpreter waits for the buffers' locks at exit."""
        with suppress(OSError, ValueError):  # a full disk, or a closed terminal or file
            buffer = getattr(self.stream, "buffer", None)
            if buffer is None:
                self.stream.write(text)
                return
            encoded = text.replace("\n", os.linesep).encode(self.stream.encoding or "utf-8", "backslashreplace")
            _write_all(getattr(buffer, "raw", buffer), encoded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_streams: weakref.WeakSet[BackgroundStream] = weakref.WeakSet()


def _write_all(file: Any, data: bytes) -> None:
    """Write data to an unbuffered file, also if the file is a pipe that another program made non-blocking."""
    left = memoryview(data)
    while left:
        written = file.write(left)
        if written is None:  # the pipe is full
            select.select([], [file], [])
            continue
        left = left[written:]


def outlive_output(*names: str) -> None:
    """Let the process continue when nobody reads its output.

    Args:
        names: Streams to replace by a BackgroundStream, by default "stdout" and "stderr".
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # file names need not be UTF-8

    for name in names or ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, BackgroundStream):
            continue
        with suppress(OSError, ValueError):
            stream.flush()
        setattr(sys, name, BackgroundStream(stream))


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr on the null device if the process was started without them.

    Otherwise the next file that is opened gets the free descriptor, and C libraries print into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def finish_output() -> None:
    """Give pending text of all streams a short time to be written."""
    end = time.monotonic() + EXIT_WAIT
    for stream in list(_streams):
        stream.finish(max(0.0, end - time.monotonic()))


def exit_at_once(status: int) -> NoReturn:
    """Exit without cleaning up, because the cleanup might wait for other processes."""
    finish_output()
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, BackgroundStream):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
    os._exit(status)


def _reset_streams() -> None:
    for stream in list(_streams):
        stream.reset()


atexit.register(finish_output)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_streams)
