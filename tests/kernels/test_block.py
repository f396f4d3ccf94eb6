"""Tests of the fused block against the unfused block.

On a CPU, reference implementations replace the kernels, which checks the algebra, or the kernels are emulated. On a
GPU, the kernels run.
"""

import copy
import itertools
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import blocks
import emulator
import naive_model
import pytest
import timm
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from blocks import MIXERS, make_block, operator_on_a_cpu, options_of, outcome, weights_of
from emulator import EMULATED
from models import assert_same_output_and_gradients, random_images, small, stochastic_depth
from models import with_random_parameters as randomised
from reference_kernels import ReferenceKernels
from scans import relative_error
from timm.layers import DropPath
from torch.utils._pytree import tree_leaves

from vil.kernels import backends
from vil.kernels.block import backward, block_op, consecutive, contract, forward, reference
from vil.kernels.block import fused as fused_operators
from vil.kernels.block.weights import Normed
from vil.kernels.cuda import launches
from vil.kernels.scan import heuristics as variants
from vil.models import dispatch
from vil.models.block import Blocks, LonghornMixer, MambaMixer
from vil.models.tokens import middle_token


@pytest.fixture
def reference_kernels(monkeypatch):
    """Replace kernels by fp64 reference implementations.

    The yielded list records for each block whether the previous block passed its norm to the block.
    """
    handed, pack_weights = [], ReferenceKernels.pack_weights
    monkeypatch.setattr(ReferenceKernels, "pack_weights", lambda *a: handed.append(a[3] is None) or pack_weights(*a))
    for module in (block_op, forward, backward, consecutive):
        monkeypatch.setattr(module, "kernels", ReferenceKernels)
    for module in (forward, backward):
        monkeypatch.setattr(module, "scans", ReferenceKernels)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    as_on_a_gpu = dict(DTYPES=(torch.float32, torch.float64), backend_for=lambda device: "cuda")
    for module in (contract, fused_operators):
        monkeypatch.setattr(module, "FP32", torch.float64)
        monkeypatch.setattr(module, "backends", SimpleNamespace(**{**vars(backends), **as_on_a_gpu}))
    saved_rows = contract._saved_rows
    # reference kernels do not save states, and save all other tensors in fp64
    monkeypatch.setattr(
        contract, "_saved_rows", lambda *a: [(*row[:3], None) for row in saved_rows(*a) if "states" not in row[0]]
    )
    with operator_on_a_cpu():
        yield handed


@pytest.fixture
def plain():
    """Return a function that disables fused blocks until the end of the test."""
    yield lambda: dispatch.set_fused(False)
    dispatch.set_fused(True)


@pytest.mark.parametrize("size", [(16, 80), (32, 48)])
@pytest.mark.parametrize("mixer", ["vil_tiny", "vim_tiny"])
def test_a_model_of_fused_blocks_equals_the_independent_implementation(mixer, size, reference_kernels):
    """In train and eval mode, a model with fused blocks equals an independent implementation in fp64."""
    model = randomised(small(mixer, depth=3, img_size=size, drop_path_rate=0.5))
    x, weights = random_images(5, 3, *size, dtype=torch.float64), dict(model.named_parameters())
    scales = stochastic_depth([0, 0.25, 0.5], len(x), seed=3)
    assert sum(scale.eq(0).sum() for scale in scales[1:]) in range(2, 9)

    def whole(x):
        return model.forward_head(model.forward_features(x))

    for checkpointing, function, handed in (
        (False, model, [False, True, True]), (True, model, [False] * 3), (False, whole, [False, True, True]),
    ):  # fmt: skip
        model.set_grad_checkpointing(checkpointing)
        reference_kernels.clear()
        torch.manual_seed(3)
        y = function(x)
        assert reference_kernels == handed
        assert_same_output_and_gradients(model, y, naive_model.model(x, weights, scales=scales))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), naive_model.model(x, weights), rtol=0, atol=1e-11)


