"""Errors that a command reports in one line, without a traceback."""

from __future__ import annotations

from .text import printable


class ConfigError(ValueError):
    """An option is unknown, has an invalid value, or contradicts another option."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or used for this model.

    The message is printable, even if names in the file are not.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))
