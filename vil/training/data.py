"""Data splits and loaders of a training run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from .. import checkpoint
from ..config import Config
from ..data.loaders import evaluation_loader, training_loader
from ..data.samplers import TrainingBatches
from ..data.sources.splits import class_names, count_images, open_splits, streams


@dataclass(frozen=True)
class Splits:
    """Training and validation split, and the classes; `label_names` is empty if the dataset has no class names."""

    train: Any
    validation: Any
    num_classes: int
    label_names: list[str]

    @classmethod
    def open(cls, config: Config) -> Splits:
        """Open the training and validation split of a run.

        Raises:
            ConfigError: As for `open_splits`.
        """
        train, validation, num_classes = open_splits(config)
        return cls(train, validation, num_classes, checkpoint.labels_of(class_names(train)))

    @property
    def num_images(self) -> int:
        """Number of training images."""
        return count_images(self.train)


class Data:
    """Training and validation loaders of a run.

    Args:
        config: Options of the run.
        splits: Training and validation split.
        data_config: timm's data config of the model's images.
        device: Device for the batches, which is the model's device.
        batch_size: Images per batch of the training loader.
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
        # Evaluation stores no activations for backward, so larger batches than in training fit into memory.
        self.val_batch_size = 2 * batch_size
        # Repeated augmentation is disabled for an iterable dataset, which yields each image only once.
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
