"""The scan in CUDA C++ for NVIDIA GPUs, sm_80 and newer, compiled at first use. One family of kernels, two recurrences.

`common.cuh` holds the recurrences; `forward.cu`, `backward.cu` and `summary.cu` the kernels; `scan` launches them;
`variants` chooses among their variants; `compiler` compiles and caches them.
"""

from __future__ import annotations

import torch

from . import compiler
from .scan import INPUT, STATE_SIZES, backward, forward

__all__ = ["STATE_SIZES", "backward", "forward", "unavailable", "unsupported"]


def unsupported(x: torch.Tensor, directions: int) -> str | None:
    """Why this backend does not take inputs like x whatever the machine, or None."""
    if x.device.type != "cuda" or torch.version.hip:
        return f"the cuda backend needs tensors on an NVIDIA GPU; x is on {x.device}"
    if x.dtype not in INPUT:
        return f"the cuda backend takes float16, bfloat16 and float32; x is {x.dtype}"
    if directions > 63:
        return f"the cuda backend takes up to 63 directions, not {directions}"
    return None


def unavailable(device: torch.device) -> str | None:
    """Why this machine cannot run it, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability < compiler.OLDEST:
        return f"the cuda backend needs compute capability 8.0; {device} has {capability[0]}.{capability[1]}"
    return compiler.unavailable()
