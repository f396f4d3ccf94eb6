"""Signals that end a run before it trains. Only the standard library is imported, so that this takes no time."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

PREEMPTED = 75  # exit status EX_TEMPFAIL: "try again later"


def exit_on_signals() -> None:
    """Let SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) exit with status 75 and one line, because there is nothing to save yet.

    When its terminal closes, a process of torchrun exits in the same way; a single process continues.
    """
    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        if hasattr(signal, name):  # Windows lacks SIGUSR1
            signal.signal(getattr(signal, name), _exit)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, _exit if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_IGN)


def _exit(*_) -> None:
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            if os.name == "nt" or select.select([], [2], [], 0)[1]:  # a full pipe without a reader would block
                os.write(2, b"\nstopped by a signal with nothing to save\n")
    os._exit(PREEMPTED)
