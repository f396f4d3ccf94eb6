"""In which order images come, and which of them a process gets: batch samplers of (index, seed) pairs.

Which images make up a global batch, and how each is augmented, depends on the seed, the epoch and the image's position
in the epoch alone: not on the number of processes, loader workers or accumulation steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import repeat

import numpy as np

from ..config import Config, ConfigError
from .workers import PIECE

FEW = 8  # steps of an epoch; a run learns little in as many to the third power


def split_global_batch(config: Config, world_size: int) -> tuple[int, int]:
    """A process's micro-batch, and how many of them it accumulates to its share of the global batch.

    Raises:
        ConfigError: The processes cannot share the global batch equally, or mixup cannot pair the images.
    """
    share, rest = divmod(config.global_batch_size, world_size)
    if rest:
        raise ConfigError(f"global_batch_size {config.global_batch_size} is not a multiple of {world_size} processes")
    accumulation = math.ceil(share / (config.batch_size or share))
    while share % accumulation:
        accumulation += 1
    micro_batch = share // accumulation
    if config.mixing and micro_batch % 2:
        raise ConfigError(
            f"mixup pairs images, but a process's {share} of global_batch_size {config.global_batch_size} come in "
            f"micro-batches of {micro_batch}: choose an even size"
        )
    return micro_batch, accumulation


class TrainingBatches:
    """Batch sampler: the (index, seed) pairs of this process's micro-batches of one epoch.

    A global batch is a slice of the epoch's permutation, `repeats` times over (repeated augmentation, Hoffer et al.,
    2020, as in DeiT), and each process takes its consecutive share of it. An incomplete last one is left out.
    """

    def __init__(self, num_images: int, config: Config, micro_batch: int, rank: int, world_size: int):
        self.num_images, self.micro_batch, self.rank, self.world_size = num_images, micro_batch, rank, world_size
        self.seed, self.global_batch = config.seed, config.global_batch_size
        self.repeats = max(1, config.aug_repeats)
        self.set_epoch(0)
        if num_images < self.global_batch:
            raise ConfigError(
                f"the training split has {num_images} images, less than one global batch of {self.global_batch}: "
                "lower global_batch_size"
            )

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Chooses the epoch, and where in it to begin: a run may have been interrupted after `first_step` steps."""
        self.epoch, self.first_step = epoch, first_step

    @property
    def steps(self) -> int:
        return self.num_images // self.global_batch

    def described(self, epochs: int, whole: str = "the run") -> str:
        """The steps of a run, or what it is called, in a line, with advice where they are few."""
        left_out = self.num_images - self.steps * math.ceil(self.global_batch / self.repeats)
        line = f"an epoch is {self.steps} steps of {self.global_batch} images, {whole} {self.steps * epochs}"
        if left_out:
            line += f"; an epoch leaves out {left_out} of {self.num_images} images, others each time"
        if self.steps >= FEW or self.steps * epochs >= FEW**3:
            return line
        smaller = max(2, self.num_images // FEW // 2 * 2)
        return f"{line}; these are few: --global-batch-size {smaller}, with a lower --lr, or more --epochs makes more"

    def __len__(self) -> int:
        return (self.steps - self.first_step) * self.accumulation

    @property
    def accumulation(self) -> int:
        return self.global_batch // self.world_size // self.micro_batch

    def sizes(self) -> Iterator[int]:
        return repeat(self.micro_batch, len(self))

    def first_positions(self) -> Iterator[int]:
        """The position in the epoch of each micro-batch's first image."""
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
            batch = []
            for position in range(first, first + self.micro_batch):
                step, place = divmod(position, self.global_batch)
                batch.append((int(order[step * unique + place % unique]), int(seeds[position])))
            yield batch


class EvaluationBatches:
    """Batch sampler: every image exactly once over all processes, in order."""

    def __init__(self, num_images: int, batch_size: int, rank: int, world_size: int):
        self.indices, self.batch_size = range(rank, num_images, world_size), batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(i, 0) for i in self.indices[start : start + self.batch_size]]

    def sizes(self) -> Iterator[int]:
        return map(len, self)


class Pieces:
    """Batch sampler: each of `batches` in pieces that a worker loads at a time, but none of them before `ready`.

    Args:
        batches: Of (index, seed) pairs.
        key: Makes what a worker is to know of such a pair.
    """

    def __init__(self, batches: TrainingBatches | EvaluationBatches, key: Callable[[int, int], tuple[int, ...]]):
        self.batches, self.key, self.ready = batches, key, False

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        for batch in self.batches if self.ready else ():
            for start in range(0, len(batch), PIECE):
                yield [self.key(*pair) for pair in batch[start : start + PIECE]]
