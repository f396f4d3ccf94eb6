"""Whether what a checkpoint says of a run is something that a run leaves."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .meter import EpochMeter
from .summary import best_top1


def history_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the epochs done, as numbers; a count stays one.

    Raises:
        ValueError, KeyError, TypeError: A row is none that training writes.
    """
    history = [
        {str(name): int(float(v)) if isinstance(v, int) else float(v) for name, v in row.items()} for row in rows
    ]
    for epoch, row in enumerate(history, start=1):
        if row["epoch"] != epoch or math.isnan(best_top1(row)) or not all(name.isidentifier() for name in row):
            raise ValueError(f"the history has no row of epoch {epoch} as training writes it")
    return history


def check_progress(meter: EpochMeter) -> None:
    """Raises a ValueError if an epoch has not a loss and a norm for each step."""
    if len(meter.losses) != len(meter.norms):
        raise ValueError("the epoch's progress has not a loss and a norm for each step")


def check_optimizer(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raises a ValueError if its state is none that training reaches; `name` is timm's of the optimizer."""
    for parameter, state in optimizer.state.items():
        shape, tensors = parameter.shape, {key: t for key, t in state.items() if isinstance(t, Tensor)}
        found, moment = {key: (t.shape, t.dtype) for key, t in tensors.items()}, (shape, torch.float32)
        if name == "adamw":
            fits = found == {"step": ((), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}
        else:
            fits = all(found[key][0] in ((), shape) for key in ("exp_avg", "momentum_buffer") if key in found)
        fits = fits and all(t.isfinite().all() for t in tensors.values()) and 0 <= float(state.get("step", 0)) < 2**53
        if not fits:
            raise ValueError(f"the optimizer's state of a parameter {tuple(shape)} is none that {name} reaches")
