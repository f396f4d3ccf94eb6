"""Recording of a function's kernel launches, operators and allocations, which a `Plan` replays.

The function runs on placeholders on PyTorch's meta device, which computes nothing. The recording keeps kernel launches
with their grids and scalar arguments, PyTorch operators that compute or write, and buffers. Views and queries of sizes
are not recorded. All memory is allocated in advance (memory.py), unless allocations at first use need much less memory.
If memory is allocated at first use, small buffers share an allocation, as do large buffers with the same lifetime.

Methods of `Recording`:

    input      returns a placeholder for a tensor
    finish     returns the recorded steps as functions, after computing lifetimes and allocations of buffers
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import steps
from .launches import Launch, thread
from .memory import Lifetime, Place, assign, peak, rounded
from .steps import Step, View

SMALL = 1 << 22  # maximum bytes of a buffer that shares an allocation with buffers of other lifetimes
# A plan allocates all buffers in advance only if this needs at most MEMORY times the peak memory of allocating each
# buffer at its first use.
MEMORY = 1.08
aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip


def device_of(t: Tensor) -> torch.device:
    """Return the device of a tensor or, while a plan is recorded, the device on which the plan will run."""
    recording = getattr(thread, "recording", None)
    return recording.device if recording and t.device.type == "meta" else t.device


class Buffer(NamedTuple):
    """Memory that a recorded function uses, represented by a meta tensor."""

    tensor: Tensor
    kind: str  # origin of the memory: "input", "result" of an operator, or "empty" (allocated by the function)


class Empty(NamedTuple):
    """Recorded allocation, such as a call of `torch.empty`."""

    buffer: int


class Call(NamedTuple):
    """Recorded call of a PyTorch operator."""

    operator: Callable
    args: tuple
    kwargs: dict
    inputs: list[Tensor]
    results: list[tuple[int, int]]  # for each result that is not a view: index among the results, buffer number
    returns_tensor: bool  # whether the operator returns a single tensor instead of a tuple or list


class Allocation(NamedTuple):
    """Memory allocation that several buffers share."""

    buffers: list[int]
    size: int  # size in bytes
    dtype: torch.dtype  # dtype in which PyTorch operators view the memory


class Recorded(NamedTuple):
    """Functions that replay the recorded steps, and the results of the recorded function."""

    in_advance: bool  # whether `allocations` allocates all memory, otherwise `steps` allocate
    allocations: list[Step]
    steps: list[Step]
    outputs: list[View | None]  # results of the recorded function
    buffers: int  # number of buffers


class Recording(TorchDispatchMode):
    """Dispatch mode that records a function's operators and kernel launches, with meta tensors as placeholders."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.buffers: list[Buffer] = []  # also keeps the storages alive that are keys of `numbers`
        self.numbers: dict[torch.UntypedStorage, int] = {}  # index in `buffers` of each storage
        # index in `buffers` of each input, and the input's address modulo 16
        self.inputs: list[tuple[int, int]] = []
        self.starts: dict[int, int] = {}  # byte offset of each buffer in its shared allocation
        self.recorded: list[Empty | Call | Launch] = []

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Record all operators and launches of this thread while the context is active."""
        outer = getattr(thread, "recording", None)
        thread.recording = self
        try:
            with self:
                yield
        finally:
            thread.recording = outer

    def input(self, t: Tensor) -> Tensor:
        """Return a meta tensor with the tensor's shape, strides and alignment, and register it as an input."""
        misalignment = t.data_ptr() & 15
        offset = misalignment // t.element_size()
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
        memory = torch.empty(offset + extent, dtype=t.dtype, device="meta")
        placeholder = memory.as_strided(t.shape, t.stride(), offset)
        self.inputs.append((self._add(placeholder, "input"), offset * t.element_size()))
        return placeholder

    def add_launch(self, launch: Launch) -> None:
        self.recorded.append(launch)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # skip calls with out=, because some PyTorch versions do not implement matrix products into meta tensors
        result = kwargs["out"] if "out" in kwargs else operator(*args, **kwargs)
        flat = tree_leaves(result)
        new = [i for i, t in enumerate(flat) if t.untyped_storage() not in self.numbers]
        if operator in ALLOCATIONS:
            for i in new:
                self.recorded.append(Empty(self._add(flat[i], "empty")))
        elif new and operator in steps.INTO:
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.recorded.append(Empty(self._add(result, "empty")))
            self.recorded.append(Call(steps.INTO[operator], (result, *args), kwargs, [result, *inputs], [], True))
        elif new or operator._schema.is_mutable:
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            results = [(i, self._add(flat[i], "result")) for i in new]
            self.recorded.append(Call(operator, args, kwargs, inputs, results, isinstance(result, Tensor)))
        return result

    def _add(self, t: Tensor, kind: str) -> int:
        number = self.numbers[t.untyped_storage()] = len(self.buffers)
        self.buffers.append(Buffer(t, kind))
        return number

    def number_of(self, t: Tensor) -> int:
        """Return the index in `buffers` of the storage of a placeholder tensor."""
        return self.numbers[t.untyped_storage()]

    def finish(self, results: list) -> Recorded:
        """Return functions that allocate memory and replay the recorded steps, and a `View` for each result."""
        returned = {self.number_of(t) for t in results if isinstance(t, Tensor)}
        first_use: dict[int, int] = {}
        last_use: dict[int, int] = {}
        for i, record in enumerate(self.recorded):
            for buffer in self._used(record):
                first_use.setdefault(buffer, i)
                last_use[buffer] = i
        # A kernel with early accesses may start as soon as the previous kernel with early accesses has ended
        # (overlap.cuh), unless the plan computes an input that the kernel reads early. Therefore the memory of early
        # outputs must be free when the previous kernel with early accesses is launched.
        overlapping: list[Launch] = []
        early = [(i, record) for i, record in enumerate(self.recorded) if isinstance(record, Launch) and record.early]
        for (start, _), (i, launch) in itertools.pairwise(early):
            buffers = {self.number_of(t) for t in launch.early}
            if all(self.buffers[b].kind == "input" or first_use[b] == i for b in buffers):
                first_use |= dict.fromkeys(buffers, start)
                overlapping.append(launch)
        empty = [record.buffer for record in self.recorded if isinstance(record, Empty)]
        lifetimes = [
            Lifetime(b, self._storage_bytes(b), first_use.get(b, 0), last_use.get(b, 0))
            for b in empty
            if b in last_use or b in returned
        ]
        kept = [b for b in lifetimes if b.buffer in returned]
        temporary = [b for b in lifetimes if b.buffer not in returned]
        places, size = assign(temporary, [b for b in kept if self.buffers[b.buffer].tensor.is_contiguous()])
        allocates = any(isinstance(record, Call) and record.results for record in self.recorded)
        in_advance = not allocates and size + sum(b.size for b in kept) <= MEMORY * peak(temporary, kept)
        if in_advance:
            for launch in overlapping:
                launch.overlaps = True
            allocations, done = self._in_advance(kept, places, size)
        else:
            allocations, done = [], self._at_first_use(last_use, returned)
        outputs = [self._view(t) if isinstance(t, Tensor) else t for t in results]
        return Recorded(in_advance, allocations, done, outputs, len(self.buffers) + 1)

    def _in_advance(
        self, results: list[Lifetime], places: dict[int, Place], size: int
    ) -> tuple[list[Step], list[Step]]:  # fmt: skip
        """Return functions that allocate all memory, and functions that replay the steps without allocations."""
        common = len(self.buffers)
        operands = {self.number_of(t) for call in self.recorded if isinstance(call, Call) for t in call.inputs}
        allocations = [steps.allocate_alone(self.device, self.buffers[b.buffer].tensor, b.buffer) for b in results]
        if size:
            allocations.append(steps.allocate(self.device, torch.uint8, size, [(common, 0)]))
        parts = []
        for buffer, (result, start) in places.items():
            self.starts[buffer] = start
            dtype = self.buffers[buffer].tensor.dtype if buffer in operands else None
            parts.append((buffer, common if result is None else result, start, dtype))
        launches = [self._step(record, {}, set()) for record in self.recorded if not isinstance(record, Empty)]
        return allocations, [steps.divide(parts), *[step for step in launches if step is not None]]

    def _at_first_use(self, last_use: dict[int, int], returned: set[int]) -> list[Step]:
        """Return functions that replay the steps, with allocations in the order of the recorded function."""
        allocations = self._allocations(last_use, returned)
        done: list[Step] = []
        for i, record in enumerate(self.recorded):
            step = self._step(record, allocations, returned)
            if step is not None:
                done.append(step)
            inner = [b for b, end in last_use.items() if end == i and b not in returned]
            if ended := [b for b in inner if self.buffers[b].kind != "input"]:
                done.append(steps.free(ended))
        return done

    def _used(self, record: Empty | Call | Launch) -> set[int]:
        """Return the indices of the buffers that a recorded launch or operator reads or writes."""
        if isinstance(record, Launch):
            return {self.number_of(t) for _, t in record.tensors}
        if isinstance(record, Call):
            return {self.number_of(t) for t in record.inputs} | {buffer for _, buffer in record.results}
        return set()

    def _storage_bytes(self, buffer: int) -> int:
        return self.buffers[buffer].tensor.untyped_storage().nbytes()

    def _allocations(self, last_use: dict[int, int], returned: set[int]) -> dict[int, Allocation]:
        """Assign buffers to shared allocations, and return the allocations by the index of their first buffer.

        Buffers that the recorded function returns are not assigned. Small buffers share allocations, and so do large
        buffers with the same lifetime. Buffers that operators use share an allocation only with buffers of the same
        dtype. An allocation is freed after the last use of any of its buffers, which this function writes to
        `last_use`. This function also fills `starts`.
        """
        operands = {self.number_of(t) for call in self.recorded if isinstance(call, Call) for t in call.inputs}
        groups: dict[tuple, list[int]] = {}
        steps_before = 0
        for record in self.recorded:
            if not isinstance(record, Empty):
                steps_before += 1
            elif record.buffer in last_use and record.buffer not in returned:
                t = self.buffers[record.buffer].tensor
                small = self._storage_bytes(record.buffer) <= SMALL
                lifetime = () if small else (steps_before, last_use[record.buffer])
                dtype = t.dtype if record.buffer in operands else torch.uint8
                groups.setdefault((*lifetime, dtype), []).append(record.buffer)
        allocations = {}
        for (*_, dtype), buffers in groups.items():
            size = 0
            for buffer in buffers:
                self.starts[buffer] = size
                size += rounded(self._storage_bytes(buffer))
                last_use[buffer] = max(last_use[b] for b in buffers)
            allocations[buffers[0]] = Allocation(buffers, size, dtype)
        return allocations

    def _step(
        self, record: Empty | Call | Launch, allocations: dict[int, Allocation], returned: set[int]
    ) -> Step | None:  # fmt: skip
        """Return the function that replays a recorded step, or None for an allocation that the replay does not need."""
        if isinstance(record, Launch):
            pointers = [(i, self.number_of(t), t.data_ptr()) for i, t in record.tensors]
            record.tensors, record.early = [], []  # release the placeholders, because replays only use addresses
            return steps.launch_kernel(record, pointers)
        if isinstance(record, Call):
            args, kwargs = tree_map(self._argument, (record.args, record.kwargs))
            return steps.call_operator(record.operator, args, kwargs, record.results, record.returns_tensor)
        if record.buffer in allocations:
            buffers, size, dtype = allocations[record.buffer]
            return steps.allocate(self.device, dtype, size, [(buffer, self.starts[buffer]) for buffer in buffers])
        if record.buffer in returned:
            return steps.allocate_alone(self.device, self.buffers[record.buffer].tensor, record.buffer)
        return None

    def _argument(self, leaf: Any) -> Any:
        """Convert an operator's recorded argument for replays: a placeholder becomes a `View` of a buffer."""
        if isinstance(leaf, Tensor):
            return self._view(leaf)
        return self.device if isinstance(leaf, torch.device) else leaf

    def _view(self, t: Tensor) -> View:
        """Return the `View` of a buffer that a placeholder represents."""
        number = self.number_of(t)
        base, kind = self.buffers[number]
        assert t.dtype == base.dtype, "only kernels see a buffer as of another dtype"
        if number in self.starts:
            return View(number, t.shape, t.stride(), self.starts[number] // t.element_size() + int(t.storage_offset()))
        if (t.shape, t.stride(), t.storage_offset()) == (base.shape, base.stride(), base.storage_offset()):
            return View(number)
        of_input = kind == "input"
        offset = int(t.storage_offset()) - of_input * int(base.storage_offset())
        return View(number, t.shape, t.stride(), offset, of_input)
