"""Tests of direct operator calls: invalid arguments raise before a kernel runs, and valid ones may have any layout."""

import re

import hostile
import pytest
import torch
from blocks import operator_on_a_cpu
from emulator import EMULATED
from hostile import FIRST, LAYOUTS, assert_same, changed, kinds, on_this_machine, places, plain, run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vil.kernels import checks
from vil.kernels.backends import RECURRENCES
from vil.kernels.block import block_op, contract, kernels
from vil.kernels.block.lines import Lines
from vil.kernels.block.weights import BackwardOptions, BlockWeights, DirectionWeights, Options, Sizes
from vil.kernels.scan import heuristics, scan_op
from vil.models.block import Block, LonghornMixer, MambaMixer

recurrences = pytest.mark.parametrize("recurrence", RECURRENCES)


@pytest.fixture
def launched(monkeypatch):
    """Emulate the GPU operators on a CPU, and return a list that collects their kernel launches."""
    with operator_on_a_cpu():
        yield hostile.emulate(monkeypatch)


def scan_call(recurrence, backend, L):
    G, B, D, N, new = 2, 1 if backend == "triton" else 3, 8, 4, hostile.random_tensors()
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
    G, L, B, N, D, new = 2, 35, 3, 4, 6, hostile.random_tensors()
    inputs = [new(G, L, B, D), new(G, L, B, D), new(G, L, B, N)]
    inputs += [-new(G, N, D).exp()] if recurrence == "selective" else []
    return dict(recurrence=recurrence, q_GLBN=new(G, L, B, N), inputs=inputs, keep=True)


def reference_backward_call(recurrence):
    named, new = reference_call(recurrence), hostile.random_tensors(1)
    given = dict(recurrence=recurrence, dy_GLBD=new(2, 35, 3, 6), chunk_states_GSBND=new(2, 3, 3, 4, 6))
    return given | {name: named[name] for name in ("q_GLBN", "inputs")}


def block_call(recurrence, count=1, L=5):
    """Return valid arguments of `vil::block` for consecutive blocks."""
    B, C, D, N, R, K, new = 2, 16, 24, 4, 3, 4, hostile.random_tensors()
    one = [(D, 1, K), (D,), (R + 2 * N, D), (D, R), (D,), (D,), (D, N)]
    directions = 2 * one[: 7 if recurrence == "selective" else 6]
    weights = [[new(C), new(2 * D, C), new(C, D), *[new(*size) / 4 for size in directions]] for _ in range(count)]
    return dict(
        recurrence=recurrence, eps=1e-5, dtype=torch.float32, class_token_only=False, norm_next=True,
        lines=[],
        x_BLC=new(B, L, C), normed=[new(B * L, C), new(B * L)], scales=[new(B) for _ in range(count)],
        weights=[t for own in weights for t in own], keep=True,
    )  # fmt: skip


def block_backward_call(recurrence, count=1, class_token_only=False, norm_given=False, lines=()):
    """Return valid arguments of `vil::block_backward` for consecutive blocks."""
    named = block_call(recurrence, count) | dict(class_token_only=class_token_only, lines=list(lines), normed=[])
    with FakeTensorMode(allow_non_fake_inputs=True):
        y, _, saved = block_op._fake_forward(*named.values())
    new, (B, M, C), sizes = hostile.random_tensors(1), y.shape, sizes_of(named)
    after = [] if class_token_only else [new(B * M, C), new(B * M)]
    weights, each = named["weights"], len(named["weights"]) // count
    return dict(
        recurrence=recurrence, class_token_only=class_token_only, norm_given=norm_given, lines=list(lines),
        sizes=list(sizes), dx_BMC=new(B, M, C), dnext_TC=new(B * M, C) if after else None, next_normed=after,
        scales=named["scales"], weights=[t for i in range(count) for t in weights[i * each : i * each + 2]],
        saved=[new(*t.shape) / 4 for t in saved],
    )  # fmt: skip


