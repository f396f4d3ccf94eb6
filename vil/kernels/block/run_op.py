"""PyTorch operator `vil::run`, which computes several consecutive blocks on NVIDIA GPUs, and its gradient.

A call of an operator costs host time, in eager mode and under torch.compile. Therefore a model runs up to `BLOCKS`
blocks of equal sizes with one call. More blocks per call would delay the first kernel of a call, and the gradients of
the last blocks, which DistributedDataParallel all-reduces during the backward pass of earlier blocks.

    run_blocks         the function that models call
    _EagerRun          autograd function for eager mode, which calls `forward_run` and `backward_run` directly
    _ObservedRun       autograd function for calls that a compiler or a dispatch mode observes
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import torch_private
from ..checks import check_choice, given, once_differentiable
from . import block_op
from .backward import named_gradients
from .contract import check_run_backward
from .lines import Lines
from .run import FIELDS, backward_run, check_run, forward_arguments, forward_run
from .weights import BackwardOptions, BlockWeights, Normed, Options, SavedForBackward, Sizes, needs_gradients

BLOCKS = 6  # maximum number of consecutive blocks that one call of `vil::run` computes

torch.library.define(
    "vil::run",
    "(str recurrence, float eps, ScalarType dtype, bool class_token_only, bool norm_next, int[] lines,"
    " Tensor x_BLC, Tensor[] normed, Tensor?[] scales, Tensor[] weights, bool keep)"
    " -> (Tensor x_BMC, Tensor[] next_normed, Tensor[] saved)",
)
torch.library.define(
    "vil::run_backward",
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
    """Compute the same as `block_op.block` for consecutive blocks, with one operator call for up to `BLOCKS` blocks."""
    i = 0
    while i < len(options):
        keep = needs_gradients(x_BLC, weights[i])
        count = _count(x_BLC, weights[i:], options[i:], normed, keep)
        own = slice(i, i + count)
        if count == 1:
            x_BLC, normed = block_op.block(x_BLC, weights[i], options[i], scales[i], normed)
        else:
            x_BLC, normed = _run(x_BLC, weights[own], options[own], scales[own], normed, keep)
        i += count
    return x_BLC, normed


def _count(
    x_BLC: Tensor, weights: Sequence[BlockWeights], options: Sequence[Options], normed: Normed | None, keep: bool
) -> int:  # fmt: skip
    """Return how many of the first blocks one call of `vil::run` can compute.

    `keep` is whether the first block needs gradients.
    """
    if normed is not None and normed.xhat.dtype != options[0].dtype:
        return 1
    first, sizes, count = options[0], weights[0].sizes(), 1
    while count < min(BLOCKS, len(options)) and weights[count].sizes() == sizes:
        own, previous = options[count], options[count - 1]
        pooled = own.lines is not None
        if own[:3] != first[:3] or pooled != (first.lines is not None) or not previous.norm_next:
            break
        if not keep and needs_gradients(x_BLC, weights[count]):
            break
        count += 1
    return count


def _run(
    x_BLC: Tensor,
    weights: Sequence[BlockWeights],
    options: Sequence[Options],
    scales: Sequence[Tensor | None],
    normed: Normed | None,
    keep: bool,
) -> tuple[Tensor, Normed | None]:
    flat = [x_BLC, *(normed or (None, None)), *scales, *[t for own in weights for t in own.flat()]]
    if not block_op.is_eager(x_BLC):
        y_BMC, next_normed, _ = torch.ops.vil.run(*_to_schema(tuple(options), keep, flat))
        return y_BMC, Normed(*next_normed) if next_normed else None
    if keep:
        y_BMC, xhat_TC, rstd_T = _EagerRun.apply(weights[0].sizes(), tuple(options), *flat)
    else:
        y_BMC, xhat_TC, rstd_T = forward_run(tuple(options), False, flat)
    return y_BMC, None if xhat_TC is None else Normed(xhat_TC, rstd_T)


def _to_schema(options: tuple[Options, ...], keep: bool, flat: list[Tensor | None]) -> tuple:
    """Convert the arguments of `forward_run` to arguments of the operator `vil::run`."""
    first, last, blocks = options[0], options[-1], len(options)
    x_BLC, xhat_TC, rstd_T, *others = flat
    normed = [] if xhat_TC is None else [xhat_TC, rstd_T]
    lines = [number for own in options for number in own.lines or ()]
    how = *first[:3], last.class_token_only, last.norm_next, lines
    return *how, x_BLC, normed, others[:blocks], others[blocks:], keep


def _from_schema(recurrence, eps, dtype, class_token_only, norm_next, lines, x_BLC, normed, scales, weights, keep):
    """Convert the arguments of the operator `vil::run` to arguments of `forward_run`."""
    blocks, last = len(scales), len(scales) - 1
    _check_lists(recurrence, lines, blocks, normed, weights=(weights, 17 if recurrence == "selective" else 15))
    options = tuple([
        Options(recurrence, eps, dtype, class_token_only and i == last, norm_next or i < last, own)
        for i, own in enumerate(_lines_of(lines, blocks))
    ])  # fmt: skip
    return options, keep, [x_BLC, *(normed or (None, None)), *scales, *weights]


def _lines_of(lines: Sequence[int], blocks: int) -> list[Lines | None]:
    return [Lines.read(lines[3 * i : 3 * i + 3]) for i in range(blocks)]


def _check_lists(
    recurrence: str, lines: Sequence[int], blocks: int, normed: list[Tensor], **lists: tuple[list[Tensor], int]
) -> None:  # fmt: skip
    """Raise a ValueError unless an operator's lists have the expected lengths."""
    check_choice("recurrence", recurrence, block_op.backends.RECURRENCES)
    if blocks < 1 or len(lines) not in (0, 3 * blocks) or len(normed) not in (0, 2):
        raise ValueError(
            f"scales must have at least one item, lines 0 or {3 * blocks} items, and normed 0 or 2 items, "
            f"got {blocks}, {len(lines)} and {len(normed)} items"
        )
    for name, (tensors, each) in lists.items():
        if len(tensors) != each * blocks:
            raise ValueError(f"{name} must hold {each * blocks} tensors of {blocks} blocks, got {len(tensors)}")


