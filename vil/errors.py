"""Errors that commands report on one line without a traceback."""

from __future__ import annotations

import os
import re

from .text import printable


class ConfigError(ValueError):
    """The options are invalid, contradict each other, or do not fit the data or the machine."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or used for this model.

    Unprintable characters in the message are replaced.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


def reject_url(path: str | os.PathLike, error: type[Exception] = ConfigError) -> None:
    """Raise an error if a path that does not exist is a URL, because callers read only local files."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", os.fspath(path))  # pathlib removes one of a URL's slashes
    if found:
        raise error(
            f"{found[1]}://{os.fspath(path)[found.end() :]} is a URL: download the file and pass its path instead"
        )
