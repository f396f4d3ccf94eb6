"""Process group and collectives of a distributed run."""

from __future__ import annotations

import datetime
import io
import logging
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import timm.utils
import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ConfigError
from .fault_tolerance.early_signals import launched_rank
from .fault_tolerance.parents import terminate_with_parent
from .fault_tolerance.signals import signals_handled_in_thread
from .fault_tolerance.watchdog import RankWatchdog

RESTART_TIMEOUT = 120  # seconds; timeout for all processes to join after a restart
# exceptions that PyTorch raises if the process group cannot be initialized
INIT_ERRORS = (ValueError, dist.DistError) if dist.is_available() else (ValueError,)
# Environment variables that torchrun and Slurm set: RANK_VARIABLES must be numbers, and VARIABLES appear in messages.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")
VARIABLES = (
    "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
)  # fmt: skip

_watchdog: RankWatchdog | None = None


def is_rank0() -> bool:
    """Return whether this process has rank 0, which prints messages for all ranks.

    Only environment variables are read, so the process group need not be initialized. If the world size is 1 or not
    set, RANK is ignored.
    """
    return launched_rank() == "0" or os.environ.get(world_size_variable() or "", "1") == "1"


def warn_on_rank0(module: str, message: str, *values: object) -> None:
    """Log a warning with the logger of `module`, on rank 0 only."""
    if is_rank0():
        logging.getLogger(module).warning(message, *values)


