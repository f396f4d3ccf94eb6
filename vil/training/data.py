"""Data of a run: the splits, and their loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import checkpoint
from ..config import Config
from ..data.loaders import Batch, evaluation_loader, training_loader
from ..data.samplers import TrainingBatches
from ..data.sources.splits import class_names, count_images, open_splits, streams


@dataclass(frozen=True)
class Splits:
    """Images of the two splits and their classes; `label_names` is empty if the dataset does not store names."""

    train: Any
    validation: Any
    num_classes: int
    label_names: list[str]

    @classmethod
    def open(cls, config: Config) -> Splits:
        """Open the splits of a run.

        Raises:
            ConfigError: As `open_splits`.
        """
        train, validation, num_classes = open_splits(config)
        return cls(train, validation, num_classes, checkpoint.labels_of(class_names(train)))

    @property
    def num_images(self) -> int:
        """Number of training images."""
        return count_images(self.train)


class Data:
    """Loaders of a run.

    Args:
        config: Options of the run.
        splits: Images of the run.
        data_config: timm's data config of the model's images.
        device: Device of the model.
        batch_size: Images of a batch of the training loader.
        rank: Rank of this process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        config: Config,
        splits: Splits,
        data_config: dict[str, Any],
        device: torch.device,
        batch_size: int,
        rank: int,
        world_size: int,
    ):
        self.val_batch_size = 2 * batch_size  # no gradients are stored
        # an iterable dataset yields each image once
        repeats = dataclasses.replace(config, aug_repeats=0) if streams(splits.train) else config
        self.batches = TrainingBatches(splits.num_images, repeats, batch_size, rank, world_size)
        self.train_loader = training_loader(splits.train, config, data_config, device, self.batches, splits.num_classes)
        self.val_loader = evaluation_loader(
            splits.validation,
            data_config,
            device,
            config.workers,
            self.val_batch_size,
            rank,
            world_size,
            config.augment_on_device,
            is_reused=True,
        )

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps

    @property
    def batches_per_step(self) -> int:
        """Batches of the training loader in an optimizer step of this process."""
        return self.batches.accumulation

    def training_batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """Iterate over the training batches of this process from a step of an epoch on."""
        return self.train_loader.epoch(epoch, first_step)

    @property
    def waits(self) -> tuple[float, float]:
        """Seconds in which prepared images waited for the model, and in which this process prepared images."""
        return self.train_loader.waits

    @property
    def how_loaded(self) -> str:
        """Short description of who loads the images."""
        return self.train_loader.description

    def take_unreadable(self) -> int:
        """Return how many training images of this process could not be read since the last call."""
        return self.train_loader.take_unreadable()
