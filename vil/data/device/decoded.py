"""Array of decoded images on the device, with their sizes and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class DecodedImages:
    """Images (3, h, w) uint8 of any sizes on one device, any of which can be missing.

    Indexing with NumPy arrays selects or replaces images without a Python loop over images.
    """

    pixels: np.ndarray  # (N,) contiguous tensors; None for a missing image
    sizes: np.ndarray  # (N, 2) int64: heights and widths; 0 for a missing image
    addresses: np.ndarray  # (N,) int64: memory addresses of the pixels; 0 for a missing image

    @classmethod
    def of(cls, images: Sequence[Tensor | None]) -> DecodedImages:
        """Return an array of images. None stands for a missing image."""
        pixels = [None if image is None else image.contiguous() for image in images]
        return cls(
            pixels=np.fromiter(pixels, object),
            sizes=np.array([(0, 0) if image is None else image.shape[1:] for image in pixels]).reshape(-1, 2),
            addresses=np.array([0 if image is None else image.data_ptr() for image in pixels]),
        )

    @classmethod
    def missing(cls, count: int) -> DecodedImages:
        """Return an array of `count` missing images."""
        return cls(np.empty(count, object), np.zeros((count, 2), np.int64), np.zeros(count, np.int64))

    @property
    def are_present(self) -> np.ndarray:
        """Whether each image is present, (N,)."""
        return self.sizes[:, 0] > 0

    @property
    def nbytes(self) -> np.ndarray:
        """Number of bytes of each image, (N,); 0 for a missing image."""
        return 3 * self.sizes.prod(axis=1)

    @property
    def device(self) -> torch.device:
        """Device of the images. The first image must not be missing."""
        return self.pixels[0].device

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: np.ndarray) -> DecodedImages:
        return DecodedImages(self.pixels[rows], self.sizes[rows], self.addresses[rows])

    def __setitem__(self, rows: np.ndarray, images: DecodedImages) -> None:
        self.pixels[rows] = images.pixels
        self.sizes[rows] = images.sizes
        self.addresses[rows] = images.addresses
