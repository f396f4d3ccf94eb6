"""Restricted unpickler for the pickles that `torch.save` writes. It builds tensors and plain values only.

A pickle is a program for a stack machine. The unpickler runs the opcodes of plain values and calls only functions in
`GLOBALS`, so a file cannot run code.
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

LARGEST_KEY = 2**32  # of integers as keys of a dict; the hashes of larger ones can collide, which is slow
OPCODES = {
    # structure of a pickle
    "PROTO", "FRAME", "STOP", "MARK", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
    # numbers and text
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING",
    # containers
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS",
    # functions of `GLOBALS`, and storages
    "GLOBAL", "STACK_GLOBAL", "BINPERSID",
}  # fmt: skip
ALLOWED_CODES = {ord(opcode.code) for opcode in pickletools.opcodes if opcode.name in OPCODES}


class Unpickler(pickle._Unpickler):
    """Python's unpickler with the opcodes of `OPCODES`, and with its own methods for calls and for filling dicts.

    The pure-Python unpickler has a method for each opcode in `dispatch`. The methods keep the unpickler's names.

    Args:
        file_bytes: Size of the file, which is the most that its storages may claim.
        whole: Storages get memory for their values. Otherwise storages are on the meta device.

    Attributes:
        storages: The storages that the pickles refer to, as 1-D tensors of bytes without values, by key.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: method for code, method in pickle._Unpickler.dispatch.items() if code in ALLOWED_CODES
    }

    def __init__(self, file_bytes: int, whole: bool):
        self.file_bytes = file_bytes
        self.whole = whole
        self.claimed_bytes = 0  # of all storages
        self.storages: dict[str, Tensor] = {}

    def run(self, program: BinaryIO) -> Any:
        """Return the value of the next pickle in a file."""
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

    def persistent_load(self, identity: Any) -> Tensor:
        """Return the 1-D tensor of a storage, whose values are read after the pickle.

        Args:
            identity: The tuple ("storage", type, key, device, number of elements), and a None in legacy files.
        """
        fields: tuple = identity if type(identity) is tuple and len(identity) in (5, 6) else (None,) * 5
        kind, dtype, key, _, count = fields[:5]
        is_storage = kind == "storage" and isinstance(dtype, torch.dtype) and type(key) is str
        if not is_storage or fields[5:] not in ((), (None,)):
            raise TorchFileError("it refers to something that is not a storage of a tensor")

        if key not in self.storages:
            length = count * dtype.itemsize
            self.claimed_bytes += length
            if not 0 <= length <= self.claimed_bytes <= self.file_bytes:
                raise TorchFileError(
                    f"its tensors have at least {self.claimed_bytes} bytes, but the file has only {self.file_bytes}"
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
            raise TorchFileError(f"it uses {type(container).__name__} as a dict")
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, (str, int, type(None))) or (type(key) is int and abs(key) > LARGEST_KEY):
                raise TorchFileError(f"a dict has a key that is {type(key).__name__}, neither text nor a small integer")
            container[key] = value

    def load_build(self) -> None:
        """Set the attributes of an object."""
        state = self.stack.pop()
        instance = self.stack[-1]
        if type(instance) not in (OrderedDict, argparse.Namespace) or type(state) is not dict:
            raise TorchFileError(f"it sets attributes of {type(instance).__name__}")
        instance.__dict__ = state  # not a copy, because many objects may share one state

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BUILD[0]] = load_build
