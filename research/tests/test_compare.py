"""Tests of research/compare.py: differences, confidence intervals and p-values equal independently written formulas."""

import math

import pytest
from scipy.stats import t as student

from research import compare

FIRST, SECOND = [90.0, 92.5, 91.0, 95.0], [88.0, 91.5, 91.5, 90.0]


def mean_and_variance(values):
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def by_students_distribution(gap, error, freedom):
    half = student.ppf(0.975, freedom) * error
    return pytest.approx((gap, gap - half, gap + half, 2 * student.sf(abs(gap) / error, freedom)))


def test_seeds_that_both_have_are_paired():
    gap, variance = mean_and_variance([a - b for a, b in zip(FIRST, SECOND)])
    found = compare.paired(dict(enumerate(FIRST)), {3: 90.0, 0: 88.0, 2: 91.5, 1: 91.5, 7: 0.0})
    assert found == by_students_distribution(gap, math.sqrt(variance / 4), 3)
    assert compare.paired({0: 1.0, 1: 2.0}, {1: 3.0, 2: 4.0}) is None


def test_welchs_test_pairs_nothing():
    (first, v1), (second, v2) = mean_and_variance(FIRST), mean_and_variance(SECOND[:3])
    of_means = v1 / 4, v2 / 3
    freedom = sum(of_means) ** 2 / (of_means[0] ** 2 / 3 + of_means[1] ** 2 / 2)  # Welch-Satterthwaite equation
    found = compare.welch(dict(enumerate(FIRST)), dict(zip((9, 5, 7), SECOND)))
    assert found == by_students_distribution(first - second, math.sqrt(sum(of_means)), freedom)
    assert compare.welch({0: 1.0, 1: 2.0}, {0: 3.0}) is None


def test_p_values_are_corrected_for_their_number():
    # Holm's correction gives 3 x 0.01, 2 x 0.04 and max(0.05, 0.08) for the sorted p-values.
    assert compare.holm([0.04, 0.01, 0.05]) == pytest.approx([0.08, 0.03, 0.08])
    assert compare.holm([0.9, 0.8]) == [1, 1]
