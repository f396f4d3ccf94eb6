"""Errors about loader workers that have died."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError
from .machine_errors import MachineError, is_machine_error, remedy_for


class LostWorkerError(ConfigError):
    """A worker of a loader has died."""

    def __init__(self, error: RuntimeError):
        reason = str(error).split(". ")[0].strip()
        advice = "it may have run out of memory, of which fewer --workers need less"
        if "Bus error" in reason:
            advice = "/dev/shm is full: a container gets more with --shm-size=8g; --workers 0 needs none"
        super().__init__(f"{reason}: {advice}")


@contextmanager
def worker_errors_explained() -> Iterator[None]:
    """Replace PyTorch's error about a worker by one with a remedy."""
    try:
        yield
    except OSError as error:  # PyTorch raises an error of a worker again, without its number
        if is_machine_error(error) or "[Errno " in str(error):
            raise MachineError(f"cannot read the data set: {str(error).rpartition('Error: ')[2].strip()}") from None
        raise
    except RuntimeError as error:
        if isinstance(error.__cause__, LostWorkerError):  # PyTorch has wrapped this error
            raise error.__cause__ from None
        if "DataLoader worker" in str(error):
            raise LostWorkerError(error) from None
        if "DataLoader timed out" in str(error):  # workers wait for a disk or a mount that does not answer
            raise MachineError(f"cannot read the data set: {error}. To continue, {remedy_for(error)}") from None
        raise


def explain_lost_workers() -> None:
    """Make PyTorch's SIGCHLD handler, which may run anywhere in the training loop, raise a LostWorkerError."""
    if not hasattr(signal, "SIGCHLD"):  # on Windows, PyTorch polls its workers
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return
    if getattr(handler, "explains_lost_workers", False):
        return

    def handle(*args) -> None:
        with worker_errors_explained():
            handler(*args)

    handle.explains_lost_workers = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handle)
