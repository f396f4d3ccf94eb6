"""The operators against `naive`, their gradients, their limits and what they refuse."""

import re

import pytest
import torch
from scans import SCANS, SHAPES, exact, longhorn_inputs, outputs_and_gradients, relative_error, selective_inputs
from vil.kernels import longhorn_scan, selective_scan
from vil.kernels.scan import chunked, naive


@SCANS
@SHAPES
@pytest.mark.parametrize("reverse", [False, True])
def test_output_and_gradients_equal_the_definition(scan, definition, make_inputs, shape, reverse):
    inputs = make_inputs(*shape)
    expected = outputs_and_gradients(definition, inputs, reverse=reverse)
    for actual, truth in zip(outputs_and_gradients(scan, inputs, reverse=reverse), expected):
        assert relative_error(actual, truth) < 1e-12


@SCANS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
def test_low_precision_inputs_lose_only_their_own_rounding(scan, definition, make_inputs, dtype, tolerance):
    inputs = make_inputs(2, 77, 24, 16, dtype)
    expected = outputs_and_gradients(definition, exact(inputs), dtype)
    actual = outputs_and_gradients(scan, inputs)
    assert [t.dtype for t in actual] == [dtype] * len(actual)
    for a, truth in zip(actual, expected):
        assert relative_error(a, truth) < tolerance


@SCANS
def test_gradcheck(scan, definition, make_inputs):
    assert torch.autograd.gradcheck(lambda *t: scan(*t, reverse=True), make_inputs(2, 4, 3, 2))


@SCANS
def test_skip_and_bias_are_optional(scan, definition, make_inputs):
    inputs = make_inputs(2, 9, 6, 4)[:-2]
    for actual, truth in zip(outputs_and_gradients(scan, inputs), outputs_and_gradients(definition, inputs)):
        assert relative_error(actual, truth) < 1e-12


@SCANS
@pytest.mark.parametrize("reverse", [(False, True), (True, True, False), [True]])
def test_directions_in_one_pass_equal_the_definition_of_each(scan, definition, make_inputs, reverse):
    each = [make_inputs(2, 40, 6, 4, seed=g) for g in range(len(reverse))]
    stacked = [torch.stack(tensors).detach().requires_grad_() for tensors in zip(*each)]
    y, *gradients = outputs_and_gradients(scan, stacked, reverse=reverse)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    for g, inputs in enumerate(each):
        truth = definition(*inputs, reverse=reverse[g])
        assert relative_error(y[g], truth) < 1e-12
        for actual, expected in zip(gradients, torch.autograd.grad(truth, inputs, dy[g])):
            assert relative_error(actual[g], expected) < 1e-12


@SCANS
def test_the_state_has_at_least_fp32_whatever_the_other_inputs_have(scan, definition, make_inputs):
    inputs = [t.detach() for t in make_inputs(2, 40, 6, 16, torch.bfloat16)]
    for dtype, others, tolerance in ((torch.float64, torch.bfloat16, 1e-12), (torch.bfloat16, torch.float64, 4e-3)):
        x, *rest = inputs[0].to(dtype), *(t.to(others) for t in inputs[1:])
        y = scan(x, *rest)
        assert y.dtype == dtype
        assert relative_error(y, definition(*exact([x, *rest]))) < tolerance


@SCANS
def test_reverse_scan_equals_flipped_forward_scan(scan, definition, make_inputs):
    inputs = [t.detach() for t in make_inputs(2, 37, 6, 4)]
    flipped = [t.flip(1) if t.dim() == 3 else t for t in inputs]
    assert torch.equal(scan(*inputs, reverse=True), scan(*flipped).flip(1))


@SCANS
def test_batch_slices_do_not_change_the_result(scan, definition, make_inputs, monkeypatch):
    inputs = make_inputs(5, 70, 6, 4)
    expected = outputs_and_gradients(scan, inputs)
    for elements in (1, 24 * 2, 24 * 3):  # one, two and three images of five
        monkeypatch.setattr(chunked, "SLICE_ELEMENTS", elements)
        for actual, truth in zip(outputs_and_gradients(scan, inputs), expected):
            assert relative_error(actual, truth) < 1e-13


@SCANS
def test_strided_and_offset_views(scan, definition, make_inputs):
    inputs = make_inputs(3, 11, 8, 4)
    expected = outputs_and_gradients(scan, inputs)
    views = []
    for t in inputs:
        padded = torch.full([n + 3 for n in t.shape[::-1]], float("nan"), dtype=t.dtype)
        view = padded[tuple(slice(1, n + 1) for n in t.shape[::-1])].permute(*reversed(range(t.dim())))
        view.copy_(t.detach())
        views.append(view.requires_grad_())
    for actual, truth in zip(outputs_and_gradients(scan, views), expected):
        assert relative_error(actual, truth) < 1e-13


