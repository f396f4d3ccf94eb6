"""Data-loader workers: the number of workers, their shared memory and their start."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no module `fcntl`
    fcntl = None  # type: ignore[assignment]

import torch
from torch.utils.data import DataLoader, get_worker_info

from ...config import ConfigError
from ...fault_tolerance.machine_errors import WorkersError
from ...fault_tolerance.parents import obey_only_parent
from ...fault_tolerance.signals import signals_blocked
from ...fault_tolerance.streams import outlive_output
from ...fault_tolerance.workers import explain_lost_workers
from ..sources.images import restrict_pillow

_logger = logging.getLogger(__name__)

MOST_WORKERS = 16  # maximum default number of workers per training process
# maximum number of images in a sub-batch (piece) that one worker loads; each piece of an iterable dataset is a batch
PIECE = 64
BATCHES_AHEAD = 3  # number of batches, or of groups of batches (see `batches_together`), that the workers prefetch
PIPE_BYTES = 2**20  # capacity of the pipe from the workers to the training process; Linux allows 1 MiB by default
IN_USE = 2  # number of pieces in `SHARED_MEMORY` in addition to prefetched pieces
SHARED_MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, from its CPU affinity and container quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *map(math.floor, _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups (cgroup v1 and v2), as numbers of cores."""
    try:
        lines = GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:  # only Linux has control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = CGROUPS / controllers / path.lstrip("/")
        # in a container, only the root of the mounted cgroup tree has the quota, so all parent folders are also read
        for folder in (group, *group.parents):
            try:
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if int(quota) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError):  # the control group has no CPU quota, or the quota is "max"
                continue


def _local_processes() -> int:
    """Return the number of training processes that share the cores and memory of this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def default_workers(device: torch.device) -> int:
    """Return the default number of workers per training process."""
    cores = usable_cores() // _local_processes()
    if device.type == "cpu":  # on a CPU, training is slower than loading
        return min(MOST_WORKERS, max(1, cores // 4))
    # the training process also needs a core for the thread that decodes batches on the GPU
    return min(MOST_WORKERS, max(1, cores - (2 if cores > 4 else 1)))


def share_cores(device: torch.device, workers: int | None) -> None:
    """If the model runs on a CPU and OMP_NUM_THREADS is unset, limit PyTorch's threads so that each worker has a core.

    Otherwise PyTorch's threads would wait long for cores that the workers use.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        workers = default_workers(device) if workers is None else workers
        torch.set_num_threads(max(1, usable_cores() // _local_processes() - workers))


def choose_workers(
    requested: int | None,
    device: torch.device,
    *,
    pieces: int,
    ahead: int,
    piece_size: int,
    piece_bytes: int | None,
) -> tuple[int, int | None]:
    """Choose the number of workers and of prefetched pieces, limited by CPU cores, split size and shared memory.

    A piece is a sub-batch that one worker loads.

    Args:
        requested: Number of workers requested by the user, or None for the default.
        device: Device of the batches.
        pieces: Number of pieces in a pass over the split.
        ahead: Number of pieces that all workers together should prefetch.
        piece_size: Number of images per piece.
        piece_bytes: Bytes of `SHARED_MEMORY` per piece. None if the pieces do not use `SHARED_MEMORY`.

    Returns:
        The number of workers, and the number of pieces that each worker prefetches (None without workers).

    Raises:
        ConfigError: The pieces of a single worker exceed the shared memory.
    """
    workers = min(default_workers(device), max(1, pieces)) if requested is None else requested
    if not workers:
        return 0, None
    prefetch = max(2, math.ceil(ahead / workers))
    if piece_bytes is None or not SHARED_MEMORY.is_dir():
        return workers, prefetch
    return _fit_shared_memory(workers, prefetch, piece_size, piece_bytes)


def _fit_shared_memory(workers: int, prefetch: int, piece_size: int, piece_bytes: int) -> tuple[int, int]:
    """Reduce the numbers of workers and of prefetched pieces to fit in shared memory, and log a warning if needed.

    Raises:
        ConfigError: The pieces of a single worker exceed the shared memory.
    """
    # one split may use all free space, because training and validation workers do not prefetch at the same time
    free = shutil.disk_usage(SHARED_MEMORY).free
    room = free // _local_processes() // piece_bytes - IN_USE
    if room < 1:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and loading images takes at least "
            f"{_local_processes() * (IN_USE + 1) * piece_bytes / 2**20:.0f} MiB: start the container with "
            "--shm-size=8g, or set --workers 0"
        )
    fitting_workers = min(workers, room)
    fitting_prefetch = min(prefetch, max(1, room // workers))
    if (fitting_workers, fitting_prefetch) != (workers, prefetch):
        _logger.warning(
            "%s has %.0f MiB free: %d workers prefetch %d x %d images, instead of %d workers with %d x %d; to "
            "increase the space of a container, set --shm-size",
            SHARED_MEMORY, free / 2**20, fitting_workers, fitting_prefetch, piece_size, workers, prefetch, piece_size,
        )  # fmt: skip
    return fitting_workers, fitting_prefetch


class SharedMemoryError(WorkersError):
    """The shared memory that transfers batches from workers to the training process is full."""


def into_shared_memory(*tensors: torch.Tensor) -> None:
    """Move a worker's tensors to shared memory, and report an error if the space is insufficient.

    Raises:
        SharedMemoryError: The shared memory is full.
    """
    if get_worker_info() is None:
        return
    if SHARED_MEMORY.is_dir():  # writing beyond the free space would kill the worker with SIGBUS
        needed = sum(tensor.nbytes for tensor in tensors)
        if (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
            raise SharedMemoryError(
                f"{SHARED_MEMORY} is full: {free / 2**20:.0f} MiB free, {needed / 2**20:.0f} MiB needed for images; "
                "start the container with --shm-size=8g, or set --workers 0"
            )
    for tensor in tensors:
        tensor.share_memory_()


def start_workers(loader: DataLoader) -> Iterator:
    """Return an iterator over a DataLoader. The first call also starts the workers, which stay alive.

    The first call must precede autograd's creation of threads, because before Python 3.12, a fork can deadlock while
    another thread enters the interpreter. Workers of an iterable dataset start when the dataset is first read.
    """
    with signals_blocked():  # PyTorch's threads in a worker inherit the mask of blocked signals
        loaded = iter(loader)
    if loader.num_workers:
        explain_lost_workers()
        # Keep the queues alive until `loaded` is deleted. Otherwise garbage collection could close a queue too early.
        queues = [*loaded._index_queues, loaded._worker_result_queue]  # type: ignore[attr-defined]
        weakref.finalize(loaded, queues.clear).atexit = False
        _enlarge(loaded._worker_result_queue)  # type: ignore[attr-defined]
    return loaded


def _enlarge(queue) -> None:
    """Enlarge the pipe of a queue, so that workers do not wait until the training process has received a result."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # only Linux has F_SETPIPE_SZ
        with contextlib.suppress(OSError):  # the call fails if it exceeds the user's limit of pipe memory
            fcntl.fcntl(queue._reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def prepare_worker(worker: int) -> None:
    """Initialize the process of a worker: output streams, Pillow's limits and signal handling."""
    outlive_output()  # a worker that is spawned does not inherit the replaced stdout and stderr
    restrict_pillow()
    obey_only_parent()
