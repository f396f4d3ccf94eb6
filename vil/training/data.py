"""Images for training and evaluation: timm's datasets, transforms and prefetching loader, in a reproducible order.

Which images make up a global batch, and how each is augmented, depends on the seed, the epoch and the image's position
in the epoch alone: not on the number of processes, loader workers or accumulation steps.
"""

from __future__ import annotations

import io
import logging
import math
import multiprocessing
import os
import random
import signal
import stat
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, create_dataset, create_transform, get_img_extensions
from timm.data.dataset import IterableImageDataset
from timm.data.loader import PrefetchLoader, fast_collate
from timm.data.mixup import cutmix_bbox_and_lam, mixup_target
from timm.data.random_erasing import RandomErasing
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .config import Config, ConfigError
from .device_loader import DeviceLoader, DrawingTransform, EncodedImage, collate_encoded, is_plain_jpeg
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
from .processes import is_first_process
from .synthetic import SyntheticImages, SyntheticLoader

_logger = logging.getLogger(__name__)

STALLED = 600  # seconds without a batch, after which a loader's workers are taken to hang
SCHEDULERS_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
NEAR = 10  # images from an unreadable one on that training tries before others from all over the split
DATASETS = ("wds", "hfds", "hfids", "tfds")  # timm's readers other than that of folders and tar files
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "val", "valid", "eval", "test")}
# Images that share one draw of mixup's parameters, mixed among themselves: a group is never split over processes, so
# the draws do not depend on their number as long as each holds a multiple of it.
MIXUP_GROUP = 8


def derive_seed(*key: int) -> int:
    """A 32-bit seed of its own for every key, such as (seed, epoch, position)."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch, the CPU and the GPU in use.

    `torch.manual_seed` would also note the seed for every backend that nobody has started, with a stack trace that
    takes ten times as long as the rest: too slow for every image.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            backend.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def share_cores(device: torch.device, workers: int) -> None:
    """Leaves the loader's workers a core each where a CPU also trains: PyTorch's threads wait long for a busy core."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - workers))


def open_split(data_dir: str | None, dataset: str, split: str, num_classes: int | None = None, **kwargs):
    """timm's dataset for one split.

    Raises:
        ConfigError: The split is not there or cannot be opened, or it does not have `num_classes` classes; the message
            says what is there.
    """
    kind = dataset.lower().partition("/")[0] if "/" in dataset else ""
    if kind not in ("", *DATASETS):
        raise ConfigError(f"dataset {dataset!r} is none of {', '.join(f'{name}/...' for name in DATASETS)}")
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
        raise ConfigError(f"the split {split!r} of {data_dir} has {classes} classes but num_classes is {num_classes}")
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
    reader = images.reader  # timm's reader of tar files has a name of its own for them
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
                file, target = self._open(i)
                with file:
                    return read_image(file), target
            except Exception as error:  # decoders raise all kinds
                name, last = self.dataset.reader.filename(i), error
                self.unreadable.add(i, name, error)
        if self.is_training:
            raise UnreadableSplitError(
                f"no image of the training split can be read: of {len(list(self._offsets()))}, the last is {name!r} "
                f"({last!r})"
            )
        return Image.new("RGB", (256, 256)), UNREADABLE

    def _offsets(self) -> Iterable[int]:
        """To an image, and in training to those that may take its place: some hundred, however many there are."""
        if not self.is_training:
            return (0,)
        count = len(self)
        return chain(range(min(NEAR, count)), range(NEAR, count, max(1, count // 100)))

    def _open(self, index: int) -> tuple[BinaryIO, int]:
        reader = self.dataset.reader
        if isinstance(reader, ReaderImageFolder) and not stat.S_ISREG(os.stat(reader.samples[index][0]).st_mode):
            raise UnfitImageError("not a regular file")  # a pipe, for one, would have us wait
        return reader[index]


class EncodedReader(ImageReader):
    """For training as `ImageReader`, but what a device can decode comes as an `EncodedImage`."""

    def __init__(self, dataset, transform, draw: DrawingTransform):
        super().__init__(dataset, transform, is_training=True)
        self.draw = draw

    def __getitem__(self, key: tuple[int, int]):
        index, seed = key
        try:
            file, target = self._open(index)
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
        """The image as timm's transform augments it on the CPU: the same draws, the same care for broken files."""
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


class _NoneYet:
    """Batch sampler: `batches`, but none of them before `ready`."""

    def __init__(self, batches: TrainingBatches | EvaluationBatches):
        self.batches, self.ready = batches, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.batches if self.ready else ())


def training_loader(dataset, config: Config, data_config: dict, device: torch.device, batches: TrainingBatches):
    """Augmented images (B, 3, H, W), normalised on `device`, and targets (B,), in micro-batches."""
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
    draw = DrawingTransform(transform) if config.augment_on_device else None
    return _create_loader(dataset, transform, data_config, device, config.workers, batches, batches.micro_batch, draw)


def evaluation_loader(
    dataset, data_config: dict, device: torch.device, workers: int, batch_size: int, rank: int, world_size: int
):
    """Resized and cropped images (B, 3, H, W), normalised on `device`, and targets (B,): this process's share."""
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
    return _create_loader(dataset, transform, data_config, device, workers, batches, batch_size)


def _create_loader(dataset, transform, data_config, device, workers, batches, batch_size, draw=None):
    is_training = isinstance(batches, TrainingBatches)
    if isinstance(dataset, SyntheticImages):
        return SyntheticLoader(dataset, batches, batch_size, data_config["input_size"], device)
    if draw and isinstance(dataset, IterableImageDataset):
        raise ConfigError("augment_on_device reads images by their index, which a dataset that streams does not have")
    if isinstance(dataset, IterableImageDataset):  # it streams, in an order of its own
        dataset.transform = transform
        dataset.set_loader_cfg(num_workers=workers)
        order = dict(batch_size=batch_size, drop_last=is_training)
    else:
        dataset = EncodedReader(dataset, transform, draw) if draw else ImageReader(dataset, transform, is_training)
        order = dict(batch_sampler=_NoneYet(batches))
    loader = DataLoader(
        dataset,
        num_workers=workers,
        collate_fn=partial(collate_encoded, size=draw.size) if draw else fast_collate,
        pin_memory=device.type == "cuda" and not draw,  # files' bytes go to the decoder, not to the device
        persistent_workers=workers > 0,
        timeout=STALLED if workers else 0,
        worker_init_fn=_start_worker,
        **order,
    )
    if "batch_sampler" in order:
        # A thread of PyTorch's that enters Python, as DDP's do, holds a lock, which Python below 3.12 takes into a fork
        # and then waits for: so the workers start here, before there are such threads.
        if workers:
            # blocked here already: threads that PyTorch starts in a worker before its `worker_init_fn` inherit it
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*SCHEDULERS_SIGNALS, signal.SIGINT))
            try:
                iter(loader)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        loader.batch_sampler.ready = True
    if draw:
        return DeviceLoader(loader, draw, data_config, device)
    return Prefetcher(loader, mean=data_config["mean"], std=data_config["std"], device=device)


