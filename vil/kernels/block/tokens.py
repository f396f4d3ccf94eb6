"""Selection of the tokens that a block reads and returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """All L tokens; or, if only the class token is needed, the half of the tokens that each direction reads up to
    the class token.
    """

    L: int
    class_token_only: bool

    @property
    def class_token(self) -> int:
        return (self.L - 1) // 2

    @property
    def M(self) -> int:
        """Number of output tokens."""
        return 1 if self.class_token_only else self.L

    @property
    def H(self) -> int:
        """Number of tokens that each direction reads: the first of the sequence, or the last."""
        return self.L // 2 + 1 if self.class_token_only else self.L

    def columns(self, D: int) -> int:
        """Return the columns of uz: u and z, or only u, because z is needed for output tokens only."""
        return D if self.class_token_only else 2 * D

    def outputs(self, t_BLX: Tensor) -> Tensor:
        """Return the output tokens (B, M, X) as a view."""
        return t_BLX.narrow(1, self.class_token, 1) if self.class_token_only else t_BLX

    def outputs_of_both(self, y_2BHD: Tensor) -> Tensor:
        """Return the output tokens (2, B, M, D) of both directions' results."""
        if not self.class_token_only:
            return y_2BHD
        return torch.stack([y_2BHD[0, :, self.class_token], y_2BHD[1, :, 0]]).unsqueeze(2)

    def read_by_both(self, t_BLX: Tensor) -> Tensor:
        """Return the tokens that each direction reads (2, B, H, X) as a view; the second direction starts L - H tokens
        later.
        """
        B, _, X = t_BLX.shape
        return t_BLX.as_strided((2, B, self.H, X), ((self.L - self.H) * t_BLX.stride(1), *t_BLX.stride()))
