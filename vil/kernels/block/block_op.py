"""Bidirectional block as one PyTorch operator for NVIDIA GPUs, `vil::block`, and its gradient.

The operator computes `reference.block` with fewer kernels and fewer tensors saved for backward. The norm's weight is
folded into in_proj, both directions share each kernel, the residual addition is part of the matrix product with
out_proj, and backward recomputes convolutions, projections and gate.

Consecutive blocks share a fused add-norm if the norm costs no extra kernel. Such a block maps the residual stream x and
xhat, the norm of x without a weight, to the output x' and its norm xhat'. The gradient of xhat' is added to the
gradient of x' at the start of backward.

In a pooled block, the recurrence reads row or column means of the patches (lines.py), and v, y, steps, keys and queries
of all tokens are never stored: `pool` stores only the skip connections of all tokens, and backward recomputes v from u.

If only the class token's output is needed, as in a model's last block, z, the gate and the matrix product with
out_proj are computed for the class token only. In a block that is not pooled, each direction then processes only the
half of the tokens up to the class token.

Functions, classes and modules between a model's call and the kernels:

    block              the function that models call
    _EagerBlock        autograd function for eager mode, which calls `forward` and `backward` without the dispatcher
    _ObservedBlock     autograd function for calls that a compiler or a dispatch mode observes
    _block, _fake_*    implementations of the operators; lists of tensors in an operator's schema omit missing tensors
    forward, backward  modules that call kernels and matrix products in order; plans record and replay the calls
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backends, torch_private
from ..checks import once_differentiable
from ..scan.chunks import chunk_state_count
from . import kernels
from .backward import backward, named_gradients
from .contract import check_backward, check_forward, check_lists
from .forward import A_of, forward
from .lines import Lines
from .tokens import Tokens
from .weights import BackwardOptions, BlockWeights, Inputs, Normed, Options, SavedForBackward, Sizes, needs_gradients

FP32 = torch.float32

torch.library.define(
    "vil::block",
    "(str recurrence, float eps, ScalarType dtype, bool class_token_only, bool norm_next, int[] lines,"
    " Tensor x_BLC, Tensor[] normed, Tensor? scale_B, Tensor norm_C, Tensor in_proj, Tensor out_proj,"
    " Tensor[] directions, bool keep)"
    " -> (Tensor x_BMC, Tensor[] next_normed, Tensor[] saved)",
)
torch.library.define(
    "vil::block_backward",
    "(str recurrence, bool class_token_only, bool norm_given, int[] lines, Tensor dx_BMC, Tensor? dnext_TC,"
    " Tensor[] next_normed, Tensor? scale_B, Tensor norm_C, Tensor in_proj, Tensor out_proj, Tensor[] directions,"
    " Tensor[] saved)"
    " -> Tensor[]",
)


def block(
    x_BLC: Tensor, weights: BlockWeights, options: Options, scale_B: Tensor | None = None, normed: Normed | None = None
) -> tuple[Tensor, Normed | None]:
    """Return a block's output x' = x + scale * out_proj(mixer(norm(x))), and the norm of x' for the next block.

    Args:
        x_BLC: Residual stream, fp32.
        weights: Weights, all of one dtype.
        options: Options of the computation.
        scale_B: Factors of stochastic depth, 0 or 1 / (1 - rate) for each image. None means 1.
        normed: Norm of x that the previous block returned, if both blocks have the same eps.

    Returns:
        x', and the norm of x' if `options.norm_next` is set and the norm costs no extra kernel, otherwise None.
    """
    if normed is not None and normed.xhat.dtype != options.dtype:
        normed = None
    keep = needs_gradients(x_BLC, weights)
    flat = Inputs(x_BLC, scale_B, normed, weights).flat()
    if not is_eager(x_BLC):
        y_BMC, next_normed, _ = torch.ops.vil.block(*_to_schema(options, keep, flat))
        return y_BMC, Normed(*next_normed) if next_normed else None
    if keep:
        y_BMC, xhat_TC, rstd_T = _EagerBlock.apply(weights.sizes(), options, *flat)
    else:
        y_BMC, xhat_TC, rstd_T = forward(options, False, flat)
    return y_BMC, None if xhat_TC is None else Normed(xhat_TC, rstd_T)


def is_eager(t: Tensor | None) -> bool:
    """Return whether the operator may run without PyTorch's dispatcher, which costs host time."""
    return t is not None and t.device.type == "cuda" and backends.unobserved(t)


