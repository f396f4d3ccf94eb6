"""Checkpoints: atomic files that hold a whole run, and weights from files of any origin, with errors that say why."""

from __future__ import annotations

import argparse
import json
import logging
import math
import mmap
import os
import re
import shutil
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from timm.models import clean_state_dict
from torch import nn

from .config import options_of_checkpoint
from .files import write_atomically
from .text import LONGEST_LABEL, label_of, printable

_logger = logging.getLogger(__name__)

VERSION = 3  # 1 knew no place within an epoch, 2 had the optimizer's parameters in another order
PARTS: dict[str, type] = {
    "config": dict, "history": list, "progress": dict, "scheduler": dict, "state_dict": dict, "num_images": int,
}  # fmt: skip
LARGEST = 1e6  # of a mean or standard deviation of pixels from 0 to 1, and one over the smallest
MOST_CONFIG = 2**26  # characters of config.json
IN_FOLDER = "model.safetensors"  # the weights in a folder of `vil.export`
PRODUCER = "vision-longhorn"  # whose files of weights alone say their model
# levels of values within values, of which files of any origin have some five, and values of one level
DEEPEST, MOST = 20, 2_000_000
MOST_RESAMPLED = 2**26  # values that resampling for images of another size may add to them
MOST_TENSORS, MOST_DIMENSIONS = 100_000, 64  # of a .safetensors file: PyTorch computes with as many dimensions
# what PyTorch's unpickler allows, and by which a few bytes become any size
GROWING = re.compile(rb"(?:__builtin__|builtins)\n(?:bytearray|set)\n|collections\nCounter\n")
READABLE = (OSError, RuntimeError, zipfile.BadZipFile, SafetensorError)  # those that say what is wrong with a file


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or used for this model; the message is printable, as names in it."""

    def __init__(self, message: str):
        super().__init__(printable(message))


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
    digests = {name: digest(state[name]) for name in ("state_dict", "state_dict_ema") if name in state}
    state = {"version": VERSION, "digest": digests, **state}
    try:
        write_atomically(path, lambda file: torch.save(state, file), previous)
    except (OSError, RuntimeError) as error:  # PyTorch's writer turns a full disk into a RuntimeError
        free = shutil.disk_usage(path.parent).free / 2**20
        kept = f"the previous {path} is intact" if path.exists() else "there was none before"
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"could not write {path} ({free:.0f} MiB free on its disk): {reason}; {kept}. Make room and go on with "
            "--resume auto"
        ) from error


def read_checkpoint(path: str | Path, whole: bool = True) -> dict[str, Any]:
    """Reads a checkpoint of `save_checkpoint`; unless the `whole`, its tensors have shapes alone, on the meta device.

    Raises:
        CheckpointError: It is missing, corrupt, or not one of ours, or of another version, or lacks a part, as best.pt
            does.
        ConfigError: It has options that none of ours would have (see `options_of_checkpoint`).
    """
    checkpoint = _content(path, whole)
    if not _is_ours(checkpoint):
        raise CheckpointError(f"{path} is not a checkpoint of train_imagenet.py")
    if checkpoint["version"] != VERSION:
        other = "a newer" if checkpoint["version"] > VERSION else "an older"
        raise CheckpointError(
            f"{path} has version {checkpoint['version']}, of {other} train_imagenet.py, and this one goes on from "
            f"version {VERSION} alone: resume with that one, or start another run with --experiment NAME"
        )
    checkpoint.setdefault("num_images", 0)  # first versions did not say it
    if "best" in checkpoint and "optimizer" not in checkpoint:
        raise CheckpointError(
            f"{path} holds weights without the optimizer's state: --resume {Path(path).with_name('last.pt')} goes on "
            f"with the run, --pretrained-path {path} starts another one from its weights"
        )
    for name, kind in PARTS.items():
        part = checkpoint.get(name)
        losses = part.get("losses", []) if isinstance(part, dict) else []
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
    checkpoint = _content(path, whole=False)
    return options_of_checkpoint(checkpoint["config"], path) if _is_ours(checkpoint) else {}


def label_names(path: str | Path) -> list[str]:
    """The names of the classes, by their numbers, of the run that wrote a checkpoint; none where it does not say them.

    Raises:
        CheckpointError: The file is missing or corrupt, or has other than a name for each class (`vil.text.label_of`).
        ConfigError: It has options that none of ours would have (see `options_of_checkpoint`).
    """
    return labels_in(_content(path, whole=False), path)


def labels_in(checkpoint: Any, path: str | Path) -> list[str]:
    """The same of what `read_checkpoint` has read."""
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


def labels_of(numbers: dict[str, int]) -> list[str]:
    """The names of classes in the order of their numbers, as a checkpoint holds them."""
    return [label_of(name) for name in sorted(numbers, key=lambda name: numbers[name])]


def preprocessing(path: str | Path) -> dict[str, Any]:
    """How images are prepared, as far as weights of `vil.export`, or the config.json in their folder, say it.

    Returns:
        Some of timm's mean, std (of 0 to 1, a number for each channel), crop_mode, crop_pct and interpolation.

    Raises:
        CheckpointError: A file is missing or corrupt, or says what is no preprocessing.
        ConfigError: crop_pct or interpolation is none that a checkpoint may have (see `options_of_checkpoint`).
    """
    content = _content(path, whole=False)
    metadata = content.get("metadata", {}) if _is_ours(content) else {}
    with _reading(file_of(path)):
        said = {name: json.loads(metadata[name]) for name in ("mean", "std") if name in metadata}
        said |= {name: metadata[name] for name in ("crop_mode",) if name in metadata}
    if (beside := Path(path) / "config.json").is_file():  # what timm reads of a folder
        try:
            with open(beside, encoding="utf-8") as file:
                own = json.loads(file.read(MOST_CONFIG)).get("pretrained_cfg", {})
            names = "mean", "std", "crop_mode", "crop_pct", "interpolation"
            said |= {name: own[name] for name in names if own.get(name) is not None}
        except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
            raise BrokenCheckpointError(f"{beside} is no table of a model: {str(error)[:200]}") from error
    check_preprocessing(said, path, (saved_config(path).get("model_kwargs") or {}).get("in_chans", 3))
    return said


def check_preprocessing(said: dict[str, Any], path: str | Path, channels: int = 3) -> None:
    """Raises an error as `preprocessing` does, unless images of so many channels can be prepared as a file says."""
    for name, least in {"mean": -LARGEST, "std": 1 / LARGEST}.items():
        values = said.get(name, [0.5])
        numbers = isinstance(values, list) and all(type(v) in (int, float) and least <= v <= LARGEST for v in values)
        if not numbers or len(values) not in (1, channels):
            raise CheckpointError(f"{path} has {name} {str(values)[:100]}, which is no number for each channel")
    if said.get("crop_mode", "center") not in ("center", "squash", "border"):
        raise CheckpointError(
            f"{path} has crop_mode {str(said['crop_mode'])[:100]}, and may have center, squash or border"
        )
    options_of_checkpoint({name: said[name] for name in ("crop_pct", "interpolation") if name in said}, path)


def says_average_is_best(path: str | Path) -> bool | None:
    """Whether the moving average of a best.pt is better than its model; None if the file does not say.

    Raises:
        CheckpointError: The file is missing or corrupt.
    """
    return _average_is_best(_content(path, whole=False))


def _average_is_best(checkpoint: Any) -> bool | None:
    best = checkpoint.get("best") if _is_ours(checkpoint) else None
    return None if best is None else best == "state_dict_ema"


def pack_weights(weights: dict[str, torch.Tensor], options: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """The content of a .safetensors file that says its model.

    Args:
        weights: A state dict, on the CPU.
        options: Those of a run that make the model; `saved_config` finds them in the file.
        metadata: Further entries of the file.
    """
    said = metadata | {"format": "pt", "producer": PRODUCER, "config": json.dumps(options)}
    said["digest"] = digest(weights, said)
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, said)


def digest(weights: Any, said: Any = None) -> str:
    """A checksum of tensors by their names, and of texts, which changes with any bit of them; 100 MB take 0.05 s.

    It is CRC-32, which is against accidents: whoever changes a file on purpose can write another.
    """
    total = zlib.crc32(json.dumps(said or {}, sort_keys=True).encode())
    for name, value in sorted(weights.items() if isinstance(weights, dict) else (), key=lambda item: str(item[0])):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            total = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), total)
            total = zlib.crc32(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _content(path: str | Path, whole: bool) -> Any:
    """What a file holds, once it has been judged: the one place where files of any origin are read.

    Args:
        path: The file.
        whole: Otherwise tensors have shapes alone, on the meta device, which takes neither time nor memory.

    Raises:
        CheckpointError: It is missing, corrupt, or made to become much more than it is.
    """
    path = file_of(path)
    with _reading(path):
        content = _read_safetensors(path, whole) if str(path).endswith(".safetensors") else _read_pickled(path, whole)
        _refuse_growth(content, Path(path).stat().st_size)
        digests = content.get("digest") if whole and _is_ours(content) else None
        for name, said in (digests or {}).items():
            if name in content and digest(content[name], content.get("metadata")) != said:
                raise zipfile.BadZipFile(f"the checksum of its {name} is wrong")
    return content


def file_of(path: str | Path) -> Path:
    """The file that is meant: of a folder of `vil.export`, its weights."""
    return Path(path) / IN_FOLDER if Path(path).is_dir() else Path(path)


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    if not (path := Path(path)).is_file():
        best = path.with_name("best.pt")  # of a folder that is a run's
        is_of_run = path.name == IN_FOLDER and best.is_file()
        raise CheckpointError(f"there is no checkpoint {path}" + f": give {best}, to --resume last.pt" * is_of_run)
    if path.suffix in (".onnx", ".pt2"):
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint; it is an exported program: export a .safetensors, or an .onnx for "
            "vil.predict"
        )
    try:
        yield
    except Exception as error:  # what the readers raise on broken files has no common type
        raise BrokenCheckpointError(
            f"{path} cannot be read as a checkpoint; it may be cut off or corrupt: {_reason(error)}"
        ) from error


def _read_safetensors(path: str | Path, whole: bool) -> dict[str, Any]:
    """Its weights as a checkpoint has them; if it is a file of `pack_weights`, with its options and labels."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        names = file.keys() if whole else ()
        if len(names) > MOST_TENSORS or any(len(file.get_slice(name).get_shape()) > MOST_DIMENSIONS for name in names):
            raise zipfile.BadZipFile(f"it has {len(names)} tensors, or one of more than {MOST_DIMENSIONS} dimensions")
        content: dict[str, Any] = {"state_dict": {name: file.get_tensor(name) for name in names}}
    if metadata.get("producer") != PRODUCER:
        return content
    if "digest" in metadata:
        content |= {"digest": {"state_dict": metadata.pop("digest")}, "metadata": metadata}
    said: dict[str, Any] = {name: metadata.get(name) for name in ("config", "label_names")}
    for name, text in said.items():
        with suppress(ValueError, RecursionError):  # what is no JSON is for whoever looks at it to refuse
            said[name] = text and json.loads(text)
    return {"version": VERSION, **content, **said}