def sizes_of(named):
    """Return the `Sizes` of the weights in the arguments of `vil::block` or `vil::block_backward`."""
    if "sizes" in named:
        return Sizes(*named["sizes"])
    return BlockWeights.of(named["weights"][: 17 if named["recurrence"] == "selective" else 15]).sizes()


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
    "block of two": lambda recurrence: block_call(recurrence, count=2),
    "block_backward": block_backward_call,
    "block_backward of two": lambda recurrence: block_backward_call(recurrence, count=2, norm_given=True),
    "block_backward of the class token": lambda recurrence: block_backward_call(recurrence, class_token_only=True),
    "block_backward of the class token of a pooled block": lambda recurrence: block_backward_call(
        recurrence, class_token_only=True, lines=[2, 2, 0]
    ),
    "block_backward of a given norm": lambda recurrence: block_backward_call(recurrence, norm_given=True),
}
calls = pytest.mark.parametrize("call", CALLS)


@calls
@recurrences
def test_invalid_tensors_are_rejected_by_name_before_any_launch(call, recurrence, launched):
    # Start with a valid call, because invalid calls must not match its entry in the cache of accepted calls.
    if "Numba" in call or "reference" in call:
        run(call, CALLS[call](recurrence))
    hostile.assert_each_wrong_tensor_is_refused(call, CALLS[call](recurrence))
    assert launched == []


@calls
@recurrences
def test_fake_implementations_reject_wrong_tensors(call, recurrence):
    """The operators' fake implementations for torch.compile reject invalid tensors on the meta device."""
    named = tree_map_only(torch.Tensor, lambda t: t.to("meta"), CALLS[call](recurrence))
    run(call, named)
    hostile.assert_each_wrong_tensor_is_refused(call, named, but=["elsewhere"])


def with_or_without_A(A):
    return torch.zeros(2, 8, 4) if A is None else None


def without_last(tensors):
    return tensors[:-1]


def one_more(tensors):
    return [*tensors, tensors[-1]]


def backwards(tensors):
    return tensors[::-1]


def nothing(tensors):
    return []


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
    ("scan_backward", dict(states_GBSND=torch.empty(0))),  # the result of a forward pass that did not save states
    ("scan_backward", dict(states_GBSND=torch.zeros(2, 3, 2, 4, 8))),  # too many chunk states for L tokens
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
    ("block", dict(x_BLC=None)),
    ("block_backward", dict(dx_BMC=None)),
    *((call, dict(recurrence="hippo")) for call in ("block", "block_backward")),
    *(("block", dict(dtype=dtype)) for dtype in (torch.float64, torch.int8)),
    *(
        (own, {name: change})
        for call, names in {"block": ("weights", "normed"), "block_backward": ("weights", "saved")}.items()
        for name in names
        for own in (call, f"{call} of two")
        for change in (without_last, one_more, backwards)
    ),
    *((call, dict(scales=nothing)) for call in ("block", "block_backward")),
    ("block of two", dict(lines=[2, 2, 0])),
    ("block_backward of two", dict(lines=[2, 2, 0])),
    *(("block_backward", dict(sizes=change)) for change in (without_last, one_more, nothing)),
    *(("block_backward", dict(sizes=[16, 24, 4, 3, taps])) for taps in (0, 5)),
    *(("block", dict(lines=lines)) for lines in ([2, 3, 0], [-2, -2, 0])),
    ("block", dict(lines=[2, 3, 0], class_token_only=True)),
    ("block", dict(normed=[None, None])),
    *((call, dict(weights=lambda weights: [*weights[:-1], None])) for call in ("block", "block_backward")),
    *((call, dict(weights=[])) for call in ("block", "block_backward")),
    ("block", dict(x_BLC=torch.zeros(0, 5, 16), normed=[], scales=[None])),
    ("block", dict(x_BLC=torch.zeros(2, 0, 16), normed=[])),
    ("block_backward", dict(saved=lambda saved: [None, *saved[1:]])),
    ("block_backward", dict(saved=[])),
    ("block_backward", dict(class_token_only=True, dnext_TC=None)),
    ("block_backward of the class token", dict(class_token_only=False)),
    ("block_backward", dict(dnext_TC=lambda dnext: dnext, next_normed=[])),
    (
        "block_backward of the class token",
        dict(dnext_TC=torch.zeros(2, 16), next_normed=[torch.zeros(2, 16), torch.zeros(2)]),
    ),
    ("block_backward", dict(next_normed=without_last)),
]


