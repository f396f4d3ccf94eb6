"""Compile the scan's Triton kernels (16 states, bf16) for other GPU architectures, and print one line per target.

    python tools/triton_targets.py cuda:75 cuda:80 hip:gfx90a hip:gfx942 hip:gfx1100

TRITON_INTERPRET must not be set.
"""

import argparse

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vil.kernels.scan import triton_scan

# The pointer arguments in POINTERS are bf16, and all other pointer arguments are fp32.
POINTERS = {"x", "step_logits", "k", "q", "dy", "values", "y", "dx", "dstep_logits"}
CONSTANTS = dict(N=16, BLOCK_D=32, H=4, CHUNK=64, KEEP=True, SKIP=True, STEP_BIAS=True, SEGMENTED=True, GRADIENTS=True)
CONSTANTS |= dict(BLOCK=128)
NUMBERS = {"B", "L", "D", "G", "segment_chunks", "segments", "states"}


def source(kernel, longhorn: bool) -> ASTSource:
    constants = {name: value for name, value in CONSTANTS.items() if name in kernel.arg_names}
    if "LONGHORN" in kernel.arg_names:
        constants["LONGHORN"] = longhorn
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "reverse":
            signature[name] = "i64"
        else:
            signature[name] = "i32" if name in NUMBERS else "*bf16" if name in POINTERS else "*fp32"
    if longhorn and "A" in signature:  # Longhorn's recurrence has no parameter A
        signature["A"], constants["A"] = "constexpr", None
    return ASTSource(kernel, signature, constexprs=constants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="backend:architecture")
    for word in parser.parse_args().targets:
        backend, arch = word.split(":")
        warp = 64 if arch.startswith("gfx9") else 32
        target = GPUTarget(backend, int(arch) if backend == "cuda" else arch, warp)
        sizes = []
        for kernel in (
            triton_scan._forward_kernel, triton_scan._backward_kernel, triton_scan._segment_states_kernel,
            triton_scan._pass_states_kernel,
        ):  # fmt: skip
            for longhorn in (True, False):
                options = dict(num_warps=4 if kernel is triton_scan._pass_states_kernel else 1)
                compiled = triton.compile(source(kernel, longhorn), target=target, options=options)
                sizes.append(len(compiled.asm["cubin" if backend == "cuda" else "hsaco"]))
        print(f"{word}: {len(sizes)} kernels, {min(sizes)} to {max(sizes)} bytes; torch {torch.__version__}")


if __name__ == "__main__":
    main()
