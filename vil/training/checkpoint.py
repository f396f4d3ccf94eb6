"""Checkpoints: atomic files that hold a whole run, and weights from files of any origin, with errors that say why."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from timm.models import load_state_dict
from torch import nn

_logger = logging.getLogger(__name__)

VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or used for this model."""


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Writes `path` atomically: it holds either the new checkpoint or, after any failure, what it held before.

    Raises:
        CheckpointError: It could not be written; the message names the file, the cause and the space left.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # PyTorch's writer turns a full disk into a RuntimeError
        temporary.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free / 2**20
        kept = f"the previous {path} is intact" if path.exists() else "there was none before"
        raise CheckpointError(
            f"could not write {path} ({free:.0f} MiB free on its disk): {error}; {kept}. Make room and go on with "
            "--resume auto"
        ) from error


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of `save_checkpoint`.

    Raises:
        CheckpointError: It is missing, corrupt, or not one of ours.
    """
    checkpoint = _guarded(path, lambda: _load(path))
    if not _is_ours(checkpoint):
        raise CheckpointError(f"{path} is not a checkpoint of train_imagenet.py (version {VERSION})")
    return checkpoint


def saved_config(path: str | Path) -> dict[str, Any]:
    """The options of the run that wrote a checkpoint; none if it is not one of `save_checkpoint`.

    Raises:
        CheckpointError: The file is missing or corrupt.
    """
    if str(path).endswith(".safetensors"):
        return {}
    checkpoint = _guarded(path, lambda: _load(path))
    return checkpoint["config"] if _is_ours(checkpoint) else {}


def _load(path: str | Path):
    # ViM's training script keeps its options beside the weights; nothing else that runs code on loading is let in
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True)


def _is_ours(checkpoint: Any) -> bool:
    return isinstance(checkpoint, dict) and checkpoint.get("version") == VERSION and "config" in checkpoint


def find_resumed(resume: str | None, folder: Path) -> Path | None:
    """The checkpoint that a run in `folder` goes on from, None for a fresh start.

    Raises:
        CheckpointError: The folder holds a run and nothing says to resume it.
    """
    last = folder / "last.pt"
    if resume == "auto":
        return last if last.exists() else None
    if resume:
        return Path(resume)
    if last.exists():
        raise CheckpointError(f"{folder} holds a run: --resume auto goes on with it, --experiment NAME starts another")
    return None


def check_same_run(saved: dict[str, Any], current: dict[str, Any], path: Path) -> None:
    """Compares the options of a checkpoint with those of the run that resumes from it.

    Raises:
        CheckpointError: One differs that the saved tensors depend on. A change of another is only logged.
    """
    for name in sorted(name for name in saved if saved[name] != current.get(name)):
        if name in ("model", "model_kwargs", "img_size", "num_classes", "opt", "model_ema"):
            raise CheckpointError(
                f"{path} is of a run with {name} {saved[name]!r}, this one has {current.get(name)!r}: resume with the "
                "same, or start another run with --experiment NAME"
            )
        if name not in ("resume", "output", "experiment", "workers", "device", "log_interval", "batch_size"):
            _logger.warning("resuming with %s %r, was %r", name, current.get(name), saved[name])


def read_weights(path: str | Path, use_ema: bool = True) -> dict[str, Any]:
    """The state dict of a checkpoint of ours, timm's or ViM's, or of a plain one (.pth, .safetensors).

    Args:
        path: The file.
        use_ema: Take the moving average where the file has one.

    Raises:
        CheckpointError: The file is missing or corrupt.
    """
    return _guarded(path, lambda: load_state_dict(str(path), use_ema=use_ema))


def load_weights(model: nn.Module, path: str | Path, use_ema: bool = False) -> None:
    """Loads all of a model's weights from a file of `read_weights`.

    Raises:
        CheckpointError: The file is missing or corrupt, or holds another architecture or number of classes.
    """
    weights = read_weights(path, use_ema)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        lines = [line.strip()[:400] for line in str(error).splitlines()]
        raise CheckpointError(f"{path} does not fit the model: " + " ".join(lines[:6])) from error


def _guarded(path: str | Path, read):
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        return read()
    except Exception as error:  # what the readers raise on broken files has no common type
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint; it may be cut off or corrupt: {error}"
        ) from error
