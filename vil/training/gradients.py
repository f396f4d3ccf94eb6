"""Flat buffer of all gradients, which needs a single all-reduce and has a fixed address in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGNMENT = 64  # elements; each parameter's view starts at a multiple of ALIGNMENT, so that vector loads are aligned


class FlatGradients:
    """Accumulated fp32 gradients in one buffer `flat`; the `grad` of each parameter is a view of this buffer.

    One all-reduce replaces the buckets of DistributedDataParallel. Therefore a CUDA graph can capture the backward
    pass, and the order of additions does not change when a run is resumed.

    Raises:
        TypeError: A trainable parameter is not fp32.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = [p for p in parameters if p.requires_grad]
        if other := {p.dtype for p in self.parameters} - {torch.float32}:
            raise TypeError(f"trainable parameters must be float32, got {', '.join(map(str, other))}")
        self.sizes = [p.numel() + -p.numel() % ALIGNMENT for p in self.parameters]
        self.flat = torch.zeros(sum(self.sizes), device=self.parameters[0].device)
        for parameter, view in zip(self.parameters, self.views(self.flat)):
            parameter.grad = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split a tensor that has the layout of `flat` into one view per parameter, with the parameter's shape."""
        return [part[: p.numel()].view_as(p) for p, part in zip(self.parameters, flat.split(self.sizes))]

    def add(self, loss: Tensor) -> None:
        """Add the gradients of a loss to the buffer with one fused call, instead of one addition per parameter."""
        with stream_mismatches_ignored():
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        used = [(p.grad, gradient) for p, gradient in zip(self.parameters, gradients) if gradient is not None]
        totals, parts = zip(*used)
        torch._foreach_add_(list(totals), list(parts))

    def average_over_processes(self) -> None:
        """Average the gradients over all ranks with a single all-reduce."""
        if dist.is_initialized():
            dist.all_reduce(self.flat.div_(dist.get_world_size()))

    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients together."""
        return torch.linalg.vector_norm(self.flat)

    def zero(self) -> None:
        self.flat.zero_()


@contextmanager
def stream_mismatches_ignored() -> Iterator[None]:
    """Silence PyTorch's warning that a parameter's AccumulateGrad node was created on another CUDA stream.

    The mismatch arises because the warm-up, the capture and eager steps use different streams. The mismatch only makes
    one stream wait for the other, because `torch.autograd.grad` returns gradients and runs no AccumulateGrad node.
    """
    set_warning = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda enabled: None)
    set_warning(False)
    try:
        yield
    finally:
        set_warning(True)
