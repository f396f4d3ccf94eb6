"""Atomic writing of files."""

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

# pattern of the names of temporary files (see `_unfinished`), which no other program uses
UNFINISHED = r"\..+\.[0-9a-f]{16}\.vil\.tmp"
# error codes of fsync on file systems that do not support fsync
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


def write_atomically(
    path: Path, content: str | bytes | Callable[[BinaryIO], object], previous: Path | None = None
) -> None:
    """Write a file atomically: readers see either the old content or the complete new content, even after power loss.

    The new content is written to a temporary file, which then replaces `path`, even if `path` is a link. The name of
    the temporary file is unpredictable, so that another user cannot prepare a link with this name. With `previous` on a
    file system without hard links, `path` does not exist for a moment.

    Args:
        path: Path of the file to write.
        content: The new content, or a function that writes the new content to an open file.
        previous: Path that the old file is renamed to once the new file is complete on the disk.

    Raises:
        OSError: Writing failed. `path` has the old or the complete new content. With hard links, an existing `previous`
            is still a complete file.
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
            raise OSError(error.errno, error.strerror, str(path)) from error  # "disk full" errors do not name a file
        raise
    _sync_folder(path.parent)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.vil.tmp")


def _replace_keeping(temporary: Path, path: Path, previous: Path, kept: Path) -> None:
    """Rename `temporary` to `path`, and keep the old file as `previous`.

    If the file system supports hard links, `path` exists at all times. `kept` is the temporary hard link.
    """
    try:
        os.link(path, kept)
    except OSError:  # the file system has no hard links
        _replace_without_links(temporary, path, previous)
        return
    os.replace(temporary, path)
    os.replace(kept, previous)


def _replace_without_links(temporary: Path, path: Path, previous: Path) -> None:
    """Rename `path` to `previous`, then `temporary` to `path`. If the second rename fails, undo the first one."""
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
        warn_once(f"the file system of {folder} has no fsync ({cause_of(error)}): files may be lost on power loss")


def _sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that renamed files keep their new names after power loss."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open folders
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder can be writable without being readable
        return
    try:
        _sync(descriptor, folder)
    finally:
        os.close(descriptor)


@functools.cache
def warn_once(message: str) -> None:
    _logger.warning("%s", message)
