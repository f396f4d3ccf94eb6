"""CUDA kernels compiled by g++ and emulated on a CPU. `emulator.launch` replaces `launches.launch` in tests."""

import contextlib
import ctypes
import functools
import hashlib
import math
import mmap
import os
import re
import resource
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vil.kernels.cuda import hardware, launches, source

EMULATED = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
# C++ code that replaces GPU-only code such as inline PTX. Each key is a regular expression for the replaced code.
MEANING = {
    r'asm\("{.reg .b16 a, b;.*?"r"\(word\)\);': "f.at[0] = from_fp16(word & 0xffff), f.at[1] = from_fp16(word >> 16);",
    r'asm\("cvt.rn.bf16x2.f32 .*?;"[^;]*;': "word = to_bf16(low) | to_bf16(high) << 16;",
    r'asm\("cvt.rn.f16x2.f32 .*?;"[^;]*;': "word = to_fp16(low) | to_fp16(high) << 16;",
    r"unsigned to = __cvta_generic_to_shared\(shared\);": "",
    r'asm volatile\("cp.async.c[ag].shared.global [^;]*;"[^;]*;': "start_copy(shared, global, BYTES, valid);",
    r'asm volatile\("cp.async.commit_group;"[^;]*;': "commit_started();",
    r'asm volatile\("cp.async.wait_group [^;]*;"[^;]*;': "wait_until(PENDING);",
    r'asm\("ex2.approx.ftz.f32 [^;]*;"[^;]*;': "y = exp2f(x);",
    r'asm\("rcp.approx.ftz.f32 [^;]*;"[^;]*;': "y = 1 / x;",
    r'asm\("tanh.approx.f32 [^;]*;"[^;]*;': "y = tanhf(x);",
    r'asm\("tanh.approx.f16x2 [^;]*;"[^;]*;': (
        "y.word = to_fp16(tanhf(from_fp16(x.word & 0xffff))) | to_fp16(tanhf(from_fp16(x.word >> 16))) << 16;"
    ),
    r'asm\("fma.rn.f16x2 [^;]*;"[^;]*;': (
        "sum.word = to_fp16(from_fp16(a.word & 0xffff) * from_fp16(b.word & 0xffff) + from_fp16(c.word & 0xffff))"
        " | to_fp16(from_fp16(a.word >> 16) * from_fp16(b.word >> 16) + from_fp16(c.word >> 16)) << 16;"
    ),
    r'asm\("min.NaN.f32 [^;]*;"[^;]*;': "c = a != a || b != b ? NAN : min(a, b);",
    r'asm\("mma.sync.aligned.m16n8k16.row.col.f32.bf16.*?"r"\(b_1\)\);': (
        "multiply_fragments([](unsigned bits) { return __uint_as_float(bits << 16); }, &sums[0].at[0],"
        " {a_0, a_1, a_2, a_3, b_0, b_1});"
    ),
    r'asm\("mma.sync.aligned.m16n8k16.row.col.f32.f16.*?"r"\(b_1\)\);': (
        "multiply_fragments(from_fp16, &sums[0].at[0], {a_0, a_1, a_2, a_3, b_0, b_1});"
    ),
    r'asm\("mma.sync.aligned.m16n8k16.row.col.f32.bf16[^;]*;"[^;]*"f"\(start\)\);': (
        "for (int i = 0; i < 4; i++) product[i] = start; multiply_fragments([](unsigned bits) {"
        " return __uint_as_float(bits << 16); }, product, {a[0], a[1], a[2], a[3], b_0, b_1});"
    ),
    r'asm\("mma.sync.aligned.m16n8k16.row.col.f32.f16[^;]*;"[^;]*"f"\(start\)\);': (
        "for (int i = 0; i < 4; i++) product[i] = start;"
        " multiply_fragments(from_fp16, product, {a[0], a[1], a[2], a[3], b_0, b_1});"
    ),
    r'asm\("fma.rn.bf16x2 [^;]*;"[^;]*;': (
        "product = to_bf16(unpack(bf16{}, a).at[0] * unpack(bf16{}, b).at[0])"
        " | to_bf16(unpack(bf16{}, a).at[1] * unpack(bf16{}, b).at[1]) << 16;"
    ),
    r'asm\("mul.rn.f16x2 [^;]*;"[^;]*;': (
        "product = to_fp16(from_fp16(a & 0xffff) * from_fp16(b & 0xffff))"
        " | to_fp16(from_fp16(a >> 16) * from_fp16(b >> 16)) << 16;"
    ),
    # Emulate matrix products of depth 8 by those of depth 16, in which half of the columns of `a` are zero.
    r'asm\("mma.sync.aligned.m16n8k8.row.col.f32.bf16.*?"f"\(start\)\);': (
        "for (int i = 0; i < 4; i++) product[i] = start; multiply_fragments([](unsigned bits) {"
        " return __uint_as_float(bits << 16); }, product, {a_0, a_1, 0, 0, b, 0});"
    ),
    r'asm\("mma.sync.aligned.m16n8k8.row.col.f32.f16.*?"f"\(start\)\);': (
        "for (int i = 0; i < 4; i++) product[i] = start;"
        " multiply_fragments(from_fp16, product, {a_0, a_1, 0, 0, b, 0});"
    ),
    r'asm volatile\("bar.sync 1, %0;" ::"n"\((.*?)\) : "memory"\);': r"wait_for_some(\1);",
    r'asm volatile\("ldmatrix.sync.aligned.m8n8.x(\d).shared.*?"memory"\);': r"load_rows(m, \1, row, false);",
    r'asm volatile\("ldmatrix.sync.aligned.m8n8.x(\d).trans.*?"memory"\);': r"load_rows(m, \1, row, true);",
    r'asm\("movmatrix.sync.*?"r"\(m\)\);': "transposed = transpose_rows(m);",
    r"DEVICE unsigned shared_address.*": "",
    r'asm\("mul.wide.s32 [^;]*;"[^;]*;': "offset = i64(t) * stride;",
    r'asm volatile\("ld.global.cs.v4.f32 .*?"l"\(p\)\);': "v = load<4>(p);",
    r'asm\("" : [^;]*;': ";",
    r'asm volatile\("griddepcontrol.[^;]*;"[^;]*;': "",  # not emulated, because the emulator runs one kernel at a time
    r'asm volatile\("" ::: "memory"\);': ";",
    r"extern __shared__ __align__\(\d+\) char shared\[\];": "char *shared = shared_memory;",
    r"__shared__ (\w+) (\w+)(\[.*\]);": r"static \1 \2\3; static unsigned of_\2; emulator::begin_as_nan(\2, of_\2);",
    # check addresses, because a GPU rejects vector loads and stores at unaligned addresses
    r"(DEVICE Pack<T, C> load\(const T \*p\) {)": r"\1 emulator::check_aligned(p, sizeof(Pack<T, C>));",
    r"(DEVICE void store\(T \*p, Pack<T, C> v\) {)": r"\1 emulator::check_aligned(p, sizeof v);",
    r"#pragma unroll.*": "",
    r'_Pragma\("unroll"\)': "",
}


