"""Batches on the model's device from pieces that workers have decoded and augmented."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ...fault_tolerance.workers import worker_errors_explained
from .workers import PIECE, LoaderSettings, start_workers


class PieceLoader:
    """Batches of images (B, 3, H, W) uint8 and targets (B,) on `device`, joined from the pieces of workers.

    Args:
        loader: Loader of pieces with at most `PIECE` images.
        batches: Batch sampler that knows the `sizes()` of its batches; None if a piece is a batch.
        device: Device of the batches.
        settings: Settings of the loader.
    """

    def __init__(self, loader: DataLoader, batches, device: torch.device, settings: LoaderSettings):
        self.loader, self.batches, self.device, self.settings = loader, batches, device, settings
        self.waits = 0.0, 0.0  # total seconds for which the next batch waited for the model, and for its preparation

    def __len__(self) -> int:
        return len(self.loader if self.batches is None else self.batches)

    @property
    def dataset(self):
        return self.loader.dataset

    def gathered(self) -> Iterator[Iterator]:
        """Iterate over the list of pieces of each batch."""
        pieces = self._loaded()
        if self.batches is None:
            yield from (iter([piece]) for piece in pieces)
        else:
            for size in self.batches.sizes():
                yield islice(pieces, math.ceil(size / PIECE))

    def _loaded(self) -> Iterator:
        with worker_errors_explained():
            # workers of an iterable dataset start with its first pass; other workers have started
            yield from start_workers(self.loader) if self.batches is None else self.loader


class HostLoader(PieceLoader):
    """Loader of images that workers have decoded and augmented."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pieces in self.gathered():
            moved = [self._move(*piece) for piece in pieces]
            images, targets = (torch.cat(tensors) if len(moved) > 1 else tensors[0] for tensors in zip(*moved))
            yield images, targets

    def _move(self, *tensors: Tensor) -> list[Tensor]:
        """Copy even on CPU, because workers reuse the limited shared memory."""
        pinned = self.device.type == "cuda"
        return [tensor.to(self.device, non_blocking=pinned, copy=True) for tensor in tensors]
