"""Loader of untrusted .pt and .pth files, which are zip archives or in PyTorch's legacy format."""

from __future__ import annotations

import io
import sys
import zipfile
from typing import Any, BinaryIO

from torch import Tensor

from .errors import TorchFileError
from .expansion import check_expansion
from .unpickler import Unpickler

MAGIC = 0x1950A86A20F9469CFC6C  # value of the first pickle in a legacy file
PROTOCOL = 1001  # value of the second pickle in a legacy file
SLACK = 2**24  # loaded values may take twice the file size plus SLACK bytes
PIECE = 2**20  # maximum number of bytes of a tensor per read


def load(file: BinaryIO, whole: bool = True) -> Any:
    """Load an untrusted file written by `torch.save`.

    The file cannot run code, and the file size limits the memory use.

    Args:
        file: File opened in binary mode.
        whole: Whether to load the values of tensors. If False, all tensors are on the meta device.

    Raises:
        TorchFileError: The file is damaged, or contains anything except tensors and plain values.
        OSError: The file cannot be read.
        Exception: The file was not written by `torch.save`. Damaged pickles and archives raise various exceptions.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    is_archive = file.read(4) == b"PK\3\4"
    file.seek(0)

    unpickler = Unpickler(size, whole)
    content = _load_archive(file, unpickler) if is_archive else _load_legacy(file, unpickler)
    check_expansion(content, 2 * size + SLACK)  # allow twice the file size, because two names may share a tensor
    return content


def _load_archive(file: BinaryIO, unpickler: Unpickler) -> Any:
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: part for part in archive.infolist()}
        folder = next(iter(parts)).partition("/")[0]
        if f"{folder}/constants.pkl" in parts:
            raise TorchFileError("the file is a TorchScript program, which can run code; save only the state_dict()")
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            # a compressed part can be a decompression bomb
            raise TorchFileError("the file is a compressed zip archive; save the file again with torch.save")
        for part in parts.values():
            if not part.CRC:  # torch.save stores no checksum after torch.serialization.set_crc32_options(False)
                del part.CRC

        byte_order = f"{folder}/byteorder"
        _check_byte_order(byte_order not in parts or archive.read(byte_order) == b"little")
        content = unpickler.run(io.BytesIO(archive.read(f"{folder}/data.pkl")))
        if not unpickler.whole:
            return content

        for key, storage in unpickler.storages.items():
            with archive.open(f"{folder}/data/{key}") as values:
                _read_values(storage, values)
                if values.read(1):  # reading to the end of a part verifies the part's checksum
                    raise TorchFileError(
                        "a tensor's storage has more bytes than its pickle specifies; the file is damaged"
                    )
        return content


def _load_legacy(file: BinaryIO, unpickler: Unpickler) -> Any:
    """Load a file in the format of PyTorch before 1.6: five pickles, followed by the values of each storage."""
    try:
        magic = unpickler.run(file)
        protocol = unpickler.run(file)
        system = unpickler.run(file)
        if (magic, protocol) != (MAGIC, PROTOCOL):
            raise ValueError("file must be written by torch.save")
        _check_byte_order(system["little_endian"])
        content = unpickler.run(file)
        if not unpickler.whole:
            return content
        keys = unpickler.run(file)
    except MemoryError:  # raised if a frame in the pickle claims more bytes than the memory has
        raise TorchFileError("the file is truncated within a pickle") from None

    if set(keys) != unpickler.storages.keys():
        raise TorchFileError("the list of storages does not match the tensors in the file; the file is damaged")
    for key in keys:
        file.read(8)  # skip the number of elements, which the pickle contains as well
        _read_values(unpickler.storages[key], file)
    return content


def _check_byte_order(is_little: bool) -> None:
    if is_little != (sys.byteorder == "little"):
        raise TorchFileError(
            "the file's byte order must be that of this machine; save the file again on a machine with this byte order"
        )


def _read_values(storage: Tensor, file: Any) -> None:
    """Read the values of a storage from the file into the memory of `storage`."""
    memory = storage.numpy().data
    for start in range(0, len(memory), PIECE):
        piece = memory[start : start + PIECE]
        if file.readinto(piece) != len(piece):
            raise TorchFileError("the file is truncated within a tensor")
