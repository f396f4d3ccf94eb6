"""Batches decoded and transformed on the model's device: by nvJPEG and in batches, where that is a GPU.

The loader's processes only read files and draw random numbers.
"""

from __future__ import annotations

import functools
import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from .batched_transforms import apply_operations, crop_resize_flip, to_device
from .draws import DrawingTransform
from .encoded import EncodedBatch, join_pieces
from .host_loader import PieceLoader
from .images import read_image
from .nvjpeg import decoder

PIXELS_AT_ONCE = 2**28  # decoded at a time: 0.8 GB, and more than a batch of photos has


class DeviceLoader(PieceLoader):
    """Batches of files that the device decodes and transforms, in a thread and on a stream of their own.

    It prepares a batch when the model is done with the third one before it: what is ahead of the model fills memory.

    Args:
        transform: The one that drew for the images.
    """

    def __init__(self, *args, transform: DrawingTransform):
        super().__init__(*args)
        self.transform = transform
        # of high priority: small kernels go in between those of the model, and not behind them
        self.stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        ahead: deque[Future] = deque()
        thread = ThreadPoolExecutor(max_workers=1)
        try:
            used: list[torch.cuda.Event | None] = [None, None]
            for pieces in self.gathered():
                ahead.append(thread.submit(self._prepare, list(pieces), used[0]))
                if len(ahead) > 1:
                    yield self._finish(*ahead.popleft().result())
                    used = [used[1], self._what_is_queued()]
            while ahead:
                yield self._finish(*ahead.popleft().result())
        finally:  # also where a run is interrupted
            thread.shutdown(cancel_futures=True)

    def _what_is_queued(self) -> torch.cuda.Event | None:
        """Comes to pass when the device has done what was queued so far: the last batch is used, then."""
        if not self.stream:
            return None
        event = torch.cuda.Event(blocking=True)  # a thread that waits needs no core
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _prepare(self, pieces: list[EncodedBatch], used: torch.cuda.Event | None):
        """The batch, its images uint8, and which of its files were not decoded."""
        if used:
            used.synchronize()
        batch = join_pieces(pieces)
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            images = torch.empty(len(batch.targets), 3, *self.transform.size, dtype=torch.uint8, device=self.device)
            failed = self._decode_and_transform(batch, images)
            if batch.ready:
                images[to_device(batch.ready_rows, self.device)] = torch.cat(batch.ready).to(self.device)
        if self.stream:
            self.stream.synchronize()  # until then the files are read
        return batch, images, failed

    def _decode_and_transform(self, batch: EncodedBatch, images: Tensor) -> list[int]:
        """Puts what becomes of a batch's files into `images`. Returns which of them were not decoded."""
        # repeated augmentation may have brought a file several times: it is decoded once
        _, first, copy_of = np.unique(batch.keys[:, 0], return_index=True, return_inverse=True)
        failed = []
        for group in _groups(batch.sizes[first].prod(axis=1)):
            decoded = dict(zip(group.tolist(), decode([batch.files[i] for i in first[group]], self.device)))
            # a decoder that takes a file for one of another size than its header says has no part in it
            good = {
                i for i, image in decoded.items() if image is not None and image.shape[1:] == (*batch.sizes[first[i]],)
            }
            files = np.flatnonzero((copy_of >= group[0]) & (copy_of <= group[-1]))
            whole = np.array([i in good for i in copy_of[files].tolist()], dtype=bool)
            failed += files[~whole].tolist()
            if len(files := files[whole]):
                originals = [decoded[i] for i in copy_of[files].tolist()]
                images[to_device(batch.rows[files], self.device)] = self._transform(batch, files, originals)
        return failed

    def _transform(self, batch: EncodedBatch, files: np.ndarray, originals: list[Tensor]) -> Tensor:
        transform = self.transform
        crops = crop_resize_flip(
            originals,
            batch.boxes[files],
            batch.flips[files],
            transform.size,
            transform.interpolation,
            batch.resized[files],
            batch.offsets[files],
        )
        if not batch.operations[files].any():
            return crops
        return apply_operations(
            crops, batch.operations[files], batch.arguments[files], transform.fill, transform.interpolation
        )

    def _finish(self, batch: EncodedBatch, images: Tensor, failed: list[int]) -> tuple[Tensor, Tensor]:
        if self.stream:
            images.record_stream(torch.cuda.current_stream(self.device))
        for i in failed:  # here and not in the thread, since it draws from the process's generators
            image, batch.targets[batch.rows[i]] = self.dataset.finish(tuple(batch.keys[i].tolist()))
            images[int(batch.rows[i])] = image.to(self.device)
        return images, to_device(batch.targets, self.device)


def _groups(pixels: np.ndarray) -> list[np.ndarray]:
    """Files to decode at a time, by how many pixels each has."""
    if not len(pixels):
        return []
    return np.split(np.arange(len(pixels)), np.flatnonzero(np.diff(pixels.cumsum() // PIXELS_AT_ONCE)) + 1)


def decode(files: list[Tensor], device: torch.device) -> list[Tensor | None]:
    """Images (3, h, w) uint8 of JPEG files, by nvJPEG on a GPU; None for one that is refused."""
    try:
        return [*_decode_all(files, device)]
    except Exception:  # of one of them, it does not say which
        return [None] if len(files) == 1 else [image for file in files for image in decode([file], device)]


def _decode_all(files: list[Tensor], device: torch.device) -> list[Tensor]:
    if device.type == "cuda":
        return decoder(device)(files)
    pictures = (read_image(io.BytesIO(file.numpy().tobytes())) for file in files)
    return [pil_to_tensor(picture).to(device) for picture in pictures]


@functools.cache
def decoder_is_missing(device: torch.device) -> str | None:
    """Why JPEG files cannot be decoded on a device, found by trying; None if they can."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, format="JPEG")
    try:
        _decode_all([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except Exception as error:  # whatever is missing, in whatever way
        return f"{device} decodes no JPEG: {' '.join(str(error).split())[:200] or type(error).__name__}"
    return None
