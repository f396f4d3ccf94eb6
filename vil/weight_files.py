"""Reading of .pt, .pth and .safetensors weights files, and packing of .safetensors files."""

from __future__ import annotations

import json
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import timm
import torch
from safetensors import SafetensorError

from .errors import CheckpointError, reject_url
from .fault_tolerance.machine_errors import cause_of, is_machine_error, remedy_for, retry
from .models import shipped
from .security import torch_files
from .security.errors import TorchFileError

IN_FOLDER = "model.safetensors"  # weights file in a folder written by `vil.export`
VERSION = 3  # version of the checkpoint format; runs cannot resume from checkpoints of versions 1 and 2
PRODUCER = "vision-longhorn"  # metadata entry `producer` of .safetensors files that store the model's options
MOST_HEADER = 2**24  # maximum size in bytes of a .safetensors header, whose parsing needs many times as much memory
# exceptions whose messages are shown to the user if reading a file fails
READABLE = (zipfile.BadZipFile, SafetensorError, TorchFileError)


class BrokenCheckpointError(CheckpointError):
    """A file cannot be read as a checkpoint because the file is truncated, corrupt, or has another format."""


def file_of(path: str | Path) -> Path:
    """Return the path of the weights file in a folder written by `vil.export`, or `path` itself for a file."""
    return Path(path) / IN_FOLDER if Path(path).is_dir() else Path(path)


def read_file(path: str | Path, whole: bool = True) -> Any:
    """Read a weights file.

    A .safetensors file is returned in the form of a checkpoint, with the tensors under "state_dict".

    Args:
        path: Weights file, or folder written by `vil.export`.
        whole: Whether to read the tensors' values. Otherwise tensors are on the meta device, and no tensors are read
            from a .safetensors file.

    Raises:
        CheckpointError: The file is missing or cannot be read.
        BrokenCheckpointError: The file is corrupt, or contains objects that a checkpoint does not need.
    """
    path = file_of(path)
    if not path.is_file():
        reject_url(path, CheckpointError)
        best = path.with_name("best.pt")
        if path.name == IN_FOLDER and best.is_file():
            raise CheckpointError(
                f"{path.parent} is the folder of a run, not a checkpoint: use {best}, or last.pt to resume the run"
            )
        if path.name == IN_FOLDER and path.parent.is_dir():
            raise CheckpointError(
                f"folder {path.parent} has no {IN_FOLDER}: set a checkpoint file, or a folder written by vil export"
            )
        of_model = f": {path} is the name of a model, not of a file" if timm.is_model(path.name.split(".")[0]) else ""
        if packaged := shipped.file_of(str(path)):
            of_model += f"; the file with weights of this model is {packaged}"
        raise CheckpointError(f"checkpoint {path} does not exist{of_model}")
    if path.suffix in (".onnx", ".pt2"):
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint; the file is an exported program: export a .safetensors file to "
            "load weights, or an .onnx file for vil.predict"
        )

    def read() -> Any:
        with open(path, "rb") as file:
            return _read_safetensors(file, whole) if path.suffix == ".safetensors" else torch_files.load(file, whole)

    try:
        return retry(read)
    except Exception as error:  # readers raise exceptions of various types for corrupt files
        if is_machine_error(error):  # after an I/O error, for example, the file itself may be intact
            raise CheckpointError(
                f"failed to read {path}: {cause_of(error)}. To continue, {remedy_for(error)}"
            ) from error
        raise BrokenCheckpointError(
            f"{path} cannot be read as a checkpoint; the file may be truncated or corrupt: {_reason_of(error)}"
        ) from error


def _reason_of(error: Exception) -> str:
    """Return the first line of an error's message, or a general reason if the message does not help users."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, READABLE) and lines:
        return lines[0][:400]
    return "expected a file written by torch.save or safetensors"


def _read_safetensors(file: BinaryIO, whole: bool) -> dict[str, Any]:
    """Read a .safetensors file. Files written by `pack_weights` also contain options and, if known, class names."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if length > MOST_HEADER:
        raise TorchFileError(f"the safetensors header must be at most {MOST_HEADER} bytes, got {length}")
    header = file.read(length)
    metadata = json.loads(header).get("__metadata__") or {}

    weights = safetensors.torch.load(start + header + file.read()) if whole else {}
    content: dict[str, Any] = {"state_dict": weights}
    if metadata.get("producer") != PRODUCER:
        return content

    expected = metadata.pop("digest", None)
    if whole and expected is not None and digest(weights, metadata) != expected:
        raise TorchFileError("the checksum of the tensors does not match")
    content |= {"version": VERSION, "metadata": metadata}
    for name in ("config", "label_names"):
        text = metadata.get(name)
        content[name] = text
        with suppress(ValueError, RecursionError):  # `Checkpoint` rejects the string if it is not JSON
            content[name] = text and json.loads(text)
    return content


def pack_weights(weights: dict[str, torch.Tensor], options: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """Return the bytes of a .safetensors file that stores the model's name, arguments and weights.

    Args:
        weights: State dict on the CPU.
        options: Options that define the model, which `Checkpoint.options` reads from the file.
        metadata: Additional metadata entries.
    """
    stored = metadata | {"format": "pt", "producer": PRODUCER, "config": json.dumps(options)}
    stored["digest"] = digest(weights, stored)
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, stored)


def digest(weights: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """Return the CRC-32 checksum of a state dict and metadata.

    The checksum detects accidental corruption, but not deliberate changes. The .safetensors format itself has no
    checksum, unlike the zip archives of torch.save.
    """
    total = zlib.crc32(json.dumps(metadata or {}, sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
