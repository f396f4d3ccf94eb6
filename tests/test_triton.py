"""The Triton backend against `naive`: on the GPU if there is one, else under Triton's interpreter (see conftest)."""

import naive
import pytest
import torch
from test_operators import SCANS, exact, outputs_and_gradients, relative_error
from vil.kernels import gpu, longhorn_scan

pytest.importorskip("triton")
from vil.kernels import triton_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(inputs):
    return [t.detach().to(DEVICE).requires_grad_() for t in inputs]


def errors(scan, definition, inputs, dtype=torch.float32, **kwargs):
    expected = outputs_and_gradients(definition, exact(inputs), dtype, **kwargs)
    actual = outputs_and_gradients(
        lambda *t, **k: scan(*t, backend="triton", **k).cpu(), on_device(inputs), dtype, **kwargs
    )
    return [relative_error(a.cpu(), e) for a, e in zip(actual, expected)]


# more than a chunk of 64 tokens, a block of 32 channels and what is left of one, states that are and are not padded
@SCANS
@pytest.mark.parametrize("shape", [(1, 67, 5, 4), (2, 5, 35, 3), (1, 1, 1, 16)])
@pytest.mark.parametrize("reverse", [False, True])
def test_output_and_gradients_equal_the_definition(scan, definition, make_inputs, shape, reverse):
    assert max(errors(scan, definition, make_inputs(*shape, torch.float32), reverse=reverse)) < 1e-5


@SCANS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
def test_low_precision_inputs_lose_only_their_own_rounding(scan, definition, make_inputs, dtype, tolerance):
    assert max(errors(scan, definition, make_inputs(1, 67, 6, 16, dtype), dtype)) < tolerance


@SCANS
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("span", [1, 2])  # chunks of a segment
def test_segments_equal_the_definition(scan, definition, make_inputs, monkeypatch, span, reverse):
    monkeypatch.setattr(triton_scan, "_cut", lambda *_: (span, -(-3 // span), 16))
    assert max(errors(scan, definition, make_inputs(1, 130, 5, 4, torch.float32), reverse=reverse)) < 1e-5


@SCANS
def test_two_directions_and_no_parameters(scan, definition, make_inputs):
    inputs = make_inputs(1, 9, 4, 4, torch.float32)[:-2]
    stacked = on_device([torch.stack([t, 2 * t]).detach() for t in inputs])
    y = scan(*stacked, reverse=(True, False), backend="triton").cpu()
    for g, reverse in enumerate((True, False)):
        expected = definition(*((g + 1) * t.detach().double() for t in inputs), reverse=reverse)
        assert relative_error(y[g], expected) < 1e-5


@pytest.mark.parametrize("logit", [-100.0, 100.0])
def test_extreme_logits_stay_finite(logit):
    from test_operators import longhorn_inputs

    inputs = longhorn_inputs(1, 9, 4, 4, torch.float32)
    inputs[1] = torch.full_like(inputs[1], logit).requires_grad_()
    actual = outputs_and_gradients(
        lambda *t: longhorn_scan(*t, backend="triton").cpu(), on_device(inputs), torch.float32
    )
    expected = outputs_and_gradients(naive.longhorn, exact(inputs), torch.float32)
    for i, (a, truth) in enumerate(zip(actual, expected)):
        assert torch.isfinite(a).all()
        if i != 2:  # a saturated logit's gradient is below rounding
            torch.testing.assert_close(a.cpu().double(), truth, rtol=1e-4, atol=1e-5)


@SCANS
def test_operator_registrations(scan, definition, make_inputs):
    per_token = [t.detach()[None] for t in make_inputs(1, 5, 4, 4, torch.float32)]
    if len(per_token) == 7:
        x, logits, A, b, c, skip, bias = on_device(per_token)
        arguments = ("triton", "selective", x, logits, b, c, A, skip, bias, [True], True)
    else:
        x, logits, k, q, skip, bias = on_device(per_token)
        arguments = ("triton", "longhorn", x, logits, k, q, None, skip, bias, [True], True)
    torch.library.opcheck(gpu.scan.default, arguments, atol=1e-5, rtol=1e-4)


def test_refuses_what_it_cannot_take():
    x, k = torch.zeros(1, 2, 3, dtype=torch.float64, device=DEVICE), torch.zeros(1, 2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        longhorn_scan(x, x, k, k, backend="triton")
    wide = torch.zeros(1, 2, 65, device=DEVICE)
    with pytest.raises(ValueError, match="65"):
        longhorn_scan(x.float(), x.float(), wide, wide, backend="triton")
    x = torch.zeros(1, device=DEVICE).expand(1, 2, 2**29)
    with pytest.raises(ValueError, match="536870912"):
        longhorn_scan(x, x, k, k, backend="triton")


@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize("shape", [(3, 197, 100, 16), (7, 777, 300, 16)])
def test_an_image_on_the_gpu(scan, definition, make_inputs, shape):
    if DEVICE == "cpu":
        pytest.skip("needs a GPU")
    assert max(errors(scan, definition, make_inputs(*shape, torch.float32), reverse=True)) < 1e-5


@pytest.mark.gpu
@SCANS
def test_two_runs_of_segments_are_equal_bit_for_bit(scan, definition, make_inputs):
    if DEVICE == "cpu":
        pytest.skip("needs a GPU")
    inputs = on_device(make_inputs(5, 777, 1000, 16, torch.float32))

    def run():
        y = scan(*inputs, backend="triton")
        return y, *torch.autograd.grad(y.square().sum(), inputs)

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))
