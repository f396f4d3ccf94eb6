"""Training of a run: the loop over epochs and batches, evaluation, and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import math
import weakref
from contextlib import ExitStack, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from timm.utils import distribute_bn
from torch import Tensor
from tqdm import tqdm

from .. import checkpoint
from ..config import Config, ConfigError, options_of_checkpoint
from ..cuda_graphs import Replayed, unchanged
from ..data.device.augmentation import BatchAugmentation
from ..data.host.workers import share_cores
from ..data.loaders import describe, evaluation_loader, micro_batches, training_loader, unreadable_images
from ..data.samplers import TrainingBatches, split_global_batch
from ..data.seeds import derive_seed, seed_everything
from ..data.sources.images import UnreadableSplitError
from ..data.sources.splits import class_names, count_images, open_splits, streams
from ..data_config import chosen_data_config
from ..devices import autocast
from ..distributed import (
    all_reduce_sum,
    broadcast_from_rank0,
)
from ..evaluation.evaluator import Evaluator
from ..fault_tolerance.locks import FolderLock
from ..text import one_line
from . import resumption
from .best import BestCheckpoint
from .building import build_model, build_optimizer, build_scheduler
from .gradients import FlatGradients
from .interruption import CheckpointTimer, PreemptedError, StoppedError
from .losses import Loss
from .meter import Bottleneck, EpochMeter
from .phases import announce, carried_over, check_phases, folder_of, phase_at_hand
from .summary import Reporter, epoch_line
from .teacher import Teacher
from .update import ListedEma, Update


class DivergenceError(RuntimeError):
    """The loss or the gradient is not finite."""


def train(config: Config, device: torch.device, rank: int, world_size: int) -> None:
    """Train the remaining phases of a run; most runs have one phase."""
    lock, first = None, broadcast_from_rank0(functools.partial(phase_at_hand, config))
    for phase in range(first, config.num_phases):
        trainer = Trainer(config, device, rank, world_size, phase, lock)
        trainer.run()
        lock, config = trainer.lock, dataclasses.replace(config, resume="auto")
        del trainer
        gc.collect()  # free the graphs and loaders before the next phase creates its own
        torch.cuda.empty_cache()


def options_to_save(config: Config, num_classes: int, folder: Path) -> dict[str, Any]:
    """Return the options as a run's checkpoints store them.

    Raises:
        ConfigError: An option must not be stored in a checkpoint.
    """
    options = dataclasses.asdict(config) | {"num_classes": num_classes}
    # absolute, because the checkpoint may be read from another folder
    if config.data_dir and Path(config.data_dir).is_dir():
        options["data_dir"] = str(Path(config.data_dir).resolve())
    try:
        options_of_checkpoint(options, folder / "last.pt")
    except ConfigError as error:
        raise ConfigError(f"this run's checkpoints could not be read: {error}") from error
    return options


class Trainer:
    """One process of a run: `run` loops over the epochs, `train_one_epoch` over the global batches of an epoch.

    In a run with phases, a Trainer trains one phase, counted from 0, and resumes from the folder; `lock` is the lock of
    the previous phase.
    """

    def __init__(
        self, config: Config, device: torch.device, rank: int, world_size: int, phase: int = 0,
        lock: FolderLock | None = None,
    ):  # fmt: skip
        self.config = config = config.of_phase(phase)
        self.phase, self.epochs = phase, config.epochs_of_phase(phase)
        self.device, self.rank, self.world_size = device, rank, world_size
        self.folder = folder_of(config)
        micro_batch, _ = split_global_batch(config, world_size)
        train_set, val_set, num_classes = open_splits(config)
        check_phases(config, world_size, count_images(train_set), num_classes)

        self.saved_config = options_to_save(config, num_classes, self.folder)
        broadcast_from_rank0(lambda: self.compare_size(num_classes))
        share_cores(device, config.workers)
        seed_everything(config.seed)
        fresh = dataclasses.replace(config, pretrained_path=None) if phase else config
        self.label_names = checkpoint.labels_of(class_names(train_set))
        self.model = build_model(fresh, num_classes, label_names=self.label_names).to(device)
        seen = {name: getattr(config, name) for name in ("img_size", "crop_pct", "interpolation")}
        data_config = chosen_data_config(self.model, **seen)
        self.teacher = None
        if config.teacher:
            self.teacher = Teacher(config, num_classes, self.label_names, data_config, self.model)
        self.loss_fn = Loss(config, num_classes, self.teacher)
        of_set = dataclasses.replace(config, aug_repeats=0) if streams(train_set) else config
        self.batches = TrainingBatches(count_images(train_set), of_set, micro_batch, rank, world_size)
        self.train_loader = training_loader(train_set, config, data_config, device, self.batches)
        self.val_loader = evaluation_loader(
            val_set, data_config, device, config.workers, 2 * micro_batch, rank, world_size, config.augment_on_device,
            again=True,
        )  # fmt: skip
        self.augment = BatchAugmentation(config, num_classes, data_config)

        self.optimizer = build_optimizer(config, self.model)
        self.scheduler = build_scheduler(config, self.optimizer)
        self.ema = ListedEma(self.model, decay=config.model_ema_decay) if config.model_ema else None
        if rank == 0:
            announce(config, phase, self.batches, train_set, val_set)
        self.precision = autocast(device, config.amp, config.amp_dtype)
        scaled = config.amp and config.amp_dtype == "float16" and device.type != "cpu"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)

        self.lock = lock  # rank 0 holds the folder's lock
        self.history: list[dict] = []  # a row for each finished epoch, as in summary.csv
        self.best = BestCheckpoint(self.folder)
        self.meter = EpochMeter()  # steps of the current epoch
        self.bottleneck = Bottleneck(max(1, min(config.log_interval, self.batches.steps // 3)))
        if resumed := broadcast_from_rank0(self.take_folder):
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

    def compare_size(self, num_classes: int) -> None:
        """Reject a file of another model before a model of the claimed size uses memory."""
        path = resumption.resolve_resume(self.config.resume, self.folder)
        if path is None or path == "auto":
            return
        saved = checkpoint.read_checkpoint(path, whole=False)
        decisive = {name: value for name, value in saved["config"].items() if name in resumption.DECISIVE}
        wrote = self.config.of_phase(self.phase - self.begins(saved))
        resumption.check_same_run(decisive, options_to_save(wrote, num_classes, self.folder), Path(path))
        with torch.device("meta"):
            model = build_model(dataclasses.replace(wrote, pretrained_path=None), num_classes)
        checkpoint.load_weights(model, saved["state_dict"], path)

    def fit_to_device(self, input_size: tuple[int, ...], num_classes: int) -> None:
        """Choose the micro-batch size and, on a GPU, capture forward and backward as a CUDA graph."""
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
        """Number of backward passes for this process's share of a global batch."""
        return self.batches.accumulation * self.batches.micro_batch // self.at_once

    def tried_out(self, input_size: tuple[int, ...], num_classes: int) -> Replayed | None:
        """Run `backward` on the GPU for `at_once` images, and return it as a CUDA graph if requested."""
        images = torch.zeros(self.at_once, *input_size, device=self.device)
        classes = images.new_zeros(self.at_once, dtype=torch.long)
        targets = images.new_zeros(self.at_once, num_classes) if self.config.mixing else classes
        changed = [self.gradients.flat, *self.model.buffers()]
        optimizers_share = images.new_empty(2, self.gradients.flat.numel())  # memory that the optimizer needs later
        if self.config.cuda_graphs:
            # otherwise a reference cycle would keep the run and its loaders alive
            backward: Any = weakref.WeakMethod(self.backward)
            return Replayed(lambda *batch: backward()(*batch), [images, targets], "training", changed)
        with unchanged(changed):
            self.backward(images, targets)
        del optimizers_share
        return None

    @property
    def setup(self) -> str:
        """Line about the configuration chosen for this machine."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        graphs = ", as a CUDA graph" if self.replayed and self.replayed.graph else ""
        return (
            f"{self.world_size} x {name}: {self.at_once} of {self.config.global_batch_size} images at once on each"
            f"{graphs}; {describe(self.train_loader)}{f'; {self.teacher.cost}' if self.teacher else ''}"
        )

    def run(self) -> None:
        report = None
        if self.rank == 0:
            report = Reporter(self.folder, self.config, self.saved_config, self.setup)
            report.catch_up(self.history)
            logging.warning(self.setup)
        epochs, batch = self.config.total_epochs, self.config.global_batch_size
        last = self.epochs.stop == epochs
        # None disables the progress bar unless stderr is a terminal; there is a line for each epoch
        quiet = None if self.rank == 0 else True
        sizes = dict(total=len(self.epochs) * self.batches.steps * batch, initial=self.steps * batch)
        phase = {"phase": self.phase + 1} if self.config.phases else {}
        with ExitStack() as stack, tqdm(**sizes, unit="img", unit_scale=True, disable=quiet) as bar:
            if self.lock:
                stack.enter_context(self.lock)
            for epoch in range(len(self.history), self.epochs.stop):
                bar.set_description(f"epoch {epoch + 1}/{epochs}{f', phase {self.phase + 1}' if phase else ''}")
                self.train_one_epoch(epoch, bar)
                row = {"epoch": epoch + 1, **phase, "lr": self.rate, **self.meter.summary(batch), **self.evaluate()}
                self.checkpoint_if_due()  # a signal interrupts an evaluation, which is repeated on resuming
                self.history.append(row)
                self.meter = EpochMeter()
                self.scheduler.step(epoch + 1 - self.epochs.start)
                self.save()
                if report:
                    report(self.history)
                    tqdm.write(epoch_line(self.history, epochs))
            if not last:
                self.timer.give_back()
                self.checkpoint_if_due()  # a signal since the last check
                stack.pop_all()  # the next phase takes over the lock
        if report and last:
            tqdm.write(report.closing_line(self.history, self.best.find(self.history)))

    def train_one_epoch(self, epoch: int, bar: tqdm) -> None:
        """Train on the remaining global batches of an epoch."""
        self.model.train()
        loss = torch.zeros((), device=self.device)
        batches = micro_batches(self.train_loader, self.batches, epoch, self.meter.steps)
        for i, ((images, targets), position) in enumerate(self.meter.timed(self.timer.watched(batches)), start=1):
            is_last = i % self.batches.accumulation == 0
            all_loaded = self.timer.all_loaded() if is_last else None
            images, targets = self.augment(images, targets, epoch, position)
            # stochastic depth also depends only on the seed and the position in the run
            seed_everything(derive_seed(self.config.seed, epoch, position, 2))
            for start in range(0, len(images), self.at_once):
                part = slice(start, start + self.at_once)
                loss = loss + (self.replayed or self.backward)(images[part], targets[part])
            if not all_loaded:
                continue
            if not all_loaded():
                break
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
        self.stop_if_not_loaded()
        self.check_finite()

    def backward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Add the gradient of a micro-batch, and return its part of the loss."""
        with self.precision:
            loss = self.loss_fn(self.network(images), targets, images) / self.accumulation
        self.gradients.add(self.scaler.scale(loss))
        return loss.detach()

    def update(self) -> Tensor:
        """Run one optimizer step, and return the gradient norm before clipping."""
        self.gradients.average_over_processes()
        return self.apply_gradients()

    def share_statistics(self) -> None:
        """Average BatchNorm's running statistics over all ranks, because each rank has those of its own images."""
        if self.world_size > 1:
            for model in self.evaluator.models:
                distribute_bn(model, self.world_size, reduce=True)

    def evaluate(self) -> dict[str, float]:
        self.share_statistics()
        images = takewhile(lambda _: not self.timer.signalled, self.timer.watched(self.val_loader))
        results = self.evaluator(images)
        if results[0].is_blind:
            self.timer.fail(UnreadableSplitError("no image of the validation split can be read"))
        row = {"eval_images": results[0].images, "eval_images_per_second": results[0].images_per_second}
        for suffix, result in zip(("", "_ema"), results):
            row |= {f"eval_{name}{suffix}": getattr(result, name) for name in ("loss", "top1", "top5")}
        skipped = all_reduce_sum(torch.tensor(unreadable_images(self.train_loader)))
        return row | {"unreadable_images": results[0].unreadable + skipped.item()}

    @property
    def rate(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    @property
    def steps(self) -> int:
        """Number of finished optimizer steps of this phase."""
        return (len(self.history) - self.epochs.start) * self.batches.steps + self.meter.steps

    def check_finite(self) -> None:
        """Check the steps since the last call; only here does the host wait for the device."""
        first = len(self.meter.losses)
        self.meter.collect()
        for step in range(first, self.meter.steps):
            # float16's gradient scaler skips steps whose gradient overflows
            values = {"loss": self.meter.losses[step], "gradient's norm": self.meter.norms[step]}
            for name in ("loss",) if self.scaler.is_enabled() else values:
                if not math.isfinite(values[name]):
                    last = self.folder / "last.pt"
                    raise DivergenceError(
                        f"the {name} is {values[name]} at step {step + 1} of epoch {len(self.history) + 1}, at "
                        f"learning rate {self.rate:.3g}; the last checkpoint before is "
                        f"{last if last.exists() else 'none yet'}. A lower --lr, --clip-grad or --no-amp may help; "
                        "--resume auto resumes from the checkpoint"
                    )

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint if one is due. All ranks must call this after the same steps."""
        if self.timer.due(self.steps):
            self.checkpoint()

    def stop_if_not_loaded(self) -> None:
        """Save the last finished step and stop all processes if one of them could not load the images of the next."""
        if self.timer.failure and self.meter.steps < self.batches.steps:
            self.timer.all_loaded()()  # the other processes wait for it in their step
        if self.timer.failed:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write a checkpoint, and stop if a signal came or images could not be loaded."""
        self.check_finite()  # a checkpoint must not contain a diverged model
        self.share_statistics()  # otherwise the checkpoint would have only rank 0's statistics
        saved = "no step was finished, so there is nothing to save"
        if self.history or self.meter.steps:
            self.save()
            saved = (
                f"{self.folder / 'last.pt'} holds step {self.meter.steps} of epoch {len(self.history) + 1}, and "
                "--resume auto resumes from there"
            )
        if self.timer.failed:
            raise StoppedError(f"stopped because images could not be read: {saved}")
        if self.timer.stop:
            raise PreemptedError(f"stopped by a signal: {saved}")

    def save(self) -> None:
        """Write last.pt and, at the end of an epoch, best.pt if the model or its EMA weights are the best so far."""
        if self.rank > 0:
            return
        state = self.state()
        if self.meter.steps == 0 and self.best.is_beaten_by(self.history[-1]):
            self.best.write(state)
        checkpoint.save_checkpoint(state, self.folder / "last.pt", previous=self.folder / "previous.pt")

    def state(self) -> dict[str, Any]:
        """Return the content of last.pt."""
        return {
            "arch": self.config.model,
            "epoch": len(self.history),
            "config": self.saved_config,
            "label_names": self.label_names or None,
            "num_images": self.batches.num_images,
            "teacher": self.teacher.digest if self.teacher else None,
            "history": self.history,
            "progress": self.meter.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            **{name: part.state_dict() for name, part in self.parts().items()},
        }

    def take_folder(self) -> list | None:
        """Lock the folder against other runs, and return the checkpoint that this run resumes from and its content."""
        try:
            self.lock = self.lock or FolderLock(self.folder)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self.folder}: {error}. Choose another folder with --output or --experiment"
            ) from error
        for path in (self.folder / f"{name}.pt" for name in ("last", "previous", "best")):
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} exists but is not a regular file; move or remove it")
        if not (found := resumption.find_resumed(self.config.resume, self.folder)):
            return None
        path, saved = found
        middle = bool(saved["progress"].get("losses"))
        wrote = self.config.of_phase(self.phase - self.begins(saved))
        options = options_to_save(wrote, self.saved_config["num_classes"], self.folder)
        resumption.check_same_run(saved["config"], options, path, middle)
        resumption.check_same_classes(saved, self.label_names, path)
        resumption.check_same_teacher(saved, self.teacher.digest if self.teacher else None, path)
        if saved["num_images"] not in (0, images := self.batches.num_images):
            logging.warning("going on with %d training images, was %d", images, saved["num_images"])
        return [str(path), saved]

    def begins(self, saved: dict) -> bool:
        """Return whether a checkpoint is the end of the previous phase."""
        return self.phase > 0 and len(saved["history"]) == self.epochs.start and not saved["progress"].get("losses")

    def restore(self, path: str, saved: dict) -> None:
        """Resume from a checkpoint, with the options of this run if they differ."""
        begins, parts = self.begins(saved), self.parts()
        try:
            if begins:  # everything else starts anew
                parts = {name: part for name, part in parts.items() if name.startswith("state_dict")}
                before, num_classes = self.config.of_phase(self.phase - 1), self.saved_config["num_classes"]
                saved |= {name: carried_over(before, num_classes, self.model, saved[name]) for name in parts}
            else:
                for group, chosen in zip(saved["optimizer"]["param_groups"], self.optimizer.param_groups):
                    group.update({k: v for k, v in chosen.items() if k != "params"})
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            self.history = resumption.history_of(saved["history"])
            self.meter.load_state_dict(saved["progress"])
            resumption.check_progress(self.meter)
            resumption.check_optimizer(self.optimizer, self.config.opt)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
            reason = one_line(f"{type(error).__name__}: {error}", 400)
            raise checkpoint.CheckpointError(f"{path} does not fit this run: {reason}") from error
        if done := len(self.history) - self.epochs.start:
            self.scheduler.step(done)
        if self.rank == 0:
            self.best.resume(self.history)
            if self.history and not self.best.row and not self.meter.steps and not begins:
                self.best.write(self.state())
            steps, epochs = self.batches.steps, self.config.total_epochs
            if len(self.history) < epochs:
                place = f"step {self.meter.steps} of {steps} of epoch {len(self.history) + 1} of {epochs}"
                logging.warning("going on after %s, from %s", place, path)
            else:
                logging.warning("%s has trained its %d epochs: --epochs N trains on", path, len(self.history))

    def parts(self) -> dict:
        """Return the trained parts, which a checkpoint stores under timm's names."""
        parts = {"state_dict": self.model, "optimizer": self.optimizer, "amp_scaler": self.scaler}
        return parts | ({"state_dict_ema": self.ema.module} if self.ema else {})
