"""PyTorch operator `vil::block`, which computes one or more consecutive bidirectional blocks on NVIDIA GPUs.

The operator computes `reference.block` for each block with fewer kernels and fewer tensors saved for backward. The
norm's weight is folded into in_proj, both directions share each kernel, the residual addition is part of the matrix
product with out_proj, and backward recomputes convolutions, projections and gate.

A call of an operator costs host time, in eager mode and under torch.compile. Therefore a model runs up to `BLOCKS`
blocks of equal sizes with one call. More blocks per call would delay the first kernel of a call. More blocks would also
delay the gradients of the last blocks, so that DistributedDataParallel could all-reduce fewer gradients during the
backward pass.

A block also computes the norm of its output for the next block if this costs no extra kernel. Such a block maps the
residual stream x and xhat, the RMSNorm of x without a weight, to the output x' and xhat', the norm of x'. A block's
backward pass ends with the gradient through the norm xhat, unless xhat is an input of the call. In this case, the
backward pass of the previous call begins with the gradient through the norm.

In a pooled block, the recurrence reads row or column means of the patches (lines.py), and v, y, steps, keys and queries
of all tokens are never stored: `pool` stores only the skip connections of all tokens, and backward recomputes v from u.

If only the class token's output is needed, as in a model's last block, z, the gate and the matrix product with
out_proj are computed for the class token only. If such a block is not pooled, each direction processes only the half of
the tokens up to the class token.

Functions, classes and modules between a model's call and the kernels:

    run_blocks         the function that models call, for single blocks and for sequences of blocks
    _EagerBlocks       autograd function for eager mode, which bypasses the dispatcher
    _ObservedBlocks    autograd function for calls that a compiler or a dispatch mode observes
    _forward, _fake_*  implementations of the operators; lists of tensors in an operator's schema omit missing tensors
    consecutive.py     forward and backward pass of consecutive blocks; plans record and replay the launches of kernels
    forward, backward  modules that call the kernels and matrix products of one block in order
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import backends, torch_private
from ..checks import given, once_differentiable
from ..scan.chunks import chunk_state_count
from . import kernels
from .consecutive import FIELDS, backward_blocks, forward_blocks
from .contract import check_backward, check_forward, check_lists
from .forward import A_of
from .lines import Lines
from .tokens import Tokens
from .weights import (
    BackwardInputs,
    BackwardOptions,
    BlockWeights,
    Normed,
    Options,
    SavedForBackward,
    Sizes,
    needs_gradients,
    scales_and_weights,
)

BLOCKS = 6  # maximum number of consecutive blocks that `run_blocks` passes to one call of `vil::block`

torch.library.define(
    "vil::block",
    "(str recurrence, float eps, ScalarType dtype, bool class_token_only, bool norm_next, int[] lines,"
    " Tensor x_BLC, Tensor[] normed, Tensor?[] scales, Tensor[] weights, bool keep)"
    " -> (Tensor x_BMC, Tensor[] next_normed, Tensor[] saved)",
)
torch.library.define(
    "vil::block_backward",
    "(str recurrence, bool class_token_only, bool norm_given, int[] lines, int[] sizes, Tensor dx_BMC,"
    " Tensor? dnext_TC, Tensor[] next_normed, Tensor?[] scales, Tensor[] weights, Tensor[] saved)"
    " -> Tensor[]",
)


def run_blocks(
    x_BLC: Tensor,
    weights: Sequence[BlockWeights],
    options: Sequence[Options],
    scales: Sequence[Tensor | None],
    normed: Normed | None = None,
) -> tuple[Tensor, Normed | None]:
    """Return the output of consecutive blocks, and the norm of the output for the next block.

    Each block computes x' = x + scale * out_proj(mixer(norm(x))). All blocks must have the same eps if any block except
    the last one sets `Options.norm_next`. One call of the operator computes up to `BLOCKS` blocks.

    Args:
        x_BLC: Residual stream, fp32.
        weights: Weights of each block. All weights of a block have the same dtype.
        options: Options of each block.
        scales: Factors of stochastic depth of each block, 0 or 1 / (1 - rate) for each image. None means 1.
        normed: Norm of x that the call for the previous blocks returned, if the previous blocks have the same eps.

    Returns:
        x' of the last block, and the norm of x' if the last block sets `norm_next` and the norm costs no extra kernel,
        otherwise None.
    """
    i = 0
    while i < len(options):
        if normed is not None and normed.xhat.dtype != options[i].dtype:
            normed = None
        sizes, keep = weights[i].sizes(), needs_gradients(x_BLC, weights[i])
        end = _end(x_BLC, weights, options, i, sizes, keep)
        flat = [x_BLC, *(normed or (None, None)), *scales[i:end], *[t for own in weights[i:end] for t in own.flat()]]
        x_BLC, xhat_TC, rstd_T = _run(sizes, tuple(options[i:end]), keep, flat)
        normed = None if xhat_TC is None else Normed(xhat_TC, rstd_T)
        i = end
    return x_BLC, normed


def _end(
    x_BLC: Tensor, weights: Sequence[BlockWeights], options: Sequence[Options], start: int, sizes: Sizes, keep: bool
) -> int:  # fmt: skip
    """Return the exclusive end of the longest sequence of blocks from `start` that one call of `vil::block` computes.

    `sizes` are the sizes of block `start`, and `keep` is whether block `start` needs gradients.
    """
    first, end = options[start], start + 1
    while end < min(start + BLOCKS, len(options)) and weights[end].sizes() == sizes:
        own, previous = options[end], options[end - 1]
        pooled = own.lines is not None
        if own[:3] != first[:3] or pooled != (first.lines is not None) or not previous.norm_next:
            break
        if not keep and needs_gradients(x_BLC, weights[end]):
            break
        end += 1
    return end


def _run(sizes: Sizes, options: tuple[Options, ...], keep: bool, flat: list[Tensor | None]) -> Sequence:
    """Compute blocks with one call. Return the output, and xhat and rstd of the output (or None twice)."""
    if not is_eager(flat[0]):
        y_BMC, next_normed, _ = torch.ops.vil.block(*_to_schema(options, keep, flat))
        return y_BMC, *(next_normed or (None, None))
    return _EagerBlocks.apply(sizes, options, *flat) if keep else forward_blocks(options, False, flat)


def is_eager(t: Tensor | None) -> bool:
    """Return whether the operator may run without PyTorch's dispatcher, which costs host time."""
    return t is not None and t.device.type == "cuda" and backends.unobserved(t)


