"""Checkpoints: files that hold a whole run, written atomically, and weights from files of any origin."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import zipfile
import zlib
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from .config import options_of_checkpoint
from .distributed import is_rank0
from .errors import CheckpointError, ConfigError
from .fault_tolerance.files import write_atomically
from .fault_tolerance.machine_errors import cause_of, find_machine_error, is_machine_error, remedy_for, retry
from .security import unpickler
from .state_dicts import StateDictError, find_state_dict, parts_of, within_own_prefix, without_wrappers
from .text import LONGEST_LABEL, label_of

_logger = logging.getLogger(__name__)

VERSION = 3  # version 1 stored no position within an epoch, 2 had another order of the optimizer's parameters
PARTS: dict[str, type] = {
    "config": dict, "history": list, "progress": dict, "scheduler": dict, "state_dict": dict, "num_images": int,
}  # fmt: skip
LARGEST = 1e6  # largest mean or standard deviation of pixels in 0..1; its reciprocal is the smallest standard deviation
MOST_CONFIG = 2**23  # bytes of config.json
MOST_HEADER = 2**24  # bytes of the header of a .safetensors file, which may take 30 times as much memory
MOST_OPTIONS = 10_000  # maximum number of values in the options of a run
IN_FOLDER = "model.safetensors"  # the weights in a folder of `vil.export`
PRODUCER = "vision-longhorn"  # in the metadata of .safetensors files that name their model
MOST_RESAMPLED = 2**26  # maximum number of values that resampling to another image size may add
MOST_TENSORS = 100_000  # of a .safetensors file
# errors whose messages explain the problem
READABLE = (zipfile.BadZipFile, SafetensorError, unpickler.TorchFileError)


class BrokenCheckpointError(CheckpointError):
    """A file cannot be read as a checkpoint because it is truncated, corrupt, or of another format."""


def save_checkpoint(state: dict[str, Any], path: Path, previous: Path | None = None) -> None:
    """Write `path` atomically: it holds the old or the new checkpoint after any failure.

    Args:
        state: The content.
        path: The file.
        previous: Name that the old file gets once the new one is complete on the disk.

    Raises:
        CheckpointError: Writing failed. The message names the file, the cause and the remedy.
    """
    digests = {name: digest(state[name]) for name in ("state_dict", "state_dict_ema") if name in state}
    state = {"version": VERSION, "digest": digests, **state}
    try:
        write_atomically(path, lambda file: torch.save(state, file), previous)
    except (OSError, RuntimeError) as error:  # PyTorch's writer turns an OSError into a RuntimeError
        cause = find_machine_error(error) or error
        kept = f". The last complete {path.name} is kept" if os.path.exists(path) else ""
        raise CheckpointError(
            f"could not write {path}: {cause_of(cause)}{kept}. To continue, {remedy_for(cause)}, then resume with "
            "--resume auto"
        ) from error


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
        self.path, self.content = Path(path), _content(path, whole)

    @classmethod
    def of(cls, source: str | Path | Checkpoint) -> Checkpoint:
        """Return the checkpoint itself if it has been read already, otherwise read the file."""
        return source if isinstance(source, Checkpoint) else cls(source)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_ours(self) -> bool:
        return _is_ours(self.content)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of the run that wrote the file, as far as a checkpoint may decide them. Other files have none.

        Raises:
            ConfigError: An option has a value that no run of ours has (see `options_of_checkpoint`).
        """
        if not self.is_ours:
            return {}
        try:
            unpickler.refuse_growth(config := self.content["config"], MOST_OPTIONS)
        except unpickler.TorchFileError as error:
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
        classes = self.options.get("num_classes")
        are_labels = isinstance(names, list) and all(isinstance(name, str) and name == label_of(name) for name in names)
        if not are_labels or len(names) != classes:
            raise CheckpointError(
                f"{self.path} has label_names that are not a name for each of its {classes} classes, of at most "
                f"{LONGEST_LABEL} printable characters"
            )
        return names

    @cached_property
    def preprocessing(self) -> dict[str, Any]:
        """How images are prepared, as far as a file of `vil.export` or the config.json in its folder specifies it.

        The dict has some of timm's mean and std (a list of one number for each channel), crop_mode, crop_pct and
        interpolation.

        Raises:
            CheckpointError: The values cannot be read or are not preprocessing.
            ConfigError: crop_pct or interpolation is not allowed in a checkpoint (see `options_of_checkpoint`).
        """
        metadata = self.content.get("metadata", {}) if self.is_ours else {}
        try:
            found = {name: json.loads(metadata[name]) for name in ("mean", "std") if name in metadata}
            found |= {name: metadata[name] for name in ("crop_mode",) if name in metadata}
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            raise _broken(file_of(self.path), error) from error
        if (beside := self.path / "config.json").is_file():  # timm reads this file of a folder
            try:
                with open(beside, "rb") as file:
                    own = json.loads(file.read(MOST_CONFIG)).get("pretrained_cfg", {})
                names = "mean", "std", "crop_mode", "crop_pct", "interpolation"
                found |= {name: own[name] for name in names if own.get(name) is not None}
            except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
                raise BrokenCheckpointError(f"{beside} is not a model's config.json: {str(error)[:200]}") from error
        check_preprocessing(found, self.path, (self.options.get("model_kwargs") or {}).get("in_chans", 3))
        return found

    @property
    def average_is_best(self) -> bool | None:
        """Whether the EMA weights of a best.pt are better than its model's weights; None if the file does not say."""
        best = self.content.get("best") if self.is_ours else None
        return None if best is None else best == "state_dict_ema"

    def weights(self, use_ema: bool | None = None) -> dict[str, Any]:
        """Return the state dict of the file.

        Args:
            use_ema: Take the EMA weights. None: Take what the file calls the best, otherwise its EMA weights if any.

        Raises:
            CheckpointError: The file has no EMA weights, several state dicts, or something that is not a weight.
        """
        try:
            found = find_state_dict(self.content, use_ema, self.average_is_best)
            weights = without_wrappers(found.tensors)
        except StateDictError as error:
            raise CheckpointError(f"{self.path} {error}") from error
        except Exception as error:  # names that are not text, or a file that is not a dict
            raise _broken(file_of(self.path), error) from error
        if found.averaged and not (use_ema or self.is_ours) and is_rank0():
            _logger.warning("%s: using the EMA weights %s", self.path, found)
        for name, tensor in weights.items():
            if complaint := _is_unfit(tensor):
                raise CheckpointError(f"{self.path} does not hold weights of a model: {name!r} {complaint}")
        return weights

    def run(self) -> dict[str, Any]:
        """Return the content of a file of `save_checkpoint`, from which a run can be resumed.

        Raises:
            CheckpointError: The file has another format or version, or lacks a part, as best.pt does.
            ConfigError: See `options`.
        """
        content, path = self.content, self.path
        if not self.is_ours:
            raise CheckpointError(f"{path} is not a checkpoint of train_imagenet.py")
        if content["version"] != VERSION:
            other = "a newer" if content["version"] > VERSION else "an older"
            raise CheckpointError(
                f"{path} has version {content['version']}, of {other} train_imagenet.py, but this one can only resume "
                f"version {VERSION}: resume with that one, or start another run with --experiment NAME"
            )
        if "best" in content and "optimizer" not in content:
            raise CheckpointError(
                f"{path} holds weights without the optimizer's state: --resume {path.with_name('last.pt')} resumes "
                f"the run, --pretrained-path {path} starts another run from its weights"
            )
        content = {"num_images": 0, **content}  # first versions did not store it
        for name, kind in PARTS.items():
            part = content.get(name)
            losses = part.get("losses", []) if isinstance(part, dict) else []
            if not isinstance(part, kind) or not isinstance(losses, list):
                raise CheckpointError(
                    f"{path} has no {name} as train_imagenet.py writes it, and is nothing to go on from"
                )
        return content | {"config": self.options, "label_names": self.label_names}


