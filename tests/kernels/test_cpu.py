"""Tests of precision, threads, cache and fallback of the cpu backend. test_operators.py tests all backends' results."""

import functools
import importlib.metadata
import multiprocessing
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import UNDER_TEST, run
from scans import SCANS, exact, longhorn_inputs, outputs_and_gradients, relative_error, selective_inputs

from vil.kernels import backends, longhorn_scan, selective_scan
from vil.kernels.cpu import compiler
from vil.kernels.scan import cpu_kernels, cpu_scan, reference, scan_op

llvm = pytest.importorskip("llvmlite.binding")


def on_cpu(scan):
    return lambda *t, **k: scan(*t, backend="cpu", **k)


@pytest.mark.parametrize("logit", [-1e4, -100.0, -20.0, -5.0, 0.0, 5.0, 20.0, 80.0])
def test_time_steps_keep_their_relative_precision(logit):
    """Small time steps keep their relative precision. The output of a single token is proportional to the time step."""
    inputs = selective_inputs(1, 1, 70, 4, torch.float32)
    inputs[1] = torch.full_like(inputs[1], logit).requires_grad_()
    inputs[-2:] = [torch.zeros_like(t).requires_grad_() for t in inputs[-2:]]
    y, *gradients = outputs_and_gradients(on_cpu(selective_scan), inputs)
    truth, *expected = outputs_and_gradients(reference.selective, exact(inputs), torch.float32)
    if logit < -87:  # dt is below the smallest normal fp32 number
        assert y.abs().max() < 1e-36
    else:
        assert relative_error(y, truth) < 3e-7
        assert relative_error(gradients[1], expected[1]) < 2e-6


def test_rates_that_are_steep_or_grow():
    for scale in (-1e4, -30.0, 0.5, 200.0):
        inputs = selective_inputs(1, 9, 5, 4, torch.float32)
        # A is negative (states decay) for scale < 0, and positive (states grow) for scale > 0.
        inputs[2] = (-scale * inputs[2].detach()).requires_grad_()
        with torch.no_grad():
            y, truth = selective_scan(*inputs, backend="cpu"), selective_scan(*inputs, backend="reference")
        finite = torch.isfinite(truth)
        assert torch.equal(torch.isfinite(y), finite)
        torch.testing.assert_close(y[finite], truth[finite], rtol=1e-4, atol=1e-5)
    assert not finite.all()


@SCANS
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_infinity_propagate_where_they_do_in_the_reference(scan, reference_scan, make_inputs, poison):
    # No kernel may use the flags `fast`, `nnan` or `ninf`, with which LLVM assumes that no value is NaN or infinite.
    assert not compiler.FAST & {"fast", "nnan", "ninf"}
    for which in range(len(make_inputs(1, 1, 1, 1))):
        inputs = [t.detach().clone() for t in make_inputs(2, 70, 66, 4, torch.float32)]
        inputs[which][(0, 5, 1) if inputs[which].dim() == 3 else (1,) * inputs[which].dim()] = poison
        leaves = [t.requires_grad_() for t in inputs]
        found = outputs_and_gradients(on_cpu(scan), leaves)
        expected = outputs_and_gradients(lambda *t: scan(*t, backend="reference"), leaves)
        y, truth = torch.isfinite(found[0]), torch.isfinite(expected[0])
        if poison != poison:
            assert torch.equal(y, truth)
        else:  # for an infinite step logit, the CPU kernel may return the finite limit of the output
            assert y[~truth].logical_not().all() or which == 1
        # The value reaches only one image or one channel, so more than a third of the outputs stay finite.
        assert torch.isfinite(found[0]).sum() > found[0].numel() / 3
        for a, e in zip(found[1:], expected[1:], strict=True):
            assert a[torch.isnan(e)].isfinite().logical_not().all() or poison == poison


