"""Loader of random images, copied to the device once, to measure the speed of a run without data loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..host.loader import Waits
from ..sources.synthetic import SyntheticImages


class SyntheticLoader:
    """Loader that yields the same random images (B, 3, H, W) uint8 and targets (B,) for each batch of a sampler."""

    description = "noise, kept on the device"
    remedy = ""  # more workers would not help, because no worker loads images
    waits = Waits()

    def __init__(self, dataset: SyntheticImages, batches, image_shape: Sequence[int], device: torch.device):
        self.dataset = dataset
        self.batches = batches
        generator = torch.Generator().manual_seed(0)
        shape = batches.batch_size, *image_shape
        self.noise = torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(device)
        self.targets = torch.arange(batches.batch_size, device=device) % 2

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for size in self.batches.sizes():
            yield self.noise[:size], self.targets[:size]
