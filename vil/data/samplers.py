"""Batch samplers of (index, seed) pairs, which determine the order of images and the share of each rank.

In training, the images of a global batch and the seeds of their augmentation depend on the run's seed, the epoch and
the position in the epoch. The images and seeds do not depend on the world size, the number of workers or the
accumulation steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import numpy as np

from ..config import Config, ConfigError
from ..text import counted

FEW = 8  # the log recommends more steps if a run has fewer than FEW steps per epoch and fewer than FEW**3 in total
SMALL = 4  # the log recommends smaller batches only if the global batch size exceeds SMALL


def split_global_batch(config: Config, world_size: int) -> tuple[int, int]:
    """Return the micro-batch size of a rank and the number of accumulation steps.

    Raises:
        ConfigError: The global batch is not divisible by the world size, or mixup cannot pair the images of a
            micro-batch.
    """
    share, rest = divmod(config.global_batch_size, world_size)
    if rest:
        raise ConfigError(
            f"global_batch_size must be a multiple of the world size {world_size}, got {config.global_batch_size}"
        )
    accumulation = math.ceil(share / (config.batch_size or share))
    while share % accumulation:
        accumulation += 1
    micro_batch = share // accumulation
    if config.mixing and micro_batch % 2:
        raise ConfigError(
            f"micro-batch size must be even because mixup pairs images, got {micro_batch}: change batch_size "
            f"or global_batch_size ({share} images per rank)"
        )
    return micro_batch, accumulation


class TrainingBatches:
    """Batch sampler of (index, seed) pairs for this rank's micro-batches of one epoch.

    A global batch is a slice of the epoch's permutation, repeated `repeats` times (repeated augmentation, Hoffer et
    al., 2020, as in DeiT). Each rank processes a consecutive share of the global batch. An incomplete last global
    batch is dropped.

    Args:
        num_images: Number of images in the split.
        config: Options of the run, with the global batch size, repeated augmentation and seed.
        micro_batch: Number of images per micro-batch of a rank.
        rank: Rank of this process.
        world_size: Number of processes.

    Raises:
        ConfigError: The global batch size exceeds the number of images.
    """

    def __init__(self, num_images: int, config: Config, micro_batch: int, rank: int, world_size: int):
        self.num_images = num_images
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self.seed = config.seed
        self.global_batch = config.global_batch_size
        self.repeats = max(1, config.aug_repeats)
        self.set_epoch(0)
        if num_images < self.global_batch:
            raise ConfigError(
                f"global_batch_size must be at most {num_images}, the number of training images, got "
                f"{self.global_batch}: lower --global-batch-size, or set neither --global-batch-size nor -c, so that "
                "`vil train FOLDER` chooses a value that fits the number of images"
            )

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Set the epoch and its first step. A resumed run starts after the completed steps of an epoch."""
        self.epoch = epoch
        self.first_step = first_step

    @property
    def batch_size(self) -> int:
        return self.micro_batch

    @property
    def steps(self) -> int:
        """Number of optimizer steps per epoch."""
        return self.num_images // self.global_batch

    def described(self, epochs: int, whole: str = "the run") -> str:
        """Return a log line with the number of steps, and with advice if the run has few steps.

        Args:
            epochs: Number of epochs.
            whole: Name of all `epochs` epochs together, for the log line.
        """
        left_out = self.num_images - self.steps * math.ceil(self.global_batch / self.repeats)
        steps, total = (counted(number, "step") for number in (self.steps, self.steps * epochs))
        line = f"an epoch has {steps} of {counted(self.global_batch, 'image')}, {whole} has {total}"
        if left_out:
            line += f"; each epoch skips {left_out} of {self.num_images} images, chosen at random"
        if self.steps >= FEW or self.steps * epochs >= FEW**3 or self.global_batch <= SMALL:
            return line
        smaller = max(2, self.num_images // FEW // 2 * 2)
        return f"{line}; for more steps, set --global-batch-size {smaller} with a lower --lr, or more --epochs"

    def __len__(self) -> int:
        return (self.steps - self.first_step) * self.accumulation

    @property
    def accumulation(self) -> int:
        """Number of micro-batches that a rank accumulates per optimizer step."""
        return self.global_batch // self.world_size // self.micro_batch

    def sizes(self) -> Iterator[int]:
        return repeat(self.micro_batch, len(self))

    def first_positions(self) -> Iterator[int]:
        """Yield, for each micro-batch, the position of its first image in the epoch."""
        share = self.global_batch // self.world_size
        for step in range(self.first_step, self.steps):
            start = step * self.global_batch + self.rank * share
            yield from range(start, start + share, self.micro_batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        random_numbers = np.random.default_rng((self.seed, self.epoch))
        order = random_numbers.permutation(self.num_images)
        seeds = random_numbers.integers(2**32, size=self.steps * self.global_batch)
        unique = math.ceil(self.global_batch / self.repeats)
        for first in self.first_positions():
            positions = np.arange(first, first + self.micro_batch)
            steps, rows = np.divmod(positions, self.global_batch)
            yield [*zip(order[steps * unique + rows % unique].tolist(), seeds[positions].tolist())]


class EvaluationBatches:
    """Batch sampler for evaluation: yield every image in order, exactly once over all ranks."""

    repeats = 1

    def __init__(self, num_images: int, batch_size: int, rank: int, world_size: int):
        self.indices = range(rank, num_images, world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(i, 0) for i in self.indices[start : start + self.batch_size]]

    def sizes(self) -> Iterator[int]:
        return map(len, self)


class Pieces:
    """Batch sampler that splits each batch into sub-batches (pieces), each of which one worker loads.

    The sampler yields nothing until `ready` is set, so that workers can start before the first batch.

    Args:
        batches: Batch sampler of (index, seed) pairs.
        size: Maximum number of images per piece.
        tasks: Function from (index, seed) pairs and their positions in the batch to the tasks of a worker. If given,
            the images of a batch are loaded in ascending order of their index. The copies of an image, due to repeated
            augmentation, are adjacent in this order, so that a worker reads a file only once. By default, the pairs
            are the tasks.
    """

    def __init__(
        self,
        batches: TrainingBatches | EvaluationBatches,
        size: int,
        tasks: Callable[[Sequence[tuple[int, int]], Sequence[int]], np.ndarray] | None = None,
    ):
        self.batches = batches
        self.size = size
        self.tasks = tasks
        self.ready = False

    def __iter__(self) -> Iterator[list[tuple[int, int]] | np.ndarray]:
        if not self.ready:
            return
        for batch in self.batches:
            rows: Sequence[int] = range(len(batch))
            if self.tasks:
                rows = sorted(rows, key=lambda row: batch[row][0])
            for start in range(0, len(batch), self.size):
                of_piece = rows[start : start + self.size]
                piece = [batch[row] for row in of_piece]
                yield self.tasks(piece, of_piece) if self.tasks else piece
