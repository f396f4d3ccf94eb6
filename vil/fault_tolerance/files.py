"""Atomically written files, locked folders, and what to do when the machine fails to read or write."""

from __future__ import annotations

import errno
import functools
import importlib
import logging
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..text import one_line, printable

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # Windows
    fcntl = None

_logger = logging.getLogger(__name__)
T = TypeVar("T")

UNFINISHED = r"\..+\.[0-9a-f]{16}\.vil\.tmp"  # names of unfinished files, which no other program uses
PATIENCE = 10  # seconds to wait for a folder's lock, because the workers of a killed run outlive it for some seconds
BACK_OFFS = (0.1, 0.4, 1.5, 3.0, 5.0)  # seconds between two attempts to read, 10 in all
IN_USE = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # error codes of a lock that another process holds
# error codes of unsupported fsync
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
MOST_HOLDER = 1000  # maximum bytes of .holder to show
REMEDIES = {
    "make room there": (errno.ENOSPC, errno.EDQUOT),
    "give this user the permission": (errno.EACCES, errno.EPERM),
    "mount the file system read-write": (errno.EROFS,),
    "mount the disk, or move the folder back if it was moved": (errno.ENOENT, errno.ENOTDIR),
    "raise the limit of open files (ulimit -n)": (errno.EMFILE, errno.ENFILE),
    "raise the limit of file sizes (ulimit -f), or use a file system of larger files": (errno.EFBIG,),
    "free memory on this machine": (errno.ENOMEM,),
    "raise the limit of processes (ulimit -u)": (errno.EAGAIN,),
}


class FolderInUseError(RuntimeError):
    """Another run holds the folder's lock."""


def is_of_machine(error: BaseException) -> bool:
    """Return whether an error comes from the machine, such as its disk or memory, instead of a file's content."""
    if isinstance(error, OSError):
        return error.errno not in (None, errno.EINVAL)
    return isinstance(error, MemoryError) or (type(error) is RuntimeError and "allocate memory" in str(error))


def machine_error_in(error: BaseException | None) -> BaseException | None:
    """Return the machine's error that caused an error, such as one of PyTorch's writer; None if there is none."""
    while error is not None and not is_of_machine(error):
        error = error.__cause__ or error.__context__
    return error


def remedy_for(error: BaseException) -> str:
    """Return what a user can do about an error of the machine."""
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM * is_of_machine(error)
    return next((remedy for remedy, numbers in REMEDIES.items() if number in numbers), "check the disk and its mount")


def cause_of(error: BaseException) -> str:
    """Return the reason of an error in one line, without the name of the file."""
    return one_line(getattr(error, "strerror", None) or error, 400) or type(error).__name__


def retried(act: Callable[[], T]) -> T:
    """Return what `act` returns. Errors of the machine are retried for about ten seconds, and then raised."""
    for pause in BACK_OFFS:
        try:
            return act()
        except Exception as error:
            if not is_of_machine(error) or isinstance(error, MemoryError):
                raise
        time.sleep(pause)
    return act()


def exists(path: Path) -> bool:
    """Return whether there is something at a path. An error of the machine is raised, and not taken for absence."""

    def look() -> bool:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    return retried(look)


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
    temporary, kept = _unfinished(path), _unfinished(previous) if previous else None
    try:
        with open(temporary, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            _sync(file.fileno(), path.parent)
        if previous and kept and path.exists():
            try:
                os.link(path, kept)
            except OSError:  # the file system has no hard links
                _replace_both(temporary, path, previous)
            else:
                os.replace(temporary, path)
                os.replace(kept, previous)
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


def _replace_both(temporary: Path, path: Path, previous: Path) -> None:
    """Rename `path` to `previous` and `temporary` to `path`; `path` gets its name back if the second step fails."""
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
        _warn_once(f"{folder} is on a file system without fsync ({cause_of(error)}): a loss of power may lose files")


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
def _warn_once(message: str) -> None:
    _logger.warning("%s", message)


class FolderLock:
    """A run's lock on its folder, held until the end of `with` or of the process, however the process ends.

    On a file system without locks a warning says so, and the run trains on.

    Args:
        folder: The folder, which is created if it is missing. Unfinished files of killed processes are removed.

    Raises:
        FolderInUseError: Another run holds the folder. The message says which one, since when, and what to do.
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        holder, end = folder / ".holder", time.monotonic() + PATIENCE
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        self.release = weakref.finalize(self, _unlock, file, os.getpid())
        while not _lock(file, folder):
            if time.monotonic() > end:
                self.release()
                raise FolderInUseError(
                    f"{folder} is in use: {_read_holder(holder)}. End that run first, or start this one in a folder of "
                    "its own with --experiment NAME"
                )
            time.sleep(0.05)
        for left in folder.glob(".*.vil.tmp"):
            if re.fullmatch(UNFINISHED, left.name) and left.is_file():
                left.unlink(missing_ok=True)
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        write_atomically(holder, f"process {os.getpid()} on {socket.gethostname()} has trained here since {now}")

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_) -> None:
        self.release()


def _lock(file: int, folder: Path) -> bool:
    """Lock an open file. Return False if another process holds the lock."""
    try:
        if fcntl is None:
            msvcrt: Any = importlib.import_module("msvcrt")
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in IN_USE:
            return False
        _warn_once(f"{folder} cannot be locked ({cause_of(error)}): start no second run in this folder")
    return True


def _unlock(file: int, process: int) -> None:
    """Unlock and close a file. Workers forked from the process only close their copy."""
    if fcntl is not None and os.getpid() == process:  # Windows unlocks a file when it is closed
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _read_holder(holder: Path) -> str:
    """Return what .holder says, in one printable line; the file may be anything."""
    try:
        if holder.is_file():  # opening a pipe would wait for its writer
            with open(holder, "rb") as file:
                return printable(one_line(file.read(MOST_HOLDER).decode(errors="replace"), MOST_HOLDER))
    except OSError:
        pass
    return "another process"