@pytest.mark.parametrize("between", ["hook", "eps", "dtype", "unfused"])
def test_a_norm_is_not_passed_on_if_a_change_intervenes_between_fused_blocks(between, reference_kernels, plain):
    """A block passes no norm on after a hook, or to a block that is unfused or has another eps or dtype."""
    model = randomised(small(depth=3, img_size=32)).eval()
    if between == "hook":
        model.blocks[0].register_forward_hook(lambda module, args, output: output * torch.arange(32))
    elif between == "eps":
        model.blocks[1].norm.eps = 0.1
    elif between == "dtype":
        model.blocks[1].to(torch.float32)
    else:
        model.blocks[1].mixer.out_proj.register_forward_hook(lambda module, args, output: 2 * output)
    x = random_images(2, 3, 32, 32, dtype=torch.float64)
    y = model(x)
    assert len(reference_kernels) == (2 if between == "unfused" else 3)
    plain()
    tolerance = 1e-5 if between == "dtype" else 1e-11
    torch.testing.assert_close(y, model(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("at_once", [False, True])
def test_second_derivatives_raise_instead_of_being_zero(at_once, reference_kernels, monkeypatch):
    """Second derivatives raise an error, because the gradient of a gradient penalty would otherwise silently be
    incomplete.
    """
    monkeypatch.setattr(block_op, "is_eager", lambda t: at_once)
    model = randomised(small(depth=2, img_size=32)).eval()
    x = random_images(2, 3, 32, 32, dtype=torch.float64).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    (again,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    torch.testing.assert_close(again, dx)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(again.square().sum(), x, retain_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        again.square().sum().backward()


def replace_weight(block):
    block.mixer.in_proj.weight = torch.nn.Parameter(torch.randn_like(block.mixer.in_proj.weight))


def call_through(block):
    """Replace the `forward` of a block's out_proj on the instance, as offloading libraries such as Accelerate do."""
    forward = block.mixer.out_proj.forward
    block.mixer.out_proj.forward = lambda y: 2 * forward(y)


CHANGES = {
    "weights in place": lambda block: block.mixer.out_proj.weight.data.mul_(2),
    "another parameter": replace_weight,
    "other memory for a parameter": lambda block: setattr(block.norm.weight, "data", block.norm.weight.data * 3),
    "a state dict": lambda block: block.load_state_dict(make_block(LonghornMixer, 32, seed=7).double().state_dict()),
    "a hook": lambda block: block.mixer.in_proj.register_forward_hook(lambda module, args, out: 2 * out),
    "a hook ahead": lambda block: block.mixer.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a hook on the block": lambda block: block.register_forward_hook(lambda module, args, out: 2 * out),
    "a forward of an instance": call_through,
    "a wrapper": lambda block: setattr(
        block.mixer, "in_proj", torch.nn.Sequential(block.mixer.in_proj, torch.nn.Softplus())
    ),
    "a parametrisation": lambda block: torch.nn.utils.parametrizations.weight_norm(block.mixer.in_proj),
    "pruning": lambda block: torch.nn.utils.prune.random_unstructured(block.mixer.out_proj, "weight", 0.5),
    "another block": lambda block: block.__setattr__("mixer", make_block(MambaMixer, 32, seed=5).double().mixer),
    "another eps": lambda block: setattr(block.norm, "eps", 0.1),
    "another scale": lambda block: setattr(block, "drop_path", blocks.Scale(torch.tensor([2.0, 3.0]).double())),
    "stochastic depth": lambda block: setattr(block, "drop_path", DropPath(0.25, scale_by_keep=False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fused_model_is_correct_after_its_modules_or_weights_change(change, reference_kernels, plain):
    """A model that has already run gives correct outputs and gradients after changes of its blocks."""
    model = randomised(small(depth=2, img_size=32)).train()
    x = random_images(2, 3, 32, 32, dtype=torch.float64)
    model(x).sum().backward()
    assert reference_kernels
    for block in model.blocks:
        CHANGES[change](block)
        found = {}
        for fused in (True, False):
            dispatch.set_fused(fused)
            model.zero_grad()
            torch.manual_seed(0)
            y = model(x)
            y.square().sum().backward()
            found[fused] = [y.detach(), *(p.grad for p in model.parameters())]
        dispatch.set_fused(True)
        torch.testing.assert_close(found[True], found[False], rtol=1e-9, atol=1e-9)


def test_a_model_with_parameters_of_the_caller_and_a_hook_on_every_module(reference_kernels, plain):
    model, other = (randomised(small(depth=2, img_size=32)).eval() for _ in range(2))
    x = random_images(2, 3, 32, 32, dtype=torch.float64)
    expected = other(x)
    found = torch.func.functional_call(model, dict(other.named_parameters()), (x,))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        torch.testing.assert_close(other(x), expected, rtol=1e-11, atol=1e-11)
    finally:
        handle.remove()
    assert seen.count(LonghornMixer) == 2


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(
    ("how", "tokens", "middle"),
    [(how, *case) for how in ("at once", "by reference") for case in ((9, 0), (9, 1), (8, 1), (1, 1), (2, 1))]
    + [("compiled", 9, 1)],
)
def test_the_operator_and_its_reference_have_the_gradients_of_the_plain_block(
    mixer, scaled, how, tokens, middle, reference_kernels, plain
):
    """In fp64, outputs and gradients of the fused block and of its reference equal those of the unfused block."""
    plain()
    block = make_block(mixer, 24, dtype=torch.float64)
    x, dy = torch.randn(2, 3, tokens, 24, dtype=torch.float64)
    scale = torch.tensor([0.0, 1.25, 1.25], dtype=torch.float64) if scaled else None
    if scaled:
        block.drop_path = blocks.Scale(scale)
    expected = outcome(block, x, dy, class_token_only=bool(middle))

    block.zero_grad()
    arguments = x.requires_grad_(), weights_of(block), options_of(block, x.dtype, bool(middle)), scale
    if how == "by reference":
        y = reference.block(*arguments)
        y = middle_token(y) if middle else y
    else:
        torch.compiler.reset()
        compiled = torch.compile(block_op.run_blocks, fullgraph=True, backend="aot_eager")
        x, *of_block = arguments
        y, _ = (compiled if how == "compiled" else block_op.run_blocks)(x, *[[a] for a in of_block])
    y.backward(dy[:, : y.shape[1]])
    found = {name: parameter.grad for name, parameter in block.named_parameters()}
    torch.testing.assert_close({"y": y.detach(), "x": x.grad, **found}, expected)


@pytest.mark.parametrize("middle", [False, True])
def test_compiled_blocks_that_pass_on_norms_have_the_gradients_of_plain_ones(middle, reference_kernels, plain):
    """Compiled fused blocks have the gradients of unfused blocks in fp64."""
    chain = Blocks(*[make_block(LonghornMixer, 24, seed=i, dtype=torch.float64) for i in range(3)])
    x, dy = torch.randn(2, 3, 9, 24, dtype=torch.float64)
    plain()
    expected = outcome(chain, x, dy, class_token_only=middle)
    dispatch.set_fused(True)
    torch.compiler.reset()
    found = outcome(torch.compile(chain, fullgraph=True, backend="aot_eager"), x, dy, class_token_only=middle)
    torch.testing.assert_close({name.removeprefix("_orig_mod."): t for name, t in found.items()}, expected)
    assert reference_kernels == [False, True, True]


@pytest.mark.parametrize("how", ["eager", "observed", "compiled"])
@pytest.mark.parametrize(
    ("mixer", "pool", "middle"),
    [(LonghornMixer, "rows", False), (LonghornMixer, "columns", True), (MambaMixer, None, True)],
)
def test_runs_of_blocks_have_the_gradients_of_plain_blocks(
    mixer, pool, middle, how, reference_kernels, plain, monkeypatch
):
    """Eight blocks, fused into groups of six and two, have the same fp64 gradients as eight unfused blocks."""
    monkeypatch.setattr(block_op, "is_eager", lambda t: how == "eager" and not torch.compiler.is_compiling())
    modules = [make_block(mixer, 24, 0.2, seed=i, pool=pool, dtype=torch.float64) for i in range(8)]
    chain = Blocks(*modules)
    x, dy = torch.randn(2, 3, 10, 24, dtype=torch.float64)
    arguments = dict(grid=(3, 3), class_token_only=middle)
    plain()
    torch.manual_seed(1)
    expected = outcome(chain, x, dy, **arguments)
    dispatch.set_fused(True)
    torch.compiler.reset()
    called = torch.compile(chain, fullgraph=True, backend="aot_eager") if how == "compiled" else chain
    torch.manual_seed(1)
    found = outcome(called, x, dy, **arguments)
    torch.testing.assert_close({name.removeprefix("_orig_mod."): t for name, t in found.items()}, expected)
    assert reference_kernels[:8] == [False] + [True] * 7


@pytest.mark.parametrize("how", ["eager", "observed"])
def test_blocks_of_different_sizes_or_kinds_do_not_share_a_call(how, reference_kernels, plain, monkeypatch):
    monkeypatch.setattr(block_op, "is_eager", lambda t: how == "eager")
    kinds = [dict(), dict(), dict(pool="rows"), dict(pool="columns")]
    modules = [make_block(LonghornMixer, 24, seed=i, dtype=torch.float64, **kind) for i, kind in enumerate(kinds)]
    modules[0].mixer = LonghornMixer(24, conv_width=3).double()
    chain = Blocks(*modules)
    x, dy = torch.randn(2, 3, 10, 24, dtype=torch.float64)
    found = outcome(chain, x, dy, grid=(3, 3))
    assert len(reference_kernels) == 4
    plain()
    torch.testing.assert_close(found, outcome(chain, x, dy, grid=(3, 3)))


@pytest.mark.parametrize("how", ["eager", "observed"])
def test_an_output_without_a_gradient_has_zero_gradients(how, reference_kernels, monkeypatch):
    """A function after the block returns None as its gradient, so autograd passes None for all outputs of the block."""

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    monkeypatch.setattr(block_op, "is_eager", lambda t: how == "eager")
    block = make_block(LonghornMixer, 24, dtype=torch.float64)
    x = torch.randn(2, 10, 24, dtype=torch.float64, requires_grad=True)
    Constant.apply(block(x)).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_models_call_kernels_only_through_dispatch(reference_kernels, monkeypatch):
    """Models reach kernels only through vil.models.dispatch, and vil.kernels never calls back into vil.models."""
    monkeypatch.setattr(block_op, "is_eager", lambda t: True)
    model, paths = small(depth=2, img_size=32).double().eval(), []
    pack_weights = ReferenceKernels.pack_weights

    def kernel(*arguments):
        modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(None)]
        rooms = [name if ".models." in name else "vil.kernels" for name in modules if name.startswith("vil.")]
        paths.append([room.removeprefix("vil.") for room, _ in itertools.groupby(reversed(rooms))])
        return pack_weights(*arguments)

    monkeypatch.setattr(ReferenceKernels, "pack_weights", kernel)
    model(random_images(1, 3, 32, 32, dtype=torch.float64))
    assert paths == [["models.vision_longhorn", "models.block", "models.dispatch", "kernels"]] * 2


@pytest.mark.parametrize("runs_at_once", [False, True])
def test_a_frozen_model_gives_its_images_a_gradient(runs_at_once, reference_kernels, plain, monkeypatch):
    monkeypatch.setattr(block_op, "is_eager", lambda t: runs_at_once)
    model = randomised(small(depth=2, img_size=32)).eval().requires_grad_(False)
    x = random_images(2, 3, 32, 32, dtype=torch.float64).requires_grad_()
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert reference_kernels
    plain()
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), x)[0])


@pytest.mark.parametrize("runs_at_once", [False, True])
def test_blocks_after_frozen_blocks_get_gradients(runs_at_once, reference_kernels, plain, monkeypatch):
    monkeypatch.setattr(block_op, "is_eager", lambda t: runs_at_once)
    model = randomised(small(depth=4, img_size=32)).eval().requires_grad_(False)
    trained = [*model.blocks[2:].requires_grad_().parameters()]
    x = random_images(2, 3, 32, 32, dtype=torch.float64)
    found = torch.autograd.grad(model(x).square().sum(), trained)
    assert len(reference_kernels) == 4
    plain()
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), trained))


