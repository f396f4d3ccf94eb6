"""Checkpoints at regular intervals, on signals, and when images cannot be loaded."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ..data.sources.images import UnreadableSplitError
from ..distributed import is_rank0
from ..fault_tolerance.early_signals import PREEMPTED
from ..fault_tolerance.machine_errors import MachineError
from ..fault_tolerance.signals import SCHEDULER_SIGNALS, write_now

_logger = logging.getLogger(__name__)
T = TypeVar("T")

SIGNALS = (*SCHEDULER_SIGNALS, signal.SIGINT)


class StoppedError(RuntimeError):
    """Raised if images cannot be loaded, after writing a checkpoint of any finished steps."""

    status = 1  # exit status of the training process


class PreemptedError(StoppedError):
    """Raised if a signal was received, after writing a checkpoint of any finished steps."""

    status = PREEMPTED


class SignalWatch:
    """Records SIGTERM and SIGUSR1 from cluster schedulers, SIGINT (Ctrl-C), and SIGHUP from torchrun.

    The recorded signals do not end the process.

    A second SIGINT terminates the process at once, or raises KeyboardInterrupt if SIGINT did so before the watch was
    created. A watch records signals only if the main thread has created the watch.

    Attributes:
        received: Whether a signal has been received.
    """

    def __init__(self):
        self.received = False
        watched = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self.handlers_before = {number: signal.signal(number, self._record) for number in watched}

    def _record(self, number: int, *_) -> None:
        self.received = True
        if number == signal.SIGINT:
            raises = self.handlers_before[signal.SIGINT] is signal.default_int_handler
            signal.signal(signal.SIGINT, signal.default_int_handler if raises else signal.SIG_DFL)
            if is_rank0():
                write_now("\nfinishing the step and writing a checkpoint; Ctrl-C again quits without a checkpoint\n")

    def restore_handlers(self) -> None:
        """Restore the previous signal handlers. `received` keeps its value."""
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class LoadingWatch:
    """Records that this process cannot load images, and tells all ranks.

    Attributes:
        failure: Error raised when loading images in this process, or None.
    """

    def __init__(self):
        self.failure: Exception | None = None

    def until_failure(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches. If loading fails, store and log the error, and end the iteration without raising an error."""
        try:
            yield from batches
        except (MachineError, UnreadableSplitError) as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Store and log an error raised when loading images."""
        self.failure = error
        _logger.error("error: %s", error)

    def begin_check(self) -> Callable[[], bool]:
        """Start an asynchronous check of whether loading images failed on any rank.

        Returns:
            A function that waits for all ranks and returns True if loading succeeded on every rank.
        """
        has_failed = torch.tensor([self.failure is not None], dtype=torch.uint8)
        work = dist.all_reduce(has_failed, dist.ReduceOp.MAX, async_op=True) if dist.is_initialized() else None

        def wait() -> bool:
            if work:
                work.wait()
            return not has_failed

        return wait

    def report_failure(self) -> None:
        """Tell the other ranks, which wait in an all-reduce, that loading images failed on this rank."""
        self.begin_check()()


@dataclass(frozen=True)
class Decision:
    """Decision of all ranks after a step: whether to write a checkpoint, and whether to stop.

    Attributes:
        is_due: Whether the checkpoint interval has passed.
        is_signalled: Whether a rank received a signal.
        cannot_load: Whether a rank failed to load images.
    """

    is_due: bool = False
    is_signalled: bool = False
    cannot_load: bool = False

    @property
    def stops(self) -> bool:
        return self.is_signalled or self.cannot_load

    @property
    def writes_checkpoint(self) -> bool:
        return self.is_due or self.stops

    def raise_if_stopping(self, saved: str) -> None:
        """Raise if the run must stop. `saved` is a message about the checkpoint that was just written.

        Raises:
            StoppedError: Images cannot be loaded.
            PreemptedError: A signal was received.
        """
        if self.cannot_load:
            raise StoppedError(f"stopped because images could not be read: {saved}")
        if self.is_signalled:
            raise PreemptedError(f"stopped by a signal: {saved}")


class CheckpointTimer:
    """Timer that decides for all ranks when to write a checkpoint and whether to stop.

    Args:
        interval: Checkpoint interval, in minutes ('30m') or optimizer steps ('500'); None disables the interval.
        step: Number of optimizer steps finished so far.
        signals: Watch for signals, which stop the run.
        loading: Watch for failures to load images, which stop the run.
    """

    def __init__(self, interval: str | None, step: int, signals: SignalWatch, loading: LoadingWatch):
        self.seconds = self.steps = float("inf")
        if interval is not None and interval.endswith("m"):
            self.seconds = 60 * int(interval.removesuffix("m"))
        elif interval is not None:
            self.steps = int(interval)
        self.signals = signals
        self.loading = loading
        self._restart(step)

    def _restart(self, step: int) -> None:
        self.last_time = time.monotonic()
        self.last_step = step

    def decide(self, step: int) -> Decision:
        """Return the `Decision` of all ranks: whether a checkpoint is due, and whether a rank must stop the run.

        A rank stops the run if the rank has received a signal or cannot load images.

        All ranks must call this method after the same step.
        """
        seconds = time.monotonic() - self.last_time
        is_due = seconds >= self.seconds or step - self.last_step >= self.steps
        flags = torch.tensor([is_due, self.signals.received, self.loading.failure is not None], dtype=torch.uint8)
        if dist.is_initialized():  # all-reduce CPU tensors, so that no rank waits for a GPU
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        decision = Decision(*(bool(flag) for flag in flags))
        if decision.is_due:
            self._restart(step)
        return decision
