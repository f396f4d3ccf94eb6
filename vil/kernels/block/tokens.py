"""Selection of the tokens that a block reads and returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Numbers of tokens that a block reads and returns, depending on whether only the class token is needed.

    A block processes all L tokens or, if only the class token is needed, the half of the tokens that each direction
    reads up to the class token. The recurrence of a pooled block always reads the means of all lines.
    """

    L: int
    class_token_only: bool

    @property
    def class_token(self) -> int:
        return (self.L - 1) // 2

    @property
    def M(self) -> int:
        """Number of tokens that a block returns: 1 if only the class token is needed, otherwise L."""
        return 1 if self.class_token_only else self.L

    @property
    def H(self) -> int:
        """Number of tokens that each direction reads, from the start or from the end of the sequence."""
        return self.L // 2 + 1 if self.class_token_only else self.L

    def columns(self, D: int) -> int:
        """Return the width of in_proj's output for all tokens: 2 * D (u and z), or D (u) if `class_token_only`."""
        return D if self.class_token_only else 2 * D

    def outputs(self, t_BLX: Tensor) -> Tensor:
        """Select from a tensor (B, L, X) the M tokens that the block returns, as a view (B, M, X)."""
        return t_BLX.narrow(1, self.class_token, 1) if self.class_token_only else t_BLX

    def outputs_of_both(self, y_2BHD: Tensor) -> Tensor:
        """Select from both directions' results (2, B, H, D) the M tokens that the block returns."""
        if not self.class_token_only:
            return y_2BHD
        return torch.stack([y_2BHD[0, :, self.class_token], y_2BHD[1, :, 0]]).unsqueeze(2)

    def read_by_both(self, t_BLX: Tensor) -> Tensor:
        """Return a view (2, B, H, X) of the H tokens that each of the two directions reads.

        The first direction reads the first H tokens, and the second direction reads the last H tokens.
        """
        B, _, X = t_BLX.shape
        return t_BLX.as_strided((2, B, self.H, X), ((self.L - self.H) * t_BLX.stride(1), *t_BLX.stride()))
