"""CUDA C++ to kernels: NVRTC through NVIDIA's `cuda.core` at first use, and a cache of the binaries on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from .. import cache

SOURCES = Path(__file__).parents[1]
OLDEST = (8, 0)
HOPPER = (9, 0)
ONLY_HOPPER = {"block/gate_outproj_sm90", "block/gate_outproj_bwd_sm90"}  # by instructions that no other generation has
# of what kernels' pointers point to; what is not here are structs
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "float": torch.float32, "int": torch.int32,
    "unsigned char": torch.uint8,
}  # fmt: skip
ROUNDS_PRODUCTS = {"augment/augment"}  # before it adds them up, as PIL does


@functools.cache
def unavailable() -> str | None:
    """Why kernels cannot be compiled on this machine, or None if they can."""
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as e:  # a missing package, or a library that does not load, in whatever way it fails
        extra = "cu" + (torch.version.cuda or "13").partition(".")[0]
        reason = f"NVRTC or cuda.core is missing ({type(e).__name__}: {e})"
        return f"{reason}; `pip install 'cuda-core[{extra}]'` brings both"
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
            raise RuntimeError(f"{entry} needs {shared_bytes} bytes of shared memory a CTA: {error.name}")
    return kernel


@functools.cache
def _config(ctas: int, threads: int, shared_bytes: int):
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=ctas, block=threads, shmem_size=shared_bytes)


class Parameter(NamedTuple):
    """One of a kernel, as its source has it."""

    name: str
    pointee: str | None  # of a pointer, else None
    type: str


@functools.cache
def parameters(name: str, entry: str) -> tuple[Parameter, ...]:
    """Those of the `extern "C"` kernel `entry` in `name`.cu, in their order: what its launch has to give it."""
    text = re.sub(r"//.*", "", source(name))
    bounds = r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?"
    found = re.search(rf'extern "C" __global__ void\s+{bounds}{entry}\(([^{{]*)\)\s*{{', text)
    if found is None:
        raise ValueError(f"{name}.cu has no kernel {entry}")
    listed = found[1]
    for macro, a, b, body in re.findall(r"#define (\w+)\((\w+), (\w+)\) (.*)", text):

        def expand(use, a=a, b=b, body=body):
            of = {a: use[1], b: use[2]}
            return re.sub(r"\w+", lambda word: of.get(word[0], word[0]), body.replace("##", "\0")).replace("\0", "")

        listed = re.sub(rf"\b{macro}\(([^,()]*),\s*([^,()]*)\)", expand, listed)
    result = []
    for declared in re.split(r",(?![^<]*>)", listed) if listed.strip() else []:
        parts = re.fullmatch(r"\s*(.*?)\s*\b(\w+)\s*", declared, re.S)
        assert parts is not None, declared
        kind, own = parts.groups()
        pointee = re.sub(r"\bconst\b|__restrict__|\*|\s", "", kind) if "*" in kind else None
        result.append(Parameter(own, pointee, kind))
    return tuple(result)


@functools.cache
def _dtype(name: str, pointee: str, macros: tuple[tuple[str, object], ...]) -> torch.dtype | None:
    """Of what a kernel's pointer points to; None for a struct, whose bytes are its own."""
    names = dict(re.findall(r"typedef (\w[\w ]*?) (\w+);", source(name)))
    names = {own: of for of, own in names.items()} | {macro: str(value) for macro, value in macros}
    pointee = re.sub(r"Pack<(\w+),.*>", r"\1", pointee)
    while pointee in names:
        pointee = names[pointee]
    return DTYPES.get(pointee)