def _read_pickled(path: str | Path, whole: bool) -> Any:
    """A file of `torch.save`, by PyTorch's unpickler of weights, which runs no code."""
    with open(path, "rb") as file:
        if file.read(4) == b"PK\3\4":  # so does PyTorch tell an archive, whatever its end looks like
            _judge_archive(file, whole)
        elif GROWING.search(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)):
            raise zipfile.BadZipFile("it holds more than tensors, lists and tables")
    # ViM's training script keeps its options beside the weights; nothing else that runs code on loading is let in
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of pickles by others, with advice to file an issue
        return torch.load(path, map_location="cpu" if whole else "meta", weights_only=True)


def _judge_archive(file: BinaryIO, whole: bool) -> None:
    """Raises an error unless all that PyTorch will read of an archive is stored as it is, and its checksums are right.

    PyTorch writes a checksum of each part, but does not look at it, and it never compresses.
    """
    size = file.seek(0, os.SEEK_END)
    if (place := _place_of_directory(file, size)) is None:
        raise zipfile.BadZipFile("its list of parts is not at its end, as PyTorch's are")
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if archive.start_dir != place:
            raise zipfile.BadZipFile("its list of parts is not where its end says")
        if sum(part.file_size for part in parts) > size:
            raise zipfile.BadZipFile("its parts are compressed, as PyTorch's are not")
        for part in parts:
            if not part.CRC:  # torch.serialization.set_crc32_options(False) writes none
                del part.CRC
            if "/data/" not in part.filename:
                content = archive.read(part)
                if part.filename.endswith("/byteorder") and content != sys.byteorder.encode():
                    raise zipfile.BadZipFile("its numbers are in the byte order of other machines")
                if GROWING.search(content):
                    raise zipfile.BadZipFile("it holds more than tensors, lists and tables")
            elif whole:
                with archive.open(part) as values:
                    while values.read(2**20):
                        pass


