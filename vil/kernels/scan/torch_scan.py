"""Plain PyTorch backend ("reference") of Longhorn's and Mamba's scans, for any device and floating-point dtype.

Both recurrences are diagonal and linear over tokens, S_t = decay_t * S_{t-1} + drive_t and y_t = q_t . S_t, and differ
only in the coefficients decay and drive. A recurrence is a class that computes the coefficients and the gradients of
the inputs, and both recurrences share the scan. Outer and matrix products of all tokens of a chunk are single PyTorch
calls; only the states and their gradients need a loop over the tokens. `reference.py` is the reference implementation
that every backend must reproduce.

    L tokens    T tokens of a chunk    S chunks    G directions    B batch    D channels    N states of a channel

The operators' per-token tensors are `_GLB*`: `x_GLBD[:, t]` holds the t-th token that each direction reads. Therefore a
single pass over the tokens runs all directions, and reversed directions start from the last token of the image.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import transformed
from ..checks import check, check_choice, check_given, once_a_kind, refuse_second_derivative

# number of tokens per chunk; forward saves the state before each chunk, and backward recomputes all other states
CHUNK = 16
# The batch is processed in slices of one image or of up to SLICE_ELEMENTS state elements, so that buffers stay in the
# CPU cache.
# PyTorch processes slices of 2^15 elements in one thread, which is faster than synchronizing several threads.
SLICE_ELEMENTS = 2**15


class Recurrence(Protocol):
    """Interface of a recurrence S_t = decay_t * S_{t-1} + drive_t, which computes decay, drive and input gradients."""

    @staticmethod
    def coefficients(decay_GTBND: Tensor, drive_GTBND: Tensor, *inputs: Tensor) -> None:
        """Write the decay and the drive of S_t = decay_t * S_{t-1} + drive_t to the first two arguments."""

    @staticmethod
    def gradients(
        ddecay_GTBND: Tensor, ddrive_GTBND: Tensor, decay_GTBND: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradient of each input, given the gradients of decay and drive, which may be overwritten."""


