"""Environment variables that launchers (torchrun, Slurm) set for a process."""

from __future__ import annotations

import os

RANKS = "RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"


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
