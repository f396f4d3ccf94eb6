"""Which backend runs these tensors here, or why it cannot: what scan and block ask before they launch anything.

Three things decide: the device that holds the tensors (`misplaced`), their dtype and sizes (`unfit`), and what this
machine has and lacks (`unavailable`). `backend_for` joins the first and the last, `choose` all of them.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings

import torch
from torch import Tensor

from . import cuda
from .checks import check_choice
from .cpu import compiler as cpu_compiler

KERNELS = ("cuda", "triton", "cpu")  # backends of `vil::scan`; "reference" is plain PyTorch and runs anywhere
RECURRENCES = ("longhorn", "selective")
STATE_SIZES = (4, 8, 16, 32, 64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIRECTIONS = 63  # which of them are reversed is a mask of 64 bits
TOKENS, CHANNELS = 2**31 - 2**10, 2**29 - 1  # counted in 32 bits, also in bytes of fp32 between tokens


def choose(backend: str, x: Tensor, state_size: int, directions: int) -> str:
    """The backend that a scan of x (..., L, D) asks for: one of `KERNELS`, "reference", or "auto" for a GPU's best.

    Raises:
        ValueError: A backend asked for by name does not exist, or does not take these tensors.
    """
    if backend == "reference":
        return backend
    if backend != "auto":
        check_choice("backend", backend, ["auto", *KERNELS, "reference"])
        if reason := misplaced(backend, x.device) or unfit(backend, x, state_size, directions):
            raise ValueError(reason)
        return backend
    # torch.jit.trace knows no lists of bools, which `vil::scan` takes
    traced = x.device.type == "cpu" and torch.jit.is_tracing()
    if traced or transformed() or unfit(backend, x, state_size, directions) or backend_for(x.device) == "reference":
        return "reference"
    # a graph that is exported on one GPU finds the best backend of another as it runs there
    return "cpu" if x.device.type == "cpu" else "auto"


def transformed() -> bool:
    """Whether a transformation of torch.func is to see the scan, which the reference alone has the rules for."""
    return torch._C._functorch.maybe_current_level() is not None  # which torch.compile can ask, too


def resolve(backend: str, device: torch.device) -> str:
    """Which of `KERNELS` runs the backend on this device.

    Raises:
        ValueError: The backend does not read tensors on this device.
        RuntimeError: This machine lacks what the backend needs.
    """
    if reason := misplaced(backend, device):
        raise ValueError(reason)
    best = backend_for(device) if backend == "auto" else backend
    if best == "reference":
        raise RuntimeError(unavailable("triton", device))
    if reason := unavailable(best, device):
        raise RuntimeError(reason)
    return best


@torch.compiler.assume_constant_result  # as torch.compile cannot look into the imports behind it
def backend_for(device: torch.device) -> str:
    """The fastest backend that this machine runs on tensors of the device; a warning says once why none faster."""
    return _backend_for(device)


@functools.cache
def _backend_for(device: torch.device) -> str:
    if device.type == "cpu":
        candidates = ["cpu"]
    elif device.type == "cuda":
        if not torch.cuda.is_available():
            return "cuda"  # a compiler's tensors need no GPU
        candidates = ["triton"] if torch.version.hip else ["cuda", "triton"]
    else:
        return "reference"
    reasons: list[str] = []
    for backend in candidates:
        reason = unavailable(backend, device)
        if reason is None:
            if reasons:
                warnings.warn(f"{reasons[0]}. The {backend} backend takes over.", stacklevel=3)
            return backend
        reasons.append(reason)
    slow = ", which is slow on a GPU" if device.type == "cuda" else ""
    warnings.warn(f"{'; '.join(reasons)}. The reference takes over{slow}.", stacklevel=3)
    return "reference"


def misplaced(backend: str, device: torch.device) -> str | None:
    """Why the backend's kernels cannot read what is on this device, or None."""
    if backend == "cpu":
        return None if device.type == "cpu" else f"the cpu backend needs tensors on a CPU; x is on {device}"
    interpreted = backend == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda" or interpreted:
        return None
    return f"the {backend} backend needs tensors on a GPU; x is on {device}"


def unfit(backend: str, x: Tensor, state_size: int, directions: int) -> str | None:
    """Why the backend's kernels do not take x (..., L, D) and so many states and directions, or None."""
    *_, L, D = x.shape
    if x.dtype not in DTYPES:
        return f"the {backend} backend takes float16, bfloat16 and float32; x is {x.dtype}"
    if state_size > STATE_SIZES[-1] or directions > DIRECTIONS:
        limits = f"{STATE_SIZES[-1]} states and {DIRECTIONS} directions"
        return f"the {backend} backend takes up to {limits}, not {state_size} and {directions}"
    if L > TOKENS or D > CHANNELS:
        return f"the {backend} backend takes up to {TOKENS} tokens and {CHANNELS} channels, not {L} and {D}"
    return None


def unavailable(backend: str, device: torch.device) -> str | None:
    """What this machine lacks to run the backend's kernels on this device of its own, or None."""
    if backend == "cuda":
        return cuda.unavailable(device)
    if backend == "cpu":
        reason = cpu_compiler.unavailable()
        return reason and f"the cpu backend cannot run: {reason}"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"the triton backend needs Triton, which cannot be imported: {error}"
    return None
