"""timm's data config of a model: image size, mean, standard deviation, crop and interpolation."""

from __future__ import annotations

from typing import Any

from timm.data import resolve_data_config, resolve_model_data_config
from timm.layers import to_2tuple
from torch import nn

from .config import ConfigError
from .wrappers import unwrapped


def input_size(model: Any, config: dict[str, Any] | None = None) -> tuple[int, int, int]:
    """Return the channels, height and width that a model was built for, which can differ from timm's data config."""
    channels, *size = (config or resolve_model_data_config(model))["input_size"]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    return getattr(model, "in_chans", channels), *size


def chosen_data_config(
    model: nn.Module, img_size: int | tuple[int, int] | None = None, **chosen: Any
) -> dict[str, Any]:
    """Return timm's data config of a model, in which the given values replace the model's own values.

    Unlike in timm, `img_size` need not be square, and mean and std always have one number per channel.
    """
    if img_size:
        chosen["input_size"] = (3, *to_2tuple(img_size))
    config = resolve_data_config(chosen, model=model)
    for name in ("mean", "std"):
        if len(config[name]) == 1:  # one number for all channels
            config[name] = (*config[name],) * config["input_size"][0]
    return config


def data_config_of(model: Any, **chosen: Any) -> dict[str, Any]:
    """Return timm's data config of a model, with the image size that the model was built for.

    Raises:
        ConfigError: The model does not accept images of three channels.
    """
    model = unwrapped(model)
    channels = getattr(model, "in_chans", 3)
    if channels != 3:
        raise ConfigError(f"the model must accept images of 3 channels, got {channels}")
    config = chosen_data_config(model, **chosen)
    return config | {"input_size": input_size(model, config)}
