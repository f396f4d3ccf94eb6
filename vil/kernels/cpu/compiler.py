"""Python functions to machine code: Numba at first use, a cache of the binaries on disk, and PyTorch's threads.

A kernel takes one argument, numbers of 64 bits: the number of the next task, that of the next thread, and what `launch`
is given behind them. What Numba makes of it is LLVM's intermediate code; the machine code of that is kept, which a
second process loads by llvmlite alone, a tenth of the time that importing Numba takes.
"""

from __future__ import annotations

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

from .. import cache

_logger = logging.getLogger(__name__)

COUNTERS = 2  # the first numbers of a kernel's arguments: next task, next thread
LANES = 64  # channels of a task: four of the widest vectors, and states of all of them in the first cache
FAST = {"contract", "reassoc"}  # sums in any order; NaN and infinity stay what they are
# functions that Numba knows; torch.export puts others in their places while it traces
PYTHONS_OWN = {(builtins, "min"): min, (builtins, "max"): max, (math, "pow"): math.pow}
_addresses: dict[tuple, int] = {}  # of the kernels that are loaded
_lock = threading.RLock()


@functools.cache
def unavailable() -> str | None:
    """Why kernels cannot be compiled or loaded on this machine, or None."""
    if importlib.util.find_spec("numba") is None:
        return "numba is missing; `pip install numba` brings it"
    try:
        load(f"{__package__}.language", "nothing", ())
    except Exception as e:  # a NumPy that Numba does not know, or a library that does not load, however it fails
        return f"numba does not work ({type(e).__name__}: {e}); `pip install --upgrade numba` may help"
    return None


class Kernel:
    """A function by the name of its factory in a module beside, compiled for its constants at first use."""

    def __init__(self, module: str, factory: str, *constants: int):
        self.address = load(module, factory, constants)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def launch(self, tasks: int, *numbers: int) -> None:
        """Runs it in as many threads as PyTorch uses, but no more than there are tasks."""
        arguments = (ctypes.c_int64 * (COUNTERS + len(numbers)))(0, 0, *numbers)
        threads = min(torch.get_num_threads(), tasks)
        parallel = _parallel() if threads > 1 else None
        if parallel is None:
            self._call(ctypes.addressof(arguments))
        else:
            parallel(self.address, ctypes.addressof(arguments), threads, 0)


@functools.cache
def _parallel() -> Callable | None:
    """OpenMP's call of a function in several threads, from the library that PyTorch itself is linked to.

    So its threads are PyTorch's, which wait for work for a while, and two pools do not fight over cores.
    """
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{'dylib' if sys.platform == 'darwin' else 'so'}"
    try:
        parallel = ctypes.CDLL(str(library)).GOMP_parallel  # looked up in what the library needs, too
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def load(module: str, factory: str, constants: tuple[int, ...]) -> int:
    """The address of the kernel's machine code, from the cache or compiled now."""
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
    _logger.warning("compiling kernels for this CPU, some 25 s of a core in all, which later processes find done")


def _symbol(factory: str, constants: tuple[int, ...]) -> str:
    return "_".join(map(str, ("vil", factory, *constants)))


@contextlib.contextmanager
def _pythons_own():
    """Within it `PYTHONS_OWN` are in their places."""
    others = {place: getattr(*place) for place in PYTHONS_OWN}
    try:
        for place, function in PYTHONS_OWN.items():
            setattr(*place, function)
        yield
    finally:
        for place, function in others.items():
            setattr(*place, function)


@_pythons_own()
def compile_kernel(module: str, factory: str, constants: tuple[int, ...]) -> bytes:
    """An object file with the kernel."""
    import llvmlite.binding as llvm
    from numba import cfunc, types

    _widen_vectors()
    function = getattr(importlib.import_module(module), factory)(*constants)
    compiled = cfunc(types.void(types.CPointer(types.int64)), error_model="numpy", fastmath=FAST)(function)
    symbol = _symbol(factory, constants)
    text = compiled.inspect_llvm().replace(compiled.native_name, symbol)
    code = llvm.parse_assembly(text)
    for f in code.functions:  # so that what Numba adds for exceptions, of which there are none, is found to be unused
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
        raise RuntimeError(f"{factory} of {module} calls {', '.join(missing)}, which a kernel cannot")
    return machine.emit_object(code)


@functools.cache
def _widen_vectors() -> None:
    """Has Numba compile for vectors of 512 bits where the CPU has them.

    For Intel's CPUs LLVM keeps to 256, to spare other programs a lower clock. Numba asks once in a process what its CPU
    can do: one that has compiled something else before stays with that.
    """
    from numba.core import codegen, config

    settings: Any = config  # a module that sets its attributes from a dictionary
    if settings.CPU_FEATURES is None:
        settings.CPU_FEATURES = _wide(codegen.get_host_cpu_features())


def _wide(features: str) -> str:
    return features + ",-prefer-256-bit" * ("+avx512f" in features.split(","))


@functools.cache
def _target(llvm) -> tuple[object, str, str]:
    """LLVM's target of this machine, the name of its CPU and what that can do."""
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
    """What owns all code that is loaded."""
    import llvmlite.binding as llvm

    empty = llvm.parse_assembly("")
    empty.triple = llvm.get_process_triple()
    return llvm.create_mcjit_compiler(empty, _machine(llvm))


@functools.cache
def _sources(module: str) -> tuple[str, ...]:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    paths = spec.origin, Path(__file__).parent / "language.py", __file__
    return tuple(Path(path).read_text() for path in paths)


@functools.cache
def _versions() -> tuple[str, ...]:
    return (*(importlib.metadata.version(package) for package in ("numba", "llvmlite", "numpy")), sys.version)
