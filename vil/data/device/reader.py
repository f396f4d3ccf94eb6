"""Dataset that reads encoded images in workers, for decoding and augmentation on the device."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from ...security.exif import exif_orientation
from ...security.image_decoding import UnfitImageError, open_image
from ...security.image_structure import strip_metadata
from ..host.reader import ImageReader
from ..seeds import seed_everything
from ..sources.images import image_of, read_bytes
from ..sources.readers import file_version, open_indexed
from .encoded import EncodedImage, is_plain_jpeg, is_small
from .transform_parameters import TransformSampler


class EncodedReader(ImageReader):
    """`ImageReader` that returns an `EncodedImage` for small images and for files that a device can decode.

    Workers load images as specified by `DecodedCache.tasks`. For an image that the device has cached, and for another
    copy of the previous image, a worker only samples the transform.
    """

    def __init__(self, dataset, transform, is_training: bool, sampler: TransformSampler):
        super().__init__(dataset, transform, is_training)
        self.sampler = sampler

    def __getitem__(self, key: tuple):
        return self.load(*key)

    def __getitems__(self, tasks: np.ndarray) -> list[tuple[int, EncodedImage | Tensor, int]]:
        """Load the images of tasks (N,) of dtype `cache.TASK`. Return rows in the batch, images and targets."""
        samples: list = []
        for row, index, *task in tasks.tolist():
            _, previous, target = samples[-1] if samples else (0, None, 0)
            if isinstance(previous, EncodedImage) and previous.index == index:
                task = [task[0], target, previous.size, previous.version]
            samples.append((row, *self.load(index, *task)))
        return samples

    def load(self, index: int, seed: int, target: int = 0, size: Sequence[int] = (0, 0), cached: Sequence[int] = ()):
        """Load an image, given the fields of a task. `cached` is the version of the file that the device has cached."""
        data = b""
        try:
            version = file_version(self.dataset.reader, index)
            if not all(size) or version != tuple(cached):
                data, size, target = self._content(index)
        except Exception:  # `finish` reads the image again and reports the error
            return self.finish(index, seed)

        height, width = size
        seed_everything(seed)
        parameters = self.sampler(_image_of_size(width, height))
        if 0 in parameters.box[2:]:  # timm's random crop of a tiny image can be empty
            return self.finish(index, seed)
        return EncodedImage(index, seed, data, (height, width), version, parameters), target

    def _content(self, index: int) -> tuple[bytes, tuple[int, int], int]:
        """Return an image's JPEG file or raw pixels, its size (height, width), and its target.

        Raises:
            UnfitImageError: The device should not decode this image. A file that is not an image may raise any
                exception.
        """
        file, target = open_indexed(self.dataset.reader, index)
        with file:
            data = read_bytes(file)
        is_rotated = self.is_upright and exif_orientation(data) != 1
        if not is_rotated and (plain := strip_metadata(data)) is not None:
            header = open_image(io.BytesIO(plain))
            size = header.height, header.width
            if is_small(math.prod(size)):
                return np.asarray(image_of(data)).transpose(2, 0, 1).tobytes(), size, target
            if is_plain_jpeg(plain, header):
                return plain, size, target
        raise UnfitImageError("not for a device to decode")

    def finish(self, index: int, seed: int):
        """Decode and transform an image on the CPU, with the same random parameters as on the device."""
        return super().__getitem__((index, seed))


@functools.lru_cache(maxsize=16)
def _image_of_size(width: int, height: int) -> Image.Image:
    """Return an image for `TransformSampler`, which uses only the size. Creating an image takes 40 us."""
    return Image.new("1", (width, height), color=None)
