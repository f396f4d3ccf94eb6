"""Loaders of training and evaluation splits, which yield batches on the device.

Workers or the device decode and augment single images (see `plan`). The device then normalizes whole batches. In
training, random erasing and mixup or cutmix follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from timm.data import create_transform
from timm.data.loader import fast_collate
from torch import Tensor
from torch.utils.data import DataLoader

from ..config import Config
from ..distributed import warn_on_rank0
from ..security.sandbox_server import SECONDS
from .device.augmentation import BatchAugmentation
from .device.batched_transforms import finish
from .device.cache import DecodedCache
from .device.encoded import collate_encoded
from .device.loader import DeviceLoader
from .device.parameter_loader import ParameterLoader
from .device.reader import EncodedReader
from .device.synthetic import SyntheticLoader
from .host.channel import open_channel
from .host.loader import HostLoader, PieceLoader
from .host.reader import ImageReader
from .host.workers import PIECE, into_shared_memory, prepare_worker, start_workers
from .plan import LoadingOptions, LoadingPlan, plan_loading
from .samplers import EvaluationBatches, Pieces, TrainingBatches
from .sources.images import UnreadableSplitError
from .sources.splits import streams
from .sources.synthetic import SyntheticImages

STALLED = 2 * PIECE * SECONDS  # seconds; timeout for an item of a DataLoader, after which workers are assumed to hang


class Batch(NamedTuple):
    """Micro-batch of augmented images and targets."""

    images: Tensor  # (B, 3, H, W) float32, normalized, erased and mixed
    targets: Tensor  # (B,) class indices or, if images are mixed, (B, classes) soft targets
    position: int  # position of the batch's first image in the epoch


class TrainingLoader:
    """Loader of augmented micro-batches on the model's device, one epoch at a time.

    Args:
        images: Loader of augmented images (B, 3, H, W) uint8 and targets (B,).
        batches: Batch sampler of the loader.
        augment: Augmentation of a batch.
        parameters: Loader of the parameters of the augmentation.
    """

    def __init__(
        self,
        images: PieceLoader | SyntheticLoader,
        batches: TrainingBatches,
        augment: BatchAugmentation,
        parameters: ParameterLoader,
    ):
        self.images = images
        self.batches = batches
        self.augment = augment
        self.parameters = parameters

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Iterate over the micro-batches of an epoch, starting at `first_step`."""
        self.batches.set_epoch(epoch, first_step)
        batches = zip(self._uint8_batches(epoch), self.parameters.parameters(), self.batches.first_positions())
        for (images, targets), parameters, position in batches:
            yield Batch(*self.augment(images, targets, parameters), position)

    def _uint8_batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        dataset = self.images.dataset
        if not hasattr(dataset, "set_epoch"):
            yield from self.images
            return
        # an iterable dataset has no access by index, so a resumed epoch reads and drops batches before `first_step`
        dataset.set_epoch(epoch)
        batch = None
        for batch in islice(self.images, self.batches.first_step * self.batches.accumulation, None):
            yield batch
        if batch is None and len(self.batches):
            raise UnreadableSplitError("no image of the training split can be read")

    def take_unreadable(self) -> int:
        """Return how many images could not be read since the last call."""
        return _take_unreadable(self.images.dataset)


class EvaluationLoader:
    """Loader of normalized images (B, 3, H, W) float32 and targets (B,) on the model's device.

    Args:
        images: Loader of images (B, 3, H, W) uint8 and targets (B,).
        normalize: Normalization of a batch.
    """

    def __init__(self, images: PieceLoader | SyntheticLoader, normalize: Callable[[Tensor], Tensor]):
        self.images = images
        self.normalize = normalize

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, targets in self.images:
            yield self.normalize(images), targets

    def take_unreadable(self) -> int:
        """Return how many images could not be read since the last call."""
        return _take_unreadable(self.images.dataset)


def training_loader(
    dataset,
    config: Config,
    data_config: dict[str, Any],
    device: torch.device,
    batches: TrainingBatches,
    num_classes: int,
) -> TrainingLoader:
    """Return a loader of a training split.

    Args:
        dataset: timm's dataset of the split.
        config: Options of the run.
        data_config: timm's data config of the images.
        device: Device of the batches.
        batches: Batch sampler.
        num_classes: Number of classes, which is the length of a soft target.
    """
    options = LoadingOptions(device, config.workers, config.augment_on_device)
    images = _open_images(dataset, training_transform(config, data_config), batches, data_config["input_size"], options)
    augment = BatchAugmentation(config, num_classes, data_config)
    in_worker = isinstance(images, DeviceLoader) and images.plan.workers > 0 and augment.is_random
    parameters = ParameterLoader(augment, batches, data_config["input_size"][1:], in_worker)
    return TrainingLoader(images, batches, augment, parameters)


def training_transform(config: Config, data_config: dict[str, Any]):
    """Return the transform from a Pillow image to an augmented tensor (3, H, W) uint8."""
    options: dict[str, Any] = dict(
        scale=config.scale,
        ratio=config.ratio,
        hflip=config.hflip,
        color_jitter=config.color_jitter,
        auto_augment=config.aa,
        interpolation=config.train_interpolation,
        mean=data_config["mean"],
    )
    return create_transform(data_config["input_size"], is_training=True, use_prefetcher=True, **options)


