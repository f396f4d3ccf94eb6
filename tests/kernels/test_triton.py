"""The Triton backend against `naive`: on the GPU if there is one, else under Triton's interpreter (see conftest)."""

import pytest
import torch
from scans import SCANS, exact, longhorn_inputs, outputs_and_gradients, relative_error
from vil.kernels import longhorn_scan
from vil.kernels.scan import chunks as kept
from vil.kernels.scan import naive
from vil.kernels.scan import operator as gpu

pytest.importorskip("triton")
from vil.kernels.scan import triton_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(inputs):
    return [t.detach().to(DEVICE).requires_grad_() for t in inputs]


def errors(scan, definition, inputs, dtype=torch.float32, **kwargs):
    expected = outputs_and_gradients(definition, exact(inputs), dtype, **kwargs)
    actual = outputs_and_gradients(
        lambda *t, **k: scan(*t, backend="triton", **k).cpu(), on_device(inputs), dtype, **kwargs
    )
    return [relative_error(a.cpu(), e) for a, e in zip(actual, expected)]


@pytest.fixture
def short_chunks(monkeypatch):
    """Of 4 tokens, not 64, for the interpreter, which takes milliseconds for a token."""
    for module in (kept, triton_scan):
        monkeypatch.setattr(module, "CHUNK", 4)


# a block of 32 channels and what is left of one, more blocks than programs, states that are and are not padded
@SCANS
@pytest.mark.parametrize("shape", [(2, 3, 35, 3), (1, 1, 1, 16), (1, 4, 5, 33)])
@pytest.mark.parametrize("reverse", [False, True])
def test_output_and_gradients_equal_the_definition(scan, definition, make_inputs, shape, reverse, monkeypatch):
    monkeypatch.setattr(triton_scan, "PROGRAMS", 4)
    assert max(errors(scan, definition, make_inputs(*shape, torch.float32), reverse=reverse)) < 1e-5


# the interpreter does not round to bf16, but cuts off
@SCANS
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 4e-3 if DEVICE == "cuda" else 8e-3), (torch.float16, 1e-3)]
)
def test_low_precision_inputs_lose_only_their_own_rounding(
    scan, definition, make_inputs, dtype, tolerance, short_chunks
):
    assert max(errors(scan, definition, make_inputs(1, 7, 6, 16, dtype), dtype)) < tolerance


# of three chunks and a part of one: each for itself, three and one, all in one that takes no state over
@SCANS
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("large", "segment_chunks"), [(2**16, None), (2**16, 3), (32, None)])
def test_segments_equal_the_definition(
    scan, definition, make_inputs, large, segment_chunks, reverse, short_chunks, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(triton_scan, "CHANNELS", large)
    monkeypatch.setattr(triton_scan, "PROGRAMS", 1)  # which runs backward over all segments, one after the other
    schedule = triton_scan._schedule(torch.empty(1, 2, 14, 5), 16)
    assert schedule == ((4, 1, 16) if large == 32 else (1, 4, 16))
    if segment_chunks:
        monkeypatch.setattr(triton_scan, "_schedule", lambda *_: (segment_chunks, 2, 16))
    assert max(errors(scan, definition, make_inputs(2, 14, 5, 4, torch.float32), reverse=reverse)) < 1e-5


def test_a_sequence_of_two_chunks_as_long_as_on_a_gpu():
    assert max(errors(longhorn_scan, naive.longhorn, longhorn_inputs(1, 67, 5, 4, torch.float32))) < 1e-5


@pytest.mark.parametrize("L", [1, 64, 65, 1000, 6085])
@pytest.mark.parametrize("channels", [(1, 1, 5), (2, 1, 384), (2, 8, 768), (2, 64, 384), (2, 128, 768)])
def test_sequences_are_schedule_only_where_channels_do_not_fill_a_large_gpu(channels, L):
    G, B, D = channels
    segment_chunks, segments, block = triton_scan._schedule(torch.empty(G, B, L, D, device="meta"), 32)
    chunks, sequences = -(-L // 64), G * B * D
    assert (segments - 1) * segment_chunks < chunks <= segments * segment_chunks
    assert (segments > 1) == (sequences < 2**14 and chunks > 1)
    assert segments * sequences <= 4 * 2**16 or segments == 1
    assert block == (64 if segments * sequences >= 2**16 else 32)


@SCANS
def test_directions_with_parameters_of_their_own(scan, definition, make_inputs, short_chunks):
    each, reverse = [make_inputs(2, 6, 3, 4, torch.float32, seed) for seed in (0, 1)], (True, False)
    stacked = on_device([torch.stack(tensors) for tensors in zip(*each)])
    y, *found = outputs_and_gradients(lambda *t: scan(*t, reverse=reverse, backend="triton").cpu(), stacked)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for g, inputs in enumerate(map(exact, each)):
        truth = definition(*inputs, reverse=reverse[g])
        assert relative_error(y[g], truth) < 1e-5
        for actual, expected in zip(found, torch.autograd.grad(truth, inputs, dy[g].float().double())):
            assert relative_error(actual[g].cpu(), expected) < 1e-5


@SCANS
def test_skip_and_bias_are_optional(scan, definition, make_inputs):
    *inputs, skip, bias = make_inputs(1, 5, 4, 4, torch.float32)
    for given in ({}, {"skip_D": skip}, {("beta" if scan is longhorn_scan else "dt") + "_bias_D": bias}):
        wanted = [*inputs, *given.values()]

        def run(f, *tensors, given=given, **kwargs):
            return f(*tensors[: len(inputs)], **dict(zip(given, tensors[len(inputs) :])), **kwargs).cpu()

        expected = outputs_and_gradients(lambda *t: run(definition, *t), exact(wanted), torch.float32)
        actual = outputs_and_gradients(lambda *t: run(scan, *t, backend="triton"), on_device(wanted), torch.float32)
        for a, e in zip(actual, expected):
            assert relative_error(a.cpu(), e) < 1e-5


@pytest.mark.parametrize("logit", [-100.0, 100.0])
def test_extreme_logits_stay_finite(logit):
    inputs = longhorn_inputs(1, 5, 4, 4, torch.float32)
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
