"""Creation of the models of an evaluation, which share image preprocessing and class order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..classes import check_order, names_of
from ..config import ConfigError
from ..data_config import data_config_of
from ..factory import load_model, pretrained_model
from .settings import ModelSettings
from .wrappers import Renormalized, Reordered, Restricted

# preprocessing options that both models take from the first model
SHARED_PREPROCESSING = ("crop_pct", "crop_mode", "interpolation")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedModel:
    """Model in eval mode, prepared for an evaluation.

    Attributes:
        settings: Settings of the model.
        module: The model, on the device for the evaluation.
        data_config: timm's data config of the model's images.
        label_names: Class names by index; empty if unknown.
    """

    settings: ModelSettings
    module: nn.Module
    data_config: dict[str, Any]
    label_names: Sequence[str]

    @property
    def num_classes(self) -> int:
        return int(self.module.num_classes)  # type: ignore[arg-type]  # an int in timm models

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


def build(settings: ModelSettings, device: torch.device) -> EvaluatedModel:
    """Build a model and load weights from a checkpoint or timm's pretrained weights.

    Raises:
        ConfigError: The model is unknown, has no pretrained weights or another number of classes than the pretrained
            weights, or does not support the arguments or images of three channels.
        CheckpointError: The weights do not fit the model.
    """
    module = _load(settings).to(device).eval()
    source = settings.source
    return EvaluatedModel(
        settings=settings,
        module=module,
        data_config=data_config_of(module, **settings.preprocessing),
        label_names=source.label_names if source else names_of(module),
    )


def _load(settings: ModelSettings) -> nn.Module:
    name = settings.model
    if settings.source:
        return load_model(name, settings.source, settings.use_ema, **settings.arguments)
    remedy = "set --checkpoint FILE, or --against FILE for the second model"
    return pretrained_model(name, remedy, **settings.arguments)


def check_comparable(first: EvaluatedModel, second: EvaluatedModel) -> None:
    """Check that two models can be compared, and warn about preprocessing of the second model that is not used.

    Raises:
        ConfigError: The models have different numbers of classes or image sizes.
    """
    if first.num_classes != second.num_classes:
        raise ConfigError(
            f"both models must have the same number of classes, got {first.num_classes} and {second.num_classes}"
        )
    shared, own = first.data_config, second.data_config
    if own["input_size"] != shared["input_size"]:
        sizes = f"{shared['input_size'][1:]} and {own['input_size'][1:]}"
        raise ConfigError(f"both models must have the same image size, got {sizes}: set --img-size")
    for name in SHARED_PREPROCESSING:
        if own[name] != shared[name]:
            _logger.warning(
                "using %s %s for both models instead of the second model's %s",
                name,
                shared[name],
                own[name],
            )


def adapt(
    model: EvaluatedModel,
    first: EvaluatedModel,
    split: str,
    class_order: Sequence[str],
    classes: Sequence[int] | None,
) -> nn.Module:
    """Wrap a model to accept images preprocessed for the first model and return logits in a common class order.

    Args:
        model: Model to adapt.
        first: First model of the evaluation, which may be `model` itself.
        split: Name of the split, for messages.
        class_order: Class names in the order of the returned logits, taken from the first model or, if the first
            model has no class names, from the split.
        classes: Indices of the classes that may be predicted; None for all classes.

    Raises:
        ConfigError: The model has other classes than the first model or the split.
    """
    module = model.module
    if model is not first:
        module = Renormalized(module, given=first.data_config, own=model.data_config)
    owner = first.settings.owner if first.label_names else f"the split {split!r}"
    remedy = "the models and the split must have the same classes"
    order = check_order(model.label_names, class_order, model.settings.owner, owner, remedy)
    if order:
        module = Reordered(module, order)
    if classes:
        module = Restricted(module, classes, model.num_classes)
    device = next(module.parameters()).device
    return module.to(device)
