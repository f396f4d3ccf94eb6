"""Images decoded and transformed on the device that the model is on: by nvJPEG and in batches, where that is a GPU.

The loader's processes only read files and draw random numbers. timm's own transform draws them, from the same seeds, so
that every image is augmented as `timm.data.create_transform` would augment it on the CPU, draw for draw.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import AutoAugment, RandAugment
from timm.data.transforms import MaybePILToTensor, RandomResizedCropAndInterpolation, ResizeKeepRatio
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import CenterCrop, ColorJitter, Compose, RandomHorizontalFlip, Resize
from torchvision.transforms.functional import pil_to_tensor

from ..config import ConfigError
from .batched_transforms import (
    ARGUMENTS,
    CODES,
    GEOMETRIC,
    affine_matrix,
    apply_operations,
    crop_resize_flip,
    to_device,
)
from .nvjpeg import MOST_PIXELS, decoder
from .workers import PIECE, LoaderPlan, into_shared_memory, lost_workers_named

PIXELS_AT_ONCE = 2**28  # decoded at a time: 0.8 GB, and more than a batch of photos has


@dataclass
class Draws:
    """What becomes of one image: a box is cut out and resized, and of that a window is taken, mirrored or not."""

    box: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, height, width
    resized: tuple[int, int] = (0, 0)  # height, width
    offset: tuple[int, int] = (0, 0)  # top, left of the window; it may go beyond the edges
    flip: bool = False
    operations: list[tuple[str, tuple[float, ...]]] = field(default_factory=list)  # timm's names and arguments


class DrawingTransform:
    """Draws what a timm transform draws for an image, without touching its pixels.

    Raises:
        ConfigError: The transform has a part that is not known here.
    """

    def __init__(self, transform: Compose):
        self.steps = [copy.deepcopy(step) for step in transform.transforms if not isinstance(step, MaybePILToTensor)]
        self.fill, interpolations = (0, 0, 0), set()
        for step in self.steps:
            _check(type(step).__name__, [known.__name__ for known in _DRAW], "transform")
            if hasattr(step, "interpolation"):
                interpolations.add(getattr(step.interpolation, "value", "random"))
            if isinstance(step, (RandomResizedCropAndInterpolation, CenterCrop)):
                self.size = tuple(step.size)
            for operation in _operations(step):
                operation.aug_fn = _recorder(operation.name)
                self.fill = operation.kwargs["fillcolor"]
        (self.interpolation,) = interpolations
        _check(self.interpolation, ("bilinear", "bicubic"), "interpolation")

    def __call__(self, image: Image.Image) -> Draws:
        """Of the image only its size matters."""
        draws = Draws(box=(0, 0, image.height, image.width))
        for step in self.steps:
            _DRAW[type(step)](step, image, draws)
        return draws


def _check(name: str, known: Sequence[str], what: str) -> None:
    if name not in known:
        raise ConfigError(f"the {what} {name!r} is unknown there, where {', '.join(known)} are known")


def _operations(step) -> list:
    """timm's `AugmentOp`s of a policy."""
    if isinstance(step, AutoAugment):
        return [operation for operations in step.policy for operation in operations]
    return step.ops if isinstance(step, RandAugment) else []


def _draw_random_crop(step: RandomResizedCropAndInterpolation, image: Image.Image, draws: Draws) -> None:
    draws.box, draws.resized = step.get_params(image, step.scale, step.ratio), step.size


def _draw_resize(step: Resize, image: Image.Image, draws: Draws) -> None:
    if isinstance(step.size, int):  # of the shorter side
        height, width = image.height, image.width
        long = int(step.size * max(height, width) / min(height, width))
        draws.resized = (step.size, long) if height <= width else (long, step.size)
    else:
        draws.resized = step.size


def _draw_resize_keeping_ratio(step: ResizeKeepRatio, image: Image.Image, draws: Draws) -> None:
    draws.resized = step.get_params(
        image, step.size, step.longest, step.random_scale_prob, step.random_scale_range, step.random_scale_area,
        step.random_aspect_prob, step.random_aspect_range,
    )  # fmt: skip


