"""The scan as PyTorch operators, over stacked directions: `vil::scan`, its fake and its gradient.

Three modules run it: `launch` (CUDA C++), `triton_scan` (Triton) and `cpu_scan` (Numba). Each has `forward` and
`backward` on inputs of one dtype and a state size of `STATE_SIZES`; here is what all need around that.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cuda
from ..checks import check, check_choice, check_given, once_a_kind
from .chunks import boundaries

BACKENDS = ("auto", "cuda", "triton", "cpu")
RECURRENCES = ("longhorn", "selective")
STATE_SIZES = (4, 8, 16, 32, 64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIRECTIONS = 63  # which of them are reversed is a mask of 64 bits
TOKENS, CHANNELS = 2**31 - 2**10, 2**29 - 1  # counted in 32 bits, also in bytes of fp32 between tokens


class Backend:
    """As `operators` sees it: "cuda", "triton", "cpu", or "auto", the first of the former two that the GPU can run."""

    def __init__(self, name: str):
        self.name = name

    def unsupported(self, x: Tensor, state_size: int, directions: int) -> str | None:
        """Why the inputs do not fit, or None."""
        reason = _unreachable(self.name, x.device) or _unfit(self.name, x, state_size, directions)
        return reason or (_missing(x.device) if self.name == "auto" else None)

    def longhorn_scan(self, x_GBLD, beta_logits_GBLD, k_GBLN, q_GBLN, skip_GD, beta_bias_GD, reverse) -> Tensor:
        """y_GBLD of `vil.kernels.longhorn_scan` for G directions."""
        return self._scan("longhorn", x_GBLD, beta_logits_GBLD, k_GBLN, q_GBLN, None, skip_GD, beta_bias_GD, reverse)

    def selective_scan(self, x_GBLD, dt_logits_GBLD, A_GDN, b_GBLN, c_GBLN, skip_GD, dt_bias_GD, reverse) -> Tensor:
        """y_GBLD of `vil.kernels.selective_scan` for G directions."""
        return self._scan("selective", x_GBLD, dt_logits_GBLD, b_GBLN, c_GBLN, A_GDN, skip_GD, dt_bias_GD, reverse)

    def _scan(self, recurrence, x, logits, k, q, rates, skip, bias, reverse) -> Tensor:
        dtype = x.dtype if x.dtype == logits.dtype == k.dtype == q.dtype else torch.float32
        size = next(n for n in STATE_SIZES if n >= k.shape[-1])
        inputs = [x.to(dtype), logits.to(dtype), _pad(k.to(dtype), size), _pad(q.to(dtype), size)]
        inputs.append(None if rates is None else _pad(rates.to(torch.float32).contiguous(), size))
        inputs += [None if t is None else t.to(torch.float32).contiguous() for t in (skip, bias)]
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        return scan(self.name, recurrence, *inputs, reverse, keep)[0].to(x.dtype)


AUTO, CUDA, TRITON, CPU = Backend("auto"), Backend("cuda"), Backend("triton"), Backend("cpu")


def _pad(t: Tensor, state_size: int) -> Tensor:
    # a state whose key and query are 0 stays 0 and is never read
    return t if t.shape[-1] == state_size else F.pad(t, (0, state_size - t.shape[-1]))


def _unreachable(backend: str, device: torch.device) -> str | None:
    """Why the backend's kernels cannot read what is on this device, or None."""
    if backend == "cpu":
        return None if device.type == "cpu" else f"the cpu backend needs tensors on a CPU; x is on {device}"
    interpreted = backend == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda" or interpreted:
        return None
    return f"the {backend} backend needs tensors on a GPU; x is on {device}"


def _unfit(backend: str, x: Tensor, state_size: int, directions: int) -> str | None:
    """Why the backend's kernels do not take these, wherever they are, or None."""
    *_, L, D = x.shape
    if x.dtype not in DTYPES:
        return f"the {backend} backend takes float16, bfloat16 and float32; x is {x.dtype}"
    if state_size > STATE_SIZES[-1] or directions > DIRECTIONS:
        limits = f"{STATE_SIZES[-1]} states and {DIRECTIONS} directions"
        return f"the {backend} backend takes up to {limits}, not {state_size} and {directions}"
    if L > TOKENS or D > CHANNELS:
        return f"the {backend} backend takes up to {TOKENS} tokens and {CHANNELS} channels, not {L} and {D}"
    return None


