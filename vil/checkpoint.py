"""Checkpoints: what the files of a run hold, and how they are written and read."""

from __future__ import annotations

import json
import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .distributed import is_rank0
from .errors import CheckpointError, ConfigError
from .fault_tolerance.files import write_atomically
from .fault_tolerance.machine_errors import cause_of, find_machine_error, remedy_for
from .security.checkpoint_options import check_preprocessing, confirm_dataset, confirm_teacher, options_of_checkpoint
from .security.errors import TorchFileError
from .security.expansion import check_expansion
from .state_dicts import StateDictError, check_weights, find_state_dict, without_wrappers
from .text import LONGEST_LABEL, label_of
from .weight_files import VERSION, BrokenCheckpointError, file_of, read_file

_logger = logging.getLogger(__name__)

# parts of a checkpoint that training reads, and their types
TRAINING_STATE: dict[str, type] = {
    "config": dict,  # options of the run
    "history": list,  # a row for each epoch
    "progress": dict,  # position within an epoch
    "num_images": int,
    "state_dict": dict,
    "scheduler": dict,
}
PREPROCESSING = ("mean", "std", "crop_mode", "crop_pct", "interpolation")  # timm's names
MOST_CONFIG = 2**23  # bytes of config.json
MOST_OPTIONS = 2**17  # bytes of the values in the options of a run


def save_checkpoint(state: dict[str, Any], path: Path, previous: Path | None = None) -> None:
    """Write `path` atomically: it holds the old or the new checkpoint after any failure.

    Args:
        state: The content.
        path: The file.
        previous: Name that the old file gets once the new one is complete on the disk.

    Raises:
        CheckpointError: Writing failed. The message names the file, the cause and the remedy.
    """
    state = {"version": VERSION, **state}
    try:
        write_atomically(path, lambda file: torch.save(state, file), previous)
    except (OSError, RuntimeError) as error:  # PyTorch's writer turns an OSError into a RuntimeError
        cause = find_machine_error(error) or error
        kept = f". The last complete {path.name} is kept" if os.path.exists(path) else ""
        raise CheckpointError(
            f"could not write {path}: {cause_of(cause)}{kept}. To continue, {remedy_for(cause)}, then resume with "
            "--resume auto"
        ) from error