class Prefetcher(PrefetchLoader):
    """timm's, which before 1.0.31 fails where there is no batch: when an epoch is resumed behind its last step, say."""

    def __iter__(self):
        return super().__iter__() if len(self.loader) else iter(())


def _start_worker(worker: int) -> None:
    restrict_pillow()
    _heed_the_parent_alone()


def _heed_the_parent_alone() -> None:
    """A scheduler may signal every process of a job: workers live until training has written its checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    parent = multiprocessing.parent_process().pid

    def wait() -> None:
        while True:
            notice = signal.sigwaitinfo(SCHEDULERS_SIGNALS)
            if notice.si_signo == signal.SIGTERM and notice.si_pid == parent:
                os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULERS_SIGNALS)
    threading.Thread(target=wait, daemon=True).start()


def unreadable_images(loader) -> int:
    """How often a loader's images could not be read since this was last asked."""
    unreadable = getattr(loader.dataset, "unreadable", None)  # noise has none, nor what others decode
    return unreadable.take() if unreadable else 0


class BatchAugmentation:
    """What is done to a batch on the device: random erasing, then mixup or cutmix with label smoothing (timm's)."""

    def __init__(self, config: Config, num_classes: int, device: torch.device):
        self.seed = config.seed
        self.erase = RandomErasing(config.reprob, mode=config.remode, device=device) if config.reprob > 0 else None
        self.mix = None
        if config.mixing:
            self.mix = GroupMixup(
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                prob=config.mixup_prob,
                switch_prob=config.mixup_switch_prob,
                label_smoothing=config.smoothing,
                num_classes=num_classes,
            )

    def __call__(self, images: Tensor, targets: Tensor, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        """Changes `images` in place. `position` is the first image's in the epoch. Targets become soft if mixed."""
        draws = []
        for start in range(0, len(images), MIXUP_GROUP):
            group = images[start : start + MIXUP_GROUP]
            seed_everything(derive_seed(self.seed, epoch, position + start, 1))
            if self.erase:
                self.erase(group)
            if self.mix:
                draws.append(self.mix.draw(group.shape))
        return self.mix(images, targets, draws) if self.mix else (images, targets)


class GroupMixup(Mixup):
    """timm's mixup, in which each `MIXUP_GROUP` images have a draw of their own and are mixed among themselves.

    The groups are drawn one after the other and mixed all at once: launching each by itself would take longer than
    what is launched.
    """

    def draw(self, shape: torch.Size) -> tuple[float, ...]:
        """Top, bottom, left and right of a box, the share that an image keeps inside it, and in its target."""
        share, use_cutmix = self._params_per_batch()
        if not use_cutmix or share == 1:
            return 0, shape[-2], 0, shape[-1], share, share
        box, share = cutmix_bbox_and_lam(shape, share, self.cutmix_minmax, self.correct_lam)
        return *box, 0, share

    def __call__(self, images: Tensor, targets: Tensor, draws: list[tuple[float, ...]]) -> tuple[Tensor, Tensor]:
        device = images.device
        partners = torch.cat([group.flip(0) for group in torch.arange(len(images)).split(MIXUP_GROUP)])
        partners = partners.to(device, non_blocking=True)
        of_groups = torch.tensor(draws, dtype=torch.float32)
        of_images = of_groups.repeat_interleave(MIXUP_GROUP, dim=0)[: len(images)].to(device, non_blocking=True)
        top, bottom, left, right, share, target_share = of_images[:, :, None, None, None].unbind(1)
        y = torch.arange(images.shape[-2], device=device)[:, None]
        x = torch.arange(images.shape[-1], device=device)
        inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
        kept = torch.where(inside, share, 1)
        others = images[partners].mul_(1 - kept)
        soft = mixup_target(targets, self.num_classes, smoothing=self.label_smoothing)
        target_share = target_share[:, :, 0, 0]
        return images.mul_(kept).add_(others), soft * target_share + soft[partners] * (1 - target_share)
