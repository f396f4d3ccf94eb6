"""Infrastructure for kernels in CUDA C++: declaration, compilation, launch and replay.

`source`    declaration of a source file and its kernels' parameters
`compiler`  compilation by NVRTC, with a cache on disk
`launches`  launch of a kernel with named arguments on PyTorch's current stream
`plan`      replay of the launches that `recording` has recorded as `steps`
`memory`    assignment of a plan's temporary tensors to memory
`graphs`    replay of whole plans as CUDA graphs
`hardware`  properties of the GPU
`elements`  element types and vector widths
"""

from __future__ import annotations

import torch

from . import compiler


def unavailable(device: torch.device) -> str | None:
    """Return the reason why this machine cannot run CUDA kernels on the GPU `device`, or None if it can."""
    if torch.version.hip:
        return "the cuda backend needs an NVIDIA GPU and a CUDA build of PyTorch"
    capability = torch.cuda.get_device_capability(device)
    if capability < compiler.OLDEST:
        found = f"{capability[0]}.{capability[1]} on {device}"
        return f"compute capability must be at least 8.0 for the cuda backend, got {found}"
    return compiler.unavailable()


@torch.compiler.assume_constant_result  # torch.compile cannot trace the imports of `unavailable`
def runs_on(device: torch.device) -> bool:
    """Return whether a device is a GPU on which this machine can run CUDA kernels."""
    return device.type == "cuda" and unavailable(device) is None