def _to_schema(options: tuple[Options, ...], keep: bool, flat: list[Tensor | None]) -> tuple:
    """Convert the arguments of `forward_blocks` to arguments of the operator `vil::block`."""
    first, last, blocks = options[0], options[-1], len(options)
    x_BLC, xhat_TC, rstd_T, *others = flat
    normed = [] if xhat_TC is None else [xhat_TC, rstd_T]
    how = *first[:3], last.class_token_only, last.norm_next, _numbers(options)
    return *how, x_BLC, normed, others[:blocks], others[blocks:], keep


def _from_schema(recurrence, eps, dtype, class_token_only, norm_next, lines, x_BLC, normed, scales, weights, keep):
    """Convert the arguments of the operator `vil::block` to arguments of `forward_blocks`."""
    blocks, last, each = len(scales), len(scales) - 1, 17 if recurrence == "selective" else 15
    check_lists(
        recurrence, blocks, lines=(lines, 0, 3 * blocks), normed=(normed, 0, 2), weights=(weights, each * blocks)
    )  # fmt: skip
    options = tuple([
        Options(recurrence, eps, dtype, class_token_only and i == last, norm_next or i < last, own)
        for i, own in enumerate(_lines(lines, blocks))
    ])  # fmt: skip
    return options, keep, [x_BLC, *(normed or (None, None)), *scales, *weights]


def _numbers(options: Sequence[Options | BackwardOptions]) -> list[int]:
    """Convert the `lines` of all blocks to the argument `lines` of an operator."""
    return [number for own in options for number in own.lines or ()]


def _lines(numbers: Sequence[int], blocks: int) -> list[Lines | None]:
    """Convert the argument `lines` of an operator to the `lines` of each block."""
    if not numbers:
        return [None] * blocks
    return [Lines(numbers[i], numbers[i + 1], bool(numbers[i + 2])) for i in range(0, 3 * blocks, 3)]


