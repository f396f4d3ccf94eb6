"""Operators called directly: what does not fit is named in an error before a pointer is taken; all else is computed.

On a CPU the kernels run emulated, which finds what is read or written outside of tensors.
"""

import random
import re
import shutil

import emulator
import pytest
import torch
from scans import StandIn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from vil.kernels import backends
from vil.kernels.block import contract
from vil.kernels.block import launch as kernels
from vil.kernels.block import operator as operator
from vil.kernels.cuda import compiler, hardware
from vil.kernels.scan import cuda_scan as scan
from vil.kernels.scan import heuristics as variants
from vil.kernels.scan import operator as gpu

from vil import block as vil_block
from vil.block import Block, LonghornMixer, MambaMixer

GPU = torch.cuda.is_available()
RECURRENCES = ("longhorn", "selective")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def on_a_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")(test))


# Calls that are right: arguments by name. Sizes differ, so that none passes for another.


def random_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(size, generator=generator)


def scan_call(recurrence, backend, L):
    G, B, D, N, new = 2, 1 if backend == "triton" else 3, 8, 4, random_tensors()
    named = dict(backend=backend, recurrence=recurrence, x_GBLD=new(G, B, L, D), step_logits_GBLD=new(G, B, L, D))
    named |= dict(k_GBLN=new(G, B, L, N), q_GBLN=new(G, B, L, N))
    named |= dict(A_GDN=-new(G, D, N).exp() if recurrence == "selective" else None)
    return named | dict(skip_GD=new(G, D), step_bias_GD=new(G, D), reverse=[False, True], keep=True)


