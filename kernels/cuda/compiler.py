"""CUDA C++ to kernels: NVRTC through NVIDIA's `cuda.core` at first use, and a cache of the binaries on disk."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from pathlib import Path

import torch

from . import cache

SOURCES = Path(__file__).parents[1]
OLDEST = (8, 0)
HOPPER = (9, 0)
ONLY_HOPPER = {"block/gate_outproj_sm90", "block/gate_outproj_bwd_sm90"}  # by instructions that no other generation has
ROUNDS_PRODUCTS = {"augment/augment"}  # before it adds them up, as PIL does


@functools.cache
def unavailable() -> str | None:
    """Why kernels cannot be compiled on this machine, or None if they can."""
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as e:  # a missing package, or a library that does not load, in whatever way it fails
        return f"NVRTC or cuda.core is missing ({type(e).__name__}: {e}); `pip install cuda-core` brings both"
    return None


@functools.cache
def source(name: str) -> str:
    """The text of `name`.cu, each file that it includes in place of the first `#include` of it."""
    included: set[Path] = set()

    def text(path: Path) -> str:
        if path in included:
            return ""
        included.add(path)
        return re.sub(
            r'^#include "(.*)"\n', lambda m: text((path.parent / m[1]).resolve()), path.read_text(), flags=re.M
        )

    return text((SOURCES / f"{name}.cu").resolve())


def compile_cubin(name: str, arch: str, macros: tuple[tuple[str, object], ...], log=None) -> bytes:
    """The machine code of `name`.cu for `arch` (sm_90, say), compiled now; `log` gets registers and spills."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(k, str(v)) for k, v in macros],
        ptxas_options=["-v"] if log else None,
        fma=name not in ROUNDS_PRODUCTS,
    )
    return bytes(Program(source(name), "c++", options).compile("cubin", logs=log).code)


def cached_cubin(name: str, arch: str, macros: tuple[tuple[str, object], ...]) -> bytes:
    """The same from the cache on disk, which it fills. `VIL_CACHE_DIR` says where; the user's cache otherwise."""
    from cuda.bindings import nvrtc

    key = repr((source(name), arch, macros, nvrtc.nvrtcVersion()[1:])).encode()
    entry = f"{Path(name).name}-{arch}-{hashlib.sha256(key).hexdigest()[:32]}.sealed"
    cubin = cache.read(entry, key)
    if cubin is None:
        cubin = compile_cubin(name, arch, macros)
        cache.write(entry, key, cubin)
    return cubin


@functools.lru_cache(maxsize=256)
def _stream(handle: int, device_index: int):
    from cuda.core import Stream

    return Stream.from_handle(handle)


@functools.cache
def _kernel(name: str, entry: str, device_index: int, macros: tuple[tuple[str, object], ...], shared_bytes: int):
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    major, minor = torch.cuda.get_device_capability(device_index)
    arch = f"sm_{major}{minor}" + ("a" if name in ONLY_HOPPER else "")
    cubin = cached_cubin(name, arch, tuple(sorted(macros)))
    kernel = ObjectCode.from_cubin(cubin).get_kernel(entry)
    if shared_bytes > 48 * 1024:  # more than every kernel may take without asking
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, driver.CUdevice(device_index))
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{entry} needs {shared_bytes} bytes of shared memory a block: {error.name}")
    return kernel


@functools.cache
def _config(grid: int, block: int, shared_bytes: int):
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)


def launch(name: str, entry: str, macros: dict, grid: int, block: int, arguments: list, shared_bytes: int = 0) -> None:
    """Runs a kernel of `name`.cu on the GPU of the tensor arguments and on PyTorch's stream there.

    Arguments are tensors (or None), passed as pointers, and ints and floats, passed in 64 bits.
    """
    values, places = [], set()
    for a in arguments:
        if isinstance(a, torch.Tensor):
            places.add(a.get_device())
            values.append(a.data_ptr())
        else:
            values.append(0 if a is None else +a)
    index = max(places)
    if len(places) > 1 or index < 0:
        found = ", ".join(sorted({str(a.device) for a in arguments if isinstance(a, torch.Tensor)}))
        raise ValueError(f"{entry} needs its tensors on one GPU; they are on {found}")
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(name, entry, macros, grid, block, arguments, shared_bytes)
    if not hasattr(_thread, "bound"):  # as in autograd's threads before PyTorch's first kernel
        _bind(index)
    kernel = _kernel(name, entry, index, tuple(macros.items()), shared_bytes)
    # what torch.cuda.current_stream gives, in a tenth of its time
    stream = _stream(torch._C._cuda_getCurrentRawStream(index), index)
    _launcher()(stream, _config(grid, block, shared_bytes), kernel, *values)


_thread = threading.local()


def _bind(index: int) -> None:
    """Gives this thread the device's context, without which nothing can be launched."""
    from cuda.core import Device

    Device(index).set_current()
    _thread.bound = True


@functools.cache
def _launcher():
    from cuda.core import launch

    return launch
