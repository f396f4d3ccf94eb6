"""Gradients of the kernels' reference implementations, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(function: Callable, inputs: Sequence[Tensor | None], dy: Tensor) -> list[Any]:
    """Return the gradients of `function(*inputs)` by autograd, a tensor or None like the input of each."""
    inputs = [t if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        y = function(*inputs)
    found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy))
    return [None if t is None else next(found) for t in inputs]
