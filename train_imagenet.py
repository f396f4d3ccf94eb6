"""Trains an image classifier: ImageNet with ViM's recipe, or any folder of images.

    python train_imagenet.py -c configs/vil_tiny.yaml --data-dir /imagenet
    torchrun --nproc_per_node=8 train_imagenet.py -c configs/vil_tiny.yaml --data-dir /imagenet --resume auto

A config file holds options under timm's names, and the command line overrides it. The recipe states the *global* batch:
each process takes its share, in as many micro-batches as `batch_size` asks for, so any number of GPUs trains the same
thing. The run's folder, OUTPUT/EXPERIMENT, gets config.yaml, info.txt, summary.csv, curve.png, last.pt and best.pt.

Ctrl-C, SIGTERM or SIGUSR1 makes it write a checkpoint and exit with status 75; `--resume auto` goes on as if nothing
had happened, on as many processes as there are then. docs/reliability.md says what else it survives.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext, suppress

if __name__ == "__main__":  # before the other imports, which take seconds: until a step is trained nothing is to save

    def end_at_once(*_):
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):
                os.write(2, b"\nstopped by a signal before it trained anything\n")
        os._exit(75)  # PREEMPTED

    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), end_at_once)
    if hasattr(signal, "SIGHUP"):  # its terminal was closed: torchrun ends its processes then, a run alone goes on
        signal.signal(signal.SIGHUP, end_at_once if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_IGN)

import dataclasses
import logging
import math
import traceback
import weakref
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.data import resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import distribute_bn
from torch import Tensor, nn
from tqdm import tqdm

import vil  # noqa: F401  registers the models
from vil import checkpoint
from vil.config import Config, ConfigError, load_config, options_of_checkpoint
from vil.cuda_graphs import Replayed, unchanged
from vil.data.augmentation import BatchAugmentation
from vil.data.loaders import describe, evaluation_loader, micro_batches, training_loader, unreadable_images
from vil.data.samplers import TrainingBatches, split_global_batch
from vil.data.seeds import derive_seed, seed_everything
from vil.data.splits import class_names, describe_split, open_splits
from vil.data.workers import share_cores
from vil.devices import autocast, known_device
from vil.evaluation.evaluator import Evaluator
from vil.factory import create_model
from vil.files import FolderInUseError, FolderLock
from vil.output import outlive_output
from vil.processes import (
    FirstProcessError,
    from_first_process,
    is_first_process,
    join_processes,
    leave_processes,
    sum_over_processes,
)
from vil.training.gradients import FlatGradients
from vil.training.interruption import PREEMPTED, CheckpointTimer, PreemptedError
from vil.training.meter import Bottleneck, EpochMeter
from vil.training.summary import Reporter, best_top1, epoch_line
from vil.training.update import ListedEma, Update


class DivergenceError(RuntimeError):
    """The loss is not finite."""


FORESEEN = (ConfigError, checkpoint.CheckpointError, FolderInUseError, FirstProcessError, DivergenceError)


def main() -> None:
    logging.basicConfig(format="%(message)s")
    status = 0
    try:
        config = load_config(__doc__, saved_options=checkpoint.saved_config)
        Trainer(config, *join_processes(known_device(config.device))).run()
    except PreemptedError as notice:
        if is_first_process():
            print(notice, file=sys.stderr)
        status = PREEMPTED
    except Exception as error:
        foreseen = isinstance(error, FORESEEN)
        if dist.is_initialized():  # at once: tidying up would wait for other processes, which may be gone
            sys.stdout.flush()
            print(f"error: {error}" if foreseen else traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)
        if foreseen:
            sys.exit(f"error: {error}")
        raise
    leave_processes()
    sys.exit(status)


def build_model(config: Config, num_classes: int) -> nn.Module:
    size = {"img_size": config.img_size} if config.img_size else {}
    arguments = size | dict(num_classes=num_classes, drop_path_rate=config.drop_path) | config.model_kwargs
    model = create_model(config.model, config.pretrained_path, **arguments)
    if config.grad_checkpointing:
        model.set_grad_checkpointing()
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    on_gpu = next(model.parameters()).is_cuda
    fused = True if config.opt == "adamw" and on_gpu else None  # one kernel in place of a dozen
    choices = {"betas": config.opt_betas, "eps": config.opt_eps, "fused": fused}
    optimizer = create_optimizer_v2(
        model,
        opt=config.opt,
        lr=config.lr,
        weight_decay=config.weight_decay,
        layer_decay=config.layer_decay,
        **{name: value for name, value in choices.items() if value is not None},
    )
    for group in optimizer.param_groups:  # a fused launch takes few tensors, and as long as its largest
        group["params"].sort(key=torch.Tensor.numel, reverse=True)
    return optimizer


def options_to_save(config: Config, num_classes: int, folder: Path) -> dict[str, Any]:
    """The options as a run's checkpoints say them.

    Raises:
        ConfigError: A checkpoint may not say one of them.
    """
    options = dataclasses.asdict(config) | {"num_classes": num_classes}
    if config.data_dir and Path(config.data_dir).is_dir():  # whoever reads it may be elsewhere
        options["data_dir"] = str(Path(config.data_dir).resolve())
    try:
        options_of_checkpoint(options, folder / "last.pt")
    except ConfigError as error:
        raise ConfigError(f"this run's checkpoints could not be read: {error}") from error
    return options


class Trainer:
    """One process of a run: `run` goes through the epochs, `train_one_epoch` through the global batches of one."""

    def __init__(self, config: Config, device: torch.device, rank: int, world_size: int):
        self.config, self.device, self.rank, self.world_size = config, device, rank, world_size
        self.folder = Path(config.output) / config.experiment
        micro_batch, _ = split_global_batch(config, world_size)
        train_set, val_set, num_classes = open_splits(config)

        self.saved_config = options_to_save(config, num_classes, self.folder)
        if config.resume not in (None, "auto"):
            from_first_process(lambda: self.compare_size(config.resume, num_classes))
        share_cores(device, config.workers)
        seed_everything(config.seed)
        self.model = build_model(config, num_classes).to(device)
        data_config = resolve_data_config(
            {"img_size": config.img_size, "crop_pct": config.crop_pct, "interpolation": config.interpolation},
            model=self.model,
        )
        self.batches = TrainingBatches(len(train_set), config, micro_batch, rank, world_size)
        self.train_loader = training_loader(train_set, config, data_config, device, self.batches)
        self.val_loader = evaluation_loader(
            val_set, data_config, device, config.workers, 2 * micro_batch, rank, world_size, config.augment_on_device,
            again=True,
        )  # fmt: skip
        self.augment = BatchAugmentation(config, num_classes, data_config)
        self.loss_fn = SoftTargetCrossEntropy() if config.mixing else LabelSmoothingCrossEntropy(config.smoothing)

        self.optimizer = build_optimizer(config, self.model)
        self.scheduler, _ = create_scheduler_v2(
            self.optimizer,
            sched=config.sched,
            num_epochs=config.epochs,
            warmup_epochs=config.warmup_epochs,
            warmup_lr=config.warmup_lr,
            min_lr=config.min_lr,
        )
        self.ema = ListedEma(self.model, decay=config.model_ema_decay) if config.model_ema else None
        if rank == 0 and not config.synthetic:
            logging.warning("%s", describe_split(config.train_split, train_set))
            logging.warning("%s", describe_split(config.val_split, val_set))
        self.warn_of_a_short_run()
        self.precision = autocast(device, config.amp, config.amp_dtype)
        scaled = config.amp and config.amp_dtype == "float16" and device.type != "cpu"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)

        self.lock: AbstractContextManager = nullcontext()  # the first process has the folder's
        self.history: list[dict] = []  # a row for each epoch done: summary.csv
        self.meter = EpochMeter()  # the steps done in the epoch at hand
        self.bottleneck = Bottleneck(max(1, min(config.log_interval, self.batches.steps // 3)))
        self.label_names = checkpoint.labels_of(class_names(train_set))
        if resumed := from_first_process(self.take_folder):
            self.restore(*resumed)
        self.timer = CheckpointTimer(config.checkpoint_interval, self.steps)

        models = [self.model] + ([self.ema.module] if self.ema else [])
        at_once = 2 * micro_batch if config.cuda_graphs else None
        self.evaluator = Evaluator(models, data_config, device, self.precision, at_once)
        self.gradients = FlatGradients(self.model.parameters())
        self.apply_gradients = Update(
            self.model, self.gradients, self.optimizer, self.scaler, self.ema, config.clip_grad, config.cuda_graphs
        )
        self.network = torch.compile(self.model) if config.torchcompile else self.model
        self.fit_to_device(data_config["input_size"], num_classes)

    def compare_size(self, path: str, num_classes: int) -> None:
        """Refuses a file of another model before one of the size that it says takes memory."""
        saved = checkpoint.read_checkpoint(path, whole=False)
        decisive = {name: value for name, value in saved["config"].items() if name in checkpoint.DECISIVE}
        checkpoint.check_same_run(decisive, self.saved_config, path)
        with torch.device("meta"):
            model = build_model(dataclasses.replace(self.config, pretrained_path=None), num_classes)
        checkpoint.load_weights(model, saved["state_dict"], path)

    def warn_of_a_short_run(self) -> None:
        epochs, warmup_epochs = self.config.epochs, self.config.warmup_epochs
        if self.rank == 0:
            logging.warning("%s", self.batches.described(epochs))
        if self.rank == 0 and warmup_epochs >= epochs and self.config.warmup_lr < self.config.lr:
            logging.warning(
                "warmup_epochs %d is not less than epochs %d: the learning rate never reaches lr %g",
                warmup_epochs, epochs, self.config.lr,
            )  # fmt: skip
        steps, decay = epochs * self.batches.steps, self.config.model_ema_decay
        if self.ema and self.rank == 0 and steps * (1 - decay) < 1:
            logging.warning(
                "model_ema_decay %s averages over some %.0f steps, and this run has %d: its average will hardly leave "
                "what it begins with. --model-ema-decay %.4g averages over a tenth of the run",
                decay, 1 / (1 - decay), steps, max(0.5, 1 - 10 / steps),
            )  # fmt: skip

    def fit_to_device(self, input_size: tuple[int, ...], num_classes: int) -> None:
        """Chooses how many images are trained on at once, and has a GPU do that as a CUDA graph."""
        self.at_once = micro_batch = self.batches.micro_batch
        self.replayed = None
        if self.device.type != "cuda":
            return
        self.model.train()
        for self.at_once in (n for n in range(micro_batch, 0, -1) if micro_batch % n == 0):
            with suppress(torch.OutOfMemoryError):
                self.replayed = self.tried_out(input_size, num_classes)
                return
            torch.cuda.empty_cache()
        raise ConfigError(f"{self.device} has too little memory to train {self.config.model} on one image")

    @property
    def accumulation(self) -> int:
        """How many backward passes add up to this process's share of a global batch."""
        return self.batches.accumulation * self.batches.micro_batch // self.at_once

    def tried_out(self, input_size: tuple[int, ...], num_classes: int) -> Replayed | None:
        """Has the GPU do `backward` for `at_once` images. Returns it as a CUDA graph, if there is to be one."""
        images = torch.zeros(self.at_once, *input_size, device=self.device)
        classes = images.new_zeros(self.at_once, dtype=torch.long)
        targets = images.new_zeros(self.at_once, num_classes) if self.config.mixing else classes
        changed = [self.gradients.flat, *self.model.buffers()]
        optimizers_share = images.new_empty(2, self.gradients.flat.numel())  # which it takes later
        if self.config.cuda_graphs:
            backward = weakref.WeakMethod(self.backward)  # or the run and its loaders would outlive what refers to them
            return Replayed(lambda *batch: backward()(*batch), [images, targets], "training", changed)
        with unchanged(changed):
            self.backward(images, targets)
        del optimizers_share
        return None

    @property
    def setup(self) -> str:
        """The choices for this machine, in a line."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        graphs = ", as a CUDA graph" if self.replayed and self.replayed.graph else ""
        return (
            f"{self.world_size} x {name}: {self.at_once} of {self.config.global_batch_size} images at once on each"
            f"{graphs}; {describe(self.train_loader)}"
        )

    def run(self) -> None:
        report = None
        if self.rank == 0:
            report = Reporter(self.folder, self.config, self.saved_config, self.setup)
            report.catch_up(self.history)
            logging.warning(self.setup)
        epochs, batch = self.config.epochs, self.config.global_batch_size
        quiet = None if self.rank == 0 else True  # None: where nobody watches, one line an epoch will do
        sizes = dict(total=epochs * self.batches.steps * batch, initial=self.steps * batch)
        with self.lock, tqdm(**sizes, unit="img", unit_scale=True, disable=quiet) as bar:
            for epoch in range(len(self.history), epochs):
                bar.set_description(f"epoch {epoch + 1}/{epochs}")
                self.train_one_epoch(epoch, bar)
                row = {"epoch": epoch + 1, "lr": self.rate, **self.meter.summary(batch), **self.evaluate()}
                self.checkpoint_if_due()  # a signal cuts an evaluation short: then that is repeated on resuming
                self.history.append(row)
                self.meter = EpochMeter()
                self.scheduler.step(epoch + 1)
                self.save()
                if report:
                    report(self.history)
                    tqdm.write(epoch_line(self.history, epochs))
        if report:
            tqdm.write(report.closing_line(self.history))

    def train_one_epoch(self, epoch: int, bar: tqdm) -> None:
        """Trains on the global batches of an epoch that have not been trained on yet."""
        self.model.train()
        loss = torch.zeros((), device=self.device)
        batches = micro_batches(self.train_loader, self.batches, epoch, self.meter.steps)
        for i, ((images, targets), position) in enumerate(self.meter.timed(batches), start=1):
            images, targets = self.augment(images, targets, epoch, position)
            for start in range(0, len(images), self.at_once):
                # what the model draws (stochastic depth) follows from the seed and the place in the run as well
                seed_everything(derive_seed(self.config.seed, epoch, position + start, 2))
                part = slice(start, start + self.at_once)
                loss = loss + (self.replayed or self.backward)(images[part], targets[part])
            if i % self.batches.accumulation:
                continue
            self.meter.add(loss, self.update())
            loss = torch.zeros_like(loss)
            if self.meter.steps % self.config.log_interval == 0:
                self.check_finite()
                bar.set_postfix(loss=f"{self.meter.losses[-1]:.4f}", lr=f"{self.rate:.2e}")
            if self.device.type == "cuda":
                waits = getattr(self.train_loader, "waits", (0.0, 0.0))
                self.bottleneck.look(self.meter, describe(self.train_loader), *waits)
            bar.update(self.config.global_batch_size)
            self.checkpoint_if_due()
        self.check_finite()

    def backward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Adds the gradient of a part of this process's share of a global batch; returns its part of the loss."""
        with self.precision:
            loss = self.loss_fn(self.network(images), targets) / self.accumulation
        self.gradients.add(self.scaler.scale(loss))
        return loss.detach()

    def update(self) -> Tensor:
        """One step of the optimizer. Returns the norm of the gradient before it is clipped."""
        self.gradients.average_over_processes()
        return self.apply_gradients()

    def evaluate(self) -> dict[str, float]:
        if self.world_size > 1:
            for model in self.evaluator.models:  # each process has the statistics of its own images
                distribute_bn(model, self.world_size, reduce=True)
        images = takewhile(lambda _: not self.timer.signalled, self.val_loader)
        results = self.evaluator(images)
        row = {"eval_images_per_second": results[0].images_per_second}
        for suffix, result in zip(("", "_ema"), results):
            row |= {f"eval_{name}{suffix}": getattr(result, name) for name in ("loss", "top1", "top5")}
        skipped = sum_over_processes(torch.tensor(unreadable_images(self.train_loader)))
        return row | {"unreadable_images": results[0].unreadable + skipped.item()}

    @property
    def rate(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    @property
    def steps(self) -> int:
        return len(self.history) * self.batches.steps + self.meter.steps

    def check_finite(self) -> None:
        """Looks at the steps since the last look; only here does the host wait for the device."""
        first = len(self.meter.losses)
        self.meter.collect()
        for step in range(first, self.meter.steps):
            # the scaler of float16 leaves out steps whose gradient overflows
            values = {"loss": self.meter.losses[step], "gradient's norm": self.meter.norms[step]}
            for name in ("loss",) if self.scaler.is_enabled() else values:
                if not math.isfinite(values[name]):
                    last = self.folder / "last.pt"
                    raise DivergenceError(
                        f"the {name} is {values[name]} at step {step + 1} of epoch {len(self.history) + 1}, at "
                        f"learning rate {self.rate:.3g}; the last checkpoint, of before, is "
                        f"{last if last.exists() else 'none yet'}. A lower --lr, --clip-grad or --no-amp may help; "
                        "--resume auto goes on from the checkpoint"
                    )

    def checkpoint_if_due(self) -> None:
        """Called by all processes after the same steps."""
        if not self.timer.due(self.steps):
            return
        self.check_finite()  # a checkpoint never holds a model that is lost
        self.save()
        if self.timer.stop:
            raise PreemptedError(
                f"stopped by a signal: {self.folder / 'last.pt'} holds step {self.meter.steps} of epoch "
                f"{len(self.history) + 1}, and --resume auto goes on from there"
            )

    def save(self) -> None:
        """Writes last.pt, and at the end of an epoch best.pt if the model or its average is the best so far."""
        if self.rank > 0:
            return
        state = {
            "arch": self.config.model,
            "epoch": len(self.history),
            "config": self.saved_config,
            "label_names": self.label_names or None,
            "num_images": self.batches.num_images,
            "history": self.history,
            "progress": self.meter.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            **{name: part.state_dict() for name, part in self.parts().items()},
        }
        if self.meter.steps == 0 and best_top1(self.history[-1]) >= max(map(best_top1, self.history)):
            better_average = self.ema and self.history[-1]["eval_top1_ema"] >= self.history[-1]["eval_top1"]
            best = {"best": "state_dict_ema" if better_average else "state_dict"}
            best |= {name: part for name, part in state.items() if name != "optimizer"}  # which is twice the weights
            checkpoint.save_checkpoint(best, self.folder / "best.pt")
        checkpoint.save_checkpoint(state, self.folder / "last.pt", previous=self.folder / "previous.pt")

    def take_folder(self) -> list | None:
        """Keeps other runs out of the folder, and returns the file that this one goes on from with what it holds."""
        try:
            self.lock = FolderLock(self.folder)
        except OSError as error:
            raise ConfigError(
                f"cannot write in {self.folder}: {error}. --output and --experiment name others"
            ) from error
        for path in (self.folder / f"{name}.pt" for name in ("last", "previous", "best")):
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is no file, and the run would write one there: move it away")
        if not (found := checkpoint.find_resumed(self.config.resume, self.folder)):
            return None
        path, saved = found
        middle = bool(saved["progress"].get("losses"))
        checkpoint.check_same_run(saved["config"], self.saved_config, path, middle)
        checkpoint.check_same_classes(saved, self.label_names, path)
        if saved["num_images"] not in (0, images := self.batches.num_images):
            logging.warning("going on with %d training images, was %d", images, saved["num_images"])
        return [str(path), saved]

    def restore(self, path: str, saved: dict) -> None:
        """Goes on from a checkpoint: with what it learned, but with the options of this run where they differ."""
        try:
            for group, chosen in zip(saved["optimizer"]["param_groups"], self.optimizer.param_groups):
                group.update({k: v for k, v in chosen.items() if k != "params"})
            for name, part in self.parts().items():
                part.load_state_dict(saved[name])
            self.history = [{str(name): as_number(value) for name, value in row.items()} for row in saved["history"]]
            self.meter.load_state_dict(saved["progress"])
            self.check_restored()
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            raise checkpoint.CheckpointError(f"{path} does not fit this run: {reason}") from error
        if self.history:
            self.scheduler.step(len(self.history))
        if self.rank == 0:
            steps, epochs = self.batches.steps, self.config.epochs
            if len(self.history) < epochs:
                place = f"step {self.meter.steps} of {steps} of epoch {len(self.history) + 1} of {epochs}"
                logging.warning("going on after %s, from %s", place, path)
            else:
                logging.warning("%s has trained its %d epochs: --epochs N trains on", path, len(self.history))

    def check_restored(self) -> None:
        """Raises a ValueError or KeyError if the history or the optimizer's state is none that a run leaves."""
        for epoch, row in enumerate(self.history, start=1):
            if row["epoch"] != epoch or math.isnan(best_top1(row)) or not all(name.isidentifier() for name in row):
                raise ValueError(f"the history has no row of epoch {epoch} as training writes it")
        if len(self.meter.losses) != len(self.meter.norms):
            raise ValueError("the epoch's progress has not a loss and a norm for each step")
        for parameter, state in self.optimizer.state.items():
            shape, tensors = parameter.shape, {name: t for name, t in state.items() if isinstance(t, Tensor)}
            found = {name: (t.shape, t.dtype) for name, t in tensors.items()}
            moment = shape, torch.float32
            if self.config.opt == "adamw" and found != {
                "step": ((), torch.float32),
                "exp_avg": moment,
                "exp_avg_sq": moment,
            }:
                raise ValueError(f"the optimizer's state of a parameter {tuple(shape)} is not that of AdamW")
            if any(
                t.dim() and t.shape != shape for name, t in tensors.items() if name in ("exp_avg", "momentum_buffer")
            ):
                raise ValueError(f"the optimizer's state of a parameter {tuple(shape)} has another shape")
            if not all(t.isfinite().all() for t in tensors.values()) or not 0 <= float(state.get("step", 0)) < 2**53:
                raise ValueError(f"the optimizer's state of a parameter {tuple(shape)} is none that training reaches")

    def parts(self) -> dict:
        """The parts that learn, which a checkpoint holds under timm's names."""
        parts = {"state_dict": self.model, "optimizer": self.optimizer, "amp_scaler": self.scaler}
        return parts | ({"state_dict_ema": self.ema.module} if self.ema else {})


def as_number(value: float) -> float:
    """A value of a row that a checkpoint holds; a count stays one."""
    return int(float(value)) if isinstance(value, int) else float(value)


if __name__ == "__main__":
    outlive_output()
    main()
