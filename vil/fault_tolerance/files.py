"""Atomically written files."""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .machine_errors import cause_of

_logger = logging.getLogger(__name__)

UNFINISHED = r"\..+\.[0-9a-f]{16}\.vil\.tmp"  # names of unfinished files, which no other program uses
# error codes of unsupported fsync
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


def write_atomically(
    path: Path, content: str | bytes | Callable[[BinaryIO], object], previous: Path | None = None
) -> None:
    """Write a file so that readers see the old content or the whole new content, also after a loss of power.

    The new content is written to a new file of an unpredictable name, so that a link left by another user has no
    effect. The new file replaces `path`, also if `path` is a link.

    Args:
        path: The file.
        content: The content, or a function that writes it.
        previous: Name that the old file gets once the new one is complete on the disk.

    Raises:
        OSError: Writing failed. `path` has the old content or the whole new one, and `previous` is complete if it was.
    """
    temporary = _unfinished(path)
    kept = _unfinished(previous) if previous else None
    try:
        with open(temporary, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            _sync(file.fileno(), path.parent)

        if previous and kept and path.exists():
            _replace_keeping(temporary, path, previous, kept)
        else:
            os.replace(temporary, path)
    except BaseException as error:
        for unfinished in filter(None, (temporary, kept)):
            with suppress(OSError):
                unfinished.unlink()
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error  # the error of a full disk names no file
        raise
    _sync_folder(path.parent)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.vil.tmp")


def _replace_keeping(temporary: Path, path: Path, previous: Path, kept: Path) -> None:
    """Rename `temporary` to `path`, whose old file becomes `previous`. `kept` is a free name."""
    try:
        os.link(path, kept)
    except OSError:  # the file system has no hard links
        _replace_without_links(temporary, path, previous)
        return
    os.replace(temporary, path)
    os.replace(kept, previous)


def _replace_without_links(temporary: Path, path: Path, previous: Path) -> None:
    """Rename `path` to `previous` and `temporary` to `path`. If the second step fails, `path` gets its name back."""
    os.replace(path, previous)
    try:
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.replace(previous, path)
        raise


def _sync(descriptor: int, folder: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        warn_once(f"{folder} is on a file system without fsync ({cause_of(error)}): a loss of power may lose files")


def _sync_folder(folder: Path) -> None:
    """Make renamed files last through a loss of power."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows does not open folders
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a writable folder need not be readable
        return
    try:
        _sync(descriptor, folder)
    finally:
        os.close(descriptor)


@functools.cache
def warn_once(message: str) -> None:
    _logger.warning("%s", message)
