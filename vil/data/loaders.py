"""Loaders of a split for training and evaluation, with timm's transforms in workers or on the model's device."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from timm.data import create_transform
from timm.data.loader import fast_collate
from torch import Tensor
from torch.utils.data import DataLoader

from ..config import Config, ConfigError
from ..distributed import warn_on_rank0
from ..security.image_decoding import SECONDS
from .device.cache import KeptImages
from .device.encoded import collate_encoded, is_small
from .device.loader import PIXELS_TOGETHER, DeviceLoader, decoder_is_missing
from .device.transform_parameters import DrawingTransform
from .host.loader import HostLoader
from .host.workers import PIECE, choose_settings, into_shared_memory, prepare_worker, start_workers
from .samplers import EvaluationBatches, Pieces, TrainingBatches
from .sources.images import UnreadableSplitError
from .sources.readers import EncodedReader, ImageReader, has_jpegs, typical_bytes, typical_pixels
from .sources.splits import streams
from .sources.synthetic import SyntheticImages, SyntheticLoader

STALLED = 2 * PIECE * SECONDS  # seconds without a batch after which the workers are assumed to hang


def training_loader(dataset, config: Config, data_config: dict, device: torch.device, batches: TrainingBatches):
    """Return a loader of augmented images (B, 3, H, W) uint8 and targets (B,) on `device`, in micro-batches."""
    transform = training_transform(config, data_config)
    place = data_config, device, config.workers, config.augment_on_device
    return _create_loader(dataset, transform, *place, batches, batches.micro_batch, again=True)


def training_transform(config: Config, data_config: dict[str, Any]):
    """Return the transform from a Pillow image to an augmented tensor (3, H, W) uint8; normalization follows on the
    device.
    """
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
    data_config: dict,
    device: torch.device,
    workers: int | None,
    batch_size: int,
    rank: int,
    world_size: int,
    augment_on_device: bool | None = None,
    again: bool = False,
):
    """Return a loader of resized and cropped images (B, 3, H, W) uint8 and targets (B,) on `device`, for this rank's
    share.

    `again` says whether the loader will be used for more than one pass.
    """
    batches = EvaluationBatches(len(dataset), batch_size, rank, world_size)
    place = data_config, device, workers, augment_on_device
    return _create_loader(dataset, evaluation_transform(data_config), *place, batches, batch_size, again)


def evaluation_transform(data_config: dict[str, Any]):
    """Return the transform from a Pillow image to a resized and cropped tensor (3, H, W) uint8."""
    names = "crop_pct", "crop_mode", "interpolation", "mean"
    options = {name: data_config[name] for name in names}
    return create_transform(data_config["input_size"], use_prefetcher=True, **options)


def micro_batches(loader, batches: TrainingBatches, epoch: int, first_step: int):
    """Iterate over a training loader's ((images, targets), position of the first image) from a step of an epoch on."""
    batches.set_epoch(epoch, first_step)
    # an iterable dataset shuffles itself: batches before the first step are read again and dropped
    if hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)
        loader = _not_empty(islice(loader, first_step * batches.accumulation, None), len(batches))
    return zip(loader, batches.first_positions())


def _not_empty(stream: Iterable, expected: int) -> Iterator:
    batch = None
    for batch in stream:
        yield batch
    if expected and batch is None:
        raise UnreadableSplitError("no image of the training split can be read")


def describe(loader) -> str:
    """Describe briefly how a loader loads, for the log of a run."""
    return str(loader.settings) if hasattr(loader, "settings") else "noise, made on the device"


def unreadable_images(loader) -> int:
    """Return how many images of a loader could not be read since the last call."""
    unreadable = getattr(loader.dataset, "unreadable", None)  # synthetic data and other decoders have no count
    return unreadable.take() if unreadable else 0


def _create_loader(dataset, transform, data_config, device, workers, augment_on_device, batches, batch_size, again):
    is_training = isinstance(batches, TrainingBatches)
    if isinstance(dataset, SyntheticImages):
        return SyntheticLoader(dataset, batches, batch_size, data_config["input_size"], device)
    draw = _drawing_transform(dataset, transform, device, augment_on_device)
    kept = KeptImages(len(dataset), device, room=None if again else 0)
    pieces = math.ceil(batch_size / PIECE) * len(batches)
    image_bytes = typical_bytes(dataset) if draw else math.prod(data_config["input_size"])
    pixels = typical_pixels(dataset) if draw else math.inf
    small = is_small(pixels)
    streaming = streams(dataset)
    together = max(1, int(PIXELS_TOGETHER // (batch_size * pixels))) if small else 1
    in_a_piece = batch_size if streaming else min(batch_size, PIECE)
    piece_bytes = in_a_piece * (int(4.5 * pixels) if small else image_bytes)  # 1.5 times the typical size
    settings = choose_settings(workers, device, together * batch_size, pieces, piece_bytes, bool(draw), small)
    if streaming:
        dataset.transform = transform
        # otherwise timm 1.0.30 treats the dataset as empty
        dataset.set_loader_cfg(num_workers=max(1, settings.workers))
        dataset.reader.batch_size = batch_size  # in training, the reader gives whole batches to each worker
        order = dict(batch_size=batch_size)
    else:
        arguments = dataset, transform, is_training
        dataset = EncodedReader(*arguments, draw) if draw else ImageReader(*arguments)
        order = dict(batch_sampler=Pieces(batches, kept.key))
    loader = DataLoader(
        dataset,
        num_workers=settings.workers,
        prefetch_factor=settings.prefetch,
        collate_fn=partial(collate_encoded, size=draw.size) if draw else _collate,
        pin_memory=device.type == "cuda" and not draw,  # file contents go to the decoder, not to the device
        persistent_workers=settings.workers > 0,
        timeout=STALLED if settings.workers else 0,
        worker_init_fn=prepare_worker,
        **order,
    )
    if not streaming:
        start_workers(loader)
        loader.batch_sampler.ready = True
    place = loader, None if streaming else batches, device, settings
    if not draw:
        return HostLoader(*place)
    repeats = is_training and batches.repeats > 1  # repeats mean that one epoch does not see all images
    ahead = 3 * pixels if repeats and pixels < math.inf else None
    return DeviceLoader(*place, together=together, threaded=not small, transform=draw, kept=kept, typical_bytes=ahead)


def _collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, targets = fast_collate(samples)
    into_shared_memory(images, targets)
    return images, targets


def _drawing_transform(dataset, transform, device: torch.device, wanted: bool | None) -> DrawingTransform | None:
    """Return the transform that samples parameters for decoding and augmentation on the device; None to use the
    workers.

    Args:
        wanted: True uses any device, False uses the workers, None uses a GPU that supports it, with one log line if it
            does not.

    Raises:
        ConfigError: The device is requested but does not support it.
    """
    if wanted is False or (wanted is None and device.type != "cuda"):
        return None
    draw = None
    try:
        draw = DrawingTransform(transform)
        reason = decoder_is_missing(device)
    except ConfigError as error:
        reason = str(error)
    if streams(dataset):
        reason = "a dataset that streams has no images by index"
    if wanted and reason:
        raise ConfigError(f"augment_on_device: {reason}")
    if not reason and not wanted and not has_jpegs(dataset) and not is_small(typical_pixels(dataset)):
        reason = "most files are no JPEGs"
    if reason:
        _say_once(f"the workers decode and augment images, not the GPU: {reason}")
        return None
    return draw


@functools.cache
def _say_once(message: str) -> None:
    """Log a message once, because training and evaluation have the same reasons."""
    warn_on_rank0(__name__, "%s", message)
