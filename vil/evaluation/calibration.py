"""Calibration of a model's probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 10  # number of bins of equal width between the probabilities 0 and 1


@dataclass(frozen=True)
class CalibrationBin:
    """Statistics of the images whose predicted class has a probability in the bin's range.

    Attributes:
        images: Number of images.
        accuracy: Top-1 accuracy in percent.
        confidence: Mean probability of the predicted class in percent.
    """

    images: int
    accuracy: float
    confidence: float


def calibration_bins(probabilities_N: np.ndarray, correct_N: np.ndarray) -> list[CalibrationBin]:
    """Divide images into bins of equal width by the probability of the predicted class.

    Args:
        probabilities_N: Probability of the predicted class of each image.
        correct_N: Whether each prediction is correct.
    """
    bin_N = np.minimum((probabilities_N * BINS).astype(int), BINS - 1)
    bins = []
    for b in range(BINS):
        is_in_bin = bin_N == b
        if is_in_bin.any():
            accuracy = 100 * correct_N[is_in_bin].mean()
            confidence = 100 * probabilities_N[is_in_bin].mean()
            bins.append(CalibrationBin(is_in_bin.sum(), accuracy, confidence))
        else:
            bins.append(CalibrationBin(0, 0.0, 0.0))
    return bins


def expected_calibration_error(bins: list[CalibrationBin]) -> float:
    """Return the mean absolute difference between accuracy and confidence, weighted by images, in percentage points."""
    images = sum(b.images for b in bins)
    return sum(b.images * abs(b.accuracy - b.confidence) / max(1, images) for b in bins)
