"""Datasets in the loader's workers: augmented images of a split, or file contents for decoding on the device."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
from collections.abc import Iterable
from itertools import chain
from typing import BinaryIO

import numpy as np
from PIL import Image
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.data.readers.reader_image_tar import ReaderImageTar
from torch.utils.data import Dataset

from ...fault_tolerance.machine_errors import MachineError, retry_reading
from ...security.image_decoding import UnfitImageError, open_image
from ...security.image_structure import strip_metadata
from ..device.encoded import EncodedImage, is_plain_jpeg, is_small
from ..device.transform_parameters import DrawingTransform
from ..seeds import seed_everything
from .images import UNREADABLE, Unreadable, UnreadableSplitError, image_of, open_file, read_bytes, reason

NEAR = 10  # neighbours of an unreadable image that training tries before images from the whole split
TAR_READERS = (ReaderImageTar, ReaderImageInTar)
SAMPLE = 32  # files that are inspected before a split is loaded
LARGE_FILE = 2**18  # bytes; assumed if file sizes are unknown


class ImageReader(Dataset):
    """Images (C, H, W) uint8 and targets of a timm dataset, by (index, seed), where the seed determines the
    augmentation.

    If a file cannot be read for any reason, a warning names it and `unreadable` counts it. Training uses the next image
    instead; evaluation uses a blank image with the target `UNREADABLE`.
    """

    def __init__(self, dataset, transform, is_training: bool):
        self.dataset, self.transform, self.is_training = dataset, transform, is_training
        self.unreadable = Unreadable(len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]):
        index, seed = key
        seed_everything(seed)
        image, target = self.read(index)
        return self.transform(image), target

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return the image of a file before it is transformed."""
        for offset in self._offsets():
            i = (index + offset) % len(self)
            name = self.dataset.reader.filename(i)
            try:
                self.unreadable.refuse_late(i)
                path = os.path.join(getattr(self.dataset.reader, "root", ""), name)
                data, target = retry_reading(path, functools.partial(self._file, i))
                return retry_reading(path, functools.partial(image_of, data)), target
            except MachineError:
                raise
            except Exception as error:  # decoders raise various types
                # Keep only the message: the error's traceback would hold this frame, and through it the loader, in a
                # reference cycle, whose collection can make workers wait forever for a queue that no longer exists.
                last = reason(error)
                self.unreadable.add(i, name, error)
        if self.is_training:
            raise UnreadableSplitError(
                f"no image of the training split can be read: of {len(list(self._offsets()))}, the last is {name!r} "
                f"({last})"
            )
        return Image.new("RGB", (256, 256)), UNREADABLE

    def _file(self, index: int) -> tuple[bytes, int]:
        """Return the content of a file, and the target."""
        file, target = _open(self.dataset.reader, index)
        with file:
            return read_bytes(file), target

    def _offsets(self) -> Iterable[int]:
        """Return offsets to an image and, in training, to its possible replacements, at most some hundred."""
        if not self.is_training:
            return (0,)
        offsets = range(len(self))
        return chain(offsets[:NEAR], offsets[NEAR :: max(1, len(self) // 100)])


def _open(reader, index: int) -> tuple[BinaryIO, int]:
    if isinstance(reader, ReaderImageFolder):
        path, target = reader.samples[index]
        return open_file(path), target
    return reader[index]


def _version(reader, index: int) -> tuple[int, int]:
    """Return size and modification time of an image's file, if the image has its own file."""
    if not isinstance(reader, ReaderImageFolder):
        return 0, 0
    status = os.stat(reader.samples[index][0])
    return status.st_size, status.st_mtime_ns % 2**63  # some file systems store times beyond 64 bits


class EncodedReader(ImageReader):
    """`ImageReader` that returns an `EncodedImage` for files that a device can decode.

    Its keys are those of `KeptImages`: for an image that the device has kept, only random parameters are sampled.
    """

    def __init__(self, dataset, transform, is_training: bool, draw: DrawingTransform):
        super().__init__(dataset, transform, is_training)
        self.draw = draw

    def __getitem__(self, key: tuple[int, ...]):
        index, seed, *kept = key
        try:
            version = _version(self.dataset.reader, index)
            if version == tuple(kept[3:]):
                target, height, width = kept[:3]
                data, size = b"", (width, height)
            else:
                data, size, target = self._content(index)
        except Exception:  # `finish` reports the error
            return self.finish((index, seed))
        seed_everything(seed)
        draws = self.draw(Image.new("1", size))
        if 0 in draws.box[2:]:  # timm's crop of an image of few pixels can be empty
            return self.finish((index, seed))
        return EncodedImage((index, seed), data, draws, size, version), target

    def _content(self, index: int) -> tuple[bytes, tuple[int, int], int]:
        """Return an image's content for the device, its width and height, and the target.

        Raises:
            UnfitImageError: The device should not decode this image. A file that is not an image may raise any
                exception.
        """
        file, target = _open(self.dataset.reader, index)
        with file:
            data = read_bytes(file)
        if (plain := strip_metadata(data)) is not None:
            header = open_image(io.BytesIO(plain))
            if is_small(math.prod(header.size)):
                return np.asarray(image_of(data)).transpose(2, 0, 1).tobytes(), header.size, target
            if is_plain_jpeg(plain, header):
                return plain, header.size, target
        raise UnfitImageError("not for a device to decode")

    def finish(self, key: tuple[int, int]):
        """Prepare the image with timm's transform on the CPU, with the same samples and the same handling of broken
        files.
        """
        return super().__getitem__(key)


def _sample(dataset) -> list[int]:
    """Return some images from the whole split."""
    return list(range(0, len(dataset), max(1, len(dataset) // SAMPLE)))[:SAMPLE]


def has_jpegs(dataset) -> bool:
    """Return whether most files are JPEGs, by the first bytes of a sample."""
    reader, found = dataset.reader, []
    for i in _sample(dataset):
        if isinstance(reader, TAR_READERS):  # workers would share the position of a file that was opened here
            found.append(reader.filename(i).lower().endswith((".jpg", ".jpeg")))
            continue
        try:
            file, *_ = _open(reader, i)
            with file:
                found.append(file.read(3) == b"\xff\xd8\xff")
        except Exception:  # whoever reads the image says so
            continue
    return 2 * sum(found) > len(found)


def typical_pixels(dataset) -> float:
    """Return the mean number of pixels of a folder's images, by the headers of a sample; infinity if unknown."""
    found = []
    for i in _sample(dataset) if isinstance(dataset.reader, ReaderImageFolder) else ():
        with contextlib.suppress(Exception):  # whoever reads the image says so
            file, _ = _open(dataset.reader, i)
            with file:
                if (plain := strip_metadata(read_bytes(file))) is not None:
                    found.append(math.prod(open_image(io.BytesIO(plain)).size))
    return sum(found) / len(found) if found else math.inf


def typical_bytes(dataset) -> int:
    """Return 1.5 times the typical file size, because files read by workers occupy shared memory."""
    reader, found = dataset.reader, []
    for i in _sample(dataset) if isinstance(reader, ReaderImageFolder) else ():
        with contextlib.suppress(OSError):
            found.append(os.stat(reader.samples[i][0]).st_size)
    found = found or [LARGE_FILE]
    return 3 * sum(found) // (2 * len(found))