class Longhorn:
    """Longhorn's closed form of online associative recall (Liu et al., 2024, Algorithm 1, eq. 6).

        S_t[n, d] = (1 - eps[d] k[n]^2) S_{t-1}[n, d] + eps[d] k[n] x[d]

    The step size eps = beta / (1 + beta k.k) with beta = sigmoid(step_logits) equals 1 / (1 + exp(-step_logits) + k.k).
    """

    @staticmethod
    def step_size(step_logits_GTBD: Tensor, k_GTBN: Tensor) -> Tensor:
        # if exp overflows to infinity, the step size is 0, which is the correct limit
        return (1 + torch.exp(-step_logits_GTBD) + k_GTBN.square().sum(-1, keepdim=True)).reciprocal()

    @staticmethod
    def coefficients(decay_GTBND: Tensor, drive_GTBND: Tensor, *inputs: Tensor) -> None:
        x_GTBD, step_logits_GTBD, k_GTBN = inputs
        eps_GTBD = Longhorn.step_size(step_logits_GTBD, k_GTBN)
        _outer(-k_GTBN.square(), eps_GTBD, out=decay_GTBND).add_(1)
        _outer(k_GTBN, eps_GTBD * x_GTBD, out=drive_GTBND)

    @staticmethod
    def gradients(
        ddecay_GTBND: Tensor, ddrive_GTBND: Tensor, decay_GTBND: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        x_GTBD, step_logits_GTBD, k_GTBN = inputs
        eps_GTBD = Longhorn.step_size(step_logits_GTBD, k_GTBN)
        dinput_GTBD = _sum_states(k_GTBN, ddrive_GTBND)  # dL/d(eps x)
        deps_GTBD = x_GTBD * dinput_GTBD - _sum_states(k_GTBN.square(), ddecay_GTBND)
        dx_GTBD = eps_GTBD * dinput_GTBD
        # if exp overflows, eps is 0, and the clamp makes the gradient 0 instead of 0 * infinity = NaN
        exp_GTBD = torch.exp(-step_logits_GTBD).clamp(max=torch.finfo(x_GTBD.dtype).max)
        dstep_logits_GTBD = deps_GTBD * eps_GTBD * (eps_GTBD * exp_GTBD)
        dnorm_GTB1 = -(eps_GTBD.square() * deps_GTBD).sum(-1, keepdim=True)  # dL/d(k.k)
        dk_GTBN = _sum_channels(ddrive_GTBND, eps_GTBD * x_GTBD)
        dk_GTBN += 2 * k_GTBN * (dnorm_GTB1 - _sum_channels(ddecay_GTBND, eps_GTBD))
        return dx_GTBD, dstep_logits_GTBD, dk_GTBN


class SelectiveStateSpace:
    """Mamba's selective state space (Gu & Dao, 2023, Algorithm 2), the recurrence of Vision Mamba.

    S_t[n, d] = exp(A[n, d] dt[d]) S_{t-1}[n, d] + dt[d] b[n] x[d]
    """

    @staticmethod
    def coefficients(decay_GTBND: Tensor, drive_GTBND: Tensor, *inputs: Tensor) -> None:
        x_GTBD, dt_GTBD, b_GTBN, A_GND = inputs
        torch.mul(A_GND[:, None, None], dt_GTBD.unsqueeze(-2), out=decay_GTBND).exp_()
        _outer(b_GTBN, dt_GTBD * x_GTBD, out=drive_GTBND)

    @staticmethod
    def gradients(
        ddecay_GTBND: Tensor, ddrive_GTBND: Tensor, decay_GTBND: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        x_GTBD, dt_GTBD, b_GTBN, A_GND = inputs
        dinput_GTBD = _sum_states(b_GTBN, ddrive_GTBND)  # dL/d(dt x)
        dexponent_GTBND = ddecay_GTBND.mul_(decay_GTBND)
        dx_GTBD = dt_GTBD * dinput_GTBD
        db_GTBN = _sum_channels(ddrive_GTBND, dt_GTBD * x_GTBD)
        ddt_GTBD = x_GTBD * dinput_GTBD + torch.mul(dexponent_GTBND, A_GND[:, None, None], out=ddrive_GTBND).sum(-2)
        dA_GND = dexponent_GTBND.mul_(dt_GTBD.unsqueeze(-2)).sum((1, 2))
        return dx_GTBD, ddt_GTBD, db_GTBN, dA_GND


def scan(
    recurrence: str, x_GBLD: Tensor, step_logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor, A_GDN: Tensor | None,
    skip_GD: Tensor | None, step_bias_GD: Tensor | None, reverse: list[bool],
) -> Tensor:  # fmt: skip
    """Return y (G, B, L, D) in x's dtype for G scan directions. Direction g is reversed if `reverse[g]`.

    The arguments are those of `vil::scan` except `backend` and `keep`, in any floating-point dtypes. State and sums are
    in float64 if x is, otherwise in float32.
    """
    dtype = torch.float64 if x_GBLD.dtype == torch.float64 else torch.float32
    x, step_logits, k, q = (t.to(dtype) for t in (x_GBLD, step_logits_GBLD, k_GBLN, q_GBLN))
    A, skip, step_bias = (None if t is None else t.to(dtype) for t in (A_GDN, skip_GD, step_bias_GD))
    if step_bias is not None:
        step_logits = step_logits + step_bias[:, None, None]
    step = step_logits if A is None else F.softplus(step_logits)
    A_GND = [] if A is None else [A.transpose(-1, -2).contiguous()]
    y_GLBD = _scan(recurrence, *(_as_read(t, reverse) for t in (q, x, step, k)), *A_GND)
    y = _in_image_order(y_GLBD, reverse)
    return (y if skip is None else y + skip[:, None, None] * x).to(x_GBLD.dtype)


def _as_read(t_GBLX: Tensor, reverse: list[bool]) -> Tensor:
    """Swap batch and token dimensions of (G, B, L, X), and flip the tokens of reversed directions."""
    return torch.stack([(t.flip(1) if r else t).transpose(0, 1) for t, r in zip(t_GBLX.unbind(0), reverse)])


def _in_image_order(t_GLBX: Tensor, reverse: list[bool]) -> Tensor:
    """Undo `_as_read`: flip the tokens of reversed directions, and swap token and batch dimensions of (G, L, B, X)."""
    return torch.stack([(t.flip(0) if r else t).transpose(0, 1) for t, r in zip(t_GLBX.unbind(0), reverse)])


RECURRENCES: dict[str, type[Recurrence]] = {"longhorn": Longhorn, "selective": SelectiveStateSpace}


_INPUTS = {
    "longhorn": [("inputs[0] (x)", "GLBD"), ("inputs[1] (step_logits)", "GLBD"), ("inputs[2] (k)", "GLBN")],
    "selective": [
        ("inputs[0] (x)", "GLBD"), ("inputs[1] (dt)", "GLBD"), ("inputs[2] (b)", "GLBN"), ("inputs[3] (A)", "GND"),
    ],
}  # fmt: skip


@once_a_kind
def _check(recurrence, q_GLBN, inputs, backward=False, dy_GLBD=None, chunk_states_GSBND=None) -> None:
    """Raise a ValueError that names the argument if the operators do not support an argument."""
    check_choice("recurrence", recurrence, RECURRENCES)
    check_given(q_GLBN=q_GLBN)
    if backward:
        check_given(dy_GLBD=dy_GLBD, chunk_states_GSBND=chunk_states_GSBND)
    rows = _INPUTS[recurrence]
    if len(inputs) != len(rows):
        raise ValueError(f"inputs of the {recurrence} recurrence must be {len(rows)} tensors, got {len(inputs)}")
    sizes: dict[str, int] = {}
    of_q, dtype = ("q_GLBN", q_GLBN, "GLBN", None), q_GLBN.dtype
    check(sizes, of_q, *((name, t, layout, dtype) for (name, layout), t in zip(rows, inputs)))
    sizes["S"] = -(-sizes["L"] // CHUNK)
    check(sizes, of_q, ("dy_GLBD", dy_GLBD, "GLBD", dtype), ("chunk_states_GSBND", chunk_states_GSBND, "GSBND", dtype))


def _scan(recurrence: str, q_GLBN: Tensor, *inputs: Tensor) -> Tensor:
    if transformed():
        return _TransformedScan.apply(recurrence, q_GLBN, *inputs)[0]
    # torch.jit.trace checks that graphs with and without gradients are equal, so tracing always keeps the states
    keep = torch.jit.is_tracing() or (torch.is_grad_enabled() and any(t.requires_grad for t in (q_GLBN, *inputs)))
    return _scan_forward(recurrence, q_GLBN, list(inputs), keep)[0]


# register the scan as an operator, so that torch.compile, torch.export and torch.fx see one node instead of a loop
@torch.library.custom_op("vil::reference_scan", mutates_args=())
def _scan_forward(recurrence: str, q_GLBN: Tensor, inputs: list[Tensor], keep: bool) -> tuple[Tensor, Tensor]:
    """Return y (G, L, B, D) and the state before each chunk of tokens, or an empty tensor of states unless `keep`."""
    _check(recurrence, q_GLBN, inputs)
    G, L, B, N = q_GLBN.shape
    D = inputs[0].shape[-1]
    y_GLBD = q_GLBN.new_empty(G, L, B, D)
    chunk_states_GSBND = q_GLBN.new_empty(G, len(_chunks(L)) if keep else 0, B, N, D)
    buffers = _chunk_buffers(2, q_GLBN, D)
    for batch in _batch_slices(G, B, N, D):
        S_GBND = q_GLBN.new_zeros(G, batch.stop - batch.start, N, D)
        for i, chunk in enumerate(_chunks(L)):
            if keep:
                chunk_states_GSBND[:, i, batch] = S_GBND
            decay_GTBND, states_GTBND = _views_of(buffers, chunk, batch)
            _run_chunk(recurrence, S_GBND, decay_GTBND, states_GTBND, _slice(inputs, chunk, batch))
            y_GLBD[:, chunk, batch] = _sum_states(q_GLBN[:, chunk, batch], states_GTBND)
            S_GBND.copy_(states_GTBND[:, -1])
    return y_GLBD, chunk_states_GSBND


@torch.library.custom_op("vil::reference_scan_backward", mutates_args=())
def _scan_backward(
    recurrence: str, dy_GLBD: Tensor, chunk_states_GSBND: Tensor, q_GLBN: Tensor, inputs: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of q (G, L, B, N) and the list of the gradients of `inputs`."""
    _check(recurrence, q_GLBN, inputs, True, dy_GLBD, chunk_states_GSBND)
    G, L, B, N = q_GLBN.shape
    dq_GLBN = torch.empty_like(q_GLBN)
    dinputs = [torch.empty_like(t) if _is_per_token(t) else torch.zeros_like(t) for t in inputs]
    buffers = _chunk_buffers(4, q_GLBN, dy_GLBD.shape[-1])
    for batch in _batch_slices(G, B, N, dy_GLBD.shape[-1]):
        # gradient of the state at the end of a chunk through all later tokens
        from_later_GBND = torch.zeros_like(chunk_states_GSBND[:, :1, batch]).squeeze(1)
        for i, chunk in reversed(list(enumerate(_chunks(L)))):
            index, S_GBND = (slice(None), chunk, batch), chunk_states_GSBND[:, i, batch]
            sliced = _slice(inputs, chunk, batch)
            decay_GTBND, states_GTBND, dS_GTBND, ddecay_GTBND = _views_of(buffers, chunk, batch)
            _run_chunk(recurrence, S_GBND, decay_GTBND, states_GTBND, sliced)
            dq_GLBN[index] = _sum_channels(states_GTBND, dy_GLBD[index])

            _outer(q_GLBN[index], dy_GLBD[index], out=dS_GTBND)
            dS_GTBND[:, -1] += from_later_GBND
            for t in reversed(range(dS_GTBND.shape[1] - 1)):
                dS_GTBND[:, t].addcmul_(decay_GTBND[:, t + 1], dS_GTBND[:, t + 1])
            torch.mul(decay_GTBND[:, 0], dS_GTBND[:, 0], out=from_later_GBND)
            torch.mul(dS_GTBND[:, 0], S_GBND, out=ddecay_GTBND[:, 0])
            torch.mul(dS_GTBND[:, 1:], states_GTBND[:, :-1], out=ddecay_GTBND[:, 1:])
            gradients = RECURRENCES[recurrence].gradients(ddecay_GTBND, dS_GTBND, decay_GTBND, *sliced)
            for whole, part in zip(dinputs, gradients, strict=True):
                if _is_per_token(whole):
                    whole[index] = part
                else:
                    whole += part
    return dq_GLBN, dinputs


def _run_chunk(
    recurrence: str, S_GBND: Tensor, decay_GTBND: Tensor, states_GTBND: Tensor, inputs: list[Tensor]
) -> None:
    """Compute the decays and states of a chunk of tokens into buffers, given the state before the chunk."""
    RECURRENCES[recurrence].coefficients(decay_GTBND, states_GTBND, *inputs)
    for decay_GBND, drive_GBND in zip(decay_GTBND.unbind(1), states_GTBND.unbind(1), strict=True):
        S_GBND = drive_GBND.addcmul_(decay_GBND, S_GBND)


@_scan_forward.register_fake
def _(recurrence, q_GLBN, inputs, keep):
    _check(recurrence, q_GLBN, inputs)
    G, L, B, N = q_GLBN.shape
    D = inputs[0].shape[-1]
    return q_GLBN.new_empty(G, L, B, D), q_GLBN.new_empty(G, -(-L // CHUNK) if keep else 0, B, N, D)


@_scan_backward.register_fake
def _(recurrence, dy_GLBD, chunk_states_GSBND, q_GLBN, inputs):
    _check(recurrence, q_GLBN, inputs, True, dy_GLBD, chunk_states_GSBND)
    return torch.empty_like(q_GLBN), [torch.empty_like(t) for t in inputs]


def _save_for_backward(ctx, inputs, output):
    ctx.recurrence, q_GLBN, scan_inputs, _ = inputs
    ctx.save_for_backward(output[1], q_GLBN, *scan_inputs)


def _backward(ctx, dy_GLBD, _):
    chunk_states_GSBND, q_GLBN, *inputs = ctx.saved_tensors
    dq_GLBN, dinputs = _scan_backward(ctx.recurrence, dy_GLBD.contiguous(), chunk_states_GSBND, q_GLBN, inputs)
    return None, dq_GLBN, dinputs, None


class _TransformedScan(torch.autograd.Function):
    """Autograd function of the scan for torch.func, which does not support `register_autograd` of an operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(recurrence, q_GLBN, *inputs):
        return _scan_forward(recurrence, q_GLBN, list(inputs), True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save_for_backward(ctx, (inputs[0], inputs[1], inputs[2:], True), output)

    @staticmethod
    def backward(ctx, dy_GLBD, _):
        dq_GLBN, *dinputs = _TransformedGradient.apply(ctx.recurrence, dy_GLBD.contiguous(), *ctx.saved_tensors)
        return None, dq_GLBN, *dinputs


class _TransformedGradient(torch.autograd.Function):
    """Autograd function of the scan's gradient for torch.func. Differentiating the gradient raises an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(recurrence, dy_GLBD, chunk_states_GSBND, q_GLBN, *inputs):
        dq_GLBN, dinputs = _scan_backward(recurrence, dy_GLBD, chunk_states_GSBND, q_GLBN, list(inputs))
        return dq_GLBN, *dinputs

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse_second_derivative)


def _over_directions(run: Callable, info, in_dims: tuple, *arguments):
    """Implement torch.vmap of an operator by merging the mapped dimension into the dimension of scan directions."""

    def folded(t, dim):
        if isinstance(t, list):
            return [folded(*pair) for pair in zip(t, dim)]
        if not isinstance(t, Tensor):
            return t
        return (t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)

    def unfolded(t):
        return t.unflatten(0, (info.batch_size, -1)) if isinstance(t, Tensor) else [unfolded(part) for part in t]

    first, second = run(*map(folded, arguments, in_dims))
    return (unfolded(first), unfolded(second)), (0, 0 if isinstance(second, Tensor) else [0] * len(second))


_scan_forward.register_vmap(functools.partial(_over_directions, _scan_forward))
_scan_backward.register_vmap(functools.partial(_over_directions, _scan_backward))
_scan_forward.register_autograd(_backward, setup_context=_save_for_backward)
_scan_backward.register_autograd(refuse_second_derivative)
for _device in ("cpu", "cuda", "mps", "xpu"):  # the state is at least fp32, also under autocast
    with contextlib.suppress(ValueError):  # PyTorch 2.10 supports only cpu and cuda
        _scan_forward.register_autocast(_device, torch.float32)
        _scan_backward.register_autocast(_device, torch.float32)


def _is_per_token(t: Tensor) -> bool:
    return t.dim() == 4  # per-token tensors are (G, L, B, D or N), per-channel parameters are (G, N, D)


def _slice(inputs: list[Tensor], chunk: slice, batch: slice) -> list[Tensor]:
    return [t[:, chunk, batch] if _is_per_token(t) else t for t in inputs]


def _chunks(L: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, L)) for start in range(0, L, CHUNK)]


def _batch_slices(G: int, B: int, N: int, D: int) -> list[slice]:
    images = max(1, SLICE_ELEMENTS // max(1, G * N * D))
    return [slice(start, min(start + images, B)) for start in range(0, B, images)]


def _chunk_buffers(count: int, q_GLBN: Tensor, D: int) -> Tensor:
    """Allocate `count` buffers for a chunk's states. All chunks reuse the buffers, because new memory is slow."""
    G, L, B, N = q_GLBN.shape
    images = max((batch.stop - batch.start for batch in _batch_slices(G, B, N, D)), default=0)
    return q_GLBN.new_empty(count, G, min(CHUNK, L), images, N, D)


def _views_of(buffers: Tensor, chunk: slice, batch: slice) -> tuple[Tensor, ...]:
    return buffers[:, :, : chunk.stop - chunk.start, : batch.stop - batch.start].unbind(0)


def _outer(n_GTBN: Tensor, d_GTBD: Tensor, out: Tensor) -> Tensor:
    return torch.mul(n_GTBN.unsqueeze(-1), d_GTBD.unsqueeze(-2), out=out)


def _sum_states(n_GTBN: Tensor, S_GTBND: Tensor) -> Tensor:
    return torch.matmul(n_GTBN.unsqueeze(-2), S_GTBND).squeeze(-2)


def _sum_channels(S_GTBND: Tensor, d_GTBD: Tensor) -> Tensor:
    # on CPUs, vector times matrix takes about half as long as matrix times vector
    return torch.matmul(d_GTBD.unsqueeze(-2), S_GTBND.transpose(-1, -2)).squeeze(-2)