@SCANS
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(scan, definition, make_inputs):
    inputs = make_inputs(2, 9, 4, 4)
    expected = outputs_and_gradients(scan, inputs)
    inputs[2] = inputs[2].detach()
    y = scan(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(dy)
    for i, t in enumerate(inputs):
        if i != 2:
            torch.testing.assert_close(t.grad, expected[1 + i])


@pytest.mark.parametrize("logit", [-1e4, -100.0, -88.9, 88.9, 100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_stay_finite_and_right(logit, dtype):
    inputs = longhorn_inputs(2, 20, 6, 4, dtype)
    inputs[1] = torch.full_like(inputs[1], logit).requires_grad_()
    actual = outputs_and_gradients(longhorn_scan, inputs)
    expected = outputs_and_gradients(naive.longhorn, exact(inputs), inputs[0].dtype)
    for i, (a, truth) in enumerate(zip(actual, expected)):
        assert torch.isfinite(a).all()
        if i != 2:  # the gradient of a saturated logit is below rounding in the definition's own form
            torch.testing.assert_close(a.double(), truth, rtol=1e-4, atol=1e-5)
    assert actual[2].abs().max() < 1e-6


@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_zero_and_large_keys(scale):
    inputs = longhorn_inputs(2, 50, 6, 16, torch.float32)
    k = inputs[2].detach()
    inputs[2] = (scale * k / k.norm(dim=-1, keepdim=True)).requires_grad_()
    actual = outputs_and_gradients(longhorn_scan, inputs)
    expected = outputs_and_gradients(naive.longhorn, exact(inputs), inputs[0].dtype)
    for a, truth in zip(actual, expected):
        assert relative_error(a, truth) < 1e-5


@SCANS
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_infinity_propagate(scan, definition, make_inputs, poison):
    inputs = [t.detach().clone() for t in make_inputs(2, 12, 4, 4)]
    inputs[0][0, 5, 1] = poison
    finite = torch.isfinite(scan(*inputs))
    assert not finite[0, 5:, 1].any()
    finite[0, 5:, 1] = True
    assert finite.all()  # other images, tokens before it and other channels


@SCANS
def test_memory_kept_for_backward_is_a_state_every_16_tokens(scan, definition, make_inputs):
    B, L, D, N = 2, 128, 8, 16
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        scan(*make_inputs(B, L, D, N))
    states = [t for t in saved if t.dim() == 5]
    assert [t.shape for t in states] == [(1, L // 16, B, N, D)]


@SCANS
def test_autocast_does_not_reach_the_state(scan, definition, make_inputs):
    inputs = make_inputs(2, 40, 8, 16, torch.float32)
    expected = outputs_and_gradients(scan, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = outputs_and_gradients(scan, inputs)
    for a, truth in zip(actual, expected):
        assert torch.equal(a, truth)


@SCANS
@pytest.mark.parametrize("B", [0, 2])
def test_empty_batch_and_empty_sequence(scan, definition, make_inputs, B):
    assert scan(*make_inputs(B, 0 if B else 3, 4, 4)).shape == (B, 0 if B else 3, 4)


@SCANS
def test_operator_registrations(scan, definition, make_inputs):
    inputs = [t.unsqueeze(0) for t in make_inputs(2, 40, 4, 4)]
    if scan is longhorn_scan:
        x, logits, k, q = (t.transpose(1, 2) for t in inputs[:4])
        arguments = ("longhorn", q, [x, logits, k], True)
    else:
        x, dt, b, c = (t.transpose(1, 2) for t in (*inputs[:2], *inputs[3:5]))
        arguments = ("selective", c, [x, dt, b, inputs[2].transpose(-1, -2)], True)
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(), arguments)
    torch.library.opcheck(chunked._scan_forward, arguments)


@SCANS
def test_compiles_without_graph_breaks(scan, definition, make_inputs):
    inputs = make_inputs(2, 40, 4, 4)
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    for actual, truth in zip(outputs_and_gradients(compiled, inputs), outputs_and_gradients(scan, inputs)):
        torch.testing.assert_close(actual, truth)


def test_refuses_what_does_not_fit():
    x, logits, k, q, skip, bias = (t.detach() for t in longhorn_inputs(2, 6, 4, 3))
    with pytest.raises(ValueError, match=r"k must have shape \(B, L, N\).*L = 6.*k \(2, 5, 3\)"):
        longhorn_scan(x, logits, k[:, :5], q)
    with pytest.raises(ValueError, match="skip must have shape"):
        longhorn_scan(x, logits, k, q, skip[:2])
    with pytest.raises(ValueError, match="x must have shape"):
        longhorn_scan(x[0], logits, k, q)
    with pytest.raises(ValueError, match="q is torch.int64"):
        longhorn_scan(x, logits, k, q.long())
    with pytest.raises(ValueError, match="beta_bias is on meta but x on cpu"):
        longhorn_scan(x, logits, k, q, skip, bias.to("meta"))
    with pytest.raises(ValueError, match="backend 'fast' is none of .*auto.*cuda.*triton.*reference"):
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
    narrow = wrong[..., :-1]  # of two that differ, it cannot know which is meant, but shows both
    for t, message in (
        (narrow, "must have shape .* got .*" + re.escape(f"{name} {tuple(narrow.shape)}")),
        (wrong.unsqueeze(0), rf"^{name} must have shape \({letters}\) with .*"),
        (wrong.bool(), f"^{name} is torch.bool; it must be a floating-point tensor"),
        (wrong.to("meta"), f"^{name} is on meta but x on cpu; move them to one device"),
    ):
        with pytest.raises(ValueError, match=message):
            scan(*inputs[:position], t, *inputs[position + 1 :])
