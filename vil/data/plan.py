"""Plan of loading a split: who decodes and augments its images, how far ahead, and what stays on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import ConfigError
from .device.decoding import decoder_is_missing
from .device.encoded import is_small
from .device.transform_parameters import TransformSampler
from .host.workers import BATCHES_AHEAD, MOST_READERS, MOST_WORKERS, PIECE, choose_workers
from .samplers import EvaluationBatches, TrainingBatches
from .sources.readers import has_jpegs, typical_file_bytes, typical_pixels
from .sources.splits import streams

# pixels of small-image batches prepared at a time, because launching kernels takes longer than running them
PIXELS_TOGETHER = 2**20
MARGIN = 1.5  # shared memory of an image in units of the typical size


@dataclass(frozen=True)
class LoadingOptions:
    """What a run requests of a loader.

    Args:
        device: Device of the batches.
        workers: Number of workers; None chooses it.
        augment_on_device: Whether the device decodes and augments; None uses a GPU that supports it.
        is_reused: Whether the loader will be used for more than one pass.
    """

    device: torch.device
    workers: int | None = None
    augment_on_device: bool | None = None
    is_reused: bool = True


@dataclass(frozen=True)
class LoadingPlan:
    """How a split's images are loaded. The text of a plan is the line that a run prints."""

    device: torch.device
    batch_size: int
    piece_size: int  # images that a worker loads at a time
    piece_bytes: int  # shared memory of a piece
    workers: int
    prefetch: int | None  # pieces that each worker prefetches; None without workers
    sampler: TransformSampler | None  # samples transforms that run on the device; None if the workers augment
    decodes_in_workers: bool
    batches_together: int  # batches that the device decodes and augments at a time
    keeps_decoded: bool  # whether decoded images may stay on the device
    fill_bytes: float | None  # typical bytes of a decoded image if the cache is filled before the first batch
    obstacle: str | None  # why a GPU does not decode and augment

    @property
    def in_thread(self) -> bool:
        """Whether a thread prepares batches on the device.

        A thread can wait for a decoder. For small images, whose kernels take longer to launch than to run, a thread
        would only compete with the caller for the GIL.
        """
        return not self.decodes_in_workers

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
        options: Requests of the run.

    Raises:
        ConfigError: The device is requested but does not support the images, or shared memory is too small.
    """
    is_stream = streams(dataset)
    sampler, obstacle = _device_sampler(dataset, transform, options)
    on_device = sampler is not None

    pixels = typical_pixels(dataset) if on_device else math.inf
    small = is_small(pixels)
    if small:
        image_bytes = int(3 * MARGIN * pixels)
    elif on_device:
        image_bytes = int(MARGIN * typical_file_bytes(dataset))
    else:
        image_bytes = math.prod(image_shape)

    batch_size = batches.batch_size
    together = max(1, int(PIXELS_TOGETHER // (batch_size * pixels))) if small else 1
    piece_size = batch_size if is_stream else min(batch_size, PIECE)
    piece_bytes = piece_size * image_bytes
    pieces_ahead = BATCHES_AHEAD * math.ceil(together * batch_size / PIECE)
    workers, prefetch = choose_workers(
        options.workers,
        options.device,
        most=MOST_READERS if on_device and not small else MOST_WORKERS,
        pieces=math.ceil(batch_size / PIECE) * len(batches),
        ahead=pieces_ahead,
        # encoded files stay in shared memory until the device has read them
        in_use=pieces_ahead if on_device else 2,
        piece_size=piece_size,
        piece_bytes=piece_bytes,
    )
    # with repeated augmentation, one epoch does not see all images
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
    """Return the sampler of transforms that run on the device, or None and the obstacle that a log line names.

    Raises:
        ConfigError: The device is requested but does not support the images.
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
        obstacle = "a dataset that streams has no images by index"
    if obstacle and requested:
        raise ConfigError(f"augment_on_device: {obstacle}")

    if not obstacle and not requested and not has_jpegs(dataset) and not is_small(typical_pixels(dataset)):
        obstacle = "most files are no JPEGs"
    return (None, obstacle) if obstacle else (sampler, None)
