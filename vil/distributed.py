"""Process group of a run: one process for each GPU, or several on a CPU, started by torchrun or Slurm."""

from __future__ import annotations

import ctypes
import datetime
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import init_distributed_device
from torch import Tensor

from .errors import ConfigError
from .fault_tolerance.streams import exit_at_once

RANKS = "RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"
GRACE = 20  # seconds for a process to notice by itself that another process is gone
RESTART = 120  # seconds to wait for all processes after a restart
# signals of cluster schedulers, and SIGHUP, which torchrun forwards when its terminal closes; Windows has only SIGTERM
NOTICES = ("SIGTERM", "SIGUSR1", *(["SIGHUP"] if "TORCHELASTIC_RUN_ID" in os.environ else []))
SCHEDULERS_SIGNALS = tuple(getattr(signal, name) for name in NOTICES if hasattr(signal, name))
# raised if the process group cannot be initialized
UNMET = (ValueError, *([dist.DistError] if dist.is_available() else []))
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal to get when the parent dies


def is_first_process() -> bool:
    """Return whether this process has rank 0 and reports for all; known before the process group is initialized.

    A stray RANK without several processes counts as rank 0.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return rank == "0" or os.environ.get(_counting() or "", "1") == "1"


def _counting() -> str | None:
    """Return the variable from which timm and PyTorch read the number of processes, or None."""
    return next((name for name in ("WORLD_SIZE", "SLURM_NTASKS") if name in os.environ), None)


def named_processes() -> str:
    """Return the environment variables that specify which processes were started."""
    names = "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def launch_error() -> str | None:
    """Return why the processes that the environment names cannot form a process group, or None.

    timm and PyTorch read WORLD_SIZE or, if it is missing, SLURM_NTASKS, and connect to the other processes at
    MASTER_ADDR and MASTER_PORT. An interactive Slurm job or a stray variable names processes that nobody has started.
    """
    if (name := _counting()) is None or os.environ[name] == "1":
        return None
    by_slurm = "SLURM_PROCID" in os.environ  # timm distinguishes Slurm from torchrun in this way
    needed = ("MASTER_ADDR", "MASTER_PORT") if by_slurm else ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    numbers = [name for name in (name, *RANKS, "MASTER_PORT") if name in os.environ]
    missing = [name for name in needed if not os.environ.get(name)]
    remedy = f"to train or evaluate in one process, unset {name}; otherwise start all processes with torchrun"
    remedy += ", or with srun and MASTER_ADDR and MASTER_PORT" * by_slurm
    if wrong := [name for name in numbers if not os.environ[name].isdecimal()]:
        return f"{wrong[0]} must be a number, got {os.environ[wrong[0]]!r}: {remedy}"
    if (count := int(os.environ[name])) <= 1:
        return None
    if missing:
        return f"{name}={count} names {count} processes, but the environment lacks {', '.join(missing)}: {remedy}"
    in_step = os.environ.get("SLURM_STEP_NUM_TASKS", os.environ[name])
    if name == "SLURM_NTASKS" and in_step != os.environ[name]:
        return f"SLURM_NTASKS={count} names {count} processes, but this job step has {in_step}: {remedy}"
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    if rank >= count:
        return f"rank {rank} must be less than {name}={count}: {remedy}"
    return None


def join_processes(device: str) -> tuple[torch.device, int, int]:
    """Initialize the process group if there are several processes; return this process's device, rank and the world
    size.

    Raises:
        ConfigError: The process group cannot be initialized.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # if torchrun is killed, its processes would otherwise keep running beside those of the next start
        end_with_parent()
    # the host communicates over gloo, which does not wait for a GPU and notices at once that a process is gone
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else None
    process = SimpleNamespace(device=device, dist_backend=backend, dist_url="vil://")
    with hearing_signals():
        chosen = init_processes(process)
    if process.world_size > 1:
        global _watch
        _watch = _Watch(process.rank, process.world_size)
        sum_over_processes(torch.zeros(()))  # otherwise a process that fails could exit while another is still joining
        _watch.start()
    return chosen, process.rank, process.world_size


def init_processes(process: SimpleNamespace) -> torch.device:
    """Initialize the process group if the environment names several processes, like timm's `init_distributed_device`.

    Raises:
        ConfigError: The process group cannot be initialized. The message names the variables and the remedy.
    """
    if problem := launch_error():
        raise ConfigError(problem)
    try:
        return init_distributed_device(process)
    except UNMET as error:
        reason = (str(error).splitlines() or ["no reason is known"])[0]
        raise ConfigError(
            f"the processes of {named_processes()} do not meet: {reason}. Start all of them with torchrun or srun, or "
            "unset WORLD_SIZE and SLURM_NTASKS for one process"
        ) from error


