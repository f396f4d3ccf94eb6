"""Private functions of PyTorch that save host time, each with the public equivalent that it replaces.

`benchmarks/private_apis.py` measures what each function saves, by replacing it with its public equivalent.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def without_autograd() -> contextlib.AbstractContextManager:
    """Skip autograd's part of the dispatcher, so that views are not recorded. Public: `torch.no_grad()`."""
    return torch._C._AutoDispatchBelowAutograd()


def without_autocast() -> contextlib.AbstractContextManager:
    """Keep the dtypes of products. Public: `torch.autocast("cuda", enabled=False)`."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def current_device() -> int:
    """Return the index of the current GPU. Public: `torch.cuda.current_device()`."""
    return torch._C._cuda_getDevice()


def current_stream(device_index: int) -> int:
    """Return the handle of a GPU's current stream. Public: `torch.cuda.current_stream(device_index).cuda_stream`."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def observed() -> bool:
    """Return whether a dispatch mode or a functional transform observes operators. No public equivalent; without this
    function, every call would need the dispatcher.
    """
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat tensor with the shapes of `like`. Public: `split` and `view`."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))
