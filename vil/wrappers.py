"""Access to models inside wrappers of PyTorch and timm."""

from __future__ import annotations

from typing import Any


def unwrapped(model: Any) -> Any:
    """Return the model inside any wrappers of PyTorch and timm.

    Supported wrappers are DataParallel, DistributedDataParallel, AveragedModel, timm's EMA models and compiled models.
    Wrappers may be nested.
    """
    while type(model).__module__.partition(".")[0] in ("torch", "timm"):
        inner = [getattr(model, name, None) for name in ("_orig_mod", "module", "ema")]
        inner = [part for part in inner if part is not None]
        if not inner:
            break
        model = inner[0]
    return model