@SCANS
def test_a_nan_from_a_gpu_propagates(scan, reference_scan, make_inputs):
    """A NaN with all bits of the mantissa set, which NVIDIA GPUs compute, propagates through the scan."""
    inputs = [t.detach().clone() for t in make_inputs(1, 5, 3, 4, torch.float32)]
    inputs[1][0, 2, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    y = on_cpu(scan)(*inputs)
    assert y[0, 2:, 1].isnan().all()
    assert torch.isfinite(y).sum() == y.numel() - 3


def test_strided_rows_are_read_without_a_copy():
    keys, channels_apart = torch.randn(2, 3, 5, 9)[..., 1:5], torch.randn(2, 3, 4, 5).mT
    assert cpu_scan._readable(keys) is keys
    assert cpu_scan._readable(channels_apart).is_contiguous()


# Tests of threads


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@SCANS
def test_results_are_bitwise_identical_for_any_number_of_threads(
    scan, reference_scan, make_inputs, threads, monkeypatch
):
    inputs = make_inputs(3, 70, 150, 4, torch.float32)
    threads(1)
    expected = outputs_and_gradients(on_cpu(scan), inputs)
    for count in (2, 5, 64, None):
        if count is None:  # without a threading library, kernels use one thread
            monkeypatch.setattr(compiler, "_parallel", lambda: None)
        else:
            threads(count)
        for actual, truth in zip(outputs_and_gradients(on_cpu(scan), inputs), expected, strict=True):
            assert torch.equal(actual, truth)


def test_a_kernel_has_no_more_threads_than_tasks(threads, monkeypatch):
    """A kernel starts at most one thread per task, because more threads would have neither work nor scratch memory."""
    started, call = [], compiler._parallel()
    monkeypatch.setattr(compiler, "_parallel", lambda: lambda *given: started.append(given[2]) or call(*given))
    threads(3)
    for channels in (64, 65, 129, 193):  # a task computes 64 channels
        x, k = torch.randn(1, 2, channels), torch.randn(1, 2, 4)
        longhorn_scan(x, x, k, k, backend="cpu")
    assert started == [2, 3, 3]  # 2, 3 and 4 tasks run on 2, 3 and 3 threads


def test_calls_from_several_threads_at_once(threads):
    threads(2)
    inputs = longhorn_inputs(2, 70, 150, 4, torch.float32)
    expected = outputs_and_gradients(on_cpu(longhorn_scan), inputs)
    wrong = []

    def call():
        torch.set_num_threads(2)  # set per thread, because a Python thread may not inherit PyTorch's number of threads
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
    torch.set_num_threads(1)  # one thread, as in DataLoader workers, because OpenMP threads do not survive a fork
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


# Tests of compilation, of the cache, and of machines without Numba


SCRIPT = """
import math, sys, vil.kernels
assert "numba" not in sys.modules and "llvmlite" not in sys.modules
math.pow = lambda x, y: x**y  # torch.export replaces math.pow while tracing
from vil.kernels.cpu import compiler
print(compiler.unavailable(), "numba" in sys.modules)
assert compiler.load("vil.kernels.cpu.language", "nothing", ())  # again
"""


def start_without_numba(script):
    """Run a script in a process in which Numba is not imported yet."""
    anew = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    return (anew if UNDER_TEST else run)([sys.executable, str(script)])


def test_later_processes_load_cached_kernels_without_importing_numba(tmp_path, monkeypatch):
    folder, script = tmp_path / "cache", tmp_path / "script.py"
    monkeypatch.setenv("VIL_CACHE_DIR", str(folder))
    script.write_text(SCRIPT)

    def imports_numba():
        ended = start_without_numba(script)
        reason, imported = ended.stdout.split()
        assert reason == "None"
        assert ("compiling kernels for this CPU" in ended.stderr) == (imported == "True")
        return imported == "True"

    assert imports_numba()
    (entry,) = folder.iterdir()
    assert entry.name.startswith("nothing-")
    assert not imports_numba()
    binary = entry.read_bytes()
    entry.write_bytes(binary[:-100] + bytes(100))
    assert imports_numba()
    assert not imports_numba()  # the damaged entry has been replaced


@pytest.fixture
def without_numba(monkeypatch):
    caches = compiler.unavailable, scan_op._module, backends._backend_for
    find = compiler.importlib.util.find_spec
    monkeypatch.setattr(
        compiler.importlib.util, "find_spec", lambda name, *a: None if name == "numba" else find(name, *a)
    )
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def test_without_numba_the_reference_runs_and_warns_once(without_numba):
    x, k = torch.randn(1, 3, 5), torch.randn(1, 3, 4)
    with pytest.warns(UserWarning, match="numba is missing.*Using the reference instead"):
        y = longhorn_scan(x, x, k, k)
    assert torch.equal(y, longhorn_scan(x, x, k, k, backend="reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose("auto", x, 4, 1) == "reference"
    with pytest.raises(RuntimeError, match="the cpu backend cannot run: numba is missing: pip install numba"):
        longhorn_scan(x, x, k, k, backend="cpu")


def test_a_backend_whose_library_does_not_load_is_unavailable(monkeypatch):
    monkeypatch.setattr(compiler, "load", lambda *_: 1 / 0)
    compiler.unavailable.cache_clear()
    assert "numba does not work (ZeroDivisionError" in compiler.unavailable()
    compiler.unavailable.cache_clear()


def test_inputs_that_cpu_kernels_do_not_support_run_on_the_reference():
    x, k = torch.zeros(1, 2, 3), torch.zeros(1, 2, 65)
    assert backends.choose("auto", x, 64, 1) == "cpu"
    assert backends.choose("auto", x, 65, 1) == backends.choose("auto", x.double(), 4, 1) == "reference"
    with pytest.raises(ValueError, match="the cpu backend supports up to 64 states and 63 directions, got 65 and 1"):
        longhorn_scan(x, x, k, k, backend="cpu")
    with pytest.raises(ValueError, match="must be on a CPU for the cpu backend, got x on meta"):
        longhorn_scan(*(t.to("meta") for t in (x, x, k, k)), backend="cpu")


def changed_file(name):
    return Path, "read_text", lambda read: lambda path, **options: read(path, **options) + "#" * (path.name == name)


def changed_version(package):
    return importlib.metadata, "version", lambda version: lambda name: version(name) + ".1" * (name == package)


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [
        *(changed_file(name) for name in ("cpu_kernels.py", "language.py", "compiler.py")),
        *(changed_version(package) for package in ("numba", "llvmlite", "numpy")),
        (llvm, "get_host_cpu_name", lambda get: lambda: "another"),
        (llvm, "get_host_cpu_features", lambda get: lambda: SimpleNamespace(flatten=lambda: "+another")),
    ],
)
def test_machine_code_of_other_sources_versions_or_processors_is_not_loaded(owner, name, change, monkeypatch):
    asked, caches = [], (compiler._sources, compiler._versions, compiler._target)
    monkeypatch.setattr(compiler, "_addresses", {})
    monkeypatch.setattr(compiler.cache, "read", lambda entry, key: asked.append((entry, key)) or 1 / 0)
    for change_or_none in (None, None, change):
        if change_or_none:
            monkeypatch.setattr(owner, name, change(getattr(owner, name)))
        for function in caches:
            function.cache_clear()
        with pytest.raises(ZeroDivisionError):
            compiler.load("vil.kernels.scan.cpu_kernels", "forward", ("longhorn", 16, 64))
    for function in caches:
        function.cache_clear()
    once, again, other = asked
    assert once == again
    assert all(a != b for a, b in zip(once, other))


def test_a_kernel_that_calls_python_is_rejected_before_loading(monkeypatch):
    def needs_python(*constants):
        def kernel(arguments):
            raise ValueError

        return kernel

    monkeypatch.setattr(cpu_kernels, "needs_python", needs_python, raising=False)
    with pytest.raises(RuntimeError, match="needs_python of .* must not call external functions"):
        compiler.compile_kernel(cpu_kernels.__name__, "needs_python", ())


def test_vectors_are_as_wide_as_the_cpu_has_them_whatever_numba_compiled_before(tmp_path):
    features = llvm.get_host_cpu_features().flatten().split(",")
    if "+avx512f" not in features:
        pytest.skip("needs a CPU with vectors of 512 bits")
    program = """
import re
from numba import njit
from numba.core import ccallback
njit(lambda x: x + 1)(1)  # Numba reads the CPU's features only before its first compilation
from vil.kernels.cpu import compiler
inspect = ccallback.CFunc.inspect_llvm
ccallback.CFunc.inspect_llvm = lambda self: print(*re.findall(r"<[0-9]+ x float>", inspect(self))) or inspect(self)
compiler.compile_kernel("vil.kernels.scan.cpu_kernels", "forward", ("longhorn", 16, 64))
"""
    (tmp_path / "script.py").write_text(program)
    done = start_without_numba(tmp_path / "script.py")
    assert done.stdout.count("<16 x float>") > done.stdout.count("<8 x float>")
