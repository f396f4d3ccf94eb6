"""Lock that lets only one run at a time write to a run folder."""

from __future__ import annotations

import errno
import importlib
import os
import re
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..text import one_line, printable
from .files import UNFINISHED, warn_once, write_atomically
from .machine_errors import cause_of

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # Windows has no module `fcntl`
    fcntl = None

PATIENCE = 10  # seconds; maximum wait for a lock, because the workers of a killed run keep its lock for some seconds
IN_USE = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # error codes of a lock that another process holds
MOST_HOLDER = 1000  # maximum number of bytes of the file .holder that a message quotes


class FolderInUseError(RuntimeError):
    """Another run holds the folder's lock."""


class FolderLock:
    """Exclusive lock of a run on its folder, released by `release` or when the process exits or dies.

    If the file system does not support locks, a warning is logged and the run continues without a lock.

    Args:
        folder: The run folder, created if it is missing. Unfinished files of killed processes are deleted.

    Raises:
        FolderInUseError: Another run holds the lock. The message names the other run, its start time and a remedy.
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
                    f"{folder} is in use: {_read_holder(holder)}. Stop that run first, or start this run in another "
                    "folder with --experiment NAME"
                )
            time.sleep(0.05)
        for left in folder.glob(".*.vil.tmp"):
            if re.fullmatch(UNFINISHED, left.name) and left.is_file():
                left.unlink(missing_ok=True)
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        write_atomically(holder, f"process {os.getpid()} on {socket.gethostname()} has trained here since {now}")


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
        warn_once(f"{folder} cannot be locked ({cause_of(error)}): do not start a second run in this folder")
    return True


def _unlock(file: int, process: int) -> None:
    """Unlock and close a file. A forked worker only closes its file descriptor, so that the run keeps the lock."""
    if fcntl is not None and os.getpid() == process:  # Windows unlocks a file when the file is closed
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _read_holder(holder: Path) -> str:
    """Return the content of the file .holder as one printable line, or "another process" if it cannot be read."""
    try:
        if holder.is_file():  # opening a named pipe would block until a writer opens the pipe
            with open(holder, "rb") as file:
                return printable(one_line(file.read(MOST_HOLDER).decode(errors="replace"), MOST_HOLDER))
    except OSError:
        pass
    return "another process"
