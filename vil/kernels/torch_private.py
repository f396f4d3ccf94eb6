"""Private functions of PyTorch that kernels need, or that save at least 5% of the host time of a training step.

docs/kernels/changing-a-kernel.md has the measurements.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.autograd import forward_ad


def below_autograd() -> contextlib.AbstractContextManager:
    """Return a context manager in which calls of operators skip the operators' Autograd implementations.

    PyTorch has no public equivalent for implementations that `torch.library.impl` registers: `torch.no_grad()` would
    call the Autograd implementation again.
    """
    return torch._C._AutoDispatchBelowAutograd()


def observed() -> bool:
    """Return whether a `TorchDispatchMode`, a torch.func transformation or forward-mode differentiation is active.

    PyTorch has no public equivalent. Without this function, every call would need the dispatcher.
    """
    return (
        bool(torch._C._len_torch_dispatch_stack())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or in_forward_mode()
    )


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active, that is, a `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor with the shapes of `like`, as `split` and `view` would."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))
