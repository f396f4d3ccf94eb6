"""Resuming a run: finding the checkpoint and checking that the checkpoint matches the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Checkpoint
from ..classes import first_difference, normal, order_of, quoted
from ..config import Config
from ..errors import CheckpointError
from ..fault_tolerance.machine_errors import exists
from ..state_dicts import load_weights
from ..weight_files import BrokenCheckpointError
from .building import build_model
from .phases import Phase
from .run_info import RunInfo, folder_of, stored_options

_logger = logging.getLogger(__name__)

# When a run resumes, options in `DECISIVE` must equal the checkpoint's, and options in `HARMLESS` may differ silently.
DECISIVE = ("model", "model_kwargs", "img_size", "num_classes", "opt", "model_ema", "teacher", "val_fraction")
HARMLESS = (
    "resume", "output", "experiment", "workers", "device", "log_interval", "batch_size", "checkpoint_interval",
    "log_tensorboard", "log_wandb", "cuda_graphs", "augment_on_device",
)  # fmt: skip


def first_phase(config: Config) -> int:
    """Return the index of the first unfinished phase, or of the last phase if the run is finished.

    Raises:
        CheckpointError: As for `find_resumed`.
    """
    if not config.phases:
        return 0
    found = find_resumed(config.resume, folder_of(config))
    if found is None:
        return 0
    _, saved = found
    epochs = len(saved["history"])
    unfinished = [index for index in range(config.num_phases) if epochs < config.epochs_of_phase(index).stop]
    return unfinished[0] if unfinished else config.num_phases - 1


def find_resumed(resume: str | None, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and content of the checkpoint that a run in `folder` resumes from, or None for a new run.

    If `resume` is a path, the checkpoint at the path is used. If `resume` is "auto", the newest readable checkpoint in
    the folder is used, and broken newer checkpoints are renamed to *.broken with a warning. In a process restarted by
    torchrun, a path counts as "auto" if the folder has checkpoints.

    Raises:
        CheckpointError: No checkpoint can be read, or the folder already contains a run and `resume` is not set.
    """
    found = _checkpoints_in(folder)
    resume = _resolve_resume(resume, folder)
    if resume not in (None, "auto"):
        return Path(resume), Checkpoint(resume).training_state()
    if resume is None:
        _check_empty(folder)
    broken: list[Path] = []
    for path in found:
        try:
            saved = Checkpoint(path).training_state()
        except BrokenCheckpointError as error:
            broken.append(path)
            _logger.warning("%s", error)
            continue
        for other in broken:
            aside = other.replace(other.with_suffix(".broken"))
            _logger.warning("resuming from %s, the previous checkpoint; the broken file was renamed to %s", path, aside)
        return path, saved
    if broken:
        raise CheckpointError(f"no checkpoint in {folder} can be read; start another run with --experiment NAME")
    return None


def _check_empty(folder: Path) -> None:
    if any(path.is_file() for path in _checkpoints_in(folder)):
        raise CheckpointError(
            f"{folder} already contains a run: resume with --resume auto, or start another run with --experiment NAME"
        )


def _checkpoints_in(folder: Path) -> list[Path]:
    """Return the paths of the existing last.pt and previous.pt of a run folder, newest first."""
    try:
        return [path for path in (folder / "last.pt", folder / "previous.pt") if exists(path)]
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {error}") from error


def _resolve_resume(resume: str | None, folder: Path) -> str | None:
    """Return "auto" in a process restarted by torchrun if the run folder has checkpoints, otherwise `resume`."""
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return "auto" if is_restarted and _checkpoints_in(folder) else resume


