"""Bound of the memory that nested values take.

A pickle can refer to one value many times, so a small file can hold values that take gigabytes when they are copied or
written out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from torch import Tensor

from .errors import TorchFileError

TOO_DEEP = 20  # levels of nested values that are refused; checkpoints have about five
REFERENCE = 8  # bytes of a reference to a value


def check_expansion(content: Any, most_bytes: int) -> None:
    """Check how much memory nested values would take if each reference had a copy of its value.

    The values are visited level by level, which stops at the limit.

    Args:
        content: Nested values.
        most_bytes: Bytes allowed for tensors, text and references to values.

    Raises:
        TorchFileError: The values would take more than `most_bytes`, or are nested too deeply.
    """
    total = 0
    level = [content]
    for _ in range(1, TOO_DEEP):
        total += sum(map(_size_of, level))
        if total > most_bytes:
            raise TorchFileError(f"its values take at least {total} bytes, of which the file can have {most_bytes}")
        children = chain.from_iterable(map(_children_of, level))
        level = list(islice(children, most_bytes // REFERENCE + 1))  # more references exceed the limit
        if not level:
            return
    raise TorchFileError(f"its values are nested {TOO_DEEP} levels deep or deeper")


def _children_of(value: Any) -> Iterable[Any]:
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return chain(value, value.values())
    return value if isinstance(value, (list, tuple)) else ()


def _size_of(value: Any) -> int:
    """Return the bytes of a value and a reference to it, without nested values."""
    if isinstance(value, Tensor):
        return REFERENCE + value.numel() * value.element_size()
    if isinstance(value, str):
        return REFERENCE + len(value)
    return REFERENCE
