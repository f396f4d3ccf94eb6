"""Training images decoded and augmented on the training device: by nvJPEG and in batches, where that is a GPU.

The loader's processes only read files and draw random numbers. timm's own transform draws them, from the same seeds, so
that every image is augmented as `timm.data.create_transform` would augment it on the CPU, draw for draw.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import RandAugment
from timm.data.transforms import MaybePILToTensor, RandomResizedCropAndInterpolation
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import Compose, RandomHorizontalFlip

from .batched_transforms import (
    ARGUMENTS,
    CODES,
    GEOMETRIC,
    POINTWISE,
    affine_matrix,
    apply_operations,
    crop_resize_flip,
    to_device,
)
from .config import ConfigError

MOST_PIXELS = 2**24  # of a file that the device decodes: larger ones are few, and left to the CPU
PIXELS_AT_ONCE = 2**28  # decoded at a time: 0.8 GB, and more than a batch of photos has


@dataclass
class Draws:
    """What is random in the augmentation of one image."""

    box: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, height, width
    flip: bool = False
    operations: list[tuple[str, tuple[float, ...]]] = field(default_factory=list)  # timm's names and arguments


class DrawingTransform:
    """Draws what a timm training transform draws for an image, without touching its pixels.

    Raises:
        ConfigError: The transform has a part that is not known here.
    """

    def __init__(self, transform: Compose):
        self.steps = [copy.deepcopy(step) for step in transform.transforms if not isinstance(step, MaybePILToTensor)]
        self.fill = (0, 0, 0)
        for step in self.steps:
            if isinstance(step, RandomResizedCropAndInterpolation):
                self.size, self.interpolation = step.size, getattr(step.interpolation, "value", "random")
            elif isinstance(step, RandAugment):
                self.fill = step.ops[0].kwargs["fillcolor"]
                for operation in step.ops:
                    name = operation.name.removesuffix("Increasing")  # that is in the argument
                    self._check(name, (*POINTWISE, *GEOMETRIC), "operation of aa")
                    operation.aug_fn = partial(_record, name)
            else:
                self._check(type(step).__name__, ("RandomHorizontalFlip", "ColorJitter"), "transform")
        self._check(self.interpolation, ("bilinear", "bicubic"), "train_interpolation")

    @staticmethod
    def _check(name: str, known: Sequence[str], what: str) -> None:
        if name not in known:
            raise ConfigError(f"augment_on_device does not know the {what} {name!r}; it knows {', '.join(known)}")

    def __call__(self, image: Image.Image) -> Draws:
        draws = Draws()
        for step in self.steps:
            if isinstance(step, RandomResizedCropAndInterpolation):
                draws.box = step.get_params(image, step.scale, step.ratio)
            elif isinstance(step, RandomHorizontalFlip):
                draws.flip = bool(torch.rand(1) < step.p)
            elif isinstance(step, RandAugment):
                draws.operations += step([])
            else:
                order, *factors = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
                jitter = list(zip(("Brightness", "Contrast", "Color"), factors))
                draws.operations += [(jitter[i][0], (jitter[i][1],)) for i in order if i < len(jitter)]
        return draws


def _record(name: str, operations: list, *arguments: float, **_) -> list:
    """Stands in for a function of timm's: notes the call in the place of the image."""
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
    return baseline and ycc and one_frame and data.endswith(b"\xff\xd9")


@dataclass
class EncodedBatch:
    """Files to decode, with the row of each in the batch, and the images that came ready from the CPU."""

    targets: Tensor
    keys: list[tuple[int, int]]
    rows: np.ndarray  # of the files; those below are of the ready images
    data: Tensor  # the bytes of all files, one after the other
    lengths: list[int]
    sizes: np.ndarray  # (files, 2): height and width by their headers
    boxes: np.ndarray
    flips: np.ndarray
    operations: np.ndarray  # (files, turns): codes
    arguments: np.ndarray  # (files, turns, ARGUMENTS)
    ready_rows: np.ndarray
    ready: Tensor | None


def collate_encoded(samples: list[tuple[EncodedImage | Tensor, int]], size: tuple[int, int]) -> EncodedBatch:
    """The samples of a batch, each an `EncodedImage` or an augmented image (3, H, W) uint8, with its target."""
    files = {row: image for row, (image, _) in enumerate(samples) if isinstance(image, EncodedImage)}
    ready = {row: image for row, (image, _) in enumerate(samples) if row not in files}
    draws = [file.draws for file in files.values()]
    turns = max((len(d.operations) for d in draws), default=0)
    operations = np.zeros((len(files), turns), dtype=np.uint8)
    arguments = np.zeros((len(files), turns, ARGUMENTS), dtype=np.float32)
    for i, d in enumerate(draws):
        for turn, (name, values) in enumerate(d.operations):
            if name in GEOMETRIC:
                name, values = "Affine", affine_matrix(name, *values, width=size[1], height=size[0])
            operations[i, turn] = CODES[name]
            arguments[i, turn, : len(values)] = values
    return EncodedBatch(
        targets=torch.tensor([target for _, target in samples]),
        keys=[file.key for file in files.values()],
        rows=np.array(list(files), dtype=np.int64),
        data=torch.frombuffer(bytearray(b"".join(file.data for file in files.values()) or b"\0"), dtype=torch.uint8),
        lengths=[len(file.data) for file in files.values()],
        sizes=np.array([file.size[::-1] for file in files.values()], dtype=np.int64).reshape(-1, 2),
        boxes=np.array([d.box for d in draws], dtype=np.int64).reshape(-1, 4),
        flips=np.array([d.flip for d in draws], dtype=bool),
        operations=operations,
        arguments=arguments,
        ready_rows=np.array(list(ready), dtype=np.int64),
        ready=torch.stack(list(ready.values())) if ready else None,
    )


