"""Timing of checkpoints: at intervals, and when a signal requests the run to stop."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from ..data.sources.images import UnreadableSplitError
from ..distributed import is_rank0
from ..fault_tolerance.machine_errors import MachineError
from ..fault_tolerance.signals import SCHEDULER_SIGNALS, write_now

_logger = logging.getLogger(__name__)
T = TypeVar("T")

PREEMPTED = 75  # exit status EX_TEMPFAIL: stopped by a signal with everything saved; "try again later"
SIGNALS = (*SCHEDULER_SIGNALS, signal.SIGINT)


class StoppedError(RuntimeError):
    """A run stopped after its checkpoint was written, because images could not be loaded."""

    status = 1  # of the process


class PreemptedError(StoppedError):
    """A signal stopped the run after its checkpoint was written."""

    status = PREEMPTED


class CheckpointTimer:
    """Tells all ranks of a run consistently that a checkpoint is due, or that the run must stop.

    SIGTERM and SIGUSR1, the signals of cluster schedulers, and SIGINT (Ctrl-C) only set `signalled`. A second SIGINT
    terminates the process at once.

    Args:
        interval: '30m' for minutes, '500' for optimizer steps, None for no interval (see `Config.checkpoint_interval`).
        step: Number of optimizer steps done so far.
    """

    def __init__(self, interval: str | None, step: int):
        number = float("inf") if interval is None else int(interval.rstrip("m"))
        in_minutes = interval is not None and interval.endswith("m")
        self.seconds = 60 * number if in_minutes else float("inf")
        self.steps = float("inf") if in_minutes else number
        self.stop = self.signalled = False
        self.failure: Exception | None = None  # why this process could not load images
        self.failed = False  # whether a process could not
        self._restart(step)
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def due(self, step: int) -> bool:
        """Return whether to write a checkpoint now, after `step` steps; `stop` then says whether to stop as well.

        All ranks must call this after the same steps.
        """
        late = time.monotonic() - self._time >= self.seconds or step - self._step >= self.steps
        flags = torch.tensor([late, self.signalled, self.failure is not None], dtype=torch.uint8)
        if dist.is_initialized():  # on the CPU, so that no rank waits for a GPU
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        late, signalled, self.failed = (bool(flag) for flag in flags)
        self.stop = signalled or self.failed
        if late:
            self._restart(step)
        return late or self.stop

    def watched(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches until they cannot be loaded, which becomes the `failure` and is logged."""
        try:
            yield from batches
        except (MachineError, UnreadableSplitError) as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Log why this process cannot load images. All processes stop at the next `due` or `all_loaded`."""
        self.failure = error
        _logger.error("error: %s", error)

    def all_loaded(self) -> Callable[[], bool]:
        """Begin to tell all processes whether this one has loaded its images of a step.

        Returns:
            A function that returns whether all processes have. It waits for the slowest process.
        """
        flag = torch.tensor([self.failure is not None], dtype=torch.uint8)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True) if dist.is_initialized() else None

        def wait() -> bool:
            if work:
                work.wait()
            self.failed = bool(flag)
            return not self.failed

        return wait

    def give_back(self) -> None:
        """Restore the previous signal handlers; a signal received meanwhile stays recorded."""
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _restart(self, step: int) -> None:
        self._time, self._step = time.monotonic(), step

    def _note(self, number: int, *_) -> None:
        self.signalled = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if is_rank0():
                write_now("\nfinishing the step and writing a checkpoint; Ctrl-C again ends the run without\n")
