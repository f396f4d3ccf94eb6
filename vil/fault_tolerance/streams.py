"""Replacements for stdout and stderr that block the program only briefly. Text that cannot be written is dropped."""

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

PIECE = 2**12  # maximum number of characters of a queued piece of text
MOST_PENDING = 2**10  # maximum number of queued pieces of text; if there are more, the oldest pieces are dropped
MOST_WAIT = 0.5  # seconds; maximum time that a call of `flush` waits
WAIT_SHARE = 0.01  # share of the program's run time that calls of `flush` may wait, in addition to MOST_WAIT
EXIT_WAIT = 1.0  # seconds that an exiting process waits at most for queued text, after a call of `flush`


class Piece(NamedTuple):
    """Text in the queue of the writer thread. The event `done` is set once the text is written or dropped."""

    text: str
    done: threading.Event


class BackgroundStream:
    """Text stream with a writer thread, so that a full disk or a stuck reader cannot stop the program.

    A flush normally waits until the text is written, which keeps lines of stdout and stderr in order. If the reader of
    the stream is stuck, flushes wait for at most `MOST_WAIT` seconds plus `WAIT_SHARE` of the run time, and the queue
    drops its oldest text.

    Args:
        stream: sys.stdout or sys.stderr.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        self.reset()
        _streams.add(self)

    def reset(self) -> None:
        """Drop pending text. A forked process must call `reset`, because threads do not survive a fork."""
        self._lock = threading.RLock()  # reentrant, because a signal handler may print while it interrupts a print
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
        """Queue the buffered text, and wait until the text is written or the wait budget is spent."""
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
        """Call `flush`, then wait at most `timeout` seconds until all text is written."""
        self.flush()
        if self._writer is not None:
            self._enqueue("").wait(timeout)

    def _enqueue(self, text: str) -> threading.Event:
        """Queue a text for the writer thread, and return the event that is set once its end is written or dropped."""
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
        """Start the writer thread if needed. Return False if no thread can start, as when the interpreter exits."""
        if self._writer is not None:
            return True
        writer = threading.Thread(target=self._write_pieces, args=(self._pieces,), daemon=True)
        self._writer = writer  # a signal handler that prints during `start` must not start a second thread
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
        """Write a text to the unbuffered file, because the interpreter waits for the buffers' locks at exit."""
        with suppress(OSError, ValueError):  # drop the text if the disk is full, or the terminal or file is closed
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
    """Write all data to an unbuffered file, even if the file is a non-blocking pipe."""
    left = memoryview(data)
    while left:
        written = file.write(left)
        if written is None:  # the pipe is full
            select.select([], [file], [])
            continue
        left = left[written:]


def outlive_output(*names: str) -> None:
    """Let the process continue when its output cannot be written, for example after the terminal closes.

    Args:
        names: Names of the streams to replace by a BackgroundStream; "stdout" and "stderr" if no names are given.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # file names can contain bytes that are not UTF-8

    for name in names or ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, BackgroundStream):
            continue
        with suppress(OSError, ValueError):
            stream.flush()
        setattr(sys, name, BackgroundStream(stream))


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr on the null device if the process was started without them.

    Otherwise the next opened file would get the descriptor of stdout or stderr, and C libraries would print into that
    file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def finish_output() -> None:
    """Flush all streams, and then wait about `EXIT_WAIT` seconds at most until their pending text is written."""
    end = time.monotonic() + EXIT_WAIT
    for stream in list(_streams):
        stream.finish(max(0.0, end - time.monotonic()))


def exit_at_once(status: int) -> NoReturn:
    """Write pending output and exit without cleanup, because cleanup might wait for other processes."""
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
