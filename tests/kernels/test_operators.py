"""Tests of the public scans against `reference` on all available backends: outputs, gradients, limits and errors."""

import re
from typing import NamedTuple

import pytest
import torch
from scans import SCANS, exact, longhorn_inputs, outputs_and_gradients, relative_error, selective_inputs

from vil.kernels import longhorn_scan, selective_scan
from vil.kernels.scan import chunks, reference, scan_op, torch_scan


class Backend(NamedTuple):
    name: str
    dtype: torch.dtype  # dtype of inputs, unless a test sets another
    tolerance: float
    device: str = "cpu"

    def run(self, scan):
        return lambda *t, **options: scan(*(each.to(self.device) for each in t), backend=self.name, **options).cpu()

    def error(self, scan, reference_scan, inputs, dy_dtype=None, **options):
        """Return the largest relative error of the output and all gradients."""
        dy_dtype = dy_dtype or inputs[0].dtype
        expected = outputs_and_gradients(reference_scan, exact(inputs), dy_dtype, **options)
        actual = outputs_and_gradients(self.run(scan), inputs, dy_dtype, **options)
        assert [t.dtype for t in actual] == [inputs[0].dtype, *(t.dtype for t in inputs)]
        return max(relative_error(a, e) for a, e in zip(actual, expected, strict=True))


REFERENCE, CPU = Backend("reference", torch.float64, 1e-12), Backend("cpu", torch.float32, 3e-6)
TRITON = Backend("triton", torch.float32, 1e-5, "cuda" if torch.cuda.is_available() else "cpu")
CUDA = pytest.param(Backend("cuda", torch.float32, 1e-5, "cuda"), marks=pytest.mark.gpu, id="cuda")
# Sequences have one or more chunks of tokens: of 16 in the reference backend, 64 in the cpu backend, and 4 in Triton.
# Some widths D exceed a block of channels. State sizes N are few, because the cpu backend compiles kernels for each.
SHAPES = {  # shapes (B, L, D, N)
    REFERENCE: [(1, 1, 1, 1), (2, 5, 3, 4), (1, 17, 7, 16), (3, 64, 5, 8), (2, 101, 19, 5)],
    CPU: [(1, 1, 1, 1), (3, 64, 5, 4), (2, 101, 19, 3), (1, 64, 64, 16), (2, 65, 65, 16), (1, 129, 128, 3)],
    TRITON: [(2, 3, 35, 3), (1, 1, 1, 16), (1, 4, 5, 33)]
    + ([(3, 197, 100, 16), (7, 777, 300, 16)] if TRITON.device == "cuda" else []),
}


@pytest.fixture
def prepared(backend, monkeypatch):
    """Use chunks of 4 tokens instead of 64 in Triton, whose interpreter is slow."""
    if backend is TRITON:
        pytest.importorskip("triton")
        from vil.kernels.scan import triton_scan

        monkeypatch.setattr(triton_scan, "PROGRAMS", 4)  # fewer backward programs than some shapes have blocks
        for module in (chunks, triton_scan):
            monkeypatch.setattr(module, "CHUNK", 4)


def on(*backends):
    def decorate(test):
        test = pytest.mark.usefixtures("prepared")(test)
        return pytest.mark.parametrize("backend", backends, ids=lambda backend: backend.name)(test)

    return decorate


def sizes(backend, *large):
    """Return the sizes `large`, or small sizes for Triton, whose interpreter is slow."""
    return (1, 7, 6, 4) if backend is TRITON else large


