"""Batches on the model's device, out of the pieces that loader processes have decoded and augmented."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .workers import PIECE, LoaderSettings, lost_workers_named, start_workers


class PieceLoader:
    """Batches of images (B, 3, H, W) uint8 and targets (B,), both on `device`, out of the pieces that workers load.

    Args:
        loader: Yields pieces of at most `PIECE` images.
        batches: A batch sampler that knows the `sizes()` of its batches; None where a piece is a batch.
        device: Where the batches go.
        settings: How the pieces are loaded.
    """

    def __init__(self, loader: DataLoader, batches, device: torch.device, settings: LoaderSettings):
        self.loader, self.batches, self.device, self.settings = loader, batches, device, settings
        self.waits = 0.0, 0.0  # seconds for which the next batch waited for the model, and to be prepared, in all

    def __len__(self) -> int:
        return len(self.loader if self.batches is None else self.batches)

    @property
    def dataset(self):
        return self.loader.dataset

    def gathered(self) -> Iterator[Iterator]:
        """The pieces of each batch, one after the other."""
        pieces = self._loaded()
        if self.batches is None:
            yield from (iter([piece]) for piece in pieces)
        else:
            for size in self.batches.sizes():
                yield islice(pieces, math.ceil(size / PIECE))

    def _loaded(self) -> Iterator:
        with lost_workers_named():
            # a stream's workers start with its first pass, and those of others have
            yield from start_workers(self.loader) if self.batches is None else self.loader


class HostLoader(PieceLoader):
    """Batches of images that the workers have decoded and augmented."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pieces in self.gathered():
            moved = [self._move(*piece) for piece in pieces]
            images, targets = (torch.cat(tensors) if len(moved) > 1 else tensors[0] for tensors in zip(*moved))
            yield images, targets

    def _move(self, *tensors: Tensor) -> list[Tensor]:
        """A copy on a CPU, too: what workers share is little, and they get it back."""
        pinned = self.device.type == "cuda"
        return [tensor.to(self.device, non_blocking=pinned, copy=True) for tensor in tensors]