class Launch:
    """A kernel of `name`.cu with its CTAs, its numbers and where its pointers go: what can run again and again.

    Args:
        name, entry: The file, without its ending, and the kernel in it.
        macros: What the file is compiled with.
        ctas, threads: Thread blocks, and threads of one.
        arguments: By the names that the kernel's own list of parameters has: a tensor or None for each pointer, of the
            dtype that it points to, an int for each `i64` and a float for each `double`.
        shared_bytes: Dynamic shared memory of a CTA.

    Raises:
        TypeError: An argument is missing, is none of the kernel's, or is of another type than its parameter.
        ValueError: The tensors are not on one device.
    """

    def __init__(
        self, name: str, entry: str, macros: dict, ctas: int, threads: int, arguments: dict, shared_bytes: int = 0
    ):  # fmt: skip
        self.name, self.entry, self.macros = name, entry, macros
        self.ctas, self.threads, self.shared_bytes = ctas, threads, shared_bytes
        self.kernel = self.config = None  # until it runs
        self.values: list[int | float] = []
        self.tensors: list[tuple[int, torch.Tensor]] = []  # with their places among the values
        key, wanted = tuple(macros.items()), parameters(name, entry)
        if arguments.keys() != {p.name for p in wanted}:
            missing = [p.name for p in wanted if p.name not in arguments]
            unknown = [own for own in arguments if own not in {p.name for p in wanted}]
            raise TypeError(f"{entry} of {name}.cu lacks {missing} and does not take {unknown}")
        for place, parameter in enumerate(wanted):
            value, pointee = arguments[parameter.name], parameter.pointee
            if isinstance(value, torch.Tensor) and pointee is not None:
                dtype = _dtype(name, pointee, key)
                if dtype not in (None, value.dtype):
                    raise TypeError(f"{parameter.name} of {entry} is {value.dtype}; {name}.cu takes {dtype}")
                self.tensors.append((place, value))
                value = 0
            elif value is None and pointee is not None:
                value = 0
            elif isinstance(value, int | float) and (parameter.type == "double" or isinstance(value, int)):
                if pointee is not None or parameter.type not in ("i64", "double"):
                    raise TypeError(f"{parameter.name} of {entry} is a number; {name}.cu takes {parameter.type}")
                value = float(value) if parameter.type == "double" else +value
            else:
                raise TypeError(f"{parameter.name} of {entry} is {value!r}; {name}.cu takes {parameter.type}")
            self.values.append(value)
        devices = {t.device for _, t in self.tensors}
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"{entry} needs its tensors on one GPU; they are on {found}")

    def run(self) -> None:
        """On the GPU of the tensors and on PyTorch's stream there."""
        device = self.tensors[0][1].device
        if device.type != "cuda":
            raise ValueError(f"{self.entry} needs its tensors on one GPU; they are on {device}")
        values = self.values.copy()
        for place, t in self.tensors:
            values[place] = t.data_ptr()
        with on(device.index):
            self.run_with(values, current_stream(device))

    def run_with(self, values: list[int | float], stream) -> None:
        """With these values, addresses among them, on this stream of the current GPU."""
        if self.kernel is None:
            device = torch.cuda.current_device()
            self.config = _config(self.ctas, self.threads, self.shared_bytes)  # first: other threads ask for the kernel
            self.kernel = _kernel(self.name, self.entry, device, tuple(self.macros.items()), self.shared_bytes)
        _launcher()(stream, self.config, self.kernel, *values)


def launch(
    name: str, entry: str, macros: dict, ctas: int, threads: int, arguments: dict, shared_bytes: int = 0
) -> None:  # fmt: skip
    """Runs a kernel: `Launch` says what the arguments are. While a plan is recorded, it becomes a part of that."""
    one = Launch(name, entry, macros, ctas, threads, arguments, shared_bytes)
    if recording := getattr(_thread, "recording", None):
        recording.launch(one)
    else:
        one.run()


def current_stream(device: torch.device):
    """PyTorch's, of the current GPU, as `cuda.core` takes it; None where there is none."""
    if device.type != "cuda":
        return None
    if not hasattr(_thread, "bound"):  # as in autograd's threads before PyTorch's first kernel
        _bind(device.index)
    # what torch.cuda.current_stream gives, in a tenth of its time
    return _stream(torch._C._cuda_getCurrentRawStream(device.index), device.index)


def on(index: int):
    """A context in which this GPU is the current one."""
    return contextlib.nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)


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
