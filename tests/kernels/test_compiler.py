"""Tests of compiling, caching and launching CUDA kernels without a GPU: NVRTC compiles, and stubs record launches."""

import io
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from blocks import OnGpu
from processes import in_processes

from vil.kernels import cuda
from vil.kernels.block import gate, gate_outproj_sm90
from vil.kernels.cuda import compiler, launches, source
from vil.kernels.cuda.source import DOUBLE, I64, In, Out, Source

NVRTC = pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC and cuda.core")
# minimal kernel; `if constexpr` requires that NVRTC compiles C++17
TINY = """#include "types.cuh"
extern "C" __global__ void tiny(PARAMETERS_tiny) {
    if constexpr (sizeof(p) == 8) *p = VALUE;
}"""
VALUES = 0x12345678, 0x23456789
DECLARED = Source(
    "scan/forward_simt",
    {
        "entry": dict(x=In("float"), z=In("float"), y=Out("float"), count=I64, eps=DOUBLE, w=Out("Element", pack=8)),
        "other": dict(x=In("float")),
    },
)


def of(name):
    """Return a `Source` for the kernel `tiny`."""
    return Source(name, {"tiny": dict(p=Out("int", restrict=False))})


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Replace the kernel sources by a small kernel and a header, use an empty cache, and return the source folder."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "types.cuh").write_text("// a header\n")
    (sources / "tiny.cu").write_text(TINY)
    monkeypatch.setattr(source, "SOURCES", sources)
    monkeypatch.setenv("VIL_CACHE_DIR", str(tmp_path / "cache"))
    return sources


def code(arch="sm_90", value=VALUES[0], name="tiny"):
    return compiler.cached_cubin(of(name), arch, (("VALUE", value),))


def has(cubin, value):
    return value.to_bytes(4, "little") in cubin


@NVRTC
def test_a_kernel_is_compiled_for_its_architecture_and_with_its_macros(tiny):
    for arch, number in (("sm_80", 80), ("sm_90", 90)):
        for value in VALUES:
            cubin = compiler.compile_cubin(of("tiny"), arch, (("VALUE", value),))
            assert b"tiny" in cubin
            assert [has(cubin, v) for v in VALUES] == [v == value for v in VALUES]
            assert number in cubin[48:50]  # the ELF flags of CUDA 12 and 13 contain the architecture
    log = io.StringIO()
    compiler.compile_cubin(of("tiny"), "sm_80", (("VALUE", 1),), log)
    assert "0 bytes spill stores" in log.getvalue()
    (tiny / "types.cuh").write_text(f"#undef VALUE\n#define VALUE {VALUES[1]}\n")
    assert has(code(), VALUES[1])  # a changed header is read again


@pytest.fixture
def compiled(monkeypatch):
    """Replace the compiler by a stub. The returned list records the arguments of each compilation."""
    pytest.importorskip("cuda.bindings")
    found = []

    def compile_cubin(name, arch, macros, log=None):
        found.append((name, arch, macros))
        return f"code {len(found)}".encode()

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    return found


def newer_nvrtc(monkeypatch, **changed):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    success, major, minor = nvrtc.nvrtcVersion()
    release = (success, changed.get("major", 0) + major, changed.get("minor", 0) + minor)
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: release)


DIFFERENCES = {
    "macro": lambda sources, patch: dict(value=VALUES[1]),
    "architecture": lambda sources, patch: dict(arch="sm_80"),
    "source": lambda sources, patch: (sources / "tiny.cu").write_text(TINY + "\n") and {},
    "header": lambda sources, patch: (sources / "types.cuh").write_text("// another header\n") and {},
    "name": lambda sources, patch: shutil.copy(sources / "tiny.cu", sources / "other.cu") and dict(name="other"),
    "release": lambda sources, patch: newer_nvrtc(patch, major=1) or {},
    "minor release": lambda sources, patch: newer_nvrtc(patch, minor=1) or {},
    "nothing": lambda sources, patch: {},
}


