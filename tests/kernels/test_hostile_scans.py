"""The scan's operators called directly: what does not fit is named before a pointer is taken; all else is computed.

On a CPU the CUDA kernels run emulated, which finds what is read or written outside of tensors.
"""

import random
import re
import shutil

import pytest
import torch
from hostile import (
    LAYOUTS,
    RECURRENCES,
    assert_each_wrong_tensor_is_refused,
    assert_same,
    changed,
    emulate,
    kinds,
    on_a_gpu,
    on_this_machine,
    places,
    plain,
    random_tensors,
    run,
)
from scans import StandIn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from vil.kernels import checks
from vil.kernels.scan import heuristics, operator

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
recurrences = pytest.mark.parametrize("recurrence", RECURRENCES)


@pytest.fixture
def launched(monkeypatch):
    return emulate(monkeypatch)


def scan_call(recurrence, backend, L):
    G, B, D, N, new = 2, 1 if backend == "triton" else 3, 8, 4, random_tensors()
    named = dict(backend=backend, recurrence=recurrence, x_GBLD=new(G, B, L, D), step_logits_GBLD=new(G, B, L, D))
    named |= dict(k_GBLN=new(G, B, L, N), q_GBLN=new(G, B, L, N))
    named |= dict(A_GDN=-new(G, D, N).exp() if recurrence == "selective" else None)
    return named | dict(skip_GD=new(G, D), step_bias_GD=new(G, D), reverse=[False, True], keep=True)


