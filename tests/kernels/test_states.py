"""Tests of the public scans' initial and final states, against the reference implementation."""

import functools

import pytest
import torch
from scans import SCANS, exact, relative_error

from vil.kernels import longhorn_scan, selective_scan

BACKENDS = ["auto", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "triton"))]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@SCANS
@pytest.mark.parametrize("shape", [(2, 1, 3, 4), (1, 17, 7, 16), (2, 70, 5, 5)])
@pytest.mark.parametrize("reverse", [False, True])
def test_outputs_states_and_gradients_equal_the_reference(scan, reference_scan, make_inputs, shape, reverse):
    B, _, D, N = shape
    inputs = [*make_inputs(*shape), random(B, D, N).requires_grad_()]
    *tensors, initial = inputs
    y, final = scan(*tensors, reverse=reverse, initial_state=initial, return_final_state=True)
    truth = reference_scan(*tensors, reverse=reverse, initial_state=initial, return_final_state=True)
    dy, dS = random(*y.shape, seed=1), random(B, D, N, seed=2)
    found, expected = (torch.autograd.grad(results, inputs, (dy, dS)) for results in ((y, final), truth))
    for a, b in zip((y, final, *found), (*truth, *expected), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < 1e-12


@SCANS
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("cuts", [[(0, 1), (1, 65), (65, 100)], [(0, 1)]], ids=["three", "one"])
def test_scanning_a_sequence_in_parts_equals_scanning_it_whole(
    scan, reference_scan, make_inputs, cuts, dtype, tolerance, backend
):
    """A scan in parts of 1, 64 and 35 tokens, or of one token, equals the reference scan of all tokens.

    States are in fp32, also for bf16 inputs and an fp64 initial state. The reverse direction starts with the last part.
    """
    device, reverse = "cpu" if backend == "auto" else "cuda", [False, True]
    pair = [make_inputs(2, cuts[-1][1], 24, 16, dtype, seed) for seed in (0, 1)]
    inputs = [torch.stack([t.detach() for t in two]).to(device) for two in zip(*pair)]
    of_tokens = [t.dim() == 4 for t in inputs]
    initial = random(2, 2, 24, 16).to(device)
    ys, ends = [], []
    for g, backwards in enumerate(reverse):
        state, parts = initial[g : g + 1], []
        for start, end in cuts[::-1] if backwards else cuts:
            part = [t[g : g + 1, :, start:end] if many else t[g : g + 1].double() for t, many in zip(inputs, of_tokens)]
            y, state = scan(*part, reverse=[backwards], backend=backend, initial_state=state, return_final_state=True)
            assert (y.dtype, state.dtype, state.shape) == (dtype, torch.float32, (1, 2, 24, 16))
            parts.append(y[0])
        ys.append(torch.cat(parts[::-1] if backwards else parts, 1))
        ends.append(state[0])
    both, final = scan(*inputs, reverse=reverse, backend=backend, initial_state=initial, return_final_state=True)
    for g, backwards in enumerate(reverse):
        tensors = exact(t[g].cpu() for t in inputs)
        y, S = reference_scan(
            *tensors, reverse=backwards, initial_state=initial[g].cpu().double(), return_final_state=True
        )
        for found in (ys[g], both[g]):
            assert relative_error(found.cpu(), y) < tolerance
        for found in (ends[g], final[g]):
            assert relative_error(found.cpu(), S) < 2e-6


@SCANS
@pytest.mark.parametrize("reverse", [False, True])
def test_only_in_and_only_out(scan, reference_scan, make_inputs, reverse):
    inputs, initial = make_inputs(1, 9, 3, 4), random(1, 3, 4)
    scan, reference_scan = (functools.partial(function, reverse=reverse) for function in (scan, reference_scan))
    assert relative_error(scan(*inputs, initial_state=initial), reference_scan(*inputs, initial_state=initial)) < 1e-12
    one = [t[:, :1] if t.dim() == 3 else t for t in inputs[:-2]]  # a single token without skip weights and bias
    assert relative_error(scan(*one, initial_state=initial), reference_scan(*one, initial_state=initial)) < 1e-12
    for given in (inputs, one):
        for found, expected in zip(*(function(*given, return_final_state=True) for function in (scan, reference_scan))):
            assert relative_error(found, expected) < 1e-12
    empty = [t[:, :0] if t.dim() == 3 else t for t in inputs]
    y, same = scan(*empty, initial_state=initial, return_final_state=True)
    assert y.shape == (1, 0, 3)
    assert relative_error(same, initial) < 1e-12


def test_an_initial_state_of_a_wrong_shape_is_rejected():
    x, k = torch.zeros(2, 5, 3), torch.zeros(2, 5, 4)
    for scan, inputs in ((longhorn_scan, (x, x, k, k)), (selective_scan, (x, x, torch.zeros(3, 4), k, k))):
        with pytest.raises(ValueError, match=r"initial_state must have shape \(B, D, N\)"):
            scan(*inputs, initial_state=torch.zeros(2, 4, 3))
        with pytest.raises(ValueError, match="dtype of initial_state must be .*got torch.int64"):
            scan(*inputs, initial_state=torch.zeros(2, 3, 4, dtype=torch.int64))
        with pytest.raises(ValueError, match="initial_state must be on .*got meta"):
            scan(*inputs, initial_state=torch.zeros(2, 3, 4, device="meta"))