@SCANS
@pytest.mark.parametrize(
    ("backend", "shape"),
    [pytest.param(b, shape, id=f"{b.name}-{'x'.join(map(str, shape))}") for b in SHAPES for shape in SHAPES[b]],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_output_and_gradients_equal_the_reference(
    scan, reference_scan, make_inputs, backend, shape, reverse, prepared, poison
):
    inputs = make_inputs(*shape, backend.dtype)
    assert backend.error(scan, reference_scan, inputs, reverse=reverse) < backend.tolerance


@SCANS
@on(REFERENCE, CPU, TRITON)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
def test_low_precision_inputs_lose_only_their_own_rounding(
    scan, reference_scan, make_inputs, backend, dtype, tolerance
):
    # Triton's interpreter truncates to bf16 instead of rounding.
    cuts_off = backend is TRITON and backend.device == "cpu" and dtype == torch.bfloat16
    inputs = make_inputs(*sizes(backend, 2, 77, 24, 16), dtype)
    assert backend.error(scan, reference_scan, inputs) < (2 if cuts_off else 1) * tolerance


@SCANS
@on(REFERENCE, CPU, TRITON, CUDA)
@pytest.mark.parametrize("options", range(3))
def test_skip_and_bias_are_optional(scan, reference_scan, make_inputs, backend, options):
    *inputs, skip, bias = make_inputs(*sizes(backend, 2, 9, 6, 4), backend.dtype)
    bias_name = "beta_bias_D" if scan is longhorn_scan else "dt_bias_D"
    given = [{}, {"skip_D": skip}, {bias_name: bias}][options]

    def with_names(f):
        return lambda *t, **o: f(*t[: len(inputs)], **dict(zip(given, t[len(inputs) :])), **o)

    assert backend.error(with_names(scan), with_names(reference_scan), [*inputs, *given.values()]) < backend.tolerance


@SCANS
@on(REFERENCE, CPU, TRITON, CUDA)
@pytest.mark.parametrize("reverse", [(False, True, True), [True]])
def test_directions_in_one_pass_equal_the_reference_of_each(scan, reference_scan, make_inputs, backend, reverse):
    each = [make_inputs(*sizes(backend, 2, 70, 9, 4), backend.dtype, seed) for seed in range(len(reverse))]
    stacked = [torch.stack(tensors).detach().requires_grad_() for tensors in zip(*each)]

    def references(*stacked):
        return torch.stack([reference_scan(*(t[g] for t in stacked), reverse=r) for g, r in enumerate(reverse)])

    def scans(*stacked, **options):
        return scan(*stacked, reverse=reverse, **options)

    assert backend.error(scans, references, stacked) < backend.tolerance


@SCANS
@on(REFERENCE)
def test_the_state_is_in_fp32_or_as_x_in_fp64_whatever_the_other_inputs_have(
    scan, reference_scan, make_inputs, backend
):
    inputs = [t.detach() for t in make_inputs(2, 40, 6, 16, torch.bfloat16)]
    for dtype, others, tolerance in ((torch.float64, torch.bfloat16, 1e-12), (torch.bfloat16, torch.float64, 4e-3)):
        x, *rest = inputs[0].to(dtype), *(t.to(others) for t in inputs[1:])
        kept = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.add(t.dtype) or t, lambda t: t):
            y = backend.run(scan)(x.requires_grad_(), *rest)
        assert (y.dtype, kept) == (dtype, {torch.promote_types(dtype, torch.float32)})
        assert relative_error(y, reference_scan(*exact([x, *rest]))) < tolerance


@SCANS
def test_reverse_scan_equals_flipped_forward_scan(scan, reference_scan, make_inputs):
    inputs = [t.detach() for t in make_inputs(2, 37, 6, 4)]
    flipped = [t.flip(1) if t.dim() == 3 else t for t in inputs]
    assert torch.equal(scan(*inputs, reverse=True), scan(*flipped).flip(1))


@SCANS
def test_batch_slices_do_not_change_the_result(scan, reference_scan, make_inputs, monkeypatch):
    inputs = make_inputs(5, 70, 6, 4)
    for elements in (1, 24 * 2, 24 * 3):  # slices of one, two or three images
        monkeypatch.setattr(torch_scan, "SLICE_ELEMENTS", elements)
        assert REFERENCE.error(scan, reference_scan, inputs) < 1e-12


@SCANS
@on(REFERENCE, CPU)
def test_views_that_are_strided_offset_and_expanded(scan, reference_scan, make_inputs, backend):
    views = []
    for t in make_inputs(3, 11, 8, 4, backend.dtype):
        padded = torch.full([n + 3 for n in t.shape[::-1]], float("nan"), dtype=t.dtype)
        view = padded[tuple(slice(1, n + 1) for n in t.shape[::-1])].permute(*reversed(range(t.dim())))
        view.copy_(t.detach())
        views.append(view.requires_grad_())
    assert backend.error(scan, reference_scan, views) < backend.tolerance
    one = [t.detach()[:1] if t.dim() == 3 else t.detach() for t in views]
    many = [t.expand(3, *t.shape[1:]) if t.dim() == 3 else t for t in one]
    assert torch.equal(backend.run(scan)(*many), backend.run(scan)(*one).expand(3, -1, -1))