def _forward(*arguments):
    y_BMC, xhat_TC, rstd_T, *saved = forward_blocks(*_from_schema(*arguments))
    return y_BMC, [] if xhat_TC is None else [xhat_TC, rstd_T], [t for t in saved if t is not None]


def _backward_arguments(
    recurrence, class_token_only, norm_given, lines, sizes, dx_BMC, dnext_TC, next_normed, scales, weights, saved
) -> tuple[tuple[BackwardOptions, ...], Sizes, list[Tensor | None]]:  # fmt: skip
    """Convert the arguments of the operator `vil::block_backward` to arguments of `backward_blocks`."""
    blocks, last, each = len(scales), len(scales) - 1, SavedForBackward.flat_length(recurrence, bool(lines))
    check_lists(
        recurrence, blocks, lines=(lines, 0, 3 * blocks), sizes=(sizes, len(Sizes._fields)),
        next_normed=(next_normed, 0, 2), weights=(weights, 2 * blocks), saved=(saved, each * blocks),
    )  # fmt: skip
    options = tuple([
        BackwardOptions(recurrence, class_token_only and i == last, norm_given and i == 0, own)
        for i, own in enumerate(_lines(lines, blocks))
    ])  # fmt: skip
    flat = [dx_BMC, dnext_TC, *(next_normed or (None, None))]
    for i in range(blocks):
        own = SavedForBackward.of(saved[i * each : (i + 1) * each], recurrence, bool(lines))
        flat += [scales[i], *weights[2 * i : 2 * i + 2], *own]
    return options, Sizes(*sizes), flat


def _backward(*arguments):
    """Return the gradients of the first block's x and xhat (the RMSNorm of x), and of the weights of each block.

    The gradient of xhat is empty unless `norm_given`. The gradients of a block's weights are one tensor for both A_log
    (selective recurrence only), and one flat tensor for all other weights. A list of few tensors saves host time under
    torch.compile.
    """
    dx_BMC = arguments[5]
    dx_BLC, dxhat_TC, *of_weights = backward_blocks(*_backward_arguments(*arguments))
    # an operator's results must not share memory with its arguments
    if dx_BLC.data_ptr() == dx_BMC.data_ptr():
        dx_BLC = dx_BLC.clone()
    if dxhat_TC is None:
        dxhat_TC = dx_BLC.new_empty(0, dtype=arguments[-1][0].dtype)
    return [dx_BLC, dxhat_TC, *of_weights]


@torch.library.register_fake("vil::block")
def _fake_forward(*arguments):
    options, keep, flat = _from_schema(*arguments)
    check_forward(options, keep, flat)
    x_BLC, xhat_TC, *_ = flat
    weights = [BlockWeights.of(own) for _, own in scales_and_weights(len(options), flat)]
    (B, L, C), last = x_BLC.shape, options[-1]
    y_BMC, next_normed = x_BLC.new_empty(B, Tokens(L, last.class_token_only).M, C), []
    norm_is_free = kernels.runs_hopper_kernels(B * L, C, weights[0].sizes().D, last.dtype, x_BLC.device)
    if last.norm_next and not last.class_token_only and norm_is_free:
        next_normed = [x_BLC.new_empty(B * L, C, dtype=last.dtype), x_BLC.new_empty(B * L)]
    saved = []
    for i in range(len(options) if keep else 0):
        saved += _fake_saved(x_BLC, weights[i], options[i], norm_given=i == 0 and xhat_TC is not None).flat()
    return y_BMC, next_normed, saved


def _fake_saved(x_BLC: Tensor, weights: BlockWeights, options: Options, norm_given: bool) -> SavedForBackward:
    """Return uninitialized tensors with the shapes and dtypes of the tensors that a block saves."""
    (B, L, C), sizes, dtype, lines = x_BLC.shape, weights.sizes(), options.dtype, options.lines
    tokens, D = Tokens(L, options.class_token_only), sizes.D
    return SavedForBackward(
        uz=x_BLC.new_empty((B, L, tokens.columns(D)), dtype=dtype),
        mean=x_BLC.new_empty((B, tokens.M, D), dtype=dtype),
        states=x_BLC.new_empty((2, B, chunk_state_count(lines.S if lines else tokens.H), sizes.N, D)),
        packed=x_BLC.new_empty(kernels.packed_size(sizes, dtype), dtype=dtype),
        A=A_of(weights),
        line_means=x_BLC.new_empty((2, B, lines.S, D), dtype=dtype) if lines else None,
        xhat=None if norm_given else x_BLC.new_empty(B * L, C, dtype=dtype),
        rstd=None if norm_given else x_BLC.new_empty(B * L),
    )


