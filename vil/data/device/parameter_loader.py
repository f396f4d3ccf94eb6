"""Loader of the parameters of batch augmentation, which a worker can sample ahead of the training process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import DataLoader, Dataset

from ...fault_tolerance.workers import worker_errors_explained
from ..host.workers import prepare_worker, start_workers
from ..samplers import TrainingBatches
from .augmentation import BatchAugmentation, BatchParameters

PREFETCHED = 4  # number of batches whose parameters are sampled ahead


class ParameterLoader:
    """Loader of the augmentation parameters of the batches of an epoch.

    Sampling in the training process would hold the GIL, and thus delay the thread that decodes images on the
    device.

    Args:
        augment: Augmentation that samples the parameters.
        batches: Batch sampler.
        size: Height and width of the images.
        in_worker: Whether a worker samples the parameters, instead of this process.
    """

    def __init__(self, augment: BatchAugmentation, batches: TrainingBatches, size: Sequence[int], in_worker: bool):
        self.keys = _Keys(batches)
        self.loader = DataLoader(
            _Parameters(augment, batches.batch_size, tuple(size)),
            batch_size=None,
            sampler=self.keys,
            num_workers=int(in_worker),
            prefetch_factor=PREFETCHED if in_worker else None,
            persistent_workers=in_worker,
            worker_init_fn=prepare_worker,
        )
        start_workers(self.loader)
        self.keys.ready = True

    def parameters(self) -> Iterator[BatchParameters]:
        """Iterate over the parameters of the epoch's batches."""
        with worker_errors_explained():
            yield from self.loader


class _Keys:
    """Sampler of the epoch and first position of each batch. Like `Pieces`, `_Keys` is empty until `ready` is set."""

    def __init__(self, batches: TrainingBatches):
        self.batches = batches
        self.ready = False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if self.ready:
            for position in self.batches.first_positions():
                yield self.batches.epoch, position


class _Parameters(Dataset):
    def __init__(self, augment: BatchAugmentation, count: int, size: tuple[int, ...]):
        self.augment = augment
        self.count = count
        self.size = size

    def __getitem__(self, key: tuple[int, int]) -> BatchParameters:
        height, width = self.size
        epoch, position = key
        return self.augment.sample(self.count, height, width, epoch, position)