# Tests that need a GPU


# Shapes (B, L, C) cover partial vectors and warps, a single token, long sequences, and large batches.
SHAPES = [(4, 197, 384), (1, 50, 100), (3, 1, 64), (2, 1030, 48), (33, 33, 192), (1, 7, 18), (110, 133, 192)]
TOLERANCE = {None: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}


@pytest.mark.gpu
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mixer", MIXERS)
def test_fused_block_equals_the_plain_one_in_fp64(mixer, shape, middle, poison, plain):
    """The errors of a fused block against fp64 are within the tolerance or twice the errors of the unfused block."""
    block = make_block(mixer, shape[2], device="cuda")
    x, dy = torch.randn(2, *shape, device="cuda")
    truth = outcome(copy.deepcopy(block).double(), x.double(), dy.double(), class_token_only=middle)
    for autocast, tolerance in TOLERANCE.items():
        assert dispatch.fused_block(block, x) is not None
        fused, again = [outcome(block, x, dy, autocast, class_token_only=middle) for _ in range(2)]
        plain()
        reference = outcome(block, x, dy, autocast, class_token_only=middle)
        dispatch.set_fused(True)
        for name, expected in truth.items():
            assert torch.equal(fused[name], again[name]), name
            if expected.norm() == 0:  # with a single token, decay rates have a gradient of 0
                assert fused[name].norm() == 0, name
                continue
            error = relative_error(fused[name], expected)
            # The tolerance is larger for `middle`, because gradients are then sums of few terms, which may cancel.
            most = max(3 * tolerance if middle else tolerance, 2 * relative_error(reference[name], expected))
            assert error < most, (autocast, name, error)


