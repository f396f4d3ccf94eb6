"""Noise in place of a dataset, made once on the device: what is left of a run's time is the model's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class SyntheticImages:
    """Stands for a dataset of so many images."""

    def __init__(self, num_images: int):
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images


class SyntheticLoader:
    """The same random images (B, 3, H, W) uint8 and targets (B,) again and again, as many as the batch sampler has."""

    def __init__(self, dataset: SyntheticImages, batches, batch_size: int, input_size, device: torch.device):
        self.dataset, self.batches = dataset, batches
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (batch_size, *input_size), generator=generator, dtype=torch.uint8).to(device)
        self.targets = torch.arange(batch_size, device=device) % 2

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for size in self.batches.sizes():
            yield self.images[:size], self.targets[:size]