def _to_schema(options: Options, keep: bool, flat: list[Tensor | None]) -> tuple:
    """Convert the arguments of `forward` to arguments of the operator `vil::block`."""
    x_BLC, scale_B, xhat_TC, rstd_T, norm_C, in_proj, out_proj, *directions = flat
    normed = [] if xhat_TC is None else [xhat_TC, rstd_T]
    return *options[:-1], options.lines or (), x_BLC, normed, scale_B, norm_C, in_proj, out_proj, directions, keep


def _from_schema(
    recurrence, eps, dtype, class_token_only, norm_next, lines, x_BLC, normed, scale_B, norm_C, in_proj, out_proj,
    directions, keep,
):  # fmt: skip
    """Convert the arguments of the operator `vil::block` to arguments of `forward`."""
    check_lists(recurrence, bool(lines), directions=directions, normed=normed)
    flat = [x_BLC, scale_B, *(normed or (None, None)), norm_C, in_proj, out_proj, *directions]
    return Options(recurrence, eps, dtype, class_token_only, norm_next, Lines.read(lines)), keep, flat


def _block(*arguments):
    y_BMC, xhat_TC, rstd_T, *saved = forward(*_from_schema(*arguments))
    return y_BMC, [] if xhat_TC is None else [xhat_TC, rstd_T], [t for t in saved if t is not None]


def _block_backward(
    recurrence, class_token_only, norm_given, lines, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj,
    directions, saved,
):  # fmt: skip
    """Return the gradients of x, of xhat (the RMSNorm of x) and of a block's weights.

    The gradient of xhat is empty unless `norm_given`. The gradients of the weights are the gradient of out_proj, one
    flat tensor for all other weights except A_log and, for the selective recurrence, one tensor for both A_log. A list
    of few tensors saves host time under torch.compile.
    """
    weights = [norm_C, in_proj, out_proj, *directions]
    check_backward(
        recurrence, class_token_only, Lines.read(lines), dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj,
        out_proj, directions, saved,
    )  # fmt: skip
    options = BackwardOptions(recurrence, class_token_only, norm_given, Lines.read(lines))
    saved = SavedForBackward.of(saved, recurrence, options.lines is not None)
    flat = dx_BMC, dnext_TC, *(next_normed or (None, None)), scale_B, norm_C, in_proj
    dx_BLC, dxhat_TC, dout_proj, dA_log, dweights = backward(
        options, BlockWeights.of(weights).sizes(), True, [*flat, *saved]
    )
    # an operator's results must not share memory with each other or with its arguments
    if dx_BLC.data_ptr() == dx_BMC.data_ptr():
        dx_BLC = dx_BLC.clone()
    if dxhat_TC is None:
        dxhat_TC = dx_BLC.new_empty(0, dtype=saved.uz.dtype)
    return [dx_BLC, dxhat_TC, dout_proj, dweights, *([] if dA_log is None else [dA_log])]


@torch.library.register_fake("vil::block")
def _fake_block(*arguments):
    return fake_block(*_from_schema(*arguments))


