"""A run's measurements of itself, and its files for people: summary.csv, a picture of it, logs on request."""

from __future__ import annotations

import csv
import io
import logging
import math
import secrets
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from vil.info import format_environment

from ..config import Config, ConfigError
from ..files import write_atomically
from ..processes import is_first_process, sum_over_processes

_logger = logging.getLogger(__name__)


TIMES = ("seconds", "waited", "waited_for_gpu")  # of an `EpochMeter`
IDLE = 0.02  # of the time: a host that waits less for its GPU keeps it waiting
AHEAD = 2  # steps that the host may be ahead of a GPU: enough to keep it busy, while images do not pile up


class EpochMeter:
    """The losses and gradient norms of an epoch's steps so far, means over all processes, and where the time went."""

    def __init__(self):
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seconds = self.waited = self.waited_for_gpu = 0.0  # in all, for the loader, for steps to be done
        self.pending: list[Tensor] = []  # still on the device
        self.under_way: deque[torch.cuda.Event] = deque()
        self.clock = time.perf_counter()

    @property
    def steps(self) -> int:
        return len(self.losses) + len(self.pending)

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Notes a step, and waits for a GPU until it has done all but the last `AHEAD`."""
        self.pending.append(torch.stack([loss, norm]))
        if loss.is_cuda:
            self.under_way.append(torch.cuda.Event(blocking=True))
            self.under_way[-1].record()
            if len(self.under_way) > AHEAD:
                self._wait_for_gpu(self.under_way.popleft())
        self._lap()

    def _wait_for_gpu(self, event: torch.cuda.Event) -> None:
        then = time.perf_counter()
        event.synchronize()
        self.waited_for_gpu += time.perf_counter() - then

    def collect(self) -> None:
        """Waits for the steps noted. All processes must do so after the same steps."""
        if self.pending:
            while self.under_way:
                self._wait_for_gpu(self.under_way.popleft())
            # sums of a few fp32 numbers are exact in fp64: they do not depend on the order, so neither on restarts
            values = torch.stack(self.pending)
            values = sum_over_processes(
                (values.cpu() if values.is_mps else values).double()
            )  # Apple's GPUs have no fp64
            values /= dist.get_world_size() if dist.is_initialized() else 1
            losses, norms = values.T.tolist()
            self.losses, self.norms, self.pending = self.losses + losses, self.norms + norms, []
            self._lap()

    def timed(self, batches: Iterable) -> Iterator:
        """The batches, while the wait for them is timed."""
        then = self.clock = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - then
            yield batch
            then = time.perf_counter()

    def _lap(self) -> None:
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now

    def summary(self, global_batch_size: int) -> dict[str, float]:
        """The columns of summary.csv that training fills, once all steps are collected."""
        seconds, waited, waited_for_gpu = sum_over_processes(torch.tensor(self.times, dtype=torch.float64)).tolist()
        norms = [norm for norm in self.norms if math.isfinite(norm)]
        return {
            "train_loss": statistics.fmean(self.losses),
            "grad_norm": statistics.fmean(norms) if norms else math.nan,
            "images_per_second": self.steps * global_batch_size / self.seconds,
            "data_wait_percent": 100 * waited / seconds,
            "gpu_wait_percent": 100 * waited_for_gpu / seconds,
            "peak_memory_gib": peak_memory() / 2**30,
        }

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds: in all, waiting for the loader, and waiting for a GPU."""
        return self.seconds, self.waited, self.waited_for_gpu

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("losses", "norms", *TIMES)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.norms = ([float(value) for value in state[name]] for name in ("losses", "norms"))
        for name in TIMES:
            setattr(self, name, float(state.get(name, 0.0)))


class Bottleneck:
    """Says once, when a run has got under way, what its GPUs wait for, if they do."""

    def __init__(self):
        self.found = False
        self.before: tuple[EpochMeter, tuple[float, ...]] | None = None

    def look(self, meter: EpochMeter, how_loaded: str) -> None:
        """The first look at an epoch is at a start, the next may find something. All processes look at the same time.

        Args:
            how_loaded: Who loads the images, in a few words.
        """
        if self.found:
            return
        times = tuple(sum_over_processes(torch.tensor(meter.times, dtype=torch.float64)).tolist())
        before, self.before = self.before, (meter, times)
        if before is None or before[0] is not meter:
            return
        self.found = True
        seconds, data, gpu = (now - then for now, then in zip(times, before[1]))
        if not is_first_process() or gpu >= IDLE * seconds:  # a host that waits for a GPU keeps it busy
            return
        host = seconds - data - gpu
        if data > host:
            _logger.warning(
                "training waits for images %.0f%% of the time (%s): more --workers, files that a GPU decodes "
                "(baseline JPEGs) or a faster disk may help", 100 * data / seconds, how_loaded,
            )  # fmt: skip
        else:
            _logger.warning(
                "the GPU waits for what the host does, %.0f%% of the time: --cuda-graphs, a larger --batch-size or "
                "--torchcompile may help", 100 * host / seconds,
            )  # fmt: skip


def peak_memory() -> int:
    """Bytes: the most that tensors have taken of the GPU, or else that this process has taken; 0 where nobody knows."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Reporter:
    """Writes config.yaml and info.txt when a run starts, summary.csv and curve.png when it is given a new row.

    `setup` is what was chosen for the machine, in a line.

    Training goes on where that fails: all of it is in the checkpoint, and comes with the next row.

    Raises:
        ConfigError: A log was asked for whose package is not installed.
    """

    def __init__(self, folder: Path, config: Config, saved_config: dict[str, Any], setup: str):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [open_log(config, saved_config, folder) for open_log in _chosen_logs(config)]
        info = folder / "info.txt"  # one paragraph for each start
        start = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}  {' '.join(sys.argv)}\n{format_environment()}{setup}\n\n"
        try:
            write_atomically(folder / "config.yaml", yaml.safe_dump(saved_config, sort_keys=False))
            write_atomically(info, (info.read_text() if info.exists() else "") + start)
        except OSError as error:
            _logger.warning("could not write %s: %s", folder, error)

    def catch_up(self, history: list[dict[str, Any]]) -> None:
        """Reports the epochs of a checkpoint that the run did not live to report."""
        rows = 0
        with suppress(OSError):  # also where there is none
            rows = len((self.folder / "summary.csv").read_bytes().splitlines()[1:])
        if rows < len(history):  # else the logs would get what they have
            self(history)

    def __call__(self, history: list[dict[str, Any]]) -> None:
        try:
            write_summary(history, self.folder)
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
    if not known.exists():
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


def write_summary(history: list[dict[str, Any]], folder: Path) -> None:
    """Writes summary.csv, a row for each epoch, and its picture curve.png."""
    text = io.StringIO()
    writer = csv.DictWriter(text, history[-1])
    writer.writeheader()
    writer.writerows(history)
    write_atomically(folder / "summary.csv", text.getvalue())
    write_atomically(folder / "curve.png", plot_history(history))


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
