"""Human-readable files of a run: config.yaml, info.txt, summary.csv, curve.png, and optional logs."""

from __future__ import annotations

import functools
import io
import logging
import math
import secrets
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from ..config import Config, ConfigError
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.output import csv_text
from ..info import format_environment

_logger = logging.getLogger(__name__)


class Reporter:
    """Write config.yaml and info.txt when a run starts, and summary.csv and curve.png after each epoch.

    Plotting takes at most a hundredth of a run's time. curve.png needs matplotlib. If writing fails, training
    continues: the history is also in the checkpoint, and the next epoch writes all of it.

    Args:
        folder: Run folder.
        config: Options of the run.
        saved_config: Options as stored in checkpoints.
        setup: One line about the configuration chosen for this machine.

    Raises:
        ConfigError: A requested log needs a package that is not installed.
    """

    def __init__(self, folder: Path, config: Config, saved_config: dict[str, Any], setup: str):
        self.folder, self.draws, self.draws_again, self.epochs = folder, True, 0.0, config.total_epochs
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [open_log(config, saved_config, folder) for open_log in _chosen_logs(config)]
        info = folder / "info.txt"  # info.txt has one paragraph for each start
        start = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}  {' '.join(sys.argv)}\n{format_environment()}{setup}\n\n"
        try:
            write_atomically(folder / "config.yaml", yaml.safe_dump(saved_config, sort_keys=False))
            # paths in the text need not be valid UTF-8
            write_atomically(info, (info.read_bytes() if info.is_file() else b"") + start.encode(errors="replace"))
        except OSError as error:
            _logger.warning("could not write %s: %s", folder, error)
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            self.draws = False
            _logger.warning("no %s/curve.png: %s. pip install matplotlib", folder, error)

    def catch_up(self, history: list[dict[str, Any]]) -> None:
        """Report a checkpoint's epochs that the run could not report before it ended."""
        rows = 0
        if (summary := self.folder / "summary.csv").is_file():
            with suppress(OSError):
                rows = len(summary.read_bytes().splitlines()[1:])
        if rows < len(history):  # otherwise the logs would receive the epoch twice
            self(history)

    def __call__(self, history: list[dict[str, Any]]) -> None:
        try:
            columns = list(dict.fromkeys(name for row in reversed(history) for name in row))
            write_atomically(self.folder / "summary.csv", csv_text(history, columns))
            if self.draws and (time.monotonic() >= self.draws_again or len(history) == self.epochs):
                begun = time.monotonic()
                write_atomically(self.folder / "curve.png", plot_history(history))
                ended = time.monotonic()
                self.draws_again = ended + 100 * (ended - begun)  # short epochs would spend most time plotting
        except OSError as error:
            _logger.warning("could not write the summary in %s: %s; training goes on", self.folder, error)
        for log in self.logs:
            try:
                log(history[-1])
            except Exception as error:  # external packages and networks raise various types
                _logger.warning("%s: %s; training goes on", log.__name__, error)

    def closing_line(self, history: list[dict[str, Any]], problem: str | None = None) -> str:
        """Return where the weights of the best epoch are, or the problem with best.pt."""
        curve = f", its curve {self.folder / 'curve.png'}" * self.draws
        return f"best: {_best(history)}: {self.folder / 'best.pt'}{f' {problem}' if problem else ''}{curve}"


def best_top1(row: dict[str, Any]) -> float:
    """Return the better top-1 of an epoch's model and EMA weights."""
    return max(row["eval_top1"], row.get("eval_top1_ema", 0.0))


def is_better(row: dict[str, Any], best: dict[str, Any]) -> bool:
    """Return whether an epoch is at least as good as the best one so far.

    An epoch that was evaluated on fewer images is worse, whatever its top-1 is. Rows of old runs lack this number.
    """
    images, most = (epoch.get("eval_images") for epoch in (row, best))
    if images is not None and most is not None and images != most:
        return images > most
    return best_top1(row) >= best_top1(best)