def fake_block(
    options: Options, keep: bool, flat: list[Tensor | None]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """Return uninitialized results of the operator `vil::block`."""
    check_forward(options, keep, flat)
    x_BLC, _, normed, weights = Inputs.of(flat)
    (B, L, C), sizes, dtype = x_BLC.shape, weights.sizes(), options.dtype
    tokens, D, lines = Tokens(L, options.class_token_only), sizes.D, options.lines
    y_BMC = x_BLC.new_empty(B, tokens.M, C)
    norm_is_free = kernels.runs_hopper_kernels(B * L, C, D, dtype, x_BLC.device)
    next_normed = []
    if options.norm_next and not options.class_token_only and norm_is_free:
        next_normed = [x_BLC.new_empty(B * L, C, dtype=dtype), x_BLC.new_empty(B * L)]
    if not keep:
        return y_BMC, next_normed, []
    scanned_tokens = lines.S if lines else tokens.H
    saved = SavedForBackward(
        uz=x_BLC.new_empty((B, L, tokens.columns(D)), dtype=dtype),
        mean=x_BLC.new_empty((B, tokens.M, D), dtype=dtype),
        states=x_BLC.new_empty((2, B, chunk_state_count(scanned_tokens), sizes.N, D)),
        packed=x_BLC.new_empty(kernels.packed_size(sizes, dtype), dtype=dtype),
        A=A_of(weights),
        line_means=x_BLC.new_empty((2, B, lines.S, D), dtype=dtype) if lines else None,
        xhat=None if normed else x_BLC.new_empty(B * L, C, dtype=dtype),
        rstd=None if normed else x_BLC.new_empty(B * L),
    )
    return y_BMC, next_normed, saved.flat()


@torch.library.register_fake("vil::block_backward")
def _fake_block_backward(
    recurrence, class_token_only, norm_given, lines, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj,
    directions, saved,
):  # fmt: skip
    weights = [norm_C, in_proj, out_proj, *directions]
    check_backward(
        recurrence, class_token_only, Lines.read(lines), dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj,
        out_proj, directions, saved,
    )  # fmt: skip
    (B, L, _), xhat_TC, sizes = saved[0].shape, saved[-2], BlockWeights.of(weights).sizes()
    dx_BLC, dxhat_TC = dx_BMC.new_empty(B, L, dx_BMC.shape[2]), xhat_TC.new_empty(xhat_TC.shape if norm_given else 0)
    dweights = norm_C.new_empty(sum(math.prod(shape) for shape in sizes.flat_shapes()))
    dA_log = [norm_C.new_empty(2, sizes.D, sizes.N)] if recurrence == "selective" else []
    return [dx_BLC, dxhat_TC, out_proj.new_empty(out_proj.shape), dweights, *dA_log]


class _EagerBlock(torch.autograd.Function):
    """Autograd function of the block in eager mode."""

    @staticmethod
    def forward(ctx, sizes, options, *flat):
        y_BMC, next_xhat_TC, next_rstd_T, *saved = forward(options, True, list(flat))
        ctx.sizes = sizes
        _save_for_backward(ctx, options, flat, y_BMC, (next_xhat_TC, next_rstd_T), saved)
        ctx.mark_non_differentiable(*[t for t in (next_rstd_T,) if t is not None])
        return y_BMC, next_xhat_TC, next_rstd_T

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_BMC, dnext_TC, _):
        dx_BMC = gradient_of_output(ctx, dx_BMC, dnext_TC)
        dx_BLC, dxhat_TC, dout_proj, dA_log, dweights = backward(
            ctx.options, ctx.sizes, True, [dx_BMC, dnext_TC, *ctx.saved_tensors]
        )
        views = torch_private.unflatten(dweights, weight_placeholders(ctx.sizes))
        gradients = named_gradients(dout_proj, () if dA_log is None else dA_log.unbind(), *views).flat()
        return None, None, dx_BLC, None, dxhat_TC, None, *gradients