class DeviceLoader:
    """Augmented images (B, 3, H, W), normalised on `device`, and targets (B,).

    A thread of its own decodes and augments the next batch on a stream of its own while the model trains.

    Args:
        loader: Yields `EncodedBatch`; its dataset's `finish(key)` gives an augmented image and its target.
        transform: What drew for the images.
    """

    def __init__(self, loader: DataLoader, transform: DrawingTransform, data_config: dict, device: torch.device):
        self.loader, self.transform, self.device = loader, transform, device
        self.mean, self.std = (
            torch.tensor([255 * value for value in data_config[name]], device=device).view(3, 1, 1)
            for name in ("mean", "std")
        )
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self):
        return self.loader.dataset

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        ahead: deque[tuple[EncodedBatch, Future]] = deque()
        with ThreadPoolExecutor(max_workers=1) as thread:
            for batch in self.loader:
                ahead.append((batch, thread.submit(self._augment, batch)))
                if len(ahead) > 1:
                    yield self._finish(*ahead.popleft())
            while ahead:
                yield self._finish(*ahead.popleft())

    def _augment(self, batch: EncodedBatch) -> tuple[Tensor, list[int], torch.cuda.Event | None]:
        """The batch's images (B, 3, H, W) uint8, which of its files were not decoded, and what to wait for."""
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            images = torch.empty(len(batch.targets), 3, *self.transform.size, dtype=torch.uint8, device=self.device)
            failed = []
            for files in _groups(batch.sizes.prod(axis=1)):
                failed += self._decode_and_transform(batch, files, images)
            if batch.ready is not None:
                images[to_device(batch.ready_rows, self.device)] = batch.ready.to(self.device)
            return images, failed, self.stream.record_event() if self.stream else None

    def _decode_and_transform(self, batch: EncodedBatch, files: np.ndarray, images: Tensor) -> list[int]:
        """Puts what becomes of some of a batch's files into `images`. Returns which of them were not decoded."""
        if self.stream:
            # torchvision's decoder writes on a stream of its own to memory that comes from this one's pool, and
            # does not wait for this one: what was queued here may still be reading that memory
            self.stream.synchronize()
        data = batch.data.split(batch.lengths)
        decoded = dict(zip(files.tolist(), decode([data[i] for i in files], self.device)))
        # a decoder that takes a file for one of another size than its header says has no part in it
        good = [i for i, image in decoded.items() if image is not None and image.shape[1:] == (*batch.sizes[i],)]
        if good:
            images[to_device(batch.rows[good], self.device)] = self._transform(
                [decoded[i] for i in good],
                batch.boxes[good],
                batch.flips[good],
                batch.operations[good],
                batch.arguments[good],
            )
        return sorted(decoded.keys() - good)

    def _transform(self, images, boxes, flips, operations, arguments) -> Tensor:
        transform = self.transform
        crops = crop_resize_flip(images, boxes, flips, transform.size, transform.interpolation)
        return apply_operations(crops, operations, arguments, transform.fill, transform.interpolation)

    def _finish(self, batch: EncodedBatch, augmented: Future) -> tuple[Tensor, Tensor]:
        images, failed, done = augmented.result()
        if done:
            consumer = torch.cuda.current_stream(self.device)
            consumer.wait_event(done)
            images.record_stream(consumer)
        for i in failed:  # here and not in the thread, since it draws from the process's generators
            row = int(batch.rows[i])
            image, target = self.dataset.finish(batch.keys[i])
            images[row] = image.to(self.device)
            batch.targets[row] = target
        targets = batch.targets.to(self.device, non_blocking=True)
        return images.float().sub_(self.mean).div_(self.std), targets


def _groups(pixels: np.ndarray) -> list[np.ndarray]:
    """Files to decode at a time, by how many pixels each has."""
    if not len(pixels):
        return []
    return np.split(np.arange(len(pixels)), np.flatnonzero(np.diff(pixels.cumsum() // PIXELS_AT_ONCE)) + 1)


def decode(files: list[Tensor], device: torch.device) -> list[Tensor | None]:
    """Images (3, h, w) uint8 of JPEG files, by nvJPEG on a GPU; None for one that is refused."""
    cpu_or_cuda = device if device.type == "cuda" else torch.device("cpu")
    try:
        return [image.to(device) for image in decode_jpeg(files, ImageReadMode.RGB, device=cpu_or_cuda)]
    except Exception:  # of one of them, it does not say which
        return [None] if len(files) == 1 else [image for file in files for image in decode([file], device)]
