"""Classifier: a model with its preprocessing and class names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from timm.data import ImageNetInfo
from torch import Tensor

from ..config import ConfigError
from ..text import one_line, printable
from .images import check_picture, open_picture

Pictures = TypeVar("Pictures")
MAX_REASON = 200  # maximum length of a quoted error message, in characters


class Prediction(NamedTuple):
    """Predicted class: name, probability and class index (`number`)."""

    label: str
    probability: float
    number: int


@dataclass
class Classifier:
    """Model with its preprocessing and class names.

    Attributes:
        run: Function from normalized images (B, 3, H, W) to logits (B, classes).
        device: Device that the inputs of `run` must be on.
        data_config: Preprocessing of the images as a timm data config.
        label_names: Class names by class index; empty if unknown.
        labels: Class names in which WordNet ids of ImageNet are replaced by descriptions.
    """

    run: Callable[[Tensor], Tensor]
    device: torch.device
    data_config: dict[str, Any]
    label_names: Sequence[str]

    def __post_init__(self) -> None:
        from ..data.loaders import evaluation_transform  # imported late, because this import is slow

        self.transform = evaluation_transform(self.data_config)
        self.labels = _readable(self.label_names)

    @torch.inference_mode()
    def __call__(self, images: Sequence[Any], topk: int) -> list[list[Prediction] | Exception]:
        """Return a list of predictions per image, or the exception for an image that cannot be read.

        Raises:
            TypeError: An image is not a file path, a Pillow image or a NumPy array.
        """
        for image in images:
            check_picture(image)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            prepared = list(pool.map(self._prepare, images))  # threads help because decoders release the GIL

        readable = [image for image in prepared if isinstance(image, Tensor)]
        predicted = iter(self._classify(torch.stack(readable), topk) if readable else ())
        return [next(predicted) if isinstance(image, Tensor) else image for image in prepared]

    def _prepare(self, image: Any) -> Tensor | Exception:
        """Return the image as a uint8 tensor (3, H, W), or the exception for an image that cannot be read."""
        from ..fault_tolerance.machine_errors import MachineError

        try:
            return self.transform(open_picture(image))
        except MachineError:
            raise
        except Exception as error:  # decoders have no common exception type
            return error

    def _classify(self, images: Tensor, topk: int) -> list[list[Prediction]]:
        """Return the predictions for a batch of uint8 images (B, 3, H, W)."""
        logits = self.run(self._normalize(images))
        self._check_logits(logits, len(images))

        probabilities = logits.float().softmax(-1)
        best = probabilities.topk(min(topk, logits.shape[-1]))
        return [
            [Prediction(self._label(index), value, index) for value, index in zip(values, indices)]
            for values, indices in zip(best.values.tolist(), best.indices.tolist())
        ]

    def _normalize(self, images: Tensor) -> Tensor:
        mean = torch.tensor(self.data_config["mean"], device=self.device).view(-1, 1, 1) * 255
        std = torch.tensor(self.data_config["std"], device=self.device).view(-1, 1, 1) * 255
        return (images.to(self.device) - mean) / std

    def _check_logits(self, logits: Any, num_images: int) -> None:
        if not isinstance(logits, Tensor):
            raise ConfigError(f"the model must return a tensor of logits, got {type(logits).__name__}")
        if logits.dim() != 2 or len(logits) != num_images or not logits.shape[1]:
            raise ConfigError(
                f"the model must return logits ({num_images} images, classes), got shape {tuple(logits.shape)}"
            )
        if self.label_names and len(self.label_names) != logits.shape[1]:
            raise ConfigError(
                f"the model has {logits.shape[1]} classes but {len(self.label_names)} label_names; set one per class"
            )

    def _label(self, index: int) -> str:
        return self.labels[index] if self.labels else str(index)


def _readable(names: Sequence[str]) -> Sequence[str]:
    """Return class names, with WordNet ids of ImageNet replaced by descriptions."""
    if not names:
        return ()
    descriptions: Any = ImageNetInfo().label_descriptions(
        as_dict=True
    )  # timm returns a dict, although its annotation differs
    return [descriptions.get(name, name) for name in names]


def predictions(
    classifier: Classifier, images: Iterable[Pictures], topk: int, batch_size: int
) -> Iterator[tuple[Pictures, list[Prediction] | Exception]]:
    """Yield each image with its predictions, or with the exception if the image cannot be read."""
    rest = iter(images)
    while batch := list(islice(rest, batch_size)):
        yield from zip(batch, classifier(batch, topk))


def reason_of(error: Exception) -> str:
    """Return an exception as one printable line for a message."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return printable(one_line(error, MAX_REASON)) or type(error).__name__
