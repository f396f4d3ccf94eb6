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
        remedy = "it may have run out of memory, of which fewer --workers need less"
        if "Bus error" in reason:
            remedy = "/dev/shm is full: a container gets more with --shm-size=8g; --workers 0 needs none"
        super().__init__(f"{reason}: {remedy}")


@contextmanager
def worker_errors_explained() -> Iterator[None]:
    """Replace PyTorch's error about a worker by one with a remedy."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        explained = _explain(error)
        if explained is None:
            raise
        raise explained from None


def _explain(error: OSError | RuntimeError) -> ConfigError | None:
    """Return an error with a remedy, or None for errors that are not about a worker."""
    if isinstance(error, OSError):
        # PyTorch raises an error of a worker again, without its number
        is_machines = is_machine_error(error) or "[Errno " in str(error)
        reason = str(error).rpartition("Error: ")[2].strip()
        return MachineError(f"cannot read the data set: {reason}") if is_machines else None
    if isinstance(error.__cause__, LostWorkerError):  # PyTorch has wrapped the error of `explain_lost_workers`
        return error.__cause__
    if "DataLoader worker" in str(error):
        return LostWorkerError(error)
    if "DataLoader timed out" in str(error):  # workers wait for a disk or a mount that does not answer
        return MachineError(f"cannot read the data set: {error}. To continue, {remedy_for(error)}")
    return None


def explain_lost_workers() -> None:
    """Make PyTorch's SIGCHLD handler, which may run anywhere in the training loop, raise a LostWorkerError."""
    if not hasattr(signal, "SIGCHLD"):  # on Windows, PyTorch polls its workers
        return
    if threading.current_thread() is not threading.main_thread():  # Python sets signal handlers only there
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or getattr(handler, "explains_lost_workers", False):
        return

    def handle(*args) -> None:
        with worker_errors_explained():
            handler(*args)

    handle.explains_lost_workers = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handle)