def _forward(*arguments):
    y_BMC, xhat_TC, rstd_T, *saved = forward_run(*_from_schema(*arguments))
    return y_BMC, [] if xhat_TC is None else [xhat_TC, rstd_T], [t for t in saved if t is not None]


def _backward_arguments(
    recurrence, class_token_only, norm_given, lines, sizes, dx_BMC, dnext_TC, next_normed, scales, weights, saved
) -> tuple[tuple[BackwardOptions, ...], Sizes, list[Tensor | None]]:  # fmt: skip
    """Convert the arguments of the operator `vil::run_backward` to arguments of `backward_run`."""
    blocks, last, each = len(scales), len(scales) - 1, 6 + (recurrence == "selective") + bool(lines)
    _check_lists(recurrence, lines, blocks, next_normed, weights=(weights, 2), saved=(saved, each))
    if len(sizes) != len(Sizes._fields):
        raise ValueError(f"sizes must hold {', '.join(Sizes._fields)}, got {len(sizes)} items")
    options = tuple([
        BackwardOptions(recurrence, class_token_only and i == last, norm_given and i == 0, own)
        for i, own in enumerate(_lines_of(lines, blocks))
    ])  # fmt: skip
    flat = [dx_BMC, dnext_TC, *(next_normed or (None, None))]
    for i in range(blocks):
        own = SavedForBackward.of(saved[i * each : (i + 1) * each], recurrence, bool(lines))
        flat += [scales[i], *weights[2 * i : 2 * i + 2], *own]
    return options, Sizes(*sizes), flat


def _backward(*arguments):
    dx_BMC = arguments[5]
    dx_BLC, dxhat_TC, *of_weights = backward_run(*_backward_arguments(*arguments))
    # an operator's results must not share memory with its arguments
    if dx_BLC.data_ptr() == dx_BMC.data_ptr():
        dx_BLC = dx_BLC.clone()
    if dxhat_TC is None:
        dxhat_TC = dx_BLC.new_empty(0, dtype=arguments[-1][0].dtype)
    return [dx_BLC, dxhat_TC, *[t for t in of_weights if t is not None]]


