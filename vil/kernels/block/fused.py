"""Choice of the fused operator of a block: the one for NVIDIA GPUs, the one for CPUs, or none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import backends
from . import block_op, cpu
from .contract import FP32, TAPS
from .weights import BlockWeights


def fused_operator(x_BLC: Tensor, weights: BlockWeights, pooled: bool = False) -> Callable | None:
    """Return the operator that computes a block of these weights for this residual stream on this machine, or None.

    The operator accepts (x_BLC, weights, options, scale_B, normed) and returns x' and its norm or None, as
    `block_op.block`.
    """
    dtype, device, sizes = weights.norm.dtype, x_BLC.device, weights.sizes()
    fits = [t is not None and t.dtype == dtype and t.device == device and is_plain(t) for t in weights.flat()]
    if x_BLC.dtype != FP32 or x_BLC.numel() == 0 or dtype not in backends.DTYPES or not all(fits):
        return None
    if sizes.N not in backends.STATE_SIZES or sizes.K not in TAPS:
        return None
    backend = backends.backend_for(device)
    if backend == "cuda":
        return None if backends.transformed() else block_op.block
    # on a CPU, compilers and other observers must see the separate parts of a block
    hidden = dtype == FP32 and backends.unobserved(x_BLC) and not torch.is_autocast_enabled("cpu")
    if backend != "cpu" or not hidden or (pooled and torch.is_grad_enabled()):  # pooled blocks have no backward on CPUs
        return None
    return cpu.block


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor owns its values, unlike wrapper subclasses such as those of torchao and DTensor."""
    return not hasattr(type(tensor), "__tensor_flatten__")
