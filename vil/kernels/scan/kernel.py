"""Launches of the scan's CUDA kernels, and kernel arguments that all launches share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..cuda import launches
from ..cuda.elements import ELEMENT
from ..cuda.source import I64, Parameters, Pointer, Source
from .chunks import CHUNK

RECURRENCE = {"longhorn": "Longhorn", "selective": "SelectiveStateSpace"}


class Kernel(NamedTuple):
    """Kernel source with macros and launch parameters.

    recurrences.cuh explains most of `macros`. `ctas` thread blocks of `threads` threads cover the channels of one
    sequence. Each CTA has `shared_bytes` of dynamic shared memory. The macro CTA_BYTES is this size, and
    the source asserts that CTA_BYTES is the size of its buffers.
    """

    source: Source
    macros: dict
    ctas: int
    threads: int
    shared_bytes: int

    def launch(self, entry: str, sequences: int, **arguments) -> None:
        """Launch the kernel function `entry` with `ctas` thread blocks per sequence (or per segment of a sequence)."""
        ctas = sequences * self.ctas
        launches.launch(self.source, entry, self.macros, ctas, self.threads, arguments, self.shared_bytes)

    def launch_beside(self, entry: str, ctas: int, threads: int, **arguments) -> None:
        """Launch a helper kernel from the same source file, without dynamic shared memory."""
        launches.launch(self.source, entry, self.macros, ctas, threads, arguments)


def common_macros(recurrence: str, x: Tensor, N: int) -> dict:
    return dict(INPUT=ELEMENT[x.dtype], RECURRENCE=RECURRENCE[recurrence], STATES=N, CHUNK=CHUNK)


def align(n: int) -> int:
    """Round up a number of bytes to a multiple of 16."""
    return -(-n // 16) * 16


def rows(*tensors: Tensor) -> list[Tensor]:
    """Copy each tensor whose last dimension is not contiguous or whose token stride is 2^31 bytes or more."""
    return [
        t if t.stride(-1) == 1 and abs(t.stride(-2)) * t.element_size() < 2**31 else t.contiguous() for t in tensors
    ]


def token_parameters(*names: str, const: bool = True) -> Parameters:
    """Declare the pointers and strides of per-token tensors as kernel parameters, as TOKENS_OF in tiles.cuh expects."""
    parameters: Parameters = {}
    for name in names:
        parameters[f"{name}_data"] = Pointer("Element", const, restrict=False)
        parameters |= {f"{name}_stride_{letter}": I64 for letter in "GBL"}
    return parameters


def tokens(**tensors: Tensor) -> dict:
    """Return the kernel arguments that `token_parameters` declares."""
    arguments: dict[str, Tensor | int] = {}
    for name, t in tensors.items():
        arguments[f"{name}_data"] = t
        arguments |= dict(zip((f"{name}_stride_G", f"{name}_stride_B", f"{name}_stride_L"), t.stride()))
    return arguments


def mask(reverse: Sequence[bool]) -> int:
    """Return an integer whose bit g is set if direction g is reversed."""
    return sum(1 << g for g, reversed_ in enumerate(reverse) if reversed_)