def read_checkpoint(path: str | Path, whole: bool = True) -> dict[str, Any]:
    """Return `Checkpoint.run` of a file."""
    return Checkpoint(path, whole).run()


def saved_config(path: str | Path) -> dict[str, Any]:
    """Return `Checkpoint.options` of a file."""
    return Checkpoint(path, whole=False).options


def label_names(path: str | Path) -> list[str]:
    """Return `Checkpoint.label_names` of a file."""
    return Checkpoint(path, whole=False).label_names


def preprocessing(path: str | Path) -> dict[str, Any]:
    """Return `Checkpoint.preprocessing` of a file."""
    return Checkpoint(path, whole=False).preprocessing


def says_average_is_best(path: str | Path) -> bool | None:
    """Return `Checkpoint.average_is_best` of a file."""
    return Checkpoint(path, whole=False).average_is_best


def read_weights(path: str | Path, use_ema: bool | None = None) -> dict[str, Any]:
    """Return `Checkpoint.weights` of a file."""
    return Checkpoint(path).weights(use_ema)


def labels_of(numbers: dict[str, int]) -> list[str]:
    """Return the names of classes in the order of their indices, as a checkpoint stores them."""
    return [label_of(name) for name in sorted(numbers, key=lambda name: numbers[name])]


def check_preprocessing(said: dict[str, Any], path: str | Path, channels: int = 3) -> None:
    """Raise an error as `preprocessing` does, unless images with these channels can be prepared with the values of a
    file.
    """
    for name, least in {"mean": -LARGEST, "std": 1 / LARGEST}.items():
        values = said.get(name, [0.5])
        numbers = isinstance(values, list) and all(type(v) in (int, float) and least <= v <= LARGEST for v in values)
        if not numbers or len(values) not in (1, channels):
            raise CheckpointError(f"{path} has {name} {str(values)[:100]}, which is not one number per channel")
    if said.get("crop_mode", "center") not in ("center", "squash", "border"):
        raise CheckpointError(
            f"{path} has crop_mode {str(said['crop_mode'])[:100]}, but it must be center, squash or border"
        )
    options_of_checkpoint({name: said[name] for name in ("crop_pct", "interpolation") if name in said}, path)


