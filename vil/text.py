"""Text of any origin in messages of a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

LONGEST_LABEL = 1000  # characters of the name of a class


def one_line(text: object, most: int) -> str:
    """Its first characters, at most so many, without its line breaks."""
    return " ".join(str(text).split())[:most]


def shown(value: Any) -> str:
    """Return the repr of a value of any size, shortened for a message."""
    try:
        line = one_line(repr(value), 201)
    except (ValueError, RecursionError):  # integers of thousands of digits, and deeply nested values
        return f"a value of type {type(value).__name__} that is too large to print"
    return line if len(line) <= 200 else line[:197] + "..."


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that is none of `names`; empty where none of them is like it."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def label_of(name: str) -> str:
    """The name of a class as a checkpoint holds it, which can be shown in a line wherever it comes from."""
    return printable(name[:LONGEST_LABEL])
