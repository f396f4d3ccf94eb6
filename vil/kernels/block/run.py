"""Forward and backward pass of a run: one or more consecutive blocks of equal sizes, which one plan replays.

The tensors of a run are passed as flat lists with these contents:

    forward     x, xhat and rstd of x (or None twice), each block's scale (or None), each block's weights
    saved       each block's `SavedForBackward` if gradients are needed, with None instead of xhat and rstd if they are
                inputs of the run
    backward    dx', dxhat' (or None), xhat' and rstd' (or None twice), and for each block its scale (or None), norm,
                in_proj and `SavedForBackward` with xhat and rstd
"""

from __future__ import annotations

from torch import Tensor

from ..checks import aligned
from ..cuda.plan import planned
from .backward import through_block, through_next_norm
from .contract import check_backward, check_forward
from .forward import forward
from .weights import BackwardInputs, BackwardOptions, Options, SavedForBackward, Sizes, scales_and_weights

FIELDS = len(SavedForBackward._fields)


@planned(check_forward)
def forward_run(options: tuple[Options, ...], keep: bool, flat: list[Tensor | None]) -> list[Tensor | None]:
    """Return the last block's output, xhat and rstd of the output (or None twice) and, if `keep`, saved tensors."""
    x, xhat, rstd = flat[:3]
    saved: list[Tensor | None] = []
    for i, (scale, weights) in enumerate(scales_and_weights(len(options), flat)):
        given = xhat, rstd
        x, xhat, rstd, *kept = forward(options[i], keep, [x, scale, xhat, rstd, *weights], overwrite=i > 0)
        if saved and given[0] is not None:
            kept = [*kept[:-2], *given]
        saved += kept
    return [x, xhat, rstd, *saved]


@planned(check_backward)
def backward_run(
    options: tuple[BackwardOptions, ...], sizes: Sizes, flat: list[Tensor | None]
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x and of its norm xhat (or None), and then the gradients of each block's weights.

    The gradients of a block's weights are the results of `through_block` after the gradient of xhat.
    """
    dx, dnext, *next_normed = flat[:4]
    each, dxhat = 3 + FIELDS, None
    gradients: list[Tensor | None] = []
    rounded: Tensor | None = None
    for i, own in reversed([*enumerate(options)]):
        of_output = [dx, dnext, *next_normed] if rounded is None else [dx, None, None, None]
        inputs = BackwardInputs.of(map(aligned, [*of_output, *flat[4 + i * each : 4 + (i + 1) * each]]))
        # all blocks except the first backpropagate through their norm, and return a rounded copy of dx
        dx_TC, dout_TC = through_next_norm(inputs) if rounded is None else (inputs.dx.flatten(0, 1), rounded)
        dx, rounded, dxhat, *of_weights = through_block(own, sizes, inputs, dx_TC, dout_TC)
        gradients = [*of_weights, *gradients]
    return [dx, dxhat, *gradients]