def scan_backward_call(recurrence, backend, L):
    named = scan_call(recurrence, backend, L)
    G, B, L, D = named["x_GBLD"].shape
    del named["keep"]
    named |= dict(dy_GBLD=torch.randn(G, B, L, D), states_GBSND=torch.randn(G, B, (L - 1) // 64, 4, D))
    names = re.findall(r"\w+(?=,|\))", str(torch.ops.vil.scan_backward.default._schema).split("->")[0])
    return {name: named[name] for name in names}


def reference_call(recurrence):
    G, L, B, N, D, new = 2, 35, 3, 4, 6, random_tensors()
    inputs = [new(G, L, B, D), new(G, L, B, D), new(G, L, B, N)]
    inputs += [-new(G, N, D).exp()] if recurrence == "selective" else []
    return dict(recurrence=recurrence, q_GLBN=new(G, L, B, N), inputs=inputs, keep=True)


def reference_backward_call(recurrence):
    named = reference_call(recurrence)
    G, L, B, D = named["inputs"][0].shape
    states = torch.randn(G, 3, B, named["q_GLBN"].shape[-1], D)
    return dict(recurrence=recurrence, dy_GLBD=torch.randn(G, L, B, D), chunk_states_GSBND=states) | {
        name: named[name] for name in ("q_GLBN", "inputs")
    }


def block_call(recurrence, L=5):
    B, C, D, N, R, K, new = 2, 16, 24, 4, 3, 4, random_tensors()
    one = [(D, 1, K), (D,), (R + 2 * N, D), (D, R), (D,), (D,), (D, N)]
    directions = [new(*size) / 4 for size in 2 * one[: 7 if recurrence == "selective" else 6]]
    return dict(
        recurrence=recurrence, eps=1e-5, dtype=torch.float32, class_token_only=False, norm_next=True,
        x_BLC=new(B, L, C), normed=[new(B * L, C), new(B * L)], scale_B=new(B), norm_C=new(C), in_proj=new(2 * D, C),
        out_proj=new(C, D), directions=directions, keep=True,
    )  # fmt: skip


def block_backward_call(recurrence, class_token_only=False, prenormed=False):
    named = block_call(recurrence) | dict(class_token_only=class_token_only)
    named |= dict(normed=named["normed"] if prenormed else [])
    with FakeTensorMode(allow_non_fake_inputs=True):
        y, _, saved = operator._fake_block(*named.values())
    new, (B, M, C) = random_tensors(1), y.shape
    saved = [new(*t.shape) / 4 for t in saved] + named["normed"]
    after = [] if class_token_only else [new(B * M, C), new(B * M)]
    given = dict(dnext_TC=new(B * M, C) if after else None, next_normed=after)
    given |= {name: named[name] for name in ("scale_B", "norm_C", "in_proj", "out_proj", "directions")}
    how = dict(recurrence=recurrence, class_token_only=class_token_only, prenormed=prenormed)
    return how | dict(dx_BMC=new(B, M, C)) | given | dict(saved=saved)


CALLS = {
    "scan": lambda recurrence: scan_call(recurrence, "cuda", 66),
    "scan_backward": lambda recurrence: scan_backward_call(recurrence, "cuda", 66),
    "scan by Triton": lambda recurrence: scan_call(recurrence, "triton", 3),
    "scan_backward by Triton": lambda recurrence: scan_backward_call(recurrence, "triton", 3),
    "scan by Numba": lambda recurrence: scan_call(recurrence, "cpu", 66),
    "scan_backward by Numba": lambda recurrence: scan_backward_call(recurrence, "cpu", 66),
    "reference_scan": reference_call,
    "reference_scan_backward": reference_backward_call,
    "block": block_call,
    "block_backward": block_backward_call,
    "block_backward of the class token": lambda recurrence: block_backward_call(recurrence, class_token_only=True),
    "block_backward of a given norm": lambda recurrence: block_backward_call(recurrence, prenormed=True),
}
calls = pytest.mark.parametrize("call", CALLS)
recurrences = pytest.mark.parametrize("recurrence", RECURRENCES)


def run(call, named):
    return getattr(torch.ops.vil, call.split()[0])(*named.values())


def places(named):
    """Where there is a tensor: the name of an argument, and the place in it if it is a list."""
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            yield name, None
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            yield from ((name, i) for i in range(len(value)))


def changed(named, place, change):
    """The same call with another tensor there, or None if it cannot be changed so."""
    name, i = place
    t = change(named[name] if i is None else named[name][i])
    if t is None:
        return None
    return named | {name: t if i is None else [*named[name][:i], t, *named[name][i + 1 :]]}


# What does not fit


def longer(dim):
    return lambda t: torch.cat([t, t.narrow(dim, 0, 1)], dim) if t.dim() > dim and t.shape[dim] else None


def shorter(dim):
    return lambda t: t.narrow(dim, 0, t.shape[dim] - 1) if t.dim() > dim and t.shape[dim] else None


WRONG = {
    "one dimension less": lambda t: t.new_ones(t.shape[1:]),
    "one dimension more": lambda t: t[None],
    "nothing": lambda t: t.new_empty(0) if t.numel() else None,
    "a number": lambda t: t.new_ones(()),
    "transposed": lambda t: t.mT if t.dim() > 1 and t.shape[-1] != t.shape[-2] else None,
    **{f"one more in dimension {dim}": longer(dim) for dim in range(5)},
    **{f"one less in dimension {dim}": shorter(dim) for dim in range(5)},
    "float64": lambda t: t.double(),
    "float16": lambda t: t.half(),
    "int32": lambda t: t.int(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "elsewhere": lambda t: t.cpu() if GPU else t.to("meta"),
}
# Tensors whose dtype or place others are compared with, or that have a size which only they have
FIRST = ("x_GBLD", "x_BLC", "norm_C", "q_GLBN", "dx_BMC", ("saved", 0))


def assert_refused(call, named, place=None, change=""):
    """By an error of Python's that names the argument, and its size or dtype."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run(call, named)
    message = str(caught.value)
    names = [name for name in named if re.search(rf"\b{name}\b", message)]
    assert names, message
    if place and place not in FIRST and place[0] not in FIRST:
        named_one = place[0] if place[1] is None else f"{place[0]}[{place[1]}]"
        assert named_one in message, (message, named_one, change)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The operators of GPUs on a CPU, emulated; what they have launched."""
    launched = []

    def launch(*arguments):
        launched.append(arguments[1])
        return emulator.launch(*arguments)

    module = gpu._module
    monkeypatch.setattr(compiler, "launch", launch)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(hardware, "shared_bytes", lambda device: 227 * 1024)
    monkeypatch.setattr(hardware, "is_hopper", lambda device: False)
    monkeypatch.setattr(gpu, "_module", lambda name, device: scan if name == "cuda" else module(name, device))
    with torch.library._scoped_library("vil", "IMPL") as library:
        library.impl("block", lambda *arguments: operator._block(*arguments), "CPU")
        library.impl("block_backward", lambda *arguments: operator._block_backward(*arguments), "CPU")
        yield launched


def wrong_calls(call, recurrence):
    named = CALLS[call](recurrence)
    if GPU:
        named = tree_map_only(torch.Tensor, lambda t: t.cuda(), named)
    for place in places(named):
        for what, change in WRONG.items():
            wrong = changed(named, place, change)
            if wrong is not None:
                yield place, what, wrong


@calls
@recurrences
def test_what_does_not_fit_is_refused_by_name_before_anything_is_launched(call, recurrence, on_a_cpu):
    count = 0
    for place, what, wrong in wrong_calls(call, recurrence):
        assert_refused(call, wrong, place, what)
        count += 1
    assert count > 40
    assert on_a_cpu == []


@calls
@recurrences
def test_compilers_refuse_the_same(call, recurrence):
    """Of tensors that are nowhere."""
    named = tree_map_only(torch.Tensor, lambda t: t.to("meta"), CALLS[call](recurrence))
    run(call, named)
    for place in places(named):
        for what, change in WRONG.items():
            wrong = what != "elsewhere" and changed(named, place, change)
            if wrong:
                assert_refused(call, wrong, place, what)


def without_last(tensors):
    return tensors[:-1]


OTHERS = [
    ("scan", dict(backend="fast")),
    ("scan", dict(recurrence="hippo")),
    ("scan", dict(reverse=[])),
    ("scan", dict(reverse=[True])),
    ("scan", dict(reverse=[True] * 3)),
    ("scan", dict(reverse=[True] * 66)),
    ("scan", dict(A_GDN=lambda rates: torch.zeros(2, 8, 4) if rates is None else None)),
    *(("scan", {name: None}) for name in ("x_GBLD", "step_logits_GBLD", "k_GBLN", "q_GBLN")),
    ("scan_backward", dict(backend="reference")),
    ("scan_backward", dict(recurrence="hippo")),
    ("scan_backward", dict(reverse=[True])),
    ("scan_backward", dict(A_GDN=lambda rates: torch.zeros(2, 8, 4) if rates is None else None)),
    ("scan_backward", dict(states_GBSND=torch.empty(0))),  # of a forward that was not to keep them
    ("scan_backward", dict(states_GBSND=torch.zeros(2, 3, 2, 4, 8))),  # of more tokens
    ("scan_backward", dict(states_GBSND=torch.zeros(2, 3, 1, 8, 4))),
    *(("scan_backward", {name: None}) for name in ("dy_GBLD", "x_GBLD", "step_logits_GBLD", "k_GBLN", "states_GBSND")),
    ("reference_scan", dict(recurrence="hippo")),
    ("reference_scan", dict(q_GLBN=None)),
    ("reference_scan", dict(inputs=lambda inputs: [None, *inputs[1:]])),
    ("reference_scan", dict(inputs=without_last)),
    ("reference_scan", dict(inputs=[])),
    ("reference_scan", dict(inputs=lambda inputs: [*inputs, inputs[-1]])),
    ("reference_scan_backward", dict(inputs=without_last)),
    *(("reference_scan_backward", {name: None}) for name in ("dy_GLBD", "chunk_states_GSBND", "q_GLBN")),
    ("reference_scan_backward", dict(chunk_states_GSBND=torch.zeros(2, 2, 3, 4, 6))),
    ("block", dict(recurrence="hippo")),
    *(("block", {name: None}) for name in ("x_BLC", "norm_C", "in_proj", "out_proj")),
    ("block", dict(normed=[None, None])),
    ("block", dict(directions=lambda directions: [*directions[:-1], None])),
    ("block", dict(dtype=torch.float64)),
    ("block", dict(dtype=torch.int8)),
    ("block", dict(directions=[])),
    ("block", dict(directions=without_last)),
    ("block", dict(directions=lambda directions: [*directions, directions[-1]])),
    ("block", dict(directions=lambda directions: directions[::-1])),
    ("block", dict(normed=without_last)),
    ("block", dict(normed=lambda normed: normed[::-1])),
    ("block", dict(normed=lambda normed: [*normed, normed[0]])),
    ("block", dict(x_BLC=torch.zeros(0, 5, 16), normed=[], scale_B=None)),
    ("block", dict(x_BLC=torch.zeros(2, 0, 16), normed=[])),
    ("block_backward", dict(recurrence="hippo")),
    *(("block_backward", {name: None}) for name in ("dx_BMC", "norm_C", "in_proj", "out_proj")),
    ("block_backward", dict(saved=lambda saved: [None, *saved[1:]])),
    ("block_backward", dict(class_token_only=True, dnext_TC=None)),
    ("block_backward of the class token", dict(class_token_only=False)),
    ("block_backward", dict(dnext_TC=lambda dnext: dnext, next_normed=[])),
    ("block_backward", dict(next_normed=without_last)),
    ("block_backward", dict(saved=[])),
    ("block_backward", dict(saved=without_last)),
    ("block_backward", dict(saved=lambda saved: [*saved, saved[-1]])),
    ("block_backward", dict(saved=lambda saved: saved[::-1])),
    ("block_backward", dict(directions=without_last)),
]


@recurrences
@pytest.mark.parametrize(("call", "others"), OTHERS)
def test_what_is_no_tensor_and_lists_of_other_lengths_are_refused_by_name(call, others, recurrence, on_a_cpu):
    named = CALLS[call](recurrence)
    others = {name: value(named[name]) if callable(value) else value for name, value in others.items()}
    with pytest.raises((ValueError, RuntimeError), match=rf"\b{next(iter(others))}\b"):
        run(call, named | others)
    assert on_a_cpu == []


WEIGHTS = {"conv": 0, "x_proj": 2, "step_proj": 3, "A_log": 6}


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("conv", (24, 1, 1), "taps in conv, 1 is none of"),
        ("conv", (24, 1, 5), "taps in conv, 5 is none of"),
        ("conv", (24, 1, 0), "taps in conv, 0 is none of"),
        ("x_proj", (11 + 2, 24), "x_proj must have .*11 rows, not .*13"),
        ("x_proj", (0, 24), "x_proj must have .* rows, not .*0"),
        ("step_proj", (24, 0), "step_proj must not be empty"),
    ],
)
def test_weights_of_both_directions_that_there_are_no_kernels_for_are_refused(name, size, reason, on_a_cpu):
    named = block_call("selective")
    for g in (0, 7):
        named["directions"][g + WEIGHTS[name]] = torch.zeros(size)
    with pytest.raises(ValueError, match=reason):
        run("block", named)
    assert on_a_cpu == []


def test_numbers_of_states_that_there_are_no_kernels_for_are_refused(on_a_cpu):
    for N in (1, 5, 12, 128):
        named = block_call("longhorn")
        for g in (2, 8):
            named["directions"][g] = torch.zeros(3 + 2 * N, 24)
        with pytest.raises(ValueError, match=f"states in x_proj, {N} is none of"):
            run("block", named)
        k = torch.zeros(2, 3, 66, N)
        with pytest.raises(ValueError, match=rf"states in k_GBLN, {N} is none of|up to 64 states .* not {N}"):
            run("scan", scan_call("longhorn", "cuda", 66) | dict(k_GBLN=k, q_GBLN=k))
    assert on_a_cpu == []


# Layouts, which are none of the caller's concern


def copied_into(make):
    def copy(t):
        room = make(t)
        return room.copy_(t)

    return copy


LAYOUTS = {
    "at an odd address": copied_into(lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape)),
    "with the first dimension last in memory": copied_into(
        lambda t: t.new_empty(t.shape[::-1]).permute(*range(t.dim())[::-1])
    ),
    "with gaps": copied_into(lambda t: t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))[..., ::2]),
    "with one memory for the last dimension": lambda t: t[..., :1].expand(t.shape) if t.numel() else t,
    "with one memory for the first dimension": lambda t: t[:1].expand(t.shape) if t.numel() else t,
    "in windows that overlap": lambda t: t.flatten().as_strided(t.shape, [1] * t.dim()),
}


