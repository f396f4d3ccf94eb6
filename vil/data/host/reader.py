"""Dataset that decodes and augments images in workers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from itertools import chain

from PIL import Image
from torch.utils.data import Dataset

from ...fault_tolerance.machine_errors import MachineError, retry_reading
from ..seeds import seed_everything
from ..sources.images import (
    UNREADABLE,
    Unreadable,
    UnreadableSplitError,
    image_of,
    read_bytes,
    reason,
)
from ..sources.readers import open_indexed

# To replace an unreadable image, training first tries the next images in the dataset, then distant images.
NEIGHBORS_TRIED = 10
DISTANT_IMAGES_TRIED = 100


class ImageReader(Dataset):
    """Dataset of images (C, H, W) uint8 and targets, indexed by pairs of an image index and an augmentation seed.

    If a file cannot be decoded, a warning names the file and `unreadable` counts the image. Training uses another
    image instead; evaluation uses a blank image with the target `UNREADABLE`. An I/O error raises a MachineError.
    """

    def __init__(self, dataset, transform, is_training: bool):
        self.dataset = dataset
        self.transform = transform
        self.is_training = is_training
        self.is_upright = getattr(dataset.reader, "is_upright", False)  # as set by `apply_exif_orientation`
        self.unreadable = Unreadable(len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple):
        index, seed = key
        seed_everything(seed)
        image, target = self.read(index)
        return self.transform(image), target

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return the untransformed image and target at an index, or a replacement if the image is unreadable."""
        for offset in self._offsets():
            i = (index + offset) % len(self)
            name = self.dataset.reader.filename(i)
            try:
                self.unreadable.refuse_late(i)
                path = os.path.join(getattr(self.dataset.reader, "root", ""), name)
                data, target = retry_reading(path, functools.partial(self._file, i))
                return retry_reading(path, functools.partial(image_of, data, self.is_upright)), target
            except MachineError:
                raise
            except Exception as error:  # decoders can raise any type of exception
                # The error's traceback would keep the loader alive in a reference cycle, so only the message is kept.
                # Garbage collection of a loader can make workers wait forever for a queue that no longer exists.
                last = reason(error)
                self.unreadable.add(i, name, error)
        if self.is_training:
            raise UnreadableSplitError(
                f"found no readable training image: tried {len(list(self._offsets()))} images, the last was "
                f"{name!r} ({last})"
            )
        return Image.new("RGB", (256, 256)), UNREADABLE

    def _file(self, index: int) -> tuple[bytes, int]:
        """Return the content of an image file and the image's target, given the image's index."""
        file, target = open_indexed(self.dataset.reader, index)
        with file:
            return read_bytes(file), target

    def _offsets(self) -> Iterable[int]:
        """Return the offsets, from an image's index, of the images to try: 0 and, in training, replacements."""
        if not self.is_training:
            return (0,)
        offsets = range(len(self))
        neighbors = offsets[:NEIGHBORS_TRIED]
        distant = offsets[NEIGHBORS_TRIED :: max(1, len(self) // DISTANT_IMAGES_TRIED)]
        return chain(neighbors, distant)
