"""Compilation of CUDA C++ by NVRTC through NVIDIA's `cuda.core` at first use, with a disk cache of the binaries."""

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
ONLY_HOPPER = {"block/gate_outproj_sm90", "block/gate_outproj_bwd_sm90"}  # use instructions of sm_90 only
# dtypes of pointer parameters; other pointees are structs
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "float": torch.float32, "int": torch.int32,
    "unsigned char": torch.uint8,
}  # fmt: skip
ROUNDS_PRODUCTS = {"augment/augment"}  # rounds products before adding them, as PIL does


@functools.cache
def unavailable() -> str | None:
    """Return why kernels cannot be compiled on this machine, or None if they can."""
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as e:  # missing packages and libraries raise various types
        extra = "cu" + (torch.version.cuda or "13").partition(".")[0]
        reason = f"NVRTC or cuda.core is missing ({type(e).__name__}: {e})"
        return f"{reason}: pip install 'cuda-core[{extra}]'"
    return None


@functools.cache
def source(name: str) -> str:
    """Return the text of `name`.cu, with each included file inserted at its first `#include`."""
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
    """Compile `name`.cu for `arch` (such as sm_90) and return the cubin; `log` receives register counts and spills."""
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
    """Return the cubin from the disk cache, compiling it if missing. `VIL_CACHE_DIR` overrides the user's cache
    folder.
    """
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
    if shared_bytes > 48 * 1024:  # the limit without an explicit attribute
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
    """Parameter of a kernel, as declared in its source."""

    name: str
    pointee: str | None  # pointed-to type; None for a number
    type: str


@functools.cache
def parameters(name: str, entry: str) -> tuple[Parameter, ...]:
    """Return the parameters of the `extern "C"` kernel `entry` in `name`.cu in order."""
    text = re.sub(r"//.*", "", source(name))
    bounds = r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?"
    found = re.search(rf'extern "C" __global__ void\s+{bounds}{entry}\(([^{{]*)\)\s*{{', text)
    if found is None:
        raise ValueError(f"kernel {entry} must be defined in {name}.cu")
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
    """Return the dtype that a kernel's pointer points to; None for a struct."""
    names = dict(re.findall(r"typedef (\w[\w ]*?) (\w+);", source(name)))
    names = {own: of for of, own in names.items()} | {macro: str(value) for macro, value in macros}
    pointee = re.sub(r"Pack<(\w+),.*>", r"\1", pointee)
    while pointee in names:
        pointee = names[pointee]
    return DTYPES.get(pointee)


class Launch:
    """Configured launch of a kernel of `name`.cu with its grid and arguments, which can run repeatedly.

    Args:
        name, entry: The source file without its extension, and the kernel.
        macros: Macros to compile the file with.
        ctas, threads: Number of thread blocks, and threads of a block.
        arguments: Values by parameter name: a tensor or None for each pointer, of the pointed-to dtype, an int for each
            `i64` and a float for each `double`.
        shared_bytes: Dynamic shared memory of a block in bytes.

    Raises:
        TypeError: An argument is missing, unknown, or of another type than its parameter.
        ValueError: The tensors are on different devices.
    """

    def __init__(
        self, name: str, entry: str, macros: dict, ctas: int, threads: int, arguments: dict, shared_bytes: int = 0
    ):  # fmt: skip
        self.name, self.entry, self.macros = name, entry, macros
        self.ctas, self.threads, self.shared_bytes = ctas, threads, shared_bytes
        self.kernel = self.config = None  # set by the first run
        self.values: list[int | float] = []
        self.tensors: list[tuple[int, torch.Tensor]] = []  # with their indices in `values`
        key, wanted = tuple(macros.items()), parameters(name, entry)
        if arguments.keys() != {p.name for p in wanted}:
            missing = [p.name for p in wanted if p.name not in arguments]
            unknown = [own for own in arguments if own not in {p.name for p in wanted}]
            raise TypeError(
                f"arguments of {entry} in {name}.cu must match its parameters: missing {missing}, unknown {unknown}"
            )
        for place, parameter in enumerate(wanted):
            value, pointee = arguments[parameter.name], parameter.pointee
            if isinstance(value, torch.Tensor) and pointee is not None:
                dtype = _dtype(name, pointee, key)
                if dtype not in (None, value.dtype):
                    raise TypeError(
                        f"dtype of {parameter.name} of {entry} must be {dtype} in {name}.cu, got {value.dtype}"
                    )
                self.tensors.append((place, value))
                value = 0
            elif value is None and pointee is not None:
                value = 0
            elif isinstance(value, int | float) and (parameter.type == "double" or isinstance(value, int)):
                if pointee is not None or parameter.type not in ("i64", "double"):
                    raise TypeError(f"{parameter.name} of {entry} must be {parameter.type} in {name}.cu, got a number")
                value = float(value) if parameter.type == "double" else +value
            else:
                raise TypeError(f"{parameter.name} of {entry} must be {parameter.type} in {name}.cu, got {value!r}")
            self.values.append(value)
        devices = {t.device for _, t in self.tensors}
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"tensors of {entry} must be on one GPU, got {found}")

    def run(self) -> None:
        """Run the kernel on the tensors' GPU and on PyTorch's current stream."""
        device = self.tensors[0][1].device
        if device.type != "cuda":
            raise ValueError(f"tensors of {self.entry} must be on one GPU, got {device}")
        values = self.values.copy()
        for place, t in self.tensors:
            values[place] = t.data_ptr()
        with on(device.index):
            self.run_with(values, current_stream(device))

    def run_with(self, values: list[int | float], stream) -> None:
        """Run the kernel with these values, which include addresses, on this stream of the current GPU."""
        if self.kernel is None:
            device = torch.cuda.current_device()
            # set before `kernel`, which other threads test
            self.config = _config(self.ctas, self.threads, self.shared_bytes)
            self.kernel = _kernel(self.name, self.entry, device, tuple(self.macros.items()), self.shared_bytes)
        _launcher()(stream, self.config, self.kernel, *values)


def launch(
    name: str, entry: str, macros: dict, ctas: int, threads: int, arguments: dict, shared_bytes: int = 0
) -> None:  # fmt: skip
    """Run a kernel with the arguments of `Launch`, or add it to the plan that is being recorded."""
    one = Launch(name, entry, macros, ctas, threads, arguments, shared_bytes)
    if recording := getattr(_thread, "recording", None):
        recording.launch(one)
    else:
        one.run()


def current_stream(device: torch.device):
    """Return PyTorch's current stream of the current GPU for `cuda.core`; None for other devices."""
    if device.type != "cuda":
        return None
    if not hasattr(_thread, "bound"):  # autograd's threads have no context before PyTorch's first kernel
        _bind(device.index)
    # equal to torch.cuda.current_stream, in a tenth of its time
    return _stream(torch._C._cuda_getCurrentRawStream(device.index), device.index)


def on(index: int):
    """Return a context in which this GPU is the current one."""
    return contextlib.nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)


_thread = threading.local()


def _bind(index: int) -> None:
    """Make the device's context current in this thread, as launches require."""
    from cuda.core import Device

    Device(index).set_current()
    _thread.bound = True


@functools.cache
def _launcher():
    from cuda.core import launch

    return launch