def results(call, named):
    """Of packed weights the parts, as what is between them may be anything."""
    found = run(call, named)
    if call == "block" and named["keep"]:
        sizes = kernels.packed_sizes(named["out_proj"], named["directions"])
        found[2][3] = list(kernels.Weights.of(found[2][3], *sizes))
    return found


def assert_same(actual, expected):
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert [t.shape for t in actual] == [t.shape for t in expected]
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4, equal_nan=True)


def plain(t):
    return t.clone(memory_format=torch.contiguous_format)


@needs_compiler
@calls
@recurrences
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_what_a_plain_copy_gives(layout, call, recurrence, on_a_cpu):
    laid_out = tree_map_only(torch.Tensor, LAYOUTS[layout], CALLS[call](recurrence))
    assert_same(results(call, laid_out), results(call, tree_map_only(torch.Tensor, plain, laid_out)))


@needs_compiler
@pytest.mark.parametrize("call", ["scan", "scan_backward", "block", "block_backward"])
@recurrences
def test_one_tensor_at_an_odd_address_changes_nothing(call, recurrence, on_a_cpu):
    """Where the others could be moved as vectors, as of weights in one buffer."""
    named = CALLS[call](recurrence)
    expected = results(call, named)
    for place in places(named):
        assert_same(results(call, changed(named, place, LAYOUTS["at an odd address"])), expected)
    assert on_a_cpu


