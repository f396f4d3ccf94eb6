"""Machine errors: I/O and out-of-memory errors, as opposed to errors in a file's content."""

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

BACK_OFFS = (0.1, 0.4, 1.5, 3.0, 5.0)  # seconds to wait before each retry of a read; 10 seconds in total
REMEDIES = {
    "make room on the disk": (errno.ENOSPC, errno.EDQUOT),
    "give this user the permission": (errno.EACCES, errno.EPERM),
    "mount the file system read-write": (errno.EROFS,),
    "mount the disk, or move the folder back if it was moved": (errno.ENOENT, errno.ENOTDIR),
    "raise the limit of open files (ulimit -n)": (errno.EMFILE, errno.ENFILE),
    "raise the limit of file sizes (ulimit -f), or use a file system that supports larger files": (errno.EFBIG,),
    "free memory on this machine": (errno.ENOMEM,),
    "raise the limit of processes (ulimit -u)": (errno.EAGAIN,),
}


class WorkersError(ConfigError):
    """Error in a data-loader worker. The message stays one line when PyTorch raises the error in the main process."""

    def __init__(self, message: str):
        # drop the traceback: PyTorch re-raises a worker's error with the worker's whole traceback as the message
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class MachineError(WorkersError):
    """A file cannot be read because of an I/O or memory error; the file's content may be intact."""

    @classmethod
    def reading(cls, name: str, error: BaseException) -> MachineError:
        """Return the MachineError for an `error` that was raised while reading the file `name`."""
        return cls(f"cannot read {label_of(name)}: {cause_of(error)}. To continue, {remedy_for(error)}")


def is_machine_error(error: BaseException) -> bool:
    """Return whether an error is an I/O or out-of-memory error instead of an error in a file's content."""
    if isinstance(error, OSError):
        return error.errno not in (None, errno.EINVAL)
    return isinstance(error, MemoryError) or (type(error) is RuntimeError and "allocate memory" in str(error))


def find_machine_error(error: BaseException | None) -> BaseException | None:
    """Return the I/O or out-of-memory error that caused `error`, or None if the cause is different."""
    while error is not None and not is_machine_error(error):
        error = error.__cause__ or error.__context__
    return error


def remedy_for(error: BaseException) -> str:
    """Return the remedy for an I/O or out-of-memory error as text for a message."""
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM * is_machine_error(error)
    return next((remedy for remedy, numbers in REMEDIES.items() if number in numbers), "check the disk and its mount")


def cause_of(error: BaseException) -> str:
    """Return the reason for an error in one line, without the file name."""
    return one_line(getattr(error, "strerror", None) or error, 400) or type(error).__name__


def retry(function: Callable[[], T]) -> T:
    """Return the result of `function`. After an I/O error, call `function` again for about ten seconds, then raise."""
    for pause in BACK_OFFS:
        try:
            return function()
        except Exception as error:
            if not is_machine_error(error) or isinstance(error, MemoryError):
                raise
        time.sleep(pause)
    return function()


def retry_reading(name: str, read: Callable[[], T]) -> T:
    """Return the result of `read`, a function that reads the file `name`. `read` is called again after I/O errors.

    Raises:
        MachineError: The I/O error persists after about ten seconds. Errors in the file's content are raised
            unchanged.
    """
    try:
        return retry(read)
    except Exception as error:
        if is_machine_error(error) and not isinstance(error, MemoryError):  # decoders raise MemoryError for huge images
            raise MachineError.reading(name, error) from None  # no cause, because workers send tracebacks as text
        raise


class RetryingFile(io.FileIO):
    """Raw file for a BufferedReader. `readinto` is retried after I/O errors for about ten seconds."""

    def readinto(self, buffer: Any) -> int:
        return retry_reading(str(self.name), lambda: super(RetryingFile, self).readinto(buffer))


def exists(path: Path) -> bool:
    """Return whether a path exists. Raise I/O errors instead of reporting the path as missing."""

    def look() -> bool:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    return retry(look)
