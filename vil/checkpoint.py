"""Checkpoints: atomic files that hold a whole run, and weights from files of any origin, with errors that say why."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from timm.models import load_state_dict
from torch import nn

from .config import options_of_checkpoint
from .files import write_atomically

_logger = logging.getLogger(__name__)

VERSION = 3  # 1 knew no place within an epoch, 2 had the optimizer's parameters in another order
# options whose change between an interruption and the resumption changes nothing that is trained
HARMLESS: tuple[str, ...]
HARMLESS = ("resume", "output", "experiment", "workers", "device", "log_interval", "batch_size", "checkpoint_interval")
HARMLESS += ("log_tensorboard", "log_wandb", "cuda_graphs", "augment_on_device")
PARTS: dict[str, type] = {
    "config": dict, "history": list, "progress": dict, "scheduler": dict, "state_dict": dict, "optimizer": dict,
    "num_images": int,
}  # fmt: skip
LONGEST_LABEL = 1000  # characters of the name of a class
PRODUCER = "vision-longhorn"  # whose files of weights alone say their model
READABLE = (OSError, RuntimeError, zipfile.BadZipFile, SafetensorError)  # those that say what is wrong with a file


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or used for this model."""


class BrokenCheckpointError(CheckpointError):
    """A file that cannot be read as a checkpoint: cut off, corrupt, or something else."""


def save_checkpoint(state: dict[str, Any], path: Path, previous: Path | None = None) -> None:
    """Writes `path` atomically: it holds either the new checkpoint or, after any failure, what it held before.

    Args:
        state: The content.
        path: The file.
        previous: The file that was at `path` moves here, once the new one is complete on the disk.

    Raises:
        CheckpointError: It could not be written; the message names the file, the cause and the space left.
    """
    try:
        write_atomically(path, lambda file: torch.save({"version": VERSION, **state}, file), previous)
    except (OSError, RuntimeError) as error:  # PyTorch's writer turns a full disk into a RuntimeError
        free = shutil.disk_usage(path.parent).free / 2**20
        kept = f"the previous {path} is intact" if path.exists() else "there was none before"
        raise CheckpointError(
            f"could not write {path} ({free:.0f} MiB free on its disk): {error}; {kept}. Make room and go on with "
            "--resume auto"
        ) from error


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint of `save_checkpoint`.

    Raises:
        CheckpointError: It is missing, corrupt, or not one of ours, or of another version, or lacks a part.
        ConfigError: It has options that none of ours would have (see `options_of_checkpoint`).
    """
    checkpoint = _guarded(path, lambda: _load_intact(path))
    if not _is_ours(checkpoint):
        raise CheckpointError(f"{path} is not a checkpoint of train_imagenet.py")
    if checkpoint["version"] != VERSION:
        other = "a newer" if checkpoint["version"] > VERSION else "an older"
        raise CheckpointError(
            f"{path} has version {checkpoint['version']}, of {other} train_imagenet.py, and this one goes on from "
            f"version {VERSION} alone: resume with that one, or start another run with --experiment NAME"
        )
    checkpoint.setdefault("num_images", 0)  # first versions did not say it
    for name, kind in PARTS.items():
        part = checkpoint.get(name)
        losses = part.get("losses", []) if name == "progress" and isinstance(part, dict) else []
        if not isinstance(part, kind) or not isinstance(losses, list):
            raise CheckpointError(f"{path} has no {name} as train_imagenet.py writes it, and is nothing to go on from")
    checkpoint["config"] = options_of_checkpoint(checkpoint["config"], path)
    return checkpoint


def saved_config(path: str | Path) -> dict[str, Any]:
    """The options of the run that wrote a checkpoint, as far as it may decide; none if it is not one of ours.

    Raises:
        CheckpointError: The file is missing or corrupt.
        ConfigError: It has options that none of ours would have (see `options_of_checkpoint`).
    """
    checkpoint = _content(path)
    return options_of_checkpoint(checkpoint["config"], path) if _is_ours(checkpoint) else {}


def label_names(path: str | Path) -> list[str]:
    """The names of the classes, by their numbers, of the run that wrote a checkpoint; none where it does not say them.

    Raises:
        CheckpointError: The file is missing or corrupt, or has other than a name for each class (see `label_of`).
        ConfigError: It has options that none of ours would have (see `options_of_checkpoint`).
    """
    checkpoint = _content(path)
    names = checkpoint.get("label_names") if _is_ours(checkpoint) else None
    if names is None:
        return []
    classes = options_of_checkpoint(checkpoint["config"], path).get("num_classes")
    are_labels = isinstance(names, list) and all(isinstance(name, str) and name == label_of(name) for name in names)
    if not are_labels or len(names) != classes:
        raise CheckpointError(
            f"{path} has label_names that are not a name for each of its {classes} classes, of at most {LONGEST_LABEL} "
            "printable characters"
        )
    return names


def label_of(name: str) -> str:
    """The name of a class as a checkpoint holds it, which can be shown in a line wherever it comes from."""
    return "".join(character if character.isprintable() else "?" for character in name[:LONGEST_LABEL])


def labels_of(numbers: dict[str, int]) -> list[str]:
    """The names of classes in the order of their numbers, as a checkpoint holds them."""
    return [label_of(name) for name in sorted(numbers, key=lambda name: numbers[name])]


def says_average_is_best(path: str | Path) -> bool | None:
    """Whether the moving average of a best.pt is better than its model; None if the file does not say.

    Raises:
        CheckpointError: The file is missing or corrupt.
    """
    checkpoint = _content(path)
    best = checkpoint.get("best") if _is_ours(checkpoint) else None
    return None if best is None else best == "state_dict_ema"


def _content(path: str | Path):
    read = _load_metadata if str(path).endswith(".safetensors") else _load
    return _guarded(path, lambda: read(path))


def pack_weights(weights: dict[str, torch.Tensor], options: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """The content of a .safetensors file that says its model.

    Args:
        weights: A state dict, on the CPU.
        options: Those of a run that make the model; `saved_config` finds them in the file.
        metadata: Further entries of the file.
    """
    said = metadata | {"format": "pt", "producer": PRODUCER, "config": json.dumps(options)}
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, said)


def _load_metadata(path: str | Path) -> dict[str, Any]:
    """The options and labels of a file of `pack_weights`, as a checkpoint has them; nothing if it is by others."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("producer") != PRODUCER:
        return {}
    said: dict[str, Any] = {"config": metadata.get("config", ""), "label_names": metadata.get("label_names")}
    for name, text in said.items():
        with suppress(ValueError, RecursionError):  # what is no JSON is for whoever looks at it to refuse
            said[name] = text and json.loads(text)
    return {"version": VERSION, **said}


