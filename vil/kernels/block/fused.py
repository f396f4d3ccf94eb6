"""The one question whether a block runs fused, and by which operator: that for NVIDIA GPUs, that for CPUs, or none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import backends
from . import cpu, operator
from .contract import FP32, TAPS, unobserved
from .weights import BlockWeights


def fused_operator(x_BLC: Tensor, weights: BlockWeights, pooled: bool = False) -> Callable | None:
    """The operator that computes a block of these weights over this residual stream on this machine, or None.

    It takes (x_BLC, weights, options, scale_B, normed) and returns x' and its norm or None: `operator.block` says more.
    """
    dtype, device, sizes = weights.norm.dtype, x_BLC.device, weights.sizes()
    fits = [t is not None and t.dtype == dtype and t.device == device and is_plain(t) for t in weights.flat()]
    if x_BLC.dtype != FP32 or x_BLC.numel() == 0 or dtype not in backends.DTYPES or not all(fits):
        return None
    if sizes.N not in backends.STATE_SIZES or sizes.K not in TAPS:
        return None
    backend = backends.backend_for(device)
    if backend == "cuda":
        return None if backends.transformed() else operator.block
    # compilers and whoever else looks on are shown the parts of a block on a CPU
    hidden = dtype == FP32 and unobserved(x_BLC) and not torch.is_autocast_enabled("cpu")
    if backend != "cpu" or not hidden or (pooled and torch.is_grad_enabled()):  # which has no backward there
        return None
    return cpu.block


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is values in memory, and none that stands for others, as those of torchao and DTensor do."""
    return not hasattr(type(tensor), "__tensor_flatten__")
