"""Progress bar in the terminal, one printed line per epoch, and the report files of a run."""

from __future__ import annotations

import logging
from typing import Any

from tqdm import tqdm

from .best import BestCheckpoint
from .phases import Phase
from .run_info import RunInfo
from .summary import Reporter, epoch_line

_logger = logging.getLogger(__name__)


class Progress:
    """Progress bar over the images of a phase, and report after each epoch. Only rank 0 prints and writes.

    Args:
        run: Identity of the run.
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
            self.reporter = Reporter(run.folder, self.phase.config, run.options, setup)
            self.reporter.catch_up(history)
            _logger.warning(setup)
        self.step_images = self.phase.config.global_batch_size
        self.bar = tqdm(
            total=len(self.phase.epochs) * steps_per_epoch * self.step_images,
            initial=step * self.step_images,
            unit="img",
            unit_scale=True,
            disable=None if rank == 0 else True,  # None disables the bar unless stderr is a terminal
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def start_epoch(self, epoch: int) -> None:
        config = self.phase.config
        phase = f", phase {self.phase.index + 1}" if config.phases else ""
        self.bar.set_description(f"epoch {epoch + 1}/{config.total_epochs}{phase}")

    def finish_step(self) -> None:
        self.bar.update(self.step_images)

    def show(self, loss: float, learning_rate: float) -> None:
        self.bar.set_postfix(loss=f"{loss:.4f}", lr=f"{learning_rate:.2e}")

    def finish_epoch(self, history: list[dict[str, Any]]) -> None:
        if self.reporter:
            self.reporter(history)
            tqdm.write(epoch_line(history, self.phase.config.total_epochs))

    def finish_run(self, history: list[dict[str, Any]], best: BestCheckpoint) -> None:
        if self.reporter:
            tqdm.write(self.reporter.closing_line(history, best.find(history)))
