"""Errors that commands report on one line without a traceback."""

from __future__ import annotations

from .text import printable


class ConfigError(ValueError):
    """An option is unknown, has an invalid value, or contradicts another option."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or used for this model.

    Unprintable characters in the message are replaced.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))