# undefine _FORTIFY_SOURCE, with which a longjmp to another stack would abort the process
COMMAND = ["g++", "-std=c++17", "-Og", "-w", "-fno-exceptions", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
COMMAND += ["-shared", "-fPIC"]
AHEAD, BEHIND = (Path(__file__).parent / "emulator.cpp").read_text().split("/* KERNELS */")
# cache of compiled kernels, whose file names are hashes of the source, the compiler and its options
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "emulated"


@functools.cache
def _library(of: source.Source, macros: tuple) -> tuple[ctypes.CDLL, list[str]]:
    hopper = (source.SOURCES / "cuda/sm90.cuh").read_text()  # emulator.cpp emulates the functions of sm90.cuh
    kernels = of.text.replace(hopper.partition('#include "types.cuh"\n')[2], "")
    for ptx, meaning in MEANING.items():
        kernels = re.sub(ptx, meaning, kernels, flags=re.S if ptx.startswith("asm") else 0)
    assert "asm" not in kernels, "the emulator has no C++ replacement for this PTX; add one to MEANING"
    entries = re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\(.*\)\s+)?(\w+)\(', kernels)
    defines = "".join(f"#define {macro} {value}\n" for macro, value in macros)
    defines += "#define ENTRIES " + " ".join(f"ENTRY({entry})" for entry in entries) + "\n"
    return ctypes.CDLL(str(_compiled(defines + kernels + BEHIND))), entries


def _compiled(program: str) -> Path:
    def run(*arguments):
        subprocess.run([*COMMAND, *arguments], input=program, text=True, check=True)

    how = f"{_compiler()}{COMMAND}{AHEAD}"
    # The common header is precompiled, because g++ uses X.h.gch instead of X.h if the flags match.
    header = kept(how, ".h", lambda file: file.write_text(AHEAD))
    kept(how, ".h.gch", lambda file: run("-x", "c++-header", header, "-o", file))
    return kept(how + program, ".so", lambda file: run("-include", header, "-x", "c++", "-", "-o", file))


def kept(key: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """Return the path of a key's cached file. Call `make(path)` to write the file if no test process has done so."""
    file = CACHE / (hashlib.sha256(key.encode()).hexdigest() + suffix)
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=CACHE)
        os.close(descriptor)
        make(Path(temporary))
        os.replace(temporary, file)
    return file


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def as_if_on_a_gpu(monkeypatch, multiprocessors=1, hopper=False, shared_bytes=227 << 10):
    """Emulate kernel launches on a CPU, and simulate the GPU properties on which launch parameters depend."""
    monkeypatch.setattr(launches, "launch", launch)
    answers = dict(multiprocessors=multiprocessors, is_hopper=hopper, shared_bytes=shared_bytes)
    for question, answer in answers.items():
        monkeypatch.setattr(hardware, question, lambda device, answer=answer: answer)


_needed: list | None = None  # inside the context `compiling`, the kernels to compile; otherwise None


@contextlib.contextmanager
def compiling():
    """Context manager that collects kernels instead of running them, and compiles them, two at a time, on exit."""
    global _needed
    _needed = []
    try:
        yield
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda kernel: _library(*kernel), dict.fromkeys(_needed)))
    finally:
        _needed = None


