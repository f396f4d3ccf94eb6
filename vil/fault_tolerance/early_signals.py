"""Handlers for signals that arrive before training starts.

This module imports only the standard library, so that the handlers are installed before slow imports.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

PREEMPTED = 75  # exit status EX_TEMPFAIL: "try again later"


def exit_on_signals() -> None:
    """Exit with status 75 on SIGTERM, SIGUSR1 and SIGINT (Ctrl-C). Rank 0 prints a one-line message.

    No checkpoint is written, because the run has nothing to save yet. When the terminal closes (SIGHUP), a process
    started by torchrun exits in the same way, but any other process continues.
    """
    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        if hasattr(signal, name):  # Windows lacks SIGUSR1
            signal.signal(getattr(signal, name), _exit)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, _exit if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_IGN)


def launched_rank() -> str:
    """Return the rank that torchrun or Slurm gave to this process, or "0" if neither did."""
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"


def _exit(*_) -> None:
    if launched_rank() == "0":
        with suppress(OSError):
            if os.name == "nt" or select.select([], [2], [], 0)[1]:  # writing to a full pipe would block
                os.write(2, b"\nstopped by a signal before training started, with nothing to save\n")
    os._exit(PREEMPTED)
