"""Resuming a run: choice of the checkpoint, and validation that it belongs to the same run and is consistent."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint
from ..checkpoint import BrokenCheckpointError, CheckpointError
from ..classes import first_difference, order_of
from ..fault_tolerance.machine_errors import exists
from .meter import EpochMeter
from .summary import best_top1

_logger = logging.getLogger(__name__)

# options that must not change when resuming (`DECISIVE`), and options whose change does not affect training
DECISIVE = ("model", "model_kwargs", "img_size", "num_classes", "opt", "model_ema", "teacher")
HARMLESS = (
    "resume", "output", "experiment", "workers", "device", "log_interval", "batch_size", "checkpoint_interval",
    "log_tensorboard", "log_wandb", "cuda_graphs", "augment_on_device",
)  # fmt: skip


def files_of(folder: Path) -> list[Path]:
    """Return the checkpoints of a run folder that can be resumed from, the newest first."""
    try:
        return [path for path in (folder / "last.pt", folder / "previous.pt") if exists(path)]
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {error}") from error


def resolve_resume(resume: str | None, folder: Path) -> str | None:
    """Resolve `resume`. A process that torchrun restarted always resumes from its run folder."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return "auto" if restarted and files_of(folder) else resume


def find_resumed(resume: str | None, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that a run in `folder` resumes from, and its content; None for a fresh start.

    The newest readable checkpoint of the folder is used; a broken one is renamed to *.broken, with a warning.

    Raises:
        CheckpointError: No checkpoint can be read, or the folder contains a run and `resume` is not set.
    """
    found, resume = files_of(folder), resolve_resume(resume, folder)
    if resume not in (None, "auto"):
        return Path(resume), checkpoint.read_checkpoint(resume)
    if found and resume is None:
        raise CheckpointError(
            f"{folder} contains a run: set --resume auto to resume it, or --experiment NAME to start another run"
        )
    broken = []
    for path in found:
        try:
            saved = checkpoint.read_checkpoint(path)
        except BrokenCheckpointError as error:
            broken.append(path)
            _logger.warning("%s", error)
            continue
        for other in broken:
            aside = other.replace(other.with_suffix(".broken"))
            _logger.warning("resuming from %s, the previous checkpoint; the broken file was renamed to %s", path, aside)
        return path, saved
    if broken:
        raise CheckpointError(f"no checkpoint of {folder} can be read: start another run with --experiment NAME")
    return None


def check_same_run(saved: dict[str, Any], current: dict[str, Any], path: Path, middle: bool = False) -> None:
    """Compare the options of a checkpoint with those of the run that resumes from it, possibly in the `middle` of an
    epoch.

    Raises:
        CheckpointError: An option differs that the saved tensors depend on. Other differences are only logged.
    """
    for name in [name for name in saved if saved[name] != current.get(name)]:
        if name in DECISIVE:
            raise CheckpointError(
                f"{name} must be {saved[name]!r}, as in {path}, got {current.get(name)!r}: resume with the same value, "
                "or start another run with --experiment NAME"
            )
        if name == "global_batch_size" and middle:
            raise CheckpointError(
                f"{name} must be {saved[name]} until the end of the epoch in {path}, got {current.get(name)}: finish "
                "the epoch with the same value"
            )
        if name not in HARMLESS:
            _logger.warning("resuming with %s %r, was %r", name, current.get(name), saved[name])


def check_same_classes(saved: dict[str, Any], names: list[str], path: Path) -> None:
    """Raise a CheckpointError if a class of the checkpoint has another name in the run that resumes."""
    own = saved["label_names"]
    if own and names and (order_of(own, names) != [*range(len(own))]):
        raise CheckpointError(
            f"{first_difference(own, names, str(path), 'this run')}: give the class folders their old names, or start "
            "another run with --experiment NAME"
        )


def check_same_teacher(saved: dict[str, Any], teacher: str | None, path: Path) -> None:
    """Raise a CheckpointError if the digest of the teacher's weights differs from the checkpoint's."""
    if saved.get("teacher") != teacher:
        raise CheckpointError(
            f"the teacher must have the same weights as in {path}: set the run's --teacher-checkpoint, or start "
            "another run with --experiment NAME"
        )


def history_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the history rows as numbers, with counts as integers.

    Raises:
        ValueError, KeyError, TypeError: A row is not one that training writes.
    """
    history = [
        {str(name): int(float(v)) if isinstance(v, int) else float(v) for name, v in row.items()} for row in rows
    ]
    for epoch, row in enumerate(history, start=1):
        if row["epoch"] != epoch or math.isnan(best_top1(row)) or not all(name.isidentifier() for name in row):
            raise ValueError(f"the history has no row of epoch {epoch} as training writes it")
    return history


def check_progress(meter: EpochMeter) -> None:
    """Raise a ValueError if an epoch does not have one loss and one norm for each step."""
    if len(meter.losses) != len(meter.norms):
        raise ValueError("the epoch's progress must have one loss and one norm for each step")


def check_optimizer(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise a ValueError if the optimizer's state is invalid; `name` is timm's name of the optimizer."""
    for parameter, state in optimizer.state.items():
        shape, tensors = parameter.shape, {key: t for key, t in state.items() if isinstance(t, Tensor)}
        found, moment = {key: (t.shape, t.dtype) for key, t in tensors.items()}, (shape, torch.float32)
        if name == "adamw":
            fits = found == {"step": ((), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}
        else:
            fits = all(found[key][0] in ((), shape) for key in ("exp_avg", "momentum_buffer") if key in found)
        fits = fits and all(t.isfinite().all() for t in tensors.values()) and 0 <= float(state.get("step", 0)) < 2**53
        if not fits:
            raise ValueError(f"the optimizer's state of a parameter {tuple(shape)} cannot result from {name}")
