"""Loader of the sampled parameters of batch augmentation, which a worker samples ahead of the training process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from ...fault_tolerance.workers import worker_errors_explained
from ..device.augmentation import BatchAugmentation, BatchParameters
from ..samplers import TrainingBatches
from .workers import prepare_worker, start_workers

PREFETCHED = 4  # number of batches whose parameters are sampled ahead


class ParameterLoader:
    """Loader of the augmentation parameters of an epoch's batches.

    With a worker, the training process does not spend its time on sampling. Other threads that need the GIL, such as
    the thread that prepares images, would wait for the sampling.

    Args:
        augment: Augmentation of a batch.
        batches: Batch sampler.
        size: Height and width of the images.
        workers: Number of workers: 1 to sample in a worker, 0 to sample in this process.
    """

    def __init__(self, augment: BatchAugmentation, batches: TrainingBatches, size: Sequence[int], workers: int):
        self.batches = batches
        self.ready = False
        self.loader = DataLoader(
            _Parameters(augment, batches.batch_size, tuple(size)),
            batch_size=None,
            sampler=self,
            num_workers=workers,
            prefetch_factor=PREFETCHED if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=_prepare,
        )
        start_workers(self.loader)
        self.ready = True

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the epoch and position of each batch, as the DataLoader's sampler."""
        if self.ready:
            for position in self.batches.first_positions():
                yield self.batches.epoch, position

    def parameters(self) -> Iterator[BatchParameters]:
        """Iterate over the parameters of the batches of the epoch."""
        with worker_errors_explained():
            yield from self.loader


class _Parameters(Dataset):
    def __init__(self, augment: BatchAugmentation, count: int, size: tuple[int, ...]):
        self.augment = augment
        self.count = count
        self.size = size

    def __getitem__(self, key: tuple[int, int]) -> BatchParameters:
        return self.augment.sample(self.count, *self.size, *key)


def _prepare(worker: int) -> None:
    prepare_worker(worker)
    torch.set_num_threads(1)