@recurrences
@pytest.mark.parametrize(("call", "others"), OTHERS)
def test_missing_tensors_and_lists_of_wrong_length_are_rejected_by_name(call, others, recurrence, launched):
    named = CALLS[call](recurrence)
    others = {name: value(named[name]) if callable(value) else value for name, value in others.items()}
    with pytest.raises((ValueError, RuntimeError), match=rf"\b{next(iter(others))}\b"):
        run(call, named | others)
    assert launched == []


@EMULATED
@recurrences
@pytest.mark.parametrize("call", ["block of two", "block_backward of two"])
def test_two_valid_blocks_are_accepted(call, recurrence, launched):
    assert all(t.isfinite().all() for t in tree_leaves(run(call, CALLS[call](recurrence))[:2]))
    assert launched


@recurrences
def test_an_empty_batch_has_no_backward_pass(recurrence, launched):
    named = CALLS["block_backward"](recurrence)
    first, *saved = named["saved"]
    with pytest.raises(ValueError, match="dx_BMC must not be empty"):
        run("block_backward", named | dict(dx_BMC=named["dx_BMC"][:0], saved=[first[:0], *saved]))
    assert launched == []


@recurrences
def test_gradients_of_two_blocks_have_the_dtypes_of_each_blocks_weights(recurrence):
    named = tree_map_only(torch.Tensor, lambda t: t.to("meta"), CALLS["block_backward of two"](recurrence))
    first, second = named["weights"][:2], named["weights"][2:]
    named["weights"] = [*first, *[t.bfloat16() for t in second]]
    each = 1 + (recurrence == "selective")
    dtypes = [t.dtype for t in torch.ops.vil.block_backward(*named.values())[2:]]
    assert dtypes == each * [torch.float32] + each * [torch.bfloat16]


@pytest.mark.parametrize("N", [1, 5, 12, 128])
def test_unsupported_numbers_of_states_are_rejected(N, launched):
    k = torch.zeros(2, 3, 66, N)
    with pytest.raises(ValueError, match=rf"states in k_GBLN must be .*got {N}|up to 64 states .* got {N}"):
        run("scan", scan_call("longhorn", "cuda", 66) | dict(k_GBLN=k, q_GBLN=k))
    assert launched == []


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        *(("conv", (24, 1, n), f"taps in conv must be .*got {n}") for n in (0, 1, 5)),
        *(("x_proj", (3 + 2 * n, 24), f"states in x_proj must be .*got {n}") for n in (1, 5, 12, 128)),
        ("x_proj", (11 + 2, 24), r"x_proj\) 11 rows, got .*13"),
        ("x_proj", (0, 24), r"x_proj\) 11 rows, got .*0"),
        ("step_proj", (24, 0), "step_proj must not be empty"),
    ],
)
def test_unsupported_weight_sizes_of_both_directions_are_rejected(name, size, reason, launched):
    """Weights with an unsupported or mismatched number of taps, states or ranks are rejected before any launch."""
    named = block_call("longhorn" if "states" in reason else "selective")
    half, place = (len(named["weights"]) - 3) // 2, DirectionWeights._fields.index(name)
    for g in (0, half):
        named["weights"][3 + g + place] = torch.zeros(size)
    with pytest.raises(ValueError, match=reason):
        run("block", named)
    assert launched == []


