"""Functions that the pickles of untrusted .pt files may call, and the safe replacements that run instead.

No replacement accepts `*args`, because each of many calls in a pickle could then copy the same long tuple.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .errors import TorchFileError

MOST_DIMENSIONS = 64


def call(function: Any, arguments: Any) -> Any:
    """Call one of the functions in `GLOBALS`, the only functions that a pickle can name."""
    if not isinstance(function, FunctionType) or type(arguments) is not tuple:  # do not unpack a tensor as arguments
        raise TorchFileError(
            f"the file calls an object of type {type(function).__name__}; save only the state_dict() of the model"
        )
    return function(*arguments)


def _rebuild_tensor(storage: Tensor, offset: int, size: tuple, stride: tuple) -> Tensor:
    return storage.as_strided(_size(size), _size(stride), *_size((offset,)))


def _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata=None) -> Tensor:
    return _rebuild_tensor(storage, offset, size, stride)


def _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None) -> Tensor:
    return _rebuild_tensor(storage.view(dtype), offset, size, stride)  # storages of _rebuild_tensor_v3 are untyped


def _rebuild_parameter(data, requires_grad, hooks, state=None) -> Tensor:
    return data


def _rebuild_from_type(function, tensor_type, arguments, state) -> Tensor:
    """Return a tensor with attributes, such as an nn.Buffer, as a plain tensor without attributes."""
    return call(function, arguments)


def _size(values: Any) -> torch.Size:
    is_tuple = isinstance(values, tuple) and len(values) <= MOST_DIMENSIONS
    if not is_tuple or any(type(value) is not int for value in values):
        raise TorchFileError(f"tensor sizes and strides must be tuples of at most {MOST_DIMENSIONS} integers")
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
    **{f"{module} {name}Storage": dtype for name, dtype in STORAGES.items() for module in ("torch", "torch.cuda")},
    **{f"torch {name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.storage UntypedStorage": torch.uint8,
    "torch._tensor Tensor": None,  # the reader ignores this class, which is an argument of `_rebuild_from_type`
    "torch Tensor": None,
    "torch Size": _size,
    "torch device": _device,
    "torch._utils _rebuild_tensor": _rebuild_tensor,
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils _rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    "torch._utils _rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor _rebuild_from_type_v2": _rebuild_from_type,
    "collections OrderedDict": _ordered_dict,
    "argparse Namespace": _namespace,  # ViM's checkpoints store their options in an argparse.Namespace
}
