"""The training loop: build the model and data, then train, evaluate and save in each epoch.

The components of a `Trainer` are in the other modules of this package: `data` (splits and loaders), `state`
(everything that changes during training), `checkpointer` (last.pt and best.pt), `forward_backward` and `update` (an
optimizer step), `interruption` (signals and checkpoint intervals), `meter` (losses and times) and `progress` (progress
bar and report files).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Iterator
from itertools import takewhile

import torch
from timm.utils import distribute_bn
from torch import Tensor

from ..config import Config
from ..data.host.workers import share_cores
from ..data.samplers import split_global_batch
from ..data.seeds import derive_seed, seed_everything
from ..data.sources.images import UnreadableSplitError
from ..data_config import chosen_data_config
from ..devices import autocast
from ..distributed import all_reduce_sum, broadcast_from_rank0
from ..evaluation.evaluator import Evaluation, Evaluator
from ..evaluation.predictions import PredictionCollector
from ..fault_tolerance.locks import FolderLock
from .announce import announce, describe_setup
from .bottleneck import Bottleneck
from .building import build_model, build_state
from .checkpointer import Checkpointer
from .data import Data, Splits
from .divergence import check_divergence
from .final_report import is_reported, write_final_report
from .forward_backward import ForwardBackward
from .gradients import FlatGradients
from .history import evaluation_columns
from .interruption import CheckpointTimer, Decision, LoadingWatch, SignalWatch
from .losses import Loss
from .mosaic import Mosaic
from .phases import Phase, check_phases
from .progress import Progress
from .resumption import first_phase, resumes
from .run_info import RunInfo, stored_options
from .teacher import Teacher
from .update import Update


def train(config: Config, device: torch.device, rank: int, world_size: int) -> list[dict[str, float]]:
    """Train the remaining phases of a run. Most runs have only one phase.

    Returns:
        History of the run: one row per epoch, as in summary.csv.
    """
    history: list[dict[str, float]] = []
    lock = None
    first = broadcast_from_rank0(functools.partial(first_phase, config))
    for phase in range(first, config.num_phases):
        trainer = Trainer(config, device, rank, world_size, phase, lock)
        trainer.run()

        # The next phase keeps the lock of the run folder and resumes from the last checkpoint of this phase.
        lock = trainer.checkpointer.lock
        history = trainer.state.history
        config = dataclasses.replace(config, resume="auto")
        del trainer
        gc.collect()  # free the CUDA graphs and loaders of this phase before the next phase starts
        torch.cuda.empty_cache()
    return history


class Trainer:
    """Trains one phase of a run in one process.

    Args:
        config: Options of the run.
        device: Device of this process.
        rank: Rank of this process.
        world_size: Number of processes.
        phase: Index of the phase, counted from 0.
        lock: Lock of the run folder, passed on from the previous phase.

    Raises:
        ConfigError: An option is invalid for the data, model or device.
        CheckpointError: The checkpoint to resume from cannot be read or belongs to another run.
        FolderInUseError: Another run has locked the run folder.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        rank: int,
        world_size: int,
        phase: int = 0,
        lock: FolderLock | None = None,
    ):
        self.phase = Phase.of(config, phase)
        self.config = config = self.phase.config
        self.device = device
        self.rank = rank
        self.world_size = world_size

        # Invalid options are rejected before anything large is built.
        batch_size, _ = split_global_batch(config, world_size)
        self.splits = splits = Splits.open(config)
        check_phases(config, world_size, splits.num_images, splits.num_classes)
        options = stored_options(config, splits.num_classes)
        is_resumed = broadcast_from_rank0(lambda: resumes(self.phase, splits.num_classes, splits.label_names))

        share_cores(device, config.workers)
        seed_everything(config.seed)
        # a resumed run, and thus each later phase, loads no initial weights, because the checkpoint replaces them
        initial = config.without_initial_weights() if is_resumed else config
        model = build_model(initial, splits.num_classes, label_names=splits.label_names).to(device)
        data_config = chosen_data_config(
            model, img_size=config.img_size, crop_pct=config.crop_pct, interpolation=config.interpolation
        )
        self.teacher = None
        if config.teacher:
            self.teacher = Teacher(config, splits.num_classes, splits.label_names, data_config, model)
        loss_fn = Loss(config, splits.num_classes, self.teacher)
        self.data = Data(config, splits, data_config, device, batch_size, rank, world_size)

        # The training state is restored from a checkpoint if the run resumes.
        self.state = state = build_state(config, model, self.phase.epochs.start)
        if rank == 0:
            announce(self.phase, self.data.batches, splits, model)
        self.run_info = RunInfo.of(self.phase, options, splits, self.teacher)
        self.checkpointer = Checkpointer(self.run_info, state, rank, self.data.batches.steps, lock)
        self.checkpointer.load()

        # From now on, a signal makes the run write a checkpoint and stop.
        self.signals = SignalWatch()
        self.loading = LoadingWatch()
        self.timer = CheckpointTimer(config.checkpoint_interval, self.steps, self.signals, self.loading)

        precision = autocast(device, config.amp, config.amp_dtype)
        gradients = FlatGradients(model.parameters())
        self.forward_backward = ForwardBackward(config, state, loss_fn, gradients, precision, batch_size, world_size)
        self.update = Update(
            model, gradients, state.optimizer, state.scaler, state.ema, config.clip_grad, config.cuda_graphs
        )
        graph_batch_size = self.data.val_batch_size if config.cuda_graphs else None
        self.evaluator = Evaluator(state.models, data_config["input_size"], device, precision, graph_batch_size)
        self.forward_backward.fit(data_config["input_size"], splits.num_classes)

        self.setup = describe_setup(config, device, world_size, self.forward_backward, self.data, self.teacher)
        self.mosaic = Mosaic(self.run_info, data_config, rank)
        self.bottleneck = Bottleneck(max(1, min(config.log_interval, self.data.batches.steps // 3)))

    def run(self) -> None:
        """Train the remaining epochs of the phase."""
        state = self.state
        steps_per_epoch = self.data.batches.steps
        with (
            self.checkpointer.hold_lock(release=self.phase.is_last),
            Progress(self.run_info, self.rank, self.setup, state.history, steps_per_epoch, self.steps) as progress,
        ):
            for epoch in range(len(state.history), self.phase.epochs.stop):
                progress.start_epoch(epoch)
                self.train_one_epoch(epoch, progress)
                row = self.row_of_epoch(epoch)
                self.checkpoint_if_due()  # if a signal interrupted the evaluation, the resumed run evaluates again
                state.finish_epoch(row)
                self.checkpointer.save()
                progress.finish_epoch(state.history)
            self.mosaic.finish()

            if not self.phase.is_last:
                self.signals.restore_handlers()
                self.checkpoint_if_due()  # a signal may have arrived since the last check
            elif is_reported(self.splits, self.world_size):
                run, best = self.run_info, self.checkpointer.best
                write_final_report(run, self.splits, best, state.history, self.rank, self.evaluate_weights)
        if self.phase.is_last:
            progress.finish_run(state.history, self.checkpointer.best)

    def train_one_epoch(self, epoch: int, progress: Progress) -> None:
        """Train on the unfinished batches of an epoch."""
        state = self.state
        state.model.train()
        loss = torch.zeros((), device=self.device)
        batches = self.loading.until_failure(self.data.train_loader.epoch(epoch, state.meter.steps))
        for number, batch in enumerate(state.meter.timed(batches), start=1):
            completes_step = number % self.data.batches.accumulation == 0
            if completes_step:
                all_loaded = self.loading.begin_check()  # the check runs during the forward pass
            with state.meter.paused():
                self.mosaic.add(batch.images, batch.targets)

            # Each batch is seeded, so that a resumed run samples the same stochastic depth.
            seed_everything(derive_seed(self.config.seed, epoch, batch.position, 2))
            for micro_batch in self.forward_backward.micro_batches(batch.images, batch.targets):
                loss = loss + self.forward_backward(*micro_batch)
            if not completes_step:
                continue

            if not all_loaded():
                self.checkpoint(Decision(cannot_load=True))  # `checkpoint` raises a StoppedError
            state.meter.add(loss, self.update())
            loss = torch.zeros_like(loss)

            self.look_at_step(progress)
            progress.finish_step()
            self.checkpoint_if_due()

        if self.loading.failure and state.meter.steps < self.data.batches.steps:
            self.loading.report_failure()
            self.checkpoint(Decision(cannot_load=True))
        check_divergence(self.state, self.checkpointer.last)

    def look_at_step(self, progress: Progress) -> None:
        """Check and show the loss after each logging interval, and warn if the GPU waits for the host."""
        meter = self.state.meter
        if meter.steps % self.config.log_interval == 0:
            check_divergence(self.state, self.checkpointer.last)
            progress.show(meter.losses[-1], self.state.learning_rate)
        if self.device.type == "cuda":
            self.bottleneck.look(meter, self.data.train_loader.images)

    def row_of_epoch(self, epoch: int) -> dict[str, float]:
        """Evaluate the model and return the epoch's row of summary.csv."""
        phase = {"phase": self.phase.index + 1} if self.config.phases else {}
        training = self.state.meter.summary(self.config.global_batch_size)
        return {"epoch": epoch + 1, **phase, "lr": self.state.learning_rate, **training, **self.evaluate()}

    def evaluate(self) -> dict[str, float]:
        """Evaluate the model and its EMA on the validation split. A signal interrupts the evaluation."""
        self.average_batch_norms()
        results = self.evaluator(self.validation_batches())
        if results[0].is_blind:
            self.loading.fail(UnreadableSplitError("no image of the validation split can be read"))
        unreadable = all_reduce_sum(torch.tensor(self.data.train_loader.take_unreadable())).item()
        unreadable += results[0].unreadable
        return {**evaluation_columns(results), "unreadable_images": unreadable}

    def evaluate_weights(self, weights: dict[str, Tensor]) -> tuple[Evaluation, PredictionCollector]:
        """Evaluate the model with other weights on the validation split, then restore the model's weights."""
        model, collector = self.state.model, PredictionCollector(1, self.splits.num_classes, self.device)
        before = {name: t.to("cpu", copy=True) for name, t in model.state_dict().items()}
        model.load_state_dict(weights)
        try:
            results = self.evaluator(self.validation_batches(), lambda targets, logits: collector(targets, logits[:1]))
            return results[0], collector
        finally:
            model.load_state_dict(before)

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the validation split. A signal or a failure to load images ends the iteration."""
        batches = self.loading.until_failure(self.data.val_loader)
        return takewhile(lambda _: not self.signals.received, batches)

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint if due, and stop if requested. All ranks must call this method after the same step."""
        decision = self.timer.decide(self.steps)
        if decision.writes_checkpoint:
            self.checkpoint(decision)

    def checkpoint(self, decision: Decision) -> None:
        """Write a checkpoint of the unfinished epoch.

        Raises:
            DivergenceError: The run has diverged.
            CheckpointError: Writing failed.
            StoppedError, PreemptedError: `decision` stops the run.
        """
        check_divergence(self.state, self.checkpointer.last)  # a checkpoint must not contain a diverged model
        self.average_batch_norms()  # each rank has its own BatchNorm statistics, and rank 0 writes the checkpoint
        saved = self.checkpointer.save_unfinished_epoch()
        decision.raise_if_stopping(saved)

    def average_batch_norms(self) -> None:
        """Average BatchNorm's running statistics over all ranks, because each rank has different images."""
        if self.world_size > 1:
            for model in self.state.models:
                distribute_bn(model, self.world_size, reduce=True)

    @property
    def steps(self) -> int:
        """Number of finished optimizer steps of this phase."""
        epochs = len(self.state.history) - self.phase.epochs.start
        return epochs * self.data.batches.steps + self.state.meter.steps
