"""Classifiers of images: models and exported files with their preprocessing and class names."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor, nn

from ..classes import names_of
from ..config import ConfigError
from ..data_config import data_config_of
from ..devices import default_device
from ..factory import from_checkpoint
from ..security.checkpoint_options import check_preprocessing, options_of_checkpoint
from ..text import label_of, one_line, printable
from ..wrappers import unwrapped

Picture: TypeAlias = str | os.PathLike | Image.Image | np.ndarray
Pictures = TypeVar("Pictures")
MAX_REASON = 200  # maximum length of an error in a message, in characters

_logger = logging.getLogger(__name__)


class Prediction(NamedTuple):
    """Predicted class: name, probability and class index."""

    label: str
    probability: float
    number: int


@dataclass
class Classifier:
    """Model with its preprocessing and class names.

    Attributes:
        run: Function from normalized images (B, 3, H, W) to logits (B, classes).
        device: Device of the inputs of `run`.
        data_config: timm's data config of the images.
        label_names: Class names by index; empty if unknown.
    """

    run: Callable[[Tensor], Tensor]
    device: torch.device
    data_config: dict[str, Any]
    label_names: Sequence[str]

    def __post_init__(self) -> None:
        from ..data.loaders import evaluation_transform  # slow import, takes a second

        self.transform = evaluation_transform(self.data_config)

    @torch.inference_mode()
    def __call__(self, images: Sequence[Any], topk: int) -> list[list[Prediction] | Exception]:
        """Return the predictions of each image, or the error of an image that cannot be read."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            prepared = list(pool.map(self._prepare, images))  # decoders release the GIL
        readable = [image for image in prepared if isinstance(image, Tensor)]
        predicted = iter(self._classify(torch.stack(readable), topk) if readable else ())
        return [next(predicted) if isinstance(image, Tensor) else image for image in prepared]

    def _prepare(self, image: Any) -> Tensor | Exception:
        from ..fault_tolerance.machine_errors import MachineError

        try:
            return self.transform(open_picture(image))
        except MachineError:
            raise
        except Exception as error:  # decoders raise various types
            return error

    def _classify(self, images: Tensor, topk: int) -> list[list[Prediction]]:
        """Return the predictions of images (B, 3, H, W) uint8."""
        mean, std = (
            torch.tensor(self.data_config[name], device=self.device).view(-1, 1, 1) * 255 for name in ("mean", "std")
        )
        logits = self.run((images.to(self.device) - mean) / std)
        self._check_logits(logits, len(images))
        best = logits.float().softmax(-1).topk(min(topk, logits.shape[-1]))
        return [
            [Prediction(self._label(index), probability, index) for probability, index in zip(probabilities, indices)]
            for probabilities, indices in zip(best.values.tolist(), best.indices.tolist())
        ]

    def _check_logits(self, logits: Any, images: int) -> None:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != images or not logits.shape[1]:
            raise ConfigError(f"the model makes {shape} of {images} images, and no row of classes each")
        if self.label_names and len(self.label_names) != logits.shape[1]:
            raise ConfigError(f"the model has {logits.shape[1]} classes but {len(self.label_names)} label_names")

    def _label(self, index: int) -> str:
        return self.label_names[index] if self.label_names else str(index)


def predictions(
    classifier: Classifier, images: Iterable[Pictures], topk: int, batch_size: int
) -> Iterator[tuple[Pictures, list[Prediction] | Exception]]:
    """Iterate over images with their predictions, or with the error of an image that cannot be read."""
    rest = iter(images)
    while batch := list(islice(rest, batch_size)):
        yield from zip(batch, classifier(batch, topk))


def open_picture(image: Any) -> Image.Image:
    """Convert an image of any supported kind to 8-bit RGB, with the same colours as in training."""
    from ..data.sources.images import read_image
    from ..security.image_decoding import to_rgb

    if isinstance(image, (str, os.PathLike)):
        return read_image(image)
    if not isinstance(image, Image.Image):
        array = np.asarray(image)
        if array.dtype == np.uint16:
            array = (array >> 8).astype(np.uint8)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,), (4,)):
            raise ConfigError(
                f"an image array must be (H, W) or (H, W, 3) of uint8 or uint16, got {array.shape} of {array.dtype}"
            )
        image = Image.fromarray(array)
    return to_rgb(image)


