"""Building the model of a run, with errors that a user can act on."""

from __future__ import annotations

import logging
from typing import Any

import timm
import torch
from torch import nn

from . import checkpoint
from .config import ConfigError

_logger = logging.getLogger(__name__)


def create_model(model: str, pretrained_path: str | None = None, **arguments: Any) -> nn.Module:
    """timm's model of this name, started from the weights in a file if one is given.

    The file's head is kept if it has as many classes as the model, position embeddings and patches are resampled.

    Raises:
        ConfigError: There is no such model, it does not take the arguments, or it does not fit the weights.
        CheckpointError: The file is missing or corrupt.
    """
    if pretrained_path:
        weights = checkpoint.read_weights(pretrained_path)
        classes = len(weights["head.bias"]) if "head.bias" in weights else -1  # timm: -1 for a new head
        arguments |= dict(pretrained=True, pretrained_cfg_overlay=dict(state_dict=weights, num_classes=classes))
    try:
        return timm.create_model(model, **arguments)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"cannot create the model {model}: {error}") from error


def load_model(model: str, path: str, use_ema: bool = False, **arguments: Any) -> nn.Module:
    """timm's model of this name with all of its weights from a file.

    Raises:
        ConfigError: There is no such model, or it does not take the arguments.
        CheckpointError: The file is missing or corrupt, or of another architecture or number of classes.
    """
    with torch.device("meta"):  # a file that asks for more than it holds is refused before memory is taken
        checkpoint.load_weights(create_model(model, **arguments), path, use_ema)
    loaded = create_model(model, **arguments)
    checkpoint.load_weights(loaded, path, use_ema)
    return loaded