def scan_backward_call(recurrence, backend, L):
    named = scan_call(recurrence, backend, L)
    G, B, L, D = named["x_GBLD"].shape
    named |= dict(dy_GBLD=torch.randn(G, B, L, D), states_GBSND=torch.randn(G, B, (L - 1) // 64, 4, D))
    return {argument.name: named[argument.name] for argument in torch.ops.vil.scan_backward.default._schema.arguments}


def reference_call(recurrence):
    G, L, B, N, D, new = 2, 35, 3, 4, 6, random_tensors()
    inputs = [new(G, L, B, D), new(G, L, B, D), new(G, L, B, N)]
    inputs += [-new(G, N, D).exp()] if recurrence == "selective" else []
    return dict(recurrence=recurrence, q_GLBN=new(G, L, B, N), inputs=inputs, keep=True)


def reference_backward_call(recurrence):
    named, new = reference_call(recurrence), random_tensors(1)
    given = dict(recurrence=recurrence, dy_GLBD=new(2, 35, 3, 6), chunk_states_GSBND=new(2, 3, 3, 4, 6))
    return given | {name: named[name] for name in ("q_GLBN", "inputs")}


CALLS = {
    "scan": lambda recurrence: scan_call(recurrence, "cuda", 66),
    "scan_backward": lambda recurrence: scan_backward_call(recurrence, "cuda", 66),
    "scan by Triton": lambda recurrence: scan_call(recurrence, "triton", 3),
    "scan_backward by Triton": lambda recurrence: scan_backward_call(recurrence, "triton", 3),
    "scan by Numba": lambda recurrence: scan_call(recurrence, "cpu", 66),
    "scan_backward by Numba": lambda recurrence: scan_backward_call(recurrence, "cpu", 66),
    "reference_scan": reference_call,
    "reference_scan_backward": reference_backward_call,
}
calls = pytest.mark.parametrize("call", CALLS)


@calls
@recurrences
def test_what_does_not_fit_is_refused_by_name_before_anything_is_launched(call, recurrence, launched):
    assert_each_wrong_tensor_is_refused(call, CALLS[call](recurrence))
    assert launched == []


@calls
@recurrences
def test_compilers_refuse_the_same(call, recurrence):
    """Of tensors that are nowhere."""
    named = tree_map_only(torch.Tensor, lambda t: t.to("meta"), CALLS[call](recurrence))
    run(call, named)
    assert_each_wrong_tensor_is_refused(call, named, but=["elsewhere"])


def with_or_without_A(A):
    return torch.zeros(2, 8, 4) if A is None else None


OTHERS = [
    *(("scan", {name: None}) for name in ("x_GBLD", "step_logits_GBLD", "k_GBLN", "q_GBLN")),
    *(("scan", dict(reverse=[True] * count)) for count in (0, 1, 3, 66)),
    ("scan", dict(backend="fast")),
    ("scan", dict(recurrence="hippo")),
    ("scan", dict(A_GDN=with_or_without_A)),
    *(("scan_backward", {name: None}) for name in ("dy_GBLD", "x_GBLD", "step_logits_GBLD", "k_GBLN", "states_GBSND")),
    ("scan_backward", dict(backend="reference")),
    ("scan_backward", dict(recurrence="hippo")),
    ("scan_backward", dict(reverse=[True])),
    ("scan_backward", dict(A_GDN=with_or_without_A)),
    ("scan_backward", dict(states_GBSND=torch.empty(0))),  # of a forward that was not to keep them
    ("scan_backward", dict(states_GBSND=torch.zeros(2, 3, 2, 4, 8))),  # of more tokens
    ("scan_backward", dict(states_GBSND=torch.zeros(2, 3, 1, 8, 4))),
    ("reference_scan", dict(recurrence="hippo")),
    ("reference_scan", dict(q_GLBN=None)),
    ("reference_scan", dict(inputs=lambda inputs: [None, *inputs[1:]])),
    ("reference_scan", dict(inputs=lambda inputs: inputs[:-1])),
    ("reference_scan", dict(inputs=[])),
    ("reference_scan", dict(inputs=lambda inputs: [*inputs, inputs[-1]])),
    ("reference_scan_backward", dict(inputs=lambda inputs: inputs[:-1])),
    *(("reference_scan_backward", {name: None}) for name in ("dy_GLBD", "chunk_states_GSBND", "q_GLBN")),
    ("reference_scan_backward", dict(chunk_states_GSBND=torch.zeros(2, 2, 3, 4, 6))),
]


@recurrences
@pytest.mark.parametrize(("call", "others"), OTHERS)
def test_what_is_no_tensor_and_lists_of_other_lengths_are_refused_by_name(call, others, recurrence, launched):
    named = CALLS[call](recurrence)
    others = {name: value(named[name]) if callable(value) else value for name, value in others.items()}
    with pytest.raises((ValueError, RuntimeError), match=rf"\b{next(iter(others))}\b"):
        run(call, named | others)
    assert launched == []


@pytest.mark.parametrize("N", [1, 5, 12, 128])
def test_numbers_of_states_that_there_are_no_kernels_for_are_refused(N, launched):
    k = torch.zeros(2, 3, 66, N)
    with pytest.raises(ValueError, match=rf"states in k_GBLN, {N} is none of|up to 64 states .* not {N}"):
        run("scan", scan_call("longhorn", "cuda", 66) | dict(k_GBLN=k, q_GBLN=k))
    assert launched == []


@needs_compiler
@calls
@recurrences
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_what_a_plain_copy_gives(layout, call, recurrence, launched):
    laid_out = tree_map_only(torch.Tensor, LAYOUTS[layout], CALLS[call](recurrence))
    assert_same(run(call, laid_out), run(call, tree_map_only(torch.Tensor, plain, laid_out)))


@needs_compiler
@pytest.mark.parametrize("call", ["scan", "scan_backward"])
@recurrences
def test_one_tensor_at_an_odd_address_changes_nothing(call, recurrence, launched):
    """Where the others could be moved as vectors, as of weights in one buffer."""
    named = CALLS[call](recurrence)
    expected = run(call, named)
    for place in places(named):
        assert_same(run(call, changed(named, place, LAYOUTS["at an odd address"])), expected)
    assert launched


@needs_compiler
@pytest.mark.parametrize(
    ("call", "variants"), [("scan", heuristics.FORWARD_SIMT), ("scan_backward", heuristics.BACKWARD)]
)
def test_a_skip_and_bias_at_an_odd_address_are_read_by_any_variant(call, variants, launched, monkeypatch):
    """The widest, which a GPU chooses for many channels."""
    monkeypatch.setattr(heuristics, "choose", lambda *_: heuristics.Schedule(variants["longhorn"][0], 2))
    named = CALLS[call]("longhorn")
    expected = run(call, named)
    for name in ("skip_GD", "step_bias_GD"):
        assert_same(run(call, changed(named, (name, None), LAYOUTS["at an odd address"])), expected)


@pytest.mark.parametrize("elements", [1, 2, 4])
def test_what_is_8_bytes_off_is_copied_to_where_16_can_be_read_at_once(elements):
    """By the widest instruction; what is there already stays."""
    memory = torch.randn(64)
    t = memory[elements:][:32].view(4, 8)
    assert checks.aligned(memory) is memory
    found = checks.aligned(t)
    assert torch.equal(found, t)
    assert found.data_ptr() % 16 == 0
    assert (found is t) == (elements == 4)


# What compilers are told


OPTIONS = [
    *(("scan", dict(keep=keep, skip_GD=None)) for keep in (False, True)),
    *(("scan by Triton", dict(keep=keep)) for keep in (False, True)),
    *((call, dict()) for call in ("scan_backward", "scan_backward by Triton", "reference_scan_backward")),
    *(("scan", dict(x_GBLD=torch.zeros(2, *size, 8), step_logits_GBLD=torch.zeros(2, *size, 8),
                    k_GBLN=torch.zeros(2, *size, 4), q_GBLN=torch.zeros(2, *size, 4)))
      for size in ((0, 66), (3, 0), (3, 64), (3, 65))),
    *(("reference_scan", dict(keep=keep)) for keep in (False, True)),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("call", "options"), OPTIONS)
@recurrences
def test_compilers_are_told_what_comes_out(call, options, recurrence, launched):
    """Shapes, dtypes and how results lie in memory."""
    named = CALLS[call](recurrence) | options
    with FakeTensorMode() as mode:
        foretold = run(call, tree_map_only(torch.Tensor, mode.from_tensor, named))
    assert kinds(run(call, named)) == kinds(foretold)


@needs_compiler
def test_backward_of_a_scan_that_kept_no_states_says_so(launched):
    named = scan_call("longhorn", "cuda", 66) | dict(keep=False)
    named["x_GBLD"].requires_grad_()
    y, _ = run("scan", named)
    with pytest.raises(ValueError, match=r"states_GBSND must have shape .*S = 1.*\(0,\)"):
        y.sum().backward()


# Calls of random sizes


SIZES = dict(G=(0, 1, 2, 3), B=(0, 1, 2), L=(0, 1, 5, 64, 66), D=(0, 1, 8), N=(4, 4, 4, 4, 4, 5))
LAYOUT = dict(x="GBLD", step_logits="GBLD", k="GBLN", q="GBLN", A="GDN", skip="GD", step_bias="GD", reverse="G")


def random_scan(draw):
    """Arguments of a scan of which one may be of another size than the others, and whether none is."""
    recurrence, new = draw.choice(RECURRENCES), random_tensors(draw.randrange(2**31))
    sizes = {letter: draw.choice(choices) for letter, choices in SIZES.items()}
    shapes = {name: [sizes[letter] for letter in layout] for name, layout in LAYOUT.items()}
    absent = [name for name in ("skip", "step_bias") if draw.random() < 0.2] + ["A"] * (recurrence == "longhorn")
    fits = sizes["N"] == 4
    if draw.random() < 0.3:
        name = draw.choice([name for name in LAYOUT if name not in absent])
        dim = draw.randrange(len(LAYOUT[name]))
        other = draw.choice(SIZES[LAYOUT[name][dim]])
        fits &= other == shapes[name][dim]
        shapes[name][dim] = other
    tensors = [None if name in absent else new(*shapes[name]) for name in LAYOUT if name != "reverse"]
    if tensors[4] is not None:
        tensors[4] = -tensors[4].exp()
    return recurrence, tensors, [draw.random() < 0.5 for _ in range(shapes["reverse"][0])], fits


@needs_compiler
def test_scans_of_random_sizes_are_refused_or_right(launched):
    draw, definition = random.Random(0), StandIn()
    refused = 0
    for _ in range(400):
        recurrence, tensors, reverse, fits = random_scan(draw)
        if not fits:
            refused += 1
            with pytest.raises(ValueError, match=r"_G|reverse"):
                operator.scan("cuda", recurrence, *tensors, reverse, True)
            continue
        y, states = operator.scan("cuda", recurrence, *tensors, reverse, True)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        gradients = operator.scan_backward("cuda", recurrence, dy, *tensors, states, reverse)
        assert [t.shape for t in (y, *gradients[:4])] == [t.shape for t in (tensors[0], *tensors[:4])]
        if y.numel():
            torch.testing.assert_close(
                y, definition.forward(recurrence, *tensors, reverse, True)[0], rtol=1e-4, atol=1e-4
            )
            truth = definition.backward(recurrence, dy, *tensors, states, reverse)
            for i, (gradient, expected) in enumerate(zip(gradients, truth, strict=True)):
                there = expected.isfinite()  # of skip and bias, if they are given
                assert there.all() or i == 5
                torch.testing.assert_close(gradient[there], expected[there], rtol=1e-3, atol=1e-3)
    assert 100 < refused < 300


# With a GPU


calls_on_a_gpu = pytest.mark.parametrize("call", [call for call in CALLS if "Numba" not in call])


@on_a_gpu
@pytest.mark.parametrize("call", ["scan", "scan_backward", "reference_scan", "reference_scan_backward"])
@recurrences
def test_what_does_not_fit_is_refused_on_a_gpu_which_goes_on(call, recurrence):
    named = on_this_machine(CALLS[call](recurrence))
    assert_each_wrong_tensor_is_refused(call, named)
    torch.cuda.synchronize()
    run(call, named)
    torch.cuda.synchronize()


@on_a_gpu
@calls_on_a_gpu
@recurrences
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_gives_what_a_plain_copy_gives_on_a_gpu(dtype, layout, call, recurrence, poison):
    """All at once, and each alone."""
    per_token = ("x_GBLD", "step_logits_GBLD", "k_GBLN", "q_GBLN", "dy_GBLD")
    named = on_this_machine(CALLS[call](recurrence))
    named = {name: value.to(dtype) if name in per_token else value for name, value in named.items()}
    change = LAYOUTS[layout]
    for laid_out in (
        tree_map_only(torch.Tensor, change, named),
        *(changed(named, place, change) for place in places(named)),
    ):
        assert_same(run(call, laid_out), run(call, tree_map_only(torch.Tensor, plain, laid_out)))
    torch.cuda.synchronize()


@on_a_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("call", ["scan", "scan_backward"])
@recurrences
def test_tensors_on_two_gpus_are_refused(call, recurrence):
    named = on_this_machine(CALLS[call](recurrence))
    for place in places(named):
        wrong = changed(named, place, lambda t: t.to("cuda:1"))
        name = re.escape(place[0]) if place[0] != "x_GBLD" else "move them to one device"
        with pytest.raises(ValueError, match=name):
            run(call, wrong)
