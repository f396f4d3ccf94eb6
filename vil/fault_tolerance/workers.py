"""One-line errors for data-loader workers that have failed or died."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError
from .machine_errors import MachineError, is_machine_error, remedy_for


class LostWorkerError(ConfigError):
    """A data-loader worker has died. The message has a remedy."""

    def __init__(self, error: RuntimeError):
        reason = str(error).split(". ")[0].strip()
        remedy = "the worker may have run out of memory; reduce --workers"
        if "Bus error" in reason:
            remedy = "/dev/shm is full; start the container with --shm-size=8g, or set --workers 0"
        super().__init__(f"{reason}: {remedy}")


@contextmanager
def worker_errors_explained() -> Iterator[None]:
    """Replace I/O errors, and PyTorch's errors about data-loader workers, by one-line errors."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        explained = _explain(error)
        if explained is None:
            raise
        raise explained from None


def _explain(error: OSError | RuntimeError) -> ConfigError | None:
    """Return the one-line error for `error`, or None if `error` is neither an I/O error nor about a worker."""
    if isinstance(error, OSError):
        # PyTorch re-raises a worker's OSError without its errno
        is_machines = is_machine_error(error) or "[Errno " in str(error)
        reason = str(error).rpartition("Error: ")[2].strip()
        return MachineError(f"cannot read the data set: {reason}") if is_machines else None
    if isinstance(error.__cause__, LostWorkerError):  # PyTorch wraps the error of `explain_lost_workers`
        return error.__cause__
    if "DataLoader worker" in str(error):
        return LostWorkerError(error)
    if "DataLoader timed out" in str(error):  # a disk or mount that does not respond can cause a timeout
        return MachineError(f"cannot read the data set: {error}. To continue, {remedy_for(error)}")
    return None


def explain_lost_workers() -> None:
    """Wrap PyTorch's SIGCHLD handler so that it raises a LostWorkerError when a worker has died."""
    if not hasattr(signal, "SIGCHLD"):  # Windows has no SIGCHLD, so PyTorch polls its workers
        return
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set signal handlers
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or getattr(handler, "explains_lost_workers", False):
        return

    def handle(*args) -> None:
        with worker_errors_explained():
            handler(*args)

    handle.explains_lost_workers = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handle)
