"""Recording of a function's CUDA launches and PyTorch operators, and replay with little host overhead.

A function that reads sizes, allocates, takes views, computes matrix products and launches kernels repeats the same
steps for tensors of equal shapes, strides, dtypes, device and alignment. Therefore the first call for such tensors
records the steps (recording.py), and every call replays the recorded steps with the addresses of its own tensors. If
the addresses are those of earlier calls, a CUDA graph replays all steps at once (graphs.py).

    forward = planned()(forward)

The function may use tensors only through PyTorch operators and `launches.launch`, and must not read the tensors'
values. The function returns a list of tensors and None, and calls `device_of` to get the device of a tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import launches
from .graphs import Graphs
from .recording import Recording, device_of
from .steps import view_in

__all__ = ["Plan", "device_of", "planned"]

PLANS = 1024  # maximum number of plans per function


def planned(check: Callable | None = None) -> Callable[[Callable], Callable]:
    """Decorate a function to record its CUDA launches and PyTorch operators once and replay them with less overhead.

    The arguments are tensors, None, lists of tensors and None, and hashable values. `check` accepts the same arguments
    and runs before a plan is recorded.
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
            # a recorded plan is valid for tensors with equal shapes, strides, dtypes, devices and alignment
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


class Plan:
    """Recorded launches and operators of a function, for tensors of equal shapes, strides, dtypes and alignment.

    Args:
        function: Function of `arguments` that returns a list of tensors and None.
        arguments: Tensors, lists of tensors and None, and values.
        device: Device of the tensors.
    """

    def __init__(self, function: Callable, arguments: tuple, device: torch.device):
        recording = Recording(device)
        placeholders = tree_map(lambda a: recording.input(a) if isinstance(a, Tensor) else a, arguments)
        with recording.in_this_thread():
            results = function(*placeholders)
        self.device = device
        # for each input tensor, its index in the flat arguments, its buffer's number and its byte offset in the buffer
        self.inputs = [(i, *recorded) for i, recorded in zip(_tensor_indices(arguments), recording.inputs)]
        in_advance, self.allocations, self.steps, self.outputs, self.buffer_count = recording.finish(results)
        self.graphs = Graphs() if in_advance and device.type == "cuda" else None

    def __call__(self, given: list[Any]) -> list[Tensor | None]:
        """Replay the plan for a flat list of input tensors, and return the results of the recorded function."""
        tensors: list[Tensor | None] = [None] * self.buffer_count
        addresses = [0] * self.buffer_count
        for i, buffer, offset in self.inputs:
            t = tensors[buffer] = given[i]  # `inputs` has only indices of tensors, so t is not None
            addresses[buffer] = t.data_ptr() - offset

        def run() -> None:
            with torch.no_grad(), _recorded_dtypes(self.device):
                stream = launches.current_stream(self.device)
                for step in self.steps:
                    step(tensors, addresses, stream)

        with launches.on(self.device):
            for allocate in self.allocations:
                allocate(tensors, addresses, None)
            if self.graphs is None or not self.graphs.replay(self.device, addresses, run):
                run()
        # create views outside of `no_grad`, because autograd forbids in-place changes of views created in `no_grad`
        return [None if output is None else view_in(tensors, output) for output in self.outputs]


def _recorded_dtypes(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context manager that disables autocast, so that matrix products keep the dtypes of the recording."""
    return torch.autocast("cuda", enabled=False) if device.type == "cuda" else contextlib.nullcontext()


def _tensor_indices(arguments: tuple) -> list[int]:
    """Return the indices of all tensors in the flattened arguments, in which lists may contain None."""
    flat = [t for a in arguments for t in (a if isinstance(a, list) else [a] * isinstance(a, Tensor))]
    return [i for i, t in enumerate(flat) if t is not None]
