"""Batches that are decoded and transformed on the model's device, on GPUs by nvJPEG and batched kernels.

The workers only read files and sample random parameters.
"""

from __future__ import annotations

import functools
import io
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from ...fault_tolerance.machine_errors import MachineError
from ..host.loader import PieceLoader
from ..host.workers import PIECE
from ..samplers import EvaluationBatches
from ..sources.images import read_image
from .batched_transforms import apply_operations, crop_resize_flip, to_device
from .cache import KeptImages
from .encoded import EncodedBatch, is_small, join_pieces
from .nvjpeg import decoder
from .transform_parameters import DrawingTransform

READING_AHEAD = 10  # maximum seconds of reading ahead before the first batch
PIXELS_AT_ONCE = 2**28  # pixels decoded at a time: 0.8 GB, more than a batch of photos
# pixels of small-image batches prepared at a time, because launching kernels takes longer than running them
PIXELS_TOGETHER = 2**20


class DeviceLoader(PieceLoader):
    """Loader that decodes and transforms files on the device, on its own stream.

    The loader prepares a group of batches when the model has finished the third group before it, because batches ahead
    of the model occupy memory.

    Args:
        together: Number of batches in a group.
        threaded: Whether a thread prepares batches. A thread can wait for a decoder, but for small images, whose
            kernels take longer to launch than to run, it would only compete with the caller for the GIL.
        transform: Transform that sampled the parameters.
        kept: Store of decoded images, which provides the workers' keys.
        typical_bytes: Typical bytes of a decoded image, to fill `kept` before the first batch.
    """

    def __init__(
        self, *args, together: int, threaded: bool, transform: DrawingTransform, kept: KeptImages,
        typical_bytes: float | None = None,
    ):  # fmt: skip
        super().__init__(*args)
        self.together, self.threaded, self.transform = together, threaded, transform
        self.kept, self.typical_bytes = kept, typical_bytes
        # high priority, so that small kernels run between the model's kernels instead of after them
        self.stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.typical_bytes and self.kept.choose_room(self.typical_bytes):
            self._read_ahead()
        self.typical_bytes = None
        ahead: deque[tuple[Callable, list[int]]] = deque()
        thread = ThreadPoolExecutor(max_workers=1)  # the thread starts with the first task
        try:
            used: list[torch.cuda.Event | None] = [None, None]
            batches = map(list, self.gathered())
            while group := [*islice(batches, self.together)]:
                sizes = [sum(len(piece.targets) for piece in pieces) for pieces in group]
                prepare = functools.partial(self._prepare, [*chain(*group)], used[0])
                ahead.append((thread.submit(prepare).result if self.threaded else prepare, sizes))
                if len(ahead) > 1:
                    yield from self._batches(*ahead.popleft())
                    used = [used[1], self._what_is_queued()]
            while ahead:
                yield from self._batches(*ahead.popleft())
        finally:  # also if a run is interrupted
            thread.shutdown(cancel_futures=True)

    def _read_ahead(self) -> None:
        """Decode as many of the split's images as possible in `READING_AHEAD` seconds."""
        pieces: Any = self.loader.batch_sampler
        batches, start = pieces.batches, time.monotonic()
        pieces.batches = EvaluationBatches(len(self.dataset), PIECE, 0, 1)
        try:
            for piece in self._loaded():
                batch = join_pieces([piece])
                with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                    for group in _groups(batch.sizes.prod(axis=1)):
                        self._originals(batch, group)
                if self.stream:
                    self.stream.synchronize()
                if time.monotonic() - start > READING_AHEAD:
                    break
        finally:
            pieces.batches = batches
            self.dataset.unreadable.take()  # unreadable images are counted when a batch contains them

    def _batches(self, group: Callable, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        images, targets = self._finish(*self._wait_for(group))
        return zip(images.split(sizes), targets.split(sizes))

    def _wait_for(self, group: Callable):
        start = time.perf_counter()
        begun, *prepared = group()
        end = time.perf_counter()
        for_model, for_preparation = self.waits
        self.waits = for_model + max(0.0, begun - start), for_preparation + end - max(begun, start)
        return prepared

    def _what_is_queued(self) -> torch.cuda.Event | None:
        """Record an event that is done when the device has finished all queued work, including the use of the last
        batch.
        """
        if not self.stream:
            return None
        event = torch.cuda.Event(blocking=True)  # a waiting thread uses no core
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _prepare(self, pieces: list[EncodedBatch], used: torch.cuda.Event | None):
        """Return the start time, the batch, its images (uint8) and targets, and the files that were not decoded."""
        if used:
            used.synchronize()
        begun = time.perf_counter()
        batch = join_pieces(pieces)
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            images = torch.empty(len(batch.targets), 3, *self.transform.size, dtype=torch.uint8, device=self.device)
            failed = self._decode_and_transform(batch, images)
            if batch.ready:
                images[to_device(batch.ready_rows, self.device)] = torch.cat(batch.ready).to(self.device)
            targets = to_device(batch.targets, self.device)
        if self.stream:
            self.stream.synchronize()  # the decoder reads the files until then
        return begun, batch, images, targets, failed

    def _decode_and_transform(self, batch: EncodedBatch, images: Tensor) -> list[int]:
        """Write the images of a batch's files to `images`, and return the files that were not decoded."""
        # repeated augmentation may repeat a file, which is decoded once
        _, first, copy_of = np.unique(batch.keys[:, 0], return_index=True, return_inverse=True)
        failed = []
        for group in _groups(batch.sizes[first].prod(axis=1)):
            decoded = self._originals(batch, first[group])
            whole = np.array([image is not None for image in decoded])
            files = np.flatnonzero((copy_of >= group[0]) & (copy_of <= group[-1]))
            place = copy_of[files] - group[0]
            failed += files[~whole[place]].tolist()
            files, place = files[whole[place]], (whole.cumsum() - 1)[place[whole[place]]]
            if len(files):
                originals = [image for image in decoded if image is not None]
                images[to_device(batch.rows[files], self.device)] = self._transform(batch, files, originals, place)
        return failed

    def _originals(self, batch: EncodedBatch, files: np.ndarray) -> list[Tensor | None]:
        """Return images (3, h, w) of files, kept from earlier or decoded now; None for a rejected file."""
        keys = list(zip(batch.keys[files, 0].tolist(), map(tuple, batch.versions[files])))
        images = [self.kept.get(*key) for key in keys]
        missing = np.array([image is None for image in images]) & (batch.lengths[files] > 0)
        small = is_small(batch.sizes[files].prod(axis=1))
        new: dict[int, Tensor] = {}
        for chosen, in_pixels in ((missing & small, True), (missing & ~small, False)):
            if len(places := np.flatnonzero(chosen)):
                contents, sizes = [batch.files[i] for i in files[places]], batch.sizes[files[places]].tolist()
                decoded = unpack(contents, sizes, self.device) if in_pixels else decode(contents, self.device)
                found = zip(places.tolist(), sizes, decoded)
                # skip a file whose decoded size differs from its header
                new |= {i: image for i, size, image in found if image is not None and [*image.shape[1:]] == size}
        for i, image in new.items():
            images[i] = image
        targets = batch.targets[batch.rows[files]].tolist()
        self.kept.add({keys[i][0]: (image, targets[i], keys[i][1]) for i, image in new.items()})
        return images

    def _transform(self, batch: EncodedBatch, files: np.ndarray, originals: list[Tensor], places: np.ndarray) -> Tensor:
        transform = self.transform
        crops = crop_resize_flip(
            originals,
            batch.boxes[files],
            batch.flips[files],
            transform.size,
            transform.interpolation,
            batch.resized[files],
            batch.offsets[files],
            places,
        )
        if not batch.operations[files].any():
            return crops
        return apply_operations(
            crops, batch.operations[files], batch.arguments[files], transform.fill, transform.interpolation
        )

    def _finish(self, batch: EncodedBatch, images: Tensor, targets: Tensor, failed: list[int]) -> tuple[Tensor, Tensor]:
        if self.stream:
            for tensor in (images, targets):
                tensor.record_stream(torch.cuda.current_stream(self.device))
        for i in failed:  # not in the thread, because this uses the process's random number generators
            row = int(batch.rows[i])
            image, targets[row] = self.dataset.finish(tuple(batch.keys[i].tolist()))
            images[row] = image.to(self.device)
        return images, targets


def _groups(pixels: np.ndarray) -> list[np.ndarray]:
    """Iterate over groups of files to decode at a time, by their numbers of pixels."""
    if not len(pixels):
        return []
    return np.split(np.arange(len(pixels)), np.flatnonzero(np.diff(pixels.cumsum() // PIXELS_AT_ONCE)) + 1)


def unpack(files: list[Tensor], sizes: list[list[int]], device: torch.device) -> list[Tensor]:
    """Convert the bytes of pixels to images (3, h, w) uint8."""
    parts = torch.cat(files).to(device).split([len(file) for file in files])
    return [part.view(3, *size) for part, size in zip(parts, sizes)]


def decode(files: list[Tensor], device: torch.device) -> list[Tensor | None]:
    """Decode JPEG files to images (3, h, w) uint8, on a GPU by nvJPEG; None for a rejected file."""
    try:
        return [*_decode_all(files, device)]
    except MachineError:
        raise
    except Exception:  # the error does not name the file
        return [None] if len(files) == 1 else [image for file in files for image in decode([file], device)]


def _decode_all(files: list[Tensor], device: torch.device) -> list[Tensor]:
    if device.type == "cuda":
        return decoder(device)(files)
    pictures = (read_image(io.BytesIO(file.numpy().tobytes())) for file in files)
    return [pil_to_tensor(picture).to(device) for picture in pictures]


@functools.cache
def decoder_is_missing(device: torch.device) -> str | None:
    """Return why JPEG files cannot be decoded on a device, found by trying; None if they can."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, format="JPEG")
    try:
        _decode_all([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except Exception as error:  # missing libraries raise various types
        return f"{device} decodes no JPEG: {repr(error)[:200]}"
    return None