def evaluation_loader(
    dataset,
    data_config: dict[str, Any],
    device: torch.device,
    workers: int | None,
    batch_size: int,
    rank: int,
    world_size: int,
    augment_on_device: bool | None = None,
    is_reused: bool = False,
) -> EvaluationLoader:
    """Return a loader of this rank's share of an evaluation split.

    Args:
        dataset: timm's dataset of the split.
        data_config: timm's data config of the images.
        device: Device of the batches.
        workers: Number of workers; None chooses the number automatically.
        batch_size: Images in a batch.
        rank: Rank of this process.
        world_size: Number of processes.
        augment_on_device: Whether the device decodes and resizes the images. None uses a GPU if possible.
        is_reused: Whether the loader will be used for more than one pass.
    """
    options = LoadingOptions(device, workers, augment_on_device, is_reused)
    batches = EvaluationBatches(len(dataset), batch_size, rank, world_size)
    images = _open_images(dataset, evaluation_transform(data_config), batches, data_config["input_size"], options)
    return EvaluationLoader(images, partial(finish, mean=data_config["mean"], std=data_config["std"]))


def evaluation_transform(data_config: dict[str, Any]):
    """Return the transform from a Pillow image to a resized and cropped tensor (3, H, W) uint8."""
    names = "crop_pct", "crop_mode", "interpolation", "mean"
    options = {name: data_config[name] for name in names}
    return create_transform(data_config["input_size"], use_prefetcher=True, **options)


def _open_images(
    dataset, transform, batches: TrainingBatches | EvaluationBatches, image_shape, options: LoadingOptions
) -> PieceLoader | SyntheticLoader:
    """Return a loader of uint8 batches of the split, augmented by the workers or the device as `plan_loading` chose."""
    if isinstance(dataset, SyntheticImages):
        return SyntheticLoader(dataset, batches, image_shape, options.device)
    plan = plan_loading(dataset, transform, batches, image_shape, options)
    if plan.obstacle:
        _say_once(f"images are decoded and augmented by the workers instead of the GPU: {plan.obstacle}")
    if streams(dataset):
        return _open_stream(dataset, transform, plan)
    if plan.sampler:
        return _open_on_device(dataset, transform, batches, plan)
    return _open_on_host(dataset, transform, batches, plan)


def _open_stream(dataset, transform, plan: LoadingPlan) -> HostLoader:
    """Return a loader of an iterable dataset. Each worker loads whole batches."""
    dataset.transform = transform
    # timm before 1.0.31 treats the dataset as empty if num_workers is 0
    dataset.set_loader_cfg(num_workers=max(1, plan.workers))
    # with `batch_size`, timm's reader gives each training worker only whole batches
    dataset.reader.batch_size = plan.batch_size
    loader = _piece_loader(dataset, plan, collate_fn=_collate, batch_size=plan.batch_size)
    return HostLoader(loader, None, plan)


def _open_on_host(dataset, transform, batches, plan: LoadingPlan) -> HostLoader:
    """Return a loader whose workers decode and augment images."""
    reader = ImageReader(dataset, transform, isinstance(batches, TrainingBatches))
    pieces = Pieces(batches, plan.piece_size)
    loader = _piece_loader(reader, plan, collate_fn=_collate, batch_sampler=pieces)
    return _started(HostLoader(loader, batches, plan), pieces)


def _open_on_device(dataset, transform, batches, plan: LoadingPlan) -> DeviceLoader:
    """Return a loader whose images are decoded and augmented on the device (see `DeviceLoader`)."""
    assert plan.sampler
    reader = EncodedReader(dataset, transform, isinstance(batches, TrainingBatches), plan.sampler)
    cache = DecodedCache(len(dataset), plan.device, room=None if plan.keeps_decoded else 0)
    pieces = Pieces(batches, plan.piece_size, cache.tasks)
    collate = partial(collate_encoded, size=plan.sampler.size, channel=open_channel() if plan.workers else None)
    loader = _piece_loader(reader, plan, collate_fn=collate, batch_sampler=pieces)
    return _started(DeviceLoader(loader, batches, plan, cache), pieces)


def _piece_loader(dataset, plan: LoadingPlan, **arguments) -> DataLoader:
    """Return a PyTorch DataLoader whose items are sub-batches (pieces), each loaded by one worker."""
    return DataLoader(
        dataset,
        num_workers=plan.workers,
        prefetch_factor=plan.prefetch,
        # PyTorch does not copy encoded files to the device, so pinned memory does not help
        pin_memory=plan.device.type == "cuda" and plan.sampler is None,
        persistent_workers=plan.workers > 0,
        timeout=STALLED if plan.workers else 0,
        worker_init_fn=prepare_worker,
        **arguments,
    )


def _started(loader, pieces: Pieces):
    """Start a loader's workers, which load nothing until the first pass over the loader.

    Workers must start before autograd creates threads (see `start_workers`).
    """
    start_workers(loader.loader)
    pieces.ready = True
    return loader


def _collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, targets = fast_collate(samples)
    into_shared_memory(images, targets)
    return images, targets


def _take_unreadable(dataset) -> int:
    # synthetic datasets do not count unreadable images
    unreadable = getattr(dataset, "unreadable", None)
    return unreadable.take() if unreadable else 0


@functools.cache
def _say_once(message: str) -> None:
    """Log a message only once, because training and evaluation loaders often log the same message."""
    warn_on_rank0(__name__, "%s", message)
