"""Sampling of the random parameters of timm's transforms: crop, flip and augmentation operations.

timm's own transforms sample with the same seeds. Therefore the transform of an image on the device has exactly the
parameters that timm's transform (`timm.data.create_transform`) would sample on the CPU.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from PIL import Image
from timm.data.auto_augment import AutoAugment, RandAugment
from timm.data.transforms import MaybePILToTensor, RandomResizedCropAndInterpolation, ResizeKeepRatio
from torchvision.transforms import CenterCrop, ColorJitter, Compose, RandomHorizontalFlip, Resize

from ...config import ConfigError
from .batched_transforms import CODES, GEOMETRIC

Operation: TypeAlias = tuple[str, tuple[float, ...]]  # name and arguments of an augmentation operation


@dataclass
class TransformParameters:
    """Sampled transform of an image: crop, resized size, output window, flip and augmentation operations."""

    box: tuple[int, int, int, int]  # top, left, height and width of the crop
    resized: tuple[int, int] = (0, 0)  # height and width of the resized crop
    offset: tuple[int, int] = (0, 0)  # top and left of the output in the resized crop; negative if the output is larger
    flip: bool = False
    operations: list[Operation] = field(default_factory=list)


class TransformSampler:
    """Sampler of a timm transform's random parameters, which does not read an image's pixels.

    Args:
        transform: timm's transform, whose steps the sampler copies.

    Attributes:
        size: Height and width of a transformed image.
        interpolation: 'bilinear' or 'bicubic'.
        fill: Colour of pixels that an operation reads outside the image.

    Raises:
        ConfigError: The transform contains an unsupported step, operation or interpolation.
    """

    def __init__(self, transform: Compose):
        self.steps = [copy.deepcopy(step) for step in transform.transforms if not isinstance(step, MaybePILToTensor)]
        self.fill = (0, 0, 0)
        interpolations = set()
        for step in self.steps:
            _check_supported(type(step).__name__, [known.__name__ for known in _SAMPLE], "transform")
            if hasattr(step, "interpolation"):
                interpolations.add(getattr(step.interpolation, "value", "random"))
            if isinstance(step, (RandomResizedCropAndInterpolation, CenterCrop)):
                self.size = step.size
            for operation in _operations(step):
                operation.aug_fn = _recorder(operation.name)
                self.fill = operation.kwargs["fillcolor"]

        (self.interpolation,) = interpolations
        _check_supported(self.interpolation, ("bilinear", "bicubic"), "interpolation")

    def __call__(self, image: Image.Image) -> TransformParameters:
        """Sample the transform of an image. Only the image's size is used."""
        parameters = TransformParameters(box=(0, 0, image.height, image.width))
        for step in self.steps:
            _SAMPLE[type(step)](step, image, parameters)
        return parameters


def _check_supported(name: str, known: Sequence[str], what: str) -> None:
    """Raise a ConfigError if the device does not support a part of the transform."""
    if name not in known:
        raise ConfigError(
            f"{what} must be one of {', '.join(known)} for augmentation on the device, got {name!r}: set "
            "--no-augment-on-device"
        )


def _operations(step) -> list:
    """Return the `AugmentOp`s of timm's AutoAugment or RandAugment."""
    if isinstance(step, AutoAugment):
        return [operation for operations in step.policy for operation in operations]
    if isinstance(step, RandAugment):
        return step.ops
    return []


def _sample_random_crop(
    step: RandomResizedCropAndInterpolation, image: Image.Image, parameters: TransformParameters
) -> None:
    parameters.box = step.get_params(image, step.scale, step.ratio)
    parameters.resized = step.size


def _sample_resize(step: Resize, image: Image.Image, parameters: TransformParameters) -> None:
    if isinstance(step.size, int):  # an int size is the length of the shorter side
        height, width = image.height, image.width
        longer_side = int(step.size * max(height, width) / min(height, width))
        parameters.resized = (step.size, longer_side) if height <= width else (longer_side, step.size)
    else:
        parameters.resized = step.size


def _sample_resize_keeping_ratio(step: ResizeKeepRatio, image: Image.Image, parameters: TransformParameters) -> None:
    parameters.resized = step.get_params(
        image, step.size, step.longest, step.random_scale_prob, step.random_scale_range, step.random_scale_area,
        step.random_aspect_prob, step.random_aspect_range,
    )  # fmt: skip


def _sample_centre_crop(step: CenterCrop, image: Image.Image, parameters: TransformParameters) -> None:
    """Compute the centre crop's offset as torchvision: round half to even inside an image, and round padding down."""
    parameters.offset = tuple(
        round((length - size) / 2) if length >= size else -((size - length) // 2)
        for length, size in zip(parameters.resized, step.size)
    )


def _sample_flip(step: RandomHorizontalFlip, image: Image.Image, parameters: TransformParameters) -> None:
    parameters.flip = bool(torch.rand(1) < step.p)


def _sample_policy(step: RandAugment | AutoAugment, image: Image.Image, parameters: TransformParameters) -> None:
    # `_recorder` has replaced the functions of the operations, so `step` returns a list of the sampled operations
    parameters.operations += step([])


def _sample_jitter(step: ColorJitter, image: Image.Image, parameters: TransformParameters) -> None:
    order, brightness, contrast, saturation, _ = step.get_params(
        step.brightness, step.contrast, step.saturation, step.hue
    )
    factors = [("Brightness", brightness), ("Contrast", contrast), ("Color", saturation)]
    for i in order:
        if i == len(factors):  # timm's color jitter does not change the hue by default
            continue
        name, factor = factors[i]
        if factor is not None:
            parameters.operations.append((name, (factor,)))


_SAMPLE = {
    RandomResizedCropAndInterpolation: _sample_random_crop,
    Resize: _sample_resize,
    ResizeKeepRatio: _sample_resize_keeping_ratio,
    CenterCrop: _sample_centre_crop,
    RandomHorizontalFlip: _sample_flip,
    RandAugment: _sample_policy,
    AutoAugment: _sample_policy,
    ColorJitter: _sample_jitter,
}


def _recorder(name: str):
    """Return a function that records a timm operation and its argument instead of changing an image.

    The function receives a list of operations instead of an image, and returns the list with this operation added.
    """
    if name == "Desaturate":
        return lambda operations, factor, **_: [*operations, ("Color", (1.0 - factor,))]
    if name == "GaussianBlurRand":
        return lambda operations, factor, **_: [*operations, ("GaussianBlur", (random.uniform(0.1, 2.0 * factor),))]
    # the suffixes of timm's operation names only select the formula of an argument that timm has computed already
    name = name.removesuffix("Increasing").removesuffix("Original")
    _check_supported(name, (*CODES, *GEOMETRIC), "operation of aa")
    return partial(_record, name)


def _record(name: str, operations: list[Operation], *arguments: float, **_) -> list[Operation]:
    return [*operations, (name, arguments)]
