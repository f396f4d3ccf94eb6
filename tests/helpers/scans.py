"""Helpers for tests of `longhorn_scan` and `selective_scan`: inputs, reference implementations and error measures."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vil.kernels import longhorn_scan, selective_scan
from vil.kernels.backends import DTYPES, STATE_SIZES
from vil.kernels.scan import reference
from vil.kernels.scan.chunks import chunk_state_count


def longhorn_inputs(B, L, D, N, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, L, D), (B, L, D), (B, L, N), (B, L, N), (D,), (D,)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def selective_inputs(B, L, D, N, dtype=torch.float64, seed=0):
    x, dt_logits, b, c, skip, dt_bias = longhorn_inputs(B, L, D, N, torch.float64, seed)
    A = -torch.rand(D, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return [t.detach().to(dtype).requires_grad_() for t in (x, dt_logits, A, b, c, skip, dt_bias)]


def of_recurrence(recurrence):
    """Return the function that creates inputs for a recurrence, and the recurrence's reference implementation."""
    both = {"longhorn": (longhorn_inputs, reference.longhorn), "selective": (selective_inputs, reference.selective)}
    return both[recurrence]


def in_order(recurrence, inputs):
    """Reorder the inputs of `longhorn_scan` or `selective_scan` to x, step logits, k, q, A, skip and bias."""
    x, step_logits, *rest = inputs
    A = rest.pop(0) if recurrence == "selective" else None
    k, q, skip, bias = rest if len(rest) > 2 else (*rest, None, None)
    return x, step_logits, k, q, A, skip, bias


def of_both_directions(recurrence, shape, dtype, device):
    """Return a list of each direction's inputs, with fp32 parameters, and the stacked inputs of both directions."""
    make, _ = of_recurrence(recurrence)
    pair = [[t.detach() if t.dim() == 3 else t.detach().float() for t in make(*shape, dtype, seed)] for seed in (0, 1)]
    return pair, [torch.stack(tensors).to(device) for tensors in zip(*pair)]


SCANS = pytest.mark.parametrize(
    ("scan", "reference_scan", "make_inputs"),
    [
        pytest.param(longhorn_scan, reference.longhorn, longhorn_inputs, id="longhorn"),
        pytest.param(selective_scan, reference.selective, selective_inputs, id="selective"),
    ],
)


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()


def exact(inputs):
    return [t.detach().double().requires_grad_() for t in inputs]


def outputs_and_gradients(f, inputs, dy_dtype=torch.float64, **kwargs):
    """Return the output of `f` and the gradients of all inputs for random output gradients, rounded to `dy_dtype`."""
    y = f(*inputs, **kwargs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, inputs, dy.to(dy_dtype).to(y.dtype))]


class StandIn:
    """Stub of a backend that checks what GPU kernels require of their inputs, and computes with the reference."""

    def __init__(self):
        self.kept, self.state_sizes, self.dtypes = [], [], []

    def forward(self, recurrence, x, step_logits, k, q, A, skip, step_bias, reverse, keep):
        assert x.dtype == step_logits.dtype == k.dtype == q.dtype
        assert x.dtype in DTYPES
        assert k.shape[-1] in STATE_SIZES
        assert all(type(r) is bool for r in reverse)
        assert isinstance(reverse, list | tuple)
        for parameter in (A, skip, step_bias):
            assert parameter is None or (parameter.dtype == torch.float32 and parameter.is_contiguous())
        self.kept.append(keep)
        self.state_sizes.append(k.shape[-1])
        self.dtypes.append(x.dtype)
        G, B, L, D = x.shape
        inputs = [t if t is None else t.double() for t in (x, step_logits, k, q, A, skip, step_bias)]
        y = self.y(recurrence, *inputs, reverse)
        states = x.new_empty((G, B, chunk_state_count(L), k.shape[-1], D) if keep else 0, dtype=torch.float32)
        return y.to(x.dtype), states

    def backward(self, recurrence, dy, x, step_logits, k, q, A, skip, step_bias, states, reverse):
        leaves = [t if t is None else t.detach().double() for t in (x, step_logits, k, q, A, skip, step_bias)]
        given = [t.requires_grad_() for t in leaves if t is not None]
        with ThreadPoolExecutor(1) as another:  # autograd is disabled in operators, but only in the calling thread
            y = another.submit(self.y, recurrence, *leaves, reverse).result()
        found = iter(torch.autograd.grad(y, given, dy.double()))
        *per_token, dA, dskip, dbias = (t if t is None else next(found) for t in leaves)
        none = x.new_full((len(x), x.shape[-1]), float("nan"))  # NaN, so that reading an absent gradient fails tests
        dchannels = torch.stack([none if t is None else t for t in (dskip, dbias)], dim=1).float()
        dA = x.new_empty(0, dtype=torch.float32) if dA is None else dA.float()
        return *(t.to(x.dtype) for t in per_token), dA, dchannels

    @staticmethod
    def y(recurrence, x, step_logits, k, q, A, skip, step_bias, reverse):
        def one(x, step_logits, k, q, A, skip, step_bias, reverse):
            if recurrence == "longhorn":
                return reference.longhorn(x, step_logits, k, q, skip, step_bias, reverse=reverse)
            return reference.selective(x, step_logits, A, k, q, skip, step_bias, reverse=reverse)

        tensors = x, step_logits, k, q, A, skip, step_bias
        each = ([t if t is None else t[g] for t in tensors] for g in range(len(reverse)))
        return torch.stack([one(*parts, r) for parts, r in zip(each, reverse)])
