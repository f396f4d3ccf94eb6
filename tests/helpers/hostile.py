"""Operator calls with invalid arguments and unusual layouts, for tests/kernels/test_hostile_operators.py.

A call is a dict of an operator's arguments by name. Most sizes in a call differ, so that few dimensions can be
mistaken for one another.
"""

import re

import emulator
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from vil.kernels.cuda import launches
from vil.kernels.scan import cuda_scan, scan_op

GPU = torch.cuda.is_available()


def random_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(size, generator=generator)


def emulate(monkeypatch):
    """Emulate the operators' CUDA kernels on a CPU. Return a list that collects the entry point of each launch."""
    launched = []

    def launch(*arguments):
        launched.append(arguments[1])
        return emulator.launch(*arguments)

    module = scan_op._module
    emulator.as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(scan_op, "_module", lambda name, device: cuda_scan if name == "cuda" else module(name, device))
    return launched


def run(call, named):
    return getattr(torch.ops.vil, call.split()[0])(*named.values())


def places(named):
    """Yield (name, None) for each tensor argument, and (name, index) for each tensor in a list argument."""
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            yield name, None
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            yield from ((name, i) for i in range(len(value)))


def changed(named, place, change):
    """Return the arguments with `change` applied to the tensor at `place`, or None if `change` returns None."""
    name, i = place
    t = change(named[name] if i is None else named[name][i])
    if t is None:
        return None
    return named | {name: t if i is None else [*named[name][:i], t, *named[name][i + 1 :]]}


def on_this_machine(named):
    return tree_map_only(torch.Tensor, torch.Tensor.cuda, named) if GPU else named


# Changes that make a tensor argument invalid


def longer(dim):
    return lambda t: torch.cat([t, t.narrow(dim, 0, 1)], dim) if t.dim() > dim and t.shape[dim] else None


def shorter(dim):
    return lambda t: t.narrow(dim, 0, t.shape[dim] - 1) if t.dim() > dim and t.shape[dim] else None


WRONG = {
    "one dimension less": lambda t: t.new_ones(t.shape[1:]),
    "one dimension more": lambda t: t[None],
    "nothing": lambda t: t.new_empty(0) if t.numel() else None,
    "a number": lambda t: t.new_ones(()),
    "transposed": lambda t: t.mT if t.dim() > 1 and t.shape[-1] != t.shape[-2] else None,
    **{f"one more in dimension {dim}": longer(dim) for dim in range(5)},
    **{f"one less in dimension {dim}": shorter(dim) for dim in range(5)},
    "float64": lambda t: t.double(),
    "float16": lambda t: t.half(),
    "int32": lambda t: t.int(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "elsewhere": lambda t: t.cpu() if t.is_cuda else t.to("meta"),
}
# Operators compare other tensors with those in FIRST, so an error about one of FIRST may name another tensor.
FIRST = ("x_GBLD", "x_BLC", "q_GLBN", "dx_BMC", ("saved", 0))


def assert_each_wrong_tensor_is_refused(call, named, but=()):
    """Assert that each invalid tensor raises an error that names the invalid tensor.

    If the invalid tensor is in `FIRST` or is the weight of a block's norm, the error may name another tensor.
    """
    count, blocks = 0, len(named.get("scales", [0]))
    norms = [("weights", i * len(named.get("weights", ())) // blocks) for i in range(blocks)]
    first = *FIRST, *norms
    for place in places(named):
        for what in WRONG.keys() - {*but}:
            wrong = changed(named, place, WRONG[what])
            if wrong is None:
                continue
            with pytest.raises((ValueError, RuntimeError)) as caught:
                run(call, wrong)
            message = str(caught.value)
            assert any(re.search(rf"\b{name}\b", message) for name in named), (message, place, what)
            if place not in first and place[0] not in first:
                name = place[0] if place[1] is None else f"{place[0]}[{place[1]}]"
                assert name in message, (message, name, what)
            count += 1
    assert count > 40


# Memory layouts that must not change an operator's results


def copied_into(make):
    def copy(t):
        room = make(t)
        return room.copy_(t)

    return copy


LAYOUTS = {
    "at an odd address": copied_into(lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape)),
    "with the first dimension last in memory": copied_into(
        lambda t: t.new_empty(t.shape[::-1]).permute(*range(t.dim())[::-1])
    ),
    "with gaps": copied_into(lambda t: t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))[..., ::2]),
    "with one memory for the last dimension": lambda t: t[..., :1].expand(t.shape) if t.numel() else t,
    "with one memory for the first dimension": lambda t: t[:1].expand(t.shape) if t.numel() else t,
    "in windows that overlap": lambda t: t.flatten().as_strided(t.shape, [1] * t.dim()),
}


def plain(t):
    return t.clone(memory_format=torch.contiguous_format)


def assert_same(actual, expected):
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert [t.shape for t in actual] == [t.shape for t in expected]
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4, equal_nan=True)


def kinds(results):
    """Return the metadata of results that torch.compile needs: shapes, dtypes, strides and devices."""
    return [(t.shape, t.dtype, t.stride(), t.device) for t in tree_leaves(results)]
