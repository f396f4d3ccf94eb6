"""Reading and writing of checkpoints."""

from __future__ import annotations

import argparse
import json
import logging
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .config.values import checked, read_yaml
from .distributed import is_rank0
from .errors import CheckpointError, ConfigError
from .fault_tolerance.files import write_atomically
from .fault_tolerance.machine_errors import cause_of, find_machine_error, remedy_for
from .security.checkpoint_options import (
    check_preprocessing,
    confirm_dataset,
    confirm_teacher,
    confirm_weights,
    options_of_checkpoint,
)
from .security.errors import TorchFileError
from .security.expansion import check_expansion
from .state_dicts import StateDictError, check_weights, find_state_dict, has_ema, without_wrappers
from .text import LONGEST_LABEL, label_of
from .weight_files import VERSION, BrokenCheckpointError, file_of, read_file

_logger = logging.getLogger(__name__)

# entries of a checkpoint that `Checkpoint.training_state` checks, and their types
TRAINING_STATE: dict[str, type] = {
    "config": dict,  # options of the run
    "history": list,  # one row per finished epoch
    "progress": dict,  # losses, gradient norms and times of the unfinished epoch
    "num_images": int,
    "state_dict": dict,
    "scheduler": dict,
}
PREPROCESSING = ("mean", "std", "crop_mode", "crop_pct", "interpolation")  # keys of timm's data config
MOST_CONFIG = 2**23  # maximum number of bytes read from config.json
MOST_OPTIONS = 2**17  # maximum size in bytes of the options stored in a checkpoint


def save_checkpoint(state: dict[str, Any], path: Path, previous: Path | None = None) -> None:
    """Write a checkpoint atomically (see `write_atomically`).

    Args:
        state: Content of the checkpoint.
        path: Checkpoint file.
        previous: New path of the old checkpoint after the new checkpoint is written; None keeps no copy.

    Raises:
        CheckpointError: Writing failed. The message contains the path, the cause and the remedy.
    """
    state = {"version": VERSION, **state}
    try:
        write_atomically(path, lambda file: torch.save(state, file), previous)
    except (OSError, RuntimeError) as error:  # torch.save wraps some OSErrors in a RuntimeError
        cause = find_machine_error(error) or error
        kept = f". The last complete {path.name} is kept" if os.path.exists(path) else ""
        raise CheckpointError(
            f"failed to write {path}: {cause_of(cause)}{kept}. To continue, {remedy_for(cause)}, then resume with "
            "--resume auto"
        ) from error


