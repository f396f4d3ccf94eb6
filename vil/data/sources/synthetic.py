"""Placeholder for a split whose images are noise."""

from __future__ import annotations


class SyntheticImages:
    """Dataset of `num_images` images without content."""

    def __init__(self, num_images: int):
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images