@needs_compiler
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_skip_and_bias_at_an_odd_address_are_read_by_any_variant(kind, on_a_cpu, monkeypatch):
    """The widest, which a GPU chooses for many channels."""
    variant = (variants.FORWARD_SIMT if kind == "forward" else variants.BACKWARD)["longhorn"][0]
    monkeypatch.setattr(scan, "choose", lambda *_: (variant, 2))
    call = "scan" if kind == "forward" else "scan_backward"
    named = CALLS[call]("longhorn")
    expected = run(call, named)
    for name in ("skip_GD", "step_bias_GD"):
        assert_same(run(call, changed(named, (name, None), LAYOUTS["at an odd address"])), expected)


# What compilers are told


OPTIONS = [
    *(("scan", dict(keep=keep, skip_GD=None)) for keep in (False, True)),
    ("scan by Triton", dict(keep=False)),
    ("scan by Triton", dict()),
    ("scan_backward", dict()),
    ("scan_backward by Triton", dict()),
    *(("scan", dict(zip(("x_GBLD", "step_logits_GBLD", "k_GBLN", "q_GBLN"), sizes))) for sizes in (
        [torch.zeros(2, 0, 66, n) for n in (8, 8, 4, 4)], [torch.zeros(2, 3, 0, n) for n in (8, 8, 4, 4)],
        [torch.zeros(2, 3, 64, n) for n in (8, 8, 4, 4)], [torch.zeros(2, 3, 65, n) for n in (8, 8, 4, 4)],
    )),
    *(("reference_scan", dict(keep=keep)) for keep in (False, True)),
    ("reference_scan_backward", dict()),
    *(
        ("block", dict(class_token_only=only, norm_next=norm_next, keep=keep, scale_B=scale_B, normed=normed))
        for only in (False, True) for norm_next in (False, True) for keep in (False, True)
        for scale_B in (None, torch.ones(2)) for normed in ([], [torch.ones(10, 16), torch.ones(10)])
    ),
    ("block_backward", dict(dnext_TC=None)),
    ("block_backward", dict(dnext_TC=None, next_normed=[])),
    ("block_backward of a given norm", dict()),
    ("block_backward of a given norm", dict(dnext_TC=None)),
    ("block_backward of the class token", dict(scale_B=None)),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("call", "options"), OPTIONS)