def launch(of, entry, macros, ctas, threads, arguments, shared_bytes=0, *, blocks=None):
    """Emulate a kernel launch. For huge tensors, `blocks` limits the emulation to the last blocks of the grid."""
    checked = launches.Launch(of, entry, macros, ctas, threads, arguments, shared_bytes)
    if _needed is not None:
        _needed.append((of, tuple(sorted(macros.items()))))
        return
    with _guarded(entry, [t for _, t in checked.tensors]) as moved_by:
        values = checked.values.copy()
        for place, t in checked.tensors:
            values[place] = t.data_ptr() + moved_by(t)
        run_with(checked, values, blocks=blocks)


def run_with(checked, values, stream=None, *, blocks=None):
    """Emulate `Launch.run_with`. Tensors have no NaN guards, because `values` contains only the tensors' addresses."""
    library, entries = _library(checked.source, tuple(sorted(checked.macros.items())))
    first, shared_bytes = (
        0 if blocks is None else max(0, checked.ctas - blocks),
        ctypes.c_longlong(checked.shared_bytes),
    )
    array = (ctypes.c_longlong * len(values))(*map(_bits, values))
    library.launch.restype = ctypes.c_char_p
    failure = library.launch(
        entries.index(checked.entry), array, len(values), first, checked.ctas, checked.threads, shared_bytes
    )
    if failure:
        raise RuntimeError(f"{checked.entry}: {failure.decode()}")


GUARD = 1 << 14  # minimum size in bytes of the NaN guard before a tensor
COPIED = 1 << 28  # maximum size in bytes of a tensor with guards
PROT_NONE = 0  # flag of mprotect for memory that can be neither read nor written


