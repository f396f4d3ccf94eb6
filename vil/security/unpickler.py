"""Restricted unpickler for the files that `torch.save` writes. It builds tensors and plain values only.

A pickle is a program for a stack machine. The machine below runs the opcodes of plain values and calls only the
functions in `GLOBALS`, so a file cannot run code. `check_expansion` bounds what the values take in memory, because a
pickle can refer to one value many times.
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain, islice
from types import FunctionType
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # contents of the first two pickles of a legacy file
DEEPEST = 20  # maximum levels of nested values; checkpoints have about five
SLACK = 2**24  # bytes that the values of a small file may take
POINTER = 8  # bytes of a reference to a value
MOST_DIMENSIONS = 64
LARGEST_KEY = 2**32  # integers that are keys of a dict; larger keys can be slow, because their hashes collide
NAMES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE "
    "BINSTRING SHORT_BINSTRING EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS BINPUT "
    "LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID"
)
OPCODES = {opcode.code for opcode in pickletools.opcodes if opcode.name in NAMES.split()}


class TorchFileError(ValueError):
    """A file is damaged, or contains values that weights do not need. The message gives the reason."""


def load(file: BinaryIO, whole: bool = True) -> Any:
    """Return the value in a file of `torch.save`.

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
    content = (_load_archive if is_archive else _load_legacy)(file, _Unpickler(size, whole))
    check_expansion(content, 2 * size + SLACK)  # twice the size, because two names may share a tensor
    return content


def _load_archive(file: BinaryIO, unpickler: _Unpickler) -> Any:
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: part for part in archive.infolist()}
        folder = next(iter(parts)).partition("/")[0]
        if f"{folder}/constants.pkl" in parts:
            raise TorchFileError("it is a TorchScript program, which is code; save its state_dict() instead")
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):  # it may claim any size
            raise TorchFileError("its parts are compressed, which torch.save never does")
        for part in parts.values():
            if not part.CRC:  # torch.serialization.set_crc32_options(False) writes no checksums
                del part.CRC

        byte_order = f"{folder}/byteorder"
        _check_byte_order(byte_order not in parts or archive.read(byte_order) == b"little")
        content = unpickler.run(io.BytesIO(archive.read(f"{folder}/data.pkl")))
        if unpickler.whole:
            for key, storage in unpickler.storages.items():
                with archive.open(f"{folder}/data/{key}") as values:
                    _fill(storage, values)
                    if values.read(1):  # the last read compares the part's checksum
                        raise TorchFileError("a tensor's storage is longer than its pickle says")
        return content


def _load_legacy(file: BinaryIO, unpickler: _Unpickler) -> Any:
    try:
        magic, protocol, system = (unpickler.run(file) for _ in range(3))
        if (magic, protocol) != (MAGIC, PROTOCOL):
            raise ValueError("not a file of torch.save")
        _check_byte_order(system["little_endian"])
        content = unpickler.run(file)
        if not unpickler.whole:
            return content
        keys = unpickler.run(file)
    except MemoryError:  # of a text whose length is more than any file's, whatever memory there is
        raise TorchFileError("it ends within a pickle") from None

    if set(keys) != unpickler.storages.keys():
        raise TorchFileError("its list of storages is not that of its tensors")
    for key in keys:
        file.read(8)  # skip the number of elements
        _fill(unpickler.storages[key], file)
    return content


def _check_byte_order(is_little: bool) -> None:
    if is_little != (sys.byteorder == "little"):
        raise TorchFileError("its byte order is not that of this machine")


def _fill(storage: Tensor, values: Any) -> None:
    """Read the values of a storage."""
    view = storage.numpy().data
    for start in range(0, len(view), 2**20):
        piece = view[start : start + 2**20]
        if values.readinto(piece) != len(piece):
            raise TorchFileError("it ends within a tensor")


