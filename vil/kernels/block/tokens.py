"""Which tokens of a sequence a block reads and puts out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """All L tokens; or, for the class token in the middle alone, the half that each direction reads up to there."""

    L: int
    class_token_only: bool

    @property
    def class_token(self) -> int:
        return (self.L - 1) // 2

    @property
    def M(self) -> int:
        """How many are put out."""
        return 1 if self.class_token_only else self.L

    @property
    def H(self) -> int:
        """How many each direction reads: the first of the sequence, or the last."""
        return self.L // 2 + 1 if self.class_token_only else self.L

    def columns(self, D: int) -> int:
        """Columns of uz: u and z, or u alone, as z is of the tokens that are put out."""
        return D if self.class_token_only else 2 * D

    def wanted(self, t_BLX: Tensor) -> Tensor:
        """Those that are put out, as a view."""
        return t_BLX.narrow(1, self.class_token, 1) if self.class_token_only else t_BLX

    def wanted_of_both(self, y_2BHD: Tensor) -> Tensor:
        """Those that are put out, of what both directions have read."""
        if not self.class_token_only:
            return y_2BHD
        return torch.stack([y_2BHD[0, :, self.class_token], y_2BHD[1, :, 0]]).unsqueeze(2)

    def read_by_both(self, t_BLX: Tensor) -> Tensor:
        """What each direction reads (2, B, H, X), as a view: that of the second begins L - H tokens later."""
        B, _, X = t_BLX.shape
        return t_BLX.as_strided((2, B, self.H, X), ((self.L - self.H) * t_BLX.stride(1), *t_BLX.stride()))
