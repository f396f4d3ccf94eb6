"""When a run writes checkpoints: at intervals, and when a signal says that it is to end for now."""

from __future__ import annotations

import signal
import time

import torch
import torch.distributed as dist

from ..processes import SCHEDULERS_SIGNALS, is_first_process
from ..streams import write_now

PREEMPTED = 75  # exit status, EX_TEMPFAIL: stopped by a signal, everything saved; "try again later"
SIGNALS = (*SCHEDULERS_SIGNALS, signal.SIGINT)


class PreemptedError(RuntimeError):
    """A signal stopped the run, after its checkpoint was written."""


class CheckpointTimer:
    """Tells all processes of a run alike that a checkpoint is due, or that it is time to stop.

    SIGTERM and SIGUSR1, the notices of cluster schedulers, and SIGINT (Ctrl-C) set `signalled`; nothing else happens at
    that moment. A second SIGINT ends the process at once.

    Args:
        interval: '30m' for minutes, '500' for optimizer steps, None for none (see `Config.checkpoint_interval`).
        step: The optimizer steps done so far.
    """

    def __init__(self, interval: str | None, step: int):
        number = float("inf") if interval is None else int(interval.rstrip("m"))
        in_minutes = interval is not None and interval.endswith("m")
        self.seconds = 60 * number if in_minutes else float("inf")
        self.steps = float("inf") if in_minutes else number
        self.stop = self.signalled = False
        self._restart(step)
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def due(self, step: int) -> bool:
        """Whether to write a checkpoint now, after `step` steps; then `stop` says whether to stop as well.

        All processes must call it after the same steps.
        """
        late = time.monotonic() - self._time >= self.seconds or step - self._step >= self.steps
        flags = torch.tensor([late, self.signalled], dtype=torch.uint8)
        if dist.is_initialized():  # on the CPU, so that no one waits for a GPU
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        late, self.stop = (bool(flag) for flag in flags)
        if late:
            self._restart(step)
        return late or self.stop

    def give_back(self) -> None:
        """Has signals go where they went before; one that came meanwhile stays noted."""
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _restart(self, step: int) -> None:
        self._time, self._step = time.monotonic(), step

    def _note(self, number: int, *_) -> None:
        self.signalled = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if is_first_process():
                write_now("\nfinishing the step and writing a checkpoint; Ctrl-C again ends the run without\n")