@pytest.mark.gpu
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("shape", [(64, 197, 384), (64, 197, 192), (2, 70, 64)])
def test_passing_norms_between_blocks_is_bitwise_identical(shape, middle):
    """Blocks that pass the norm of their output to the next block are bitwise identical to blocks that do not."""
    chain = Blocks(*[make_block(LonghornMixer, shape[2], seed=i) for i in range(3)]).cuda()
    x, dy = torch.randn(2, *shape, device="cuda")
    found = outcome(chain, x, dy, torch.bfloat16, class_token_only=middle)
    first, second, third = chain
    chain.forward = lambda x, **kwargs: Blocks(third)(second(first(x)), **kwargs)
    for name, expected in outcome(chain, x, dy, torch.bfloat16, class_token_only=middle).items():
        assert torch.equal(found[name], expected), name


@EMULATED
# The second case runs gate and out_proj in the kernel for few tokens, and the fourth case in the Hopper kernel.
@pytest.mark.parametrize(
    ("shape", "multiprocessors", "hopper", "dtype", "middle"),
    [
        ((1, 70, 100), 1, False, torch.bfloat16, False), ((2, 17, 192), 132, False, torch.float16, True),
        ((2, 33, 192), 1, False, torch.bfloat16, False),
        *(((2, 33, 192), 1, True, torch.bfloat16, middle) for middle in (False, True)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mixer", MIXERS)
def test_fused_block_emulated_on_a_cpu_equals_the_independent_one(
    mixer, shape, multiprocessors, hopper, dtype, middle, monkeypatch, autocast_on_gpus
):
    """A fused block with emulated kernels, and PyTorch instead of cuBLAS, equals an independent implementation."""
    tolerance = 2.5e-2 if dtype == torch.bfloat16 else 3e-3
    blocks.on_an_emulated_gpu(monkeypatch, multiprocessors, hopper)
    project = hopper and mixer is LonghornMixer
    launched, projecting = noted(monkeypatch, project)
    block = make_block(mixer, shape[2], drop_path=0.25).train()
    block.norm.eps = 1e-3
    x, dy, dnext = torch.randn(3, *shape)
    dnext = dnext if hopper and not middle else None
    truth = exactly(block, x, dy, dnext, middle)

    autocast_on_gpus(dtype)
    with operator_on_a_cpu():
        with emulator.compiling():
            by_kernels(block, x, dy, dnext, middle, hopper, dtype)
        found, given = by_kernels(block, x, dy, dnext, middle, hopper, dtype)
    assert set(projecting) == {project} or not hopper
    assert ("gate_outproj_backward" in launched) == (given is not None) == (dnext is not None)
    norms = ReferenceKernels.rms_norm(found["y"].double().flatten(0, 1), 1e-3, torch.float64)
    for value, norm in zip(given or (), norms):
        blocks.close(value, norm, dtype, "norm")
    for name, expected in truth.items():
        assert relative_error(found[name], expected) < (3 * tolerance if middle else tolerance), name


def noted(monkeypatch, project):
    """Run CUDA kernels in the emulator, and return two lists that later launches fill.

    The first list contains the launched entry points. The second list states for each scan whether its kernel also
    multiplies by step_proj.
    """
    monkeypatch.setattr(backends, "backend_for", lambda device: "cuda")
    launched, projecting = [], []
    monkeypatch.setattr(
        launches, "launch", lambda source, entry, *args: launched.append(entry) or emulator.launch(source, entry, *args)
    )
    choose, schedule = variants.choose, variants.Schedule(variants.FORWARD_MMA[1], 1)
    monkeypatch.setattr(
        variants, "choose", lambda kind, *a: schedule if project and kind == "forward" else choose(kind, *a)
    )
    scan_forward = forward.scans.scan_forward

    def scan_and_note(*arguments, schedule, step_proj_GDR):
        projecting.append(step_proj_GDR is not None)
        return scan_forward(*arguments, schedule=schedule, step_proj_GDR=step_proj_GDR)

    monkeypatch.setattr(forward.scans, "scan_forward", scan_and_note)
    for name in ("forward", "backward"):
        foretold = as_foretold(getattr(block_op, f"_{name}"), getattr(block_op, f"_fake_{name}"))
        monkeypatch.setattr(block_op, f"_{name}", foretold)
    return launched, projecting


def exactly(block, x, dy, dnext, middle):
    """Return the output and gradients of an independent implementation of the block in fp64.

    `dnext` is the gradient of the output of a following RMSNorm without weight, or None.
    """
    (scale,) = stochastic_depth([0.25], len(x), seed=1, dtype=x.dtype)
    assert scale.all()
    weights = {name: p.detach().double().requires_grad_() for name, p in block.named_parameters()}
    x = x.double().requires_grad_()
    y = naive_model.block(x, weights, naive_model.OURS, scale, eps=block.norm.eps)
    y = middle_token(y) if middle else y
    loss = (y * dy[:, : y.shape[1]]).sum()
    if dnext is not None:
        xhat, _ = ReferenceKernels.rms_norm(y.flatten(0, 1), block.norm.eps, torch.float64)
        loss = loss + (xhat.view_as(y) * dnext).sum()
    loss.backward()
    return {"y": y.detach(), "x": x.grad, **{name: w.grad for name, w in weights.items()}}


def by_kernels(block, x, dy, dnext, middle, amid_others, dtype):
    """Return the fused operator's outputs (also the norm for the next block) and gradients.

    If `amid_others` is True, the operator receives the norm of its input, as inside a model.
    """
    x, normed = x.clone().requires_grad_(), None
    if amid_others:
        xhat, rstd = ReferenceKernels.rms_norm(x.flatten(0, 1), block.norm.eps, dtype)
        normed = Normed(xhat, rstd.detach())
    torch.manual_seed(1)
    run, weights = dispatch.fused_block(block, x)
    options = dispatch.options_of(block, weights, None, middle, amid_others)
    y, given = run(x, [weights], [options], [dispatch.path_scale(block, x)], normed)
    results, gradients = [y], [dy[:, : y.shape[1]]]
    if given:
        results, gradients = [y, given.xhat], [*gradients, dnext.flatten(0, 1).to(dtype)]
    dx, *gradients = torch.autograd.grad(results, [x, *block.parameters()], gradients)
    names = [name for name, _ in block.named_parameters()]
    return {"y": y.detach(), "x": dx, **dict(zip(names, gradients))}, given


def as_foretold(run, foretell):
    """Wrap `run` to check that shapes and dtypes equal those of `foretell`, the fake implementation."""

    def checked(*arguments):
        results = run(*arguments)
        for result, foretold in zip(tree_leaves(results), tree_leaves(foretell(*arguments)), strict=True):
            assert (result.shape, result.dtype) == (foretold.shape, foretold.dtype)
        return results

    return checked


@pytest.fixture
def autocast_on_gpus():
    """Return a function that enables CUDA autocast. Without a GPU, `torch.autocast` would do nothing."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def switch(enabled, dtype):
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)

    yield lambda dtype: switch(True, dtype)
    switch(*before)


@pytest.mark.gpu
def test_backward_of_a_block_needs_at_most_the_memory_of_five_scan_inputs():
    block, (B, L, C) = make_block(LonghornMixer, 384, device="cuda"), (4, 2048, 384)
    x = torch.randn(B, L, C, device="cuda", requires_grad=True)
    torch.cuda.empty_cache()  # empty the cache, whose blocks may be up to 1 MiB larger than requested
    for _ in range(2):  # only the second call is measured, because the first call also allocates caches
        with torch.autocast("cuda", torch.bfloat16):
            y = block(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y.backward(y.detach())
        del y
    assert torch.cuda.max_memory_allocated() - before < 5 * (2 * B * L * 2 * C * 2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("mixer", "middle"), [(LonghornMixer, True), (MambaMixer, False)])
@pytest.mark.parametrize("count", [1, 2])
def test_the_operator_of_one_and_of_two_blocks_passes_opcheck(count, mixer, middle, device, monkeypatch):
    """`vil::block` passes the checks of schema, autograd, fake results and dynamic shapes by torch.library.opcheck."""
    if device == "cpu":
        blocks.on_an_emulated_gpu(monkeypatch)
    block = make_block(mixer, 16, device=device)
    x, xhat = torch.randn(2, 2, 9, 16, device=device, requires_grad=True).unbind()
    options, normed = options_of(block, torch.float32, middle, norm_next=True), [xhat.flatten(0, 1), x.new_ones(18)]
    scales, weights = [x.new_ones(2), None][:count], count * weights_of(block).flat()
    arguments = *options[:-1], [], x, normed, scales, weights, True
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    with operator_on_a_cpu():
        torch.library.opcheck(torch.ops.vil.block.default, arguments, test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_compiled_and_checkpointed_and_captured_blocks_equal_the_eager_one(autocast):
    block = make_block(LonghornMixer, 64, device="cuda")
    x, dy = torch.randn(2, 4, 70, 64, device="cuda")
    expected = outcome(block, x, dy, autocast)
    compiled = torch.compile(block, fullgraph=True)
    for name, value in outcome(block, x, dy, autocast).items():
        assert torch.equal(value, expected[name])
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        torch.testing.assert_close(compiled(x), expected["y"])
        checkpointed = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        block.zero_grad()
        checkpointed.backward(dy)
        for name, parameter in block.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = block(x)
        captured.fill_(float("nan"))
        graph.replay()
    assert torch.equal(captured, expected["y"])


@pytest.mark.gpu
def test_models_in_concurrent_threads_and_streams_equal_sequential_runs():
    """Models that run concurrently in several threads and streams return the results of sequential runs."""
    torch.manual_seed(0)
    model = timm.create_model("vil_tiny", img_size=64, depth=3, num_classes=5).cuda()
    images = [torch.randn(2 + i % 3, 3, 64, 64, device="cuda") for i in range(8)]

    def outcome(x):
        # Autocast's cache of cast weights is disabled, because threads share the cache but use separate streams.
        with torch.cuda.stream(torch.cuda.Stream()), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = model(x)
            return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]

    torch.cuda.synchronize()
    expected = [outcome(x) for x in images]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(outcome, images))
    torch.cuda.synchronize()
    for results, alone in zip(found, expected):
        # Results are close but not identical, because cuBLAS may choose other algorithms.
        for one, other in zip(results, alone, strict=True):
            assert relative_error(one, other.double()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "size", "batch", "mode"),
    [("vil_tiny", 64, 8, None), ("vil_tiny", 224, 128, None), ("vil_tiny_pooled", 224, 128, "reduce-overhead")],
)
def test_a_compiled_training_step_has_the_gradients_of_the_eager_one(name, size, batch, mode):
    """Compiled and eager gradients agree in bf16, with and without norms that blocks pass to the next block."""
    model = timm.create_model(name, img_size=size, depth=3, num_classes=5).cuda()
    images = torch.randn(batch, 3, size, size, device="cuda")

    def gradients(forward):
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(images).square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(3):  # in the last iteration, "reduce-overhead" replays CUDA graphs
        found = gradients(compiled)
    for value, truth in zip(found, expected):
        assert relative_error(value, truth) < 0.03


@pytest.mark.gpu
def test_models_in_16_bits_and_of_images_in_any_layout():
    model = timm.create_model("vil_tiny", img_size=64, depth=2, num_classes=5).cuda().eval()
    x = torch.randn(2, 3, 64, 64, device="cuda")
    fused = model(x)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), fused)
    half = copy.deepcopy(model).bfloat16()
    assert dispatch.fused_block(half.blocks[0], half.embed(x.bfloat16())) is not None
    assert relative_error(half(x.bfloat16()), fused) < 3e-2
