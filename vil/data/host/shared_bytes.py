"""Transfer of bytes from workers to the training process in anonymous shared memory."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import socket
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from .workers import into_shared_memory

_keys = itertools.count()
_channels: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()


class Channel:
    """Unix socket through which the workers of a loader send file descriptors of memory to the training process.

    PyTorch transfers the memory of a tensor in several messages between both processes, and a worker answers each
    message only when the thread that loads images releases the GIL. A channel needs one message and no answer.

    The channel must be created before the workers start.
    """

    def __init__(self):
        self.key = next(_keys)
        self.receiver, self.sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.received: dict[bytes, int] = {}  # file descriptor of each message that `receive` has not returned yet
        _channels[self.key] = self
        weakref.finalize(self, _close, self.receiver, self.sender, self.received)

    def __getstate__(self) -> dict:  # for workers that are spawned
        return {"key": self.key, "sender": self.sender}

    def send(self, name: bytes, descriptor: int) -> None:
        """Send a file descriptor and its unique name. Called by workers."""
        socket.send_fds(self.sender, [name], [descriptor])

    def receive(self, name: bytes) -> int:
        """Return the file descriptor that was sent with a name. The caller must close the file descriptor.

        Raises:
            OSError: This process has too many open files.
        """
        while name not in self.received:
            message, descriptors, *_ = socket.recv_fds(self.receiver, 64, 1)
            if not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.received[message] = descriptors[0]
        return self.received.pop(name)


def open_channel(workers: int) -> Channel | None:
    """Return a channel for a loader, or None if the loader has no workers or the system is not Linux."""
    return Channel() if workers and hasattr(os, "memfd_create") else None


def _close(receiver: socket.socket, sender: socket.socket, received: dict[bytes, int]) -> None:
    receiver.close()
    sender.close()
    for descriptor in received.values():
        os.close(descriptor)


class SharedBytes:
    """Bytes in anonymous shared memory. A pickled `SharedBytes` is loaded as a tensor (N,) uint8, at most once.

    Args:
        parts: Bytes, which are concatenated.
        channel: Channel to the process that loads the pickled `SharedBytes`.
    """

    _numbers = itertools.count()

    def __init__(self, parts: Sequence[bytes], channel: Channel):
        self.channel = channel
        self.length = sum(map(len, parts))
        self.file = open(os.memfd_create("vil-images"), "wb")  # noqa: SIM115
        self.file.writelines(parts)
        self.file.flush()

    def __reduce__(self):
        name = b"%d-%d" % (os.getpid(), next(self._numbers))
        with self.file:
            self.channel.send(name, self.file.fileno())
        return _load, (self.channel.key, name, self.length)


def _load(key: int, name: bytes, length: int) -> Tensor:
    """Return the bytes that a worker has sent, as a tensor (N,) uint8 in shared memory."""
    descriptor = _channels[key].receive(name)
    try:
        memory = mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def share_bytes(parts: Sequence[bytes], channel: Channel | None) -> Tensor | SharedBytes:
    """Concatenate bytes. In a worker, move the bytes to shared memory, through `channel` unless `channel` is None.

    Raises:
        SharedMemoryError: The shared memory is full.
    """
    if channel and get_worker_info():
        return SharedBytes(parts, channel)
    content = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
    into_shared_memory(content)
    return content
