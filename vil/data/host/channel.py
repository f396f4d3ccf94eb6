"""Channel through which workers send tensors to the training process, in anonymous memory."""

from __future__ import annotations

import errno
import itertools
import math
import os
import socket
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ...fault_tolerance.machine_errors import WorkersError, cause_of, remedy_for
from .workers import into_shared_memory

_keys = itertools.count()
_channels: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()


class Channel:
    """Unix socket through which the workers of a loader send the file descriptors of tensors' memory.

    PyTorch transfers a tensor's memory in several messages between worker and training process, and the worker answers
    a message only when the thread that loads images releases the GIL. A channel sends one message and needs no answer.
    The memory is freed when both processes have closed the memory or have died. The size of /dev/shm does not limit the
    memory.

    A channel must be created before the workers start. `send` waits while the socket holds about 250 unread messages.
    """

    def __init__(self):
        self.key = next(_keys)
        self.receiver, self.sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.received: dict[bytes, int] = {}  # file descriptors that `receive` has not returned yet
        _channels[self.key] = self
        weakref.finalize(self, _close, self.receiver, self.sender, self.received)

    def __getstate__(self) -> dict:  # pickle a channel for workers that are spawned instead of forked
        return {"key": self.key, "sender": self.sender}

    def send(self, name: bytes, descriptor: int) -> None:
        """Send a file descriptor with a unique name of up to 64 bytes from a worker to the training process.

        If too many sent file descriptors have not been received yet, `send` waits.
        """
        while True:
            try:
                socket.send_fds(self.sender, [name], [descriptor])
                return
            except ConnectionError:  # the training process has closed the loader
                return
            except OSError as error:
                if error.errno not in (errno.ETOOMANYREFS, errno.ENOBUFS):
                    raise
            time.sleep(0.01)

    def receive(self, name: bytes) -> int:
        """Return the file descriptor that `send` sent under `name`. The caller must close the file descriptor.

        Raises:
            OSError: This process has too many open files.
        """
        while name not in self.received:
            message, descriptors, *_ = socket.recv_fds(self.receiver, 64, 1)
            if not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.received[message] = descriptors[0]
        return self.received.pop(name)


def open_channel() -> Channel | None:
    """Return a new channel, or None if the operating system does not support channels."""
    return Channel() if hasattr(os, "memfd_create") else None  # only Linux has memfd_create


def _close(receiver: socket.socket, sender: socket.socket, received: dict[bytes, int]) -> None:
    receiver.close()
    sender.close()
    for descriptor in received.values():
        os.close(descriptor)


class SentTensor:
    """uint8 tensor of a worker, which the training process unpickles as a Tensor.

    Args:
        parts: Parts of the tensor's bytes, which are concatenated; at least one byte in total.
        shape: Shape of the tensor.
        channel: Channel to the training process.

    Raises:
        WorkersError: There is not enough memory, or this process has too many open files.
    """

    _numbers = itertools.count()

    def __init__(self, parts: Sequence[bytes | memoryview], shape: Sequence[int], channel: Channel):
        self.shape = tuple(shape)
        self.channel = channel
        try:
            self.file = open(os.memfd_create("vil-images"), "wb")  # noqa: SIM115  # closed by `__reduce__`
            self.file.writelines(parts)
            self.file.flush()
        except OSError as error:
            raise WorkersError(
                f"cannot send images to the training process: {cause_of(error)}. To continue, {remedy_for(error)}"
            ) from None

    def __reduce__(self):
        name = b"%d-%d" % (os.getpid(), next(self._numbers))
        with self.file:
            self.channel.send(name, self.file.fileno())
        return _receive, (self.channel.key, name, self.shape)


def _receive(key: int, name: bytes, shape: tuple[int, ...]) -> Tensor:
    """Return a uint8 tensor that a worker has sent through the channel with the key `key`."""
    descriptor = _channels[key].receive(name)
    try:  # do not use `mmap.mmap`, which would keep the file open, because the number of open files is limited
        path = f"/proc/self/fd/{descriptor}"
        tensor = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.uint8)
    finally:
        os.close(descriptor)
    return tensor.view(shape)


def send(tensor: Tensor, channel: Channel | None) -> Tensor | SentTensor:
    """Make a worker's uint8 tensor available to the training process. Outside of workers, return the tensor unchanged.

    Raises:
        SharedMemoryError: There is no channel, and the shared memory is full.
    """
    if channel and get_worker_info():
        return SentTensor([tensor.numpy().data.cast("B")], tensor.shape, channel)
    into_shared_memory(tensor)
    return tensor


def send_bytes(parts: Sequence[bytes], channel: Channel | None) -> Tensor | SentTensor:
    """Concatenate bytes to a tensor (N,) uint8, and make a worker's tensor available to the training process.

    Raises:
        SharedMemoryError: There is no channel, and the shared memory is full.
    """
    if channel and get_worker_info():
        return SentTensor(parts, (sum(map(len, parts)),), channel)
    return send(torch.frombuffer(bytearray().join(parts), dtype=torch.uint8), None)
