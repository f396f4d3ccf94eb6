"""CPU backend of the scan, which launches the kernels of `cpu_kernels`. `scan_op` describes the interface of backends.

States and sums are in fp32 for all input dtypes. Every task writes its own results, and sums over tasks have a fixed
order, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..cpu.compiler import KEPT, LANES, addresses, kernel_of
from .chunks import CHUNK, chunk_state_count

LOG2_E = 1.4426950408889634

_kernel = functools.partial(kernel_of, f"{__package__}.cpu_kernels")


def forward(
    recurrence: str, x: Tensor, step_logits: Tensor, k: Tensor, q: Tensor, A: Tensor | None, skip: Tensor | None,
    step_bias: Tensor | None, reverse: tuple[bool, ...], keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y (G, B, L, D) of G scan directions and, if `keep`, the states between chunks of tokens."""
    (G, B, L, D), N, blocks = x.shape, k.shape[-1], _blocks(x)
    inputs = [_readable(t) for t in (x, step_logits, k, q)]
    parameters = _parameters(inputs[0], A, skip, step_bias)
    new = inputs[0].new_empty  # allocates fp32 tensors
    y, states = new(G, B, L, D), new((G, B, chunk_state_count(L), N, D) if keep else 0)
    _kernel("forward", recurrence, N, CHUNK).launch(
        G * B * blocks, *_sizes(x, reverse), *_addresses_and_strides(inputs), *addresses(*parameters),
        *addresses(y, states), chunk_state_count(L) if keep else 0,
    )  # fmt: skip
    return y.to(x.dtype), states


def backward(
    recurrence: str, dy: Tensor, x: Tensor, step_logits: Tensor, k: Tensor, q: Tensor, A: Tensor | None,
    skip: Tensor | None, step_bias: Tensor | None, states: Tensor, reverse: tuple[bool, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of x, step_logits, k, q and A, and of skip and step_bias as one tensor (G, 2, D).

    Without A, the gradient of A is an empty tensor.
    """
    (G, B, L, D), N, blocks = x.shape, k.shape[-1], _blocks(x)
    inputs, dy = [_readable(t) for t in (x, step_logits, k, q)], _readable(dy)
    parameters = _parameters(inputs[0], A, skip, step_bias)
    new, tasks = dy.new_empty, G * B * blocks  # `new` allocates fp32 tensors
    dx, dstep_logits = new(2, G, B, L, D)
    parts = new(2, blocks, G, B, L, N)  # partial sums of the gradients of k and q, one for each block of channels
    dchannels = new(B, G, 2, D)  # gradients of skip and step_bias for each image
    dA = new((B, G, N, D) if A is not None else 0)
    scratch = new(min(torch.get_num_threads(), tasks), CHUNK, LANES, KEPT[recurrence] * N + 2)
    _kernel("backward", recurrence, N, CHUNK).launch(
        tasks, *_sizes(x, reverse), *_addresses_and_strides(inputs), *addresses(*parameters),
        *_addresses_and_strides([dy]), states.data_ptr(), chunk_state_count(L),
        *addresses(dx, dstep_logits, *parts, dA, dchannels, scratch), 0,
    )  # fmt: skip
    per_token = [t.to(x.dtype) for t in (dx, dstep_logits, *parts.sum(1))]
    return *per_token, dA if A is None else dA.sum(0).mT.contiguous(), dchannels.sum(0)


def _blocks(x: Tensor) -> int:
    return -(-x.shape[-1] // LANES)


def _readable(t: Tensor) -> Tensor:
    """Convert a tensor to fp32 with contiguous channels."""
    t = t.to(torch.float32)
    return t if t.stride(-1) == 1 else t.contiguous()


def _parameters(x: Tensor, A: Tensor | None, skip: Tensor | None, step_bias: Tensor | None) -> list[Tensor | None]:
    zeros = x.new_zeros(x.shape[0], x.shape[-1]) if skip is None or step_bias is None else None
    A = None if A is None else (A * LOG2_E).mT.contiguous()
    return [A, zeros if skip is None else skip, zeros if step_bias is None else step_bias]


def _sizes(x: Tensor, reverse: tuple[bool, ...]) -> tuple[int, ...]:
    G, B, L, D = x.shape
    blocks = _blocks(x)
    return G * B * blocks, blocks, B, L, D, sum(r << g for g, r in enumerate(reverse))


def _addresses_and_strides(tensors: list[Tensor]) -> list[int]:
    return [number for t in tensors for number in (t.data_ptr(), *(4 * s for s in t.stride()[:3]))]
