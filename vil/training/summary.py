"""Human-readable files of a run: config.yaml, info.txt, summary.csv and curve.png."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ..config import Config
from ..fault_tolerance.files import write_atomically
from ..info import format_environment
from ..security.csv_tables import csv_text
from ..text import counted
from .curve import missing_matplotlib, note_on_losses, plot_history
from .history import best_row, best_top1, format_best
from .loggers import open_loggers

_logger = logging.getLogger(__name__)

PLOTTING_SHARE = 0.01  # plotting time as a fraction of the minimum time until the next plot


class Reporter:
    """Writes config.yaml and info.txt when a run starts, and summary.csv and curve.png after each epoch.

    curve.png needs matplotlib, and is written less often in runs with short epochs. Training continues if a file cannot
    be written, because checkpoints also contain the history and the next epoch rewrites the complete files.

    Args:
        folder: Run folder.
        config: Options of the run.
        saved_config: Options in the form stored in checkpoints.
        setup: One line about devices, micro-batch size and image loading.
        is_finished: Whether the run has no epochs left to train. If so, config.yaml is not rewritten.

    Raises:
        ConfigError: A requested logger needs a package that is not installed.
    """

    def __init__(
        self, folder: Path, config: Config, saved_config: dict[str, Any], setup: str, is_finished: bool = False
    ):
        self.folder = folder
        self.total_epochs = config.total_epochs
        self.note = note_on_losses(config)
        folder.mkdir(parents=True, exist_ok=True)
        self.loggers = open_loggers(config, saved_config, folder)
        self._write_start(None if is_finished else saved_config, setup)

        self.unplotted: list[dict[str, Any]] = []  # history rows to plot when the run ends, if curve.png is outdated
        self.next_plot = 0.0  # earliest time of the next plot, in seconds of time.monotonic
        problem = missing_matplotlib()
        self.plots = problem is None
        if problem:
            _logger.warning(
                "%s will have no augmented.png and curve.png (%s); run pip install matplotlib", folder, problem
            )

    def _write_start(self, saved_config: dict[str, Any] | None, setup: str) -> None:
        """Write config.yaml, and append the time, command line and environment of this start to info.txt.

        If `saved_config` is None, config.yaml is not written.
        """
        info = self.folder / "info.txt"
        start = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}  {' '.join(sys.argv)}\n{format_environment()}{setup}\n\n"
        try:
            if saved_config is not None:
                write_atomically(self.folder / "config.yaml", yaml.safe_dump(saved_config, sort_keys=False))
            before = info.read_bytes() if info.is_file() else b""
            # errors="replace", because paths on the command line may be invalid UTF-8
            write_atomically(info, before + start.encode(errors="replace"))
        except OSError as error:
            _logger.warning("failed to write config.yaml or info.txt in %s: %s", self.folder, error)

    def catch_up(self, history: list[dict[str, Any]]) -> None:
        """Report the last epoch of a checkpoint if the run ended before reporting that epoch."""
        reported = 0
        summary = self.folder / "summary.csv"
        if summary.is_file():
            with suppress(OSError):
                reported = len(summary.read_bytes().splitlines()[1:])
        if reported < len(history):  # the loggers must not receive an epoch twice
            self(history)

    def __call__(self, history: list[dict[str, Any]]) -> None:
        """Rewrite summary.csv and, if due, curve.png, and send the last history row to the loggers."""
        try:
            columns = list(dict.fromkeys(name for row in reversed(history) for name in row))
            write_atomically(self.folder / "summary.csv", csv_text(history, columns))
            self._plot(history)
        except OSError as error:
            _logger.warning("cannot write summary.csv or curve.png in %s: %s; training continues", self.folder, error)

        for logger in self.loggers:
            try:
                logger.log(history[-1])
            except Exception as error:  # loggers and the network raise exceptions of various types
                _logger.warning("%s failed to log the epoch: %s; training continues", logger.name, error)

    def _plot(self, history: list[dict[str, Any]]) -> None:
        """Plot curve.png, unless the last plot took more than 1% of the time that has passed since the last plot.

        After the last epoch of the run, curve.png is always plotted.
        """
        is_last = len(history) == self.total_epochs
        if not self.plots:
            return
        if time.monotonic() < self.next_plot and not is_last:
            self.unplotted = history
            return
        begin = time.monotonic()
        self.unplotted = []
        write_atomically(self.folder / "curve.png", plot_history(history, self.note))
        end = time.monotonic()
        self.next_plot = end + (end - begin) / PLOTTING_SHARE

    def finish_plot(self) -> None:
        """Plot curve.png when a run stops, if the existing plot lacks the last epochs."""
        if self.unplotted:
            with suppress(OSError):
                write_atomically(self.folder / "curve.png", plot_history(self.unplotted, self.note))

    def closing_line(self, history: list[dict[str, Any]], problem: str | None = None) -> str:
        """Return a line with the best epoch's accuracy, the paths of result files, and any problem with best.pt.

        The line also has the accuracy of the last epoch if the last epoch is not the best one.
        """
        last = history[-1]
        note = "" if best_row(history) is last else f" (last epoch {best_top1(last):.2f}%)"
        line = f"best: {format_best(history)}{note}: {self.folder / 'best.pt'}"
        if problem:
            line += f" {problem}"
        if self.plots:
            line += f", training curve: {self.folder / 'curve.png'}"
        if (self.folder / "report.html").is_file():
            line += f", report: {self.folder / 'report.html'}"
        return line


def epoch_line(history: list[dict[str, Any]], epochs: int) -> str:
    """Return one line with the main results of the last epoch; summary.csv contains all columns."""
    row = history[-1]
    phase = f", phase {row['phase']:.0f}" if "phase" in row else ""
    ema = f" (EMA {row['eval_top1_ema']:.2f}%)" if "eval_top1_ema" in row else ""
    count = round(row.get("unreadable_images", 0))
    unreadable = f", {counted(count, 'unreadable image')}" if count else ""
    return (
        f"epoch {row['epoch']:.0f}/{epochs}{phase}: training loss {row['train_loss']:.4f}, validation loss "
        f"{row['eval_loss']:.4f}, top-1 {row['eval_top1']:.2f}%{ema}, best {format_best(history)}, "
        f"{row['images_per_second']:.0f} images/s{unreadable}"
    )
