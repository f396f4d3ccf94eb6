"""Validation of operators' tensor arguments, and errors for second derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from operator import attrgetter

import torch
from torch import Tensor

KINDS = 4096  # maximum number of cached results per check

# expected properties of a tensor for `check`: name, tensor, one letter per dimension, dtype
Row = tuple[str, Tensor | None, str, torch.dtype | None]


def check(sizes: dict[str, int], *table: Row) -> None:
    """Raise a ValueError that names the first tensor with a wrong dtype, device or shape.

    Args:
        sizes: Required sizes of dimensions by letter. Other sizes are taken from the first tensor with the dimension.
        table: Name, tensor (None is skipped), dimension letters, and dtype, or None for any floating-point dtype. All
            tensors must be on the first tensor's device.
    """
    device = given(table[0][1]).device
    for name, t, layout, dtype in table:
        if t is None:
            continue
        if t.dtype != dtype and (dtype is not None or not t.is_floating_point()):
            raise ValueError(f"dtype of {name} must be {dtype or 'a floating-point dtype'}, got {t.dtype}")
        if t.device != device:
            raise ValueError(
                f"{name} must be on {device}, as {table[0][0]}, got {t.device}: move all tensors to one device"
            )
        if t.dim() != len(layout) or any(sizes.setdefault(letter, n) != n for letter, n in zip(layout, t.shape)):
            shapes = ", ".join(f"{n} {tuple(other.shape)}" for n, other, *_ in table if other is not None)
            expected = ", ".join(f"{letter} = {n}" for letter, n in sizes.items() if letter in layout)
            sizes_known = f" with {expected}" if expected else ""
            raise ValueError(f"{name} must have shape ({', '.join(layout)}){sizes_known}; got {shapes}")


def check_given(**tensors: Tensor | None) -> None:
    """Raise a ValueError that names the first tensor that is None.

    This check is needed, because PyTorch accepts None where an operator's schema requires a tensor.
    """
    for name, t in tensors.items():
        if t is None:
            raise ValueError(f"{name} must be a tensor, got None")


def given(t: Tensor | None) -> Tensor:
    """Return `t`, narrowed from an optional tensor to a tensor for type checkers."""
    assert t is not None
    return t


def check_choice(name: str, value: object, choices: Iterable) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {[*choices]}, got {value!r}")


_kind_of = attrgetter("shape", "dtype", "device")


def once_a_kind(check: Callable[..., None]) -> Callable[..., None]:
    """Decorate a check to skip combinations of tensor shapes, dtypes, devices and other arguments that have passed."""
    passed: set[tuple] = set()

    @functools.wraps(check)
    def checked(*arguments) -> None:
        kind = tuple([
            _kind_of(a) if isinstance(a, Tensor) else tuple(map(_kind_of, a)) if type(a) in (list, tuple) else a
            for a in arguments
        ])  # fmt: skip
        try:
            if kind in passed:
                return
        except TypeError:  # symbolic sizes of a compiler are not hashable
            return check(*arguments)
        check(*arguments)
        if len(passed) >= KINDS:
            passed.clear()
        passed.add(kind)

    return checked


def aligned(t: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor that is aligned to 16 bytes, as kernels require, copying `t` if needed."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def refuse_second_derivative(ctx, *_) -> None:
    """Raise an error if a second derivative is computed, because PyTorch would only warn and return wrong values."""
    raise NotImplementedError(
        "a scan is differentiable once: models and operators of this package cannot differentiate twice, so gradient "
        "penalties and Hessians are not supported"
    )


class _Once(torch.autograd.Function):
    """Autograd function that returns gradients, and raises an error if the gradients are differentiated again.

    `forward` returns its first `count` tensors, which are gradients that depend on its other tensors.
    """

    @staticmethod
    def forward(ctx, count, *tensors):
        return tensors[:count]

    backward = staticmethod(refuse_second_derivative)


def once_differentiable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Wrap the backward pass of an autograd function, so that a second derivative raises a NotImplementedError.

    Gradients stay connected to the tensors that they depend on. PyTorch's decorator of the same name disconnects the
    gradients, so that `torch.autograd.functional.hessian` returns zeros.
    """

    @functools.wraps(backward)
    def wrapped(ctx, *gradients):
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # the caller did not set create_graph=True, so no second derivative follows
            return found
        detached = [t if t is None else t.detach().requires_grad_() for t in found]
        return _Once.apply(len(found), *detached, *gradients, *ctx.saved_tensors)

    return wrapped