def _draw_centre_crop(step: CenterCrop, image: Image.Image, draws: Draws) -> None:
    """torchvision rounds half a pixel to even inside an image, and down where it pads one."""
    draws.offset = tuple(
        round((length - size) / 2) if length >= size else -((size - length) // 2)
        for length, size in zip(draws.resized, step.size)
    )


def _draw_flip(step: RandomHorizontalFlip, image: Image.Image, draws: Draws) -> None:
    draws.flip = bool(torch.rand(1) < step.p)


def _draw_policy(step: RandAugment | AutoAugment, image: Image.Image, draws: Draws) -> None:
    draws.operations += step([])


def _draw_jitter(step: ColorJitter, image: Image.Image, draws: Draws) -> None:
    order, *factors, _ = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
    jitter = list(zip(("Brightness", "Contrast", "Color"), factors))
    draws.operations += [
        (name, (factor,)) for name, factor in (jitter[i] for i in order if i < len(jitter)) if factor is not None
    ]


_DRAW = {
    RandomResizedCropAndInterpolation: _draw_random_crop,
    Resize: _draw_resize,
    ResizeKeepRatio: _draw_resize_keeping_ratio,
    CenterCrop: _draw_centre_crop,
    RandomHorizontalFlip: _draw_flip,
    RandAugment: _draw_policy,
    AutoAugment: _draw_policy,
    ColorJitter: _draw_jitter,
}


def _recorder(name: str):
    """What stands in for timm's function of an operation: it notes the call in the place of the image."""
    if name == "Desaturate":
        return lambda operations, factor, **_: [*operations, ("Color", (min(1.0, max(0.0, 1.0 - factor)),))]
    if name == "GaussianBlurRand":
        return lambda operations, factor, **_: [*operations, ("GaussianBlur", (random.uniform(0.1, 2.0 * factor),))]
    name = name.removesuffix("Increasing").removesuffix("Original")  # that is in the argument
    _check(name, (*CODES, *GEOMETRIC), "operation of aa")
    return partial(_record, name)


def _record(name: str, operations: list, *arguments: float, **_) -> list:
    return [*operations, (name, arguments)]


@dataclass
class EncodedImage:
    """A file that the device is to decode, and what was drawn for it."""

    key: tuple[int, int]  # index and seed, as the sampler gave them
    data: bytes
    draws: Draws
    size: tuple[int, int]  # width and height that the header says


def is_plain_jpeg(data: bytes, header: Image.Image) -> bool:
    """Whether the hardware decodes it to what PIL makes of it: complete, baseline, and in colour or grey."""
    if header.format != "JPEG" or math.prod(header.size) > MOST_PIXELS:
        return False
    one_frame = len(header.layer) == header.layers  # of two, decoders may believe the one or the other
    ycc = header.info.get("adobe_transform", 1) == 1
    baseline = header.mode in ("RGB", "L") and not header.info.get("progressive")
    sampled = all(across <= 2 and down <= 2 for _, across, down, _ in header.layer)  # 4:1:1 is not for the hardware
    return baseline and ycc and one_frame and sampled and data.endswith(b"\xff\xd9")


@dataclass
class EncodedBatch:
    """Files to decode, with the row of each in the batch, and the images that came ready from the CPU."""

    targets: np.ndarray
    rows: np.ndarray  # in the batch, of the files; most of what is below is of the files, too
    keys: np.ndarray  # (files, 2): index and seed
    lengths: np.ndarray  # in bytes
    sizes: np.ndarray  # (files, 2): height and width by their headers
    boxes: np.ndarray  # (files, 4)
    resized: np.ndarray  # (files, 2)
    offsets: np.ndarray  # (files, 2)
    flips: np.ndarray
    operations: np.ndarray  # (files, turns) of the operations
    arguments: np.ndarray  # (files, turns, ARGUMENTS)
    ready_rows: np.ndarray
    files: list[Tensor]  # their bytes; out of a worker those of all, one after the other, in one tensor
    ready: list[Tensor]  # images (n, 3, H, W) uint8


def collate_encoded(samples: list[tuple[EncodedImage | Tensor, int]], size: tuple[int, int]) -> EncodedBatch:
    """The samples of a batch, each an `EncodedImage` or an augmented image (3, H, W) uint8, with its target."""
    files = {row: image for row, (image, _) in enumerate(samples) if isinstance(image, EncodedImage)}
    ready = {row: image for row, (image, _) in enumerate(samples) if row not in files}
    images, draws = list(files.values()), [file.draws for file in files.values()]
    turns = max((len(d.operations) for d in draws), default=0)
    operations = np.zeros((len(files), turns), dtype=np.uint8)
    arguments = np.zeros((len(files), turns, ARGUMENTS), dtype=np.float32)
    for i, d in enumerate(draws):
        for turn, (name, values) in enumerate(d.operations):
            if name in GEOMETRIC:
                name, values = "Affine", affine_matrix(name, *values, width=size[1], height=size[0])
            operations[i, turn] = CODES[name]
            arguments[i, turn, : len(values)] = values
    lengths = np.array([len(file.data) for file in images], dtype=np.int64)
    data = torch.empty(int(lengths.sum()), dtype=torch.uint8)
    for part, file in zip(np.split(data.numpy(), lengths.cumsum()), images):
        part[:] = np.frombuffer(file.data, dtype=np.uint8)
    batch = EncodedBatch(
        targets=np.array([target for _, target in samples], dtype=np.int64),
        rows=np.array(list(files), dtype=np.int64),
        keys=np.array([file.key for file in images], dtype=np.int64).reshape(-1, 2),
        lengths=lengths,
        sizes=np.array([file.size[::-1] for file in images], dtype=np.int64).reshape(-1, 2),
        boxes=np.array([d.box for d in draws], dtype=np.int64).reshape(-1, 4),
        resized=np.array([d.resized for d in draws], dtype=np.int64).reshape(-1, 2),
        offsets=np.array([d.offset for d in draws], dtype=np.int64).reshape(-1, 2),
        flips=np.array([d.flip for d in draws], dtype=bool),
        operations=operations,
        arguments=arguments,
        ready_rows=np.array(list(ready), dtype=np.int64),
        files=[data] if files else [],
        ready=[torch.stack(list(ready.values()))] if ready else [],
    )
    into_shared_memory(*batch.files, *batch.ready)
    return batch


def join_pieces(pieces: Sequence[EncodedBatch]) -> EncodedBatch:
    """One batch of what workers have collated, in this order; each file is a tensor then."""
    first_rows = np.cumsum([0, *(len(piece.targets) for piece in pieces[:-1])])
    turns = max(piece.operations.shape[1] for piece in pieces)
    joined = {
        name: np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("targets", "keys", "lengths", "sizes", "boxes", "resized", "offsets", "flips")
    }
    joined |= {
        name: np.concatenate([first + getattr(piece, name) for first, piece in zip(first_rows, pieces)])
        for name in ("rows", "ready_rows")
    }
    for name in ("operations", "arguments"):
        arrays = [getattr(piece, name) for piece in pieces]
        padding = [[(0, 0), (0, turns - array.shape[1]), *[(0, 0)] * (array.ndim - 2)] for array in arrays]
        joined[name] = np.concatenate([np.pad(array, pad) for array, pad in zip(arrays, padding)])
    data = [(data, piece.lengths.tolist()) for piece in pieces for data in piece.files]
    files = [file for bytes_of_files, lengths in data for file in bytes_of_files.split(lengths)]
    return EncodedBatch(**joined, files=files, ready=[images for piece in pieces for images in piece.ready])


class PieceLoader:
    """Batches of images (B, 3, H, W) uint8 and targets (B,), both on `device`, out of the pieces that workers load.

    Args:
        loader: Yields pieces of at most `PIECE` images.
        batches: A batch sampler that knows the `sizes()` of its batches; None where a piece is a batch.
        device: Where the batches go.
        plan: How the pieces are loaded.
    """

    def __init__(self, loader: DataLoader, batches, device: torch.device, plan: LoaderPlan):
        self.loader, self.batches, self.device, self.plan = loader, batches, device, plan

    def __len__(self) -> int:
        return len(self.loader if self.batches is None else self.batches)

    @property
    def dataset(self):
        return self.loader.dataset

    def gathered(self) -> Iterator[Iterator]:
        """The pieces of each batch, one after the other."""
        pieces = self._loaded()
        if self.batches is None:
            yield from (iter([piece]) for piece in pieces)
        elif len(self.batches):
            for size in self.batches.sizes():
                yield islice(pieces, math.ceil(size / PIECE))

    def _loaded(self) -> Iterator:
        with lost_workers_named():
            yield from self.loader


class HostLoader(PieceLoader):
    """Of images that the workers decode and augment."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pieces in self.gathered():
            moved = [self._move(*piece) for piece in pieces]
            images, targets = (torch.cat(tensors) if len(moved) > 1 else tensors[0] for tensors in zip(*moved))
            yield images, targets

    def _move(self, *tensors: Tensor) -> list[Tensor]:
        """A copy on a CPU, too: what workers share is little, and they get it back."""
        pinned = self.device.type == "cuda"
        return [tensor.to(self.device, non_blocking=pinned, copy=True) for tensor in tensors]


class DeviceLoader(PieceLoader):
    """Of files that the device decodes and transforms, in a thread of its own and on a stream of its own.

    It prepares a batch when the model is done with the third one before it: what is ahead of the model fills memory.

    Args:
        transform: What drew for the images.
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
        return _decode_all(files, device)
    except Exception:  # of one of them, it does not say which
        return [None] if len(files) == 1 else [image for file in files for image in decode([file], device)]


def _decode_all(files: list[Tensor], device: torch.device) -> list[Tensor]:
    if device.type == "cuda":
        return decoder(device)(files)
    pictures = (Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB") for file in files)
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