def results(call, named):
    """Return an operator's results, with packed weights split into parts to drop the padding between parts."""
    found = run(call, named)
    if call in ("block", "block of two"):
        sizes = sizes_of(named)
        length = kernels.packed_size(sizes, named["dtype"])
        found = *found[:2], [[*kernels.PackedWeights.of(t, sizes)] if t.shape == (length,) else t for t in found[2]]
    return found


@EMULATED
@calls
@recurrences
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout_gives_the_result_of_a_contiguous_copy(layout, call, recurrence, launched):
    laid_out = tree_map_only(torch.Tensor, LAYOUTS[layout], CALLS[call](recurrence))
    assert_same(results(call, laid_out), results(call, tree_map_only(torch.Tensor, plain, laid_out)))


@EMULATED
@pytest.mark.parametrize("call", ["scan", "scan_backward", "block", "block_backward"])
@recurrences
def test_one_tensor_at_an_odd_address_changes_nothing(call, recurrence, launched):
    """Results do not change if one tensor is unaligned and the other tensors permit vector loads."""
    named = CALLS[call](recurrence)
    expected = results(call, named)
    for place in places(named):
        assert_same(results(call, changed(named, place, LAYOUTS["at an odd address"])), expected)
    assert launched


@EMULATED
@pytest.mark.parametrize(
    ("call", "variants"), [("scan", heuristics.FORWARD_SIMT), ("scan_backward", heuristics.BACKWARD)]
)
def test_a_skip_and_bias_at_an_odd_address_are_read_by_any_variant(call, variants, launched, monkeypatch):
    """An unaligned skip and bias do not change the results of the variant that GPUs choose for many channels."""
    monkeypatch.setattr(heuristics, "choose", lambda *_: heuristics.Schedule(variants["longhorn"][0], 2))
    named = CALLS[call]("longhorn")
    expected = run(call, named)
    for name in ("skip_GD", "step_bias_GD"):
        assert_same(run(call, changed(named, (name, None), LAYOUTS["at an odd address"])), expected)


@pytest.mark.parametrize("elements", [1, 2, 4])
def test_tensors_that_are_not_16_byte_aligned_are_copied(elements):
    """A tensor at 4 or 8 bytes after a multiple of 16 is copied, because the widest loads need 16-byte alignment.

    Tensors aligned to 16 bytes are not copied.
    """
    memory = torch.randn(64)
    t = memory[elements:][:32].view(4, 8)
    assert checks.aligned(memory) is memory
    found = checks.aligned(t)
    assert torch.equal(found, t)
    assert found.data_ptr() % 16 == 0
    assert (found is t) == (elements == 4)


# Tests of fake results for torch.compile


OPTIONS = [
    *(("scan", dict(keep=keep, skip_GD=None)) for keep in (False, True)),
    *(("scan by Triton", dict(keep=keep)) for keep in (False, True)),
    *((call, dict()) for call in ("scan_backward", "scan_backward by Triton", "reference_scan_backward")),
    *(("scan", dict(x_GBLD=torch.zeros(2, *size, 8), step_logits_GBLD=torch.zeros(2, *size, 8),
                    k_GBLN=torch.zeros(2, *size, 4), q_GBLN=torch.zeros(2, *size, 4)))
      for size in ((0, 66), (3, 0), (3, 64), (3, 65))),
    ("scan_backward by Numba", {name: torch.zeros(2, 3, 66, width, dtype=torch.bfloat16) for name, width in
                                dict(dy_GBLD=8, x_GBLD=8, step_logits_GBLD=8, k_GBLN=4, q_GBLN=4).items()}),
    *(("reference_scan", dict(keep=keep)) for keep in (False, True)),
    *(
        ("block", dict(class_token_only=only, norm_next=norm_next, keep=keep, scales=[scale_B], normed=normed))
        for only in (False, True) for norm_next in (False, True) for keep in (False, True)
        for scale_B in (None, torch.ones(2)) for normed in ([], [torch.ones(10, 16), torch.ones(10)])
    ),
    *(
        ("block", dict(lines=[2, 2, 0], class_token_only=only, keep=keep))
        for only in (False, True) for keep in (False, True)
    ),
    ("block_backward", dict(dnext_TC=None)),
    ("block_backward", dict(dnext_TC=None, next_normed=[])),
    ("block_backward of the class token of a pooled block", dict(scales=[None])),
    ("block_backward of a given norm", dict()),
    ("block_backward of a given norm", dict(dnext_TC=None)),
    ("block_backward of the class token", dict(scales=[None])),
]  # fmt: skip


