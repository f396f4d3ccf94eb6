"""End of a process with its parent process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

from .signals import SCHEDULER_SIGNALS

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal to send when the parent dies
INTERVAL = 5  # seconds between two checks whether the parent is alive


def terminate_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """On Linux, send this process a signal when its parent process dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def obey_only_parent() -> None:
    """Ignore signals from schedulers in a loader's worker, so that it lives until training has written its checkpoint.

    The worker still exits when its parent sends SIGTERM or is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals all processes of a terminal
    if not hasattr(signal, "sigtimedwait"):  # macOS and Windows cannot identify the sender, so SIGTERM ends the worker
        return

    parent: Any = multiprocessing.parent_process()  # every worker has a parent

    def wait_for_signals() -> None:
        while True:
            received = signal.sigtimedwait(SCHEDULER_SIGNALS, INTERVAL)
            if received is None:
                if not parent.is_alive():  # PyTorch's watchdog misses a parent that dies while the worker starts
                    os._exit(1)
            elif received.si_signo == signal.SIGTERM and received.si_pid == parent.pid:
                os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_SIGNALS)
    threading.Thread(target=wait_for_signals, daemon=True).start()