def test_compilers_are_told_what_comes_out(call, options, on_a_cpu):
    """Shapes, dtypes and how results lie in memory."""
    for recurrence in RECURRENCES:
        named = CALLS[call](recurrence) | options
        with FakeTensorMode() as mode:
            foretold = run(call, tree_map_only(torch.Tensor, mode.from_tensor, named))
        kinds = [
            [(t.shape, t.dtype, t.stride(), t.device) for t in tree_leaves(r)] for r in (run(call, named), foretold)
        ]
        assert kinds[0] == kinds[1]


def test_a_block_of_the_class_token_alone_has_no_norm_for_the_next(monkeypatch):
    """Which Hopper's kernels compute of all tokens alone."""
    monkeypatch.setattr(kernels, "runs_hopper_kernels", lambda *_: True)
    for only in (False, True):
        named = block_call("longhorn") | dict(class_token_only=only)
        named = tree_map_only(torch.Tensor, lambda t: t.to("meta"), named)
        assert len(run("block", named)[1]) == (0 if only else 2)


@needs_compiler
def test_backward_of_a_scan_that_kept_no_states_says_so(on_a_cpu):
    named = scan_call("longhorn", "cuda", 66) | dict(keep=False)
    named["x_GBLD"].requires_grad_()
    y, _ = run("scan", named)
    with pytest.raises(ValueError, match=r"states_GBSND must have shape .*S = 1.*\(0,\)"):
        y.sum().backward()


