"""Cache of decoded images on the device, so that files of a small split are not read again in each epoch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from ...distributed import warn_on_rank0
from .decoded import DecodedImages

SHARE = 8  # the cache of a split may use up to 1 / SHARE of a GPU's free memory
HOST_BYTES = 2**30  # maximum bytes of a split's cached images on devices other than CUDA GPUs

# dtype of a task for a worker to load one image; the worker does not read the file if its cached version is current
TASK = np.dtype(
    [
        ("row", "i8"),  # index of the image in the batch
        ("index", "i8"),  # index of the image in the dataset
        ("seed", "i8"),  # seed of the image's augmentation
        ("target", "i8"),
        ("size", "i8", 2),  # height and width; 0 if the image is not cached
        ("version", "i8", 2),  # size and modification time of the file that was decoded
    ]
)


class DecodedCache:
    """Cache of a split's decoded images on the device.

    Unless `room` is given, the cache stays empty if the whole split would probably not fit. Each rank caches the images
    that it has decoded. If a file has changed since its image was cached, the file is read again.

    Args:
        count: Number of images in the split.
        device: Device of the images.
        room: Maximum bytes of cached images; if None, the first call of `reserve` chooses the limit.
    """

    def __init__(self, count: int, device: torch.device, room: int | None = None):
        self.count = count
        self.device = device
        self.room = room
        self.images = DecodedImages.missing(count)
        self.targets = np.zeros(count, np.int64)
        self.versions = np.zeros((count, 2), np.int64)
        self.lock = threading.Lock()  # a thread can add images while the main thread creates tasks

    def tasks(self, keys: Sequence[tuple[int, int]], rows: Sequence[int]) -> np.ndarray:
        """Return tasks for workers, (N,) of dtype `TASK`, given N pairs (image index, seed) and N rows in the batch."""
        indices, seeds = np.array(keys).T
        tasks = np.empty(len(keys), TASK)
        tasks["row"] = rows
        tasks["index"] = indices
        tasks["seed"] = seeds
        with self.lock:
            tasks["target"] = self.targets[indices]
            tasks["size"] = self.images.sizes[indices]
            tasks["version"] = self.versions[indices]
        return tasks

    def get(self, indices: np.ndarray, versions: np.ndarray) -> DecodedImages:
        """Return cached images by index. An image is missing if the cache lacks the version (N, 2) of its file."""
        images = DecodedImages.missing(len(indices))
        are_current = (self.versions[indices] == versions).all(axis=1)
        images[are_current] = self.images[indices[are_current]]
        return images

    def add(self, indices: np.ndarray, images: DecodedImages, targets: np.ndarray, versions: np.ndarray) -> None:
        """Add images, whose indices must be distinct, to the cache until the memory limit is reached."""
        if not len(indices):
            return
        self.reserve(images.nbytes.mean())
        # the image of a changed file replaces the cached image
        growth = images.nbytes - self.images[indices].nbytes
        fit = growth.cumsum() <= (self.room or 0)
        self.room = (self.room or 0) - int(growth[fit].sum())
        with self.lock:
            self.images[indices[fit]] = images[fit]
            self.targets[indices[fit]] = targets[fit]
            self.versions[indices[fit]] = versions[fit]

    def reserve(self, typical_bytes: float) -> bool:
        """Return whether the cache has room. If `room` is None, first set the limit, to 0 if the split would not fit.

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
                    __name__, "%d images stay decoded on %s after the first read (about %.2g GiB)",
                    self.count, self.device, needed / 2**30,
                )  # fmt: skip
        return self.room > 0
