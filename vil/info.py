"""Versions, commit and hardware that a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

PACKAGES = ("torch", "torchvision", "timm", "triton", "cuda-core", "numba", "numpy", "pillow")


def environment() -> dict[str, str]:
    """Return package versions, git commit and hardware as a dict, in printing order."""
    facts = {
        "vision-longhorn": _version("vision-longhorn"),
        "commit": git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in PACKAGES:
        facts[name] = _version(name)

    facts["cpu"] = f"{os.cpu_count()} cores, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    facts["cuda"] = torch.version.cuda or "not in this build of torch"
    if torch.cuda.is_available():
        # PyTorch for Windows has no NCCL.
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["driver"] = drivers.split("\n")[0]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        facts[f"gpu {i}"] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    return facts


def format_environment() -> str:
    """Return `environment` as a table with one line per entry."""
    facts = environment()
    width = max(map(len, facts))
    return "".join(f"{name:{width}}  {value}\n" for name, value in facts.items())


def git_commit() -> str:
    """Return the commit of the checkout that contains this package, with "-dirty" if tracked files are modified."""
    root = Path(__file__).parents[1]
    # Do not run git in a parent folder's repository, because git settings of an untrusted repository can run commands.
    if not (root / ".git").exists():
        return "unknown: not run from a git checkout"
    # Disable git's optional locks, because a killed git process would leave a lock file. The function does not call
    # `git describe --dirty`, which always locks.
    git = ["git", "--no-optional-locks", "-C", str(root), "-c", "core.fsmonitor=false"]
    commit = _output(*git, "rev-parse", "--verify", "HEAD")
    if not commit:
        return "unknown: git failed"
    is_dirty = bool(_output(*git, "status", "--porcelain", "--untracked-files=no"))
    return f"{commit}-dirty" if is_dirty else commit


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    """Return the command's stdout, or "" if the command is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
