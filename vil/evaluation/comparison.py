"""Paired comparison of two models on the same images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .predictions import Predictions
from .statistics import mcnemar_p_value, paired_interval


@dataclass(frozen=True)
class ContingencyTable:
    """Number of images that both models, only one model, or neither model classifies correctly."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @classmethod
    def of(cls, first_N: np.ndarray, second_N: np.ndarray) -> ContingencyTable:
        """Count the images that both models, only one model, or neither model classifies correctly."""
        return cls(
            both=int((first_N & second_N).sum()),
            only_first=int((first_N & ~second_N).sum()),
            only_second=int((~first_N & second_N).sum()),
            neither=int((~first_N & ~second_N).sum()),
        )

    @property
    def images(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Accuracy of the first model minus the accuracy of the second model, in percentage points."""
        return 100 * (self.only_first - self.only_second) / max(1, self.images)

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of `difference` (Agresti and Min, 2005)."""
        low, high = paired_interval(self.only_first, self.only_second, self.images)
        return 100 * low, 100 * high

    @property
    def p_value(self) -> float:
        """Two-sided p-value of McNemar's exact test."""
        return mcnemar_p_value(self.only_first, self.only_second)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "interval": self.interval, "p_value": self.p_value}


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of two models.

    Attributes:
        top1: Contingency table in which an image counts as correct if the most probable class is correct.
        top5: Contingency table in which an image counts as correct if one of the five most probable classes is correct.
        agreement: Percentage of images for which both models predict the same class, correct or not.
    """

    top1: ContingencyTable
    top5: ContingencyTable
    agreement: float

    @classmethod
    def of(cls, predictions: Predictions) -> Comparison:
        first_N, second_N = predictions.predicted_NM.T
        return cls(
            top1=ContingencyTable.of(*predictions.top1_NM.T),
            top5=ContingencyTable.of(*predictions.top5_NM.T),
            agreement=100 * (first_N == second_N).sum() / max(1, len(first_N)),
        )

    def as_dict(self) -> dict[str, Any]:
        return {"top1": self.top1.as_dict(), "top5": self.top5.as_dict(), "agreement": self.agreement}
