"""Restricted unpickler for pickles written by `torch.save`, which creates only tensors and plain values.

A pickle is a program for a stack machine. The unpickler supports only the opcodes for plain values, and calls only the
functions in `GLOBALS`, so that an untrusted pickle cannot run code.
"""

from __future__ import annotations

import argparse
import pickle
import pickletools
from collections import OrderedDict
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from .errors import TorchFileError
from .pickle_globals import GLOBALS, call

LARGEST_KEY = (
    2**32
)  # maximum magnitude of integer dict keys, because larger integers can have colliding hashes, which are slow
OPCODES = {
    # opcodes of the pickle's structure
    "PROTO", "FRAME", "STOP", "MARK", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
    # opcodes for numbers and text
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING",
    # opcodes for containers
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS",
    # opcodes that name a function in `GLOBALS`, or a storage
    "GLOBAL", "STACK_GLOBAL", "BINPERSID",
}  # fmt: skip
ALLOWED_CODES = {ord(opcode.code) for opcode in pickletools.opcodes if opcode.name in OPCODES}


class Unpickler(pickle._Unpickler):
    """Python's unpickler with only `OPCODES` and checked methods for calls, dict items and attributes.

    The pure-Python unpickler maps each opcode to a method in `dispatch`. Overriding methods keep the original names.

    Args:
        file_bytes: Size of the file in bytes, the maximum total size of all storages.
        whole: Whether to allocate memory for the values of storages. If False, storages are on the meta device.

    Attributes:
        storages: Storages referenced by the pickles, by key, as uninitialized 1-D uint8 tensors.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: method for code, method in pickle._Unpickler.dispatch.items() if code in ALLOWED_CODES
    }

    def __init__(self, file_bytes: int, whole: bool):
        self.file_bytes = file_bytes
        self.whole = whole
        self.claimed_bytes = 0  # total size of all storages in the file
        self.storages: dict[str, Tensor] = {}

    def run(self, program: BinaryIO) -> Any:
        """Return the value of the next pickle in a file."""
        super().__init__(program, encoding="latin-1")
        return self.load()

    def find_class(self, module: str, name: str) -> Any:
        known = f"{module} {name}"
        if known not in GLOBALS:
            raise TorchFileError(
                f"the file holds {module[:100]}.{name[:100]}, which weights do not need and which may run code; "
                "save only the state_dict() of the model"
            )
        return GLOBALS[known]

    def persistent_load(self, identity: Any) -> Tensor:
        """Return a storage as a 1-D tensor. The values are read from the file later, when the pickle is complete.

        Args:
            identity: Tuple ("storage", dtype, key, device, number of elements), followed by None in legacy files.
        """
        fields: tuple = identity if type(identity) is tuple and len(identity) in (5, 6) else (None,) * 5
        kind, dtype, key, _, count = fields[:5]
        is_storage = kind == "storage" and isinstance(dtype, torch.dtype) and type(key) is str
        if not is_storage or fields[5:] not in ((), (None,)):
            raise TorchFileError(
                "the file refers to an object that is not a tensor storage; save only the state_dict() of the model"
            )

        if key not in self.storages:
            length = count * dtype.itemsize
            self.claimed_bytes += length
            if not 0 <= length <= self.claimed_bytes <= self.file_bytes:
                raise TorchFileError(
                    f"its tensors have at least {self.claimed_bytes} bytes, but the file has only {self.file_bytes}; "
                    "it may be truncated"
                )
            self.storages[key] = torch.empty(length, dtype=torch.uint8, device="cpu" if self.whole else "meta")
        return self.storages[key].view(dtype)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        self.stack.append(call(function, arguments))

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._set_items(self.stack[-1], items)

    def _set_items(self, container: Any, items: list[Any]) -> None:
        if type(container) not in (dict, OrderedDict):
            raise TorchFileError(
                f"the file sets items of a {type(container).__name__}; save only the state_dict() of the model"
            )
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, (str, int, type(None))) or (type(key) is int and abs(key) > LARGEST_KEY):
                raise TorchFileError(f"dict keys must be str, None or integers up to 2**32, got {type(key).__name__}")
            container[key] = value

    def load_build(self) -> None:
        """Set the attributes of an OrderedDict or argparse.Namespace."""
        state = self.stack.pop()
        instance = self.stack[-1]
        if type(instance) not in (OrderedDict, argparse.Namespace) or type(state) is not dict:
            raise TorchFileError(
                f"the file sets attributes of a {type(instance).__name__}; save only the state_dict() of the model"
            )
        instance.__dict__ = state  # not copied, because many objects can share one large dict

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BUILD[0]] = load_build
