"""Confidence intervals of accuracies, and McNemar's test for the difference of two accuracies."""

from __future__ import annotations

import math

Z_95 = 1.959964  # 97.5th percentile of the standard normal distribution, for two-sided 95% intervals


def wilson_interval(correct: int, images: int) -> tuple[float, float]:
    """Return Wilson's score interval of an accuracy at 95% confidence, as fractions from 0 to 1."""
    if images == 0:
        return 0.0, 1.0
    accuracy = correct / images
    correction = Z_95**2 / images
    centre = accuracy + correction / 2
    half_width = Z_95 * math.sqrt(accuracy * (1 - accuracy) / images + correction / (4 * images))
    low = (centre - half_width) / (1 + correction)
    high = (centre + half_width) / (1 + correction)
    return max(0.0, low), min(1.0, high)


def paired_interval(only_first: int, only_second: int, images: int) -> tuple[float, float]:
    """Return the 95% interval of the difference of two accuracies on the same images, as fractions from -1 to 1.

    The interval is Wald's after half an image is added to each of the four counts of the contingency table (Agresti and
    Min, 2005).

    Args:
        only_first: Number of images that only the first model classifies correctly.
        only_second: Number of images that only the second model classifies correctly.
        images: Number of all images.
    """
    b = only_first + 0.5
    c = only_second + 0.5
    n = images + 2
    half_width = Z_95 * math.sqrt(b + c - (b - c) ** 2 / n)
    return max(-1.0, (b - c - half_width) / n), min(1.0, (b - c + half_width) / n)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    The null hypothesis is that both models have the same accuracy. Under this hypothesis, an image that only one model
    classifies correctly is equally likely to be classified correctly by either model.
    """
    discordant = only_first + only_second
    binomial = 1
    tail = 0
    for k in range(min(only_first, only_second) + 1):
        tail += binomial
        binomial = binomial * (discordant - k) // (k + 1)
    return min(1.0, 2 * tail / 2**discordant)