@torch.library.register_fake("vil::block_backward")
def _fake_backward(*arguments):
    options, sizes, flat = _backward_arguments(*arguments)
    check_backward(options, sizes, flat)
    dx_BMC, _, _, _, *others = flat
    of_blocks = BackwardInputs.of(others)
    uz_BLE = of_blocks[0].saved.uz
    (B, L, _), C = uz_BLE.shape, sizes.C
    dxhat_TC = uz_BLE.new_empty((B * L, C) if options[0].norm_given else 0)
    gradients = []
    for inputs in of_blocks:
        dA_log = [inputs.norm.new_empty(2, sizes.D, sizes.N)] if options[0].recurrence == "selective" else []
        gradients += [*dA_log, inputs.norm.new_empty(sizes.flat_size())]
    return [given(dx_BMC).new_empty(B, L, C), dxhat_TC, *gradients]


class _EagerBlocks(torch.autograd.Function):
    """Autograd function of consecutive blocks in eager mode."""

    @staticmethod
    def forward(ctx, sizes, options, *flat):
        y_BMC, next_xhat_TC, next_rstd_T, *saved = forward_blocks(options, True, list(flat))
        _save_for_backward(ctx, sizes, options, flat, y_BMC, (next_xhat_TC, next_rstd_T), saved)
        ctx.mark_non_differentiable(*[t for t in (next_rstd_T,) if t is not None])
        return y_BMC, next_xhat_TC, next_rstd_T

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_BMC, dnext_TC, _):
        dx_BMC, placeholders = _gradient_of_output(ctx, dx_BMC), _weight_placeholders(ctx.sizes)
        results = backward_blocks(ctx.options, ctx.sizes, [dx_BMC, dnext_TC, *ctx.saved_tensors])
        return _gradients(ctx, results, lambda dweights: torch_private.unflatten(dweights, placeholders))


class _ObservedBlocks(torch.autograd.Function):
    """Autograd function of the operator `vil::block`, whose backward is the operator `vil::block_backward`.

    The outputs include the saved tensors, because a compiler must see which operator creates the saved tensors.
    """

    @staticmethod
    def forward(ctx, sizes, options, *flat):
        with torch_private.below_autograd():
            y_BMC, next_normed, saved = torch.ops.vil.block(*_to_schema(options, True, list(flat)))
        saved = _all_fields(options, saved, norm_given=flat[1] is not None)
        next_normed = next_normed or (None, None)
        _save_for_backward(ctx, sizes, options, flat, y_BMC, next_normed, saved)
        ctx.mark_non_differentiable(*[t for t in (next_normed[1], *saved) if t is not None])
        return y_BMC, *next_normed, *saved

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_BMC, dnext_TC, *_):
        dx_BMC, options = _gradient_of_output(ctx, dx_BMC), ctx.options
        next_xhat_TC, next_rstd_T, *others = ctx.saved_tensors
        each = 3 + FIELDS
        of_blocks = [others[i * each : (i + 1) * each] for i in range(len(options))]
        results = torch.ops.vil.block_backward(
            options[0].recurrence, options[-1].class_token_only, options[0].norm_given, _numbers(options),
            list(ctx.sizes), dx_BMC, dnext_TC, [] if next_xhat_TC is None else [next_xhat_TC, next_rstd_T],
            [own[0] for own in of_blocks], [t for own in of_blocks for t in own[1:3]],
            [t for own in of_blocks for t in own[3:] if t is not None],
        )  # fmt: skip
        return _gradients(ctx, results, ctx.sizes.split)


def _all_fields(options: tuple[Options, ...], saved: list[Tensor], norm_given: bool) -> list[Tensor | None]:
    """Return all fields of each block's `SavedForBackward`, given a list of saved tensors that omits None."""
    fields: list[Tensor | None] = []
    pooled, recurrence = options[0].lines is not None, options[0].recurrence
    for i in range(len(options)):
        missing = norm_given and i == 0
        count = SavedForBackward.flat_length(recurrence, pooled, missing)
        fields += SavedForBackward.of(saved[:count], recurrence, pooled, missing)
        saved = saved[count:]
    return fields


