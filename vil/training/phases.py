"""Training phases, each with its own options and learning-rate schedule; most runs have only one phase.

A phase continues the previous phase's history, and starts from the previous phase's model and EMA weights, resampled to
the image size of the new phase. Each phase has a new optimizer, gradient scaler and scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from ..config import Config, ConfigError
from ..data.device.transform_parameters import TransformSampler
from ..data.loaders import training_transform
from ..data.samplers import TrainingBatches, split_global_batch
from ..data_config import input_size
from ..text import one_line
from .building import build_model, build_optimizer
from .losses import Loss


@dataclass(frozen=True)
class Phase:
    """One training phase of a run.

    Attributes:
        index: Index of the phase, counted from 0.
        config: Options of the phase.
        epochs: Range of the phase's epochs, counted from 0 over the whole run.
    """

    index: int
    config: Config
    epochs: range

    @classmethod
    def of(cls, config: Config, index: int) -> Phase:
        return cls(index, config.of_phase(index), config.epochs_of_phase(index))

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.epochs.stop == self.config.total_epochs

    @property
    def previous(self) -> Phase:
        return Phase.of(self.config, self.index - 1)

    def starts_from(self, saved: dict[str, Any]) -> bool:
        """Return whether a checkpoint was written at the end of the previous phase."""
        finished = len(saved["history"])
        return not self.is_first and finished == self.epochs.start and not saved["progress"].get("losses")

    def that_wrote(self, saved: dict[str, Any]) -> Phase:
        """Return the phase that wrote a checkpoint: this phase, or the previous phase if this phase starts from it."""
        return self.previous if self.starts_from(saved) else self


def check_phases(config: Config, world_size: int, num_images: int, num_classes: int) -> None:
    """Check all phases when a run starts, so that a later phase does not fail after days of training.

    Raises:
        ConfigError: A phase cannot be trained.
    """
    if not config.phases:
        return
    before = None
    for index in range(config.num_phases):
        phase = config.of_phase(index).without_initial_weights()
        try:
            _check_phase(phase, before, world_size, num_images, num_classes)
        except ConfigError as error:
            raise ConfigError(f"phase {index + 1}: {error}") from error
        except RuntimeError as error:  # raised by timm models whose weights depend on the image size
            reason = one_line(error, 300)
            raise ConfigError(f"phase {index + 1}: {config.model} cannot change its image size: {reason}") from error
        before = phase


def _check_phase(phase: Config, before: Config | None, world_size: int, num_images: int, num_classes: int) -> None:
    """Try to create the batches, loss, model (on the meta device), optimizer and any device transforms of a phase."""
    micro_batch, _ = split_global_batch(phase, world_size)
    TrainingBatches(num_images, phase, micro_batch, 0, world_size)
    Loss(phase, num_classes)
    with torch.device("meta"):
        model = build_model(phase, num_classes)
        if before:
            model.load_state_dict(resampled_weights(before, num_classes, model))
    build_optimizer(phase, model)
    if phase.augment_on_device:
        TransformSampler(training_transform(phase, resolve_data_config({}, model=model)))


def resampled_weights(
    before: Config, num_classes: int, model: nn.Module, weights: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Resample the previous phase's weights to the image size of `model`.

    Args:
        before: Options of the previous phase, which determine the grid size of the position embeddings in `weights`.
        num_classes: Number of classes.
        model: Model of the new phase.
        weights: State dict at the end of the previous phase; None uses random weights of the previous phase's model.
    """
    source: Any = build_model(before, num_classes, weights)
    if input_size(source) != input_size(model) and hasattr(source, "set_input_size"):
        source.set_input_size(input_size(model)[1:])
    return source.state_dict()
