"""Creation of classifiers from models and checkpoints."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..checkpoint import Checkpoint
from ..classes import names_of
from ..config import ConfigError
from ..data_config import data_config_of
from ..devices import default_device
from ..factory import from_checkpoint, pretrained_model
from ..wrappers import unwrapped
from .classifier import Classifier
from .onnx_file import classifier_of_onnx

_logger = logging.getLogger(__name__)

PRETRAINED = "vil_tiny_pooled.tiny_in200"  # model used if neither a checkpoint nor a model is given


def classifier_of(
    model: nn.Module | str | os.PathLike | Checkpoint,
    device: str | None = None,
    use_ema: bool | None = None,
    name: str | None = None,
    **arguments: Any,
) -> Classifier:
    """Return a Classifier for a timm model, or for a checkpoint or its path.

    Args:
        model: The model or checkpoint.
        device: Device of a checkpoint's model; None uses cuda if available.
        use_ema: Whether to load the EMA weights of a checkpoint. None chooses as `from_checkpoint` does.
        name: Model name in timm, if the checkpoint does not store the name.
        arguments: Model arguments that override the arguments in the checkpoint.

    Raises:
        ConfigError: The model has no classifier head, the checkpoint does not store the model's name, or the ONNX file
            was not written by `vil.export`.
        CheckpointError: The checkpoint is missing or corrupt.
    """
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        if path.suffix == ".onnx":
            return classifier_of_onnx(path)
        model = Checkpoint(path)
    if isinstance(model, Checkpoint):
        model = from_checkpoint(model, name, use_ema=use_ema, **arguments).to(device or default_device())
    return _classifier_of_model(model)


def pretrained_classifier(name: str | None = None, device: str | None = None, **arguments: Any) -> Classifier:
    """Return a Classifier with timm's pretrained weights of a model, by default with weights of the package.

    If no model is given, log which classes the weights of the package recognize. `arguments` are keyword arguments of
    the model; `img_size` is also the size of the preprocessed images.
    """
    if not name:
        _logger.warning(
            "using %s, which recognizes the 200 classes of Tiny ImageNet; for other classes, set --checkpoint",
            PRETRAINED,
        )
    model = pretrained_model(name or PRETRAINED, **arguments).to(device or default_device())
    return _classifier_of_model(model, arguments.get("img_size"))


def _classifier_of_model(model: Any, img_size: int | tuple[int, int] | None = None) -> Classifier:
    inner = unwrapped(model)
    if not getattr(inner, "num_classes", 1):
        raise ConfigError(
            "num_classes of the model must be at least 1 to predict classes, got 0: create the model with its head"
        )
    if not getattr(inner, "pretrained_cfg", None):
        _logger.warning(
            "%s has no pretrained_cfg: images are preprocessed with timm's defaults, and classes are shown as indices. "
            "To change this, set model.pretrained_cfg or use a timm model",
            type(inner).__name__,
        )
    module: nn.Module = model if isinstance(model, nn.Module) else inner  # timm's ModelEma is not an nn.Module
    weight = next(module.parameters())

    def run(images: Tensor) -> Tensor:
        was_training = {part: part.training for part in module.modules()}
        try:
            return module.eval()(images.to(weight.dtype))
        finally:
            for part, training in was_training.items():
                part.training = training

    return Classifier(run, weight.device, data_config_of(inner, img_size=img_size), names_of(inner))