def reason_of(error: Exception) -> str:
    """Return an error as a line for a message."""
    return printable(one_line(error, MAX_REASON)) or type(error).__name__


def classifier_of(model: nn.Module | str | os.PathLike, device: str | None = None) -> Classifier:
    """Create the classifier of a model or of a checkpoint.

    Raises:
        ConfigError: The model has no classes, or the checkpoint does not specify its preprocessing.
        CheckpointError: The checkpoint is missing or corrupt.
    """
    if not isinstance(model, (str, os.PathLike)):
        return _of_model(model)
    if Path(model).suffix == ".onnx":
        return _of_onnx(Path(model))
    return _of_model(from_checkpoint(Path(model)).to(device or default_device()))


def _of_model(model: Any) -> Classifier:
    inner = unwrapped(model)
    if not getattr(inner, "num_classes", 1):
        raise ConfigError("the model has no classes to predict, as its head was taken off (num_classes=0)")
    if not getattr(inner, "pretrained_cfg", None):
        _logger.warning(
            "%s has no pretrained_cfg: images are prepared by timm's defaults, and classes are shown by index. Give "
            "a model of timm, or set model.pretrained_cfg",
            type(inner).__name__,
        )
    module: nn.Module = model if isinstance(model, nn.Module) else inner  # timm's ModelEma is not a module
    weight = next(module.parameters())

    def run(images: Tensor) -> Tensor:
        modes = [(part, part.training) for part in module.modules()]
        try:
            return module.eval()(images.to(weight.dtype))
        finally:
            for part, was_training in modes:
                part.training = was_training

    return Classifier(run, weight.device, data_config_of(inner), _readable(names_of(inner)))


def _of_onnx(path: Path) -> Classifier:
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(f"{path} needs a package: pip install onnxruntime ({error})") from error
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        config, names = _metadata_of(session.get_modelmeta().custom_metadata_map, path)
    except Exception as error:  # onnxruntime's errors have no common base class
        raise ConfigError(f"{path} must be a model of vil.export with its preprocessing: {reason_of(error)}") from error
    outputs = [output.name for output in session.get_outputs()]
    if "logits" not in outputs:
        raise ConfigError(f"{path} has {printable(', '.join(outputs))} and no logits: it predicts no classes")

    def run(images: Tensor) -> Tensor:
        try:
            return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
        except Exception as error:  # onnxruntime's errors have no common base class
            raise ConfigError(f"{path} fails on images {tuple(images.shape)}: {reason_of(error)}") from error

    return Classifier(run, torch.device("cpu"), config, _readable(names))


def _metadata_of(metadata: dict[str, str], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the data config and the class names in the metadata of an untrusted file.

    Raises:
        ConfigError, CheckpointError, KeyError, TypeError, ValueError: The metadata lack a value or have a wrong one.
    """
    config: dict[str, Any] = {name: metadata[name] for name in ("crop_mode", "interpolation")}
    config |= {name: json.loads(metadata[name]) for name in ("input_size", "mean", "std", "crop_pct")}
    names = json.loads(metadata.get("label_names", "[]"))
    channels, *size = config["input_size"]
    check_preprocessing(config, path)
    for side in size:
        options_of_checkpoint(dict(img_size=side), path)
    if (channels, len(size)) != (3, 2):
        raise ConfigError(f"images of {channels} channels and {size} pixels")
    if not isinstance(names, list) or any(name != label_of(name) for name in names):
        raise ConfigError("label_names must be short lines of text")
    return config, names


def _readable(names: Sequence[str]) -> Sequence[str]:
    """Return class names, with ImageNet's WordNet ids replaced by descriptions."""
    if not names:
        return ()
    descriptions: Any = ImageNetInfo().label_descriptions(as_dict=True)  # a dictionary, whatever the annotation says
    return [descriptions.get(name, name) for name in names]
