"""Tests of the fused block on CPUs against `naive_model` and the unfused block, and of when a block runs fused."""

import copy
from types import SimpleNamespace

import naive_model
import pytest
import torch
from scans import relative_error
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vil.kernels.block import cpu_tokens
from vil.models import dispatch
from vil.models.block import Block, Blocks, LonghornMixer, MambaMixer
from vil.models.tokens import middle_token

MIXERS = pytest.mark.parametrize("mixer", [LonghornMixer, MambaMixer])


def a_block(mixer, C, conv_width=4, state_size=16, seed=0, pool=None):
    """Return a block with an unusual eps and noise added to all weights, so that none keeps its initial value."""
    torch.manual_seed(seed)
    block = Block(C, mixer, pool=pool)
    block.norm.eps = 0.1
    block.mixer = mixer(C, conv_width=conv_width, state_size=state_size, pool=pool)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return block


@pytest.fixture
def calls(monkeypatch):
    """Return a list that records, for each call of the block's scan kernel, whether states are saved for backward."""
    made, scans = [], cpu_tokens.scans

    def forward(*arguments):
        made.append(arguments[-1])
        return scans.forward(*arguments)

    monkeypatch.setattr(cpu_tokens, "scans", SimpleNamespace(forward=forward, backward=scans.backward))
    return made


def gradients(y, block, x, seed=1):
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad(y, [x, *block.parameters()], dy.to(y.dtype))


# Shapes (B, L, C) with L around the filter width and the chunk length, and with more channels than one task computes.
@MIXERS
@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 2, 8), (1, 3, 24), (2, 5, 24), (3, 70, 40), (1, 130, 64)])
@pytest.mark.parametrize("scaled", [False, True])
def test_output_and_gradients_equal_the_naive_block(mixer, shape, scaled, poison, calls):
    B, L, C = shape
    block, x = a_block(mixer, C), torch.randn(B, L, C).requires_grad_()
    scale = torch.tensor([1.5, 0.0, 2.0])[:B] if scaled else None
    run, weights = dispatch.fused_block(block, x)
    y, normed = run(x, [weights], [dispatch.options_of(block, weights)], [scale])
    exact = {name: p.detach().double().requires_grad_() for name, p in block.named_parameters()}
    x_exact = x.detach().double().requires_grad_()
    truth = naive_model.block(x_exact, exact, naive_model.OURS, scale, block.norm.eps)
    assert relative_error(y, truth) < 1e-6
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).double()
    expected = torch.autograd.grad(truth, [x_exact, *exact.values()], dy)
    for name, actual, e in zip(["x", *exact], gradients(y, block, x), expected, strict=True):
        assert relative_error(actual, e) < 1e-5, name
    assert calls == [True]
    assert normed is None


@MIXERS
@pytest.mark.parametrize(("pool", "state_size"), [(None, 4), ("rows", 16)])
def test_other_filters_and_numbers_of_states(mixer, pool, state_size):
    """A fused block with another filter width, and a full block with another number of states, equal unfused blocks.

    The numbers of channels, 20 and 40, are not multiples of the vector width.
    """
    block = a_block(mixer, 20, conv_width=3, state_size=state_size, pool=pool)
    x = torch.randn(2, 10, 20, requires_grad=True)
    y = block(x)
    assert y.grad_fn.name() == "_BlockBackward"
    dispatch.set_fused(False)
    plain = block(x)
    assert plain.grad_fn.name() != "_BlockBackward"
    assert relative_error(y, plain.double()) < 1e-6
    for a, e in zip(gradients(y, block, x), gradients(plain, block, x), strict=True):
        assert relative_error(a, e.double()) < 1e-5


@MIXERS
def test_layouts_inference_and_the_class_token(mixer, calls):
    block, x = a_block(mixer, 24), torch.randn(2, 24, 9).mT
    expected = block(x.contiguous()).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(block(x), expected)
            assert torch.equal(Blocks(block)(x, class_token_only=True), expected[:, 4:5])
            # outputs of a smaller batch are only close, because matrix products of other sizes round differently
            assert relative_error(block(x[1:]), expected[1:].double()) < 1e-6
    assert calls == [True] + [False] * 6
    with torch.no_grad():
        for parameter in block.parameters():  # give parameters unusual strides
            storage = torch.full((*parameter.shape[::-1], 2), float("nan"))
            storage[..., 0].copy_(parameter.permute(*reversed(range(parameter.dim()))))
            parameter.set_(storage[..., 0].permute(*reversed(range(parameter.dim()))))
        assert torch.equal(block(x), expected)


