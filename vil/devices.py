"""The device of a run, by its name, and the precision in which models run there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .config import ConfigError


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def known_device(name: str | None) -> str:
    """The device of that name, or the default.

    Raises:
        ConfigError: There is none on this machine.
    """
    name = name or default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown to PyTorch: try cuda or cpu") from error
    if device.type == "cpu":
        return name
    backend: Any = getattr(torch, device.type, None)
    if not (hasattr(backend, "is_available") and backend.is_available()):
        raise ConfigError(f"device {name!r}: there is none that PyTorch can use on this machine; try --device cpu")
    if (device.index or 0) >= backend.device_count():
        raise ConfigError(f"device {name!r}: this machine has {backend.device_count()} of them, counted from 0")
    return name


def autocast(device: torch.device, enabled: bool, dtype: str) -> AbstractContextManager:
    """Mixed precision on GPUs, fp32 on a CPU."""
    return torch.autocast(device.type, getattr(torch, dtype)) if enabled and device.type != "cpu" else nullcontext()
