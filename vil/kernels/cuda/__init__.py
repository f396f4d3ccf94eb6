"""What kernels in CUDA C++ share: headers, `compiler`, which makes and launches them, `plan`, which replays them."""

from __future__ import annotations

import torch

from . import compiler


def unavailable(device: torch.device) -> str | None:
    """Why this machine cannot run them on this GPU, or None."""
    if torch.version.hip:
        return "The cuda backend needs an NVIDIA GPU and a PyTorch built for it"
    capability = torch.cuda.get_device_capability(device)
    if capability < compiler.OLDEST:
        return f"The cuda backend needs compute capability 8.0; {device} has {capability[0]}.{capability[1]}"
    return compiler.unavailable()


@torch.compiler.assume_constant_result  # as torch.compile cannot look into the imports behind it
def runs_on(device: torch.device) -> bool:
    """Whether this machine runs them on this device."""
    return device.type == "cuda" and unavailable(device) is None
