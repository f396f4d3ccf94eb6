"""Compare accuracies over seeds: differences of means with confidence intervals and p-values, formatted as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from scipy.stats import ttest_ind, ttest_rel

BySeed = Mapping[int, float]


class Difference(NamedTuple):
    """First mean minus second mean, with a confidence interval and a p-value."""

    mean: float
    low: float  # lower end of the 95% confidence interval of the difference
    high: float  # upper end of the 95% confidence interval of the difference
    p_value: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def paired(first: BySeed, second: BySeed) -> Difference | None:
    """Compare two methods by the paired t-test over common seeds. Return None if fewer than two seeds are common."""
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        return None
    firsts, seconds = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
    test = ttest_rel(firsts, seconds)
    return Difference(mean(firsts) - mean(seconds), *map(float, test.confidence_interval()), float(test.pvalue))


def welch(first: BySeed, second: BySeed) -> Difference | None:
    """Compare two methods by Welch's t-test. Return None if a method has fewer than two values."""
    firsts, seconds = list(first.values()), list(second.values())
    if min(len(firsts), len(seconds)) < 2:
        return None
    test = ttest_ind(firsts, seconds, equal_var=False)
    return Difference(mean(firsts) - mean(seconds), *map(float, test.confidence_interval()), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons (Holm, 1979)."""
    order = np.argsort(p_values)
    factors = len(p_values) - np.arange(len(p_values))
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(1, np.maximum.accumulate(np.asarray(p_values)[order] * factors))
    return corrected.tolist()


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Format values as "mean ± standard deviation". A single value is formatted as "value"."""
    values = list(values)
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def listed(values: Iterable[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