# Calls of random sizes


SIZES = {"G": (0, 1, 2, 3), "B": (0, 1, 2), "L": (0, 1, 5, 64, 66), "D": (0, 1, 8), "N": (4, 5)}
LAYOUT = dict(x="GBLD", logits="GBLD", k="GBLN", q="GBLN", rates="GDN", skip="GD", bias="GD")


def random_scan(draw):
    """Arguments of a scan of which some may be of another size than the others, and whether none is."""
    recurrence, new = draw.choice(RECURRENCES), random_tensors(draw.randrange(2**31))
    common = {
        letter: draw.choice(sizes) if letter != "N" or draw.random() < 0.1 else 4 for letter, sizes in SIZES.items()
    }
    tensors, found = {}, {letter: {size} for letter, size in common.items()}
    for name, layout in LAYOUT.items():
        if (name == "rates" and recurrence == "longhorn") or (name in ("skip", "bias") and draw.random() < 0.2):
            tensors[name] = None
            continue
        sizes = dict(common)
        if draw.random() < 0.05:
            letter = draw.choice(layout)
            sizes[letter] = draw.choice(SIZES[letter])
        for letter in layout:
            found[letter].add(sizes[letter])
        tensors[name] = new(*(sizes[letter] for letter in layout))
    if tensors["rates"] is not None:
        tensors["rates"] = -tensors["rates"].exp()
    reverse = [draw.random() < 0.5 for _ in range(common["G"] if draw.random() < 0.95 else draw.choice(SIZES["G"]))]
    found["G"].add(len(reverse))
    fits = all(len(sizes) == 1 for sizes in found.values()) and common["N"] == 4
    return recurrence, list(tensors.values()), reverse, fits


