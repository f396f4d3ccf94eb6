"""Signal handling of a run: which signals schedulers send, and in which thread they are handled."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# signals of cluster schedulers, and SIGHUP, which torchrun forwards when its terminal closes; Windows has only SIGTERM
NAMES = ("SIGTERM", "SIGUSR1", *(["SIGHUP"] if "TORCHELASTIC_RUN_ID" in os.environ else []))
SCHEDULER_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


@contextmanager
def signals_handled_in_thread() -> Iterator[None]:
    """Run signal handlers in another thread, because the main thread cannot run them while it waits in PyTorch."""
    # signal.set_wakeup_fd is not available here
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    reader, writer = os.pipe()

    def handle_signals() -> None:
        while number := os.read(reader, 1):
            handler = signal.getsignal(number[0])
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number[0], None)

    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=handle_signals)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)
        thread.join()
        os.close(reader)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals of schedulers and Ctrl-C for threads and processes that start inside."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return

    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (*SCHEDULER_SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def write_now(text: str) -> None:
    """Write to stderr from a signal handler, unless that would block."""
    with suppress(OSError, ValueError):
        if os.name == "nt" or select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())
