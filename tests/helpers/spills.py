"""Compile kernels without a GPU, and check for register spills in the report of NVRTC."""

import io
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulator
import pytest

from vil.kernels.cuda import compiler

NVRTC = pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC and cuda.core")


def log_of_compiling(source, arch, macros):
    """Return the ptxas report of compiling a source, from a cache if compiled before."""
    from cuda.bindings import nvrtc

    def compile_cubin(path):
        log = io.StringIO()
        assert compiler.compile_cubin(source, arch, tuple(sorted(macros.items())), log)
        path.write_text(log.getvalue())

    how = Path(compiler.__file__).read_text(), os.environ.get("MUTANT_UNDER_TEST"), nvrtc.nvrtcVersion()
    key = repr((how, source.text, arch, sorted(macros.items())))
    return emulator.kept(key, ".log", compile_cubin).read_text()


def assert_no_spills(kernels, allowed=8):
    """Assert that compiling the kernels, given as (source, architecture, macros), spills almost no registers.

    In the tests, NVRTC 13.0 spills only constants of `pool`, and registers that scan_lines_bwd uses once per image or
    tile. Other releases of NVRTC may spill more. `allowed` is the number of bytes for sm_90.
    """
    kernels = [kernel for i, kernel in enumerate(kernels) if kernel not in kernels[:i]]
    with ThreadPoolExecutor(2) as pool:
        for kernel, log in zip(kernels, pool.map(lambda kernel: log_of_compiling(*kernel), kernels)):
            spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", log)))
            assert spilled <= (allowed if kernel[1].startswith("sm_90") else 120), (kernel, log)
