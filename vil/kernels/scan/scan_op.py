"""PyTorch operators of the scan over G directions: `vil::scan` and `vil::scan_backward`, fake kernels and checks.

`vil/kernels/backends.py` selects the module that runs the operators: `cuda_scan` (CUDA C++), `triton_scan` (Triton) or
`cpu_scan` (Numba). Each module has `forward` and `backward` for inputs of one dtype and a state size in `STATE_SIZES`:

    forward(recurrence, x, step_logits, k, q, A, skip, step_bias, reverse, keep) -> y, states
    backward(recurrence, dy, x, step_logits, k, q, A, skip, step_bias, states, reverse)
        -> dx, dstep_logits, dk, dq, dA, dchannels

The arguments are those of the public functions. Mamba's dt_logits are step_logits here, b is k and c is q; A is None
for Longhorn. `states` are the states between chunks of tokens, and dchannels are the gradients of skip and step_bias.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from ..backends import KERNELS, RECURRENCES, STATE_SIZES, resolve, unfit
from ..checks import aligned, check, check_choice, check_given, once_a_kind, refuse_second_derivative
from .chunks import chunk_state_count


@functools.cache
def _module(backend: str, device: torch.device) -> ModuleType:
    """Return the backend's module with `forward` and `backward`.

    Raise a ValueError or RuntimeError if the backend cannot run on `device`.
    """
    return importlib.import_module(f".{resolve(backend, device)}_scan", __package__)


# torch.library.define is used, because the first call of a custom_op takes seconds if torch.compile is not yet imported
torch.library.define(
    "vil::scan",
    "(str backend, str recurrence, Tensor x_GBLD, Tensor step_logits_GBLD, Tensor k_GBLN, Tensor q_GBLN, Tensor? A_GDN,"
    " Tensor? skip_GD, Tensor? step_bias_GD, bool[] reverse, bool keep) -> (Tensor y_GBLD, Tensor states_GBSND)",
)
torch.library.define(
    "vil::scan_backward",
    "(str backend, str recurrence, Tensor dy_GBLD, Tensor x_GBLD, Tensor step_logits_GBLD, Tensor k_GBLN,"
    " Tensor q_GBLN, Tensor? A_GDN, Tensor? skip_GD, Tensor? step_bias_GD, Tensor states_GBSND, bool[] reverse)"
    " -> (Tensor dx_GBLD, Tensor dstep_logits_GBLD, Tensor dk_GBLN, Tensor dq_GBLN, Tensor dA_GDN, Tensor dchannels)",
)
scan, scan_backward = torch.ops.vil.scan, torch.ops.vil.scan_backward


@once_a_kind
def _check(
    backend, recurrence, x, step_logits, k, q, A, skip, step_bias, directions, backward=False, dy=None, states=None
):  # fmt: skip
    """Raise a ValueError that names the argument if the kernels do not support an argument."""
    check_choice("backend", backend, ("auto", *KERNELS))
    check_choice("recurrence", recurrence, RECURRENCES)
    check_given(x_GBLD=x, step_logits_GBLD=step_logits, k_GBLN=k, q_GBLN=q)
    if backward:
        check_given(dy_GBLD=dy, states_GBSND=states)
    if (A is None) != (recurrence == "longhorn"):
        expected = "a tensor" if A is None else "None"
        raise ValueError(f"A_GDN must be {expected} for the {recurrence} recurrence, got {type(A).__name__}")
    sizes: dict[str, int] = {}
    of_x, fp32 = ("x_GBLD", x, "GBLD", x.dtype), torch.float32
    check(
        sizes, of_x, ("step_logits_GBLD", step_logits, "GBLD", x.dtype), ("k_GBLN", k, "GBLN", x.dtype),
        ("q_GBLN", q, "GBLN", x.dtype), ("dy_GBLD", dy, "GBLD", x.dtype), ("A_GDN", A, "GDN", fp32),
        ("skip_GD", skip, "GD", fp32), ("step_bias_GD", step_bias, "GD", fp32),
    )  # fmt: skip
    sizes["S"] = chunk_state_count(sizes["L"])
    check(sizes, of_x, ("states_GBSND", states, "GBSND", fp32))
    if directions != sizes["G"]:
        raise ValueError(f"reverse must hold a bool for each of {sizes['G']} directions, got {directions}")
    if reason := unfit(backend, x, sizes["N"], sizes["G"]):
        raise ValueError(reason)
    check_choice("number of states in k_GBLN", sizes["N"], STATE_SIZES)


@torch.library.impl("vil::scan", ("CPU", "CUDA"))
def _scan(backend, recurrence, x, step_logits, k, q, A, skip, step_bias, reverse, keep):
    """Return y (G, B, L, D) and the states between chunks of tokens, which are an empty tensor unless `keep`."""
    _check(backend, recurrence, x, step_logits, k, q, A, skip, step_bias, len(reverse))
    if x.numel() == 0:
        return _fake_scan(backend, recurrence, x, step_logits, k, q, A, skip, step_bias, reverse, keep)
    parameters = aligned(A), aligned(skip), aligned(step_bias)
    module, tensors = _module(backend, x.device), (x, step_logits, k, q)
    return tuple(module.forward(recurrence, *tensors, *parameters, tuple(reverse), keep))


@torch.library.impl("vil::scan_backward", ("CPU", "CUDA"))
def _scan_backward(backend, recurrence, dy, x, step_logits, k, q, A, skip, step_bias, states, reverse):
    """Return the gradients of x, step_logits, k, q and A, and of skip and step_bias as one tensor (G, 2, D).

    Without A, the gradient of A is an empty tensor.
    """
    _check(backend, recurrence, x, step_logits, k, q, A, skip, step_bias, len(reverse), True, dy, states)
    if x.numel() == 0:
        found = _fake_scan_backward(backend, recurrence, dy, x, step_logits, k, q, A, skip, step_bias, states, reverse)
        return tuple(torch.zeros_like(t) for t in found)
    parameters = aligned(A), aligned(skip), aligned(step_bias), aligned(states)
    module, tensors = _module(backend, x.device), (dy, x, step_logits, k, q)
    return tuple(module.backward(recurrence, *tensors, *parameters, tuple(reverse)))


@torch.library.register_fake("vil::scan")
def _fake_scan(backend, recurrence, x, step_logits, k, q, A, skip, step_bias, reverse, keep):
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "torch.onnx cannot export the fused scan: use vil.export.export_model(model, 'model.onnx')"
        )
    _check(backend, recurrence, x, step_logits, k, q, A, skip, step_bias, len(reverse))
    G, B, L, D = x.shape
    states = (G, B, chunk_state_count(L), k.shape[-1], D) if keep else (0,)
    return x.new_empty(x.shape), x.new_empty(states, dtype=torch.float32)


@torch.library.register_fake("vil::scan_backward")
def _fake_scan_backward(backend, recurrence, dy, x, step_logits, k, q, A, skip, step_bias, states, reverse):
    _check(backend, recurrence, x, step_logits, k, q, A, skip, step_bias, len(reverse), True, dy, states)
    G, _, _, D = x.shape
    dA = x.new_empty((0,) if A is None else A.shape, dtype=torch.float32)
    dchannels = x.new_empty((G, 2, D), dtype=torch.float32)
    return *(x.new_empty(t.shape) for t in (x, step_logits, k, q)), dA, dchannels


def _save_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # do not allocate zero gradients for the states
    ctx.backend, ctx.recurrence, *tensors, ctx.reverse, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, dy, _):
    *tensors, states = ctx.saved_tensors
    dx, dstep_logits, dk, dq, dA, dchannels = scan_backward(
        ctx.backend, ctx.recurrence, dy, *tensors, states, ctx.reverse
    )
    A, skip, step_bias = tensors[4:]
    dskip, dstep_bias = dchannels.unbind(1)
    return (
        None, None, dx, dstep_logits, dk, dq, None if A is None else dA,
        None if skip is None else dskip, None if step_bias is None else dstep_bias, None, None,
    )  # fmt: skip


torch.library.register_autograd("vil::scan", _backward, setup_context=_save_for_backward)
torch.library.register_autograd("vil::scan_backward", refuse_second_derivative)
