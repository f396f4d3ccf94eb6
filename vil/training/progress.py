"""Progress of a run: a bar in the terminal or lines in a log, one line per epoch, and the report files."""

from __future__ import annotations

import logging
import time
from typing import Any

from tqdm import tqdm

from .best import BestCheckpoint
from .interruption import StoppedError
from .phases import Phase
from .run_info import RunInfo
from .summary import Reporter, epoch_line

_logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 60  # minimum seconds between progress lines if there is no terminal


class Progress:
    """Progress bar over the images of a phase, and a report after each epoch. Only rank 0 prints and writes files.

    If stderr is not a terminal, a printed line about every minute replaces the bar.

    Args:
        run: Information about the run, such as the folder and options.
        rank: Rank of this process.
        setup: One line about devices, micro-batch size and image loading.
        history: History rows of the finished epochs.
        steps_per_epoch: Number of optimizer steps per epoch.
        step: Number of optimizer steps of the phase finished so far.
    """

    def __init__(
        self, run: RunInfo, rank: int, setup: str, history: list[dict[str, Any]], steps_per_epoch: int, step: int
    ):
        self.phase: Phase = run.phase
        self.reporter: Reporter | None = None
        if rank == 0:
            is_finished = len(history) >= self.phase.config.total_epochs
            self.reporter = Reporter(run.folder, self.phase.config, run.options, setup, is_finished)
            self.reporter.catch_up(history)
            _logger.warning(setup)
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = len(self.phase.epochs) * steps_per_epoch
        self.step = self.first_step = step
        self.start = self.epoch_start = self.last_line = time.monotonic()
        self.step_images = self.phase.config.global_batch_size
        self.bar = tqdm(
            total=self.total_steps * self.step_images,
            initial=step * self.step_images,
            unit="img",
            unit_scale=True,
            disable=None if rank == 0 else True,  # None shows the bar only if stderr is a terminal
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        self.bar.close()
        if self.reporter and isinstance(error, StoppedError):
            self.reporter.finish_plot()

    def start_epoch(self, epoch: int) -> None:
        config = self.phase.config
        phase = f", phase {self.phase.index + 1}" if config.phases else ""
        self.epoch = f"epoch {epoch + 1}/{config.total_epochs}{phase}"
        self.epoch_start = time.monotonic()
        self.bar.set_description(self.epoch)

    def finish_step(self) -> None:
        self.step += 1
        self.bar.update(self.step_images)

    def show(self, loss: float, learning_rate: float) -> None:
        """Show the loss of the current step in the bar, or print a line if there is no bar and a minute has passed."""
        self.bar.set_postfix(loss=f"{loss:.4f}", lr=f"{learning_rate:.2e}")
        is_due = time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES
        if self.reporter and self.bar.disable and is_due:
            step = f"step {self.step % self.steps_per_epoch + 1}/{self.steps_per_epoch}"
            remaining = self._remaining(self.step + 1)
            self._write(f"{self.epoch}: {step}, loss {loss:.4f}, learning rate {learning_rate:.2e}, {remaining}")

    def finish_epoch(self, history: list[dict[str, Any]]) -> None:
        if self.reporter:
            self.reporter(history)
            epoch_time = tqdm.format_interval(time.monotonic() - self.epoch_start)
            line = epoch_line(history, self.phase.config.total_epochs)
            self._write(f"{line}, epoch time {epoch_time}, {self._remaining(self.step)}")

    def _write(self, line: str) -> None:
        tqdm.write(line)
        self.last_line = time.monotonic()

    def _remaining(self, step: int) -> str:
        """Return the remaining time of the phase after `step` steps, estimated from this process's time per step."""
        seconds_per_step = (time.monotonic() - self.start) / max(1, step - self.first_step)
        remaining = tqdm.format_interval(seconds_per_step * (self.total_steps - step))
        return f"{remaining} remaining" + (" in this phase" if self.phase.config.phases else "")

    def finish_run(self, history: list[dict[str, Any]], best: BestCheckpoint) -> None:
        if self.reporter:
            problem = best.find(history)
            tqdm.write(self.reporter.closing_line(history, problem))
            if not problem:
                tqdm.write(f"load in Python: vil.from_checkpoint({str(best.path)!r})")