def init_process_group(device: str) -> tuple[torch.device, int, int]:
    """Initialize the process group of a training run. Return this process's device and rank, and the world size.

    With a world size of 1, no process group is created. Call `destroy_process_group` at the end of the run.

    Raises:
        ConfigError: The process group cannot be initialized.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Exit if torchrun is killed, because a surviving process would disturb the next run.
        terminate_with_parent()

    # CPU tensors use gloo, which does not wait for a GPU and fails at once if a process exits
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else None
    with signals_handled_in_thread():
        own_device, rank, world_size = init_distributed_device(device, backend, "vil://")

    if world_size > 1:
        global _watchdog
        _watchdog = RankWatchdog(rank, world_size)
        # All ranks wait here, so that no rank fails and exits while another rank is still joining.
        all_reduce_sum(torch.zeros(()))
        _watchdog.start()
    return own_device, rank, world_size


def destroy_process_group() -> None:
    """Wait until all ranks have called this function, then destroy the process group."""
    if _watchdog:
        all_reduce_sum(torch.zeros(()))
        _watchdog.finish()
        dist.destroy_process_group()


def init_distributed_device(
    device: str, backend: str | None = None, url: str | None = None
) -> tuple[torch.device, int, int]:
    """Call timm's `init_distributed_device`. Return this process's device and rank, and the world size.

    Args:
        device: Device type, such as "cuda".
        backend: Backend of the process group; None uses timm's default.
        url: URL of the rendezvous; None uses the environment variables.

    Raises:
        ConfigError: The process group cannot be initialized. The message contains the environment variables and the
            remedy.
    """
    if problem := _environment_problem():
        raise ConfigError(problem)
    process = SimpleNamespace(device=device, dist_backend=backend, dist_url=url)
    try:
        own_device = timm.utils.init_distributed_device(process)
    except INIT_ERRORS as error:
        reason = (str(error).splitlines() or ["unknown reason"])[0]
        named = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
        raise ConfigError(
            f"failed to initialize the process group with {named}: {reason}. Start all processes with torchrun or "
            "srun, or unset WORLD_SIZE and SLURM_NTASKS to run a single process"
        ) from error
    return own_device, process.rank, process.world_size


def world_size_variable() -> str | None:
    """Return the name of the environment variable by which timm detects a distributed run, or None."""
    return next((name for name in ("WORLD_SIZE", "SLURM_NTASKS") if name in os.environ), None)


def _environment_problem() -> str | None:
    """Return the reason why the environment variables describe no valid process group, or None if they are valid.

    timm creates a process group if WORLD_SIZE, or without it SLURM_NTASKS, exceeds 1. The processes find each other at
    MASTER_ADDR and MASTER_PORT. In an interactive Slurm job, or if a variable is left over from another run, the world
    size counts processes that were never started.
    """
    variable = world_size_variable()
    if variable is None or os.environ[variable] == "1":
        return None
    by_slurm = "SLURM_PROCID" in os.environ  # timm, too, distinguishes Slurm from torchrun by SLURM_PROCID
    remedy = f"unset {variable} to run in one process, or start all processes with torchrun"
    if by_slurm:
        remedy += ", or with srun and MASTER_ADDR and MASTER_PORT"

    for name in (variable, *RANK_VARIABLES, "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            return f"{name} must be a number, got {os.environ[name]!r}: {remedy}"
    world_size = int(os.environ[variable])
    if world_size <= 1:
        return None

    needed = ["MASTER_ADDR", "MASTER_PORT"]
    if not by_slurm:
        needed = ["WORLD_SIZE", "RANK", *needed]
    if missing := [name for name in needed if not os.environ.get(name)]:
        lacks = ", ".join(missing)
        return f"{variable}={world_size} requires environment variables that are not set ({lacks}): {remedy}"

    in_step = os.environ.get("SLURM_STEP_NUM_TASKS", os.environ[variable])
    if variable == "SLURM_NTASKS" and in_step != os.environ[variable]:
        return f"SLURM_NTASKS={world_size} must equal the number of tasks in this job step, got {in_step}: {remedy}"

    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    if rank >= world_size:
        return f"rank {rank} must be less than {variable}={world_size}: {remedy}"
    return None


def _rendezvous(url: str, **kwargs):
    """Yield PyTorch's env:// rendezvous with a store whose keys get another prefix after each restart by torchrun.

    The prefix is needed, because torchrun keeps the store across restarts, and the store still contains addresses of
    processes that no longer exist.
    """
    for store, rank, world_size in dist.rendezvous(url.replace("vil:", "env:"), **kwargs):
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start {restarts}", store)
        if restarts != "0":
            _wait_for_all(store, rank, world_size)
        yield store, rank, world_size


def _wait_for_all(store: dist.Store, rank: int, world_size: int) -> None:
    """Wait until all processes have restarted, or exit this process after `RESTART_TIMEOUT` seconds.

    torchrun may restart the processes of one machine while another machine is missing.
    """
    store.set(f"rank {rank}", "")
    try:
        store.wait([f"rank {other}" for other in range(world_size)], datetime.timedelta(seconds=RESTART_TIMEOUT))
    except dist.DistStoreError:
        sys.exit(
            f"error: not all {world_size} processes were restarted within {RESTART_TIMEOUT} seconds: restart the run "
            "on all machines with --resume auto"
        )


if dist.is_available():  # some builds of PyTorch lack torch.distributed
    dist.register_rendezvous_handler("vil", _rendezvous)


def all_reduce_sum(value: Tensor) -> Tensor:
    """All-reduce a tensor in place by summation."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def all_gather_interleaved(rows: Tensor) -> Tensor:
    """Gather tensors (N, ...) from all ranks, with rows interleaved in rank order. N may differ between ranks."""
    if not dist.is_initialized():
        return rows
    counts = [torch.tensor(0, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(len(rows), device=rows.device))
    counts_R = torch.stack(counts)

    padded = rows.new_zeros(int(counts_R.max()), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)

    has_row = torch.arange(len(padded), device=rows.device)[:, None] < counts_R
    return torch.stack(gathered, dim=1)[has_row]


class Rank0Error(RuntimeError):
    """Raised on other ranks if rank 0 fails in `broadcast_from_rank0`."""


def broadcast_from_rank0(function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0 and broadcast the result, such as tensors, numbers, strings or lists of these.

    `torch.load` must accept the result with weights_only=True, so that data from the network cannot execute code.

    Raises:
        Rank0Error: `function` raised an error on rank 0. Rank 0 itself raises the original error.
    """
    if not dist.is_initialized():
        return function()
    if dist.get_rank() == 0:
        return _call_and_send(function)

    received = io.BytesIO(_broadcast_bytes().numpy().data)
    value, message = torch.load(received, weights_only=True)
    if message is not None:
        raise Rank0Error(message)
    return value


def _call_and_send(function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0 and broadcast the result or the error message."""
    value: Any = None
    error: Exception | None = None
    try:
        value = function()
    except Exception as caught:
        error = caught
    message = None if error is None else str(error)

    buffer = io.BytesIO()
    torch.save([value, message], buffer)
    _broadcast_bytes(buffer.getbuffer())
    if error is not None:
        raise error
    return value


def _broadcast_bytes(content: bytes | memoryview = b"") -> Tensor:
    """Broadcast `content` from rank 0 and return the bytes as a tensor. Other ranks pass no content."""
    size = torch.tensor(len(content))
    dist.broadcast(size, 0)
    data = torch.frombuffer(content or bytearray(int(size)), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return data
