"""Choice of a block's fused operator: the operator for NVIDIA GPUs, the operator for CPUs, or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import backends
from . import block_op, cpu, run_op
from .contract import FP32, TAPS
from .weights import BlockWeights, Normed, Options


def fused_operator(x_BLC: Tensor, weights: BlockWeights) -> Callable | None:
    """Return the fused operator that supports a block's weights and input, or None if no operator does.

    Like `block_op.block`, the operator accepts (x_BLC, weights, options, scale_B, normed), and returns the block's
    output and the norm of the output or None.
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
        return None if backends.transformed() else block_op.block
    # on CPUs, a block runs unfused in torch.compile, dispatch modes, functional transforms and autocast
    hidden = dtype == FP32 and backends.unobserved(x_BLC) and not torch.is_autocast_enabled("cpu")
    return cpu.block if backend == "cpu" and hidden else None


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor stores its own values, unlike wrapper subclasses such as those of DTensor and torchao."""
    return not hasattr(type(tensor), "__tensor_flatten__")


def run_blocks(
    operator: Callable,
    x_BLC: Tensor,
    weights: Sequence[BlockWeights],
    options: Sequence[Options],
    scales: Sequence[Tensor | None],
    normed: Normed | None,
) -> tuple[Tensor, Normed | None]:
    """Run consecutive blocks with the operator that `fused_operator` returned for all of them.

    Each block passes the norm of its output to the next block, so all blocks must have the same eps.
    """
    if operator is block_op.block:
        return run_op.run_blocks(x_BLC, weights, options, scales, normed)
    for own in zip(weights, options, scales):
        x_BLC, normed = operator(x_BLC, *own, normed)
    return x_BLC, normed