@functools.cache
def _module(backend: str, device: torch.device) -> ModuleType:
    """What runs the backend on this device; a ValueError or RuntimeError if nothing does."""
    if reason := _unreachable(backend, device):
        raise ValueError(reason)
    if backend == "cpu":
        module = importlib.import_module(".cpu_scan", __package__)
        if reason := module.unavailable():
            raise RuntimeError(f"the cpu backend cannot run: {reason}")
        return module
    if backend == "triton" or torch.version.hip:
        try:
            return importlib.import_module(".triton_scan", __package__)
        except ImportError as error:
            raise RuntimeError(f"the triton backend needs Triton, which cannot be imported: {error}") from error
    reason = cuda.unavailable(device)
    if reason is None:
        return importlib.import_module(".cuda_scan", __package__)
    if backend == "cuda":
        raise RuntimeError(reason)
    warnings.warn(f"{reason}. The triton backend takes over.", stacklevel=2)
    return _module("triton", device)


@torch.compiler.assume_constant_result  # as torch.compile cannot look into the imports behind it
def _missing(device: torch.device) -> str | None:
    """What this machine lacks of all that could run kernels on its GPU, or None."""
    return _why_nothing_runs(device)


@functools.cache
def _why_nothing_runs(device: torch.device) -> str | None:
    if not torch.cuda.is_available():  # a compiler's tensors need no GPU
        return None
    try:
        _module("auto", device)
    except RuntimeError as error:
        warnings.warn(f"{error}. The reference takes over, which is slow on a GPU.", stacklevel=2)
        return str(error)
    return None


@torch.compiler.assume_constant_result
def runs_cuda(device: torch.device) -> bool:
    """Whether "auto" runs the CUDA kernels on this device."""
    if device.type != "cuda" or _missing(device):
        return False
    return _module("auto", device) is importlib.import_module(".cuda_scan", __package__)


@torch.compiler.assume_constant_result
def runs_on_cpus() -> bool:
    """Whether the cpu backend can run here; a warning says once why not."""
    return _runs_on_cpus()


@functools.cache
def _runs_on_cpus() -> bool:
    try:
        _module("cpu", torch.device("cpu"))
    except RuntimeError as e:
        warnings.warn(f"{e}. The reference takes over.", stacklevel=2)
        return False
    return True


# Defined by schemas: the first call of a `torch.library.custom_op` imports torch.compile's machinery, 2 seconds of it.
torch.library.define(
    "vil::scan",
    "(str backend, str recurrence, Tensor x_GBLD, Tensor logits_GBLD, Tensor k_GBLN, Tensor q_GBLN, Tensor? rates_GDN,"
    " Tensor? skip_GD, Tensor? bias_GD, bool[] reverse, bool keep) -> (Tensor y_GBLD, Tensor states_GBSND)",
)
torch.library.define(
    "vil::scan_backward",
    "(str backend, str recurrence, Tensor dy_GBLD, Tensor x_GBLD, Tensor logits_GBLD, Tensor k_GBLN, Tensor q_GBLN,"
    " Tensor? rates_GDN, Tensor? skip_GD, Tensor? bias_GD, Tensor states_GBSND, bool[] reverse)"
    " -> (Tensor dx_GBLD, Tensor dlogits_GBLD, Tensor dk_GBLN, Tensor dq_GBLN, Tensor drates_GDN, Tensor dchannels)",
)
scan, scan_backward = torch.ops.vil.scan, torch.ops.vil.scan_backward