def _place_of_directory(file: BinaryIO, size: int) -> int | None:
    """Where an archive's list of parts is for every reader: its end says so, and nothing comes after that."""
    file.seek(max(0, size - 98))
    end = file.read().rjust(98)
    large, locator, small = struct.unpack("<4s44xQ", end[:56]), struct.unpack("<4s4xQ4x", end[56:76]), end[76:]
    if small[:4] != b"PK\5\6":  # a comment comes after it, which could hold another end
        return None
    if locator[0] == b"PK\6\7":  # which makes the first 56 bytes its beginning
        return large[1] if (large[0], locator[1]) == (b"PK\6\6", size - 98) else None
    return struct.unpack("<16xI2x", small)[0]


def _refuse_growth(content: Any, size: int) -> None:
    """Raises an error if values that refer to one another, or tensors, are much more than a file of this size holds."""
    claimed, level = 0, [content]
    for _ in range(DEEPEST):
        claimed += sum(value.numel() * value.element_size() for value in level if isinstance(value, torch.Tensor))
        if claimed > 2 * size:  # twice where two names share a tensor
            raise zipfile.BadZipFile(f"its tensors have {claimed} bytes or more, and the file {size}")
        if len(level) == MOST:
            raise zipfile.BadZipFile(f"it has {MOST} values, and is no checkpoint")
        level = list(islice(chain.from_iterable(map(_inside, level)), MOST))
    if level:
        raise zipfile.BadZipFile(f"its values lie {DEEPEST} deep within one another, or deeper")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, (dict, argparse.Namespace)):
        return (value if isinstance(value, dict) else vars(value)).values()
    return value if isinstance(value, (list, tuple)) else ()


