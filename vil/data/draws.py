"""Random draws of timm's transforms for an image, without its pixels: the crop, the flip, the operations of a policy.

timm's own transform draws, from the same seeds, so that an image which a device transforms is augmented as
`timm.data.create_transform` would augment it on the CPU, draw for draw.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from PIL import Image
from timm.data.auto_augment import AutoAugment, RandAugment
from timm.data.transforms import MaybePILToTensor, RandomResizedCropAndInterpolation, ResizeKeepRatio
from torchvision.transforms import CenterCrop, ColorJitter, Compose, RandomHorizontalFlip, Resize

from ..config import ConfigError
from .batched_transforms import CODES, GEOMETRIC


@dataclass
class Draws:
    """The way of one image: a box is cut out and resized, and a window of that is taken, mirrored or not."""

    box: tuple[int, int, int, int]  # top, left, height, width
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
                self.size = step.size
            for operation in _operations(step):
                operation.aug_fn = _recorder(operation.name)
                self.fill = operation.kwargs["fillcolor"]
        (self.interpolation,) = interpolations
        _check(self.interpolation, ("bilinear", "bicubic"), "interpolation")

    def __call__(self, image: Image.Image) -> Draws:
        """The image's size matters, and nothing else of it."""
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
    """A stand-in for timm's function of an operation: it notes the call in the place of the image."""
    if name == "Desaturate":
        return lambda operations, factor, **_: [*operations, ("Color", (1.0 - factor,))]
    if name == "GaussianBlurRand":
        return lambda operations, factor, **_: [*operations, ("GaussianBlur", (random.uniform(0.1, 2.0 * factor),))]
    name = name.removesuffix("Increasing").removesuffix("Original")  # that is in the argument
    _check(name, (*CODES, *GEOMETRIC), "operation of aa")
    return partial(_record, name)


def _record(name: str, operations: list, *arguments: float, **_) -> list:
    return [*operations, (name, arguments)]