@torch.library.register_fake("vil::run")
def _fake(*arguments):
    options, keep, flat = _from_schema(*arguments)
    x_BLC, normed, saved = flat[0], flat[1:3], []
    y_BMC, next_normed = x_BLC, [t for t in normed if t is not None]
    for own, (_, scale_B, _, _, *weights) in zip(options, forward_arguments(options, flat)):
        given_norm = next_normed
        y_BMC, next_normed, kept = block_op.fake_block(
            own, keep, [x_BLC, scale_B, *(given_norm or (None, None)), *weights]
        )
        if given_norm and saved:
            kept += [torch.empty_like(t) for t in given_norm]
        saved += kept
    return y_BMC, next_normed, saved


@torch.library.register_fake("vil::run_backward")
def _fake_backward(*arguments):
    options, sizes, flat = _backward_arguments(*arguments)
    check_run_backward(options, sizes, flat)
    dx_BMC, uz_BLE = given(flat[0]), given(flat[7])
    (B, L, _), C = uz_BLE.shape, sizes.C
    dxhat_TC = uz_BLE.new_empty((B * L, C) if options[0].norm_given else 0)
    gradients = []
    for norm_C in map(given, flat[5 :: 3 + FIELDS]):
        gradients += [
            norm_C.new_empty(C, sizes.D),
            *[norm_C.new_empty(2, sizes.D, sizes.N)][: options[0].recurrence == "selective"],
        ]
        gradients.append(norm_C.new_empty(sum(math.prod(shape) for shape in sizes.flat_shapes())))
    return [dx_BMC.new_empty(B, L, C), dxhat_TC, *gradients]


class _EagerRun(torch.autograd.Function):
    """Autograd function of consecutive blocks in eager mode."""

    @staticmethod
    def forward(ctx, sizes, options, *flat):
        y_BMC, next_xhat_TC, next_rstd_T, *saved = forward_run(options, True, list(flat))
        ctx.sizes = sizes
        _save_for_backward(ctx, options, flat, y_BMC, (next_xhat_TC, next_rstd_T), saved)
        ctx.mark_non_differentiable(*[t for t in (next_rstd_T,) if t is not None])
        return y_BMC, next_xhat_TC, next_rstd_T

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_BMC, dnext_TC, _):
        dx_BMC = block_op.gradient_of_output(ctx, dx_BMC, dnext_TC)
        dx_BLC, dxhat_TC, *of_weights = backward_run(ctx.options, ctx.sizes, [dx_BMC, dnext_TC, *ctx.saved_tensors])
        placeholders, gradients = block_op.weight_placeholders(ctx.sizes), []
        for i in range(0, len(of_weights), 3):
            dout_proj, dA_log, dweights = of_weights[i : i + 3]
            views = torch_private.unflatten(dweights, placeholders)
            gradients += named_gradients(dout_proj, () if dA_log is None else dA_log.unbind(), *views).flat()
        return None, None, dx_BLC, dxhat_TC, None, *[None] * len(ctx.options), *gradients