@pytest.mark.parametrize("differs", DIFFERENCES)
def test_the_cache_returns_only_code_compiled_from_identical_inputs(differs, tiny, compiled, monkeypatch):
    first, arguments = code(), DIFFERENCES[differs](tiny, monkeypatch)
    found = [code(**arguments), code(**arguments)]
    assert found == [first if differs == "nothing" else b"code 2"] * 2
    assert len(compiled) == (1 if differs == "nothing" else 2)


def test_the_environment_selects_the_cache_folder(tiny, compiled, tmp_path, monkeypatch):
    def files():
        code()
        found = list(tmp_path.rglob("*.sealed"))
        for f in found:
            f.unlink()
        return [f.parent for f in found]

    assert files() == [tmp_path / "cache"]
    monkeypatch.delenv("VIL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert files() == [tmp_path / "xdg/vision-longhorn"]
    for unset in (lambda: monkeypatch.setenv("XDG_CACHE_HOME", ""), lambda: monkeypatch.delenv("XDG_CACHE_HOME")):
        unset()
        assert files() == [tmp_path / "home/.cache/vision-longhorn"]


def codes(_, sources, cache):
    """Compile the kernel `tiny` twice for each of VALUES, with the given source folder and cache. Return the codes."""
    source.SOURCES = sources
    os.environ["VIL_CACHE_DIR"] = str(cache)
    return [code(value=value) for value in VALUES * 2]


@NVRTC
def test_processes_that_start_at_once_on_a_cold_cache_all_get_the_kernel(tiny, tmp_path):
    ended = in_processes(2, codes, tiny, tmp_path / "cache")
    cubins = [cubin for process in ended for cubin in process.value]
    assert [[has(cubin, v) for v in VALUES] for cubin in cubins] == [[True, False], [False, True]] * 4
    files = [f.read_bytes()[compiler.cache.DIGEST_BYTES :] for f in (tmp_path / "cache").iterdir()]
    assert sorted(files) == sorted(cubins[:2])
    assert cubins == cubins[:2] * 4


# Tests of kernel launches, which stubs of cuda.core record


@pytest.fixture
def gpu(monkeypatch):
    """Simulate two GPUs of compute capability 9.0, of which GPU 0 is current, and record launches."""
    core, bindings = pytest.importorskip("cuda.core"), pytest.importorskip("cuda.bindings")
    state = SimpleNamespace(current=0, launches=[], bound=[], asked=[], loaded=[], capability=(9, 0), driver=13000)
    success = bindings.driver.CUresult.CUDA_SUCCESS
    state.answer = success

    class Current:  # stub of `torch.cuda.device`
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, state.current = state.current, self.index

        def __exit__(self, *_):
            state.current = self.before

    def get_kernel(cubin, entry):
        return SimpleNamespace(cubin=cubin, entry=entry, handle=f"handle of {entry}")

    def set_attribute(attribute, value, kernel, device):
        state.asked.append((attribute.name, value, kernel, int(device)))
        return (state.answer,)

    def launch(stream, config, kernel, *values):
        state.launches.append((state.current, stream, config, kernel, values))

    cubin_of = SimpleNamespace(from_cubin=lambda cubin: SimpleNamespace(get_kernel=lambda e: get_kernel(cubin, e)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state.capability)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(cuda_stream=f"PyTorch's stream of GPU {device.index}"),
    )
    monkeypatch.setattr(core, "ObjectCode", cubin_of)
    monkeypatch.setattr(core, "Stream", SimpleNamespace(from_handle=lambda handle: handle))
    monkeypatch.setattr(core, "Device", lambda i: SimpleNamespace(set_current=lambda: state.bound.append(i)))
    monkeypatch.setattr(core, "launch", launch)
    monkeypatch.setattr(bindings.driver, "cuKernelSetAttribute", set_attribute)
    monkeypatch.setattr(bindings.driver, "cuDriverGetVersion", lambda: (success, state.driver))
    monkeypatch.setattr(bindings.driver, "CUdevice", int)
    monkeypatch.setattr(
        launches,
        "cached_cubin",
        lambda of, *wanted: state.loaded.append((of.name, *wanted)) or " ".join(map(str, (of.name, *wanted))),
    )
    monkeypatch.setattr(launches, "thread", SimpleNamespace())
    caches = launches._kernel, launches._stream, launches._launcher
    for cache in caches:
        cache.cache_clear()
    yield state
    for cache in caches:
        cache.cache_clear()


def launch(of=DECLARED, entry="entry", macros={}, grid=1, block=32, shared_bytes=0, **changed):  # noqa: B006
    x = torch.zeros(6).as_subclass(OnGpu)
    arguments = dict(x=x, z=None, y=x[2:], count=3, eps=0.5, w=x.bfloat16()) if entry == "entry" else dict(x=x)
    launches.launch(of, entry, dict(INPUT="bf16", **macros), grid, block, arguments | changed, shared_bytes)


def test_a_launch_passes_tensors_as_pointers_and_numbers_in_64_bits_as_the_kernel_has_them(gpu):
    x = torch.zeros(6).as_subclass(OnGpu)
    y, w = x[2:], torch.zeros(3, dtype=torch.bfloat16).as_subclass(OnGpu)
    launch(macros=dict(B=1, A="x"), grid=7, block=64, shared_bytes=100, w=w, x=x, y=y, count=2**40, eps=1)
    launch(y=None, count=True)
    (current, stream, config, kernel, values), (*_, others) = gpu.launches
    assert values == (x.data_ptr(), 0, y.data_ptr(), 2**40, 1.0, w.data_ptr())
    # cuda.core passes Python ints and floats as 64-bit values.
    assert [type(v) for v in values] == [int, int, int, int, float, int]
    assert others[2:4] == (0, 1)
    assert type(others[3]) is int
    assert (config.grid, config.block, config.shmem_size) == ((7, 1, 1), (64, 1, 1), 100)
    assert kernel.entry == "entry"
    assert gpu.loaded[0] == ("scan/forward_simt", "sm_90", (("A", "x"), ("B", 1), ("INPUT", "bf16")))
    # A launch uses the tensors' GPU, even if another GPU is current, and PyTorch's current stream on the tensors' GPU.
    assert (current, stream, gpu.bound) == (1, "PyTorch's stream of GPU 1", [1])
    assert gpu.current == 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (dict(u=1), r"missing \[\], unknown \['u'\]"),
        (dict(count=2.0), "count of entry .* got 2.0"),
        (dict(count=None), "count of entry .* got None"),
        (dict(count=torch.zeros(1)), "count of entry .* got tensor"),
        (dict(eps=None), "eps of entry .* got None"),
        (dict(y=4096), "y of entry .* must be a tensor for float .*got 4096"),
        (dict(y=torch.zeros(1).double()), "y of entry .*must be torch.float32, got torch.float64"),
        (dict(w=torch.zeros(1).half()), "w of entry .*must be torch.bfloat16, got torch.float16"),
    ],
)
def test_a_launch_with_an_unknown_or_invalid_argument_is_rejected_by_name(changed, named, gpu):
    with pytest.raises(TypeError, match=named):
        launch(**changed)
    assert gpu.launches == []