def options_to_resume(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options stored in a checkpoint, for a run that resumes from the checkpoint.

    Args:
        path: Checkpoint file.
        given: Options from the command line.

    Raises:
        ConfigError: An option is not allowed in a checkpoint, or must be confirmed on the command line.
        CheckpointError: The file is missing or cannot be read.
    """
    return _confirmed(Checkpoint(path, whole=False).options, given, path)


def options_to_restart(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options in config.yaml of a run without a checkpoint, for a run that starts again from epoch 1.

    The options are checked like a checkpoint's options, and include the initial weights.

    Args:
        path: config.yaml of the run folder.
        given: Options from the command line.

    Raises:
        ConfigError: The file cannot be read, or an option is not allowed in a checkpoint or must be confirmed on the
            command line.
    """
    values = read_yaml(path)
    weights = _initial_weights(values, path)
    confirm_weights(weights, given, path)
    return _confirmed(options_of_checkpoint(values, path), given, path) | weights


def _initial_weights(values: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return the options `pretrained` and `pretrained_path` if they are among the `values` of a file."""
    names = ("pretrained", "pretrained_path")
    return checked({name: values[name] for name in names if name in values}, str(path))


def _confirmed(options: dict[str, Any], given: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the options of a run for resuming, after checking which options must be confirmed on the command line.

    The number of classes is left out if the run's images are in class folders. When the run resumes, the names of the
    class folders are compared with the checkpoint, and an error names the classes that differ.
    """
    confirm_dataset(options, given, path)
    confirm_teacher(options, given, path)
    source = {**options, **given}
    if not source.get("dataset") and not source.get("synthetic"):
        options.pop("num_classes", None)
    return options


class Checkpoint:
    """Content of a checkpoint or weights file of this package or of another program, read and checked once.

    Args:
        path: Checkpoint of `vil train`, timm or ViM, plain state dict (.pth, .safetensors), or folder written by
            `vil.export`.
        whole: Whether to read the tensors' values. Otherwise tensors are on the meta device, and no tensors are read
            from a .safetensors file.

    Raises:
        CheckpointError: The file is missing or cannot be read.
        BrokenCheckpointError: The file is corrupt, or contains objects that a checkpoint does not need.
    """

    def __init__(self, path: str | Path, whole: bool = True):
        self.path = Path(path)
        self.content = read_file(path, whole)
        self.is_ours = (
            isinstance(self.content, dict) and isinstance(self.content.get("version"), int) and "config" in self.content
        )

    @classmethod
    def of(cls, source: str | Path | Checkpoint) -> Checkpoint:
        """Return `source` if `source` is a `Checkpoint`, otherwise read the checkpoint at the path `source`."""
        return source if isinstance(source, Checkpoint) else cls(source)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options of the run that wrote the file, filtered to the options that a checkpoint may set.

        For checkpoints of timm's train.py and for model folders of timm, the dict has the options of the model. The
        dict is empty for other files.

        Raises:
            ConfigError: An option has an invalid value (see `options_of_checkpoint`), or the options are too large.
        """
        if not self.is_ours:
            return self._options_of_timm()
        config = self.content["config"]
        try:
            check_expansion(config, MOST_OPTIONS)
        except TorchFileError as error:
            raise ConfigError(f"the options in {self.path} cannot be read: {error}") from error
        return options_of_checkpoint(config, self.path)

    def _options_of_timm(self) -> dict[str, Any]:
        """Return the options of the model from a checkpoint of timm's train.py, or from a config.json of timm.

        The dict is empty if there are no such options, or if a checkpoint must not set them.
        """
        if isinstance(self.content, dict) and isinstance(self.content.get("arch"), str):
            args = self.content.get("args")
            given = vars(args) if isinstance(args, argparse.Namespace) else {}
            found = {name: given.get(name) for name in ("num_classes", "img_size", "model_kwargs")}
            found["model"] = self.content["arch"]
        else:
            config = self._folder_config()
            found = {"model": config.get("architecture"), "model_kwargs": config.get("model_args")}
            found["num_classes"] = config.get("num_classes")
        with suppress(ConfigError, TorchFileError):
            check_expansion(found, MOST_OPTIONS)
            if isinstance(found["model_kwargs"], dict):  # timm also stores sizes among the arguments of the model
                own = {name: found["model_kwargs"].get(name) for name in ("num_classes", "img_size")}
                found |= {name: value for name, value in own.items() if value}
                found["model_kwargs"] = {k: v for k, v in found["model_kwargs"].items() if k not in own}
            return options_of_checkpoint({name: value for name, value in found.items() if value}, self.path)
        return {}

    @cached_property
    def label_names(self) -> list[str]:
        """Class names by class index, or an empty list if the file does not store class names.

        Raises:
            CheckpointError: A name is invalid (see `vil.text.label_of`), or the number of names is not the number of
                classes.
            ConfigError: As for `options`.
        """
        names = self.content.get("label_names") if self.is_ours else None
        if names is None:
            return []

        num_classes = self.options.get("num_classes")
        are_labels = isinstance(names, list) and all(isinstance(name, str) and name == label_of(name) for name in names)
        if not are_labels or len(names) != num_classes:
            raise CheckpointError(
                f"label_names in {self.path} must be one name for each of the {num_classes} classes, with at most "
                f"{LONGEST_LABEL} printable characters each"
            )
        return names

    @cached_property
    def preprocessing(self) -> dict[str, Any]:
        """Image preprocessing stored in a file written by `vil.export`, or in the config.json of a model folder.

        The weights file can store mean, std and crop_mode, and config.json can store all keys of `PREPROCESSING`. The
        values of mean and std are lists of one number for all channels, or of one number per channel.

        Raises:
            CheckpointError: The values cannot be read or are invalid.
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
            raise BrokenCheckpointError(
                f"mean and std in the metadata of {file_of(self.path)} must be JSON; the file may be corrupt"
            ) from error

    def _folder_preprocessing(self) -> dict[str, Any]:
        config = self._folder_config().get("pretrained_cfg", {})
        return {name: config[name] for name in PREPROCESSING if config.get(name) is not None}

    def _folder_config(self) -> dict[str, Any]:
        """Return the content of the config.json that timm also reads from model folders, or {} without such a file.

        Raises:
            BrokenCheckpointError: The file is corrupt.
        """
        path = self.path / "config.json"
        if not path.is_file():
            return {}
        try:
            with open(path, "rb") as file:
                config = json.loads(file.read(MOST_CONFIG))
            if not isinstance(config, dict) or not isinstance(config.get("pretrained_cfg", {}), dict):
                raise ValueError("config.json and its pretrained_cfg must be dicts")
            return config
        except (OSError, ValueError, RecursionError) as error:
            raise BrokenCheckpointError(f"{path} is not a valid config.json of a model: {str(error)[:200]}") from error

    @property
    def ema_is_best(self) -> bool | None:
        """Whether a best.pt marks the EMA weights as better than the raw weights; None for other files."""
        best = self.content.get("best") if self.is_ours else None
        return None if best is None else best == "state_dict_ema"

    def prefers_ema(self, use_ema: bool | None) -> bool:
        """Return whether to use the EMA weights: `use_ema`, or if None, whether best.pt marks EMA weights as better."""
        return bool(self.ema_is_best) if use_ema is None else use_ema

    def note_on_weights(self, use_ema: bool | None) -> str:
        """Return a note for the user if EMA weights are chosen or stored beside raw weights, otherwise ""."""
        if self.prefers_ema(use_ema):
            return "EMA weights"
        return "raw weights (set --use-ema for the EMA weights)" if has_ema(self.content) else ""

    def weights(self, use_ema: bool | None = None) -> dict[str, Any]:
        """Return the model's state dict from the file.

        Args:
            use_ema: Whether to return the EMA weights. None returns the weights that best.pt marks as better, or for
                other files the EMA weights if any.

        Raises:
            CheckpointError: EMA weights are requested but missing, the file has several different state dicts, or a
                value cannot be a weight.
        """
        try:
            found = find_state_dict(self.content, use_ema, self.ema_is_best)
            weights = without_wrappers(found.tensors)
        except StateDictError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        except Exception as error:  # the file is not a dict, or has keys that are not strings
            raise BrokenCheckpointError(
                f"{file_of(self.path)} cannot be read as a checkpoint; the file must contain a dict with string keys"
            ) from error
        check_weights(weights, self.path)
        if found.is_ema and not (use_ema or self.is_ours) and is_rank0():
            _logger.warning("%s: using the EMA weights %s", self.path, found)
        return weights

    def training_state(self) -> dict[str, Any]:
        """Return the content of a checkpoint written by `save_checkpoint`, for resuming a run.

        The entry "initial_weights" contains the options of the weights from which the run started. A resumed run only
        records these options and does not load the weights.

        Raises:
            CheckpointError: The file has another format or version, lacks an entry, or is best.pt, which lacks the
                optimizer state.
            ConfigError: As for `options`.
        """
        self._check_resumable()
        content = {"num_images": 0, **self.content}  # early checkpoints of version 3 do not store num_images
        for name, kind in TRAINING_STATE.items():
            part = content.get(name)
            if not isinstance(part, kind):
                raise CheckpointError(
                    f"{self.path} must have {name} of type {kind.__name__}, got {type(part).__name__}: resume "
                    "from another checkpoint, or start another run with --experiment NAME"
                )
        initial_weights = _initial_weights(content["config"], self.path)
        return content | {
            "config": self.options, "label_names": self.label_names, "initial_weights": initial_weights,
        }  # fmt: skip

    def _check_resumable(self) -> None:
        """Raise a CheckpointError if the file has another format or version, or lacks the optimizer state."""
        path = self.path
        if not self.is_ours or "metadata" in self.content:
            raise CheckpointError(
                f"{path} is not a checkpoint of vil train: resume from the last.pt of a run, or start another run from "
                f"these weights with --pretrained-path {path}"
            )
        version = self.content["version"]
        if version != VERSION:
            other = "a newer" if version > VERSION else "an older"
            raise CheckpointError(
                f"checkpoint version must be {VERSION} to resume, got {version} in {path}: resume with {other} "
                "version of this package, or start another run with --experiment NAME"
            )
        if "best" in self.content and "optimizer" not in self.content:
            raise CheckpointError(
                f"{path} does not contain the optimizer state: resume with --resume {path.with_name('last.pt')}, or "
                f"start another run from these weights with --pretrained-path {path}"
            )


def labels_of(numbers: dict[str, int]) -> list[str]:
    """Return printable class names sorted by class index. `numbers` maps each class name to the class index."""
    return [label_of(name) for name in sorted(numbers, key=lambda name: numbers[name])]
