"""Named tuples for the operators of blocks: weights, sizes, options, and tensors saved for backward.

The schema of `vil::block` does not support named tuples. `flat` and `of` convert between named tuples and lists.

    C model width    D inner width    N states of a channel    R rank of the step projection    P = R + 2N    K taps
    B batch    L tokens    T tokens of the batch    M output tokens    S states between chunks
    E columns of uz: 2D, or D if only the class token is needed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import given
from .lines import Lines


class Sizes(NamedTuple):
    """Sizes of a block's weight dimensions: model width C, inner width D, states N, rank R and filter taps K."""

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

    def flat_size(self) -> int:
        """Return the number of elements of the tensor that contains the gradients of all weights except A_log."""
        return sum(math.prod(shape) for shape in self.shapes())

    def split(self, flat: Tensor) -> list[Tensor]:
        """Split a tensor of `flat_size` elements into views with the shapes of `shapes`."""
        shapes = self.shapes()
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes)]


class DirectionWeights(NamedTuple):
    """Weights of one direction of a block, or their gradients."""

    conv: Tensor  # (D, 1, K)
    conv_bias: Tensor  # (D,)
    x_proj: Tensor  # (P, D): projections to step, keys and queries, in this order
    step_proj: Tensor  # (D, R)
    step_bias: Tensor  # (D,)
    skip: Tensor  # (D,)
    A_log: Tensor | None = None  # (D, N): log of the negated decay rates A, only for the selective recurrence


class BlockWeights(NamedTuple):
    """Weights of a block, or their gradients."""

    norm: Tensor  # (C,)
    in_proj: Tensor  # (2D, C): rows for u, then rows for z
    out_proj: Tensor  # (C, D)
    directions: tuple[DirectionWeights, DirectionWeights]  # weights of the forward and backward scan

    def flat(self) -> list[Tensor]:
        """Return all weights as one list, with A_log only for the selective recurrence."""
        first, second = self.directions
        if first.A_log is None or second.A_log is None:
            return [self.norm, self.in_proj, self.out_proj, *first[:6], *second[:6]]
        return [self.norm, self.in_proj, self.out_proj, *first[:6], first.A_log, *second[:6], second.A_log]

    @classmethod
    def of(cls, flat: Sequence[Tensor]) -> BlockWeights:
        """Convert a list of weights, in the order of `flat`, to `BlockWeights`."""
        norm, in_proj, out_proj, *directions = flat
        half = len(directions) // 2
        return cls(
            norm, in_proj, out_proj, (DirectionWeights(*directions[:half]), DirectionWeights(*directions[half:]))
        )

    def sizes(self) -> Sizes:
        """Return the `Sizes` of the block's weights.

        `sizes` is a method, because torch.compile in PyTorch 2.10 does not support properties of a NamedTuple.
        """
        (C, D), direction = self.out_proj.shape, self.directions[0]
        R = direction.step_proj.shape[1]
        return Sizes(C, D, (direction.x_proj.shape[0] - R) // 2, R, direction.conv.shape[2])


def needs_gradients(x_BLC: Tensor, weights: BlockWeights) -> bool:
    return torch.is_grad_enabled() and (x_BLC.requires_grad or any([t.requires_grad for t in weights.flat()]))  # noqa: C419


class Options(NamedTuple):
    """Options of a block's forward pass."""

    recurrence: str  # name of the recurrence, "longhorn" or "selective"
    eps: float  # epsilon of the norm
    dtype: torch.dtype  # dtype of matrix products and of saved activations
    class_token_only: bool = False  # return only the class token, which is the middle token
    norm_next: bool = False  # also return the norm of the output if it can be computed at no extra cost
    lines: Lines | None = None  # rows or columns of patches whose means a pooled block scans; None to scan all tokens


class BackwardOptions(NamedTuple):
    """Options of the forward pass that the backward pass needs."""

    recurrence: str
    class_token_only: bool
    norm_given: bool  # whether forward received the norm xhat of x, so that backward returns xhat's gradient
    lines: Lines | None = None


class Normed(NamedTuple):
    """Residual stream after RMSNorm without weight, computed by the block itself or by the previous block."""

    xhat: Tensor  # (T, C): normalized tokens x * rstd, in the dtype of matrix products
    rstd: Tensor  # (T,): 1 / sqrt(mean(x^2) + eps), in fp32


class Inputs(NamedTuple):
    """Input tensors of the forward pass."""

    x: Tensor  # (B, L, C)
    scale: Tensor | None  # (B,): stochastic depth's factor of each image
    normed: Normed | None  # norm of x if the previous block has computed the norm, otherwise None
    weights: BlockWeights


def scales_and_weights(blocks: int, flat: Sequence[Any]) -> list[tuple[Tensor | None, Sequence[Tensor]]]:
    """Return each block's scale (or None) and weights from the list `flat` of the inputs of consecutive blocks.

    The list contains x, xhat and rstd of x (or None twice), each block's scale, and each block's weights.
    """
    scales, weights = flat[3 : 3 + blocks], flat[3 + blocks :]
    each = len(weights) // blocks
    return [(scales[i], weights[i * each : (i + 1) * each]) for i in range(blocks)]


class SavedForBackward(NamedTuple):
    """Tensors that forward saves for backward. The states, A and rstd are fp32, all others have `Options.dtype`."""

    uz: Tensor  # (B, L, E): output of in_proj
    mean: Tensor  # (B, M, D), mean of both directions' outputs
    states: Tensor  # (2, B, S, N, D), states between chunks of tokens
    packed: Tensor  # all packed weights, which `PackedWeights.of` splits
    A: Tensor | None  # (2, D, N), only for the selective recurrence
    line_means: Tensor | None  # (2, B, number of pooled tokens, D): the scan's input in a pooled block
    xhat: Tensor | None  # xhat and rstd of `Normed`, or None if xhat and rstd were inputs of the block
    rstd: Tensor | None

    @staticmethod
    def flat_length(recurrence: str, pooled: bool, norm_given: bool = False) -> int:
        """Return the length of the list that `flat` returns."""
        return 6 + (recurrence == "selective") + pooled - 2 * norm_given

    def flat(self) -> list[Tensor]:
        """Return the list of all tensors that are not None."""
        return [t for t in self if t is not None]

    @classmethod
    def of(
        cls, flat: Sequence[Tensor], recurrence: str, pooled: bool, norm_given: bool = False
    ) -> SavedForBackward:  # fmt: skip
        """Convert a list of tensors, in the order of `flat`, to `SavedForBackward`."""
        uz, mean, states, packed, *others = flat
        A = others.pop(0) if recurrence == "selective" else None
        means = others.pop(0) if pooled else None
        return cls(uz, mean, states, packed, A, means, *((None, None) if norm_given else others))


class BackwardInputs(NamedTuple):
    """Tensors of the forward pass that the backward pass of a block reads."""

    scale: Tensor | None  # (B,): stochastic depth's factor of each image
    norm: Tensor  # (C,): weight of the norm
    in_proj: Tensor  # (2D, C)
    saved: SavedForBackward

    @classmethod
    def of(cls, flat: Sequence[Tensor | None]) -> list[BackwardInputs]:
        """Convert a list of the fields of consecutive blocks, which contains no tuples, to each block's inputs."""
        each, blocks = 3 + len(SavedForBackward._fields), []
        for i in range(0, len(flat), each):
            scale, norm, in_proj, uz, mean, states, packed, *others = flat[i : i + each]
            saved = SavedForBackward(given(uz), given(mean), given(states), given(packed), *others)
            blocks.append(cls(scale, given(norm), given(in_proj), saved))
        return blocks