def test_a_launch_without_a_required_argument_is_rejected_by_name(gpu):
    with pytest.raises(TypeError, match=r"entry in scan/forward_simt.cu .*missing \['z', .*'w'\], unknown \['u'\]"):
        launches.launch(DECLARED, "entry", {}, 1, 32, dict(x=None, u=None))


def test_a_thread_is_bound_to_the_gpu_once_and_a_kernel_loaded_once(gpu):
    for grid in (7, 8):
        launch(macros=dict(A=1), grid=grid, block=64)
    launch(macros=dict(A=2), grid=7, block=64)
    launch(entry="other", macros=dict(A=2), grid=7)
    assert [c.grid[0] for _, _, c, _, _ in gpu.launches] == [7, 8, 7, 7]
    assert [c.block[0] for _, _, c, _, _ in gpu.launches] == [64, 64, 64, 32]
    assert [(k.entry, "('A', 1)" in k.cubin) for *_, k, _ in gpu.launches] == [
        ("entry", True), ("entry", True), ("entry", False), ("other", False),
    ]  # fmt: skip
    assert gpu.bound == [1]
    assert len(gpu.loaded) == 3


@pytest.mark.parametrize(
    ("only_hopper", "capability", "arch"),
    [(False, (8, 0), "sm_80"), (False, (12, 1), "sm_121"), (True, (9, 0), "sm_90a")],
)
def test_kernels_are_compiled_for_the_gpu_that_has_the_tensors(only_hopper, capability, arch, gpu):
    gpu.capability = capability
    launch(Source(DECLARED.name, DECLARED.kernels, only_hopper=only_hopper))
    assert gpu.loaded == [(DECLARED.name, arch, (("INPUT", "bf16"),))]
    assert gate_outproj_sm90.SOURCE.only_hopper  # the kernel uses instructions of sm_90a, which sm_90 lacks


