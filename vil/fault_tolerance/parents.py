"""Termination of a process when its parent process dies."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

from .signals import SCHEDULER_SIGNALS

PR_SET_PDEATHSIG = 1  # prctl option of <linux/prctl.h> that sets the signal to receive when the parent dies
INTERVAL = 5  # seconds between checks that the parent is alive


def terminate_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """On Linux, make the kernel send the signal `by` to this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def obey_only_parent() -> None:
    """Ignore signals from cluster schedulers in a data-loader worker.

    The worker therefore keeps loading data until the training process has written its checkpoint. The worker still
    exits when its parent process sends SIGTERM or dies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C sends SIGINT to all foreground processes of a terminal
    if not hasattr(signal, "sigtimedwait"):  # on macOS and Windows, SIGTERM always ends the worker
        return

    parent: Any = multiprocessing.parent_process()  # `parent_process` never returns None in a worker

    def wait_for_signals() -> None:
        while True:
            received = signal.sigtimedwait(SCHEDULER_SIGNALS, INTERVAL)
            if received is None:
                if not parent.is_alive():  # PyTorch does not notice a parent that dies while its worker starts
                    os._exit(1)
            elif received.si_signo == signal.SIGTERM and received.si_pid == parent.pid:
                os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_SIGNALS)
    threading.Thread(target=wait_for_signals, daemon=True).start()
