"""Choice of the backend for a scan or block, and the reason if a backend cannot run.

The choice depends on the tensors' device (`misplaced`), their dtype and sizes (`unfit`), and the software of this
machine (`unavailable`). `choose` checks the tensors, and for "auto" also the machine. `backend_for` and `resolve` check
the device and the machine.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings

import torch
from torch import Tensor

from . import cuda, torch_private
from .checks import check_choice
from .cpu import compiler as cpu_compiler

KERNELS = ("cuda", "triton", "cpu")  # backends of `vil::scan`; "reference" is plain PyTorch and runs on any device
RECURRENCES = ("longhorn", "selective")
STATE_SIZES = (4, 8, 16, 32, 64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIRECTIONS = 63  # maximum number of directions, because kernels receive `reverse` as the bits of one integer
# maximum numbers of tokens and channels, limited by 32-bit token indices and by 32-bit byte offsets in a token
TOKENS, CHANNELS = 2**31 - 2**10, 2**29 - 1


def choose(backend: str, x: Tensor, state_size: int, directions: int) -> str:
    """Return the backend of a scan of x (..., L, D): one of `KERNELS`, "reference", or "auto" for the fastest on a GPU.

    Raises:
        ValueError: The requested backend is unknown or does not support x, `state_size` or `directions`.
    """
    if backend == "reference":
        return backend
    if backend != "auto":
        check_choice("backend", backend, ["auto", *KERNELS, "reference"])
        if reason := misplaced(backend, x.device) or unfit(backend, x, state_size, directions):
            raise ValueError(reason)
        return backend
    # torch.jit.trace does not support a list of bools such as the argument `reverse` of `vil::scan`
    traced = torch.jit.is_tracing()
    if traced or transformed() or unfit(backend, x, state_size, directions) or backend_for(x.device) == "reference":
        return "reference"
    # with "auto", a graph that was exported on one GPU can use the best backend of another GPU
    return "cpu" if x.device.type == "cpu" else "auto"


def transformed() -> bool:
    """Return whether a torch.func transformation or forward-mode differentiation is active.

    Only the reference backend supports transformations. In forward-mode differentiation, the kernels would drop the
    tangents, whereas the reference backend raises an error.
    """
    # torch.compile can trace these calls
    return torch._C._functorch.maybe_current_level() is not None or torch_private.in_forward_mode()


def unobserved(t: Tensor) -> bool:
    """Return whether a tensor's operators run in plain eager mode, without a compiler, a dispatch mode, a functional
    transform, forward-mode differentiation or a tensor subclass.
    """
    return not (
        torch.compiler.is_compiling() or torch.jit.is_tracing() or type(t) is not Tensor or torch_private.observed()
    )


def resolve(backend: str, device: torch.device) -> str:
    """Return the backend to run on a device: the requested one or, for "auto", the fastest one of this machine.

    Raises:
        ValueError: The backend does not support tensors on this device.
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


@torch.compiler.assume_constant_result  # torch.compile cannot trace the imports of backends
def backend_for(device: torch.device) -> str:
    """Return the fastest backend of this machine for tensors on the device; warn once if a faster backend cannot
    run.
    """
    return _backend_for(device)


@functools.cache
def _backend_for(device: torch.device) -> str:
    if device.type == "cpu":
        candidates = ["cpu"]
    elif device.type == "cuda":
        if not torch.cuda.is_available():
            return "cuda"  # fake tensors of a compiler need no GPU
        candidates = ["triton"] if torch.version.hip else ["cuda", "triton"]
    else:
        return "reference"
    reasons: list[str] = []
    for backend in candidates:
        reason = unavailable(backend, device)
        if reason is None:
            if reasons:
                warnings.warn(f"{reasons[0]}. Using the {backend} backend instead.", stacklevel=3)
            return backend
        reasons.append(reason)
    slow = ", which is slow on a GPU" if device.type == "cuda" else ""
    warnings.warn(f"{'; '.join(reasons)}. Using the reference instead{slow}.", stacklevel=3)
    return "reference"


def misplaced(backend: str, device: torch.device) -> str | None:
    """Return the reason why a backend cannot read tensors on a device, or None if it can."""
    if backend == "cpu":
        return None if device.type == "cpu" else f"tensors must be on a CPU for the cpu backend, got x on {device}"
    interpreted = backend == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda" or interpreted:
        return None
    return f"tensors must be on a GPU for the {backend} backend, got x on {device}"


def unfit(backend: str, x: Tensor, state_size: int, directions: int) -> str | None:
    """Return the reason why a backend does not support x (..., L, D) or the number of states or directions, or None."""
    *_, L, D = x.shape
    if x.dtype not in DTYPES:
        return f"dtype of x must be float16, bfloat16 or float32 for the {backend} backend, got {x.dtype}"
    if state_size > STATE_SIZES[-1] or directions > DIRECTIONS:
        limits = f"{STATE_SIZES[-1]} states and {DIRECTIONS} directions"
        return f"the {backend} backend supports up to {limits}, got {state_size} and {directions}"
    if L > TOKENS or D > CHANNELS:
        return f"the {backend} backend supports up to {TOKENS} tokens and {CHANNELS} channels, got {L} and {D}"
    return None


def unavailable(backend: str, device: torch.device) -> str | None:
    """Return the reason why this machine cannot run a backend on a device, or None if it can."""
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