@needs_compiler
def test_scans_of_random_sizes_are_refused_or_right(on_a_cpu):
    draw, definition = random.Random(0), StandIn()
    refused = 0
    for _ in range(400):
        recurrence, tensors, reverse, fits = random_scan(draw)
        if not fits:
            refused += 1
            with pytest.raises(ValueError, match=r"_G|reverse"):
                gpu.scan("cuda", recurrence, *tensors, reverse, True)
            continue
        y, states = gpu.scan("cuda", recurrence, *tensors, reverse, True)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        gradients = gpu.scan_backward("cuda", recurrence, dy, *tensors, states, reverse)
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
        if states.numel():
            with pytest.raises(ValueError, match="states_GBSND"):
                gpu.scan_backward("cuda", recurrence, dy, *tensors, states[:, :, :-1], reverse)
    assert 100 < refused < 300


# Several devices


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, the second one."""

    device = torch.device("cuda", 1)

    def get_device(self):
        return 1


@pytest.mark.parametrize("other", [None, torch.zeros(3).as_subclass(OnGpu), torch.zeros(3, device="meta")])
@pytest.mark.parametrize("first", [True, False])
def test_a_kernel_is_launched_over_tensors_on_one_gpu_alone(other, first):
    y, z = (torch.zeros(2), other) if first else (other, torch.zeros(2))
    arguments = dict(y=y, z=z, z_stride=1, scales=None, gated=None, means=None, tokens=1, L=1, D=1)
    with pytest.raises(ValueError, match=r"gate needs its tensors on one GPU; they are on .*cpu"):
        compiler.launch("block/gate", "gate", dict(INPUT="float"), 1, 32, arguments)


@pytest.fixture
def takes_a_cpu_for_a_gpu(monkeypatch):
    monkeypatch.setattr(backends, "backend_for", lambda device: "cuda" if device.type == "cpu" else "reference")


@pytest.mark.parametrize("mixer", [LonghornMixer, MambaMixer])
def test_a_block_with_a_weight_elsewhere_is_not_fused(mixer, takes_a_cpu_for_a_gpu):
    x = torch.randn(1, 5, 16)
    names = [name for name, _ in Block(16, mixer).named_parameters()]
    for name in names:
        block = Block(16, mixer)
        assert vil_block.fused_block(block, x) is not None
        part, _, weight = name.rpartition(".")
        setattr(block.get_submodule(part), weight, torch.nn.Parameter(block.get_parameter(name).to("meta")))
        assert vil_block.fused_block(block, x) is None, name
    assert len(names) == (15 if mixer is LonghornMixer else 17)


def test_a_block_that_the_kernels_cannot_compute_takes_the_plain_path(takes_a_cpu_for_a_gpu):
    """Also of parts of the right types."""
    x = torch.randn(1, 5, 16)

    def fused(mixer=LonghornMixer, **parts):
        block = Block(16, mixer)
        for name, part in parts.items():
            place, _, last = name.replace("__", ".").rpartition(".")
            block.get_submodule(place).add_module(last, part)
        found = vil_block.fused_block(block, x) is not None
        assert found or block(x).shape == x.shape
        return found

    assert fused()
    assert vil_block.fused_block(Block(16, LonghornMixer).double(), x) is None
    for taps in (1, 2, 3, 4, 5):
        assert fused(lambda dim, taps=taps, **dd: LonghornMixer(dim, conv_width=taps, **dd)) == (taps in (2, 3, 4))
    assert not fused(mixer__in_proj=torch.nn.Linear(16, 64))  # with a bias
    assert not fused(mixer__directions__0__x_proj=torch.nn.Linear(32, 33))
    assert not fused(norm=torch.nn.Identity())
    assert not fused(mixer__out_proj=torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False)))


# With a GPU
calls_on_a_gpu = [call for call in CALLS if "Numba" not in call]


@on_a_gpu
@pytest.mark.parametrize("call", [call for call in calls_on_a_gpu if "Triton" not in call])
@recurrences
def test_what_does_not_fit_is_refused_on_a_gpu_which_goes_on(call, recurrence):
    for place, what, wrong in wrong_calls(call, recurrence):
        assert_refused(call, wrong, place, what)
    torch.cuda.synchronize()
    run(call, tree_map_only(torch.Tensor, torch.Tensor.cuda, CALLS[call](recurrence)))
    torch.cuda.synchronize()


@on_a_gpu
@pytest.mark.parametrize("call", calls_on_a_gpu)
@recurrences
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_gives_what_a_plain_copy_gives_on_a_gpu(dtype, layout, call, recurrence, poison):
    """All at once, and each alone."""
    named = in_dtype(call, CALLS[call](recurrence), dtype)
    change = LAYOUTS[layout]
    for laid_out in (
        tree_map_only(torch.Tensor, change, named),
        *(changed(named, place, change) for place in places(named)),
    ):
        assert_same(results(call, laid_out), results(call, tree_map_only(torch.Tensor, plain, laid_out)))
    torch.cuda.synchronize()


def in_dtype(call, named, dtype):
    """On the GPU, and in this dtype where that is the caller's choice."""
    named = tree_map_only(torch.Tensor, torch.Tensor.cuda, named)
    if call.startswith("scan"):
        per_token = ("x_GBLD", "step_logits_GBLD", "k_GBLN", "q_GBLN", "dy_GBLD")
        return {name: value.to(dtype) if name in per_token else value for name, value in named.items()}
    if call == "block":
        return named | dict(dtype=dtype, normed=[named["normed"][0].to(dtype), named["normed"][1]])
    if call.startswith("block_backward"):
        of = [own or dtype for _, _, own in contract._saved_fields(named["recurrence"])]
        saved, sizes = list(named["saved"]), kernels.packed_sizes(named["out_proj"], named["directions"])
        packed = saved[3].new_zeros(kernels.packed_size(*sizes, dtype), dtype=dtype)
        for part, value in zip(kernels.Weights.of(packed, *sizes), kernels.Weights.of(saved[3], *sizes)):
            part.copy_(value)
        saved = [t.to(own) for t, own in zip(saved, of)]
        saved[3] = packed
        after = [t.to(own) for t, own in zip(named["next_normed"], (dtype, torch.float32))]
        dnext = named["dnext_TC"] if named["dnext_TC"] is None else named["dnext_TC"].to(dtype)
        return named | dict(saved=saved, next_normed=after, dnext_TC=dnext)
    return named


