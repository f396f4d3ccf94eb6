"""Compilation of CUDA C++ by NVRTC through NVIDIA's `cuda.core` at first use, with a disk cache of the binaries."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch

from .. import cache
from .source import Source

OLDEST = (8, 0)  # minimum compute capability


@functools.cache
def unavailable() -> str | None:
    """Return the reason why this machine cannot compile kernels, or None if it can."""
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as e:  # a missing package or library can raise any type of exception
        extra = "cu" + (torch.version.cuda or "13").partition(".")[0]
        reason = f"NVRTC or cuda.core is missing ({type(e).__name__}: {e})"
        return f"{reason}: pip install 'cuda-core[{extra}]'"
    return None


def compile_cubin(source: Source, arch: str, macros: tuple[tuple[str, object], ...], log=None) -> bytes:
    """Compile a source for `arch` (such as sm_90) and return the cubin. `log` receives register counts and spills."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(k, str(v)) for k, v in macros],
        ptxas_options=["-v"] if log else None,
        fma=source.fma,
    )
    return bytes(Program(source.text, "c++", options).compile("cubin", logs=log).code)


def cached_cubin(source: Source, arch: str, macros: tuple[tuple[str, object], ...]) -> bytes:
    """Return the cubin from the disk cache, or compile the source and cache the cubin if it is missing.

    The environment variable `VIL_CACHE_DIR` overrides the user's cache folder.
    """
    from cuda.bindings import nvrtc

    key = repr((source.text, arch, macros, nvrtc.nvrtcVersion()[1:])).encode()
    entry = f"{Path(source.name).name}-{arch}-{hashlib.sha256(key).hexdigest()[:32]}.sealed"
    cubin = cache.read(entry, key)
    if cubin is None:
        cubin = compile_cubin(source, arch, macros)
        cache.write(entry, key, cubin)
    return cubin
