"""Loaders that concatenate sub-batches (pieces), each loaded by one worker, into batches on the model's device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ...fault_tolerance.workers import worker_errors_explained
from ..plan import LoadingPlan
from .workers import start_workers


class Waits(NamedTuple):
    """Total seconds that a run has waited for batches, by the reason for waiting.

    Attributes:
        for_model: Seconds until the model had finished earlier batches, so that memory for the next batch was free.
        for_preparation: Seconds until the device had decoded and transformed the next batch in free memory.
    """

    for_model: float = 0.0
    for_preparation: float = 0.0


class PieceLoader:
    """Loader of images (B, 3, H, W) uint8 and targets (B,), which concatenates sub-batches (pieces) into batches.

    Args:
        loader: Loader of pieces. A piece is a sub-batch that one worker loads.
        batches: Batch sampler with a method `sizes`; None if each piece is a whole batch.
        plan: Loading plan of the split.
    """

    def __init__(self, loader: DataLoader, batches, plan: LoadingPlan):
        self.loader = loader
        self.batches = batches
        self.plan = plan
        self.device = plan.device
        self.waits = Waits()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.loader if self.batches is None else self.batches)

    @property
    def description(self) -> str:
        """Log line that says where images are decoded and augmented, and by how many workers."""
        return str(self.plan)

    @property
    def remedy(self) -> str:
        """Suggestion for a log message if the device waits for the workers."""
        return self.plan.remedy

    @property
    def dataset(self):
        return self.loader.dataset

    def gathered(self) -> Iterator[Iterator]:
        """Yield, for each batch, an iterator over the pieces that workers have loaded."""
        pieces = self._loaded()
        if self.batches is None:
            yield from (iter([piece]) for piece in pieces)
        else:
            for size in self.batches.sizes():
                yield islice(pieces, math.ceil(size / self.plan.piece_size))

    def _loaded(self) -> Iterator:
        with worker_errors_explained():
            # workers of an iterable dataset start now; workers of other datasets have started already
            yield from start_workers(self.loader) if self.batches is None else self.loader


class HostLoader(PieceLoader):
    """Loader of images that workers have decoded and augmented."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pieces in self.gathered():
            images, targets = zip(*(self._move(*piece) for piece in pieces))
            yield _joined(images), _joined(targets)

    def _move(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a worker's tensors to the device, even to a CPU, to release the limited shared memory."""
        pinned = self.device.type == "cuda"
        return (
            images.to(self.device, non_blocking=pinned, copy=True),
            targets.to(self.device, non_blocking=pinned, copy=True),
        )


def _joined(pieces: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