@EMULATED
@pytest.mark.parametrize(("call", "options"), OPTIONS)
@recurrences
def test_fake_results_have_the_metadata_of_real_results(call, options, recurrence, launched):
    """Fake implementations return results with the shapes, dtypes and strides of the real results."""
    named = CALLS[call](recurrence) | options
    with FakeTensorMode() as mode:
        foretold = run(call, tree_map_only(torch.Tensor, mode.from_tensor, named))
    found = run(call, named)
    assert kinds(found) == kinds(foretold)
    given, results = (
        [t.untyped_storage().data_ptr() for t in tree_leaves(of) if isinstance(t, torch.Tensor) and t.numel()]
        for of in (named, found)
    )
    if call.startswith("block"):
        assert len({*results} - {*given}) == len(results)
    assert call != "block" or bool(found[2]) == named["keep"]


@EMULATED
def test_backward_of_a_scan_without_saved_states_is_rejected(launched):
    named = scan_call("longhorn", "cuda", 66) | dict(keep=False)
    named["x_GBLD"].requires_grad_()
    y, _ = run("scan", named)
    with pytest.raises(ValueError, match=r"states_GBSND must have shape .*S = 1.*\(0,\)"):
        y.sum().backward()


def test_a_block_of_the_class_token_alone_has_no_norm_for_the_next(monkeypatch):
    """A block that computes only the class token returns no normalized tokens for the next block, even on Hopper."""
    monkeypatch.setattr(kernels, "runs_hopper_kernels", lambda *_: True)
    for only in (False, True):
        named = block_call("longhorn") | dict(class_token_only=only)
        named = tree_map_only(torch.Tensor, lambda t: t.to("meta"), named)
        assert len(run("block", named)[1]) == (0 if only else 2)


@pytest.mark.parametrize(("most_C", "most_D", "C", "D"), [(2**16 - 1, 2**15, 2**16, 2**15), (1, 2**29 - 1, 1, 2**29)])
def test_a_block_may_be_as_wide_as_32_bits_count(most_C, most_D, C, D):
    def check(C, D):
        shapes = (1, 3, C), *Sizes(C, D, N=16, R=1, K=4).shapes()
        x, *weights = (torch.empty(shape, device="meta") for shape in shapes)
        contract.check_forward((Options("longhorn", 1e-5, torch.float32),), True, [x, None, None, None, *weights])

    check(most_C, most_D)
    with pytest.raises(ValueError, match="D must be at most"):
        check(C, D)


def test_what_fits_is_checked_once_a_kind_and_what_does_not_each_time(monkeypatch):
    ran, x, long, far = [], torch.zeros(2), torch.zeros(3), torch.zeros(2, device="meta")

    def check(*arguments):
        ran.append(arguments)
        if arguments[-1] == "refused":
            raise ArithmeticError

    checked = checks.once_a_kind(check)
    calls = (x, [x], 1), (x, [x, x], 1), (x, [long], 1), (x, [x], 2), (far, [x], 1), (x.double(), [x], 1), (x, None, 1)
    for number, arguments in enumerate(calls, 1):
        for _ in range(2):
            checked(*tree_map_only(torch.Tensor, torch.ones_like, arguments))
            assert len(ran) == number
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            checked(x, "refused")
    assert len(ran) == len(calls) + 2
    monkeypatch.setattr(checks, "KINDS", len(calls))
    checked(long, [x], 1)  # this call exceeds the capacity of the cache of accepted calls
    checked(*calls[0])
    assert len(ran) == len(calls) + 4


