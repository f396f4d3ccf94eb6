"""The scan as PyTorch operators for GPUs, over stacked directions: `vil::scan`, its fake and its gradient.

Two backends run it: `cuda` (CUDA C++) and `triton_scan` (Triton). Each is a module with `forward` and `backward` on
inputs of one dtype and a state size it lists in `STATE_SIZES`; here is what both need around that.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens between the states that forward keeps for backward: 1 byte for each element of x at N = 16


class Backend:
    """A GPU backend as `operators` sees it; its module is imported when it first runs."""

    def __init__(self, name: str):
        self.name = name

    def unsupported(self, x: Tensor, state_size: int, directions: int) -> str | None:
        """Why the inputs do not fit, or None."""
        try:
            module = _module(self.name)
        except ImportError as e:
            return f"the {self.name} backend cannot be imported: {e}"
        if not 1 <= state_size <= module.STATE_SIZES[-1]:
            return f"the {self.name} backend takes up to {module.STATE_SIZES[-1]} states, not {state_size}"
        return module.unsupported(x, directions)

    def unavailable(self, device: torch.device) -> str | None:
        """Why this machine cannot run it, or None."""
        return _module(self.name).unavailable(device)

    def longhorn_scan(self, x_GBLD, beta_logits_GBLD, k_GBLN, q_GBLN, skip_GD, beta_bias_GD, reverse) -> Tensor:
        """y_GBLD of `vil.kernels.longhorn_scan` for G directions."""
        return self._scan("longhorn", x_GBLD, beta_logits_GBLD, k_GBLN, q_GBLN, None, skip_GD, beta_bias_GD, reverse)

    def selective_scan(self, x_GBLD, dt_logits_GBLD, A_GDN, b_GBLN, c_GBLN, skip_GD, dt_bias_GD, reverse) -> Tensor:
        """y_GBLD of `vil.kernels.selective_scan` for G directions."""
        return self._scan("selective", x_GBLD, dt_logits_GBLD, b_GBLN, c_GBLN, A_GDN, skip_GD, dt_bias_GD, reverse)

    def _scan(self, recurrence, x, logits, k, q, rates, skip, bias, reverse) -> Tensor:
        per_token = x, logits, k, q
        dtype = x.dtype if len({t.dtype for t in per_token}) == 1 else torch.float32
        size = next(n for n in _module(self.name).STATE_SIZES if n >= k.shape[-1])
        inputs = [t.to(dtype) for t in (x, logits)]
        inputs += [_pad(t.to(dtype), size) for t in (k, q)]
        inputs.append(None if rates is None else _pad(rates.float().contiguous(), size))
        inputs += [None if t is None else t.float().contiguous() for t in (skip, bias)]
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        return scan(self.name, recurrence, *inputs, reverse, keep)[0].to(x.dtype)


CUDA = Backend("cuda")
TRITON = Backend("triton")


@functools.cache
def _module(name: str) -> ModuleType:
    module = {"cuda": "cuda", "triton": "triton_scan"}[name]
    return importlib.import_module(f".{module}", __package__)


def _pad(t: Tensor, state_size: int) -> Tensor:
    # a state whose key and query are 0 stays 0 and is never read
    return t if t.shape[-1] == state_size else F.pad(t, (0, state_size - t.shape[-1]))


@torch.library.custom_op("vil::scan", mutates_args=())
def scan(
    backend: str, recurrence: str, x_GBLD: Tensor, logits_GBLD: Tensor, k_GBLN: Tensor, q_GBLN: Tensor,
    rates_GDN: Tensor | None, skip_GD: Tensor | None, bias_GD: Tensor | None, reverse: list[bool], keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y_GBLD and, if `keep`, the state before every `CHUNK` tokens as (G, B, chunks, N, D), else an empty tensor."""
    tensors = x_GBLD, logits_GBLD, k_GBLN, q_GBLN, rates_GDN, skip_GD, bias_GD
    if x_GBLD.numel() == 0:
        return _fake_scan(backend, recurrence, *tensors, reverse, keep)
    return _module(backend).forward(recurrence, *tensors, reverse, keep)


@torch.library.custom_op("vil::scan_backward", mutates_args=())
def scan_backward(
    backend: str, recurrence: str, dy_GBLD: Tensor, x_GBLD: Tensor, logits_GBLD: Tensor, k_GBLN: Tensor,
    q_GBLN: Tensor, rates_GDN: Tensor | None, skip_GD: Tensor | None, bias_GD: Tensor | None, states_GBSND: Tensor,
    reverse: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, logits, k, q, rates (empty without rates), and of skip and bias as one tensor (G, 2, D)."""
    tensors = dy_GBLD, x_GBLD, logits_GBLD, k_GBLN, q_GBLN, rates_GDN, skip_GD, bias_GD, states_GBSND
    if x_GBLD.numel() == 0:
        return tuple(torch.zeros_like(t) for t in _fake_scan_backward(backend, recurrence, *tensors, reverse))
    return _module(backend).backward(recurrence, *tensors, reverse)


@scan.register_fake
def _fake_scan(backend, recurrence, x, logits, k, q, rates, skip, bias, reverse, keep):
    G, B, L, D = x.shape
    kept = (G, B, (L + CHUNK - 1) // CHUNK, k.shape[-1], D) if keep else (0,)
    return x.new_empty(x.shape), x.new_empty(kept, dtype=torch.float32)


@scan_backward.register_fake
def _fake_scan_backward(backend, recurrence, dy, x, logits, k, q, rates, skip, bias, states, reverse):
    G, _, _, D = x.shape
    drates = x.new_empty((0,) if rates is None else rates.shape, dtype=torch.float32)
    dchannels = x.new_empty((G, 2, D), dtype=torch.float32)
    return *(x.new_empty(t.shape) for t in (x, logits, k, q)), drates, dchannels


def _save_for_backward(ctx, inputs, output):
    ctx.backend, ctx.recurrence, *tensors, ctx.reverse, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, dy, _):
    *tensors, states = ctx.saved_tensors
    dx, dlogits, dk, dq, drates, dchannels = scan_backward(
        ctx.backend, ctx.recurrence, dy, *tensors, states, ctx.reverse
    )
    rates, skip, bias = tensors[4:]
    dskip, dbias = dchannels.unbind(1)
    return (
        None, None, dx, dlogits, dk, dq, None if rates is None else drates,
        None if skip is None else dskip, None if bias is None else dbias, None, None,
    )  # fmt: skip


scan.register_autograd(_backward, setup_context=_save_for_backward)
