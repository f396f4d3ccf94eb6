"""Going on with a run: from which file, whether what it says is something that a run leaves, and of the same run."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint, files
from ..checkpoint import BrokenCheckpointError, CheckpointError
from ..classes import first_difference, order_of
from .meter import EpochMeter
from .summary import best_top1

_logger = logging.getLogger(__name__)

# options whose change on resuming makes it another run, and those whose change changes nothing that is trained
DECISIVE = ("model", "model_kwargs", "img_size", "num_classes", "opt", "model_ema", "teacher")
HARMLESS = (
    "resume", "output", "experiment", "workers", "device", "log_interval", "batch_size", "checkpoint_interval",
    "log_tensorboard", "log_wandb", "cuda_graphs", "augment_on_device",
)  # fmt: skip


def files_of(folder: Path) -> list[Path]:
    """Return the checkpoints from which a run in a folder can be resumed, the newest first.

    Raises:
        CheckpointError: The machine cannot tell.
    """
    try:
        return [path for path in (folder / "last.pt", folder / "previous.pt") if files.exists(path)]
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {error}") from error


def resolve_resume(resume: str | None, folder: Path) -> str | None:
    """What `resume` comes to: a process that torchrun started again goes on from its folder, whatever was given."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return "auto" if restarted and files_of(folder) else resume


def find_resumed(resume: str | None, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint from which a run in `folder` is resumed, with its content; None for a fresh start.

    The newest checkpoint that is not damaged is taken. A damaged one is renamed to *.broken, with a warning.

    Raises:
        CheckpointError: All checkpoints are damaged, the machine cannot read one, or the folder holds a run and
            `resume` is not given.
    """
    found, resume = files_of(folder), resolve_resume(resume, folder)
    if resume not in (None, "auto"):
        return Path(resume), checkpoint.read_checkpoint(resume)
    if found and resume is None:
        raise CheckpointError(f"{folder} holds a run: --resume auto goes on with it, --experiment NAME starts another")
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
            _logger.warning("going on from %s, the checkpoint before it; the broken file is now %s", path, aside)
        return path, saved
    if broken:
        raise CheckpointError(f"no checkpoint of {folder} can be read: --experiment NAME starts another run")
    return None


def check_same_run(saved: dict[str, Any], current: dict[str, Any], path: Path, middle: bool = False) -> None:
    """Compares the options of a checkpoint with those of the run that resumes from it, in the `middle` of an epoch.

    Raises:
        CheckpointError: One differs that the saved tensors depend on. A change of another is only logged.
    """
    for name in [name for name in saved if saved[name] != current.get(name)]:
        if name in DECISIVE:
            raise CheckpointError(
                f"{path} is of a run with {name} {saved[name]!r}, this one has {current.get(name)!r}: resume with the "
                "same, or start another run with --experiment NAME"
            )
        if name == "global_batch_size" and middle:
            raise CheckpointError(
                f"{path} is of the middle of an epoch with {name} {saved[name]}, this run has {current.get(name)}: "
                "finish the epoch with the same"
            )
        if name not in HARMLESS:
            _logger.warning("resuming with %s %r, was %r", name, current.get(name), saved[name])


def check_same_classes(saved: dict[str, Any], names: list[str], path: Path) -> None:
    """Raise a CheckpointError if a checkpoint has other class names than the run that resumes, or another order."""
    own = saved["label_names"]
    if own and names and (order_of(own, names) != [*range(len(own))]):
        raise CheckpointError(
            f"{first_difference(own, names, str(path), 'this run')}: give the class folders their old names, or start "
            "another run with --experiment NAME"
        )


def check_same_teacher(saved: dict[str, Any], teacher: str | None, path: Path) -> None:
    """Raises a CheckpointError if the digest of the teacher's weights is another than that of a checkpoint's run."""
    if saved.get("teacher") != teacher:
        raise CheckpointError(
            f"{path} is of a run whose teacher had other weights: give the --teacher-checkpoint that it had, or start "
            "another run with --experiment NAME"
        )


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
