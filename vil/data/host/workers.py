"""Workers that load images: their number, their shared memory, and their start and end."""

from __future__ import annotations

import logging
import math
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

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

MOST_WORKERS = 16  # default maximum for a training process
MOST_READERS = 8  # maximum of workers that read files for decoding on a GPU, each about 2,000 files a second
PIECE = 64  # images that a worker loads at a time; pieces let all workers load the first batch together
BATCHES_AHEAD = 3  # batches that the workers prefetch
SHARED_MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its CPU affinity and a container's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *map(math.floor, _quotas())]))


def _quotas() -> Iterator[float]:
    """Return the CPU quotas of this process's control groups (versions 2 and 1), in cores."""
    try:
        lines = GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = CGROUPS / controllers / path.lstrip("/")
        # inside a container, its own group is the root, whatever its outside name
        for folder in (group, *group.parents):
            try:
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if int(quota) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError):  # another controller, or "max"
                continue


def _local_processes() -> int:
    """Return the number of training processes on this machine, which share its cores and memory."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def default_workers(device: torch.device) -> int:
    """Return the number of workers for one training process."""
    cores = usable_cores() // _local_processes()
    if device.type == "cpu":  # on a CPU, the model is slower than loading
        return min(MOST_WORKERS, max(1, cores // 4))
    # the process of a GPU also prepares batches in a thread
    return min(MOST_WORKERS, max(1, cores - (2 if cores > 4 else 1)))


def share_cores(device: torch.device, workers: int | None) -> None:
    """Reserve a core for each worker if a CPU also trains, because PyTorch's threads wait long for a busy core."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        workers = default_workers(device) if workers is None else workers
        torch.set_num_threads(max(1, usable_cores() // _local_processes() - workers))


def choose_workers(
    requested: int | None,
    device: torch.device,
    *,
    most: int,
    pieces: int,
    ahead: int,
    in_use: int,
    piece_size: int,
    piece_bytes: int,
) -> tuple[int, int | None]:
    """Choose as many workers as the machine supports and the split needs, and as much prefetching as fits in memory.

    Args:
        requested: Requested number of workers, or None.
        device: Device of the batches.
        most: Maximum number of workers that are not requested.
        pieces: Number of pieces in a pass over the split.
        ahead: Number of pieces that all workers together should prefetch.
        in_use: Number of pieces that occupy shared memory besides the prefetched ones.
        piece_size: Images in a piece.
        piece_bytes: Shared memory of a piece in bytes.

    Returns:
        The number of workers, and the number of pieces that each one prefetches (None without workers).

    Raises:
        ConfigError: The pieces of a single worker exceed the shared memory.
    """
    workers = min(default_workers(device), most, max(1, pieces)) if requested is None else requested
    if not workers:
        return 0, None
    prefetch = max(2, math.ceil(ahead / workers))
    if not SHARED_MEMORY.is_dir():
        return workers, prefetch
    return _fit_shared_memory(workers, prefetch, in_use=in_use, piece_size=piece_size, piece_bytes=piece_bytes)


def _fit_shared_memory(
    workers: int, prefetch: int, *, in_use: int, piece_size: int, piece_bytes: int
) -> tuple[int, int]:
    """Reduce workers and prefetched pieces to what fits in shared memory, with a log line.

    Raises:
        ConfigError: The pieces of a single worker exceed the shared memory.
    """
    # only the workers of the split that is being read prefetch
    free = shutil.disk_usage(SHARED_MEMORY).free
    room = free // _local_processes() // max(1, piece_bytes) - in_use
    if room < 1:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and loading images takes at least "
            f"{_local_processes() * (in_use + 1) * piece_bytes / 2**20:.0f}: start the container with --shm-size=8g, "
            "or give --workers 0"
        )
    fitting_workers = min(workers, room)
    fitting_prefetch = min(prefetch, max(1, room // workers))
    if (fitting_workers, fitting_prefetch) != (workers, prefetch):
        _logger.warning(
            "%s has %.0f MiB free: %d workers with %d x %d images prefetched in place of %d with %d x %d; a container "
            "gets more with --shm-size",
            SHARED_MEMORY, free / 2**20, fitting_workers, fitting_prefetch, piece_size, workers, prefetch, piece_size,
        )  # fmt: skip
    return fitting_workers, fitting_prefetch


class SharedMemoryError(WorkersError):
    """The shared memory in which workers hand over batches is full."""


def into_shared_memory(*tensors: torch.Tensor) -> None:
    """Move a worker's result to shared memory here, where a lack of space can be reported.

    Raises:
        SharedMemoryError: The shared memory is full.
    """
    if get_worker_info() is None:
        return
    if SHARED_MEMORY.is_dir():  # writing to missing shared memory would crash the process
        needed = sum(tensor.nbytes for tensor in tensors)
        if (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
            raise SharedMemoryError(
                f"{SHARED_MEMORY} is full: {free / 2**20:.0f} MiB free, {needed / 2**20:.0f} needed for images. A "
                "container gets more with --shm-size=8g; --workers 0 needs none"
            )
    for tensor in tensors:
        tensor.share_memory_()


def start_workers(loader: DataLoader) -> Iterator:
    """Start a pass over a loader. The workers start with the first pass and stay alive.

    Before Python 3.12, a fork can deadlock while another thread enters the interpreter, so this is first called before
    autograd creates threads. Workers of an iterable dataset start when it is first read.
    """
    with signals_blocked():  # threads of PyTorch inherit the mask before `prepare_worker` runs
        loaded = iter(loader)
    if loader.num_workers:
        explain_lost_workers()
        # break the cycle, or the garbage collector would close the queues before the pass ends its workers through them
        queues = [*loaded._index_queues, loaded._worker_result_queue]  # type: ignore[attr-defined]
        weakref.finalize(loaded, queues.clear).atexit = False
    return loaded


def prepare_worker(worker: int) -> None:
    """Prepare a worker's process before it reads images."""
    outlive_output()  # a spawned worker has its own streams
    restrict_pillow()
    obey_only_parent()