@on_a_gpu
@pytest.mark.parametrize("mixer", [LonghornMixer, MambaMixer])
def test_a_block_with_a_weight_on_the_cpu_gets_pytorchs_error(mixer):
    x = torch.randn(2, 70, 64, device="cuda")
    for name, _ in Block(64, mixer).named_parameters():
        block = Block(64, mixer).cuda()
        weight = block.get_parameter(name)
        weight.data = weight.data.cpu()
        with pytest.raises(RuntimeError, match=r"device|torch\.cuda\.\w*Tensor"):
            block(x)
    torch.cuda.synchronize()


@on_a_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_two_gpus_are_refused_and_blocks_run_on_each():
    block = Block(64, LonghornMixer).to("cuda:1")
    x = torch.randn(2, 70, 64, device="cuda:1")
    y = block(x)
    assert y.device == x.device
    block.norm.weight.data = block.norm.weight.data.to("cuda:0")
    with pytest.raises(RuntimeError, match="device"):
        block(x)
    for call in ("scan", "scan_backward", "block", "block_backward"):
        for recurrence in RECURRENCES:
            named = tree_map_only(torch.Tensor, torch.Tensor.cuda, CALLS[call](recurrence))
            for place in places(named):
                wrong = changed(named, place, lambda t: t.to("cuda:1"))
                with pytest.raises(ValueError, match=place[0] if place[0] not in FIRST else "move them to one device"):
                    run(call, wrong)