@contextmanager
def hearing_signals() -> Iterator[None]:
    """Run signal handlers in another thread, because the main thread cannot run them while it waits in PyTorch."""
    # signal.set_wakeup_fd is not available here
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()

    def hear() -> None:
        while number := os.read(reader, 1):
            if callable(handler := signal.getsignal(number[0])) and handler is not signal.default_int_handler:
                handler(number[0], None)

    os.set_blocking(writer, False)
    before, thread = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), threading.Thread(target=hear)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """On Linux, send this process a signal when its parent process dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def warn(module: str, message: str, *values: object) -> None:
    """Log a warning of a module on rank 0 only."""
    if is_first_process():
        logging.getLogger(module).warning(message, *values)


def leave_processes() -> None:
    """Destroy the process group after all processes have called this."""
    if _watch:
        sum_over_processes(torch.zeros(()))
        _watch.end()
        dist.destroy_process_group()


class _Watch(threading.Thread):
    """Terminate this process if the next rank exits before `leave_processes`, so that a failure reaches all ranks.

    Otherwise a process that waits for its GPU would not notice the failure, because NCCL waits forever for missing
    data.
    """

    def __init__(self, rank: int, world_size: int):
        super().__init__(daemon=True)
        self.next, self.previous = (rank + 1) % world_size, (rank - 1) % world_size
        self.group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1000))

    def run(self) -> None:
        try:
            dist.recv(torch.empty(()), self.next, self.group)
        except RuntimeError as error:
            time.sleep(GRACE)
            gone = f"the process of rank {self.next} is gone, and this one waits for it"
            print(f"error: {gone}: {error}", file=sys.stderr, flush=True)
            exit_at_once(1)

    def end(self) -> None:
        """End the watch; all processes must call this."""
        dist.send(torch.zeros(()), self.previous, self.group)
        self.join()


_watch: _Watch | None = None


def _rendezvous(url: str, **kwargs):
    """Rendezvous by environment variables as in PyTorch, but restarted processes do not see the addresses before the
    restart.

    torchrun keeps its store across restarts, with the addresses of processes that no longer exist.
    """
    for store, rank, world_size in dist.rendezvous(url.replace("vil:", "env:"), **kwargs):
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start {start}", store)
        if start != "0":
            _wait_for_all(store, rank, world_size)
        yield store, rank, world_size


def _wait_for_all(store: dist.Store, rank: int, world_size: int) -> None:
    """Wait for all processes, because torchrun may restart its own although another machine and its torchrun are
    lost.
    """
    store.set(f"rank {rank}", "")
    try:
        store.wait([f"rank {other}" for other in range(world_size)], datetime.timedelta(seconds=RESTART))
    except dist.DistStoreError:
        sys.exit(
            f"error: not all {world_size} processes have been started again within {RESTART} seconds: "
            "start the run again on all machines, with --resume auto"
        )


if dist.is_available():  # some builds of PyTorch lack torch.distributed
    dist.register_rendezvous_handler("vil", _rendezvous)


def sum_over_processes(value: Tensor) -> Tensor:
    """All-reduce a tensor in place by summation."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def interleave_over_processes(mine: Tensor) -> Tensor:
    """Gather the rows (N, ...) of all ranks in round-robin order."""
    if not dist.is_initialized():
        return mine
    counts = [torch.tensor(0, device=mine.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(len(mine), device=mine.device))
    counts_R = torch.stack(counts)
    padded = mine.new_zeros(int(counts_R.max()), *mine.shape[1:])
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    has_row = torch.arange(len(padded), device=mine.device)[:, None] < counts_R
    return torch.stack(gathered, dim=1)[has_row]


class FirstProcessError(RuntimeError):
    """Rank 0 has failed for the given reason."""


def from_first_process(function: Callable[[], Any]) -> Any:
    """Broadcast the result of `function` from rank 0: tensors, numbers, text and lists of them.

    No other types are transferred, so that no program on the network can make a process run code.

    Raises:
        FirstProcessError: `function` raised an error on rank 0; rank 0 itself raises that error.
    """
    if not dist.is_initialized():
        return function()
    value = error = None
    content = memoryview(b"")
    if dist.get_rank() == 0:
        try:
            value = function()
        except Exception as caught:
            error = caught
        torch.save([value, error and f"{error}"], buffer := io.BytesIO())
        content = buffer.getbuffer()
    size = torch.tensor(len(content))
    dist.broadcast(size, 0)
    data = torch.frombuffer(content or bytearray(int(size)), dtype=torch.uint8)
    dist.broadcast(data, 0)
    if error:
        raise error
    if dist.get_rank() == 0:
        return value
    value, message = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    if message is not None:
        raise FirstProcessError(message)
    return value
