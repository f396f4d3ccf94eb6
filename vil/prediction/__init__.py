"""Prediction of the classes of images with a trained model, as names and probabilities."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from PIL import Image
from timm.data import get_img_extensions
from torch import nn

from ..config import ConfigError
from .classifier import Classifier, Prediction, predictions, reason_of
from .images import Picture
from .loading import classifier_of

__all__ = ["Classifier", "Prediction", "predict"]

_logger = logging.getLogger(__name__)


def predict(
    model: nn.Module | str | os.PathLike, images: Picture | Iterable[Picture], topk: int = 5, *, batch_size: int = 32
) -> list[Prediction] | list[list[Prediction]]:
    """Return the most probable classes of an image in descending order, or one such list per image for several images.

    A model in training mode is in eval mode during the call, so several threads can share only a model in eval mode.

    Args:
        model: A timm model, which runs on its current device, or the path of a checkpoint: a file written by
            `vil train`, or a .safetensors file, .onnx file or folder written by vil.export.
        images: A file path, a Pillow image, or a NumPy array (H, W), (H, W, 3) or (H, W, 4) of uint8 or uint16. For
            several images, an iterable of paths, Pillow images or arrays.
        topk: Number of classes per image.
        batch_size: Number of images per forward pass of the model.

    Raises:
        ConfigError: The checkpoint does not store the model's name, a single image cannot be read, or `topk` or
            `batch_size` is below 1. If one of several images cannot be read, a warning names the image, and the list
            of its predictions is empty.
        CheckpointError: The checkpoint is missing or corrupt.
        TypeError: An image is not a file path, a Pillow image or an array, but for example bytes or a tensor.
    """
    if min(topk, batch_size) < 1:
        raise ConfigError(f"topk and batch_size must be at least 1, got {topk} and {batch_size}")
    _check_arguments(model, images)
    classifier = classifier_of(model)
    if (
        isinstance(images, (str, os.PathLike, Image.Image, bytes, bytearray))
        or not isinstance(images, Iterable)
        or getattr(images, "ndim", 4) < 4
    ):  # a single image
        (found,) = classifier([images], topk)
        if isinstance(found, Exception):
            raise ConfigError(f"{_name(images)} cannot be read as an image: {reason_of(found)}") from found
        return found

    several: list[list[Prediction]] = []
    for image, found in predictions(classifier, images, topk, batch_size):
        if isinstance(found, Exception):
            _logger.warning(
                "%s has no predictions, because the image cannot be read: %s", _name(image), reason_of(found)
            )
            several.append([])
        else:
            several.append(found)
    return several


def _check_arguments(model: object, images: object) -> None:
    """Raise a ConfigError if `model` is the path of an image, or `images` the path of a folder."""
    if isinstance(model, (str, os.PathLike)) and Path(model).suffix.lower() in get_img_extensions():
        raise ConfigError(f"the first argument must be a model or checkpoint and the second the images, got {model!s}")
    if isinstance(images, (str, os.PathLike)) and os.path.isdir(images):
        raise ConfigError(f"images must be files, got the folder {str(images)!r}: pass a list of the folder's files")


def _name(image: object) -> str:
    return repr(os.fspath(image)) if isinstance(image, (str, os.PathLike)) else f"the {type(image).__name__}"
