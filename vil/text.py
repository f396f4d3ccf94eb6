"""One-line formatting of untrusted strings in messages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

LONGEST_LABEL = 1000  # maximum number of characters in a class name


def one_line(text: object, most: int) -> str:
    """Strip the text, collapse each run of whitespace to a space, and truncate the text to `most` characters."""
    return " ".join(str(text).split())[:most]


def shown(value: Any) -> str:
    """Return a value's repr on one line, truncated to 200 characters."""
    try:
        line = one_line(repr(value), 201)
    except (ValueError, RecursionError):  # raised for integers with thousands of digits and for deeply nested values
        return f"a value of type {type(value).__name__} that is too large to print"
    return line if len(line) <= 200 else line[:197] + "..."


def nearest(name: str, names: Iterable[str], spelled: Callable[[str], str] = repr) -> str:
    """Return "; did you mean ...?" with the most similar name, or "" if no name is similar.

    `spelled` returns the form of a name in the message.
    """
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {spelled(found[0])}?" if found else ""


def counted(count: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with the noun in the singular or the plural, such as "1 image" and "2 images"."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def printable(text: str) -> str:
    """Replace unprintable characters, such as terminal escapes, with "?"."""
    return "".join(character if character.isprintable() else "?" for character in text)


def label_of(name: str) -> str:
    """Make a class name from an untrusted checkpoint printable, and truncate the name to `LONGEST_LABEL` characters."""
    return printable(name[:LONGEST_LABEL])
