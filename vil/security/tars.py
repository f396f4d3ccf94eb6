"""Reader of untrusted tar files in bounded memory. Each size in a header is checked before memory is allocated."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

BLOCK = 512
PIECE = 2**20  # maximum number of bytes per read when skipping data
MOST_NOTES = {
    tarfile.XGLTYPE: 2**10,
    None: 2**16,
}  # maximum bytes per extended header; global headers (XGLTYPE) apply to all members
GZIP, MOST_RATIO = b"\x1f\x8b", 1032  # leading bytes of a gzip file, and maximum compression ratio of gzip
NOTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
DEEPEST = 3  # maximum nesting depth of tar files in tar files


class _Rejoined:
    """File whose first bytes were already read; `read` returns these bytes first."""

    def __init__(self, start: bytes, file: Any):
        self.start, self.file = start, file

    def read(self, count: int) -> bytes:
        start, self.start = self.start[:count], self.start[count:]
        return start + self.file.read(count - len(start))


def decompressed(file: Any) -> Any:
    """Return a tar file as a stream, decompressed if the file is gzip-compressed. `file` needs only a `read` method."""
    start = file.read(len(GZIP))
    stream: Any = _Rejoined(start, file)
    return gzip.GzipFile(fileobj=stream) if start == GZIP else stream


@dataclass
class Member:
    """Member of a tar file."""

    name: str
    size: int  # number of bytes that the member's header claims
    is_file: bool


def members(stream: Any) -> Iterator[Member]:
    """Yield the members of a tar file. The caller must read or skip the data of each member before the next one.

    Raises:
        tarfile.HeaderError: A header is invalid.
        tarfile.ReadError: A member is sparse or has a negative size, or its extended header is too large.
    """
    name, size = "", None  # name and size of the next member, as given by its extended headers
    while header := stream.read(BLOCK):
        if not header.strip(b"\0"):
            return
        found = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        if found.size < 0:
            raise tarfile.ReadError(f"the size of a member must not be negative, got {found.size} bytes")
        if found.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("sparse files in a tar file are not supported, because their size is unbounded")
        if found.type in NOTES:
            notes = _read_notes(stream, found)
            if found.type == tarfile.GNUTYPE_LONGNAME:
                name = os.fsdecode(notes.partition(b"\0")[0])
            elif found.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                if match := re.search(rb"(?:^|\n)\d+ path=([^\n]*)\n", notes):
                    name = os.fsdecode(match[1])
                if match := re.search(rb"(?:^|\n)\d+ size=(\d{1,18})\n", notes):
                    size = int(match[1])
            continue

        has_data = found.isreg() or found.type not in tarfile.SUPPORTED_TYPES
        if size is None:
            size = found.size
        yield Member(name or found.name, size if has_data else 0, found.isreg())
        name, size = "", None


def _read_notes(stream: Any, found: tarfile.TarInfo) -> bytes:
    """Return the content of an extended header of a tar file."""
    if found.size > MOST_NOTES.get(found.type, MOST_NOTES[None]):
        raise tarfile.ReadError(f"extended header of a member is too large: {found.size} bytes")
    notes = stream.read(_blocks(found.size))[: found.size]
    if b"GNU.sparse." in notes:
        raise tarfile.ReadError("sparse files in a tar file are not supported, because their size is unbounded")
    return notes


def read_member(stream: Any, member: Member, most: int) -> bytes:
    """Read past a member and return its data, or b"" if the member has more than `most` bytes."""
    data = stream.read(member.size if member.size <= most else 0)
    if len(data) < member.size <= most:
        raise tarfile.ReadError("unexpected end of the tar file within a member")
    left = _blocks(member.size) - len(data)
    while left > 0 and (piece := stream.read(min(left, PIECE))):
        left -= len(piece)
    return data


def check_tar(file: BinaryIO, depth: int = 0) -> None:
    """Raise a tarfile.ReadError if Python's tarfile would need far more memory than a tar file's headers occupy.

    Sparse members would need more memory, and so would large global headers, which tarfile copies to all members.
    Members with a negative size and other large headers are rejected, too. Nested tar files are checked recursively.
    """
    if depth > DEEPEST:
        raise tarfile.ReadError(f"tar files must be nested at most {DEEPEST} levels deep, got {depth}")
    try:
        for member in members(file):
            start = file.tell()
            if member.is_file and member.name.lower().endswith(".tar"):
                check_tar(file, depth + 1)
            file.seek(start + _blocks(member.size))
    except (tarfile.HeaderError, OverflowError):  # Python's tarfile also stops reading at an invalid header
        return


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