class _ObservedRun(torch.autograd.Function):
    """Autograd function of the operator `vil::run`, whose backward is the operator `vil::run_backward`.

    The outputs include the saved tensors, because a compiler must see which operator creates the saved tensors.
    """

    @staticmethod
    def forward(ctx, sizes, options, *flat):
        with torch_private.below_autograd():
            y_BMC, next_normed, saved = torch.ops.vil.run(*_to_schema(options, True, list(flat)))
        saved = _by_block(options, saved, norm_given=flat[1] is not None)
        next_normed = next_normed or (None, None)
        ctx.sizes = sizes
        _save_for_backward(ctx, options, flat, y_BMC, next_normed, saved)
        ctx.mark_non_differentiable(*[t for t in (next_normed[1], *saved) if t is not None])
        return y_BMC, *next_normed, *saved

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_BMC, dnext_TC, *_):
        dx_BMC, options, blocks = block_op.gradient_of_output(ctx, dx_BMC, dnext_TC), ctx.options, len(ctx.options)
        next_xhat_TC, next_rstd_T, *others = ctx.saved_tensors
        each = 3 + FIELDS
        of_blocks = [others[i * each : (i + 1) * each] for i in range(blocks)]
        dx_BLC, dxhat_TC, *of_weights = torch.ops.vil.run_backward(
            options[0].recurrence, options[-1].class_token_only, options[0].norm_given,
            [number for own in options for number in own.lines or ()], list(ctx.sizes), dx_BMC, dnext_TC,
            [] if next_xhat_TC is None else [next_xhat_TC, next_rstd_T], [own[0] for own in of_blocks],
            [t for own in of_blocks for t in own[1:3]], [t for own in of_blocks for t in own[3:] if t is not None],
        )  # fmt: skip
        shapes, gradients = ctx.sizes.flat_shapes(), []
        count = len(of_weights) // blocks
        for i in range(blocks):
            dout_proj, *dA_log, dweights = of_weights[i * count : (i + 1) * count]
            parts = dweights.split([math.prod(shape) for shape in shapes])
            views = [part.view(shape) for part, shape in zip(parts, shapes)]
            gradients += named_gradients(dout_proj, dA_log[0].unbind() if dA_log else (), *views).flat()
        dxhat_TC = dxhat_TC if options[0].norm_given else None
        return None, None, dx_BLC, dxhat_TC, None, *[None] * blocks, *gradients


def _by_block(options: tuple[Options, ...], saved: list[Tensor], norm_given: bool) -> list[Tensor | None]:
    """Return all fields of each block's `SavedForBackward`, given a list of saved tensors that omits None."""
    fields: list[Tensor | None] = []
    pooled, recurrence = options[0].lines is not None, options[0].recurrence
    for i in range(len(options)):
        missing = norm_given and i == 0
        count = 6 + (recurrence == "selective") + pooled - 2 * missing
        fields += SavedForBackward.of(saved[:count], recurrence, pooled, missing)
        saved = saved[count:]
    return fields


def _save_for_backward(
    ctx, options: tuple[Options, ...], flat: Sequence[Tensor | None], y_BMC: Tensor, next_normed: tuple, saved: list
) -> None:  # fmt: skip
    """Save the tensors for the backward pass in the order that `backward_run` expects after the gradients."""
    _, xhat_TC, rstd_T = flat[:3]
    # every block except the first backpropagates through its input norm, even if the previous block computed this norm
    ctx.options = tuple([
        BackwardOptions(own.recurrence, own.class_token_only, i == 0 and xhat_TC is not None, own.lines)
        for i, own in enumerate(options)
    ])  # fmt: skip
    ctx.shape = y_BMC.shape
    ctx.set_materialize_grads(False)  # do not allocate zero gradients for outputs that are only saved for backward
    kept = []
    for i, (_, scale_B, _, _, norm_C, in_proj, *_) in enumerate(forward_arguments(options, list(flat))):
        own = saved[i * FIELDS : (i + 1) * FIELDS]
        if i == 0 and xhat_TC is not None:
            own = [*own[:-2], xhat_TC, rstd_T]
        kept += [scale_B, norm_C, in_proj, *own]
    ctx.save_for_backward(*next_normed, *kept)


def _differentiable(*arguments):
    """Implement `vil::run` for PyTorch's Autograd dispatch key."""
    # in the forward pass of a compiled training step, `keep` is true, but gradients are disabled
    if not (arguments[-1] and torch.is_grad_enabled()):
        if block_op.is_eager(arguments[6]):
            return _forward(*arguments)
        with torch_private.below_autograd():
            return torch.ops.vil.run(*arguments)
    options, keep, flat = _from_schema(*arguments)
    check_run(options, keep, flat)
    sizes = BlockWeights.of([given(t) for t in forward_arguments(options, flat)[0][4:]]).sizes()
    y_BMC, *others = _ObservedRun.apply(sizes, options, *flat)
    next_normed, saved = others[:2], others[2:]
    return y_BMC, [t for t in next_normed if t is not None], [t for t in saved if t is not None]


torch.library.impl("vil::run", "CUDA", _forward)
torch.library.impl("vil::run_backward", "CUDA", _backward)
torch.library.impl("vil::run", "Autograd", _differentiable)
