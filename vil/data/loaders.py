"""Images for training and evaluation: timm's datasets, transforms and prefetching loader, in a reproducible order.

Which images make up a global batch, and how each is augmented, depends on the seed, the epoch and the image's position
in the epoch alone: not on the number of processes, loader workers or accumulation steps.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
import stat
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset, create_transform, get_img_extensions
from timm.data.dataset import IterableImageDataset
from timm.data.loader import fast_collate
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.data.readers.reader_image_tar import ReaderImageTar
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..config import DATASETS, Config, ConfigError
from ..processes import is_first_process
from .augmentation import BatchAugmentation  # noqa: F401  a run has all of these from here
from .device_loader import (
    DeviceLoader,
    DrawingTransform,
    EncodedImage,
    HostLoader,
    collate_encoded,
    decoder_is_missing,
    is_plain_jpeg,
)
from .images import (
    UNREADABLE,
    UnfitImageError,
    Unreadable,
    UnreadableSplitError,
    check_length,
    open_image,
    read_image,
    restrict_pillow,
)
from .seeds import derive_seed, seed_everything  # noqa: F401
from .synthetic import SyntheticImages, SyntheticLoader
from .workers import (  # noqa: F401
    PIECE,
    into_shared_memory,
    name_lost_workers,
    plan_loader,
    share_cores,
    signals_blocked,
    start_worker,
)

_logger = logging.getLogger(__name__)

STALLED = 600  # seconds without a batch, after which a loader's workers are taken to hang
NEAR = 10  # images from an unreadable one on that training tries before others from all over the split
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "val", "valid", "eval")}
TAR_READERS = (ReaderImageTar, ReaderImageInTar)
SAMPLE = 32  # files that are looked at before a split is loaded
LARGE_FILE = 2**18  # bytes, where it is not known how many a file has


def open_split(data_dir: str | None, dataset: str, split: str, num_classes: int | None = None, **kwargs):
    """timm's dataset for one split.

    Raises:
        ConfigError: The split is not there or cannot be opened, or it does not have `num_classes` classes; the message
            says what is there.
    """
    kind, _, name = dataset.lower().partition("/")
    if dataset and not (kind in DATASETS and name):
        known = ", ".join(f"{name}/..." for name in DATASETS)
        raise ConfigError(f"dataset {dataset!r} is none of {known}: leave it out for folders and tar files")
    try:
        if kind == "wds":
            from .shards import Shards  # webdataset is an optional dependency

            images = IterableImageDataset(data_dir, reader=Shards(data_dir, split=split, **kwargs))
            images.unreadable = images.reader.unreadable
        elif kind:  # there a split need not be a folder
            restrict_pillow()
            images = create_dataset(dataset, root=data_dir, split=split, **kwargs)
        else:
            images = create_dataset(dataset, root=str(_find_split(data_dir, split)), search_split=False, **kwargs)
    except ConfigError:
        raise
    except Exception as error:  # of whatever is there, and of the packages that read it
        raise ConfigError(f"cannot open the split {split!r} of {data_dir}: {type(error).__name__}: {error}") from error
    classes = len(class_names(images))
    if classes and num_classes and classes != num_classes:
        raise ConfigError(
            f"the split {split!r} of {data_dir} has {classes} classes but the model {num_classes} (num_classes)"
        )
    return images


def _refuse_empty_classes(images) -> None:
    """timm leaves out a class folder without images, and the classes after it have other numbers then."""
    folder, known = Path(getattr(images.reader, "root", None) or ""), class_names(images)
    if not known or not folder.is_dir():
        return
    folders = [entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."]
    others = [entry for entry in folders if entry.name not in known]
    empty = sorted(e.name for e in others if not any(p.suffix.lower() in get_img_extensions() for p in e.rglob("*")))
    if empty:
        raise ConfigError(
            f"class folders of {folder} have no images: {', '.join(empty[:5])}{', ...' if empty[5:] else ''}. Copy the "
            "images or remove the folders"
        )


def open_splits(config: Config):
    """The training split, the validation split and the number of classes.

    Raises:
        ConfigError: A split or the number of classes is missing, or the two splits do not agree on the classes.
    """
    if config.synthetic:
        num_classes = config.num_classes or 1000
        return SyntheticImages(config.synthetic), SyntheticImages(math.ceil(config.synthetic / 25)), num_classes
    location = config.data_dir, config.dataset
    train = open_split(*location, config.train_split, config.num_classes, is_training=True, seed=config.seed)
    _refuse_empty_classes(train)
    val = open_split(*location, config.val_split)
    num_classes = len(class_names(train)) or config.num_classes
    if not num_classes:
        raise ConfigError(f"the dataset {config.dataset} does not say how many classes it has: give num_classes")
    if num_classes < 2:
        raise ConfigError(
            f"the split {config.train_split!r} of {config.data_dir} has one class: each class needs a folder of its "
            "images"
        )
    if class_names(train) != class_names(val):
        if unknown := sorted(set(class_names(val)) - set(class_names(train))):
            raise ConfigError(f"the split {config.val_split!r} has classes that training has not: {unknown[:5]}")
        missing = sorted(set(class_names(train)) - set(class_names(val)))
        if is_first_process():
            _logger.warning(
                "the split %r has no images of %d of the %d classes: %s",
                config.val_split, len(missing), num_classes, ", ".join(missing[:5]) + (", ..." if missing[5:] else ""),
            )  # fmt: skip
        val = open_split(*location, config.val_split, class_map=class_names(train))
    return train, val, num_classes


def class_names(images) -> dict[str, int]:
    """The number of each class by name; empty where a dataset does not know."""
    reader = getattr(images, "reader", None)  # timm's reader of tar files has a name of its own for them
    return dict(getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None) or {})


def split_global_batch(config: Config, world_size: int) -> tuple[int, int]:
    """A process's micro-batch, and how many of them it accumulates to its share of the global batch.

    Raises:
        ConfigError: The processes cannot share the global batch equally, or mixup cannot pair the images.
    """
    share, rest = divmod(config.global_batch_size, world_size)
    if rest:
        raise ConfigError(f"global_batch_size {config.global_batch_size} is not a multiple of {world_size} processes")
    accumulation = math.ceil(share / (config.batch_size or share))
    while share % accumulation:
        accumulation += 1
    micro_batch = share // accumulation
    if config.mixing and micro_batch % 2:
        raise ConfigError(
            f"mixup pairs images, but a process's {share} of global_batch_size {config.global_batch_size} come in "
            f"micro-batches of {micro_batch}: choose an even size"
        )
    return micro_batch, accumulation


def _find_split(data_dir: str | None, split: str) -> Path:
    if not data_dir:
        raise ConfigError("data_dir is not given: the folder that holds the splits")
    root = Path(data_dir)
    if not root.is_dir():
        raise ConfigError(f"data_dir {data_dir} is not a folder")
    names = next((names for names in SPLIT_NAMES.values() if split in names), (split,))
    for name in (split, *names):
        for path in (root / name, root / f"{name}.tar"):
            if path.is_dir() or path.is_file():
                if name != split and split not in SPLIT_NAMES and is_first_process():  # these stand for any of theirs
                    _logger.warning("%s has no split %r: %s in its place", data_dir, split, path.name)
                return path
    found = ", ".join(sorted(p.name for p in root.iterdir())[:8]) or "nothing"
    raise ConfigError(
        f"{data_dir} has no split {split!r} (a folder or .tar called {' or '.join(names)}); it has {found}"
    )


class ImageReader(Dataset):
    """Images (C, H, W) uint8 and targets of a timm dataset, by (index, seed) of what is random in the transform.

    A file that cannot be read, whatever is wrong with it, is named in a warning and counted in `unreadable`. Training
    takes the next image instead; evaluation gets a blank one with the target `UNREADABLE`.
    """

    def __init__(self, dataset, transform, is_training: bool):
        self.dataset, self.transform, self.is_training = dataset, transform, is_training
        self.unreadable = Unreadable(len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]):
        index, seed = key
        seed_everything(seed)
        image, target = self._read(index)
        return self.transform(image), target

    def _read(self, index: int) -> tuple[Image.Image, int]:
        for offset in self._offsets():
            i = (index + offset) % len(self)
            try:
                file, target = _open(self.dataset.reader, i)
                with file:
                    return read_image(file), target
            except Exception as error:  # decoders raise all kinds
                # not the error itself, whose traceback would hold this frame, and through it the loader, in a cycle:
                # where that is collected, workers wait for the end of a queue that has gone before it
                name, last = self.dataset.reader.filename(i), repr(error)
                self.unreadable.add(i, name, error)
        if self.is_training:
            raise UnreadableSplitError(
                f"no image of the training split can be read: of {len(list(self._offsets()))}, the last is {name!r} "
                f"({last})"
            )
        return Image.new("RGB", (256, 256)), UNREADABLE

    def _offsets(self) -> Iterable[int]:
        """To an image, and in training to those that may take its place: some hundred, however many there are."""
        if not self.is_training:
            return (0,)
        count = len(self)
        return chain(range(min(NEAR, count)), range(NEAR, count, max(1, count // 100)))


def _open(reader, index: int) -> tuple[BinaryIO, int]:
    if isinstance(reader, ReaderImageFolder) and not stat.S_ISREG(os.stat(reader.samples[index][0]).st_mode):
        raise UnfitImageError("not a regular file")  # a pipe, for one, would have us wait
    return reader[index]


class EncodedReader(ImageReader):
    """As `ImageReader`, but what a device can decode comes as an `EncodedImage`."""

    def __init__(self, dataset, transform, is_training: bool, draw: DrawingTransform):
        super().__init__(dataset, transform, is_training)
        self.draw = draw

    def __getitem__(self, key: tuple[int, int]):
        index, seed = key
        try:
            file, target = _open(self.dataset.reader, index)
            with file:
                check_length(file)
                data = file.read()
            header = open_image(io.BytesIO(data))
        except Exception:  # `finish` says so
            return self.finish(key)
        if not is_plain_jpeg(data, header):
            return self.finish(key)
        seed_everything(seed)
        return EncodedImage(key, data, self.draw(header), header.size), target

    def finish(self, key: tuple[int, int]):
        """The image as timm's transform prepares it on the CPU: the same draws, the same care for broken files."""
        return super().__getitem__(key)


