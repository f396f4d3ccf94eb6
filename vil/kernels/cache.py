"""A cache on disk of code that is loaded and run: what nobody but this user or root can have written.

The folder and its entries are theirs and not for others to write; no link is followed. An entry begins with a digest,
so that what a full disk or a killed process has left is made anew; it is called .sealed, not .cubin, since versions
before this one would load it as it is. Where there is no folder to use there is no cache, which costs a compilation a
process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

DIGEST_BYTES = 32
STALE = 3600  # seconds after which nobody is still writing to a temporary file
_warned = False


def read(name: str, key: bytes) -> bytes | None:
    """What was written under this name for this key, or None if there is nothing or what there is cannot be trusted."""
    try:
        with _folder() as (path, folder), open(name, "rb", opener=_opener(folder)) as file:
            _check_writers(path / name, os.fstat(file.fileno()))
            digest, content = file.read(DIGEST_BYTES), file.read()
    except (OSError, RuntimeError):  # the latter of Path.home() for a user without one
        return None
    return content if digest == _digest(key, content) else None


def write(name: str, key: bytes, content: bytes) -> None:
    """Keeps the content, if it can be kept: whole, or nothing of it."""
    temporary = f".{name}.{secrets.token_hex(8)}.tmp"
    with contextlib.suppress(OSError, RuntimeError), _folder() as (_, folder):
        _remove_stale(folder)
        try:
            with open(temporary, "xb", opener=_opener(folder)) as file:
                file.write(_digest(key, content) + content)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(key).digest() + content).digest()


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, int]]:
    """The folder, made if it is missing, and a descriptor of it; an OSError or RuntimeError if it cannot be used."""
    if os.name != "posix":
        raise OSError("only POSIX says who can have written a file")
    path = Path(
        os.environ.get("VIL_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vision-longhorn"
    )
    if path.is_symlink():
        _distrust(path, "is a symbolic link, which leads to what others may choose", "Remove it")
    for folder in reversed((path, *path.parents)):
        folder.mkdir(mode=0o700, exist_ok=True)
    # what is checked is what is used, wherever others may move the path
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_writers(path, os.fstat(descriptor))
        yield path, descriptor
    finally:
        os.close(descriptor)


def _opener(folder: int):
    # without waiting, should the name be that of a pipe
    return lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)


def _check_writers(path: Path, status: os.stat_result) -> None:
    """Raises an OSError if others can have written what is there, or if it is neither folder nor file."""
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        raise OSError(f"{path} is no file")
    if status.st_uid not in (os.geteuid(), 0):
        _distrust(path, f"belongs to another user, number {status.st_uid}", "Remove it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _distrust(path, "can be written by other users", f"`chmod go-w {path}`")


def _distrust(path: Path, reason: str, remedy: str) -> NoReturn:
    """Raises an OSError, and says why once a process."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{path} {reason}. Kernels are compiled without it, as what is kept there would be run. {remedy}, or name "
            "a folder of your own by VIL_CACHE_DIR.",
            stacklevel=2,
        )
    raise PermissionError(f"{path} {reason}")


def _remove_stale(folder: int) -> None:
    """What processes that were killed in the middle of writing have left."""
    for name in os.listdir(folder):
        if re.fullmatch(r"\..+\.sealed\.[0-9a-f]{16}\.tmp", name):
            with contextlib.suppress(OSError):  # of another process that removes it
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < time.time() - STALE:
                    os.unlink(name, dir_fd=folder)
