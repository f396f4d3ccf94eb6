"""The cpu backend against `naive` in fp64: outputs, gradients, layouts, threads, its cache, and who takes over."""

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from scans import (
    SCANS,
    SHAPES,
    exact,
    longhorn_inputs,
    outputs_and_gradients,
    relative_error,
    selective_inputs,
)
from vil.kernels import backends, longhorn_scan, selective_scan
from vil.kernels.cpu import compiler
from vil.kernels.scan import naive, operator


def on_cpu(scan):
    return lambda *t, **k: scan(*t, backend="cpu", **k)


def errors(scan, definition, inputs, dtype=torch.float32, **kwargs):
    expected = outputs_and_gradients(definition, exact(inputs), dtype, **kwargs)
    actual = outputs_and_gradients(on_cpu(scan), inputs, dtype, **kwargs)
    assert [t.dtype for t in actual] == [inputs[0].dtype, *(t.dtype for t in inputs)]
    return [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]


@SCANS
@SHAPES
@pytest.mark.parametrize("reverse", [False, True])
def test_output_and_gradients_equal_the_definition(scan, definition, make_inputs, shape, reverse, poison):
    assert max(errors(scan, definition, make_inputs(*shape, torch.float32), reverse=reverse)) < 3e-6


# a block of 64 channels, one more, and two; chunks of 64 tokens likewise
@SCANS
@pytest.mark.parametrize("shape", [(1, 64, 64, 16), (2, 65, 65, 16), (1, 129, 128, 16), (3, 150, 70, 4)])
def test_blocks_and_chunks_and_what_is_left_of_them(scan, definition, make_inputs, shape, poison):
    for reverse in (False, True):
        assert max(errors(scan, definition, make_inputs(*shape, torch.float32), reverse=reverse)) < 3e-6


@SCANS
def test_random_sizes(scan, definition, make_inputs):
    generator = torch.Generator().manual_seed(7)
    for seed in range(12):
        B, L, D = (torch.randint(1, high, (), generator=generator).item() for high in (4, 140, 140))
        N = (1, 3, 4, 15, 16)[seed % 5]
        assert max(errors(scan, definition, make_inputs(B, L, D, N, torch.float32, seed), reverse=seed % 2 > 0)) < 3e-6


@SCANS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
def test_low_precision_inputs_lose_only_their_own_rounding(scan, definition, make_inputs, dtype, tolerance):
    assert max(errors(scan, definition, make_inputs(2, 77, 24, 16, dtype), dtype)) < tolerance


@SCANS
def test_directions_with_parameters_of_their_own(scan, definition, make_inputs):
    reverse = (True, False, True)
    each = [make_inputs(2, 70, 9, 4, torch.float32, seed) for seed in range(3)]
    stacked = [torch.stack(tensors).detach().requires_grad_() for tensors in zip(*each)]
    y, *found = outputs_and_gradients(on_cpu(scan), stacked, reverse=reverse)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for g, inputs in enumerate(map(exact, each)):
        truth = definition(*inputs, reverse=reverse[g])
        assert relative_error(y[g], truth) < 3e-6
        for actual, expected in zip(found, torch.autograd.grad(truth, inputs, dy[g].float().double())):
            assert relative_error(actual[g], expected) < 3e-6


@SCANS
def test_skip_and_bias_are_optional(scan, definition, make_inputs):
    *inputs, skip, bias = make_inputs(1, 5, 4, 4, torch.float32)
    for given in ((None, None), (skip, None), (None, bias)):
        wanted = [*inputs, *(t for t in given if t is not None)]

        def run(f, *tensors, given=given, **kwargs):
            rest = iter(tensors[len(inputs) :])
            return f(*tensors[: len(inputs)], *(t if t is None else next(rest) for t in given), **kwargs)

        expected = outputs_and_gradients(lambda *t: run(definition, *t), exact(wanted), torch.float32)
        for a, truth in zip(outputs_and_gradients(lambda *t: run(on_cpu(scan), *t), wanted), expected, strict=True):
            assert relative_error(a, truth) < 3e-6