def options_to_resume(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a checkpoint for a run that resumes from it.

    Args:
        path: The checkpoint.
        given: Options of the command line.

    Raises:
        ConfigError: An option is not allowed in a checkpoint, or must be confirmed on the command line.
    """
    options = Checkpoint(path, whole=False).options
    confirm_dataset(options, given, path)
    confirm_teacher(options, given, path)
    return options


class Checkpoint:
    """What a file of weights holds, whoever wrote the file. The file is opened, checked and read once.

    Args:
        path: A checkpoint of train_imagenet.py, timm or ViM, a plain state dict (.pth, .safetensors), or a folder of
            `vil.export`.
        whole: Read the tensors' values. Otherwise tensors are on the meta device, and a .safetensors file has none.

    Raises:
        CheckpointError: The file is missing or cannot be read.
        BrokenCheckpointError: The file is damaged, or holds what weights do not need.
    """

    def __init__(self, path: str | Path, whole: bool = True):
        self.path = Path(path)
        self.content = read_file(path, whole)
        self.is_ours = (
            isinstance(self.content, dict) and isinstance(self.content.get("version"), int) and "config" in self.content
        )

    @classmethod
    def of(cls, source: str | Path | Checkpoint) -> Checkpoint:
        """Return the checkpoint itself if it has been read already, otherwise read the file."""
        return source if isinstance(source, Checkpoint) else cls(source)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of the run that wrote the file, without those that a checkpoint may not decide.

        Files of other programs have none.

        Raises:
            ConfigError: An option has a value that no run of ours has (see `options_of_checkpoint`).
        """
        if not self.is_ours:
            return {}
        config = self.content["config"]
        try:
            check_expansion(config, MOST_OPTIONS)
        except TorchFileError as error:
            raise ConfigError(f"the options in {self.path} cannot be read: {error}") from error
        return options_of_checkpoint(config, self.path)

    @cached_property
    def label_names(self) -> list[str]:
        """The names of the classes by class index, or an empty list if the file does not store them.

        Raises:
            CheckpointError: There is not one name for each class (see `vil.text.label_of`).
            ConfigError: See `options`.
        """
        names = self.content.get("label_names") if self.is_ours else None
        if names is None:
            return []

        num_classes = self.options.get("num_classes")
        are_labels = isinstance(names, list) and all(isinstance(name, str) and name == label_of(name) for name in names)
        if not are_labels or len(names) != num_classes:
            raise CheckpointError(
                f"{self.path} has label_names that are not a name for each of its {num_classes} classes, of at most "
                f"{LONGEST_LABEL} printable characters"
            )
        return names

    @cached_property
    def preprocessing(self) -> dict[str, Any]:
        """The preprocessing of images that a file of `vil.export`, or the config.json in its folder, specifies.

        The dict has those of timm's names `PREPROCESSING` that are specified. mean and std are lists of one number for
        each channel.

        Raises:
            CheckpointError: The values cannot be read or are not preprocessing.
            ConfigError: crop_pct or interpolation is not allowed in a checkpoint (see `options_of_checkpoint`).
        """
        found = self._metadata_preprocessing() | self._folder_preprocessing()
        channels = (self.options.get("model_kwargs") or {}).get("in_chans", 3)
        check_preprocessing(found, self.path, channels)
        return found

    def _metadata_preprocessing(self) -> dict[str, Any]:
        metadata = self.content.get("metadata", {}) if self.is_ours else {}
        try:
            found = {name: json.loads(metadata[name]) for name in ("mean", "std") if name in metadata}
            if "crop_mode" in metadata:
                found["crop_mode"] = metadata["crop_mode"]
            return found
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise BrokenCheckpointError.because(file_of(self.path), error) from error

    def _folder_preprocessing(self) -> dict[str, Any]:
        path = self.path / "config.json"  # timm reads this file of a folder
        if not path.is_file():
            return {}
        try:
            with open(path, "rb") as file:
                config = json.loads(file.read(MOST_CONFIG)).get("pretrained_cfg", {})
            return {name: config[name] for name in PREPROCESSING if config.get(name) is not None}
        except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
            raise BrokenCheckpointError(f"{path} is not a model's config.json: {str(error)[:200]}") from error

    @property
    def ema_is_best(self) -> bool | None:
        """Whether a best.pt stores that the EMA weights are better than the model's; None if the file does not."""
        best = self.content.get("best") if self.is_ours else None
        return None if best is None else best == "state_dict_ema"

    def weights(self, use_ema: bool | None = None) -> dict[str, Any]:
        """Return the state dict of the file.

        Args:
            use_ema: Return the EMA weights. None: Return the weights that the file stores as the best, otherwise the
                EMA weights if any.

        Raises:
            CheckpointError: The file has no EMA weights, several state dicts, or something that is not a weight.
        """
        try:
            found = find_state_dict(self.content, use_ema, self.ema_is_best)
            weights = without_wrappers(found.tensors)
        except StateDictError as error:
            raise CheckpointError(f"{self.path} {error}") from error
        except Exception as error:  # names that are not text, or a file that is not a dict
            raise BrokenCheckpointError.because(file_of(self.path), error) from error
        check_weights(weights, self.path)
        if found.is_ema and not (use_ema or self.is_ours) and is_rank0():
            _logger.warning("%s: using the EMA weights %s", self.path, found)
        return weights

    def training_state(self) -> dict[str, Any]:
        """Return the content of a file of `save_checkpoint`, from which a run can be resumed.

        Raises:
            CheckpointError: The file has another format or version, or lacks a part, as best.pt does.
            ConfigError: See `options`.
        """
        self._check_resumable()
        content = {"num_images": 0, **self.content}  # first versions did not store num_images
        for name, kind in TRAINING_STATE.items():
            part = content.get(name)
            if not isinstance(part, kind):
                raise CheckpointError(
                    f"{self.path} must have {name} of type {kind.__name__}, got {type(part).__name__}: resume "
                    "from another checkpoint, or start another run with --experiment NAME"
                )
        return content | {"config": self.options, "label_names": self.label_names}

    def _check_resumable(self) -> None:
        """Raise a CheckpointError if the file is not a checkpoint of this version with the optimizer's state."""
        path = self.path
        if not self.is_ours:
            raise CheckpointError(f"{path} is not a checkpoint of train_imagenet.py")
        version = self.content["version"]
        if version != VERSION:
            other = "a newer" if version > VERSION else "an older"
            raise CheckpointError(
                f"{path} has version {version}, of {other} train_imagenet.py, but this one can only resume "
                f"version {VERSION}: resume with that one, or start another run with --experiment NAME"
            )
        if "best" in self.content and "optimizer" not in self.content:
            raise CheckpointError(
                f"{path} holds weights without the optimizer's state: --resume {path.with_name('last.pt')} resumes "
                f"the run, --pretrained-path {path} starts another run from its weights"
            )


def labels_of(numbers: dict[str, int]) -> list[str]:
    """Return the names of classes in the order of their indices, as a checkpoint stores them."""
    return [label_of(name) for name in sorted(numbers, key=lambda name: numbers[name])]