@MIXERS
def test_frozen_tensors_get_no_gradient_and_change_no_other_gradient(mixer, calls):
    """Frozen tensors get no gradient, and the gradients of other tensors do not change.

    Frozen are the input and some weights, or all weights, as for the gradient of an image.
    """
    block, x = a_block(mixer, 16), torch.randn(2, 5, 16, requires_grad=True)
    tensors = {"x": x, **dict(block.named_parameters())}
    expected = dict(zip(tensors, torch.autograd.grad(block(x).sum(), tensors.values())))
    for frozen in ({"x", "norm.weight", "mixer.directions.1.conv1d.weight"}, set(tensors) - {"x"}):
        for name, t in tensors.items():
            t.requires_grad_(name not in frozen)
            t.grad = None
        block(x).sum().backward()
        for name, t in tensors.items():
            assert t.grad is None if name in frozen else torch.equal(t.grad, expected[name]), name
    x.requires_grad_(False)
    block(x)  # without gradients, no states are saved
    assert calls == [True] * 3 + [False]


@MIXERS
@pytest.mark.parametrize("pool", [None, "rows"])
def test_gradients_computed_under_autocast_equal_those_outside(mixer, pool):
    block, x = a_block(mixer, 16, pool=pool), torch.randn(2, 10, 16, requires_grad=True)
    expected = gradients(block(x), block, x)
    y = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(y, block, x)
    assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("biases", [(-100.0, -1.3), (-1.3, -100.0), (-50.0, -45.0)])
def test_large_negative_inputs_of_one_direction_do_not_change_the_other(biases):
    """A pooled block computes the sigmoids of both directions by one division, whose divisor must not overflow."""
    block, x = a_block(LonghornMixer, 16, pool="rows"), torch.randn(2, 10, 16, requires_grad=True)
    with torch.no_grad():
        for direction, bias in zip(block.mixer.directions, biases):
            direction.conv1d.bias.fill_(bias)
    y = block(x)
    dispatch.set_fused(False)
    exact, x_exact = copy.deepcopy(block).double(), x.detach().double().requires_grad_()
    truth = exact(x_exact)
    assert relative_error(y, truth) < 1e-5
    for a, e in zip(gradients(y, block, x), gradients(truth, exact, x_exact), strict=True):
        assert relative_error(a, e) < 1e-4 or (e.norm() < 1e-12 and a.norm() < 1e-12)