@SCANS
@on(REFERENCE, CPU, TRITON, CUDA)
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(scan, reference_scan, make_inputs, backend):
    inputs = make_inputs(*sizes(backend, 2, 9, 4, 4), backend.dtype)
    frozen = inputs.pop(2).detach()

    def with_frozen(f):
        return lambda *t, **options: f(*t[:2], frozen.to(t[0]), *t[2:], **options)

    assert backend.error(with_frozen(scan), with_frozen(reference_scan), inputs) < backend.tolerance


@on(REFERENCE, REFERENCE._replace(dtype=torch.float32), CPU, TRITON)
@pytest.mark.parametrize("step_logit", [-1e4, -100.0, -88.9, 88.9, 100.0, 1e4])
def test_extreme_logits_stay_finite_and_right(step_logit, backend):
    inputs = longhorn_inputs(*sizes(backend, 2, 20, 6, 4), backend.dtype)
    inputs[1] = torch.full_like(inputs[1], step_logit).requires_grad_()
    actual = outputs_and_gradients(backend.run(longhorn_scan), inputs)
    expected = outputs_and_gradients(reference.longhorn, exact(inputs), inputs[0].dtype)
    for i, (a, truth) in enumerate(zip(actual, expected, strict=True)):
        assert torch.isfinite(a).all()
        if i != 2:  # the gradient of saturated logits is below the reference's rounding error
            torch.testing.assert_close(a.double(), truth, rtol=1e-4, atol=1e-5)
    assert actual[2].abs().max() < 1e-6


@on(REFERENCE, CPU, TRITON)
@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_zero_and_large_keys(scale, backend):
    inputs = longhorn_inputs(*sizes(backend, 2, 50, 6, 16), torch.float32)
    k = inputs[2].detach()
    inputs[2] = (scale * k / k.norm(dim=-1, keepdim=True)).requires_grad_()
    assert backend.error(longhorn_scan, reference.longhorn, inputs) < 1e-5


@SCANS
@on(REFERENCE, CPU)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_infinity_propagate(scan, reference_scan, make_inputs, poison, backend):
    inputs = [t.detach().clone() for t in make_inputs(2, 12, 4, 4, backend.dtype)]
    inputs[0][0, 5, 1] = poison
    finite = torch.isfinite(backend.run(scan)(*inputs))
    assert not finite[0, 5:, 1].any()
    finite[0, 5:, 1] = True
    assert finite.all()  # a non-finite x affects only its own channel, from its own token on


