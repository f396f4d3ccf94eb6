"""Reader of untrusted .pt and .pth files, both zip archives and PyTorch's legacy format."""

from __future__ import annotations

import io
import sys
import zipfile
from typing import Any, BinaryIO

from torch import Tensor

from .errors import TorchFileError
from .expansion import check_expansion
from .unpickler import Unpickler

MAGIC = 0x1950A86A20F9469CFC6C  # first pickle of a legacy file
PROTOCOL = 1001  # second pickle of a legacy file
SLACK = 2**24  # bytes that the values of a small file may take
PIECE = 2**20  # bytes that are read at once


def load(file: BinaryIO, whole: bool = True) -> Any:
    """Return the value in a file of `torch.save`. The file cannot run code, and takes memory in proportion to its size.

    Args:
        file: A file that is open for reading.
        whole: Read the tensors' values. Otherwise tensors are on the meta device.

    Raises:
        TorchFileError: The file is damaged, or holds more than tensors and plain values.
        OSError: The file cannot be read.
        Exception: `torch.save` did not write the file; the error is of any kind.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    is_archive = file.read(4) == b"PK\3\4"
    file.seek(0)

    unpickler = Unpickler(size, whole)
    content = _load_archive(file, unpickler) if is_archive else _load_legacy(file, unpickler)
    check_expansion(content, 2 * size + SLACK)  # twice the size, because two names may share a tensor
    return content


def _load_archive(file: BinaryIO, unpickler: Unpickler) -> Any:
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: part for part in archive.infolist()}
        folder = next(iter(parts)).partition("/")[0]
        if f"{folder}/constants.pkl" in parts:
            raise TorchFileError("it is a TorchScript program, which is code; save its state_dict() instead")
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            # a compressed part may have any size
            raise TorchFileError("its parts are compressed, which torch.save never does")
        for part in parts.values():
            if not part.CRC:  # torch.serialization.set_crc32_options(False) writes no checksums
                del part.CRC

        byte_order = f"{folder}/byteorder"
        _check_byte_order(byte_order not in parts or archive.read(byte_order) == b"little")
        content = unpickler.run(io.BytesIO(archive.read(f"{folder}/data.pkl")))
        if not unpickler.whole:
            return content

        for key, storage in unpickler.storages.items():
            with archive.open(f"{folder}/data/{key}") as values:
                _read_values(storage, values)
                if values.read(1):  # reading the end of a part compares its checksum
                    raise TorchFileError("a tensor's storage is longer than its pickle says")
        return content


def _load_legacy(file: BinaryIO, unpickler: Unpickler) -> Any:
    """Read the format of PyTorch before 1.6: pickles, and then the values of each storage."""
    try:
        magic = unpickler.run(file)
        protocol = unpickler.run(file)
        system = unpickler.run(file)
        if (magic, protocol) != (MAGIC, PROTOCOL):
            raise ValueError("not a file of torch.save")
        _check_byte_order(system["little_endian"])
        content = unpickler.run(file)
        if not unpickler.whole:
            return content
        keys = unpickler.run(file)
    except MemoryError:  # a text claims more bytes than any file has
        raise TorchFileError("it ends within a pickle") from None

    if set(keys) != unpickler.storages.keys():
        raise TorchFileError("its list of storages is not that of its tensors")
    for key in keys:
        file.read(8)  # number of elements, which the pickle has, too
        _read_values(unpickler.storages[key], file)
    return content


def _check_byte_order(is_little: bool) -> None:
    if is_little != (sys.byteorder == "little"):
        raise TorchFileError("its byte order is not that of this machine")


def _read_values(storage: Tensor, file: Any) -> None:
    """Read the values of a storage into its memory."""
    memory = storage.numpy().data
    for start in range(0, len(memory), PIECE):
        piece = memory[start : start + PIECE]
        if file.readinto(piece) != len(piece):
            raise TorchFileError("it ends within a tensor")
