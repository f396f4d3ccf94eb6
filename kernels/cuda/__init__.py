"""What the kernels in CUDA C++ share: headers, `compiler`, and `cache`, which keeps what that has compiled."""

from __future__ import annotations

import torch

from . import compiler


def unavailable(device: torch.device) -> str | None:
    """Why this machine cannot run it, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability < compiler.OLDEST:
        return f"The cuda backend needs compute capability 8.0; {device} has {capability[0]}.{capability[1]}"
    return compiler.unavailable()
