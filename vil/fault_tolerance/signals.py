"""Signals that cluster schedulers send to a run, and the thread that handles these signals."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Schedulers send SIGTERM or SIGUSR1. torchrun forwards SIGHUP if its terminal closes. Windows lacks SIGUSR1 and SIGHUP.
NAMES = ("SIGTERM", "SIGUSR1", *(["SIGHUP"] if "TORCHELASTIC_RUN_ID" in os.environ else []))
SCHEDULER_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


@contextmanager
def signals_handled_in_thread() -> Iterator[None]:
    """Run signal handlers in a second thread as well, so that PyTorch calls in the main thread do not delay them."""
    # signal.set_wakeup_fd needs the main thread, and os.set_blocking fails for pipes on Windows before Python 3.12
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
def handlers_restored() -> Iterator[None]:
    """Restore the handlers of schedulers' signals and Ctrl-C on exit. Outside the main thread, do nothing."""
    handlers = {number: signal.getsignal(number) for number in (*SCHEDULER_SIGNALS, signal.SIGINT)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block schedulers' signals and Ctrl-C for threads and processes that start inside the `with` block."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows has no pthread_sigmask
        yield
        return

    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (*SCHEDULER_SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def write_now(text: str) -> None:
    """Write a text to stderr from a signal handler, or drop the text if writing would block."""
    with suppress(OSError, ValueError):
        if os.name == "nt" or select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())
