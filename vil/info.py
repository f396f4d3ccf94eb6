"""Versions, commit and machine, as an issue report needs them.

python -m vil.info
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

PACKAGES = ("torch", "torchvision", "timm", "triton", "cuda-core", "numba", "numpy", "pillow")


def environment() -> dict[str, str]:
    """Names and values, in the order in which to print them."""
    facts = {"vision-longhorn": _version("vision-longhorn"), "commit": git_commit()}
    facts |= {"python": platform.python_version(), "platform": platform.platform()}
    facts |= {name: _version(name) for name in PACKAGES}
    facts["cpu"] = f"{os.cpu_count()} cores, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    facts["cuda"] = torch.version.cuda or "not in this build of torch"
    if torch.cuda.is_available():
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():  # not on Windows
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        facts[f"gpu {i}"] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    return facts


def format_environment() -> str:
    facts = environment()
    width = max(map(len, facts))
    return "".join(f"{name:{width}}  {value}\n" for name, value in facts.items())


def git_commit() -> str:
    """The commit of the checkout that this package runs from, with "-dirty" where files differ from it."""
    root = Path(__file__).parents[1]
    # not a repository that it is installed inside of, whose settings could have git run anything
    if not (root / ".git").exists():
        return "unknown: not run from a git checkout"
    # without locks: that of a run that is killed meanwhile would stay (`git describe --dirty` takes one all the same)
    git = "git", "--no-optional-locks", "-C", str(root), "-c", "core.fsmonitor=false"
    if not (commit := _output(*git, "rev-parse", "--verify", "HEAD")):
        return "unknown: git has no answer"
    return commit + "-dirty" * bool(_output(*git, "status", "--porcelain", "--untracked-files=no"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    """The output of a command; nothing if there is no such command or it fails."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m vil.info", description="Prints versions, commit and machine.").parse_args()
    print(format_environment(), end="")
