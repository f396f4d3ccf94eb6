"""Placeholder dataset for synthetic images."""

from __future__ import annotations


class SyntheticImages:
    """Dataset that has a length but no images, for runs on synthetic data."""

    def __init__(self, num_images: int):
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images