class _ObservedBlock(torch.autograd.Function):
    """Autograd function of the operator `vil::block`, whose backward is the operator `vil::block_backward`.

    The outputs include the saved tensors, because a compiler must see which operator creates the saved tensors.
    """

    @staticmethod
    def forward(ctx, options, *flat):
        y_BMC, next_xhat_TC, next_rstd_T, *saved = _below_autograd(options, list(flat))
        # forward saves packed weights, but the operator `vil::block_backward` needs the unpacked weights
        _, _, _, _, _, _, *out_proj_and_directions = flat
        _save_for_backward(ctx, options, flat, y_BMC, (next_xhat_TC, next_rstd_T), saved, out_proj_and_directions)
        ctx.mark_non_differentiable(*[t for t in (next_rstd_T, *saved) if t is not None])
        return y_BMC, next_xhat_TC, next_rstd_T, *saved

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_BMC, dnext_TC, *_):
        dx_BMC, options = gradient_of_output(ctx, dx_BMC, dnext_TC), ctx.options
        next_xhat_TC, next_rstd_T, scale_B, norm_C, in_proj, *others = ctx.saved_tensors
        fields = len(SavedForBackward._fields)
        saved, (out_proj, *directions) = SavedForBackward(*others[:fields]), others[fields:]
        next_normed = [] if next_xhat_TC is None else [next_xhat_TC, next_rstd_T]
        dx_BLC, dxhat_TC, dout_proj, dweights, *dA_log = torch.ops.vil.block_backward(
            *options[:-1], options.lines or (), dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj,
            directions, saved.flat(),
        )  # fmt: skip
        shapes = BlockWeights.of([norm_C, in_proj, out_proj, *directions]).sizes().flat_shapes()
        parts = dweights.split([math.prod(shape) for shape in shapes])
        views = [part.view(shape) for part, shape in zip(parts, shapes)]
        gradients = named_gradients(dout_proj, dA_log[0].unbind() if dA_log else (), *views).flat()
        return None, dx_BLC, None, dxhat_TC if options.norm_given else None, None, *gradients


def _save_for_backward(
    ctx, options: Options, flat: Sequence[Tensor | None], y_BMC: Tensor, next_normed: tuple, saved: list,
    others: Sequence = (),
) -> None:  # fmt: skip
    """Save the tensors for the backward pass in the order of `BackwardInputs`, followed by the tensors in `others`."""
    _, scale_B, xhat_TC, rstd_T, norm_C, in_proj, *_ = flat
    norm_given = xhat_TC is not None
    if norm_given:
        saved = [*saved[:-2], xhat_TC, rstd_T]
    ctx.options = BackwardOptions(options.recurrence, options.class_token_only, norm_given, options.lines)
    ctx.shape = y_BMC.shape
    ctx.set_materialize_grads(False)  # do not allocate zero gradients for outputs that are only saved for backward
    ctx.save_for_backward(*next_normed, scale_B, norm_C, in_proj, *saved, *others)


def gradient_of_output(ctx, dx_BMC: Tensor | None, dnext_TC: Tensor) -> Tensor:
    """Return the gradient of the block's output, or zeros if only the output's norm has a gradient."""
    return torch.zeros(ctx.shape, device=dnext_TC.device) if dx_BMC is None else dx_BMC


@functools.lru_cache(maxsize=256)
def weight_placeholders(sizes: Sizes) -> list[Tensor]:
    """Return meta tensors with the shapes of the weights' gradients that backward returns in one flat tensor."""
    return [torch.empty(shape, device="meta") for shape in sizes.flat_shapes()]


def _below_autograd(options: Options, flat: list[Tensor | None]) -> list[Tensor | None]:
    """Call the CUDA implementation of `vil::block` without its Autograd implementation."""
    with torch_private.below_autograd():
        y_BMC, next_normed, saved = torch.ops.vil.block(*_to_schema(options, True, flat))
    norm_given = Inputs.of(flat).normed is not None
    kept = SavedForBackward.of(saved, options.recurrence, options.lines is not None, norm_given)
    return [y_BMC, *(next_normed or (None, None)), *kept]


def _differentiable_block(*arguments):
    """Implement `vil::block` for PyTorch's Autograd dispatch key."""
    # in the forward pass of a compiled training step, `keep` is true, but gradients are disabled
    if not (arguments[-1] and torch.is_grad_enabled()):
        if is_eager(arguments[6]):
            return _block(*arguments)
        with torch_private.below_autograd():
            return torch.ops.vil.block(*arguments)
    options, _, flat = _from_schema(*arguments)
    y_BMC, *others = _ObservedBlock.apply(options, *flat)
    next_normed, saved = others[:2], others[2:]
    return y_BMC, [t for t in next_normed if t is not None], [t for t in saved if t is not None]


torch.library.impl("vil::block", "CUDA", _block)
torch.library.impl("vil::block_backward", "CUDA", _block_backward)
torch.library.impl("vil::block", "Autograd", _differentiable_block)
