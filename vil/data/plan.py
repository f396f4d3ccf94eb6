"""Loading plan of a split: where images are decoded and augmented, how much is prefetched, and what is cached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import ConfigError
from .device.decoding import decoder_is_missing
from .device.encoded import is_small
from .device.transform_parameters import TransformSampler
from .host.workers import BATCHES_AHEAD, PIECE, choose_workers, default_workers
from .samplers import EvaluationBatches, TrainingBatches
from .sources.readers import has_jpegs, typical_pixels
from .sources.splits import streams

# target number of pixels per augmentation step on the device; with fewer pixels, launch overhead dominates
PIXELS_TOGETHER = 2**20


@dataclass(frozen=True)
class LoadingOptions:
    """Options of a run for loading images.

    Args:
        device: Device of the batches.
        workers: Number of workers, or None to choose the number automatically.
        augment_on_device: Whether the device decodes and augments images. None uses a GPU if possible.
        is_reused: Whether the loader will be used for more than one pass.
    """

    device: torch.device
    workers: int | None = None
    augment_on_device: bool | None = None
    is_reused: bool = True


@dataclass(frozen=True)
class LoadingPlan:
    """Plan for loading the images of a split. `str(plan)` is the line that a run prints."""

    device: torch.device
    batch_size: int
    piece_size: int  # maximum number of images in a sub-batch that one worker loads (a piece of a batch)
    piece_bytes: int | None  # bytes of /dev/shm per piece of a batch; None if the workers send pieces without /dev/shm
    workers: int
    prefetch: int | None  # number of pieces of a batch that each worker prefetches; None without workers
    sampler: TransformSampler | None  # sampler of the device's transforms; None if the workers augment
    decodes_in_workers: bool
    batches_together: int  # number of batches that the device decodes and augments at a time
    keeps_decoded: bool  # whether decoded images may be cached on the device
    # typical bytes of a decoded image if the cache is filled before the first batch, otherwise None
    fill_bytes: float | None
    obstacle: str | None  # reason why the GPU cannot decode and augment images, or None

    @property
    def in_thread(self) -> bool:
        """Whether a separate thread decodes and augments batches on the device.

        The thread waits for the decoder, so that the caller can continue. If workers decode small images, no thread is
        used, because the thread would compete with the caller for the GIL.
        """
        return not self.decodes_in_workers

    @property
    def remedy(self) -> str:
        """Suggestion for a log message if the device waits for the workers."""
        most = default_workers(self.device)
        if self.workers < most:
            return f"--workers {most}"
        jpegs = "baseline JPEGs (decoded on the GPU), " if self.sampler is None else ""
        return f"{jpegs}more CPU cores, a faster disk or, only for a slow disk, --workers {2 * self.workers}"

    def __str__(self) -> str:
        who = f"{self.workers} worker{'s' * (self.workers != 1)}" if self.workers else "no workers"
        host = "in the workers" if self.workers else "in the training process"
        if self.sampler is None:
            return f"{who}, decoding and augmenting {host}"
        if self.decodes_in_workers:
            return f"{who}, decoding {host} and augmenting on the device"
        return f"{who}, decoding and augmenting on the device"


def plan_loading(
    dataset,
    transform,
    batches: TrainingBatches | EvaluationBatches,
    image_shape: Sequence[int],
    options: LoadingOptions,
) -> LoadingPlan:
    """Plan how to load a split.

    Args:
        dataset: timm's dataset of the split.
        transform: timm's transform of an image.
        batches: Batch sampler.
        image_shape: Shape (3, H, W) of a transformed image.
        options: Options of the run for loading images.

    Raises:
        ConfigError: `augment_on_device` is True but the device does not support the images, or shared memory is too
            small.
    """
    is_stream = streams(dataset)
    sampler, obstacle = _device_sampler(dataset, transform, options)
    on_device = sampler is not None

    pixels = typical_pixels(dataset) if on_device else math.inf
    small = is_small(pixels)
    batch_size = batches.batch_size
    together = max(1, int(PIXELS_TOGETHER // (batch_size * pixels))) if small else 1
    piece_size = batch_size if is_stream else min(batch_size, PIECE)
    pieces_of_batch = math.ceil(batch_size / piece_size)
    piece_bytes = None if on_device else piece_size * math.prod(image_shape)
    workers, prefetch = choose_workers(
        options.workers,
        options.device,
        pieces=pieces_of_batch * len(batches),
        ahead=BATCHES_AHEAD * together * pieces_of_batch,
        piece_size=piece_size,
        piece_bytes=piece_bytes,
    )
    # with repeated augmentation, one epoch does not contain all images, so the cache is filled before the first batch
    fills_cache = on_device and batches.repeats > 1 and math.isfinite(pixels)
    return LoadingPlan(
        device=options.device,
        batch_size=batch_size,
        piece_size=piece_size,
        piece_bytes=piece_bytes,
        workers=workers,
        prefetch=prefetch,
        sampler=sampler,
        decodes_in_workers=not on_device or small,
        batches_together=together,
        keeps_decoded=options.is_reused,
        fill_bytes=3 * pixels if fills_cache else None,
        obstacle=obstacle,
    )


def _device_sampler(dataset, transform, options: LoadingOptions) -> tuple[TransformSampler | None, str | None]:
    """Return the sampler of transforms for the device, or None and the reason, if any, why the device cannot be used.

    Raises:
        ConfigError: `augment_on_device` is True but the device does not support the images.
    """
    requested, device = options.augment_on_device, options.device
    if requested is False or (requested is None and device.type != "cuda"):
        return None, None

    sampler, obstacle = None, None
    try:
        sampler = TransformSampler(transform)
    except ConfigError as error:
        obstacle = str(error)
    else:
        obstacle = decoder_is_missing(device)
    if streams(dataset):
        obstacle = "an iterable dataset has no access to images by index"
    if obstacle and requested:
        raise ConfigError(f"augment_on_device cannot be used: {obstacle}")

    if not obstacle and not requested and not has_jpegs(dataset) and not is_small(typical_pixels(dataset)):
        obstacle = "most files are not JPEGs"
    return (None, obstacle) if obstacle else (sampler, None)