@SCANS
def test_strided_offset_and_expanded_views(scan, definition, make_inputs):
    inputs = make_inputs(3, 11, 8, 4, torch.float32)
    expected = outputs_and_gradients(on_cpu(scan), inputs)
    views = []
    for t in inputs:
        padded = torch.full([n + 3 for n in t.shape[::-1]], float("nan"))
        view = padded[tuple(slice(1, n + 1) for n in t.shape[::-1])].permute(*reversed(range(t.dim())))
        view.copy_(t.detach())
        views.append(view.requires_grad_())
    for actual, truth in zip(outputs_and_gradients(on_cpu(scan), views), expected, strict=True):
        assert torch.equal(actual, truth)
    columns = torch.cat([inputs[-3].detach(), inputs[-4].detach()], -1)  # as of one projection
    wide = [t.detach() for t in inputs]
    wide[-3], wide[-4] = columns.tensor_split(2, -1) if wide[-3].shape == wide[-4].shape else (wide[-3], wide[-4])
    assert torch.equal(scan(*wide, backend="cpu"), expected[0])
    one = [t.detach()[:1] if t.dim() == 3 else t.detach() for t in inputs]
    many = [t.expand(3, *t.shape[1:]) if t.dim() == 3 else t for t in one]
    assert torch.equal(scan(*many, backend="cpu"), scan(*one, backend="cpu").expand(3, -1, -1))


@pytest.mark.parametrize("logit", [-1e4, -100.0, -88.9, 88.9, 100.0, 1e4])
def test_extreme_logits_stay_finite_and_right(logit):
    inputs = longhorn_inputs(2, 20, 6, 4, torch.float32)
    inputs[1] = torch.full_like(inputs[1], logit).requires_grad_()
    actual = outputs_and_gradients(on_cpu(longhorn_scan), inputs)
    expected = outputs_and_gradients(naive.longhorn, exact(inputs), torch.float32)
    for i, (a, truth) in enumerate(zip(actual, expected, strict=True)):
        assert torch.isfinite(a).all()
        if i != 2:  # the gradient of a saturated logit is below rounding
            torch.testing.assert_close(a.double(), truth, rtol=1e-4, atol=1e-5)
    assert actual[2].abs().max() < 1e-6


@pytest.mark.parametrize("logit", [-1e4, -100.0, -20.0, -5.0, 0.0, 5.0, 20.0, 80.0])
def test_time_steps_keep_their_relative_precision(logit):
    """With one token y = dt b x c: the softplus and its gradient."""
    inputs = selective_inputs(1, 1, 70, 4, torch.float32)
    inputs[1] = torch.full_like(inputs[1], logit).requires_grad_()
    inputs[-2:] = [torch.zeros_like(t).requires_grad_() for t in inputs[-2:]]
    y, *gradients = outputs_and_gradients(on_cpu(selective_scan), inputs)
    truth, *expected = outputs_and_gradients(naive.selective, exact(inputs), torch.float32)
    if logit < -87:  # where fp32 has no normal numbers
        assert y.abs().max() < 1e-36
    else:
        assert relative_error(y, truth) < 3e-7
        assert relative_error(gradients[1], expected[1]) < 2e-6


def test_rates_that_are_steep_or_grow():
    for scale in (-1e4, -30.0, 0.5, 200.0):
        inputs = selective_inputs(1, 9, 5, 4, torch.float32)
        inputs[2] = (-scale * inputs[2].detach()).requires_grad_()  # A is negative
        with torch.no_grad():
            y, truth = selective_scan(*inputs, backend="cpu"), selective_scan(*inputs, backend="reference")
        finite = torch.isfinite(truth)
        assert torch.equal(torch.isfinite(y), finite)
        torch.testing.assert_close(y[finite], truth[finite], rtol=1e-4, atol=1e-5)
    assert not finite.all()


@SCANS
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_infinity_propagate_where_they_do_in_the_reference(scan, definition, make_inputs, poison):
    for which in range(len(make_inputs(1, 1, 1, 1))):
        inputs = [t.detach().clone() for t in make_inputs(2, 70, 66, 4, torch.float32)]
        inputs[which][(0, 5, 1) if inputs[which].dim() == 3 else (1,) * inputs[which].dim()] = poison
        leaves = [t.requires_grad_() for t in inputs]
        found = outputs_and_gradients(on_cpu(scan), leaves)
        expected = outputs_and_gradients(lambda *t: scan(*t, backend="reference"), leaves)
        y, truth = torch.isfinite(found[0]), torch.isfinite(expected[0])
        if poison != poison:
            assert torch.equal(y, truth)
        else:  # infinite logits have a limit
            assert y[~truth].logical_not().all() or which == 1
        assert torch.isfinite(found[0]).sum() > found[0].numel() / 3  # other images or channels
        for a, e in zip(found[1:], expected[1:], strict=True):
            assert a[torch.isnan(e)].isfinite().logical_not().all() or poison == poison


