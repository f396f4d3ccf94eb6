"""Store of decoded images on the device, so that each file of a small split is read only once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...distributed import warn_on_rank0

SHARE = 8  # one split's images may use 1 / SHARE of a GPU's free memory
HOST_BYTES = 2**30  # bytes that the images may use on a CPU


class KeptImages:
    """Images (3, h, w) uint8 by index, if the whole split fits into a share of the device's memory.

    Each rank keeps the images that it has decoded. A file that has changed is read again.

    Args:
        count: Number of images in the split.
        device: Device of the images.
        room: Maximum bytes; None chooses the limit when the first images are known.
    """

    def __init__(self, count: int, device: torch.device, room: int | None = None):
        self.count, self.device = count, device
        self.images: dict[int, tuple[Tensor, int, tuple[int, ...]]] = {}  # with target and file version
        self.room = room

    def key(self, index: int, seed: int) -> tuple[int, ...]:
        """Return a worker's task: index and seed and, for a kept image, target, size and version."""
        if (kept := self.images.get(index)) is None:
            return index, seed
        image, target, version = kept
        return index, seed, target, *image.shape[1:], *version

    def get(self, index: int, version: tuple[int, ...]) -> Tensor | None:
        kept = self.images.get(index)
        return kept[0] if kept and kept[2] == version else None

    def add(self, found: dict[int, tuple[Tensor, int, tuple[int, ...]]]) -> None:
        """Keep images with their targets and versions while there is space."""
        if found:
            self.choose_room(sum(image.nbytes for image, *_ in found.values()) / len(found))
        for index, kept in found.items():
            before = self.images.pop(index, None)  # of a file that has changed
            self.room = (self.room or 0) + (before[0].nbytes if before else 0) - kept[0].nbytes
            if self.room < 0:
                return
            self.images[index] = kept

    def choose_room(self, typical_bytes: float) -> bool:
        """Return whether images of this size fit; the first call decides."""
        if self.room is None:
            on_gpu = self.device.type == "cuda"
            room = torch.cuda.mem_get_info(self.device)[0] // SHARE if on_gpu else HOST_BYTES
            self.room = room if typical_bytes * self.count <= room else 0
            if self.room:
                warn_on_rank0(
                    __name__, "%d images stay decoded on %s once they have been read: some %.2g GiB",
                    self.count, self.device, typical_bytes * self.count / 2**30,
                )  # fmt: skip
        return self.room > 0
