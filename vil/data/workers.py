"""The processes that load images: how many a machine bears, how they share memory, and how they live and end."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from ..config import ConfigError
from ..files import is_of_machine
from ..processes import SCHEDULERS_SIGNALS
from ..streams import outlive_output
from .images import MachineError, WorkersError, restrict_pillow

_logger = logging.getLogger(__name__)

MOST_WORKERS = 16  # for a training process, unless it is told
MOST_READERS = 8  # that read files for a GPU to decode: some 2,000 files a second each
PIECE = 64  # images that a worker loads at a time, of a batch that may have many more: all work on the first batch
BATCHES_AHEAD = 3  # that the workers prepare while one is trained on
SHARED_MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The cores that this process may keep busy: those it is bound to, or fewer where a container has a quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *map(math.floor, _quotas())]))


def _quotas() -> Iterator[float]:
    """Cores by the CPU quotas of the control groups that this process is in, of version 2 and 1."""
    try:
        lines = GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = CGROUPS / controllers / path.lstrip("/")
        # a container sees its own group at the root, whatever the group is called outside
        for folder in (group, *group.parents):
            try:
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if int(quota) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError):  # of another controller, or "max"
                continue


def _local_processes() -> int:
    """The training processes on this machine, which share its cores and its memory."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def default_workers(device: torch.device) -> int:
    """Loader processes for one training process, of which a GPU's also decodes in a thread and wants two cores."""
    cores = usable_cores() // _local_processes()
    if device.type == "cpu":  # a model there takes longer than its images do
        return min(MOST_WORKERS, max(1, cores // 4))
    return min(MOST_WORKERS, max(1, cores - (2 if cores > 4 else 1)))


def share_cores(device: torch.device, workers: int | None) -> None:
    """Leaves the loader's workers a core each where a CPU also trains: PyTorch's threads wait long for a busy core."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        workers = default_workers(device) if workers is None else workers
        torch.set_num_threads(max(1, usable_cores() // _local_processes() - workers))


@dataclass
class LoaderSettings:
    """How a split is loaded."""

    workers: int
    prefetch: int | None = None  # pieces that each worker has ready; None without workers
    on_device: bool = False  # decoding and augmentation
    decode: bool = False  # in the workers nevertheless

    def __str__(self) -> str:
        who = f"{self.workers} worker{'s' * (self.workers != 1)}" if self.workers else "no workers"
        here = "in the workers" if self.workers else "in the training process"
        if self.decode:
            return f"{who}, decoding {here} and augmenting on the device"
        return f"{who}, decoding and augmenting {'on the device' if self.on_device else here}"


def choose_settings(
    wanted: int | None,
    device: torch.device,
    batch_size: int,
    pieces: int,
    piece_bytes: int,
    on_device: bool,
    decode: bool = False,
) -> LoaderSettings:
    """As many workers as the machine bears and the split has work for, and as much prefetched as there is memory for.

    Args:
        wanted: Workers that the user asked for, if they did.
        device: Where the batches go.
        batch_size: Images of a batch.
        pieces: How many a pass over the split has.
        piece_bytes: The shared memory that one takes.
        on_device: Whether the device decodes and augments.
        decode: Whether the workers decode nevertheless.

    Raises:
        ConfigError: Not even one worker's pieces fit into the shared memory.
    """
    most = MOST_READERS if on_device and not decode else MOST_WORKERS
    workers = min(default_workers(device), most, max(1, pieces)) if wanted is None else wanted
    if not workers:
        return LoaderSettings(0, None, on_device, decode)
    prefetch = max(2, math.ceil(BATCHES_AHEAD * math.ceil(batch_size / PIECE) / workers))
    if not SHARED_MEMORY.is_dir():
        return LoaderSettings(workers, prefetch, on_device, decode)
    # of the two splits' workers only those prefetch whose split is being read; besides, some pieces are in use
    in_use = BATCHES_AHEAD * math.ceil(batch_size / PIECE) if on_device else 2
    free = shutil.disk_usage(SHARED_MEMORY).free
    room = free // _local_processes() // max(1, piece_bytes) - in_use
    if room < 1:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and loading images takes at least "
            f"{_local_processes() * (in_use + 1) * piece_bytes / 2**20:.0f}: start the container with --shm-size=8g, "
            "or give --workers 0"
        )
    in_a_piece = min(batch_size, PIECE)
    settings = LoaderSettings(min(workers, room), min(prefetch, max(1, room // workers)), on_device, decode)
    if (settings.workers, settings.prefetch) != (workers, prefetch):
        _logger.warning(
            "%s has %.0f MiB free: %d workers with %d x %d images prefetched in place of %d with %d x %d; a container "
            "gets more with --shm-size",
            SHARED_MEMORY, free / 2**20, settings.workers, settings.prefetch, in_a_piece, workers, prefetch, in_a_piece,
        )  # fmt: skip
    return settings


class SharedMemoryError(WorkersError):
    """The memory in which loader processes hand over batches is full."""


def into_shared_memory(*tensors: torch.Tensor) -> None:
    """Moves what a worker will hand over, here, where it can be said that there is no room for it.

    Raises:
        SharedMemoryError: There is not.
    """
    if get_worker_info() is None:
        return
    if SHARED_MEMORY.is_dir():  # to write to what is not there would end the process
        needed = sum(tensor.nbytes for tensor in tensors)
        if (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
            raise SharedMemoryError(
                f"{SHARED_MEMORY} is full: {free / 2**20:.0f} MiB free, {needed / 2**20:.0f} needed for images. A "
                "container gets more with --shm-size=8g; --workers 0 needs none"
            )
    for tensor in tensors:
        tensor.share_memory_()


class LostWorkerError(ConfigError):
    """A loader's process is gone."""

    def __init__(self, error: RuntimeError):
        what = str(error).split(". ")[0].strip()
        advice = "it may have run out of memory, of which fewer --workers need less"
        if "Bus error" in what:
            advice = f"{SHARED_MEMORY} is full: a container gets more with --shm-size=8g; --workers 0 needs none"
        super().__init__(f"{what}: {advice}")


@contextmanager
def lost_workers_named() -> Iterator[None]:
    """Have errors of lost workers, and of the machine in other packages' data sets, say what to do."""
    try:
        yield
    except OSError as error:  # PyTorch raises an error of a worker again, without its number
        if is_of_machine(error) or "[Errno " in str(error):
            raise MachineError(f"cannot read the data set: {str(error).rpartition('Error: ')[2].strip()}") from None
        raise
    except RuntimeError as error:
        if isinstance(error.__cause__, LostWorkerError):  # which PyTorch has caught, and knows less
            raise error.__cause__ from None
        if "DataLoader worker" in str(error):
            raise LostWorkerError(error) from None
        raise


def _name_lost_workers() -> None:
    """Has PyTorch's handler of SIGCHLD, which may run anywhere in the training loop, raise a LostWorkerError."""
    if not hasattr(signal, "SIGCHLD"):  # Windows, where PyTorch looks at its workers from time to time
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return
    if getattr(handler, "names_lost_workers", False):
        return

    def handle(*args) -> None:
        with lost_workers_named():
            handler(*args)

    handle.names_lost_workers = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handle)


def start_workers(loader: DataLoader) -> Iterator:
    """A pass over what a loader loads. Its processes start with the first one, and it keeps them.

    A thread that enters Python, as those of autograd, holds a lock that Python below 3.12 takes into a fork and waits
    for then: so this is first called before there are such threads, but for a stream, which begins to read with it.
    """
    with _signals_blocked():
        loaded = iter(loader)
    if loader.num_workers:
        _name_lost_workers()
        # of a cycle, the garbage collector would close these before the pass ends its workers through them
        queues = [*loaded._index_queues, loaded._worker_result_queue]  # type: ignore[attr-defined]
        weakref.finalize(loaded, queues.clear).atexit = False
    return loaded


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Workers that start in it have them blocked: threads that PyTorch starts before `prepare_worker` inherit that."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*SCHEDULERS_SIGNALS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def prepare_worker(worker: int) -> None:
    outlive_output()  # a worker that is no fork has streams of its own
    restrict_pillow()
    _heed_the_parent_alone()


def _heed_the_parent_alone() -> None:
    """A scheduler may signal every process of a job: workers live until training has written its checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    if not hasattr(signal, "sigwaitinfo"):  # macOS and Windows: who sent a signal cannot be told, and SIGTERM ends them
        return
    parent: Any = multiprocessing.parent_process()  # which every worker has

    def wait() -> None:
        while True:
            notice = signal.sigtimedwait(SCHEDULERS_SIGNALS, 5)
            if notice is None:  # PyTorch's own watch misses a parent that dies while the worker starts
                if not parent.is_alive():
                    os._exit(1)
            elif notice.si_signo == signal.SIGTERM and notice.si_pid == parent.pid:
                os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULERS_SIGNALS)
    threading.Thread(target=wait, daemon=True).start()
