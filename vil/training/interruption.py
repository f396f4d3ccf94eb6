"""Interruption of a run: by signals, by images that cannot be loaded, and to write checkpoints."""

from __future__ import annotations

import logging
import signal
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
    """A run stopped after its checkpoint was written, because images could not be loaded."""

    status = 1  # of the process


class PreemptedError(StoppedError):
    """A signal stopped the run after its checkpoint was written."""

    status = PREEMPTED


class SignalWatch:
    """Record the signals of cluster schedulers (SIGTERM, SIGUSR1) and SIGINT (Ctrl-C) instead of ending the process.

    A second SIGINT terminates the process at once.

    Attributes:
        received: Whether a signal has been received.
    """

    def __init__(self):
        self.received = False
        self.handlers_before = {number: signal.signal(number, self._record) for number in SIGNALS}

    def _record(self, number: int, *_) -> None:
        self.received = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if is_rank0():
                write_now("\nfinishing the step and writing a checkpoint; Ctrl-C again ends the run without\n")

    def restore_handlers(self) -> None:
        """Restore the previous signal handlers; a signal received meanwhile stays recorded."""
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class LoadingWatch:
    """Record that this process cannot load images, and share it with all processes.

    Attributes:
        failure: Why this process cannot load images, or None.
    """

    def __init__(self):
        self.failure: Exception | None = None

    def until_failure(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches until they cannot be loaded."""
        try:
            yield from batches
        except (MachineError, UnreadableSplitError) as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Record and log why this process cannot load images."""
        self.failure = error
        _logger.error("error: %s", error)

    def begin_check(self) -> Callable[[], bool]:
        """Begin to tell all processes whether this one has loaded its images of a step.

        Returns:
            A function that returns whether all processes have. It waits for the slowest process.
        """
        has_failed = torch.tensor([self.failure is not None], dtype=torch.uint8)
        work = dist.all_reduce(has_failed, dist.ReduceOp.MAX, async_op=True) if dist.is_initialized() else None

        def wait() -> bool:
            if work:
                work.wait()
            return not has_failed

        return wait

    def report_failure(self) -> None:
        """Tell the other processes, which wait in `begin_check` of their step, that this one cannot load images."""
        self.begin_check()()


@dataclass(frozen=True)
class Decision:
    """What all processes do after a step: write a checkpoint, and stop if a signal came or images cannot be loaded."""

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
        """Stop the run after its checkpoint was written; `saved` is a sentence about the checkpoint.

        Raises:
            StoppedError: Images cannot be loaded.
            PreemptedError: A signal came.
        """
        if self.cannot_load:
            raise StoppedError(f"stopped because images could not be read: {saved}")
        if self.is_signalled:
            raise PreemptedError(f"stopped by a signal: {saved}")


class CheckpointTimer:
    """Decide for all processes when to write a checkpoint, and whether to stop.

    Args:
        interval: '30m' for minutes, '500' for optimizer steps, None for no interval (see `Config.checkpoint_interval`).
        step: Number of optimizer steps done so far.
        signals: Signals that stop the run.
        loading: Failures that stop the run.
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
        """Return what all processes do after `step` steps. All of them must call this after the same steps."""
        seconds = time.monotonic() - self.last_time
        is_due = seconds >= self.seconds or step - self.last_step >= self.steps
        flags = torch.tensor([is_due, self.signals.received, self.loading.failure is not None], dtype=torch.uint8)
        if dist.is_initialized():  # on the CPU, so that no rank waits for a GPU
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        decision = Decision(*(bool(flag) for flag in flags))
        if decision.is_due:
            self._restart(step)
        return decision
