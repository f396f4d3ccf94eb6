"""The processes of a run: one a GPU, or several on a CPU, started by torchrun or Slurm."""

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

from .config import ConfigError
from .launch import is_first_process, launch_error, named_processes
from .streams import exit_at_once

GRACE = 20  # seconds in which a process may notice by itself that another is gone
RESTART = 120  # seconds in which all processes have been started again, if they are
# the notices of cluster schedulers, and what torchrun passes on when its terminal is closed; Windows has SIGTERM alone
NOTICES = ("SIGTERM", "SIGUSR1", *(["SIGHUP"] if "TORCHELASTIC_RUN_ID" in os.environ else []))
SCHEDULERS_SIGNALS = tuple(getattr(signal, name) for name in NOTICES if hasattr(signal, name))
UNMET = (ValueError, *([dist.DistError] if dist.is_available() else []))  # raised where processes do not meet
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal to get when the parent dies


def join_processes(device: str) -> tuple[torch.device, int, int]:
    """Meets the other processes, if there are any; returns this one's device, its rank and their number.

    Raises:
        ConfigError: They do not meet.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # where torchrun itself is killed, its processes would go on, beside those of the next start
    # the host's own messages go over gloo, which does not wait for a GPU and notices at once that a process is gone
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else None
    process = SimpleNamespace(device=device, dist_backend=backend, dist_url="vil://")
    with hearing_signals():
        chosen = init_processes(process)
    if process.world_size > 1:
        global _watch
        _watch = _Watch(process.rank, process.world_size)
        sum_over_processes(torch.zeros(()))  # or one that has an error to tell would end while another still joins
        _watch.start()
    return chosen, process.rank, process.world_size


def init_processes(process: SimpleNamespace) -> torch.device:
    """Initialize the process group if the environment names several processes, as timm's `init_distributed_device`.

    Raises:
        ConfigError: These processes cannot meet or do not meet. The message names the variables and the remedy.
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
    """Has a thread call the handlers of signals: this one may wait, in PyTorch or for a thread, and run none then."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():  # which have no such place
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
    """On Linux this process gets a signal when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def warn(module: str, message: str, *values: object) -> None:
    """Logs a warning of a module in the first process alone."""
    if is_first_process():
        logging.getLogger(module).warning(message, *values)


def leave_processes() -> None:
    """Ends the connection to the other processes, once all of them have got here."""
    if _watch:
        sum_over_processes(torch.zeros(()))
        _watch.end()
        dist.destroy_process_group()


class _Watch(threading.Thread):
    """Ends this process if the next one ends before `leave_processes`, and so, one after the other, all of them.

    A process that waits for its GPU would not notice: what other GPUs are to send never comes, and NCCL waits for it.
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
        """All processes call it."""
        dist.send(torch.zeros(()), self.previous, self.group)
        self.join()


_watch: _Watch | None = None


def _rendezvous(url: str, **kwargs):
    """PyTorch's, by environment variables, but processes that torchrun has restarted do not find those of before.

    torchrun keeps its store over restarts, and in it the addresses of processes that are gone.
    """
    for store, rank, world_size in dist.rendezvous(url.replace("vil:", "env:"), **kwargs):
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start {start}", store)
        if start != "0":
            _wait_for_all(store, rank, world_size)
        yield store, rank, world_size


def _wait_for_all(store: dist.Store, rank: int, world_size: int) -> None:
    """For a torchrun that starts its processes again after another machine has been lost, with the torchrun there."""
    store.set(f"rank {rank}", "")
    try:
        store.wait([f"rank {other}" for other in range(world_size)], datetime.timedelta(seconds=RESTART))
    except dist.DistStoreError:
        sys.exit(
            f"error: not all {world_size} processes have been started again within {RESTART} seconds: "
            "start the run again on all machines, with --resume auto"
        )


if dist.is_available():  # not in every build of PyTorch
    dist.register_rendezvous_handler("vil", _rendezvous)


def sum_over_processes(value: Tensor) -> Tensor:
    """Adds up a tensor in place."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def interleave_over_processes(mine: Tensor) -> Tensor:
    """The rows (N, ...) of all processes, of which each gives one in turn, as long as it has some."""
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
    """The process of rank 0 has failed, for the reason given."""


def from_first_process(function: Callable[[], Any]) -> Any:
    """Gives every process the result of `function` in the process of rank 0: tensors, numbers, text and lists of them.

    Nothing else is passed on, so that no other program on the network could have a process run what it likes.

    Raises:
        FirstProcessError: `function` has raised an error in the process of rank 0, which raises that itself.
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