@MIXERS
@pytest.mark.parametrize("pool", [None, "columns"])
def test_results_do_not_depend_on_the_number_of_threads(mixer, pool):
    """Results with several threads equal those with one thread, up to rounding of PyTorch's matrix products.

    Two runs with the same number of threads are bitwise identical.
    """
    block, x = a_block(mixer, 40, pool=pool), torch.randn(3, 37, 40, requires_grad=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        y = block(x)
        expected = [y, *gradients(y, block, x)]
        for threads in (2, 5):
            torch.set_num_threads(threads)
            y = block(x)
            found, again = [y, *gradients(y, block, x)], block(x)
            for a, b, e in zip(found, [again, *gradients(again, block, x)], expected, strict=True):
                assert relative_error(a, e.double()) < 1e-6
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


# Grids with an even number of rows or columns, an odd number, or only one are separate cases, because the class token
# is in the middle.
@MIXERS
@pytest.mark.parametrize("pool", ["rows", "columns"])
@pytest.mark.parametrize("grid", [(3, 4), (4, 3), (3, 3), (7, 5), (1, 5), (5, 1), (1, 1), (17, 3), (2, 70)])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("middle", [False, True])
def test_a_pooled_block_and_its_gradients_equal_its_parts_in_fp64(mixer, pool, grid, scaled, middle, poison):
    """The output and the gradients of a fused pooled block equal those of the unfused block in fp64.

    If `middle` is set, only the output of the class token is needed.
    """
    block, x = a_block(mixer, 40, pool=pool), torch.randn(3, grid[0] * grid[1] + 1, 40, requires_grad=True)
    scale = torch.tensor([1.5, 0.0, 2.0]) if scaled else None
    run, weights = dispatch.fused_block(block, x)
    options = dispatch.options_of(block, weights, dispatch.lines_of(block, x, grid), class_token_only=middle)
    y, again = (run(x, [weights], [options], [scale])[0] for _ in range(2))
    found = [y, *gradients(y, block, x)]
    with torch.no_grad():
        assert torch.equal(run(x, [weights], [options], [scale])[0], y)
    assert y.grad_fn.name() == "_BlockBackward"
    for a, b in zip(found, [again, *gradients(again, block, x)], strict=True):
        assert torch.equal(a, b)

    names, x = ["y", "x", *dict(block.named_parameters())], x.detach().double().requires_grad_()
    truth = block.double()(x, grid=grid)
    truth = truth if scale is None else x + scale[:, None, None] * (truth - x)
    truth = middle_token(truth) if middle else truth
    for name, a, e in zip(names, found, [truth, *gradients(truth, block, x)], strict=True):
        assert relative_error(a, e) < (2e-6 if name == "y" else 1e-5), name


@MIXERS
@pytest.mark.parametrize("pool", [None, "rows"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_only_the_output_of_their_image(mixer, pool, poison):
    block, x = a_block(mixer, 24, pool=pool), torch.randn(3, 10, 24)
    x[1, 4, 3] = poison
    with torch.no_grad():
        finite = block(x).isfinite().all(-1)
        assert not finite[1].any()
        assert finite[[0, 2]].all()


def test_checkpointing_recomputes_the_same(calls):
    block, x = a_block(LonghornMixer, 24), torch.randn(2, 9, 24, requires_grad=True)
    expected = gradients(block(x), block, x)
    y = checkpoint(block, x, use_reentrant=False)
    for a, e in zip(gradients(y, block, x), expected, strict=True):
        assert torch.equal(a, e)
    y = Blocks(block)(x, checkpointing=True)
    for a, e in zip(gradients(y, block, x), expected, strict=True):
        assert torch.equal(a, e)
    assert calls == [True] * 5  # with checkpointing, the operator runs in forward and again in backward


def test_a_second_derivative_is_refused():
    block, x = a_block(LonghornMixer, 16), torch.randn(1, 4, 16, requires_grad=True)
    (dx,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        dx.square().sum().backward()


@torch.no_grad()
def test_a_block_after_a_custom_module_with_another_dtype_runs_unfused(calls):
    class Rounding(torch.nn.Identity):
        def forward(self, x):
            return x.bfloat16()

    block, x = a_block(LonghornMixer, 16), torch.randn(2, 9, 16)
    assert torch.equal(Blocks(Rounding(), block)(x), block(x.bfloat16()))
    assert not calls


@torch.no_grad()
def test_a_custom_module_can_register_a_hook_on_a_later_block():
    """A hook that a custom module registers on a later block runs, because blocks are fused only up to that module."""

    class Registering(torch.nn.Identity):
        def forward(self, x):
            last.register_forward_hook(lambda *_: called.append(True))
            return x

    called, (first, last), x = [], (a_block(LonghornMixer, 16, seed=seed) for seed in (0, 1)), torch.randn(2, 9, 16)
    Blocks(first, Registering(), last)(x)
    assert called == [True]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_compilers_tracers_and_flop_counters_see_the_unfused_block(calls):
    block, x = a_block(LonghornMixer, 16), torch.randn(1, 4, 16)
    with torch.no_grad():
        expected = block(x)
        assert calls == [False]
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)
        exported = torch.export.export(block, (x,))
        assert any("vil.scan" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(exported.module()(x), expected)
        traced = torch.jit.trace(block, torch.randn(1, 4, 16), check_trace=False)
        torch.testing.assert_close(traced(x), expected)
        functional = torch.func.functional_call(block, dict(block.named_parameters()), x)
        torch.testing.assert_close(functional, expected)
        calls.clear()  # forget the calls of functional_call, which may run fused
        with FlopCounterMode(display=False) as flops:
            block(x)
        assert flops.get_total_flops() > 0
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(block(x), expected, rtol=0.05, atol=0.05)
        torch.testing.assert_close(block.double()(x.double()).float(), expected)
        torch.testing.assert_close(block.bfloat16()(x), expected, rtol=0.05, atol=0.05)
    assert not calls
