"""Files of tensors: .pt and .pth as torch.save writes them, and .safetensors."""

from __future__ import annotations

import json
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError

from .errors import CheckpointError
from .fault_tolerance.machine_errors import cause_of, is_machine_error, remedy_for, retry
from .security import torch_files
from .security.errors import TorchFileError

IN_FOLDER = "model.safetensors"  # the weights in a folder of `vil.export`
VERSION = 3  # version 1 had no position within an epoch, and version 2 another order of the optimizer's parameters
PRODUCER = "vision-longhorn"  # in the metadata of .safetensors files that store their model's options
MOST_HEADER = 2**24  # bytes of the header of a .safetensors file, which may take 30 times as much memory
# errors whose messages explain the problem
READABLE = (zipfile.BadZipFile, SafetensorError, TorchFileError)


class BrokenCheckpointError(CheckpointError):
    """A file cannot be read as a checkpoint because it is truncated, corrupt, or of another format."""

    @classmethod
    def because(cls, path: Path, error: Exception) -> BrokenCheckpointError:
        """Return the error of a file whose reader raised an error."""
        reason = "it holds no tensors as torch.save and safetensors write them"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if isinstance(error, READABLE) and lines:
            reason = lines[0][:400]
        return cls(f"{path} cannot be read as a checkpoint; it may be cut off or corrupt: {reason}")


def file_of(path: str | Path) -> Path:
    """Return the path itself, or the file of weights in a folder of `vil.export`."""
    return Path(path) / IN_FOLDER if Path(path).is_dir() else Path(path)


def read_file(path: str | Path, whole: bool = True) -> Any:
    """Return the content of a file of tensors, which is opened once.

    The content of a .safetensors file has the form of a checkpoint, with the tensors under "state_dict".

    Args:
        path: The file, or a folder of `vil.export`.
        whole: Read the tensors' values. Otherwise tensors are on the meta device, and a .safetensors file has none.

    Raises:
        CheckpointError: The file is missing or cannot be read.
        BrokenCheckpointError: The file is damaged, or holds what weights do not need.
    """
    path = file_of(path)
    if not path.is_file():
        best = path.with_name("best.pt")
        is_run_folder = path.name == IN_FOLDER and best.is_file()
        hint = f": set {best}, or last.pt for --resume" if is_run_folder else ""
        raise CheckpointError(f"there is no checkpoint {path}{hint}")
    if path.suffix in (".onnx", ".pt2"):
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint; it is an exported program: export a .safetensors, or an .onnx for "
            "vil.predict"
        )

    def read() -> Any:
        with open(path, "rb") as file:
            return _read_safetensors(file, whole) if path.suffix == ".safetensors" else torch_files.load(file, whole)

    try:
        return retry(read)
    except Exception as error:  # readers raise various types for broken files
        if is_machine_error(error):  # the file may be intact
            raise CheckpointError(
                f"{path} cannot be read: {cause_of(error)}. To continue, {remedy_for(error)}"
            ) from error
        raise BrokenCheckpointError.because(path, error) from error


def _read_safetensors(file: BinaryIO, whole: bool) -> dict[str, Any]:
    """Return the content of a .safetensors file; a file of `pack_weights` also has options and label names."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if length > MOST_HEADER:
        raise TorchFileError(f"its header has {length} bytes, more than {MOST_HEADER}")
    header = file.read(length)
    metadata = json.loads(header).get("__metadata__") or {}

    weights = safetensors.torch.load(start + header + file.read()) if whole else {}
    content: dict[str, Any] = {"state_dict": weights}
    if metadata.get("producer") != PRODUCER:
        return content

    expected = metadata.pop("digest", None)
    if whole and expected is not None and digest(weights, metadata) != expected:
        raise TorchFileError("the checksum of its tensors is wrong")
    content |= {"version": VERSION, "metadata": metadata}
    for name in ("config", "label_names"):
        text = metadata.get(name)
        content[name] = text
        with suppress(ValueError, RecursionError):  # `Checkpoint` rejects values that are not JSON
            content[name] = text and json.loads(text)
    return content


def pack_weights(weights: dict[str, torch.Tensor], options: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """Return the content of a .safetensors file that stores its model's name and arguments.

    Args:
        weights: State dict on the CPU.
        options: Options of a run that define the model; `Checkpoint.options` reads them from the file.
        metadata: Further metadata entries.
    """
    stored = metadata | {"format": "pt", "producer": PRODUCER, "config": json.dumps(options)}
    stored["digest"] = digest(weights, stored)
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, stored)


def digest(weights: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """Return a checksum of named tensors and texts, which takes 0.05 s for 100 MB.

    The checksum is CRC-32, which protects against accidents, but not against deliberate changes. The .safetensors
    format has no checksum of its own, but the zip archives of torch.save have.
    """
    total = zlib.crc32(json.dumps(metadata or {}, sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
