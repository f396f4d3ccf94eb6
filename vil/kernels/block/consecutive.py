"""Forward and backward pass of one or more consecutive blocks of equal sizes, which a single plan replays.

The input of the first block is x, and the output of the last block is x'. xhat and rstd, or xhat' and rstd', are the
fields of `Normed` for x or x', and dx' is the gradient of x'. The tensors are passed as flat lists with these contents:

    forward     x, xhat and rstd of x (or None twice), each block's scale (or None), each block's weights
    saved       each block's `SavedForBackward` if gradients are needed, with None instead of xhat and rstd if they are
                inputs of the first block
    backward    dx', dxhat' (or None), xhat' and rstd' (or None twice), and for each block its scale (or None), norm,
                in_proj and `SavedForBackward` with xhat and rstd
"""

from __future__ import annotations

from torch import Tensor

from ..checks import aligned, given
from ..cuda.plan import planned
from . import kernels
from .backward import backward_block
from .contract import check_backward, check_forward
from .forward import forward_block
from .weights import (
    BackwardInputs,
    BackwardOptions,
    BlockWeights,
    Inputs,
    Normed,
    Options,
    SavedForBackward,
    Sizes,
    scales_and_weights,
)

FIELDS = len(SavedForBackward._fields)


@planned(check_forward)
def forward_blocks(options: tuple[Options, ...], keep: bool, flat: list[Tensor | None]) -> list[Tensor | None]:
    """Return the last block's output, xhat and rstd of the output (or None twice) and, if `keep`, saved tensors."""
    flat = [*map(aligned, flat)]
    x, xhat, rstd = flat[:3]
    saved: list[Tensor | None] = []
    for i, (scale, weights) in enumerate(scales_and_weights(len(options), flat)):
        normed = None if xhat is None or rstd is None else Normed(xhat, rstd)
        inputs = Inputs(given(x), scale, normed, BlockWeights.of(weights))
        x, xhat, rstd, *kept = forward_block(options[i], keep, inputs, overwrite=i > 0)
        if saved and normed:
            kept = [*kept[:-2], *normed]
        saved += kept
    return [x, xhat, rstd, *saved]


@planned(check_backward)
def backward_blocks(
    options: tuple[BackwardOptions, ...], sizes: Sizes, flat: list[Tensor | None]
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x and of its norm xhat (or None), and then the gradients of each block's weights."""
    dx, dnext, xhat, rstd, *others = map(aligned, flat)
    of_blocks = BackwardInputs.of(others)
    dx_TC, dout_TC = given(dx).flatten(0, 1), None
    if dnext is not None:
        dx_TC, dout_TC = kernels.norm_backward(dnext, given(xhat), given(rstd), dx_TC)
    gradients: list[Tensor | None] = []
    for own, inputs in zip(reversed(options), reversed(of_blocks)):
        dx_TC, dout_TC, dxhat_TC, of_weights = backward_block(own, sizes, inputs, dx_TC, dout_TC)
        gradients = [*of_weights, *gradients]
    B, L, _ = of_blocks[0].saved.uz.shape
    return [dx_TC.view(B, L, -1), dxhat_TC, *gradients]
