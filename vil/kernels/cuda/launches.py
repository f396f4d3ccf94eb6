"""Kernel launches with named arguments, grids and streams, and loading of compiled kernels into a GPU."""

from __future__ import annotations

import contextlib
import functools
import threading

import torch
from torch import Tensor

from . import hardware
from .compiler import cached_cubin
from .source import Number, Pointer, Source


class Launch:
    """Kernel with its grid and arguments, which can be launched repeatedly.

    Args:
        source, entry: The source file, and the name of the kernel.
        macros: Macros to compile the file with.
        ctas, threads: Number of thread blocks, and threads of a block.
        arguments: Values by parameter name: for each pointer, a tensor of the pointer's dtype or None; for each `i64`,
            an int; for each `double`, a float.
        shared_bytes: Dynamic shared memory of a block in bytes.

    Raises:
        TypeError: An argument is missing, unknown, or of another type than its parameter.
        ValueError: The tensors are on different devices.
    """

    def __init__(
        self, source: Source, entry: str, macros: dict, ctas: int, threads: int, arguments: dict, shared_bytes: int = 0
    ):  # fmt: skip
        self.source, self.entry, self.macros = source, entry, macros
        self.ctas, self.threads, self.shared_bytes = ctas, threads, shared_bytes
        self.kernel = self.config = None  # set when the kernel is launched for the first time
        self.values: list[int | float] = []
        self.tensors: list[tuple[int, Tensor]] = []  # each tensor argument with its index in `values`
        self.early: list[Tensor] = []  # tensors that the kernel accesses before it waits for the previous kernel
        parameters = source.kernels[entry]
        if arguments.keys() != parameters.keys():
            missing = [name for name in parameters if name not in arguments]
            unknown = [name for name in arguments if name not in parameters]
            raise TypeError(f"arguments of {self} must match its parameters: missing {missing}, unknown {unknown}")
        for i, (name, parameter) in enumerate(parameters.items()):
            value = arguments[name]
            if isinstance(parameter, Pointer):
                self.values.append(0)
                if value is not None:
                    self._check_pointer(name, parameter, value)
                    self.tensors.append((i, value))
                    self.early += [value] * parameter.early
            else:
                self.values.append(self._number(name, parameter, value))
        # Whether the kernel may start before the previous kernel has ended (overlap.cuh). If there are early accesses,
        # only a plan knows whether previous kernels use the same memory.
        self.overlaps = not self.early
        devices = {t.device for _, t in self.tensors}
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"tensors of {entry} must be on one GPU, got {found}")

    def __str__(self) -> str:
        return f"{self.entry} in {self.source.name}.cu"

    def _check_pointer(self, name: str, pointer: Pointer, value: object) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} of {self} must be a tensor for {pointer.type}, got {value!r}")
        dtype = pointer.dtype(self.macros)
        if dtype not in (None, value.dtype):
            raise TypeError(f"dtype of {name} of {self} must be {dtype}, got {value.dtype}")

    def _number(self, name: str, number: Number, value: object) -> int | float:
        if number.type == "double" and isinstance(value, int | float):
            return float(value)
        if number.type == "i64" and isinstance(value, int):
            return +value  # converts a bool to an int
        raise TypeError(f"{name} of {self} must be a number of type {number.type}, got {value!r}")

    def run(self) -> None:
        """Run the kernel on the tensors' GPU and on PyTorch's current stream."""
        device = self.tensors[0][1].device
        if device.type != "cuda":
            raise ValueError(f"tensors of {self.entry} must be on one GPU, got {device}")
        values = self.values.copy()
        for i, t in self.tensors:
            values[i] = t.data_ptr()
        with on(device):
            self.run_with(values, current_stream(device))

    def run_with(self, values: list[int | float], stream) -> None:
        """Run the kernel on a stream of the current GPU, with arguments that include the tensors' addresses."""
        if self.kernel is None:
            device = torch.cuda.current_device()
            # set `config` first, because another thread may launch as soon as `kernel` is not None
            self.config = _config(self.ctas, self.threads, self.shared_bytes, self.overlaps and _can_overlap(device))
            self.kernel = _kernel(self.source, self.entry, device, tuple(self.macros.items()), self.shared_bytes)
        _launcher()(stream, self.config, self.kernel, *values)


def launch(
    source: Source, entry: str, macros: dict, ctas: int, threads: int, arguments: dict, shared_bytes: int = 0
) -> None:  # fmt: skip
    """Run a kernel with the arguments of `Launch`, or add it to the plan that is being recorded."""
    one = Launch(source, entry, macros, ctas, threads, arguments, shared_bytes)
    if recording := getattr(thread, "recording", None):
        recording.add_launch(one)
    else:
        one.run()


thread = threading.local()  # per-thread state: the active `recording`, and `bound` if a CUDA context is current


def current_stream(device: torch.device):
    """Return PyTorch's current stream on a GPU for `cuda.core`, or None for other devices."""
    if device.type != "cuda":
        return None
    if not hasattr(thread, "bound"):  # autograd's threads have no CUDA context before PyTorch launches its first kernel
        _bind(device.index)
    return _stream(torch.cuda.current_stream(device).cuda_stream, device.index)


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context manager that makes `device` the current device if `device` is a GPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device.index)


def _bind(index: int) -> None:
    """Make the device's context current in this thread, as launches require."""
    from cuda.core import Device

    Device(index).set_current()
    thread.bound = True


@functools.lru_cache(maxsize=256)
def _stream(handle: int, device_index: int):
    from cuda.core import Stream

    return Stream.from_handle(handle)


@functools.cache
def _kernel(source: Source, entry: str, device_index: int, macros: tuple[tuple[str, object], ...], shared_bytes: int):
    """Compile the kernel `entry` of a source file if needed, and load the kernel into the GPU."""
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    major, minor = torch.cuda.get_device_capability(device_index)
    arch = f"sm_{major}{minor}" + ("a" if source.only_hopper else "")
    cubin = cached_cubin(source, arch, tuple(sorted(macros)))
    kernel = ObjectCode.from_cubin(cubin).get_kernel(entry)
    if shared_bytes > 48 * 1024:  # CUDA requires an attribute for more than 48 KiB of dynamic shared memory
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, driver.CUdevice(device_index))
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{entry} needs {shared_bytes} bytes of shared memory per CTA: {error.name}")
    return kernel


@functools.cache
def _config(ctas: int, threads: int, shared_bytes: int, overlaps: bool):
    from cuda.core import LaunchConfig

    return LaunchConfig(
        grid=ctas, block=threads, shmem_size=shared_bytes, programmatic_stream_serialization=overlaps
    )  # fmt: skip


def _can_overlap(device_index: int) -> bool:
    """Return whether the GPU supports programmatic dependent launch, and the driver supports it in CUDA graphs."""
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    return version >= 12030 and torch.cuda.get_device_capability(device_index) >= hardware.HOPPER


@functools.cache
def _launcher():
    from cuda.core import launch

    return launch