def best_row(history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the history row of the best epoch (the latest one on ties)."""
    return functools.reduce(lambda best, row: row if is_better(row, best) else best, history)


def _best(history: list[dict[str, Any]]) -> str:
    row = best_row(history)
    return f"top-1 {best_top1(row):.2f}% in epoch {row['epoch']:.0f}"


def epoch_line(history: list[dict[str, Any]], epochs: int) -> str:
    """Return a line about the last epoch; summary.csv has all columns."""
    row = history[-1]
    average = f" (EMA {row['eval_top1_ema']:.2f}%)" if "eval_top1_ema" in row else ""
    unreadable = f", {row['unreadable_images']:.0f} images could not be read" if row.get("unreadable_images") else ""
    phase = f", phase {row['phase']:.0f}" if "phase" in row else ""
    return (
        f"epoch {row['epoch']:.0f}/{epochs}{phase}: loss {row['train_loss']:.4f}, in validation "
        f"{row['eval_loss']:.4f}, top-1 {row['eval_top1']:.2f}%{average}, best {_best(history)}, "
        f"{row['images_per_second']:.0f} images/s{unreadable}"
    )


def _chosen_logs(config: Config) -> list:
    return [log for log, chosen in ((_tensorboard, config.log_tensorboard), (_wandb, config.log_wandb)) if chosen]


def _tensorboard(config: Config, saved_config: dict[str, Any], folder: Path):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("log_tensorboard needs a package: pip install tensorboard") from error
    writer = SummaryWriter(folder)

    def tensorboard(row: dict[str, Any]) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, row["epoch"])
        writer.flush()

    return tensorboard


def _wandb(config: Config, saved_config: dict[str, Any], folder: Path):
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("log_wandb needs a package: pip install wandb") from error
    known = folder / "wandb_id.txt"  # a resumed run continues its W&B page
    if not known.is_file():
        write_atomically(known, secrets.token_hex(4))
    settings = dict(name=config.experiment, id=known.read_text(), resume="allow", config=saved_config, dir=folder)
    run = None

    def weights_and_biases(row: dict[str, Any] | None = None) -> None:
        nonlocal run
        run = run or wandb.init(project="vision-longhorn", **settings)
        if row:
            run.log(row, step=int(row["epoch"]))  # older checkpoints store the epoch as a float

    try:
        weights_and_biases()
    except Exception as error:  # external packages and networks raise various types
        _logger.warning("Weights & Biases: %s; the next epoch tries again", error)
    return weights_and_biases


PICTURE: dict[str, dict[str, str | None]] = {
    "loss": {"train_loss": "training", "eval_loss": "validation", "eval_loss_ema": "validation, EMA"},
    "top-1 (%)": {"eval_top1": "model", "eval_top1_ema": "EMA"},
    "top-5 (%)": {"eval_top5": "model", "eval_top5_ema": "EMA"},
    "learning rate": {"lr": None},
    "norm of the gradient": {"grad_norm": None},
    "images/s": {"images_per_second": "training", "eval_images_per_second": "validation"},
    "the host waits (% of time)": {"data_wait_percent": "for data", "gpu_wait_percent": "for the GPU"},
    "unreadable images": {"unreadable_images": None},
}


ALWAYS = ("loss", "top-1 (%)")  # panels


def _changes(history: list[dict[str, Any]], columns: Iterable[str]) -> bool:
    return any(len({row[name] for row in history if name in row}) > 1 for name in columns)


def plot_history(history: list[dict[str, Any]]) -> bytes:
    """Plot the summary's columns by epoch as a PNG, without constant panels. A line marks the best epoch."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display and keeps state

    panels = [(title, columns) for title, columns in PICTURE.items() if title in ALWAYS or _changes(history, columns)]
    rows = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(12, 3 * rows + 0.5))
    # a "constrained" layout takes twice as long, while training waits
    top, bottom = (1 - inches / figure.get_figheight() for inches in (0.8, figure.get_figheight() - 0.55))
    figure.subplots_adjust(left=0.07, right=0.99, bottom=bottom, top=top, wspace=0.25, hspace=0.4)
    figure.suptitle(f"best: {_best(history)}")
    epochs = [row["epoch"] for row in history]
    axes = figure.subplots(rows, 3).flat
    for axis in axes[len(panels) :]:
        axis.remove()
    begun = [row["epoch"] for before, row in pairwise(history) if row.get("phase") != before.get("phase")]
    for axis, (title, columns) in zip(axes, panels):
        for epoch in begun:  # of a phase
            axis.axvline(epoch - 0.5, color="grey", linewidth=0.8)
        for name, label in columns.items():
            if name in history[-1] and (title in ALWAYS or _changes(history, [name])):
                values = [row.get(name, math.nan) for row in history]
                axis.plot(epochs, values, "-" if len(epochs) > 1 else "o", label=label)
        if title in ALWAYS:
            axis.axvline(best_row(history)["epoch"], color="grey", linestyle=":")
        axis.set_title(title)
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
        if len(columns) > 1:
            axis.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    return png.getvalue()
