"""Runs of several phases, each with a schedule of its own: which one is at hand, and whether all can be trained.

A phase begins where the one before has ended: with the weights and their average, resampled to its image size, and the
history. Optimizer, loss scaler and schedule start anew.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from ..config import Config, ConfigError
from ..data.draws import DrawingTransform
from ..data.loaders import training_transform
from ..data.samplers import TrainingBatches, split_global_batch
from ..data.splits import describe_split
from ..factory import input_size
from ..text import one_line
from .building import build_model, build_optimizer
from .losses import Loss
from .resumption import find_resumed

_logger = logging.getLogger(__name__)


def phase_at_hand(config: Config) -> int:
    """The first phase that has epochs to train, counted from 0, by the checkpoint that a run is to go on from.

    Raises:
        CheckpointError: As `find_resumed`.
    """
    if not config.phases or not (found := find_resumed(config.resume, folder_of(config))):
        return 0
    done = len(found[1]["history"])
    return next((n for n in range(config.num_phases) if done < config.epochs_of_phase(n).stop), config.num_phases - 1)


def folder_of(config: Config) -> Path:
    """Where a run writes."""
    return Path(config.output) / str(config.experiment)


def check_phases(config: Config, world_size: int, num_images: int, num_classes: int) -> None:
    """Raises a ConfigError if a later phase could not be trained: it would be found after days."""
    before = None
    for number in range(config.num_phases if config.phases else 0):
        phase = dataclasses.replace(config.of_phase(number), pretrained_path=None)
        try:
            micro_batch, _ = split_global_batch(phase, world_size)
            TrainingBatches(num_images, phase, micro_batch, 0, world_size)
            Loss(phase, num_classes)
            with torch.device("meta"):
                model = build_model(phase, num_classes)
                if before:
                    model.load_state_dict(carried_over(before, num_classes, model))
            before = phase
            build_optimizer(phase, model)
            if phase.augment_on_device:
                DrawingTransform(training_transform(phase, resolve_data_config({}, model=model)))
        except ConfigError as error:
            raise ConfigError(f"phase {number + 1}: {error}") from error
        except RuntimeError as error:  # of models of timm's whose weights depend on the size
            reason = one_line(error, 300)
            raise ConfigError(f"phase {number + 1}: {config.model} cannot go on with other images: {reason}") from error


def carried_over(
    before: Config, num_classes: int, model: nn.Module, weights: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The weights of the phase before, whose size says the grid of their positions, resampled for a model of this."""
    source: Any = build_model(before, num_classes, weights)
    if input_size(source) != input_size(model) and hasattr(source, "set_input_size"):
        source.set_input_size(input_size(model)[1:])
    return source.state_dict()


def announce(config: Config, phase: int, batches: TrainingBatches, train_set: Any, val_set: Any) -> None:
    """Says what a phase is and its splits, and warns where it is too short for its schedule or its average."""
    if not config.synthetic:
        _logger.warning("%s", describe_split(config.train_split, train_set))
        _logger.warning("%s", describe_split(config.val_split, val_set))
    if config.phases:
        options = ", ".join(f"{name} {value}" for name, value in config.phases[phase].items())
        _logger.warning("phase %d of %d: %s", phase + 1, config.num_phases, options)
    _logger.warning("%s", batches.described(config.epochs, "the phase" if config.phases else "the run"))
    if config.aug_repeats > batches.repeats:
        _logger.warning("aug_repeats %d has no effect: a dataset that streams has each image once", config.aug_repeats)
    if config.warmup_epochs >= config.epochs and config.warmup_lr < config.lr:
        _logger.warning(
            "warmup_epochs %d is not less than epochs %d: the learning rate never reaches lr %g",
            config.warmup_epochs, config.epochs, config.lr,
        )  # fmt: skip
    steps, decay = config.epochs * batches.steps, config.model_ema_decay
    if config.model_ema and steps * (1 - decay) < 1:
        _logger.warning(
            "model_ema_decay %s averages over some %.0f steps, and this run has %d: its average will hardly leave what "
            "it begins with. --model-ema-decay %.4g averages over a tenth of the run",
            decay, 1 / (1 - decay) if decay < 1 else float("inf"), steps, max(0.5, 1 - 10 / steps),
        )  # fmt: skip
