"""Functions of tensors that are recorded once for each kind of inputs and then replayed with little host time.

A function that reads sizes, allocates, takes views, calls products and launches kernels repeats the same steps for
tensors of equal shapes, strides, dtypes, device and alignment. Therefore the first call for such tensors runs on
placeholders on PyTorch's meta device, without computing anything, and records the steps: kernels with their grids and
numbers, PyTorch operators, and buffers. Small buffers share an allocation, as do large buffers with the same lifetime.
Views and queries of sizes leave no steps.

    forward = planned()(forward)

The function may use tensors only by PyTorch operators and `compiler.launch`, must not read values, returns a list of
tensors and None, and calls `device_of` for the device of a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import compiler
from .compiler import Launch, on

PLANS = 1024  # maximum number of plans of a function
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
ALIGNMENT = 256  # bytes; alignment of buffers that share an allocation
SMALL = 1 << 22  # bytes; smaller buffers share allocations
aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
# equal PyTorch bindings with less host overhead
BINDINGS: dict[Any, Callable] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.mm.dtype: lambda a, b, dtype: torch.mm(a, b, out_dtype=dtype),
    aten.bmm.dtype: lambda a, b, dtype: torch.bmm(a, b, out_dtype=dtype),
    aten.addmm.dtype_out: lambda x, a, b, dtype, out: torch.addmm(x, a, b, out_dtype=dtype, out=out),
    aten.addmm.out: torch.addmm,
}


def device_of(t: Tensor) -> torch.device:
    """Return the device that the tensor is on or, while a plan is recorded, will be on."""
    recording = getattr(compiler._thread, "recording", None)
    return recording.device if recording and t.device.type == "meta" else t.device


def planned(check: Callable | None = None) -> Callable[[Callable], Callable]:
    """Decorate a function of tensors, lists of them and None, and hashable values, to replay plans on NVIDIA GPUs.

    `check` takes the same arguments and runs once for each kind of tensors, before a plan is recorded.
    """

    def decorate(function: Callable) -> Callable:
        plans: dict[tuple, Plan] = {}

        @functools.wraps(function)
        def run(*arguments):
            tensors, values = [], []
            for argument in arguments:
                if isinstance(argument, Tensor):
                    tensors.append(argument)
                    values.append(Tensor)
                elif isinstance(argument, list):
                    tensors += argument
                    values.append((list, len(argument)))
                else:
                    values.append(argument)
            # the properties of each tensor that a plan depends on
            key = tuple(values), tuple([
                None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15)
                for t in tensors
            ])  # fmt: skip
            plan = plans.get(key)
            if plan is None:
                if check:
                    check(*arguments)
                device = tensors[0].device
                if device.type != "cuda":
                    return function(*arguments)
                if len(plans) >= PLANS:
                    plans.clear()
                plan = plans[key] = Plan(function, arguments, device)
            return plan(tensors)

        return run

    return decorate


@dataclass(frozen=True, slots=True)
class View:
    """View of a buffer: the whole buffer (no size), or size, stride and offset in elements."""

    buffer: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    of_input: bool = False  # the storage may begin before the input


class Plan:
    """Recorded steps of a function for tensors of one kind.

    Args:
        function: Function of `arguments` that returns a list of tensors and None.
        arguments: Tensors, lists of tensors and None, and values.
        device: Device of the tensors.
    """

    def __init__(self, function: Callable, arguments: tuple, device: torch.device):
        recording = Recording(device)
        given = [leaf for a in arguments for leaf in (a if isinstance(a, list) else [a] * isinstance(a, Tensor))]
        standing_in = tree_map(lambda a: recording.input(a) if isinstance(a, Tensor) else a, arguments)
        outer = getattr(compiler._thread, "recording", None)
        compiler._thread.recording = recording
        try:
            with recording:
                results = function(*standing_in)
        finally:
            compiler._thread.recording = outer
        self.device = device
        self.inputs = [
            (i, *into) for i, into in zip([i for i, t in enumerate(given) if t is not None], recording.inputs)
        ]
        self.steps, self.outputs = recording.finish(results)
        self.buffers = len(recording.bases)

    def __call__(self, given: list[Any]) -> list[Tensor | None]:
        """Replay the plan for a flat list of the function's tensors, and return the function's results."""
        if self.device.type == "cuda" and self.device.index != torch._C._cuda_getDevice():
            with on(self.device.index):
                return self(given)
        tensors: list[Tensor | None] = [None] * self.buffers
        addresses = [0] * self.buffers
        for i, buffer, behind in self.inputs:
            t = tensors[buffer] = given[i]  # None is never an input
            addresses[buffer] = t.data_ptr() - behind
        # autograd and autocast are not needed here and cost host time
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            stream = compiler.current_stream(self.device)
            for step in self.steps:
                step(tensors, addresses, stream)
            return [None if output is None else see(tensors, output) for output in self.outputs]


def see(tensors: list, view: View) -> Tensor:
    t = tensors[view.buffer]
    if view.size is None:
        return t
    ahead = t.storage_offset() if view.of_input else 0
    return torch.as_strided(t, view.size, view.stride, view.offset + ahead)


class Buffer(NamedTuple):
    """Memory of a recording, and the tensor that spans it."""

    tensor: Tensor
    kind: str  # "input", "result" of an operator, or "empty"


class Empty(NamedTuple):
    """Step that allocates a buffer."""

    buffer: int


class Call(NamedTuple):
    """Step that calls a PyTorch operator. A `Launch` is a step, too."""

    operator: Callable
    args: tuple
    kwargs: dict
    result: Any
    read: list[Tensor]
    made: list[tuple[Tensor, int]]  # tensors of the result that own memory, with their buffers


class Allocation(NamedTuple):
    """Memory that several buffers share."""

    buffers: list[int]
    size: int  # bytes
    dtype: torch.dtype  # dtype of the views that operators use


class Recording(TorchDispatchMode):
    """Records what happens to placeholders for tensors on `device`."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.bases: list[Buffer] = []  # keeps storages alive, so that their numbers stay unique
        self.numbers: dict[torch.UntypedStorage, int] = {}  # buffer numbers by storage, which stay in use as keys
        self.inputs: list[tuple[int, int]] = []  # buffers, and their byte offsets from a multiple of 16
        self.starts: dict[int, int] = {}  # byte offsets of buffers in their allocations
        self.steps: list[Empty | Call | Launch] = []

    def input(self, t: Tensor) -> Tensor:
        """Return a placeholder with the same layout and the same offset from a multiple of 16 bytes."""
        behind = t.data_ptr() & 15
        offset = behind // t.element_size()
        reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
        memory = torch.empty(offset + reach, dtype=t.dtype, device="meta")
        standing_in = memory.as_strided(t.shape, t.stride(), offset)
        self.inputs.append((self._add(standing_in, "input"), offset * t.element_size()))
        return standing_in

    def _add(self, t: Tensor, kind: str) -> int:
        number = self.numbers[t.untyped_storage()] = len(self.bases)
        self.bases.append(Buffer(t, kind))
        return number

    def number_of(self, t: Tensor) -> int:
        return self.numbers[t.untyped_storage()]

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # some products with out= are not implemented on the meta device
        result = kwargs["out"] if "out" in kwargs else operator(*args, **kwargs)
        new = [t for t in tree_leaves(result) if t.untyped_storage() not in self.numbers]
        if operator in ALLOCATIONS:
            for t in new:
                self.steps.append(Empty(self._add(t, "empty")))
        elif new or operator._schema.is_mutable:
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            made = [(t, self._add(t, "result")) for t in new]
            self.steps.append(Call(operator, args, kwargs, result, read, made))
        return result

    def launch(self, one: Launch) -> None:
        self.steps.append(one)

    def finish(self, results: list) -> tuple[list[Callable], list]:
        """Return the steps as functions of tensors and addresses by buffer, and the views of the results."""
        kept = {self.number_of(t) for t in results if isinstance(t, Tensor)}
        last = {buffer: i for i, step in enumerate(self.steps) for buffer in self._used(step)}
        allocations = self._allocations(last, kept)
        steps: list[Callable] = []
        for i, step in enumerate(self.steps):
            if isinstance(step, Launch):
                steps.append(self._launching(step))
            elif isinstance(step, Call):
                steps.append(self._calling(step))
            elif step.buffer in allocations:
                steps.append(self._allocating(allocations[step.buffer]))
            elif step.buffer in kept:
                steps.append(self._making(step.buffer))
            ended = [b for b, end in last.items() if end == i and b not in kept and self.bases[b].kind != "input"]
            if ended:
                steps.append(functools.partial(_free, ended))
        return steps, [self._view(t) if isinstance(t, Tensor) else t for t in results]

    def _allocations(self, last: dict[int, int], kept: set[int]) -> dict[int, Allocation]:
        """Return shared allocations by buffer, for small buffers, and for large buffers with the same lifetime.

        All buffers of an allocation have one dtype if operators use them, and are freed after the last use of any of
        them.
        """
        seen = {self.number_of(t) for step in self.steps if isinstance(step, Call) for t in step.read}
        together: dict[tuple, list[int]] = {}
        done = 0
        for step in self.steps:
            if not isinstance(step, Empty):
                done += 1
            elif step.buffer in last and step.buffer not in kept:
                t = self.bases[step.buffer].tensor
                time = () if t.untyped_storage().nbytes() <= SMALL else (done, last[step.buffer])
                together.setdefault((*time, t.dtype if step.buffer in seen else torch.uint8), []).append(step.buffer)
        allocations = {}
        for (*_, dtype), buffers in together.items():
            end = 0
            for buffer in buffers:
                self.starts[buffer] = end
                end += -(-max(1, self.bases[buffer].tensor.untyped_storage().nbytes()) // ALIGNMENT) * ALIGNMENT
                last[buffer] = max(last[b] for b in buffers)
            allocations[buffers[0]] = Allocation(buffers, end, dtype)
        return allocations

    def _used(self, step: Empty | Call | Launch) -> set[int]:
        if isinstance(step, Launch):
            return {self.number_of(t) for _, t in step.tensors}
        if isinstance(step, Call):
            return {self.number_of(t) for t in step.read} | {buffer for _, buffer in step.made}
        return set()

    def _view(self, t: Tensor) -> View:
        number = self.number_of(t)
        base, kind = self.bases[number]
        assert t.dtype == base.dtype, "only kernels see a buffer as of another dtype"
        if number in self.starts:
            return View(number, t.shape, t.stride(), self.starts[number] // t.element_size() + int(t.storage_offset()))
        if (t.shape, t.stride(), t.storage_offset()) == (base.shape, base.stride(), base.storage_offset()):
            return View(number)
        of_input = kind == "input"
        offset = int(t.storage_offset()) - of_input * int(base.storage_offset())
        return View(number, t.shape, t.stride(), offset, of_input)

    def _launching(self, one: Launch) -> Callable:
        pointers = [(at, self.number_of(t), t.data_ptr()) for at, t in one.tensors]
        values = one.values
        one.tensors = []  # the launch must not keep the tensors alive

        def launch(_, addresses, stream):
            own = values.copy()
            for at, buffer, offset in pointers:
                own[at] = addresses[buffer] + offset
            one.run_with(own, stream)

        return launch

    def _calling(self, step: Call) -> Callable:
        operator, given_args, given_kwargs, result, _, made = step
        call = BINDINGS.get(operator, operator)
        args = list(tree_map(self._at_run_time, given_args))
        kwargs = tree_map(self._at_run_time, given_kwargs)
        seen = [(i, arg) for i, arg in enumerate(args) if isinstance(arg, View)]
        others = any(isinstance(leaf, View) for leaf in tree_leaves(kwargs))
        others |= any(isinstance(leaf, View) for arg in args if not isinstance(arg, View) for leaf in tree_leaves(arg))
        places = [i for i, t in enumerate(tree_leaves(result)) if any(t is m for m, _ in made)]
        numbers = [buffer for _, buffer in made]

        if len(seen) == len(args) == 2 and len(numbers) == 1 and not others and not kwargs:  # a matrix product

            def call_for_product(tensors, addresses, _, a=args[0], b=args[1], number=numbers[0]):
                t = tensors[number] = call(see(tensors, a), see(tensors, b))
                addresses[number] = t.data_ptr()

            return call_for_product

        def prepare(tensors):
            if others:  # tensors in lists or keyword arguments
                return tree_map(functools.partial(_seen, tensors), (args, kwargs))
            own = args.copy()
            for i, view in seen:
                own[i] = see(tensors, view)
            return own, kwargs

        if len(numbers) == 1 and isinstance(result, Tensor):
            (number,) = numbers

            def call_for_one(tensors, addresses, _):
                own, by_keyword = prepare(tensors)
                t = tensors[number] = call(*own, **by_keyword)
                addresses[number] = t.data_ptr()

            return call_for_one

        def call_for_some(tensors, addresses, _):
            own, by_keyword = prepare(tensors)
            found = tree_leaves(call(*own, **by_keyword))
            for i, number in zip(places, numbers):
                tensors[number], addresses[number] = found[i], found[i].data_ptr()

        return call_for_some

    def _at_run_time(self, leaf):
        if isinstance(leaf, Tensor):
            return self._view(leaf)
        return self.device if isinstance(leaf, torch.device) else leaf

    def _allocating(self, allocation: Allocation) -> Callable:
        device, (buffers, size, dtype) = self.device, allocation
        count, starts = size // dtype.itemsize, [(buffer, self.starts[buffer]) for buffer in buffers]

        def allocate(tensors, addresses, _):
            memory = torch.empty(count, dtype=dtype, device=device)
            address = memory.data_ptr()
            for buffer, start in starts:
                tensors[buffer], addresses[buffer] = memory, address + start

        return allocate

    def _making(self, buffer: int) -> Callable:
        t, device = self.bases[buffer].tensor, self.device
        shape, stride, dtype = t.shape, t.stride(), t.dtype
        dense = t.is_contiguous()

        def make(tensors, addresses, _):
            if dense:
                t = torch.empty(shape, dtype=dtype, device=device)
            else:
                t = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            tensors[buffer], addresses[buffer] = t, t.data_ptr()

        return make


def _seen(tensors: list, leaf):
    return see(tensors, leaf) if isinstance(leaf, View) else leaf


def _free(buffers: list[int], tensors: list, *_) -> None:
    for buffer in buffers:
        tensors[buffer] = None
