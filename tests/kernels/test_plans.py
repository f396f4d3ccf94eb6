"""Tests of recorded plans: replaying a plan with other tensors computes what the recorded function computes."""

import inspect
import itertools
import random
from types import SimpleNamespace

import emulator
import pytest
import torch
from blocks import OnGpu, make_block, on_an_emulated_gpu, weights_of
from torch.utils._pytree import tree_map

from vil.kernels.block import consecutive, forward, kernels, scan_image, scan_lines_bwd
from vil.kernels.block.lines import Lines
from vil.kernels.block.weights import BackwardOptions, Inputs, Normed, Options, SavedForBackward
from vil.kernels.cuda import graphs, launches, memory, plan, recording
from vil.kernels.cuda.memory import Lifetime
from vil.kernels.cuda.plan import Plan
from vil.models.block import LonghornMixer, MambaMixer

CPU = torch.device("cpu")


def composition(x, weights, factor):
    """Create views and tensors, call in-place and out-of-place operators, and return some of the results."""
    u, z = (x @ weights[0].t()).chunk(2, dim=-1)
    memory = torch.empty(2, *u.shape, dtype=x.dtype, device=x.device)
    torch.empty(5, device=x.device)
    first, second = memory.unbind()
    first.copy_(u * factor)
    second.zero_().add_(z.mT.mT)
    large = torch.empty_like(x).fill_(3)
    stacked = torch.stack([first, weights[1].expand_as(first)]).flatten(0, 1)
    out = torch.empty(3, 4, device=x.device)
    out.t().copy_(large[:3, :4].t())
    return [stacked[1:3], None, memory[1], out, torch.nn.functional.pad(z, (1, 2)).to(torch.float64), x[1:]]


def test_a_replayed_plan_equals_the_recorded_function(poison):
    def tensors():
        return torch.randn(4, 6), [torch.randn(8, 6), torch.randn(4)]

    x, weights = tensors()
    recorded = Plan(composition, (x, weights, 2.0), CPU)
    for _ in range(2):
        x, weights = tensors()
        for found, expected in zip(recorded([x, *weights]), composition(x, weights, 2.0), strict=True):
            assert found is None if expected is None else torch.equal(found, expected)
    nowhere = [t.to("meta") for t in (x, *weights)]  # a plan's results are on its tensors' device
    results = Plan(composition, (nowhere[0], nowhere[1:], 2.0), torch.device("meta"))(nowhere)
    assert all(t is None or t.is_meta for t in results)


def chain(x):
    """Copy values through four temporary buffers, of which at most two are in use at a time."""
    a, b, c = (torch.empty_like(x) for _ in range(3))
    a.copy_(x)
    b.copy_(a)
    c.copy_(b)
    a = torch.empty_like(x)
    a.copy_(c)
    return [a + c, torch.mm(c.view(10, 100), a.view(100, 10))]


def test_buffers_with_disjoint_lifetimes_share_memory(monkeypatch):
    x, made = torch.randn(1000), []
    recorded = Plan(chain, (x,), CPU)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a[0]) or empty(*a, **k))
    total, product = recorded([x])
    assert torch.equal(total, 2 * x)
    torch.testing.assert_close(product, x.view(10, 100) @ x.view(100, 10))
    # the shapes of both results, and the bytes of one allocation, which the four temporary buffers share
    assert made == [(1000,), (10, 10), 2 * 4096]


def test_buffers_are_allocated_at_their_first_use_if_that_needs_less_memory(monkeypatch):
    """Small buffers share an allocation. Each larger buffer is allocated at its first use."""
    x, made = torch.randn(1000), []
    empty = torch.empty
    monkeypatch.setattr(recording, "MEMORY", 0)
    for small, sizes in ((4000, [4 * 1024, (1000,), (10, 10)]), (3999, [1024] * 4 + [(1000,), (10, 10)])):
        monkeypatch.setattr(recording, "SMALL", small)
        recorded = Plan(chain, (x,), CPU)
        made.clear()
        monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a[0]) or empty(*a, **k))
        total, _ = recorded([x])
        monkeypatch.setattr(torch, "empty", empty)
        assert torch.equal(total, 2 * x)
        assert made == sizes


