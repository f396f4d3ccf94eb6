"""Loaders of a split for training and evaluation: timm's transforms, in loader processes or on the model's device."""

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
from ..processes import warn
from .decoder import SECONDS
from .device_loader import PIXELS_TOGETHER, DeviceLoader, decoder_is_missing
from .draws import DrawingTransform
from .encoded import collate_encoded, is_small
from .host_loader import HostLoader
from .images import UnreadableSplitError
from .kept import KeptImages
from .readers import EncodedReader, ImageReader, has_jpegs, typical_bytes, typical_pixels
from .samplers import EvaluationBatches, Pieces, TrainingBatches
from .splits import streams
from .synthetic import SyntheticImages, SyntheticLoader
from .workers import PIECE, choose_settings, into_shared_memory, prepare_worker, start_workers

STALLED = 2 * PIECE * SECONDS  # without a batch, after which a loader's workers are taken to hang


def training_loader(dataset, config: Config, data_config: dict, device: torch.device, batches: TrainingBatches):
    """Augmented images (B, 3, H, W) uint8 and targets (B,) on `device`, in micro-batches."""
    transform = training_transform(config, data_config)
    place = data_config, device, config.workers, config.augment_on_device
    return _create_loader(dataset, transform, *place, batches, batches.micro_batch, again=True)


def training_transform(config: Config, data_config: dict[str, Any]):
    """From Pillow's image to a tensor (3, H, W) of uint8, augmented; what is left to do happens on the device."""
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
    """Resized and cropped images (B, 3, H, W) uint8 and targets (B,) on `device`: this process's share.

    `again` says whether there will be more than one pass over them.
    """
    batches = EvaluationBatches(len(dataset), batch_size, rank, world_size)
    place = data_config, device, workers, augment_on_device
    return _create_loader(dataset, evaluation_transform(data_config), *place, batches, batch_size, again)


def evaluation_transform(data_config: dict[str, Any]):
    """From Pillow's image to a tensor (3, H, W) of uint8, resized and cropped."""
    names = "crop_pct", "crop_mode", "interpolation", "mean"
    options = {name: data_config[name] for name in names}
    return create_transform(data_config["input_size"], use_prefetcher=True, **options)


def micro_batches(loader, batches: TrainingBatches, epoch: int, first_step: int):
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


def describe(loader) -> str:
    """How a loader loads, in a few words, for the log of a run."""
    return str(loader.settings) if hasattr(loader, "settings") else "noise, made on the device"


def unreadable_images(loader) -> int:
    """How often a loader's images could not be read since this was last asked."""
    unreadable = getattr(loader.dataset, "unreadable", None)  # noise has none, nor what others decode
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
    piece_bytes = in_a_piece * (int(4.5 * pixels) if small else image_bytes)  # half as much again
    settings = choose_settings(workers, device, together * batch_size, pieces, piece_bytes, bool(draw), small)
    if streaming:
        dataset.transform = transform
        dataset.set_loader_cfg(num_workers=max(1, settings.workers))  # or timm 1.0.30 takes it for empty
        dataset.reader.batch_size = batch_size  # of which the reader gives each worker whole ones in training
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
        pin_memory=device.type == "cuda" and not draw,  # files' bytes go to the decoder, not to the device
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
    repeats = is_training and batches.repeats > 1  # so that it would take epochs to meet all images
    ahead = 3 * pixels if repeats and pixels < math.inf else None
    return DeviceLoader(*place, together=together, threaded=not small, transform=draw, kept=kept, typical_bytes=ahead)


def _collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, targets = fast_collate(samples)
    into_shared_memory(images, targets)
    return images, targets


def _drawing_transform(dataset, transform, device: torch.device, wanted: bool | None) -> DrawingTransform | None:
    """The transform that draws for images which the device decodes and transforms; None if the workers are to do it.

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
    """Training and evaluation have the same reasons."""
    warn(__name__, "%s", message)
