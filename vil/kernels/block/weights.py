"""Named tuples for a block's operators: weights, sizes, options, and tensors saved for backward.

The schema of `vil::block` supports only tensors and lists. `flat` and `of` convert between named tuples and lists.

    C model width    D inner width    N states of a channel    R rank of the step projection    P = R + 2N    K taps
    B batch    L tokens    T tokens of the batch    M output tokens    S states between chunks
    E columns of uz: 2D, or D for the class token only
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import given
from .lines import Lines


class Sizes(NamedTuple):
    """Sizes of a block's weights."""

    C: int
    D: int
    N: int
    R: int
    K: int

    @property
    def P(self) -> int:
        return self.R + 2 * self.N

    @property
    def padded_R(self) -> int:
        """R rounded up to a multiple of 8, which fast matrix products require."""
        return self.R + -self.R % 8

    @property
    def padded_P(self) -> int:
        return self.padded_R + 2 * self.N

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of all weights except A_log, in the order of `BlockWeights.flat`."""
        C, D, _, R, K = self
        direction: list[tuple[int, ...]] = [(D, 1, K), (D,), (self.P, D), (D, R), (D,), (D,)]
        return [(C,), (2 * D, C), (C, D), *direction, *direction]


class DirectionWeights(NamedTuple):
    """Weights of one direction of a block, or their gradients."""

    conv: Tensor  # (D, 1, K)
    conv_bias: Tensor  # (D,)
    x_proj: Tensor  # (P, D): step, keys and queries, in this order
    step_proj: Tensor  # (D, R)
    step_bias: Tensor  # (D,)
    skip: Tensor  # (D,)
    A_log: Tensor | None = None  # (D, N), only for the selective recurrence: A = -exp(A_log)


class BlockWeights(NamedTuple):
    """Weights of a block, or their gradients."""

    norm: Tensor  # (C,)
    in_proj: Tensor  # (2D, C): u, then z
    out_proj: Tensor  # (C, D)
    directions: tuple[DirectionWeights, DirectionWeights]  # forward direction (first token to last), backward direction

    def flat(self) -> list[Tensor]:
        """Return all weights as one list, with A_log only for the selective recurrence."""
        first, second = self.directions
        if first.A_log is None or second.A_log is None:
            return [self.norm, self.in_proj, self.out_proj, *first[:6], *second[:6]]
        return [self.norm, self.in_proj, self.out_proj, *first[:6], first.A_log, *second[:6], second.A_log]

    @classmethod
    def of(cls, flat: Sequence[Tensor]) -> BlockWeights:
        """Build the weights from a list that `flat` returned."""
        norm, in_proj, out_proj, *directions = flat
        half = len(directions) // 2
        return cls(
            norm, in_proj, out_proj, (DirectionWeights(*directions[:half]), DirectionWeights(*directions[half:]))
        )

    def sizes(self) -> Sizes:
        """Return the sizes of the weights.

        This is a method, because torch.compile in PyTorch 2.10 does not support properties of a NamedTuple.
        """
        (C, D), direction = self.out_proj.shape, self.directions[0]
        R = direction.step_proj.shape[1]
        return Sizes(C, D, (direction.x_proj.shape[0] - R) // 2, R, direction.conv.shape[2])


def needs_gradients(x_BLC: Tensor, weights: BlockWeights) -> bool:
    return torch.is_grad_enabled() and (x_BLC.requires_grad or any([t.requires_grad for t in weights.flat()]))  # noqa: C419


class Options(NamedTuple):
    """Options of a block's computation."""

    recurrence: str  # "longhorn" or "selective"
    eps: float  # epsilon of the norm
    dtype: torch.dtype  # dtype of products and of all saved tensors except sums
    class_token_only: bool = False  # return only the middle token
    norm_next: bool = False  # also return the norm of the output if it can be computed at no extra cost
    lines: Lines | None = None  # lines of patches whose means the recurrence of a pooled block reads


class BackwardOptions(NamedTuple):
    """Options of the forward pass that the backward pass needs."""

    recurrence: str
    class_token_only: bool
    norm_given: bool  # whether the norm was an input of forward, so that backward returns its gradient
    lines: Lines | None = None


class Normed(NamedTuple):
    """Norm of a residual stream without its weight, passed from block to block by the fused add-norm."""

    xhat: Tensor  # (T, C): rstd x, in the dtype of products
    rstd: Tensor  # (T,): 1 / sqrt(mean(x^2) + eps), in fp32


class Inputs(NamedTuple):
    """Input tensors of the forward pass."""

    x: Tensor  # (B, L, C)
    scale: Tensor | None  # (B,), factors of stochastic depth
    normed: Normed | None  # norm of x that the previous block returned
    weights: BlockWeights

    def flat(self) -> list[Tensor | None]:
        return [self.x, self.scale, *(self.normed or (None, None)), *self.weights.flat()]

    @classmethod
    def of(cls, flat: Iterable[Tensor | None]) -> Inputs:
        """Build the inputs from a list that `flat` returned."""
        x, scale, xhat, rstd, *weights = flat
        normed = None if xhat is None or rstd is None else Normed(xhat, rstd)
        return cls(given(x), scale, normed, BlockWeights.of([given(t) for t in weights]))


class SavedForBackward(NamedTuple):
    """Tensors that forward saves for backward. states, A and rstd are fp32, others have the dtype of products."""

    uz: Tensor  # (B, L, E)
    mean: Tensor  # (B, M, D), mean of both directions' outputs
    states: Tensor  # (2, B, S, N, D), states between chunks of tokens
    packed: Tensor  # packed weights
    A: Tensor | None  # (2, D, N), only for the selective recurrence
    pooled: Tensor | None  # (2, B, lines.S, D): inputs of a pooled block's recurrence
    xhat: Tensor | None  # xhat and rstd of `Normed`; None if the block received both as inputs
    rstd: Tensor | None

    def flat(self) -> list[Tensor]:
        """Return the list of all tensors that are not None."""
        return [t for t in self if t is not None]

    @classmethod
    def of(
        cls, flat: Sequence[Tensor], recurrence: str, pooled: bool, norm_given: bool = False
    ) -> SavedForBackward:  # fmt: skip
        """Build the saved tensors from a list that `flat` returned."""
        uz, mean, states, packed, *others = flat
        A = others.pop(0) if recurrence == "selective" else None
        means = others.pop(0) if pooled else None
        return cls(uz, mean, states, packed, A, means, *((None, None) if norm_given else others))


class BackwardInputs(NamedTuple):
    """Input tensors of the backward pass."""

    dx: Tensor  # (B, M, C), the gradient of x'
    dnext: Tensor | None  # (B M, C), the gradient of next_normed.xhat
    next_normed: Normed | None  # the norm of x' that forward has returned
    scale: Tensor | None  # (B,), factors of stochastic depth
    norm: Tensor  # (C,), the weight
    in_proj: Tensor  # (2D, C)
    saved: SavedForBackward

    @classmethod
    def of(cls, flat: Iterable[Tensor | None]) -> BackwardInputs:
        """Build the inputs from one list in the order of the fields. A missing `next_normed` is None twice."""
        dx, dnext, xhat, rstd, scale, norm, in_proj, uz, mean, states, packed, *others = flat
        next_normed = None if xhat is None or rstd is None else Normed(xhat, rstd)
        saved = SavedForBackward(given(uz), given(mean), given(states), given(packed), *others)
        return cls(given(dx), dnext, next_normed, scale, given(norm), given(in_proj), saved)