def _is_ours(checkpoint: Any) -> bool:
    return isinstance(checkpoint, dict) and isinstance(checkpoint.get("version"), int) and "config" in checkpoint


def read_weights(path: str | Path, use_ema: bool | None = None) -> dict[str, Any]:
    """The state dict of a checkpoint of ours, timm's or ViM's, or of a plain one (.pth, .safetensors).

    Args:
        path: The file.
        use_ema: Take the moving average. None: what the file says is best, or else the average where it has one.

    Raises:
        CheckpointError: The file is missing or corrupt, or has no average.
    """
    content = _content(path, whole=True)
    with _reading(file_of(path)):
        averages = [n for n in ("state_dict_ema", "model_ema") if isinstance(content.get(n), dict)]
        wanted = _average_is_best(content) is not False if use_ema is None else use_ema
        names = averages * wanted + ["state_dict", "model"]
        weights = clean_state_dict(next((content[n] for n in names if isinstance(content.get(n), dict)), content))
    if use_ema and not averages:
        raise CheckpointError(f"{path} has no moving average of its weights")
    for name, tensor in weights.items():
        if complaint := _is_unfit(tensor):
            raise CheckpointError(f"{path} is no weights of a model: {name!r} {complaint}")
    return weights


def _is_unfit(tensor: Any) -> str | None:
    """Why a value of a state dict can be no weight, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"is no tensor but {type(tensor).__name__}"
    if tensor.is_nested or tensor.is_meta:
        return "is a tensor that is nested or has no values"
    tiny = tensor.is_floating_point() and tensor.element_size() == 1
    if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized or tiny:
        return f"is a tensor of {tensor.dtype}, {tensor.layout}"
    if tensor.is_floating_point() and not tensor.float().isfinite().all():  # as models compute with it
        return "has values that are not finite"
    return None


def load_weights(model: nn.Module, weights: dict[str, Any], path: str | Path) -> None:
    """Loads all of a model's weights from those of `read_weights`.

    Raises:
        CheckpointError: They are of another architecture or number of classes than the model.
    """
    try:
        wanted, given = (sum(math.prod(tensor.shape) for tensor in w.values()) for w in (model.state_dict(), weights))
        if wanted > 4 * given + MOST_RESAMPLED:
            raise ValueError(f"it has {wanted} values, and the file {given}")
        # a model without memory of its own takes the file's
        model.load_state_dict(fitted(weights, model), assign=any(p.is_meta for p in model.parameters()))
    except Exception as error:  # of timm's filters, and of names that are no text
        lines = [line.strip()[:400] for line in str(error).splitlines()]
        raise CheckpointError(f"{path} does not fit the model: " + " ".join(lines[:6])) from error


def fitted(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Weights as they are if they have the model's shapes, or as timm's filter for it fits them to these."""
    fit = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if fit is None or {n: w.shape for n, w in weights.items()} == {n: t.shape for n, t in model.state_dict().items()}:
        return weights
    return fit(dict(weights), model)


def _reason(error: Exception) -> str:
    """Why a file could not be read, without PyTorch's advice to load it with all of pickle's power."""
    if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it holds {code[1]}, and nothing is loaded that may run code; save its state_dict() alone"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "TorchScript" in str(error):
        return "it is a TorchScript program, and nothing is loaded that may run code; save its state_dict() alone"
    if isinstance(error, READABLE) and lines and "weights_only" not in lines[0]:
        return lines[0][:400]
    return "it holds no tensors as torch.save and safetensors write them"
