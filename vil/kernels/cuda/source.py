"""CUDA C++ source files, and declarations of their kernels' parameters.

The Python module that launches a kernel declares the kernel's parameters, once for Python and C++:

    SOURCE = Source("block/gate", {"gate": dict(y_0=In("Element"), z_stride=I64, gated=Out("Element"))})

`launches.launch` passes arguments by these names, and C++ receives the declaration as a macro:

    extern "C" __global__ void gate(PARAMETERS_gate) {    // const Element *__restrict__ y_0, i64 z_stride, ...
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[1]
# tensor dtypes by C++ type of a kernel's pointer parameters; pointers to structs accept any dtype
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "float": torch.float32, "int": torch.int32, "u8": torch.uint8,
}  # fmt: skip
# names of macros that define C++ types
MACROS_OF_TYPES = {"Element": "INPUT", "PARAMETER": "PARAMETER", "PIXEL": "PIXEL"}


@dataclass(frozen=True)
class Number:
    """Kernel parameter that is a number."""

    type: str  # C++ type of the number

    def declaration(self, name: str) -> str:
        return f"{self.type} {name}"


@dataclass(frozen=True)
class Pointer:
    """Kernel parameter that points to the elements of a tensor."""

    element: str  # C++ type of the elements
    const: bool
    restrict: bool = True  # whether the pointer is declared __restrict__, because no other parameter shares the memory
    pack: int = 1  # number of elements that the kernel accesses at once
    early: bool = False  # whether the kernel accesses the memory before it waits for the previous kernel (overlap.cuh)

    @property
    def type(self) -> str:
        element = self.element if self.pack == 1 else f"Pack<{self.element}, {self.pack}>"
        return f"{'const ' if self.const else ''}{element} *{'__restrict__' if self.restrict else ''}"

    def declaration(self, name: str) -> str:
        return f"{self.type} {name}"

    def dtype(self, macros: dict) -> torch.dtype | None:
        """Return the tensor dtype that the parameter accepts if compiled with `macros`, or None for any dtype."""
        macro = MACROS_OF_TYPES.get(self.element)
        return DTYPES.get(self.element if macro is None else macros[macro])


Parameters = dict[str, Number | Pointer]
I64, DOUBLE = Number("i64"), Number("double")
In = functools.partial(Pointer, const=True)
Out = functools.partial(Pointer, const=False)


class Source:
    """Source file `name`.cu and the parameters of its kernels.

    Args:
        name: Path below vil/kernels, without its extension.
        kernels: Parameters by kernel and name, in the order in which the C++ function receives them.
        only_hopper: Whether the source uses instructions that only sm_90 has.
        fma: Whether the compiler may fuse a multiplication and an addition, which rounds once instead of twice.
    """

    def __init__(self, name: str, kernels: dict[str, Parameters], *, only_hopper: bool = False, fma: bool = True):
        self.name, self.kernels, self.only_hopper, self.fma = name, kernels, only_hopper, fma

    @functools.cached_property
    def text(self) -> str:
        """Declared parameters, followed by the source with each included file inserted at its first `#include`."""
        macros = [
            f"#define PARAMETERS_{kernel} {', '.join(p.declaration(name) for name, p in parameters.items())}\n"
            for kernel, parameters in self.kernels.items()
        ]
        return "".join(macros) + _with_includes((SOURCES / f"{self.name}.cu").resolve(), set())


def _with_includes(path: Path, included: set[Path]) -> str:
    """Return the text of a C++ file, with each `#include` replaced by the file's text at its first occurrence."""
    if path in included:
        return ""
    included.add(path)

    def insert(include: re.Match) -> str:
        return _with_includes((path.parent / include[1]).resolve(), included)

    return re.sub(r'^#include "(.*)"\n', insert, path.read_text(), flags=re.MULTILINE)