class TrainingBatches:
    """Batch sampler: the (index, seed) pairs of this process's micro-batches of one epoch.

    A global batch is a slice of the epoch's permutation, `repeats` times over (repeated augmentation, Hoffer et al.,
    2020, as in DeiT), and each process takes its consecutive share of it. An incomplete last one is left out.
    """

    def __init__(self, num_images: int, config: Config, micro_batch: int, rank: int, world_size: int):
        self.num_images, self.micro_batch, self.rank, self.world_size = num_images, micro_batch, rank, world_size
        self.seed, self.global_batch = config.seed, config.global_batch_size
        self.repeats = max(1, config.aug_repeats)
        self.set_epoch(0)
        if num_images < self.global_batch:
            raise ConfigError(
                f"the training split has {num_images} images, less than one global batch of {self.global_batch}: "
                "lower global_batch_size"
            )

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Chooses the epoch, and where in it to begin: a run may have been interrupted after `first_step` steps."""
        self.epoch, self.first_step = epoch, first_step

    @property
    def steps(self) -> int:
        return self.num_images // self.global_batch

    def __len__(self) -> int:
        return (self.steps - self.first_step) * self.accumulation

    @property
    def accumulation(self) -> int:
        return self.global_batch // self.world_size // self.micro_batch

    def sizes(self) -> Iterator[int]:
        return repeat(self.micro_batch, len(self))

    def first_positions(self) -> Iterator[int]:
        """The position in the epoch of each micro-batch's first image."""
        share = self.global_batch // self.world_size
        for step in range(self.first_step, self.steps):
            start = step * self.global_batch + self.rank * share
            yield from range(start, start + share, self.micro_batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        random_numbers = np.random.default_rng((self.seed, self.epoch))
        order = random_numbers.permutation(self.num_images)
        seeds = random_numbers.integers(2**32, size=self.steps * self.global_batch)
        unique = math.ceil(self.global_batch / self.repeats)
        for first in self.first_positions():
            batch = []
            for position in range(first, first + self.micro_batch):
                step, place = divmod(position, self.global_batch)
                batch.append((int(order[step * unique + place % unique]), int(seeds[position])))
            yield batch


def micro_batches(loader, batches: TrainingBatches, epoch: int, first_step: int = 0):
    """A training loader's ((images, targets), position of the first image) of an epoch from a step of it on."""
    batches.set_epoch(epoch, first_step)
    if hasattr(loader.dataset, "set_epoch"):  # a stream shuffles by itself: what was seen is read again and dropped
        loader.dataset.set_epoch(epoch)
        loader = _not_empty(islice(loader, first_step * batches.accumulation, None), len(batches))
    return zip(loader, batches.first_positions())


def _not_empty(stream: Iterable, expected: int) -> Iterator:
    batch = None
    for batch in stream:
        yield batch
    if expected and batch is None:
        raise UnreadableSplitError("no image of the training split can be read")


class EvaluationBatches:
    """Batch sampler: every image exactly once over all processes, in order."""

    def __init__(self, num_images: int, batch_size: int, rank: int, world_size: int):
        self.indices, self.batch_size = range(rank, num_images, world_size), batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(i, 0) for i in self.indices[start : start + self.batch_size]]

    def sizes(self) -> Iterator[int]:
        return map(len, self)