def _save_for_backward(
    ctx, sizes: Sizes, options: tuple[Options, ...], flat: Sequence[Tensor | None], y_BMC: Tensor, next_normed: tuple,
    saved: list,
) -> None:  # fmt: skip
    """Save the tensors for the backward pass in the order that `backward_blocks` expects after the gradients."""
    xhat_TC, rstd_T = flat[1:3]
    # every block except the first backpropagates through its input norm, even if the previous block computed this norm
    ctx.options = tuple([
        BackwardOptions(own.recurrence, own.class_token_only, i == 0 and xhat_TC is not None, own.lines)
        for i, own in enumerate(options)
    ])  # fmt: skip
    ctx.sizes, ctx.output = sizes, (y_BMC.shape, y_BMC.dtype, y_BMC.device)
    ctx.set_materialize_grads(False)  # do not allocate zero gradients for outputs that are only saved for backward
    kept = []
    for i, (scale_B, weights) in enumerate(scales_and_weights(len(options), flat)):
        own, (norm_C, in_proj) = SavedForBackward(*saved[i * FIELDS : (i + 1) * FIELDS]), weights[:2]
        if i == 0 and xhat_TC is not None:  # the first block saved no norm, because the norm is an input
            own = own._replace(xhat=xhat_TC, rstd=rstd_T)
        kept += [scale_B, norm_C, in_proj, *own]
    ctx.save_for_backward(*next_normed, *kept)


def _gradient_of_output(ctx, dx_BMC: Tensor | None) -> Tensor:
    """Return the gradient of the last block's output, or zeros if the output has no gradient."""
    shape, dtype, device = ctx.output
    return torch.zeros(shape, dtype=dtype, device=device) if dx_BMC is None else dx_BMC


def _gradients(ctx, results: list, split: Callable[[Tensor], list[Tensor]]) -> tuple:
    """Return the gradients of the arguments of an autograd function, given the results of `backward_blocks`.

    `split` splits the flat gradient of a block's weights.
    """
    blocks, gradients = len(ctx.options), []
    dx_BLC, dxhat_TC, *of_weights = results
    each = len(of_weights) // blocks
    for i in range(blocks):
        *dA_log, dweights = of_weights[i * each : (i + 1) * each]
        dA_logs = dA_log[0].unbind() if dA_log else ()
        dnorm_C, din_proj, dout_proj, *directions = split(dweights)
        first, second = directions[:6], directions[6:]
        gradients += [dnorm_C, din_proj, dout_proj, *first, *dA_logs[:1], *second, *dA_logs[1:]]
    dxhat_TC = dxhat_TC if ctx.options[0].norm_given else None
    return None, None, dx_BLC, dxhat_TC, None, *[None] * blocks, *gradients


@functools.lru_cache(maxsize=256)
def _weight_placeholders(sizes: Sizes) -> list[Tensor]:
    """Return meta tensors with the shapes of the weights' gradients that backward returns in one flat tensor."""
    return [torch.empty(shape, device="meta") for shape in sizes.shapes()]


def _differentiable(*arguments):
    """Implement `vil::block` for PyTorch's Autograd dispatch key."""
    # in the forward pass of a compiled training step, `keep` is true, but gradients are disabled
    if not (arguments[-1] and torch.is_grad_enabled()):
        if is_eager(arguments[6]):
            return _forward(*arguments)
        with torch_private.below_autograd():
            return torch.ops.vil.block(*arguments)
    options, keep, flat = _from_schema(*arguments)
    check_forward(options, keep, flat)
    (_, weights), *_ = scales_and_weights(len(options), flat)
    y_BMC, *others = _ObservedBlocks.apply(BlockWeights.of(weights).sizes(), options, *flat)
    next_normed, saved = others[:2], others[2:]
    return y_BMC, [t for t in next_normed if t is not None], [t for t in saved if t is not None]


torch.library.impl("vil::block", "CUDA", _forward)
torch.library.impl("vil::block_backward", "CUDA", _backward)
torch.library.impl("vil::block", "Autograd", _differentiable)
