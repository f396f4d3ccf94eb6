"""Files that are written whole or not at all, and folders that one run holds at a time."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

UNFINISHED = r"\..+\.[0-9a-f]{16}\.vil\.tmp"  # the names of files that are being written, and of nobody else's
PATIENCE = 10  # seconds that a run waits for its folder: what a killed one has started outlives it for some


class FolderInUseError(RuntimeError):
    """Another run holds the folder."""


def write_atomically(
    path: Path, content: str | bytes | Callable[[BinaryIO], object], previous: Path | None = None
) -> None:
    """Writes a file that is seen whole or not at all, after a loss of power as well.

    Until then it has a name that nobody can know, and is a new file: a link that somebody left here leads nowhere. It
    takes the place of `path` itself if that is a link.

    Args:
        path: The file.
        content: The content, or a function that writes it.
        previous: The file that was at `path` moves here, once the new one is complete on the disk.

    Raises:
        OSError: It could not be written; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.vil.tmp")
    try:
        with open(temporary, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if previous and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error  # that of a full disk has no name
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the renaming of files last through a loss of power."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, which opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderLock:
    """A run's hold on its folder, which ends with `with`, or with the process, however that ends.

    Args:
        folder: Made if it is missing. Half-written files of processes that were killed are removed.

    Raises:
        FolderInUseError: The message says by which run, since when, and what to do.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.lock, holder = FileLock(folder / ".lock"), folder / ".holder"
        try:
            self.lock.acquire(timeout=PATIENCE)
        except Timeout:
            who = holder.read_text() if holder.exists() else "another process"
            raise FolderInUseError(
                f"{folder} is in use: {who}. End that run first, or start this one in a folder of its own with "
                "--experiment NAME"
            ) from None
        for left in folder.glob(".*.vil.tmp"):
            if re.fullmatch(UNFINISHED, left.name) and left.is_file():
                left.unlink(missing_ok=True)
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        write_atomically(holder, f"process {os.getpid()} on {socket.gethostname()} has trained here since {now}")

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_) -> None:
        self.lock.release()