def _load(path: str | Path):
    # ViM's training script keeps its options beside the weights; nothing else that runs code on loading is let in
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of pickles by others, with advice to file an issue
        _refuse_compression(path)
        return torch.load(path, map_location="cpu", weights_only=True)


def _refuse_compression(path: str | Path) -> None:
    """PyTorch never compresses: a file that is compressed was made to become much more than it is."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            if sum(part.file_size for part in file.infolist()) > Path(path).stat().st_size:
                raise zipfile.BadZipFile("its parts are compressed, as PyTorch's are not")


def _load_intact(path: str | Path):
    """Raises if a byte of the file has changed: PyTorch writes a checksum of each tensor, but does not look at it."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            if broken := file.testzip():
                raise zipfile.BadZipFile(f"the checksum of {broken} is wrong")
    return _load(path)


def _is_ours(checkpoint: Any) -> bool:
    return isinstance(checkpoint, dict) and isinstance(checkpoint.get("version"), int) and "config" in checkpoint


def find_resumed(resume: str | None, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that a run in `folder` goes on from, and what it holds; None for a fresh start.

    That is the newest of the folder's two that can be read; a broken one is put aside as *.broken, with a warning. A
    process that torchrun started again goes on from its folder whatever `resume` says.

    Raises:
        CheckpointError: None can be read, or the folder holds a run and nothing says to resume it.
    """
    found = [path for path in (folder / "last.pt", folder / "previous.pt") if path.exists()]
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if resume not in (None, "auto") and not (restarted and found):
        return Path(resume), read_checkpoint(resume)
    if found and resume is None and not restarted:
        raise CheckpointError(f"{folder} holds a run: --resume auto goes on with it, --experiment NAME starts another")
    broken = []
    for path in found:
        try:
            saved = read_checkpoint(path)
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
    for name in sorted(name for name in saved if saved[name] != current.get(name)):
        if name in ("model", "model_kwargs", "img_size", "num_classes", "opt", "model_ema"):
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


def read_weights(path: str | Path, use_ema: bool | None = None) -> dict[str, Any]:
    """The state dict of a checkpoint of ours, timm's or ViM's, or of a plain one (.pth, .safetensors).

    Args:
        path: The file.
        use_ema: Take the moving average where the file has one. None: what the file says is best, or else the average.

    Raises:
        CheckpointError: The file is missing or corrupt.
    """
    if use_ema is None:
        use_ema = says_average_is_best(path) is not False
    weights = _guarded(path, lambda: load_state_dict(str(path), use_ema=use_ema))
    for name, tensor in weights.items():
        if complaint := _is_unfit(tensor):
            raise CheckpointError(f"{path} is no weights of a model: {name!r} {complaint}")
    return weights


def _is_unfit(tensor: Any) -> str | None:
    """Why a value of a state dict can be no weight, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"is no tensor but {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized:
        return f"is a tensor of {tensor.dtype}, {tensor.layout}"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():  # a stride of 0
        return f"has {tensor.numel()} elements, of which the file does not hold as many"
    if tensor.is_floating_point() and not tensor.isfinite().all():
        return "has values that are not finite"
    return None


def load_weights(model: nn.Module, path: str | Path, use_ema: bool = False) -> None:
    """Loads all of a model's weights from a file of `read_weights`.

    Raises:
        CheckpointError: The file is missing or corrupt, or holds another architecture or number of classes.
    """
    weights = read_weights(path, use_ema)
    try:  # a model without memory of its own takes the file's
        model.load_state_dict(weights, assign=any(parameter.is_meta for parameter in model.parameters()))
    except (RuntimeError, ValueError) as error:
        lines = [line.strip()[:400] for line in str(error).splitlines()]
        raise CheckpointError(f"{path} does not fit the model: " + " ".join(lines[:6])) from error


def _guarded(path: str | Path, read):
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        return read()
    except Exception as error:  # what the readers raise on broken files has no common type
        raise BrokenCheckpointError(
            f"{path} cannot be read as a checkpoint; it may be cut off or corrupt: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """Why a file could not be read, without PyTorch's advice to load it with all of pickle's power."""
    if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it holds {code[1]}, and nothing is loaded that may run code; save its state_dict() alone"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, READABLE) and lines:
        return lines[0][:400]
    return "it holds no tensors as torch.save and safetensors write them"
