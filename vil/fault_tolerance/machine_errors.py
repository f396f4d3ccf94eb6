"""Errors of the machine, such as its disk, mounts and memory, as opposed to errors in a file's content."""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError
from ..text import label_of, one_line

T = TypeVar("T")

BACK_OFFS = (0.1, 0.4, 1.5, 3.0, 5.0)  # seconds between two attempts to read, 10 in all
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


class WorkersError(ConfigError):
    """An error of a loader's worker whose message stays one line in the training process."""

    def __init__(self, message: str):
        # PyTorch recreates a worker's error with its traceback as the message
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class MachineError(WorkersError):
    """The machine could not read a file, which may be intact."""

    @classmethod
    def reading(cls, name: str, error: BaseException) -> MachineError:
        """Return the MachineError for an error that occurred while the file of this name was read."""
        return cls(f"cannot read {label_of(name)}: {cause_of(error)}. To continue, {remedy_for(error)}")


def is_machine_error(error: BaseException) -> bool:
    """Return whether an error comes from the machine, such as its disk or memory, instead of a file's content."""
    if isinstance(error, OSError):
        return error.errno not in (None, errno.EINVAL)
    return isinstance(error, MemoryError) or (type(error) is RuntimeError and "allocate memory" in str(error))


def find_machine_error(error: BaseException | None) -> BaseException | None:
    """Return the machine's error that caused an error, such as one of PyTorch's writer; None if there is none."""
    while error is not None and not is_machine_error(error):
        error = error.__cause__ or error.__context__
    return error


def remedy_for(error: BaseException) -> str:
    """Return what a user can do about an error of the machine."""
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM * is_machine_error(error)
    return next((remedy for remedy, numbers in REMEDIES.items() if number in numbers), "check the disk and its mount")


def cause_of(error: BaseException) -> str:
    """Return the reason of an error in one line, without the name of the file."""
    return one_line(getattr(error, "strerror", None) or error, 400) or type(error).__name__


def retry(function: Callable[[], T]) -> T:
    """Return the result of `function`. Errors of the machine are retried for about ten seconds, and then raised."""
    for pause in BACK_OFFS:
        try:
            return function()
        except Exception as error:
            if not is_machine_error(error) or isinstance(error, MemoryError):
                raise
        time.sleep(pause)
    return function()


def retry_reading(name: str, read: Callable[[], T]) -> T:
    """Return the result of `read`, which reads the file of this name. Errors of the machine are retried.

    Raises:
        MachineError: The machine still failed after about ten seconds. Errors that are due to the file's content are
            raised as they are.
    """
    try:
        return retry(read)
    except Exception as error:
        if is_machine_error(error) and not isinstance(error, MemoryError):  # which a decoder raises on a huge image
            raise MachineError.reading(name, error) from None  # whose traceback would hold the loader in a cycle
        raise


class RetryingFile(io.FileIO):
    """A file whose reads are retried while the machine fails."""

    def readinto(self, buffer: Any) -> int:
        return retry_reading(str(self.name), lambda: super(RetryingFile, self).readinto(buffer))


def exists(path: Path) -> bool:
    """Return whether a path exists. An error of the machine is raised, and does not count as absence."""

    def look() -> bool:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    return retry(look)
