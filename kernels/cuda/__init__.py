"""Kernels in CUDA C++ for NVIDIA GPUs, sm_80 and newer, compiled at first use.

The scan: `common.cuh` holds the recurrences; `forward.cu`, `backward.cu` and `summary.cu` the kernels, one family for
both; `quads.cu` and `pairs.cu` are forward on tensor cores, for few and long sequences, `summary_triples.cu` is the
summary; `scan` launches them; `variants` chooses among their variants. What surrounds it in a block: `block.cu`,
`convolve.cu`, `project.cu`, `step.cu`, `output.cu` and, on Hopper, `output_hopper.cu` and `output_hopper_backward.cu`,
which `block` launches. Images before all that: `augment.cu`, which `augment` launches.
`types.cuh` is what all share; `compiler` compiles them, `cache` keeps what it has compiled.
"""

from __future__ import annotations

import torch

from . import compiler
from .scan import backward, forward

__all__ = ["backward", "forward", "unavailable"]


def unavailable(device: torch.device) -> str | None:
    """Why this machine cannot run it, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability < compiler.OLDEST:
        return f"The cuda backend needs compute capability 8.0; {device} has {capability[0]}.{capability[1]}"
    return compiler.unavailable()