@SCANS
@pytest.mark.parametrize("B", [0, 2])
def test_empty_batch_and_empty_sequence(scan, definition, make_inputs, B):
    inputs = make_inputs(B, 0 if B else 3, 4, 4, torch.float32)
    y = scan(*inputs, backend="cpu")
    assert y.shape == (B, 0 if B else 3, 4)
    assert all((t == 0).all() for t in torch.autograd.grad(y.sum(), inputs))


@SCANS
def test_autocast_does_not_reach_the_state(scan, definition, make_inputs):
    inputs = make_inputs(2, 40, 8, 16, torch.float32)
    expected = outputs_and_gradients(on_cpu(scan), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = outputs_and_gradients(on_cpu(scan), inputs)
    for a, truth in zip(actual, expected, strict=True):
        assert torch.equal(a, truth)


@SCANS
def test_compiles_without_graph_breaks_also_by_default(scan, definition, make_inputs):
    inputs = make_inputs(2, 40, 4, 4, torch.float32)
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    for actual, truth in zip(outputs_and_gradients(compiled, inputs), outputs_and_gradients(on_cpu(scan), inputs)):
        assert torch.equal(actual, truth)


def test_operator_registrations():
    x, logits, k, q = (t.detach()[None].requires_grad_() for t in longhorn_inputs(2, 70, 5, 4, torch.float32)[:4])
    torch.library.opcheck(operator.scan, ("cpu", "longhorn", x, logits, k, q, None, None, None, [True], True))


@SCANS
def test_a_second_derivative_is_refused(scan, definition, make_inputs):
    inputs = make_inputs(1, 5, 3, 4, torch.float32)
    (dx,) = torch.autograd.grad(scan(*inputs, backend="cpu").sum(), inputs[:1], create_graph=True)
    with pytest.raises((RuntimeError, ValueError)):
        torch.autograd.grad(dx.sum(), inputs[:1])


# Threads


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@SCANS
def test_any_number_of_threads_gives_the_same_bits(scan, definition, make_inputs, threads):
    inputs = make_inputs(3, 70, 150, 4, torch.float32)
    threads(1)
    expected = outputs_and_gradients(on_cpu(scan), inputs)
    for count in (2, 5, 64):
        threads(count)
        for actual, truth in zip(outputs_and_gradients(on_cpu(scan), inputs), expected, strict=True):
            assert torch.equal(actual, truth)


def test_calls_from_several_threads_at_once(threads):
    threads(2)
    inputs = longhorn_inputs(2, 70, 150, 4, torch.float32)
    expected = outputs_and_gradients(on_cpu(longhorn_scan), inputs)
    wrong = []

    def call():
        torch.set_num_threads(2)  # a setting of each thread
        for _ in range(10):
            found = outputs_and_gradients(on_cpu(longhorn_scan), [t.detach().requires_grad_() for t in inputs])
            wrong.extend(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    calling = [threading.Thread(target=call) for _ in range(4)]
    for thread in calling:
        thread.start()
    for thread in calling:
        thread.join()
    assert len(wrong) == 4 * 10 * len(expected)
    assert not any(wrong)


def _scan_in_a_worker(inputs, queue):
    torch.set_num_threads(1)  # as DataLoader's workers do: OpenMP's threads are not there behind a fork
    queue.put(longhorn_scan(*inputs, backend="cpu").sum().item())


def test_a_forked_worker_scans(threads):
    threads(2)
    inputs = [t.detach() for t in longhorn_inputs(2, 70, 150, 4, torch.float32)]
    expected = longhorn_scan(*inputs, backend="cpu").sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_scan_in_a_worker, args=(inputs, queue))
    worker.start()
    assert queue.get(timeout=60) == expected
    worker.join()


def test_one_thread_where_the_library_of_threads_is_not_found(threads, monkeypatch):
    threads(2)
    inputs = longhorn_inputs(2, 70, 150, 4, torch.float32)
    expected = outputs_and_gradients(on_cpu(longhorn_scan), inputs)
    monkeypatch.setattr(compiler, "_parallel", lambda: None)
    for actual, truth in zip(outputs_and_gradients(on_cpu(longhorn_scan), inputs), expected, strict=True):
        assert torch.equal(actual, truth)


# Compilation, its cache, and machines without


SCRIPT = """
import math, sys, vil.kernels
assert "numba" not in sys.modules and "llvmlite" not in sys.modules
math.pow = lambda x, y: x**y  # as torch.export has it while it traces
from vil.kernels.cpu import compiler
print(compiler.unavailable(), "numba" in sys.modules)
"""


def test_later_processes_load_what_the_first_has_compiled_without_numba(tmp_path):
    environment = {**os.environ, "VIL_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def imports_numba():
        out = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        reason, imported = out.stdout.split()
        assert reason == "None"
        return imported == "True"

    assert imports_numba()
    (entry,) = tmp_path.iterdir()
    assert entry.name.startswith("nothing-")
    assert not imports_numba()
    binary = entry.read_bytes()
    entry.write_bytes(binary[:-100] + bytes(100))
    assert imports_numba()
    assert not imports_numba()  # the entry is a good one again; of the same bytes only if names within it are the same


@pytest.fixture
def without_numba(monkeypatch):
    caches = compiler.unavailable, operator._module, backends._backend_for
    find = compiler.importlib.util.find_spec
    monkeypatch.setattr(
        compiler.importlib.util, "find_spec", lambda name, *a: None if name == "numba" else find(name, *a)
    )
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def test_without_numba_the_reference_runs_and_says_so_once(without_numba):
    x, k = torch.randn(1, 3, 5), torch.randn(1, 3, 4)
    with pytest.warns(UserWarning, match="the cpu backend cannot run: numba is missing; .*The reference takes over"):
        y = longhorn_scan(x, x, k, k)
    assert torch.equal(y, longhorn_scan(x, x, k, k, backend="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose("auto", x, 4, 1) == "reference"
    with pytest.raises(RuntimeError, match="the cpu backend cannot run: numba is missing; `pip install numba`"):
        longhorn_scan(x, x, k, k, backend="cpu")


def test_a_library_that_does_not_load_is_no_backend(monkeypatch):
    monkeypatch.setattr(compiler, "load", lambda *_: 1 / 0)
    compiler.unavailable.cache_clear()
    assert "numba does not work (ZeroDivisionError" in compiler.unavailable()
    compiler.unavailable.cache_clear()


def test_what_the_kernels_do_not_take_is_of_the_reference():
    x, k = torch.zeros(1, 2, 3), torch.zeros(1, 2, 65)
    assert backends.choose("auto", x, 64, 1) == "cpu"
    assert backends.choose("auto", x, 65, 1) == backends.choose("auto", x.double(), 4, 1) == "reference"
    with pytest.raises(ValueError, match="the cpu backend takes up to 64 states and 63 directions, not 65 and 1"):
        longhorn_scan(x, x, k, k, backend="cpu")
    with pytest.raises(ValueError, match=r"the cpu backend takes float16, bfloat16 and float32; x is torch.float64"):
        longhorn_scan(x.double(), x, k, k, backend="cpu")
    with pytest.raises(ValueError, match="the cpu backend needs tensors on a CPU; x is on meta"):
        longhorn_scan(*(t.to("meta") for t in (x, x, k, k)), backend="cpu")


def test_a_kernel_that_needs_python_is_refused_before_it_is_loaded(monkeypatch):
    def needs_python(*constants):
        def kernel(arguments):
            raise ValueError

        return kernel

    from vil.kernels.scan import cpu_kernels

    monkeypatch.setattr(cpu_kernels, "needs_python", needs_python, raising=False)
    with pytest.raises(RuntimeError, match="needs_python of .* calls .*, which a kernel cannot"):
        compiler.compile_kernel(cpu_kernels.__name__, "needs_python", ())


def test_vectors_are_as_wide_as_the_cpu_has_them_for_intels_cpus_too():
    llvm = pytest.importorskip("llvmlite.binding")
    features = llvm.get_host_cpu_features().flatten().split(",")
    if "+avx512f" not in features:
        pytest.skip("needs a CPU with vectors of 512 bits")
    program = """
import re
from numba.core import ccallback
from vil.kernels.cpu import compiler
inspect = ccallback.CFunc.inspect_llvm
ccallback.CFunc.inspect_llvm = lambda self: print(*re.findall(r"<[0-9]+ x float>", inspect(self))) or inspect(self)
compiler.compile_kernel("vil.kernels.scan.cpu_kernels", "longhorn_forward", (16, 64))
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "sapphirerapids", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("<16 x float>") > done.stdout.count("<8 x float>")
