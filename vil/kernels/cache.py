"""Disk cache of compiled code that only this user or root can have written.

The folder and its entries must belong to this user or root, must not be writable by others, and must not be symbolic
links. An entry starts with a digest of its key and content, so that damaged entries are replaced. Entries are called
.sealed instead of .cubin, because earlier versions would load them without checks. Without a usable folder there is no
cache, and each process compiles again.
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
STALE = 3600  # seconds after which a temporary file is stale
_warned = False


def read(name: str, key: bytes) -> bytes | None:
    """Return the content of a cache entry, or None if it is missing, untrusted or damaged, or has another key."""
    try:
        with _folder() as (path, folder), open(name, "rb", opener=_opener(folder)) as file:
            _check_writers(path / name, os.fstat(file.fileno()))
            digest, content = file.read(DIGEST_BYTES), file.read()
    except (OSError, RuntimeError):  # Path.home() raises RuntimeError for a user without a home folder
        return None
    return content if digest == _digest(key, content) else None


def write(name: str, key: bytes, content: bytes) -> None:
    """Write a cache entry atomically, ignoring errors."""
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
    """Create the cache folder if missing, and yield its path and descriptor.

    Raise an OSError or RuntimeError if the folder is unusable.
    """
    if os.name != "posix":
        raise OSError("the cache needs POSIX file permissions")
    path = Path(
        os.environ.get("VIL_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vision-longhorn"
    )
    if path.is_symlink():
        _distrust(path, "is a symbolic link, whose target others may control", "Remove it")
    for folder in reversed((path, *path.parents)):
        folder.mkdir(mode=0o700, exist_ok=True)
    # the next check and all accesses use this descriptor, so that nobody can replace the folder after the checks
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_writers(path, os.fstat(descriptor))
        yield path, descriptor
    finally:
        os.close(descriptor)


def _opener(folder: int):
    # with O_NONBLOCK, opening a pipe does not wait for a writer
    return lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)


def _check_writers(path: Path, status: os.stat_result) -> None:
    """Raise an OSError if other users could have written to the path, or if the path is neither a folder nor a file."""
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        raise OSError(f"{path} is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        _distrust(path, f"belongs to another user (uid {status.st_uid})", "Remove it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _distrust(path, "can be written by other users", f"`chmod go-w {path}`")


def _distrust(path: Path, reason: str, remedy: str) -> NoReturn:
    """Raise a PermissionError for a cache path that others may control, after one warning per process."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{path} {reason}. Kernels are compiled without this cache, because cached code is executed. {remedy}, or "
            "set VIL_CACHE_DIR to a folder of your own.",
            stacklevel=2,
        )
    raise PermissionError(f"{path} {reason}")


def _remove_stale(folder: int) -> None:
    """Remove stale temporary files of killed processes."""
    for name in os.listdir(folder):
        if re.fullmatch(r"\..+\.sealed\.[0-9a-f]{16}\.tmp", name):
            with contextlib.suppress(OSError):  # another process may remove the file at the same time
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < time.time() - STALE:
                    os.unlink(name, dir_fd=folder)