def resumes(phase: Phase, num_classes: int, label_names: Sequence[str]) -> bool:
    """Return whether the run resumes from a checkpoint.

    If `resume` is a path, the checkpoint of other classes or of another model is rejected here, before memory for the
    weights is allocated.

    Raises:
        CheckpointError: The folder already contains a run and `resume` is not set, the checkpoint in `resume` cannot be
            read, the checkpoint's classes differ or its weights do not fit the model, or an option of `DECISIVE`
            differs.
    """
    folder = folder_of(phase.config)
    path = _resolve_resume(phase.config.resume, folder)
    if path is None:
        _check_empty(folder)
    if path is None or path == "auto":
        return bool(_checkpoints_in(folder))
    saved = Checkpoint(path, whole=False).training_state()
    _check_same_classes(saved, label_names, Path(path))
    config = phase.that_wrote(saved).config
    decisive = {name: value for name, value in saved["config"].items() if name in DECISIVE}
    check_same_options(decisive, stored_options(config, num_classes), Path(path))
    with torch.device("meta"):
        model = build_model(config.without_initial_weights(), num_classes)
    load_weights(model, saved["state_dict"], path)
    return True


def _check_same_classes(saved: dict[str, Any], label_names: Sequence[str], path: Path) -> None:
    """Raise a CheckpointError if a run has other classes than the checkpoint from which the run resumes."""
    names = saved["label_names"]
    if not names or not label_names or order_of(names, label_names) == [*range(len(names))]:
        return
    own, current = ({normal(name): name for name in given} for given in (names, label_names))
    changes = {
        "missing": [name for key, name in own.items() if key not in current],
        "new": [name for key, name in current.items() if key not in own],
    }
    listed = "; ".join(f"{kind}: {quoted(changed)}" for kind, changed in changes.items() if changed)
    difference = listed or first_difference(names, label_names, str(path), "this run")
    raise CheckpointError(
        f"the classes differ from those in {path} ({difference}): restore the class folders, or start another run with "
        "--experiment NAME"
    )


def check_same_run(saved: dict[str, Any], run: RunInfo, path: Path) -> None:
    """Check that a checkpoint matches the options, classes and teacher of the run that resumes from the checkpoint.

    Raises:
        CheckpointError: An option of `DECISIVE`, the class names or the teacher's weights differ, or the global batch
            size differs within an epoch. Other differences raise no error, and some are logged.
    """
    _check_same_classes(saved, run.label_names, path)
    config = run.phase.that_wrote(saved).config
    is_within_epoch = bool(saved["progress"].get("losses"))
    is_finished = len(saved["history"]) >= config.total_epochs
    check_same_options(saved["config"], stored_options(config, run.num_classes), path, is_within_epoch, is_finished)

    if saved.get("teacher") != run.teacher:
        raise CheckpointError(
            f"the teacher must have the same weights as in {path}: set the run's --teacher-checkpoint, or start "
            "another run with --experiment NAME"
        )
    if saved["num_images"] not in (0, run.num_images):  # the number is 0 if an old checkpoint does not store it
        _logger.warning("resuming with %d training images, was %d", run.num_images, saved["num_images"])


def check_same_options(
    saved: dict[str, Any], current: dict[str, Any], path: Path, is_within_epoch: bool = False, is_finished: bool = False
) -> None:
    """Compare the options in a checkpoint with the options of the run that resumes from the checkpoint.

    Raises:
        CheckpointError: An option of `DECISIVE` differs, or the global batch size differs within an epoch. Differences
            of other options are only logged, and not even logged for options of `HARMLESS` or if `is_finished`.
    """
    for name in [name for name in saved if saved[name] != current.get(name)]:
        if name in DECISIVE:
            raise CheckpointError(
                f"{name} must be {saved[name]!r}, as in {path}, got {current.get(name)!r}: resume with the same value, "
                "or start another run with --experiment NAME"
            )
        if name == "global_batch_size" and is_within_epoch:
            raise CheckpointError(
                f"{name} must be {saved[name]} to resume within an epoch from {path}, got {current.get(name)}: resume "
                f"with the same value, or start another run from the weights with --pretrained-path {path}"
            )
        if name not in HARMLESS and not is_finished:
            _logger.warning("resuming with %s %r, was %r", name, current.get(name), saved[name])
