"""Compile kernels without a GPU, and check for register spills and for a missing wait for the previous kernel."""

import io
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulator
import pytest
import triton

from vil.kernels.cuda import compiler

NVRTC = pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC and cuda.core")


DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
ACCESS = re.compile(r"\b(LD|LDG|LDGSTS|ST|STG|UBLKCP|RED|ATOM|ATOMG)\b")  # instructions that access global memory


def log_of_compiling(source, arch, macros):
    """Compile a source or read a cached result. Return the ptxas report, and a line for each of the `early_kernels`."""
    from cuda.bindings import nvrtc

    def compile_cubin(path):
        log = io.StringIO()
        cubin = compiler.compile_cubin(source, arch, tuple(sorted(macros.items())), log)
        early = [] if arch.startswith("sm_8") else early_kernels(cubin)
        path.write_text(log.getvalue() + "".join(f"{kernel} does not wait first\n" for kernel in early))

    how = *(Path(file).read_text() for file in (__file__, compiler.__file__)), nvrtc.nvrtcVersion()
    key = repr((how, os.environ.get("MUTANT_UNDER_TEST"), source.text, arch, sorted(macros.items())))
    return emulator.kept(key, ".log", compile_cubin).read_text()


def early_kernels(cubin):
    """Return the kernels that access global memory before waiting for the previous kernel, or never wait.

    The machine code is checked, because the compiler may move loads of read-only memory before the wait.
    """
    if not DISASSEMBLER.exists():
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [DISASSEMBLER, "--no-dataflow", file.name]  # the analysis of branches would take a third of the time
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *functions = re.split(r"^\.text\.", code, flags=re.MULTILINE)
    return [
        function.partition(":")[0]
        for function in functions
        if "ACQBULK" not in function or ACCESS.search(function.partition("ACQBULK")[0])
    ]


def assert_no_spills(kernels, allowed=8):
    """Assert that compiling the kernels, given as (source, architecture, macros), spills almost no registers.

    In the tests, NVRTC 13.0 spills only constants of `pool`, and registers that scan_lines_bwd uses once per image or
    tile. Other releases of NVRTC may spill more. `allowed` is the maximum number of spilled bytes for sm_90.

    Also assert that the kernels wait for the previous kernel before they access global memory.
    """
    kernels = [kernel for i, kernel in enumerate(kernels) if kernel not in kernels[:i]]
    with ThreadPoolExecutor(2) as pool:
        for kernel, log in zip(kernels, pool.map(lambda kernel: log_of_compiling(*kernel), kernels)):
            spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", log)))
            assert "does not wait first" not in log, (kernel, log)
            assert spilled <= (allowed if kernel[1].startswith("sm_90") else 120), (kernel, log)
