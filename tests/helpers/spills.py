"""Compile kernels without a GPU, and check for register spills and for a missing wait for the previous kernel."""

import bisect
import io
import itertools
import os
import pickle
import re
import struct
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import emulator
import pytest
import triton

from vil.kernels.cuda import compiler

NVRTC = pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC and cuda.core")


DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
ACCESS = re.compile(r"\b(LD|LDG|LDGSTS|ST|STG|UBLKCP|RED|ATOM|ATOMG)\b")  # instructions that access global memory


class Compiled(NamedTuple):
    """Result of compiling a source.

    Attributes:
        log: Report of ptxas.
        code: Machine code of each kernel of the source, by name.
    """

    log: str
    code: dict[str, bytes]


def compiled(source, arch, macros) -> Compiled:
    """Compile a source or read a cached result."""
    from cuda.bindings import nvrtc

    def compile_cubin(path):
        log = io.StringIO()
        cubin = compiler.compile_cubin(source, arch, tuple(sorted(macros.items())), log)
        path.write_bytes(pickle.dumps((log.getvalue(), dict(machine_code(cubin)))))

    how = *(Path(file).read_text() for file in (__file__, compiler.__file__)), nvrtc.nvrtcVersion()
    key = repr((how, os.environ.get("MUTANT_UNDER_TEST"), source.text, arch, sorted(macros.items())))
    return Compiled(*pickle.loads(emulator.kept(key, ".compiled", compile_cubin).read_bytes()))


def machine_code(cubin: bytes):
    """Yield the name and the machine code of each kernel of a cubin, which is an ELF file for 64-bit addresses."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<I20xQQ", cubin, start + size * i) for i in range(count)]
    _, names, _ = headers[of_names]
    for name, offset, length in headers:
        section = cubin[names + name : cubin.index(b"\0", names + name)].decode()
        if section.startswith(".text."):
            yield section.removeprefix(".text."), cubin[offset : offset + length]


def early_kernels(arch: str, codes: list[bytes]) -> list[bool]:
    """Return whether each kernel accesses global memory before waiting for the previous kernel, or never waits.

    The machine code is checked, because the compiler may move loads of read-only memory before the wait. One call
    disassembles all kernels, because starting the disassembler takes longer than disassembling a kernel.
    """
    if not DISASSEMBLER.exists():
        return [False] * len(codes)

    def disassemble(path):
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(b"".join(codes))
            file.flush()
            words = [DISASSEMBLER, "--no-dataflow", "--binary", arch.replace("sm_", "SM"), file.name]
            path.write_text(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    key = repr((Path(__file__).read_text(), arch, codes))
    lines = re.findall(r"^ +/\*([0-9a-f]+)\*/ +(.*)", emulator.kept(key, ".sass", disassemble).read_text(), re.M)
    ends = list(itertools.accumulate(map(len, codes)))
    functions = [""] * len(codes)
    for address, instruction in lines:
        functions[bisect.bisect_right(ends, int(address, 16))] += instruction + "\n"
    assert all(functions)
    return [
        "ACQBULK" not in function or ACCESS.search(function.partition("ACQBULK")[0]) is not None
        for function in functions
    ]


def assert_no_spills(kernels, allowed=8):
    """Assert that compiling the kernels, given as (source, architecture, macros), spills almost no registers.

    In the tests, NVRTC 13.0 spills only constants of `pool`, and registers that scan_lines_bwd uses once per image or
    tile. Other releases of NVRTC may spill more. `allowed` is the maximum number of spilled bytes for sm_90.

    Also assert that the kernels wait for the previous kernel before they access global memory.
    """
    kernels = [kernel for i, kernel in enumerate(kernels) if kernel not in kernels[:i]]
    codes = defaultdict(dict)
    with ThreadPoolExecutor(2) as pool:
        for kernel, result in zip(kernels, pool.map(lambda kernel: compiled(*kernel), kernels)):
            source, arch, macros = kernel
            spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", result.log)))
            assert spilled <= (allowed if arch.startswith("sm_90") else 120), (kernel, result.log)
            codes[arch] |= {(name, source.name, str(macros)): code for name, code in result.code.items()}
    for arch, code in codes.items():
        if not arch.startswith("sm_8"):
            early = list(itertools.compress(code, early_kernels(arch, list(code.values()))))
            assert not early, f"{arch}: kernels access global memory before waiting, or never wait: {early}"
