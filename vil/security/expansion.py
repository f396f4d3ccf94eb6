"""Limit on the memory that the nested values of a pickle may take.

A pickle can reference one value many times. So the values of a small file can take gigabytes when they are copied or
printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from torch import Tensor

from .errors import TorchFileError

TOO_DEEP = 20  # nesting depth at which values are rejected; checkpoints have about five levels
REFERENCE = 8  # bytes per reference to a value


def check_expansion(content: Any, most_bytes: int) -> None:
    """Check the memory that nested values would take if each reference were replaced by a copy of its value.

    The values are visited level by level, and the visit stops at the limit.

    Args:
        content: Nested values, such as a checkpoint.
        most_bytes: Maximum number of bytes for tensors, text and references.

    Raises:
        TorchFileError: The values would take more than `most_bytes`, or are nested too deeply.
    """
    total = 0
    level = [content]
    for _ in range(1, TOO_DEEP):
        total += sum(map(_size_of, level))
        if total > most_bytes:
            raise TorchFileError(
                f"the values in the file must need at most {most_bytes} bytes of memory, got at least {total}"
            )
        children = chain.from_iterable(map(_children_of, level))
        # The list ends one value above the limit, because references to this many values already exceed `most_bytes`.
        level = list(islice(children, most_bytes // REFERENCE + 1))
        if not level:
            return
    raise TorchFileError(f"the file's values must be nested less than {TOO_DEEP} levels deep")


def _children_of(value: Any) -> Iterable[Any]:
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return chain(value, value.values())
    return value if isinstance(value, (list, tuple)) else ()


def _size_of(value: Any) -> int:
    """Return the bytes of a value and of one reference to the value, without the values nested inside.

    A character of text counts as one byte, although Python uses one to four bytes per character.
    """
    if isinstance(value, Tensor):
        return REFERENCE + value.numel() * value.element_size()
    if isinstance(value, str):
        return REFERENCE + len(value)
    return REFERENCE