def pack_weights(weights: dict[str, torch.Tensor], options: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """Return the content of a .safetensors file that stores its model's name and arguments.

    Args:
        weights: State dict on the CPU.
        options: Options of a run that define the model; `saved_config` reads them from the file.
        metadata: Further metadata entries.
    """
    said = metadata | {"format": "pt", "producer": PRODUCER, "config": json.dumps(options)}
    said["digest"] = digest(weights, said)
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, said)


def digest(weights: Any, said: Any = None) -> str:
    """Return a checksum of named tensors and texts, which takes 0.05 s for 100 MB.

    The checksum is CRC-32, which protects against accidents, but not against deliberate changes.
    """
    total = zlib.crc32(json.dumps(said or {}, sort_keys=True).encode())
    for name, value in sorted(weights.items() if isinstance(weights, dict) else (), key=lambda item: str(item[0])):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            total = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), total)
            total = zlib.crc32(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _content(path: str | Path, whole: bool) -> Any:
    """Open, check and read a file from one file object."""
    path = file_of(path)
    if not path.is_file():
        best = path.with_name("best.pt")  # the folder may be a run folder
        is_of_run = path.name == IN_FOLDER and best.is_file()
        raise CheckpointError(f"there is no checkpoint {path}" + f": set {best}, or last.pt for --resume" * is_of_run)
    if path.suffix in (".onnx", ".pt2"):
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint; it is an exported program: export a .safetensors, or an .onnx for "
            "vil.predict"
        )

    def read() -> Any:
        with open(path, "rb") as file:
            return (_read_safetensors if path.suffix == ".safetensors" else unpickler.load)(file, whole)

    try:
        content = retry(read)
        digests = content.get("digest") if whole and _is_ours(content) else None
        for name, said in (digests or {}).items():
            if name in content and digest(content[name], content.get("metadata")) != said:
                raise unpickler.TorchFileError(f"the checksum of its {name} is wrong")
        return content
    except Exception as error:  # readers raise various types for broken files
        if is_machine_error(error):  # the file may be intact
            raise CheckpointError(
                f"{path} cannot be read: {cause_of(error)}. To continue, {remedy_for(error)}"
            ) from error
        raise _broken(path, error) from error


