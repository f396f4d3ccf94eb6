"""Selection of the fused implementation of a block: the implementation for NVIDIA GPUs or for CPUs, or None."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import backends
from . import block_op, cpu
from .contract import FP32, TAPS
from .weights import BlockWeights


def fused_operator(x_BLC: Tensor, weights: BlockWeights) -> Callable | None:
    """Return the fused implementation that supports the weights and the input, or None if the block must run unfused.

    The returned function has the arguments and results of `block_op.run_blocks`. To run several blocks with one call,
    `fused_operator` must return the same function for each of the blocks.
    """
    dtype, device, sizes = weights.norm.dtype, x_BLC.device, weights.sizes()
    flat = weights.flat()
    fits = [t is not None and t.dtype == dtype and t.device == device for t in flat]
    if x_BLC.dtype != FP32 or x_BLC.numel() == 0 or dtype not in backends.DTYPES or not all(fits):
        return None
    if not all(is_plain(t) for t in {type(t): t for t in flat}.values()):
        return None
    if sizes.N not in backends.STATE_SIZES or sizes.K not in TAPS:
        return None
    backend = backends.backend_for(device)
    if backend == "cuda":
        return None if backends.transformed() else block_op.run_blocks
    # on CPUs, a block runs unfused in torch.compile, dispatch modes, functional transforms and autocast
    hidden = dtype == FP32 and backends.unobserved(x_BLC) and not torch.is_autocast_enabled("cpu")
    return cpu.run_blocks if backend == "cpu" and hidden else None


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor stores its own values, unlike wrapper subclasses such as those of DTensor and torchao."""
    return not hasattr(type(tensor), "__tensor_flatten__")