def _between_guards(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy bytes to new memory, and return the NaN guard before the copy, the copy, and up to 15 NaN bytes behind it.

    The memory that follows is unreadable, so that the emulator notices a kernel that reads beyond the copy's end.
    """
    size = -(-(GUARD + len(content)) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), dtype=torch.uint8)
    behind = (size - len(content)) % 16  # copies are aligned to 16 bytes
    parts = memory[:size].fill_(0xFF).split([size - len(content) - behind, len(content), behind])
    parts[1].copy_(content)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory[size:].data_ptr()), mmap.PAGESIZE, PROT_NONE):
        raise OSError("the memory behind a tensor cannot be made unreadable")
    return parts


@contextlib.contextmanager
def _guarded(entry: str, tensors: list[torch.Tensor]):
    """Run a kernel on copies of tensors between guards, check that the guards are unchanged, and copy back.

    Yields a function that returns the offset of a tensor's copy from the tensor, in bytes.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
    storages = {start: storage for start, storage in storages.items() if storage.nbytes() <= COPIED}
    bytes_of = {start: torch.tensor([], dtype=torch.uint8).set_(storage) for start, storage in storages.items()}
    copies = {start: _between_guards(content) for start, content in bytes_of.items()}

    def moved_by(t: torch.Tensor) -> int:
        start = t.untyped_storage().data_ptr()
        return copies[start][1].data_ptr() - start if start in copies else 0

    yield moved_by
    for start, content in bytes_of.items():
        before, now, behind = copies[start]
        if not (before == 0xFF).all() or not (behind == 0xFF).all():
            which = [i for i, t in enumerate(tensors) if t.untyped_storage().data_ptr() == start]
            raise RuntimeError(f"kernel {entry} writes beyond the memory of its arguments {which}")
        content.copy_(now)


_sparse: list | None = None  # inside `sparse_where_large`, the allocated large tensors; otherwise None


def sparse(size, dtype=torch.float32, stride=None) -> torch.Tensor:
    """Return a tensor of zeros of any size, even terabytes, because only written pages use memory."""
    if _sparse is not None:
        _limit_memory(None)
    stride = stride or [math.prod(size[i + 1 :]) for i in range(len(size))]
    elements, around = 1 + sum((n - 1) * s for n, s in zip(size, stride)), 1 << 33
    # mmap.MAP_NORESERVE exists since Python 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, elements * dtype.itemsize + 2 * around, flags=flags)
    tensor = torch.frombuffer(memory, dtype=dtype, count=elements, offset=around).as_strided(size, stride)
    if _sparse is not None:
        _sparse.append(tensor)
        _limit_memory(2 << 30)
    return tensor


def _limit_memory(more: int | None) -> None:
    """Limit this process to its current memory plus `more` bytes, so that copying a sparse tensor fails."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    taken = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (hard if more is None else taken + more, hard))


@functools.cache
def has_sparse() -> bool:
    """Return whether this machine can reserve address space without allocating pages."""
    try:
        return sparse((1 << 40,)).numel() > 0
    except OSError:
        return False


@contextlib.contextmanager
def sparse_where_large(blocks: int = 16):
    """Allocate large tensors sparsely, and yield a `launch` that runs only the last `blocks` blocks of each grid."""
    global _sparse
    real, real_like, real_new = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def empty(*size, device=None, dtype=torch.float32):
        size = size[0] if isinstance(size[0], tuple | list) else size
        return sparse(size, dtype) if math.prod(size) > 1 << 20 else real(size, device=device, dtype=dtype)

    def empty_like(t, dtype=None, device=None, memory_format=None):
        return empty(t.shape, device=t.device, dtype=dtype or t.dtype)

    def new_empty(t, *size, dtype=None):
        return empty(*size, device=t.device, dtype=dtype or t.dtype)

    try:
        _sparse = []
        _limit_memory(2 << 30)
        torch.empty, torch.empty_like, torch.Tensor.new_empty = empty, empty_like, new_empty
        yield functools.partial(launch, blocks=blocks)
    finally:
        _sparse = None
        _limit_memory(None)
        torch.empty, torch.empty_like, torch.Tensor.new_empty = real, real_like, real_new


def _bits(number: int | float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0] if isinstance(number, float) else int(number)