def _is_ours(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("version"), int) and "config" in content


def file_of(path: str | Path) -> Path:
    """Return the path itself, or the file of weights in a folder of `vil.export`."""
    return Path(path) / IN_FOLDER if Path(path).is_dir() else Path(path)


def _broken(path: Path, error: Exception) -> BrokenCheckpointError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = "it holds no tensors as torch.save and safetensors write them"
    if isinstance(error, READABLE) and lines:
        reason = lines[0][:400]
    return BrokenCheckpointError(f"{path} cannot be read as a checkpoint; it may be cut off or corrupt: {reason}")


def _read_safetensors(file: BinaryIO, whole: bool) -> dict[str, Any]:
    """Return the content of a .safetensors file in the format of a checkpoint.

    A file of `pack_weights` also has options and label names.
    """
    start = file.read(8)
    if (length := int.from_bytes(start, "little")) > MOST_HEADER:
        raise unpickler.TorchFileError(f"its header has {length} bytes, more than {MOST_HEADER}")
    header = json.loads(text := file.read(length))
    metadata = header.pop("__metadata__", None) or {}
    content: dict[str, Any] = {"state_dict": {}}
    if whole:
        dimensions = max((len(entry["shape"]) for entry in header.values()), default=0)
        if len(header) > MOST_TENSORS or dimensions > unpickler.MOST_DIMENSIONS:
            raise unpickler.TorchFileError(
                f"it has {len(header)} tensors, or one of more than {unpickler.MOST_DIMENSIONS} dimensions"
            )
        content = {"state_dict": safetensors.torch.load(start + text + file.read())}
    if metadata.get("producer") != PRODUCER:
        return content
    if "digest" in metadata:
        content |= {"digest": {"state_dict": metadata.pop("digest")}, "metadata": metadata}
    said: dict[str, Any] = {name: metadata.get(name) for name in ("config", "label_names")}
    for name, text in said.items():
        with suppress(ValueError, RecursionError):  # `Checkpoint` rejects values that are not JSON
            said[name] = text and json.loads(text)
    return {"version": VERSION, **content, **said}


def _is_unfit(tensor: Any) -> str | None:
    """Return why a value of a state dict cannot be a weight, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"is not a tensor but {type(tensor).__name__}"
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() == 1):
        return f"is a tensor of {tensor.dtype}"
    if tensor.is_floating_point() and not tensor.float().isfinite().all():  # as models do
        return "has values that are not finite"
    return None


def load_weights(model: nn.Module, weights: dict[str, Any], path: str | Path) -> None:
    """Load all weights of a model from the result of `read_weights`.

    Raises:
        CheckpointError: The weights have another architecture or number of classes than the model.
    """
    try:
        wanted, given = (sum(math.prod(tensor.shape) for tensor in w.values()) for w in (model.state_dict(), weights))
        if wanted > 4 * given + MOST_RESAMPLED:
            raise ValueError(f"it has {wanted} values, and the file {given}")
        # a model on the meta device uses the file's memory
        own = within_own_prefix(weights, model.state_dict())
        model.load_state_dict(fitted(own, model), assign=any(p.is_meta for p in model.parameters()))
    except Exception as error:  # timm's filters and names that are not text raise various types
        lines = [line.strip()[:400] for line in str(error).splitlines()]
        reason = " ".join(lines[:6]) + parts_of(map(str, weights))
        raise CheckpointError(f"{path} does not fit the model: {reason}") from error


def fitted(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the weights unchanged if they have the model's shapes, otherwise adapted by timm's filter for the
    model.
    """
    fit = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if fit is None or {n: w.shape for n, w in weights.items()} == {n: t.shape for n, t in model.state_dict().items()}:
        return weights
    return fit(dict(weights), model)
