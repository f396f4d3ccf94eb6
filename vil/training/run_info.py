"""Run information that checkpoints store besides the training state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config, ConfigError
from ..security.checkpoint_options import MODEL_KWARGS, options_of_checkpoint
from ..text import nearest, shown
from .data import Splits
from .phases import Phase
from .teacher import Teacher


def folder_of(config: Config) -> Path:
    """Return the run folder, `output`/`experiment`."""
    return Path(config.output) / str(config.experiment)


@dataclass(frozen=True)
class RunInfo:
    """Information about a run that checkpoints store besides the training state.

    Attributes:
        phase: Current phase, whose `config` has the options in use.
        options: Options in the form stored in checkpoints. The options `pretrained` and `pretrained_path` of a resumed
            run are those of the checkpoint.
        num_classes: Number of classes.
        label_names: Class names by index; empty if the dataset does not store names.
        num_images: Number of training images.
        teacher: Hash of the teacher's weights; None without a teacher.
    """

    phase: Phase
    options: dict[str, Any]
    num_classes: int
    label_names: list[str]
    num_images: int
    teacher: str | None

    @classmethod
    def of(cls, phase: Phase, options: dict[str, Any], splits: Splits, teacher: Teacher | None) -> RunInfo:
        return cls(
            phase=phase,
            options=options,
            num_classes=splits.num_classes,
            label_names=splits.label_names,
            num_images=splits.num_images,
            teacher=teacher.digest if teacher else None,
        )

    @property
    def folder(self) -> Path:
        return folder_of(self.phase.config)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint entries that describe the run."""
        return {
            "arch": self.phase.config.model,
            "config": self.options,
            "label_names": self.label_names or None,
            "num_images": self.num_images,
            "teacher": self.teacher,
        }


def stored_options(config: Config, num_classes: int) -> dict[str, Any]:
    """Return the options of a run in the form stored in checkpoints.

    Raises:
        ConfigError: A model argument is unknown, or the value of an option is not allowed in a checkpoint.
    """
    for name in config.model_kwargs or {}:
        if name not in MODEL_KWARGS:
            remedy = nearest(name, MODEL_KWARGS) or f"; training supports {', '.join(MODEL_KWARGS)}"
            raise ConfigError(f"unknown model argument {shown(name)}{remedy}")
    # `resume` is not stored, so that a run with the stored options is a new run
    options = dataclasses.asdict(config) | {"num_classes": num_classes, "resume": None}
    # The stored path is absolute, because the checkpoint may be loaded from another working directory.
    if config.data_dir and Path(config.data_dir).is_dir():
        options["data_dir"] = str(Path(config.data_dir).resolve())
    try:
        options_of_checkpoint(options, folder_of(config) / "last.pt")
    except ConfigError as error:
        raise ConfigError(f"checkpoints with these options could not be loaded again: {error}") from error
    return options