class _Pieces:
    """Batch sampler: each of `batches` in pieces that a worker loads at a time, but none of them before `ready`."""

    def __init__(self, batches: TrainingBatches | EvaluationBatches):
        self.batches, self.ready = batches, False

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self.batches if self.ready else ():
            yield from (batch[start : start + PIECE] for start in range(0, len(batch), PIECE))


def training_loader(dataset, config: Config, data_config: dict, device: torch.device, batches: TrainingBatches):
    """Augmented images (B, 3, H, W) uint8 and targets (B,) on `device`, in micro-batches."""
    transform = create_transform(
        data_config["input_size"],
        is_training=True,
        use_prefetcher=True,  # uint8 out of the workers; the rest happens on the device
        scale=config.scale,
        ratio=config.ratio,
        hflip=config.hflip,
        color_jitter=config.color_jitter,
        auto_augment=config.aa,
        interpolation=config.train_interpolation,
        mean=data_config["mean"],
        std=data_config["std"],
    )
    place = data_config, device, config.workers, config.augment_on_device
    return _create_loader(dataset, transform, *place, batches, batches.micro_batch)


def evaluation_loader(
    dataset,
    data_config: dict,
    device: torch.device,
    workers: int | None,
    batch_size: int,
    rank: int,
    world_size: int,
    augment_on_device: bool | None = None,
):
    """Resized and cropped images (B, 3, H, W) uint8 and targets (B,) on `device`: this process's share."""
    transform = create_transform(
        data_config["input_size"],
        use_prefetcher=True,
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"],
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
    )
    batches = EvaluationBatches(len(dataset), batch_size, rank, world_size)
    return _create_loader(dataset, transform, data_config, device, workers, augment_on_device, batches, batch_size)