@once_a_kind
def _check(backend, recurrence, x, logits, k, q, rates, skip, bias, directions, backward=False, dy=None, states=None):
    """Raises a ValueError that names what kernels cannot run over, unless they can over all of these."""
    check_choice("backend", backend, BACKENDS)
    check_choice("recurrence", recurrence, RECURRENCES)
    check_given(x_GBLD=x, logits_GBLD=logits, k_GBLN=k, q_GBLN=q)
    if backward:
        check_given(dy_GBLD=dy, states_GBSND=states)
    if (rates is None) != (recurrence == "longhorn"):
        raise ValueError(f"rates_GDN {'are needed by' if rates is None else 'are not of'} the {recurrence} recurrence")
    sizes: dict[str, int] = {}
    of_x, fp32 = ("x_GBLD", x, "GBLD", x.dtype), torch.float32
    check(
        sizes, of_x, ("logits_GBLD", logits, "GBLD", x.dtype), ("k_GBLN", k, "GBLN", x.dtype),
        ("q_GBLN", q, "GBLN", x.dtype), ("dy_GBLD", dy, "GBLD", x.dtype), ("rates_GDN", rates, "GDN", fp32),
        ("skip_GD", skip, "GD", fp32), ("bias_GD", bias, "GD", fp32),
    )  # fmt: skip
    sizes["S"] = boundaries(sizes["L"])
    check(sizes, of_x, ("states_GBSND", states, "GBSND", fp32))
    if directions != sizes["G"]:
        raise ValueError(f"reverse must hold a bool for each of {sizes['G']} directions; it holds {directions}")
    if reason := _unfit(backend, x, sizes["N"], sizes["G"]):
        raise ValueError(reason)
    check_choice("the number of states in k_GBLN,", sizes["N"], STATE_SIZES)


def aligned(t: Tensor | None) -> Tensor | None:
    """As kernels read parameters: without gaps, and from where the widest instruction can."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


@torch.library.impl("vil::scan", ("CPU", "CUDA"))
def _scan(backend, recurrence, x, logits, k, q, rates, skip, bias, reverse, keep):
    """y and, if `keep`, the states between chunks of tokens (G, B, chunks - 1, N, D), else an empty tensor."""
    _check(backend, recurrence, x, logits, k, q, rates, skip, bias, len(reverse))
    if x.numel() == 0:
        return _fake_scan(backend, recurrence, x, logits, k, q, rates, skip, bias, reverse, keep)
    parameters = aligned(rates), aligned(skip), aligned(bias)
    return tuple(_module(backend, x.device).forward(recurrence, x, logits, k, q, *parameters, tuple(reverse), keep))


@torch.library.impl("vil::scan_backward", ("CPU", "CUDA"))
def _scan_backward(backend, recurrence, dy, x, logits, k, q, rates, skip, bias, states, reverse):
    """Gradients of x, logits, k, q, rates (empty without rates), and of skip and bias as one tensor (G, 2, D)."""
    _check(backend, recurrence, x, logits, k, q, rates, skip, bias, len(reverse), True, dy, states)
    if x.numel() == 0:
        found = _fake_scan_backward(backend, recurrence, dy, x, logits, k, q, rates, skip, bias, states, reverse)
        return tuple(torch.zeros_like(t) for t in found)
    parameters = aligned(rates), aligned(skip), aligned(bias), aligned(states)
    module, tensors = _module(backend, x.device), (dy, x, logits, k, q)
    return tuple(module.backward(recurrence, *tensors, *parameters, tuple(reverse)))


@torch.library.register_fake("vil::scan")
def _fake_scan(backend, recurrence, x, logits, k, q, rates, skip, bias, reverse, keep):
    _check(backend, recurrence, x, logits, k, q, rates, skip, bias, len(reverse))
    G, B, L, D = x.shape
    kept = (G, B, boundaries(L), k.shape[-1], D) if keep else (0,)
    return x.new_empty(x.shape), x.new_empty(kept, dtype=torch.float32)


@torch.library.register_fake("vil::scan_backward")
def _fake_scan_backward(backend, recurrence, dy, x, logits, k, q, rates, skip, bias, states, reverse):
    _check(backend, recurrence, x, logits, k, q, rates, skip, bias, len(reverse), True, dy, states)
    G, _, _, D = x.shape
    drates = x.new_empty((0,) if rates is None else rates.shape, dtype=torch.float32)
    dchannels = x.new_empty((G, 2, D), dtype=torch.float32)
    return *(x.new_empty(t.shape) for t in (x, logits, k, q)), drates, dchannels


def _save_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no gradient of zeros for the states
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


torch.library.register_autograd("vil::scan", _backward, setup_context=_save_for_backward)
