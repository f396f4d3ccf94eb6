"""Tar files, which may come from anybody, read in bounded memory: no size that a header claims is allocated."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

BLOCK = 512
PIECE = 2**20  # bytes that are read at once
MOST_NOTES = {tarfile.XGLTYPE: 2**10, None: 2**16}  # bytes of a member's extended header; global ones hold for all
MOST_RATIO, SLACK = 100, 2**26  # of gzip: images do not compress, and headers and labels by a factor of about ten
NOTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
DEEPEST = 3  # tar files inside of tar files


class Stream:
    """A tar file that is read from start to end, decompressed if it is one of gzip.

    Args:
        file: The file, which needs only `read`.
    """

    def __init__(self, file: Any):
        self.file, self.taken, self.given = file, 0, 0
        self.start = file.read(2)
        self.is_compressed = self.start == b"\x1f\x8b"
        self.source: Any = gzip.GzipFile(fileobj=self._Packed(self)) if self.is_compressed else self

    class _Packed(io.RawIOBase):
        """The compressed file, which counts what is taken of it."""

        def __init__(self, stream: Stream):
            self.stream = stream

        def read(self, count: int = -1) -> bytes:
            return self.stream.raw(count)

    def most(self, size: int) -> int:
        """Return how many bytes may be read of a file of this size."""
        return SLACK + MOST_RATIO * size if self.is_compressed else size

    def raw(self, count: int) -> bytes:
        start, self.start = self.start[:count], self.start[count:]
        data = start or self.file.read(count)
        self.taken += len(data)
        return data

    def read(self, count: int) -> bytes:
        """Return this many bytes, or fewer at the end."""
        pieces = []
        while count > 0:
            piece = self.source.read(min(count, PIECE)) if self.is_compressed else self.raw(min(count, PIECE))
            if not piece:
                break
            pieces.append(piece)
            count -= len(piece)
            self.given += len(piece)
            if self.given > self.most(self.taken):
                raise tarfile.ReadError(f"{self.given} bytes of {self.taken} compressed ones")
        return b"".join(pieces)

    def skip(self, count: int) -> None:
        while count > 0 and (piece := len(self.read(min(count, PIECE)))):
            count -= piece


class Seekable:
    """Part of a tar file that is not compressed, of which `skip` reads nothing."""

    def __init__(self, file: BinaryIO):
        self.file = file

    def read(self, count: int) -> bytes:
        return self.file.read(min(count, PIECE))

    def skip(self, count: int) -> None:
        self.file.seek(count, io.SEEK_CUR)


@dataclass
class Member:
    """A file in a tar file."""

    name: str
    size: int  # as its header says
    is_file: bool


def members(stream: Stream | Seekable) -> Iterator[Member]:
    """Yield the members of a tar file. Whoever iterates leaves the stream at the start of a member's data or behind it.

    Raises:
        tarfile.HeaderError: A header is broken.
        tarfile.ReadError: A member is sparse, or its extended header is too large.
    """
    name, size = "", None
    while header := stream.read(BLOCK):
        if not header.strip(b"\0"):
            return
        found = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        if found.type in NOTES:
            if found.size > MOST_NOTES.get(found.type, MOST_NOTES[None]):
                raise tarfile.ReadError(f"{found.size} bytes of notes on a member")
            notes = stream.read(_blocks(found.size))[: found.size]
            if b"GNU.sparse." in notes:
                raise tarfile.ReadError("a sparse member, which can claim any size")
            if found.type == tarfile.GNUTYPE_LONGNAME:
                name = _text(notes.partition(b"\0")[0])
            elif found.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                if path := re.search(rb"(?:^|\n)\d+ path=([^\n]*)\n", notes):
                    name = _text(path[1])
                if longer := re.search(rb"(?:^|\n)\d+ size=(\d{1,18})\n", notes):
                    size = int(longer[1])
            continue
        if found.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a sparse member, which can claim any size")
        has_data = found.isreg() or found.type not in tarfile.SUPPORTED_TYPES
        member = Member(name or found.name, (found.size if size is None else size) if has_data else 0, found.isreg())
        name, size = "", None
        yield member


def read_member(stream: Stream, member: Member, most: int) -> bytes:
    """Return the data of a member, or nothing if they are more than `most` bytes."""
    data = stream.read(member.size if member.size <= most else 0)
    if len(data) < member.size <= most:
        raise tarfile.ReadError("unexpected end of data")
    stream.skip(_blocks(member.size) - len(data))
    return data


def check_tar(file: BinaryIO, depth: int = 0) -> None:
    """Raise a tarfile.ReadError if Python's tarfile would take more memory for a file's headers than they have bytes.

    Sparse members, global headers that all members copy, and tar files inside of tar files are looked for.
    """
    if depth > DEEPEST:
        raise tarfile.ReadError(f"tar files nested {depth} levels deep")
    try:
        for member in members(Seekable(file)):
            start = file.tell()
            if member.is_file and member.name.lower().endswith(".tar"):
                check_tar(file, depth + 1)
            file.seek(start + _blocks(member.size))
    except (tarfile.HeaderError, OverflowError):  # here tarfile stops as well
        return


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _text(name: bytes) -> str:
    return os.fsdecode(name)
