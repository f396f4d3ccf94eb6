"""The files of a run for people: config.yaml, info.txt, summary.csv, a picture of it, and logs on request."""

from __future__ import annotations

import io
import logging
import math
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ..config import Config, ConfigError
from ..files import write_atomically
from ..info import format_environment
from ..output import csv_text

_logger = logging.getLogger(__name__)


class Reporter:
    """Writes config.yaml and info.txt when a run starts, summary.csv and curve.png when it is given a new row.

    `setup` is what was chosen for the machine, in a line.

    Without matplotlib there is no curve.png. Training goes on where writing fails: all of it is in the checkpoint, and
    comes with the next row.

    Raises:
        ConfigError: A log was asked for whose package is not installed.
    """

    def __init__(self, folder: Path, config: Config, saved_config: dict[str, Any], setup: str):
        self.folder, self.draws = folder, True
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [open_log(config, saved_config, folder) for open_log in _chosen_logs(config)]
        info = folder / "info.txt"  # one paragraph for each start
        start = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}  {' '.join(sys.argv)}\n{format_environment()}{setup}\n\n"
        try:
            write_atomically(folder / "config.yaml", yaml.safe_dump(saved_config, sort_keys=False))
            # names in it need not be UTF-8
            write_atomically(info, (info.read_bytes() if info.is_file() else b"") + start.encode(errors="replace"))
        except OSError as error:
            _logger.warning("could not write %s: %s", folder, error)
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            self.draws = False
            _logger.warning("no %s/curve.png: %s. pip install matplotlib", folder, error)

    def catch_up(self, history: list[dict[str, Any]]) -> None:
        """Reports the epochs of a checkpoint that the run did not live to report."""
        rows = 0
        if (summary := self.folder / "summary.csv").is_file():
            with suppress(OSError):
                rows = len(summary.read_bytes().splitlines()[1:])
        if rows < len(history):  # else the logs would get what they have
            self(history)

    def __call__(self, history: list[dict[str, Any]]) -> None:
        try:
            columns = list(dict.fromkeys(name for row in reversed(history) for name in row))
            write_atomically(self.folder / "summary.csv", csv_text(history, columns))
            if self.draws:
                write_atomically(self.folder / "curve.png", plot_history(history))
        except OSError as error:
            _logger.warning("could not write the summary in %s: %s; training goes on", self.folder, error)
        for log in self.logs:
            try:
                log(history[-1])
            except Exception as error:  # of a package and a network that are not ours
                _logger.warning("%s: %s; training goes on", log.__name__, error)


def _chosen_logs(config: Config) -> list:
    return [log for log, chosen in ((_tensorboard, config.log_tensorboard), (_wandb, config.log_wandb)) if chosen]


def _tensorboard(config: Config, saved_config: dict[str, Any], folder: Path):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("log_tensorboard needs a package: pip install tensorboard") from error
    writer = SummaryWriter(str(folder))

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
    known = folder / "wandb_id.txt"  # a resumed run goes on with its page
    if not known.is_file():
        write_atomically(known, secrets.token_hex(4))
    settings = dict(name=config.experiment, id=known.read_text(), resume="allow", config=saved_config, dir=folder)
    run = None

    def weights_and_biases(row: dict[str, Any] | None = None) -> None:
        nonlocal run
        run = run or wandb.init(project="vision-longhorn", **settings)
        if row:
            run.log(row, step=int(row["epoch"]))  # a float in checkpoints that an earlier version resumed

    try:
        weights_and_biases()
    except Exception as error:  # of a package and a network that are not ours
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
    "peak memory (GiB)": {"peak_memory_gib": None},
    "unreadable images": {"unreadable_images": None},
}


def plot_history(history: list[dict[str, Any]]) -> bytes:
    """A PNG of the summary's columns by epoch."""
    from matplotlib.figure import Figure  # no pyplot: it needs no display and keeps no state

    figure = Figure(figsize=(12, 9))
    # a "constrained" layout takes twice as long, and a run waits for it
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.06, top=0.96, wspace=0.25, hspace=0.35)
    epochs = [row["epoch"] for row in history]
    for axis, (title, columns) in zip(figure.subplots(3, 3).flat, PICTURE.items()):
        for name, label in columns.items():
            if name in history[-1]:
                axis.plot(epochs, [row.get(name, math.nan) for row in history], label=label)
        axis.set_title(title)
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
        if len(axis.get_lines()) > 1:
            axis.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    return png.getvalue()
