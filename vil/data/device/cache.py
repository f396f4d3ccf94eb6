"""Cache of decoded images on the device, so that files of a small split are not read again in each epoch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...distributed import warn_on_rank0

SHARE = 8  # the cache of a split may use up to 1 / SHARE of a GPU's free memory
HOST_BYTES = 2**30  # maximum bytes of a split's cached images on devices other than CUDA GPUs


class CachedImage(NamedTuple):
    """Decoded image on the device."""

    pixels: Tensor  # (3, h, w) uint8
    target: int
    version: tuple[int, int]  # size and modification time of the file


class CachedHeader(NamedTuple):
    """Metadata of a cached image, which lets a worker skip reading the file."""

    target: int
    size: tuple[int, int]  # height and width
    version: tuple[int, int]


class Task(NamedTuple):
    """Dataset index and augmentation seed of an image for a worker, with metadata if the image is cached."""

    image_index: int
    seed: int
    cached: CachedHeader | None = None


class DecodedCache:
    """Cache of a split's decoded images on the device.

    Unless `room` is given, the cache stays empty if the whole split would probably not fit. Each rank caches the images
    that it has decoded. A file that has changed is read again.

    Args:
        count: Number of images in the split.
        device: Device of the images.
        room: Maximum bytes; None chooses the limit when the first images are known.
    """

    def __init__(self, count: int, device: torch.device, room: int | None = None):
        self.count = count
        self.device = device
        self.images: dict[int, CachedImage] = {}
        self.room = room

    def task(self, index: int, seed: int) -> Task:
        """Return the task that makes a worker load an image."""
        cached = self.images.get(index)
        if cached is None:
            return Task(index, seed)
        _, height, width = cached.pixels.shape
        return Task(index, seed, CachedHeader(cached.target, (height, width), cached.version))

    def get(self, index: int, version: tuple[int, int]) -> Tensor | None:
        cached = self.images.get(index)
        return cached.pixels if cached and cached.version == version else None

    def add(self, decoded: dict[int, CachedImage]) -> None:
        """Add images to the cache until the memory limit is reached."""
        if not decoded:
            return
        self.reserve(sum(image.pixels.nbytes for image in decoded.values()) / len(decoded))
        room = self.room or 0
        for index, image in decoded.items():
            if replaced := self.images.pop(index, None):  # the file of a cached image has changed
                room += replaced.pixels.nbytes
            room -= image.pixels.nbytes
            if room < 0:
                break
            self.images[index] = image
        self.room = room

    def reserve(self, typical_bytes: float) -> bool:
        """Return whether the cache has room. If `room` is None, set the memory limit, to 0 if the split would not fit.

        Args:
            typical_bytes: Mean size of a decoded image in bytes.
        """
        if self.room is None:
            on_gpu = self.device.type == "cuda"
            limit = torch.cuda.mem_get_info(self.device)[0] // SHARE if on_gpu else HOST_BYTES
            needed = typical_bytes * self.count
            self.room = limit if needed <= limit else 0
            if self.room:
                warn_on_rank0(
                    __name__, "%d images stay decoded on %s once they have been read: some %.2g GiB",
                    self.count, self.device, needed / 2**30,
                )  # fmt: skip
        return self.room > 0
