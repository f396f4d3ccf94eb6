"""Compilation of Python functions by Numba at first use, with a disk cache, and their execution on PyTorch's threads.

A kernel has one argument, an array of 64-bit numbers. The array has the index of the next task, the index of the next
thread, and then the numbers passed to `launch`. Numba compiles the function to LLVM IR. The machine code is cached, and
later processes load it with llvmlite only, whose import takes about an eighth of the time of Numba's import.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import cache

_logger = logging.getLogger(__name__)

BYTES = 4  # bytes of a float
COUNTERS = 2  # number of counters at the start of a kernel's arguments: indices of the next task and thread
LANES = 64  # channels per task: four 512-bit vectors, so that all states of a task fit in the L1 cache
KEPT = {"longhorn": 1, "selective": 2}  # arrays of states that the scan's backward pass keeps for each token
FAST = {"contract", "reassoc"}  # LLVM fast-math flags that allow reordering sums but preserve NaN and infinity
# functions of Python that Numba needs but torch.export replaces while tracing
PYTHONS_OWN = {(builtins, "min"): min, (builtins, "max"): max, (math, "pow"): math.pow}
_addresses: dict[tuple, int] = {}  # address of each loaded kernel, by module, factory and constants
_lock = threading.RLock()


@functools.cache
def unavailable() -> str | None:
    """Return the reason why this machine cannot compile or load kernels, or None if it can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is missing: pip install numba"
    try:
        load(f"{__package__}.language", "nothing", ())
    except Exception as e:  # an unsupported NumPy or a broken library can raise any type of exception
        return f"numba does not work ({type(e).__name__}: {e}): try pip install --upgrade numba"
    return None


class Kernel:
    """CPU kernel that a factory function builds for given constants.

    The constructor compiles the kernel unless its machine code is cached.
    """

    def __init__(self, module: str, factory: str, *constants: int | str):
        self.address = load(module, factory, constants)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def launch(self, tasks: int, *numbers: int) -> None:
        """Run the kernel in as many threads as PyTorch uses, but in at most one thread per task."""
        arguments = array.array("q", (0,) * COUNTERS + numbers)
        address, _ = arguments.buffer_info()
        threads = min(torch.get_num_threads(), tasks)
        parallel = _parallel() if threads > 1 else None
        if parallel is None:
            self._call(address)
        else:
            parallel(self.address, address, threads, 0)


@functools.cache
def kernel_of(module: str, factory: str, *constants: int | str) -> Kernel:
    """Return the kernel that a function of a module builds for the constants. The kernel's first call compiles it."""
    return Kernel(module, factory, *constants)


def addresses(*tensors: Tensor | None) -> list[int]:
    """Return the address of each tensor, or 0 for None."""
    return [0 if t is None else t.data_ptr() for t in tensors]


@functools.cache
def _parallel() -> Callable | None:
    """Return GOMP_parallel, OpenMP's function for parallel regions, from the library that PyTorch is linked to.

    Kernels therefore run on PyTorch's threads, and no second thread pool competes for cores.
    """
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{'dylib' if sys.platform == 'darwin' else 'so'}"
    try:
        parallel = ctypes.CDLL(str(library)).GOMP_parallel  # dlsym also searches the library's dependencies
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def load(module: str, factory: str, constants: tuple[int | str, ...]) -> int:
    """Return the address of the kernel's machine code, compiling the kernel if it is not cached."""
    import llvmlite.binding as llvm

    with _lock:
        if (module, factory, constants) in _addresses:
            return _addresses[module, factory, constants]
        key = repr((_sources(module), factory, constants, _target(llvm)[1:], _versions())).encode()
        entry = f"{factory}-{hashlib.sha256(key).hexdigest()[:32]}.sealed"
        binary = cache.read(entry, key)
        if binary is None:
            _say_once()
            binary = compile_kernel(module, factory, constants)
            cache.write(entry, key, binary)
        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(binary))
        engine.finalize_object()
        address = engine.get_function_address(_symbol(factory, constants))
        return _addresses.setdefault((module, factory, constants), address)


@functools.cache
def _say_once() -> None:
    _logger.warning(
        "compiling kernels for this CPU (usually in less than a minute); later processes load them from the cache"
    )


def _symbol(factory: str, constants: tuple[int | str, ...]) -> str:
    return "_".join(map(str, ("vil", factory, *constants)))


@contextlib.contextmanager
def _pythons_own():
    """Restore Python's min, max and math.pow in a context, because torch.export replaces them and Numba needs them."""
    others = {place: getattr(*place) for place in PYTHONS_OWN}
    try:
        for place, function in PYTHONS_OWN.items():
            setattr(*place, function)
        yield
    finally:
        for place, function in others.items():
            setattr(*place, function)


@_pythons_own()
def compile_kernel(module: str, factory: str, constants: tuple[int | str, ...]) -> bytes:
    """Compile the kernel that `factory` builds for the constants, and return the content of the object file."""
    import llvmlite.binding as llvm
    from numba import cfunc, types

    function = getattr(importlib.import_module(module), factory)(*constants)
    with _wide_vectors(llvm):
        compiled = cfunc(types.void(types.CPointer(types.int64)), error_model="numpy", fastmath=FAST)(function)
    symbol = _symbol(factory, constants)
    text = compiled.inspect_llvm().replace(compiled.native_name, symbol)
    code = llvm.parse_assembly(text)
    for f in code.functions:  # internal linkage lets LLVM remove Numba's exception handling, which kernels do not use
        if not f.is_declaration and f.name != symbol:
            f.linkage = "internal"
    machine = _machine(llvm)
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(code, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    missing = [f.name for f in code.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if missing:
        raise RuntimeError(f"kernel {factory} of {module} must not call external functions, got {', '.join(missing)}")
    return machine.emit_object(code)


@contextlib.contextmanager
def _wide_vectors(llvm):
    """Make Numba use 512-bit vectors in a context if the CPU supports them.

    For Intel CPUs, LLVM prefers 256 bits to avoid lower clock rates. The context replaces Numba's target
    machine, because setting `CPU_FEATURES` has no effect if another package has already used Numba in this process.
    """
    from numba.core import registry

    codegen: Any = registry.cpu_target.target_context.codegen()
    machine, codegen._tm = codegen._tm, _machine(llvm)
    try:
        yield
    finally:
        codegen._tm = machine


def _wide(features: str) -> str:
    return features + ",-prefer-256-bit" * ("+avx512f" in features.split(","))


@functools.cache
def _target(llvm) -> tuple[object, str, str]:
    """Return LLVM's target for this machine, the CPU's name and the CPU's features."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target, llvm.get_host_cpu_name(), _wide(llvm.get_host_cpu_features().flatten())


def _machine(llvm):
    target, cpu, features = _target(llvm)
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


@functools.cache
def _engine():
    """Return the LLVM execution engine that owns the code of all loaded kernels."""
    import llvmlite.binding as llvm

    empty = llvm.parse_assembly("")
    empty.triple = llvm.get_process_triple()
    return llvm.create_mcjit_compiler(empty, _machine(llvm))


@functools.cache
def _sources(module: str) -> tuple[str, ...]:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return tuple(path.read_text() for path in (Path(spec.origin), *sorted(Path(__file__).parent.glob("*.py"))))


@functools.cache
def _versions() -> tuple[str, ...]:
    return (*(importlib.metadata.version(package) for package in ("numba", "llvmlite", "numpy")), sys.version)
