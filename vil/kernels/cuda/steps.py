"""Functions that replay one recorded launch, operator call or allocation, as a step of a plan.

A step receives a call's tensors, the tensors' addresses and a CUDA stream. Values that are equal in all calls are
computed when the step is created.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .launches import Launch

# signature step(tensors, addresses, stream), where `tensors` and `addresses` have one entry per buffer
Step = Callable[[list, list, Any], None]
aten = torch.ops.aten
# Python bindings with less host overhead than the same operators in torch.ops.aten
BINDINGS: dict[Any, Callable] = {
    aten.addmm.dtype_out: lambda x, a, b, dtype, out: torch.addmm(x, a, b, out_dtype=dtype, out=out),
    aten.addmm.out: torch.addmm,
}
# functions that write an operator's result to their first argument, so that a plan can allocate the result in advance
INTO: dict[Any, Callable] = {
    aten.mm.default: lambda out, a, b: torch.mm(a, b, out=out),
    aten.bmm.default: lambda out, a, b: torch.bmm(a, b, out=out),
    aten.mm.dtype: lambda out, a, b, dtype: torch.mm(a, b, out_dtype=dtype, out=out),
    aten.bmm.dtype: lambda out, a, b, dtype: torch.bmm(a, b, out_dtype=dtype, out=out),
    aten.add.Tensor: lambda out, a, b, alpha=1: torch.add(a, b, alpha=alpha, out=out),
    aten.mul.Tensor: lambda out, a, b: torch.mul(a, b, out=out),
    aten.neg.default: lambda out, x: torch.neg(x, out=out),
    aten.exp.default: lambda out, x: torch.exp(x, out=out),
    aten.sum.dim_IntList: lambda out, x, dim: torch.sum(x, dim, out=out),
    aten.stack.default: lambda out, tensors, dim=0: torch.stack(tensors, dim, out=out),
    aten.cat.default: lambda out, tensors, dim=0: torch.cat(tensors, dim, out=out),
    aten.clone.default: lambda out, x, **_: out.copy_(x),
    aten._to_copy.default: lambda out, x, **_: out.copy_(x),
    aten.zeros_like.default: lambda out, *_, **__: out.zero_(),
    aten.new_zeros.default: lambda out, *_, **__: out.zero_(),
    aten.constant_pad_nd.default: lambda out, x, pad, value=0: pad_into(out, x, pad, value),
}


def pad_into(out: Tensor, x: Tensor, pad: Sequence[int], value: float) -> None:
    """Write `torch.nn.functional.pad(x, pad, value=value)` to `out`."""
    out.fill_(value)
    for i, before in enumerate(pad[::2]):
        dim = -1 - i
        out = out.narrow(dim, before, x.shape[dim])
    out.copy_(x)


@dataclass(frozen=True, slots=True)
class View:
    """View of a buffer by size, stride and offset in elements, or of the whole buffer if size is None."""

    buffer: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    of_input: bool = False  # whether the buffer is an input tensor, which may have a storage offset


def view_in(tensors: list, view: View) -> Tensor:
    """Return the tensor that a `View` describes, given the tensors of all buffers."""
    t = tensors[view.buffer]
    if view.size is None:
        return t
    start = t.storage_offset() if view.of_input else 0
    return torch.as_strided(t, view.size, view.stride, view.offset + start)


def launch_kernel(launch: Launch, pointers: list[tuple[int, int, int]]) -> Step:
    """Return a function that launches a kernel.

    `pointers` holds a tuple (argument index, buffer, offset in bytes) for each pointer argument.
    """
    constants = launch.values

    def step(_, addresses, stream):
        values = constants.copy()
        for i, buffer, offset in pointers:
            values[i] = addresses[buffer] + offset
        launch.run_with(values, stream)

    return step


def call_operator(
    operator: Callable, args: Sequence, kwargs: dict, results: list[tuple[int, int]], returns_tensor: bool
) -> Step:
    """Return a function that replays the call of a PyTorch operator.

    Args:
        operator: The operator.
        args, kwargs: Arguments of the operator, with a `View` instead of each tensor.
        results: Pair (index in the operator's flattened results, buffer) of each result that owns memory.
        returns_tensor: Whether the operator returns one tensor, neither a tuple nor a list.
    """
    call = BINDINGS.get(operator, operator)
    args = list(args)
    view_indices = [i for i, arg in enumerate(args) if isinstance(arg, View)]
    nested = [arg for arg in args if not isinstance(arg, View)], kwargs
    has_nested_views = any(isinstance(leaf, View) for leaf in tree_leaves(nested))

    if len(view_indices) == len(args) == 3 and not results and not kwargs:
        return _call_with_three(call, *args)

    def prepare(tensors):
        if has_nested_views:  # also replace views inside lists and keyword arguments
            return tree_map(lambda leaf: view_in(tensors, leaf) if isinstance(leaf, View) else leaf, (args, kwargs))
        own = args.copy()
        for i in view_indices:
            own[i] = view_in(tensors, args[i])
        return own, kwargs

    def step_with_result(tensors, addresses, _, buffer=results[0][1] if results else None):
        own_args, own_kwargs = prepare(tensors)
        t = tensors[buffer] = call(*own_args, **own_kwargs)
        addresses[buffer] = t.data_ptr()

    def step(tensors, addresses, _):
        own_args, own_kwargs = prepare(tensors)
        found = tree_leaves(call(*own_args, **own_kwargs))
        for i, buffer in results:
            tensors[buffer], addresses[buffer] = found[i], found[i].data_ptr()

    return step_with_result if returns_tensor and results else step


def _call_with_three(call: Callable, out: View, a: View, b: View) -> Step:
    """Return a function that replays an operator of three views, such as a matrix product, with little overhead."""

    def step(tensors, *_):
        call(view_in(tensors, out), view_in(tensors, a), view_in(tensors, b))

    return step


def allocate(device: torch.device, dtype: torch.dtype, size: int, starts: list[tuple[int, int]]) -> Step:
    """Return a function that allocates one block of `size` bytes for several buffers at given byte offsets.

    `starts` holds a pair (buffer, offset in bytes) for each buffer.
    """
    count = size // dtype.itemsize

    def step(tensors, addresses, *_):
        memory = torch.empty(count, dtype=dtype, device=device)
        address = memory.data_ptr()
        for buffer, start in starts:
            tensors[buffer], addresses[buffer] = memory, address + start

    return step


def allocate_alone(device: torch.device, like: Tensor, buffer: int) -> Step:
    """Return a function that allocates a buffer with the shape, strides and dtype of the tensor `like`."""
    shape, stride, dtype = like.shape, like.stride(), like.dtype
    contiguous = like.is_contiguous()

    def step(tensors, addresses, *_):
        if contiguous:
            t = torch.empty(shape, dtype=dtype, device=device)
        else:
            t = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        tensors[buffer], addresses[buffer] = t, t.data_ptr()

    return step


def divide(parts: list[tuple[int, int, int, torch.dtype | None]]) -> Step:
    """Return a function that assigns memory of allocated tensors to other buffers.

    `parts` holds a tuple for each buffer: (buffer, buffer of the allocated tensor, offset in bytes, dtype in which
    operators view the memory, or None if only kernels use the buffer).
    """
    views = list(dict.fromkeys((source, dtype) for _, source, _, dtype in parts if dtype is not None))

    def step(tensors, addresses, _):
        for buffer, source, start, _ in parts:
            addresses[buffer] = addresses[source] + start
        typed = {}
        for source, dtype in views:
            t = tensors[source].view(-1)
            typed[source, dtype] = t[: t.nbytes // 256 * 256 // t.itemsize].view(dtype)
        for buffer, source, _, dtype in parts:
            if dtype is not None:
                tensors[buffer] = typed[source, dtype]

    return step


def free(buffers: list[int]) -> Step:
    """Return a function that drops the references to the tensors of some buffers, so that memory can be reused."""
    return functools.partial(_free, buffers)


def _free(buffers: list[int], tensors: list, *_) -> None:
    for buffer in buffers:
        tensors[buffer] = None