@EMULATED
@pytest.mark.parametrize(("G", "D"), [(0, 8), (2, 0)])
def test_scans_of_no_directions_and_of_no_channels_are_empty(G, D, launched):
    x, k = torch.zeros(G, 3, 66, D), torch.zeros(G, 3, 66, 4)
    tensors = x, x, k, k, None, None, None
    y, states = scan_op.scan("cuda", "longhorn", *tensors, [True] * G, True)
    gradients = scan_op.scan_backward("cuda", "longhorn", x, *tensors, states, [True] * G)
    assert [t.shape for t in (y, *gradients[:4])] == [t.shape for t in (x, x, x, k, k)]


# Tests that need a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("call", [call for call in CALLS if " by " not in call])
@recurrences
def test_invalid_tensors_are_rejected_on_a_gpu_which_stays_usable(call, recurrence):
    named = on_this_machine(CALLS[call](recurrence))
    hostile.assert_each_wrong_tensor_is_refused(call, named)
    torch.cuda.synchronize()
    run(call, named)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("call", [call for call in CALLS if "Numba" not in call])
@recurrences
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_memory_layout_gives_the_result_of_a_contiguous_copy_on_a_gpu(dtype, layout, call, recurrence, poison):
    """Operators give the same results for tensors in any memory layout as for contiguous copies."""
    named = in_dtype(call, on_this_machine(CALLS[call](recurrence)), dtype)
    change = LAYOUTS[layout]
    for laid_out in (
        tree_map_only(torch.Tensor, change, named),
        *(changed(named, place, change) for place in places(named)),
    ):
        assert_same(results(call, laid_out), results(call, tree_map_only(torch.Tensor, plain, laid_out)))
    torch.cuda.synchronize()


def in_dtype(call, named, dtype):
    """Convert an operator's tensors to `dtype`, except parameters and tensors that must be fp32.

    Arguments of the reference operators are not converted.
    """
    if call in ("block", "block of two"):
        return named | dict(dtype=dtype, normed=[named["normed"][0].to(dtype), named["normed"][1]])
    if call.startswith("block_backward"):
        lines, blocks, sizes, saved = [*named["lines"]], len(named["scales"]), sizes_of(named), []
        pooled = Lines(*lines) if lines else None
        options = BackwardOptions(named["recurrence"], named["class_token_only"], True, pooled)
        each = len(named["saved"]) // blocks
        for i in range(blocks):
            rows = contract._saved_rows(options, named["saved"][i * each : (i + 1) * each], 0, dtype)
            saved += [t.to(own_dtype) for _, t, _, own_dtype in rows]
            packed = saved[i * each + 3].new_zeros(kernels.packed_size(sizes, dtype), dtype=dtype)
            given = named["saved"][i * each + 3]
            for part, value in zip(kernels.PackedWeights.of(packed, sizes), kernels.PackedWeights.of(given, sizes)):
                part.copy_(value)
            saved[i * each + 3] = packed
        after = [t.to(own) for t, own in zip(named["next_normed"], (dtype, torch.float32))]
        dnext = named["dnext_TC"] if named["dnext_TC"] is None else named["dnext_TC"].to(dtype)
        return named | dict(saved=saved, next_normed=after, dnext_TC=dnext)
    per_token = ("x_GBLD", "step_logits_GBLD", "k_GBLN", "q_GBLN", "dy_GBLD")
    return {name: value.to(dtype) if name in per_token else value for name, value in named.items()}


@pytest.mark.gpu
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


@pytest.mark.gpu
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
            named = on_this_machine(CALLS[call](recurrence))
            for place in places(named):
                wrong = changed(named, place, lambda t: t.to("cuda:1"))
                name = "move all tensors to one device" if place[0] in FIRST else re.escape(place[0])
                with pytest.raises(ValueError, match=name):
                    run(call, wrong)
