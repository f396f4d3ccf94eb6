"""Synthetic data, created once on the device, to measure a run without data loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class SyntheticImages:
    """Placeholder for a dataset of `num_images` images."""

    def __init__(self, num_images: int):
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images


class SyntheticLoader:
    """Loader that repeats one random batch of images (B, 3, H, W) uint8 and targets (B,) for each batch of the
    sampler.
    """

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