@SCANS
def test_memory_kept_for_backward_is_a_state_every_16_tokens(scan, reference_scan, make_inputs):
    B, L, D, N = 2, 128, 8, 16
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        scan(*make_inputs(B, L, D, N))
    states = [t for t in saved if t.dim() == 5]
    assert [t.shape for t in states] == [(1, L // 16, B, N, D)]


@SCANS
@on(REFERENCE, CPU)
def test_autocast_does_not_reach_the_state(scan, reference_scan, make_inputs, backend):
    inputs = make_inputs(2, 40, 8, 16, torch.float32)
    expected = outputs_and_gradients(backend.run(scan), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = outputs_and_gradients(backend.run(scan), inputs)
    for a, truth in zip(actual, expected, strict=True):
        assert torch.equal(a, truth)


@SCANS
@on(REFERENCE, CPU, TRITON, CUDA)
@pytest.mark.parametrize(("B", "L"), [(0, 3), (2, 0)])
def test_empty_batch_and_empty_sequence(scan, reference_scan, make_inputs, B, L, backend):
    inputs = make_inputs(B, L, 4, 4, backend.dtype)
    y, *gradients = outputs_and_gradients(backend.run(scan), inputs)
    assert y.shape == (B, L, 4)
    assert [g.shape for g in gradients] == [t.shape for t in inputs]
    assert not any(g.any() for g in gradients)


@SCANS
@on(REFERENCE, CPU, TRITON, CUDA)
def test_operator_registrations(scan, reference_scan, make_inputs, backend):
    stacked = [t.detach()[None].to(backend.device) for t in make_inputs(*sizes(backend, 2, 40, 4, 4), backend.dtype)]
    recurrence, A = "longhorn", None
    if scan is selective_scan:
        recurrence, A = "selective", stacked.pop(2)
    x, step_logits, k, q, skip, step_bias = stacked
    if backend is REFERENCE:
        inputs = [*(t.transpose(1, 2) for t in (x, step_logits, k)), *([] if A is None else [A.mT])]
        function, arguments = torch_scan._scan_forward, (recurrence, q.transpose(1, 2), inputs, True)
    else:
        tensors = x, step_logits, k, q, A, skip, step_bias
        function, arguments = scan_op.scan.default, (backend.name, recurrence, *tensors, [True], True)
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(), arguments)
    torch.library.opcheck(function, arguments, atol=1e-5, rtol=1e-4)


@SCANS
# The reference backend runs fp64, and the cpu backend runs fp32.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiles_without_graph_breaks(scan, reference_scan, make_inputs, dtype):
    inputs = make_inputs(2, 40, 4, 4, dtype)
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    for actual, truth in zip(outputs_and_gradients(compiled, inputs), outputs_and_gradients(scan, inputs)):
        torch.testing.assert_close(actual, truth)


@SCANS
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_second_derivative_is_refused(scan, reference_scan, make_inputs, backend):
    inputs = make_inputs(1, 5, 3, 4, torch.float32)
    (dx,) = torch.autograd.grad(scan(*inputs, backend=backend).square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(dx.sum(), inputs[:1])


# Tests of rejected inputs


def test_inputs_with_inconsistent_shapes_are_rejected():
    x, logits, k, q, skip, _ = (t.detach() for t in longhorn_inputs(2, 6, 4, 3))
    with pytest.raises(ValueError, match=r"k must have shape \(B, L, N\).*L = 6.*k \(2, 5, 3\)"):
        longhorn_scan(x, logits, k[:, :5], q)
    with pytest.raises(ValueError, match="x must have shape"):
        longhorn_scan(x[0], logits, k, q)
    with pytest.raises(ValueError, match="backend must be one of .*auto.*cuda.*triton.*reference.*got 'fast'"):
        longhorn_scan(x, logits, k, q, backend="fast")
    with pytest.raises(ValueError, match=r"x must have shape \(G, B, L, D\)"):
        longhorn_scan(x, logits, k, q, reverse=(False, True))
    stacked = [t.expand(3, *t.shape) for t in (x, logits, k, q, skip)]
    assert longhorn_scan(*stacked, reverse=[True, False, False]).shape == (3, 2, 6, 4)
    with pytest.raises(ValueError, match=r"x must have shape \(G, B, L, D\) with G = 2"):
        longhorn_scan(*stacked, reverse=(False, True))
    with pytest.raises(ValueError, match=r"skip must have shape \(G, D\) with G = 3, D = 4.*skip \(4,\)"):
        longhorn_scan(*stacked[:4], skip, reverse=(False, True, True))


@pytest.mark.parametrize(
    ("scan", "name", "position", "letters"),
    [
        (longhorn_scan, "beta_logits", 1, "B, L, D"), (longhorn_scan, "k", 2, "B, L, N"),
        (longhorn_scan, "q", 3, "B, L, N"), (longhorn_scan, "skip", 4, "D"), (longhorn_scan, "beta_bias", 5, "D"),
        (selective_scan, "dt_logits", 1, "B, L, D"), (selective_scan, "A", 2, "D, N"),
        (selective_scan, "b", 3, "B, L, N"), (selective_scan, "c", 4, "B, L, N"), (selective_scan, "skip", 5, "D"),
        (selective_scan, "dt_bias", 6, "D"),
    ],
)  # fmt: skip
def test_every_argument_is_checked_under_its_name(scan, name, position, letters):
    inputs = [t.detach() for t in (longhorn_inputs if scan is longhorn_scan else selective_inputs)(2, 6, 4, 3)]
    wrong = inputs[position]
    narrow = wrong[..., :-1]  # the error names both shapes, because either of two tensors may be wrong
    for t, message in (
        (narrow, "must have shape .* got .*" + re.escape(f"{name} {tuple(narrow.shape)}")),
        (wrong.unsqueeze(0), rf"^{name} must have shape \({letters}\) with .*"),
        (wrong.bool(), f"^dtype of {name} must be a floating-point dtype, got torch.bool"),
        (wrong.to("meta"), f"^{name} must be on cpu, as x, got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            scan(*inputs[:position], t, *inputs[position + 1 :])
