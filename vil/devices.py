"""Selection of the device and the autocast precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .config import ConfigError


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def known_device(name: str | None) -> str:
    """Return `name` if PyTorch can use that device, or the default device for None.

    Raises:
        ConfigError: The device is unknown or not available on this machine.
    """
    name = name or default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        hint = "; did you mean 'cuda'?" if "gpu" in name.lower() else ""
        raise ConfigError(f"device must be a PyTorch device such as cuda or cpu, got {name!r}{hint}") from error
    if device.type == "cpu":
        return name
    backend: Any = getattr(torch, device.type, None)
    if not (hasattr(backend, "is_available") and backend.is_available()):
        raise ConfigError(f"device {name!r} is not available on this machine: set --device cpu")
    if (device.index or 0) >= backend.device_count():
        count = backend.device_count()
        raise ConfigError(f"device index must be less than {count}, the number of {device.type} devices, got {name!r}")
    return name


def autocast(device: torch.device, enabled: bool, dtype: str) -> AbstractContextManager:
    """Return the autocast context if `enabled`, otherwise a null context. On a CPU, autocast is never used."""
    return torch.autocast(device.type, getattr(torch, dtype)) if enabled and device.type != "cpu" else nullcontext()