class _Unpickler(pickle._Unpickler):
    """Python's unpickler with few opcodes.

    Args:
        size: Bytes of the file, which are the most that storages may claim.
        whole: Storages get memory for their values.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: step for code, step in pickle._Unpickler.dispatch.items() if chr(code) in OPCODES
    }

    def __init__(self, size: int, whole: bool):
        self.size = size
        self.whole = whole
        self.claimed = 0  # bytes of all storages
        self.storages: dict[str, Tensor] = {}

    def run(self, program: BinaryIO) -> Any:
        """Return the value of a pickle."""
        super().__init__(program, encoding="latin-1")
        return self.load()

    def find_class(self, module: str, name: str) -> Any:
        known = f"{module} {name}"
        if known not in GLOBALS:
            raise TorchFileError(
                f"it holds {module[:100]}.{name[:100]}, which weights do not need, and nothing is loaded that may run "
                "code; save only its state_dict()"
            )
        return GLOBALS[known]

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        self.stack.append(_call(function, arguments))

    def load_setitems(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.set_items(self.stack[-1], items)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.set_items(self.stack[-1], [key, value])

    def set_items(self, container: Any, items: list[Any]) -> None:
        if type(container) not in (dict, OrderedDict):
            raise TorchFileError(f"it uses {type(container).__name__} as a dict")
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, (str, int, type(None))) or (type(key) is int and abs(key) > LARGEST_KEY):
                raise TorchFileError(f"a dict has a key that is {type(key).__name__}, neither text nor a small integer")
            container[key] = value

    def load_build(self) -> None:
        state = self.stack.pop()
        instance = self.stack[-1]
        if type(instance) not in (OrderedDict, argparse.Namespace) or type(state) is not dict:
            raise TorchFileError(f"it sets attributes of {type(instance).__name__}")
        instance.__dict__ = state  # not a copy, because many objects may share one state

    def persistent_load(self, identity: Any) -> Tensor:
        """Return the 1-D tensor of a storage. `load` reads the values later."""
        fields: Any = identity if type(identity) is tuple and len(identity) in (5, 6) else [None] * 5
        kind, dtype, key, _, count = fields[:5]
        is_storage = kind == "storage" and isinstance(dtype, torch.dtype) and type(key) is str
        if not is_storage or fields[5:] not in ((), (None,)):
            raise TorchFileError("it refers to something that is not a storage of a tensor")

        if key not in self.storages:
            length = count * dtype.itemsize
            self.claimed += length
            if not 0 <= length <= self.claimed <= self.size:
                raise TorchFileError(
                    f"its tensors have at least {self.claimed} bytes, but the file has only {self.size}"
                )
            self.storages[key] = torch.empty(length, dtype=torch.uint8, device="cpu" if self.whole else "meta")
        return self.storages[key].view(dtype)

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BUILD[0]] = load_build


def _call(function: Any, arguments: Any) -> Any:
    """Call a function of `GLOBALS`. A stack holds no other functions."""
    if not isinstance(function, FunctionType) or type(arguments) is not tuple:  # a tensor would be iterated over
        raise TorchFileError(f"it calls {type(function).__name__} with arguments that weights do not need")
    return function(*arguments)


# Stand-ins for PyTorch's functions. None takes any number of arguments, because each of many calls could copy them.


def _rebuild_tensor(storage: Tensor, offset: int, size: tuple, stride: tuple) -> Tensor:
    return storage.as_strided(_numbers(size), _numbers(stride), *_numbers((offset,)))


def _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata=None) -> Tensor:
    return _rebuild_tensor(storage, offset, size, stride)


def _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None) -> Tensor:
    return _rebuild_tensor(storage.view(dtype), offset, size, stride)  # a storage of bytes


def _rebuild_parameter(data, requires_grad, hooks, state=None) -> Tensor:
    return data


def _rebuild_from_type(function, tensor_type, arguments, state) -> Tensor:
    """Return a tensor that has attributes, such as a buffer, without the attributes."""
    return _call(function, arguments)


def _numbers(values: Any) -> torch.Size:
    is_tuple = isinstance(values, tuple) and len(values) <= MOST_DIMENSIONS
    if not is_tuple or any(type(value) is not int for value in values):
        raise TorchFileError(f"a size is not a tuple of at most {MOST_DIMENSIONS} integers")
    return torch.Size(values)


def _device(kind, index=None) -> str:
    return kind


def _ordered_dict() -> OrderedDict:
    return OrderedDict()


def _namespace() -> argparse.Namespace:
    return argparse.Namespace()


STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
}  # fmt: skip
GLOBALS: dict[str, Any] = {
    **{f"{module} {name}Storage": kind for name, kind in STORAGES.items() for module in ("torch", "torch.cuda")},
    **{f"torch {name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.storage UntypedStorage": torch.uint8,
    "torch._tensor Tensor": None,  # argument of `_rebuild_from_type`
    "torch Tensor": None,
    "torch Size": _numbers,
    "torch device": _device,
    "torch._utils _rebuild_tensor": _rebuild_tensor,
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils _rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    "torch._utils _rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor _rebuild_from_type_v2": _rebuild_from_type,
    "collections OrderedDict": _ordered_dict,
    "argparse Namespace": _namespace,  # of ViM's training script, which stores its options beside the weights
}


def check_expansion(content: Any, most_bytes: int) -> None:
    """Raise a TorchFileError if nested values that refer to one another would take too much memory when written out.

    Args:
        content: Nested values.
        most_bytes: Bytes allowed for tensors, text and references to values.
    """
    total = 0
    level: list[Any] = [[content]]
    for _ in range(DEEPEST):
        level = list(islice(chain.from_iterable(map(_inside, level)), most_bytes // POINTER + 1))
        total += sum(map(_bytes_of, level))
        if total > most_bytes:
            raise TorchFileError(f"its values take at least {total} bytes, of which the file can have {most_bytes}")
    if level:
        raise TorchFileError(f"its values are nested {DEEPEST} levels deep or deeper")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return chain(value, value.values())
    return value if isinstance(value, (list, tuple)) else ()


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return POINTER + value.numel() * value.element_size()
    return POINTER + (len(value) if isinstance(value, str) else 0)