def describe(loader) -> str:
    """How a loader loads, in a few words, for the log of a run."""
    return str(loader.plan) if hasattr(loader, "plan") else "noise, made on the device"


def _create_loader(dataset, transform, data_config, device, workers, augment_on_device, batches, batch_size):
    is_training = isinstance(batches, TrainingBatches)
    if isinstance(dataset, SyntheticImages):
        return SyntheticLoader(dataset, batches, batch_size, data_config["input_size"], device)
    draw = _drawing_transform(dataset, transform, device, augment_on_device)
    pieces = math.ceil(batch_size / PIECE) * len(batches)
    image_bytes = _typical_bytes(dataset) if draw else math.prod(data_config["input_size"])
    streams = isinstance(dataset, IterableImageDataset)
    in_a_piece = batch_size if streams else min(batch_size, PIECE)
    plan = plan_loader(workers, device, batch_size, pieces, in_a_piece * image_bytes, bool(draw))
    if streams:  # in an order of its own
        dataset.transform = transform
        dataset.set_loader_cfg(num_workers=plan.workers)
        order = dict(batch_size=batch_size, drop_last=is_training)
    else:
        dataset = (
            EncodedReader(dataset, transform, is_training, draw)
            if draw
            else ImageReader(dataset, transform, is_training)
        )
        order = dict(batch_sampler=_Pieces(batches))
    loader = DataLoader(
        dataset,
        num_workers=plan.workers,
        prefetch_factor=plan.prefetch,
        collate_fn=partial(collate_encoded, size=draw.size) if draw else _collate,
        pin_memory=device.type == "cuda" and not draw,  # files' bytes go to the decoder, not to the device
        persistent_workers=plan.workers > 0,
        timeout=STALLED if plan.workers else 0,
        worker_init_fn=start_worker,
        **order,
    )
    if not streams:
        # A thread that enters Python, as those of autograd, holds a lock that Python below 3.12 takes into a fork and
        # waits for then: so the workers start here, before there are such threads.
        if plan.workers:
            with signals_blocked():
                iter(loader)
            name_lost_workers()
        loader.batch_sampler.ready = True
    place = loader, None if streams else batches, device, plan
    return DeviceLoader(*place, transform=draw) if draw else HostLoader(*place)


