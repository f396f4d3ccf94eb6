"""Reader of untrusted tar files in bounded memory: no size that a header claims is allocated."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

BLOCK = 512
PIECE = 2**20  # bytes that are read at once
MOST_NOTES = {tarfile.XGLTYPE: 2**10, None: 2**16}  # bytes of a member's extended header; global ones hold for all
GZIP, MOST_RATIO = b"\x1f\x8b", 1032  # the first bytes of a gzip file, and the most by which gzip compresses
NOTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
DEEPEST = 3  # tar files inside of tar files


class _Rejoined:
    """A file whose start has been read."""

    def __init__(self, start: bytes, file: Any):
        self.start, self.file = start, file

    def read(self, count: int) -> bytes:
        start, self.start = self.start[:count], self.start[count:]
        return start + self.file.read(count - len(start))


def decompressed(file: Any) -> Any:
    """Return the stream of a tar file, decompressed if the file is one of gzip. The file needs only `read`."""
    start = file.read(len(GZIP))
    stream: Any = _Rejoined(start, file)
    return gzip.GzipFile(fileobj=stream) if start == GZIP else stream


@dataclass
class Member:
    """A file in a tar file."""

    name: str
    size: int  # as its header says
    is_file: bool


def members(stream: Any) -> Iterator[Member]:
    """Yield the members of a tar file. The caller leaves the stream at the start of a member's data or after the data.

    Raises:
        tarfile.HeaderError: A header is broken.
        tarfile.ReadError: A member is sparse, or its extended header is too large.
    """
    name, size = "", None  # of the next member, by its extended headers
    while header := stream.read(BLOCK):
        if not header.strip(b"\0"):
            return
        found = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        if found.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a sparse member, which can claim any size")
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
    """Return the content of an extended header."""
    if found.size > MOST_NOTES.get(found.type, MOST_NOTES[None]):
        raise tarfile.ReadError(f"{found.size} bytes of notes on a member")
    notes = stream.read(_blocks(found.size))[: found.size]
    if b"GNU.sparse." in notes:
        raise tarfile.ReadError("a sparse member, which can claim any size")
    return notes


def read_member(stream: Any, member: Member, most: int) -> bytes:
    """Return the data of a member, or no data if the member has more than `most` bytes."""
    data = stream.read(member.size if member.size <= most else 0)
    if len(data) < member.size <= most:
        raise tarfile.ReadError("unexpected end of data")
    left = _blocks(member.size) - len(data)
    while left > 0 and (piece := stream.read(min(left, PIECE))):
        left -= len(piece)
    return data


def check_tar(file: BinaryIO, depth: int = 0) -> None:
    """Raise a tarfile.ReadError if Python's tarfile would take more memory for a file's headers than they have bytes.

    Such headers are sparse members, and global headers that all members copy. Tar files inside the file are checked,
    too.
    """
    if depth > DEEPEST:
        raise tarfile.ReadError(f"tar files nested {depth} levels deep")
    try:
        for member in members(file):
            start = file.tell()
            if member.is_file and member.name.lower().endswith(".tar"):
                check_tar(file, depth + 1)
            file.seek(start + _blocks(member.size))
    except (tarfile.HeaderError, OverflowError):  # here tarfile stops as well
        return


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
