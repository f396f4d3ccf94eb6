"""The block's operators called directly: what does not fit is named before a pointer is taken; all else is computed.

On a CPU the kernels run emulated, which finds what is read or written outside of tensors.
"""

import shutil

import pytest
import torch
from hostile import (
    FIRST,
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from vil.kernels.block import contract
from vil.kernels.block import launch as kernels
from vil.kernels.block import operator as operator
from vil.kernels.block.weights import BlockWeights, DirectionWeights

from vil.block import Block, LonghornMixer, MambaMixer

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def block_call(recurrence, L=5):
    B, C, D, N, R, K, new = 2, 16, 24, 4, 3, 4, random_tensors()
    one = [(D, 1, K), (D,), (R + 2 * N, D), (D, R), (D,), (D,), (D, N)]
    directions = [new(*size) / 4 for size in 2 * one[: 7 if recurrence == "selective" else 6]]
    return dict(
        recurrence=recurrence, eps=1e-5, dtype=torch.float32, class_token_only=False, norm_next=True,
        x_BLC=new(B, L, C), normed=[new(B * L, C), new(B * L)], scale_B=new(B), norm_C=new(C), in_proj=new(2 * D, C),
        out_proj=new(C, D), directions=directions, keep=True,
    )  # fmt: skip


def block_backward_call(recurrence, class_token_only=False, norm_given=False):
    named = block_call(recurrence) | dict(class_token_only=class_token_only)
    named |= dict(normed=named["normed"] if norm_given else [])
    with FakeTensorMode(allow_non_fake_inputs=True):
        y, _, saved = operator._fake_block(*named.values())
    new, (B, M, C) = random_tensors(1), y.shape
    saved = [new(*t.shape) / 4 for t in saved] + named["normed"]
    after = [] if class_token_only else [new(B * M, C), new(B * M)]
    given = dict(dnext_TC=new(B * M, C) if after else None, next_normed=after)
    given |= {name: named[name] for name in ("scale_B", "norm_C", "in_proj", "out_proj", "directions")}
    how = dict(recurrence=recurrence, class_token_only=class_token_only, norm_given=norm_given)
    return how | dict(dx_BMC=new(B, M, C)) | given | dict(saved=saved)


CALLS = {
    "block": block_call,
    "block_backward": block_backward_call,
    "block_backward of the class token": lambda recurrence: block_backward_call(recurrence, class_token_only=True),
    "block_backward of a given norm": lambda recurrence: block_backward_call(recurrence, norm_given=True),
}
calls = pytest.mark.parametrize("call", CALLS)
recurrences = pytest.mark.parametrize("recurrence", RECURRENCES)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The operators of GPUs on a CPU, emulated; what they have launched."""
    launched = emulate(monkeypatch)
    with torch.library._scoped_library("vil", "IMPL") as library:
        library.impl("block", lambda *arguments: operator._block(*arguments), "CPU")
        library.impl("block_backward", lambda *arguments: operator._block_backward(*arguments), "CPU")
        yield launched


@calls
@recurrences
def test_what_does_not_fit_is_refused_by_name_before_anything_is_launched(call, recurrence, on_a_cpu):
    assert_each_wrong_tensor_is_refused(call, CALLS[call](recurrence))
    assert on_a_cpu == []


@calls
@recurrences
def test_compilers_refuse_the_same(call, recurrence):
    """Of tensors that are nowhere."""
    named = tree_map_only(torch.Tensor, lambda t: t.to("meta"), CALLS[call](recurrence))
    run(call, named)
    assert_each_wrong_tensor_is_refused(call, named, but=["elsewhere"])


def without_last(tensors):
    return tensors[:-1]


def one_more(tensors):
    return [*tensors, tensors[-1]]


def backwards(tensors):
    return tensors[::-1]


OTHERS = [
    *(("block", {name: None}) for name in ("x_BLC", "norm_C", "in_proj", "out_proj")),
    *(("block_backward", {name: None}) for name in ("dx_BMC", "norm_C", "in_proj", "out_proj")),
    *((call, dict(recurrence="hippo")) for call in ("block", "block_backward")),
    *(("block", dict(dtype=dtype)) for dtype in (torch.float64, torch.int8)),
    *(("block", {name: change}) for name in ("directions", "normed") for change in (without_last, one_more, backwards)),
    *(("block_backward", dict(saved=change)) for change in (without_last, one_more, backwards)),
    ("block", dict(normed=[None, None])),
    ("block", dict(directions=lambda directions: [*directions[:-1], None])),
    ("block", dict(directions=[])),
    ("block", dict(x_BLC=torch.zeros(0, 5, 16), normed=[], scale_B=None)),
    ("block", dict(x_BLC=torch.zeros(2, 0, 16), normed=[])),
    ("block_backward", dict(saved=lambda saved: [None, *saved[1:]])),
    ("block_backward", dict(saved=[])),
    ("block_backward", dict(class_token_only=True, dnext_TC=None)),
    ("block_backward of the class token", dict(class_token_only=False)),
    ("block_backward", dict(dnext_TC=lambda dnext: dnext, next_normed=[])),
    ("block_backward", dict(next_normed=without_last)),
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


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        *(("conv", (24, 1, n), f"taps in conv, {n} is none of") for n in (0, 1, 5)),
        *(("x_proj", (3 + 2 * n, 24), f"states in x_proj, {n} is none of") for n in (1, 5, 12, 128)),
        ("x_proj", (11 + 2, 24), "x_proj must have .*11 rows, not .*13"),
        ("x_proj", (0, 24), "x_proj must have .* rows, not .*0"),
        ("step_proj", (24, 0), "step_proj must not be empty"),
    ],
)
def test_weights_of_both_directions_that_there_are_no_kernels_for_are_refused(name, size, reason, on_a_cpu):
    """Numbers of states of a recurrence that has them in no other weight."""
    named = block_call("longhorn" if "states" in reason else "selective")
    half, place = len(named["directions"]) // 2, DirectionWeights._fields.index(name)
    for g in (0, half):
        named["directions"][g + place] = torch.zeros(size)
    with pytest.raises(ValueError, match=reason):
        run("block", named)
    assert on_a_cpu == []


def sizes_of(named):
    return BlockWeights.of([named["norm_C"], named["in_proj"], named["out_proj"], *named["directions"]]).sizes


def results(call, named):
    """Of packed weights the parts, as what is between them may be anything."""
    found = run(call, named)
    if call == "block" and named["keep"]:
        found[2][3] = list(kernels.PackedWeights.of(found[2][3], sizes_of(named)))
    return found


@needs_compiler
@calls
@recurrences
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_what_a_plain_copy_gives(layout, call, recurrence, on_a_cpu):
    laid_out = tree_map_only(torch.Tensor, LAYOUTS[layout], CALLS[call](recurrence))
    assert_same(results(call, laid_out), results(call, tree_map_only(torch.Tensor, plain, laid_out)))


@needs_compiler
@pytest.mark.parametrize("call", ["block", "block_backward"])
@recurrences
def test_one_tensor_at_an_odd_address_changes_nothing(call, recurrence, on_a_cpu):
    """Where the others could be moved as vectors, as of weights in one buffer."""
    named = CALLS[call](recurrence)
    expected = results(call, named)
    for place in places(named):
        assert_same(results(call, changed(named, place, LAYOUTS["at an odd address"])), expected)
    assert on_a_cpu


# What compilers are told


OPTIONS = [
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
        assert kinds(run(call, named)) == kinds(foretold)


def test_a_block_of_the_class_token_alone_has_no_norm_for_the_next(monkeypatch):
    """Which Hopper's kernels compute of all tokens alone."""
    monkeypatch.setattr(kernels, "runs_hopper_kernels", lambda *_: True)
    for only in (False, True):
        named = block_call("longhorn") | dict(class_token_only=only)
        named = tree_map_only(torch.Tensor, lambda t: t.to("meta"), named)
        assert len(run("block", named)[1]) == (0 if only else 2)


# With a GPU


@on_a_gpu
@calls
@recurrences
def test_what_does_not_fit_is_refused_on_a_gpu_which_goes_on(call, recurrence):
    named = on_this_machine(CALLS[call](recurrence))
    assert_each_wrong_tensor_is_refused(call, named)
    torch.cuda.synchronize()
    run(call, named)
    torch.cuda.synchronize()


@on_a_gpu
@calls
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
    named = on_this_machine(named)
    if call == "block":
        return named | dict(dtype=dtype, normed=[named["normed"][0].to(dtype), named["normed"][1]])
    if call.startswith("block_backward"):
        of = [own or dtype for _, _, own in contract._saved_fields(named["recurrence"])]
        saved, sizes = list(named["saved"]), sizes_of(named)
        packed = saved[3].new_zeros(kernels.packed_size(sizes, dtype), dtype=dtype)
        for part, value in zip(kernels.PackedWeights.of(packed, sizes), kernels.PackedWeights.of(saved[3], sizes)):
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
    for call in ("block", "block_backward"):
        for recurrence in RECURRENCES:
            named = tree_map_only(torch.Tensor, torch.Tensor.cuda, CALLS[call](recurrence))
            for place in places(named):
                wrong = changed(named, place, lambda t: t.to("cuda:1"))
                with pytest.raises(ValueError, match=place[0] if place[0] not in FIRST else "move them to one device"):
                    run(call, wrong)