def _collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, targets = fast_collate(samples)
    into_shared_memory(images, targets)
    return images, targets


def _drawing_transform(dataset, transform, device: torch.device, wanted: bool | None) -> DrawingTransform | None:
    """What draws for images that the device decodes and transforms; None if the workers are to do it.

    Args:
        wanted: True: on any device, False: on none, None: on a GPU that can, and one line says why if it cannot.

    Raises:
        ConfigError: The device is wanted, and cannot.
    """
    if wanted is False or (wanted is None and device.type != "cuda"):
        return None
    draw = None
    try:
        draw = DrawingTransform(transform)
        reason = decoder_is_missing(device)
    except ConfigError as error:
        reason = str(error)
    if isinstance(dataset, IterableImageDataset):
        reason = "a dataset that streams has no images by index"
    if wanted and reason:
        raise ConfigError(f"augment_on_device: {reason}")
    if not reason and not wanted and not _has_jpegs(dataset):
        reason = "most files are no JPEGs"
    if reason:
        _say_once(f"the workers decode and augment images, not the GPU: {reason}")
        return None
    return draw


@functools.cache
def _say_once(message: str) -> None:
    """Training and evaluation have the same reasons."""
    if is_first_process():
        _logger.warning("%s", message)


def _sample(dataset) -> list[int]:
    """Some images from all over a split."""
    return list(range(0, len(dataset), max(1, len(dataset) // SAMPLE)))[:SAMPLE]


def _has_jpegs(dataset) -> bool:
    """Whether most files are, by the first bytes of some."""
    reader, found = dataset.reader, []
    for i in _sample(dataset):
        if isinstance(reader, TAR_READERS):  # to open one here would have the workers share its place in the file
            found.append(reader.filename(i).lower().endswith((".jpg", ".jpeg")))
            continue
        try:
            file, *_ = _open(reader, i)
            with file:
                found.append(file.read(3) == b"\xff\xd8\xff")
        except Exception:  # whoever reads the image says so
            continue
    return 2 * sum(found) > len(found)


def _typical_bytes(dataset) -> int:
    """Of a file, and half as much again: what the workers have read fills shared memory."""
    reader, found = dataset.reader, [LARGE_FILE]
    if isinstance(reader, ReaderImageFolder):
        found = []
        for i in _sample(dataset):
            with contextlib.suppress(OSError):
                found.append(os.stat(reader.samples[i][0]).st_size)
    return 3 * sum(found) // max(1, 2 * len(found))


def unreadable_images(loader) -> int:
    """How often a loader's images could not be read since this was last asked."""
    unreadable = getattr(loader.dataset, "unreadable", None)  # noise has none, nor what others decode
    return unreadable.take() if unreadable else 0