def test_buffers_that_are_used_at_the_same_time_do_not_overlap_in_memory():
    generator = random.Random(0)
    for _ in range(300):
        buffers = []
        for i in range(generator.randint(1, 12)):
            first = generator.randint(0, 20)
            buffers.append(Lifetime(i, 100 * generator.randint(1, 30), first, first + generator.randint(0, 8)))
        results, temporary = buffers[: generator.randint(0, 3)], buffers[3:]
        places, size = memory.assign(temporary, results)
        for a in temporary:
            result, start = places[a.buffer]
            assert start % memory.ALIGNMENT == 0
            host = next((r for r in results if r.buffer == result), None)
            assert start + a.size <= (size if host is None else host.size)
            assert host is None or a.last < host.first
            for b in temporary:
                if a is not b and places[b.buffer].result == result and a.overlaps(b):
                    other = places[b.buffer].start
                    assert start + a.size <= other or other + b.size <= start
        assert memory.peak(temporary, results) <= size + sum(r.size for r in results)
        assert size <= sum(memory.rounded(b.size) for b in temporary)


def test_a_graph_is_captured_when_the_same_addresses_occur_again(monkeypatch):
    """A graph replays only calls with the stream and the tensor addresses of the capture.

    After a failed capture, the plan uses no graphs.
    """
    state, events = dict(stream=1, capturing=False), []

    class Graph:
        def __init__(self, key):
            self.key = key

        def replay(self):
            events.append(("replay", self.key))

    def capture(device, stream, run):
        run()
        return Graph(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state["stream"]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(graphs, "_capture", capture)
    plans = graphs.Graphs()

    def call(*addresses):
        events.clear()
        replayed = plans.replay(CPU, list(addresses), lambda: events.append("run"))
        return replayed, [*events]

    eager, captured, replayed = (False, []), (True, ["run", ("replay", 1)]), (True, [("replay", 1)])
    assert [call(1, 2) for _ in range(4)] == [eager, eager, captured, replayed]
    assert call(1, 3) == call(1, 3) == eager
    assert call(1, 2) == replayed
    assert call(1, 3) == captured
    state.update(stream=2)
    assert call(1, 2) == eager
    state.update(stream=1, capturing=True)  # the caller captures a graph of its own
    assert call(1, 2) == eager
    state.update(capturing=False)
    monkeypatch.setattr(graphs, "GRAPHS", 2)
    assert [call(1, 4) for _ in range(3)] == [eager, eager, captured]
    assert call(1, 2) == eager  # the new graph has replaced the oldest graph, because GRAPHS is 2

    def fail(*_):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(graphs, "_capture", fail)
    assert [call(5) for _ in range(3)] == [eager] * 3
    assert call(1, 4) == eager


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_plan_keeps_the_alignment_modulo_16_bytes(offset):
    """While a plan is recorded, tensors keep their addresses modulo 16 bytes. In a replay, kernels receive the tensors'
    own addresses.
    """
    seen, addresses = [], []

    class OfAddress(launches.Launch):
        def __init__(self, t):
            self.tensors, self.early, self.values = [(0, t)], [], [0]

        def run_with(self, values, stream):
            addresses.extend(values)

    def function(x):
        seen.append(x.data_ptr() % 16)
        if recorded := getattr(launches.thread, "recording", None):
            recorded.add_launch(OfAddress(x))
        return [x[1:] + 1]

    for x in (torch.randn(9)[offset:], torch.randn(9, 5).t()[:, offset:]):
        behind = x.data_ptr() % 16
        recorded = Plan(function, (x,), CPU)
        assert seen.pop() == behind
        assert torch.equal(recorded([x])[0], x[1:] + 1)
        assert addresses.pop() == x.data_ptr()


def test_a_kernel_with_early_accesses_shares_no_memory_with_kernels_that_may_still_run():
    """A kernel with early accesses may overlap with all kernels after the previous kernel with early accesses.

    The first kernel with early accesses does not overlap with previous kernels. Neither does a kernel that reads a
    tensor early if the plan computes the tensor.
    """
    ran = []

    class Kernel(launches.Launch):
        def __init__(self, *tensors, early=()):
            self.tensors, self.values = list(enumerate(tensors)), [0] * len(tensors)
            self.early, self.overlaps = list(early), not early
            launches.thread.recording.add_launch(self)

        def run_with(self, values, stream):
            ran.append((values, self.overlaps))

    def function(x):
        before, first, between, second, after, third = (x.new_empty(64) for _ in range(6))
        Kernel(x, before)
        Kernel(first, early=[x, first])
        Kernel(first, between)
        Kernel(second, early=[x, second])
        Kernel(second, after)
        copy = x.clone()
        Kernel(third, copy, early=[copy, third])
        return [x.new_empty(1)]

    Plan(function, (torch.randn(9),), CPU)([torch.randn(9)])
    (_, before), (first,), (_, between), (second,), (_, after), _ = [values for values, _ in ran]
    assert len({first, between, second}) == 3
    # The tensors `before` and `after` may share memory with other tensors. A kernel with early accesses overlaps with
    # earlier kernels only if the kernel directly before it also has early accesses.
    assert before in (first, between, second)
    assert after in (first, between)
    assert [overlaps for _, overlaps in ran] == [True, False, True, True, True, False]


def test_a_function_is_recorded_once_for_tensors_and_values_of_one_kind(monkeypatch):
    recorded = []

    class Recorded:
        def __init__(self, function, arguments, device):
            assert callable(function)
            recorded.append(arguments)

        def __call__(self, tensors):
            return len(recorded), tensors

    monkeypatch.setattr(plan, "Plan", Recorded)
    run = plan.planned()(lambda *arguments: None)

    def t(*size, **kind):
        return torch.zeros(*size, **kind).as_subclass(OnGpu)

    # `odd` starts 4 bytes after a 16-byte boundary, and `eight` starts 8 bytes after a 16-byte boundary
    odd, eight = (torch.zeros(3 + i)[i:].as_subclass(OnGpu) for i in (1, 2))
    first = t(3).as_subclass(type("OnFirst", (OnGpu,), dict(get_device=lambda _: 0)))
    calls = [
        (t(3), [t(2, 2)], None, 1), (first, [t(2, 2)], None, 1), (odd, [t(2, 2)], None, 1), (eight, [t(2, 2)], None, 1),
        (t(4), [t(2, 2)], None, 1), (t(3), [t(2, 2).t()], None, 1),
        (t(3), [t(2, 2), t(2, 2)], None, 1), (t(3), [t(2, 2)], t(1), 1), (t(3), [t(2, 2)], None, 2),
        (t(3).double(), [t(2, 2)], None, 1), (t(3), [], t(2, 2), 1),
        (t(3), [t(2, 2)], [t(2, 2)] * 2, 1), (t(3), [t(2, 2)] * 2, [t(2, 2)], 1),
        (t(3), t(3), None, 1), (t(3), None, t(3), 1),
    ]  # fmt: skip
    for number, call in enumerate(calls, 1):
        for _ in range(2):
            found, tensors = run(*call)
            assert found == number
            leaves = [leaf for a in call for leaf in (a if isinstance(a, list) else [a])]
            assert all(a is b for a, b in zip(tensors, [t for t in leaves if isinstance(t, torch.Tensor)], strict=True))
    monkeypatch.setattr(plan, "PLANS", len(calls))
    assert run(t(7), [], None, 1)[0] == len(calls) + 1
    assert run(*calls[0])[0] == len(calls) + 2  # a full cache drops all plans


def test_views_as_another_dtype_may_only_be_passed_to_kernels():
    with pytest.raises(AssertionError, match="only kernels see"):
        Plan(lambda x: [x.view(torch.int32) + 1], (torch.randn(4),), CPU)


def emulate_plans(monkeypatch, hopper):
    """Run the launches of plans, and launches outside of plans, on an emulated GPU."""
    launch = launches.launch  # the unpatched function, because plans must record launches
    on_an_emulated_gpu(monkeypatch, hopper=hopper)
    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(launches.Launch, "run_with", emulator.run_with)

    def at_once(one):
        values = one.values.copy()
        for place, t in one.tensors:
            values[place] = t.data_ptr()
        emulator.run_with(one, values)

    monkeypatch.setattr(launches.Launch, "run", at_once)


@emulator.EMULATED
@pytest.mark.parametrize("norm_given", [False, True])
@pytest.mark.parametrize(("mixer", "hopper"), [(LonghornMixer, True), (MambaMixer, False)])
def test_replaying_emulated_blocks_equals_running_the_blocks_one_by_one(
    mixer, hopper, norm_given, monkeypatch, poison
):  # fmt: skip
    """A plan of two blocks is bitwise identical to forward and backward passes of single blocks, and preserves x."""
    dtype, (B, L, C) = torch.bfloat16, (2, 33, 192)
    emulate_plans(monkeypatch, hopper)
    modules = [make_block(mixer, C, seed=seed) for seed in range(2)]
    weights = [weights_of(module, detach=True) for module in modules]
    x, dy = torch.randn(2, B, L, C)
    normed = (torch.randn(B * L, C).to(dtype), torch.rand(B * L)) if norm_given else (None, None)
    scales = [torch.rand(B), torch.rand(B)]
    options = tuple(Options(mixer.recurrence, 1e-5, dtype, False, norm_next) for norm_next in (True, False))
    flat = [x, *normed, *scales, *[t for own in weights for t in own.flat()]]
    before = x.clone()
    found = Plan(consecutive.forward_blocks.__wrapped__, (options, True, flat), CPU)(flat)
    assert torch.equal(x, before)
    without_saved = Plan(consecutive.forward_blocks.__wrapped__, (options, False, flat), CPU)(flat)
    for value, truth in zip(without_saved, found[:3], strict=True):
        assert value is None if truth is None else torch.equal(value, truth)

    inputs, expected, own_normed = x, [], normed
    for own, scale, of_block in zip(options, scales, weights):
        given = Inputs(inputs, scale, None if own_normed[0] is None else Normed(*own_normed), of_block)
        inputs, xhat, rstd, *saved = forward.forward_block(own, True, given)
        norm = own_normed if own_normed[0] is not None else saved[-2:]
        expected.append((xhat, rstd, SavedForBackward(*saved[:-2], *norm), scale, of_block))
        own_normed = xhat, rstd
    assert torch.equal(found[0], inputs)
    fields = len(SavedForBackward._fields)
    for i, (_, _, saved, _, _) in enumerate(expected):
        for name, value, truth in zip(saved._fields, found[3 + i * fields : 3 + (i + 1) * fields], saved):
            if name != "packed" and not (i == 0 and norm_given and name in ("xhat", "rstd")):
                assert value is None if truth is None else torch.equal(value, truth), (i, name)

    how = tuple(BackwardOptions(mixer.recurrence, False, norm_given and i == 0) for i in range(2))
    sizes = weights[0].sizes()
    flat = [dy, None, None, None]
    for _, _, saved, scale, of_block in expected:
        flat += [scale, of_block.norm, of_block.in_proj, *saved]
    found = Plan(consecutive.backward_blocks.__wrapped__, (how, sizes, flat), CPU)(flat)
    dx, dnext, next_normed, gradients = dy, None, (None, None), []
    for own, (_, _, saved, scale, of_block) in zip(reversed(how), reversed(expected)):
        tensors = [dx, dnext, *next_normed, scale, of_block.norm, of_block.in_proj, *saved]
        dx, dnext, *of_weights = consecutive.backward_blocks.__wrapped__((own,), sizes, tensors)
        gradients, next_normed = of_weights + gradients, saved[-2:]
    for value, truth in zip(found, [dx, dnext, *gradients], strict=True):
        assert value is None if truth is None else torch.equal(value, truth)


@emulator.EMULATED
@pytest.mark.parametrize("keep", [False, True])
def test_emulated_blocks_may_pack_weights_as_soon_as_the_weights_of_the_previous_block_are_packed(keep, monkeypatch):
    """Weights that are packed before the previous block runs do not overwrite memory of the previous block."""
    (B, L, C), blocks = (2, 33, 192), 3
    emulate_plans(monkeypatch, hopper=True)
    weights = [t for i in range(blocks) for t in weights_of(make_block(LonghornMixer, C, seed=i), detach=True).flat()]
    options = tuple(Options("longhorn", 1e-5, torch.bfloat16, False, i < blocks - 1) for i in range(blocks))
    flat = [torch.randn(B, L, C), None, None, *[None] * blocks, *weights]
    in_order, early = (Plan(consecutive.forward_blocks.__wrapped__, (options, keep, flat), CPU) for _ in range(2))
    launched = [inspect.getclosurevars(step).nonlocals.get("launch") for step in early.steps]
    packing = [i for i, launch in enumerate(launched) if launch and launch.entry == "pack_weights"]
    assert [launched[i].overlaps for i in packing] == [False, True, True]
    for before, i in reversed([*itertools.pairwise(packing)]):
        early.steps.insert(before + 1, early.steps[i])
    expected = in_order(flat)
    for found, truth in zip(early(flat)[:3], expected[:3], strict=True):
        assert found is None if truth is None else torch.equal(found, truth)


@emulator.EMULATED
@pytest.mark.parametrize("class_token_only", [False, True])
@pytest.mark.parametrize(
    ("mixer", "shape", "hopper", "lines"),
    [
        (LonghornMixer, (2, 33, 192), True, None), (MambaMixer, (1, 70, 36), False, None),
        (LonghornMixer, (2, 16, 64), False, Lines(3, 5, False)),
    ],
)  # fmt: skip
def test_replaying_an_emulated_block_equals_running_the_block(
    mixer, shape, hopper, lines, class_token_only, monkeypatch, poison
):
    """Replaying a recorded block, also with other tensors, is bitwise identical to running the block directly."""
    dtype, (B, L, C) = torch.bfloat16, shape
    emulate_plans(monkeypatch, hopper)
    for module in (scan_image, scan_lines_bwd):  # two CTAs share an image of the pooled block
        monkeypatch.setattr(module, "slices_of", lambda D, R, device: 2)
    run_forward, run_backward = consecutive.forward_blocks.__wrapped__, consecutive.backward_blocks.__wrapped__

    def unpacked(results):
        """Split packed weights into parts, to drop the undefined padding between parts."""
        sizes = weights_of(make_block(mixer, C)).sizes()
        parts = kernels.PackedWeights.of(results[6], sizes)
        return [*results[:6], torch.cat([part.double().flatten() for part in parts]), *results[7:]]

    def check(replayed, results):
        for i, (found, expected) in enumerate(zip(replayed, results, strict=True)):
            assert found is None if expected is None else torch.equal(found, expected), (i, found, expected)

    for given, seeds in ((False, (0, 1)), (True, (0,))):
        plans = []
        for seed in seeds:
            block = make_block(mixer, C, seed=seed)
            weights = weights_of(block, detach=True)
            x, dy, dnext = torch.randn(3, B, L, C)
            normed = Normed(torch.randn(B * L, C).to(dtype), torch.rand(B * L)) if given else None
            options = Options(block.mixer.recurrence, 1e-5, dtype, class_token_only, hopper, lines)
            call = (options,), True, [x, *(normed or (None, None)), torch.rand(B), *weights.flat()]
            if not plans:
                plans.append(Plan(run_forward, call, CPU))
            results = run_forward(*call)
            check(unpacked(plans[0](call[-1])), unpacked(results))

            _, *after, uz, mean, states, packed, A, pooled, xhat, rstd = results
            saved = SavedForBackward(uz, mean, states, packed, A, pooled, *(normed or (xhat, rstd)))
            dnext = None if after[0] is None else dnext.flatten(0, 1).to(dtype)
            dy = dy[:, : 1 if class_token_only else L].contiguous()
            how = BackwardOptions(block.mixer.recurrence, class_token_only, given, lines)
            tensors = [dy, dnext, *after, torch.rand(B), weights.norm, weights.in_proj, *saved]
            call = (how,), weights.sizes(), tensors
            if len(plans) < 2:
                plans.append(Plan(run_backward, call, CPU))
            check(plans[1](tensors), run_backward(*call))


@pytest.mark.parametrize("norm_given", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("C", [192, 384])
def test_plans_of_six_blocks_allocate_all_memory_in_advance(C, pooled, norm_given, monkeypatch):
    """Only plans that allocate in advance are captured as CUDA graphs."""
    B, L, blocks, launch = 128, 197, 6, launches.launch
    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors=132, hopper=True)
    monkeypatch.setattr(launches, "launch", launch)  # plans must record launches
    weights = weights_of(make_block(LonghornMixer, C), detach=True)
    lines = Lines(14, 14, False) if pooled else None
    normed = (torch.empty(B * L, C, dtype=torch.bfloat16), torch.empty(B * L)) if norm_given else (None, None)
    scales = [torch.empty(B)] * blocks

    def record(function, *arguments):
        recorder = recording.Recording(CPU)
        placeholders = tree_map(lambda a: recorder.input(a) if isinstance(a, torch.Tensor) else a, arguments)
        with recorder.in_this_thread():
            results = function(*placeholders)
        assert recorder.finish(results).in_advance
        return [None if t is None else torch.empty_like(t, device="cpu") for t in results]

    options = (Options("longhorn", 1e-5, torch.bfloat16, False, True, lines),) * blocks
    flat = [torch.empty(B, L, C), *normed, *scales, *weights.flat() * blocks]
    y, xhat, rstd, *saved = record(consecutive.forward_blocks.__wrapped__, options, True, flat)
    fields = len(SavedForBackward._fields)
    if norm_given:
        saved[fields - 2 : fields] = normed
    options = tuple(BackwardOptions("longhorn", False, norm_given and i == 0, lines) for i in range(blocks))
    flat = [torch.empty_like(y), torch.empty_like(xhat), xhat, rstd]
    for i in range(blocks):
        flat += [scales[i], weights.norm, weights.in_proj, *saved[i * fields : (i + 1) * fields]]
    record(consecutive.backward_blocks.__wrapped__, options, weights.sizes(), flat)
