"""Runs of several phases, each with its own schedule: the current phase, and checks of all phases in advance.

A phase starts from the previous phase's model and EMA weights, resampled to its image size, and from the history.
Optimizer, gradient scaler and schedule start anew.
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
from ..data.device.transform_parameters import DrawingTransform
from ..data.loaders import training_transform
from ..data.samplers import TrainingBatches, split_global_batch
from ..data.sources.splits import describe_split
from ..data_config import input_size
from ..text import one_line
from .building import build_model, build_optimizer
from .losses import Loss
from .resumption import find_resumed

_logger = logging.getLogger(__name__)


def phase_at_hand(config: Config) -> int:
    """Return the index of the first phase with epochs left to train, according to the checkpoint to resume from.

    Raises:
        CheckpointError: As `find_resumed`.
    """
    if not config.phases or not (found := find_resumed(config.resume, folder_of(config))):
        return 0
    done = len(found[1]["history"])
    return next((n for n in range(config.num_phases) if done < config.epochs_of_phase(n).stop), config.num_phases - 1)


def folder_of(config: Config) -> Path:
    """Return the run folder."""
    return Path(config.output) / str(config.experiment)


def check_phases(config: Config, world_size: int, num_images: int, num_classes: int) -> None:
    """Raise a ConfigError if a later phase cannot be trained, instead of failing after days of training."""
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
        except RuntimeError as error:  # timm models whose weights depend on the image size
            reason = one_line(error, 300)
            raise ConfigError(f"phase {number + 1}: {config.model} cannot change its image size: {reason}") from error


def carried_over(
    before: Config, num_classes: int, model: nn.Module, weights: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the previous phase's weights, resampled to the image size of `model`.

    Args:
        before: Options of the previous phase, which determine the grid of its position embeddings.
        num_classes: Number of classes.
        model: Model of the new phase.
        weights: State dict at the end of the previous phase; new random weights if None.
    """
    source: Any = build_model(before, num_classes, weights)
    if input_size(source) != input_size(model) and hasattr(source, "set_input_size"):
        source.set_input_size(input_size(model)[1:])
    return source.state_dict()


def announce(config: Config, phase: int, batches: TrainingBatches, train_set: Any, val_set: Any) -> None:
    """Log the phase and its splits, and warn if the phase is too short for its schedule or its EMA."""
    if not config.synthetic:
        _logger.warning("%s", describe_split(config.train_split, train_set))
        _logger.warning("%s", describe_split(config.val_split, val_set))
    if config.phases:
        options = ", ".join(f"{name} {value}" for name, value in config.phases[phase].items())
        _logger.warning("phase %d of %d: %s", phase + 1, config.num_phases, options)
    _logger.warning("%s", batches.described(config.epochs, "the phase" if config.phases else "the run"))
    if config.aug_repeats > batches.repeats:
        _logger.warning(
            "aug_repeats %d has no effect, because an iterable dataset yields each image once", config.aug_repeats
        )
    if config.warmup_epochs >= config.epochs and config.warmup_lr < config.lr:
        _logger.warning(
            "warmup_epochs should be less than epochs: with %d of %d epochs the learning rate never reaches lr %g",
            config.warmup_epochs, config.epochs, config.lr,
        )  # fmt: skip
    steps, decay = config.epochs * batches.steps, config.model_ema_decay
    if config.model_ema and steps * (1 - decay) < 1:
        _logger.warning(
            "model_ema_decay %s averages over about %.0f steps, but this run has only %d, so the EMA weights will stay "
            "close to the initial weights: --model-ema-decay %.4g averages over a tenth of the run",
            decay, 1 / (1 - decay) if decay < 1 else float("inf"), steps, max(0.5, 1 - 10 / steps),
        )  # fmt: skip