@pytest.mark.parametrize(
    ("capability", "driver", "supported"),
    [((8, 9), 13000, False), ((9, 0), 13000, True), ((12, 0), 12030, True), ((9, 0), 12020, False)],
)
def test_kernels_without_early_accesses_overlap_with_the_previous_kernel_if_gpu_and_driver_support_it(
    capability, driver, supported, gpu
):
    gpu.capability, gpu.driver = capability, driver
    launch()
    launch(Source(DECLARED.name, {"other": dict(x=Out("float", early=True))}), "other")
    assert [config.programmatic_stream_serialization for _, _, config, _, _ in gpu.launches] == [supported, False]


def test_large_shared_memory_is_requested_and_too_much_is_rejected(gpu):
    launch(shared_bytes=48 * 1024)
    assert gpu.asked == []
    launch(shared_bytes=48 * 1024 + 1)
    attribute = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert gpu.asked == [(attribute, 48 * 1024 + 1, "handle of entry", 1)]
    gpu.answer = type(gpu.answer).CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="entry needs 999999 bytes of shared memory per CTA: CUDA_ERROR_INVALID"):
        launch(shared_bytes=999999)
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("other", [None, torch.zeros(3).as_subclass(OnGpu), torch.zeros(3, device="meta")])
@pytest.mark.parametrize("first", [True, False])
def test_tensors_of_a_launch_must_be_on_one_gpu(other, first):
    y, z = (torch.zeros(2), other) if first else (other, torch.zeros(2))
    arguments = dict(dgated=y, means=z, z_stride=1, dy_stride=1, dz_stride=1, tokens=1, L=1, D=1)
    arguments |= dict.fromkeys(("z", "scales", "dy", "dz", "gated"))
    with pytest.raises(ValueError, match=r"tensors of gate_backward must be on one GPU, got .*cpu"):
        launches.launch(gate.SOURCE, "gate_backward", dict(POOLED=0, INPUT="float"), 1, 32, arguments)


# Tests of missing packages and missing GPUs


@NVRTC
def test_missing_packages_for_cuda_kernels_are_named_with_the_remedy(monkeypatch):
    unavailable = compiler.unavailable.__wrapped__
    assert unavailable() is None
    from cuda.bindings import nvrtc

    def does_not_load():
        raise RuntimeError("libnvrtc.so.13 not found")

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "nvrtcVersion", does_not_load)
        patch.setattr(torch.version, "cuda", "12.8")
        assert "(RuntimeError: libnvrtc.so.13 not found): pip install 'cuda-core[cu12]'" in unavailable()
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    reason = unavailable()
    assert "cuda.core" in reason
    assert "pip install 'cuda-core[cu13]'" in reason


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((7, 5), "must be at least 8.0 for the cuda backend, got 7.5 on cuda:1"),
        ((8, 0), None),
        ((8, 9), None),
        ((12, 0), None),
    ],
)
def test_gpus_from_sm_80_are_supported(capability, reason, monkeypatch):
    of_devices = {torch.device("cuda", 1): capability, None: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", of_devices.get)
    monkeypatch.setattr(compiler, "unavailable", lambda: None)
    found = cuda.unavailable(torch.device("cuda", 1))
    assert cuda.runs_on(torch.device("cuda", 1)) == (reason is None)
    assert found is None if reason is None else reason in found
    monkeypatch.setattr(compiler, "unavailable", lambda: "NVRTC is missing")
    assert reason is not None or cuda.unavailable(torch.device("cuda", 1)) == "NVRTC is missing"
