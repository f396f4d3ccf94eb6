"""Plot that compares two models."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from .comparison import Comparison
from .predictions import Predictions
from .tables import class_rows


def plot_comparison(names: Sequence[str], comparison: Comparison, predictions: Predictions) -> bytes:
    """Plot accuracy differences with 95% intervals, and both models' top-1 accuracy for each class. Return a PNG.

    Args:
        names: Names of the two models.
        comparison: Paired comparison of the two models.
        predictions: Predictions of both models.
    """
    from matplotlib.figure import Figure

    first, second = names
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot_differences(left, comparison)
    left.set_xlabel(f"{first} minus {second}, percentage points, 95% interval")
    _plot_classes(right, predictions)
    right.set(xlabel=f"{second}, top-1 per class (%)", ylabel=f"{first} (%)")

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def _plot_differences(axis: Any, comparison: Comparison) -> None:
    for y, name, paired in ((0, "top-5", comparison.top5), (1, "top-1", comparison.top1)):
        axis.plot(paired.interval, [y, y], color="C0")
        axis.plot([paired.difference], [y], "o", color="C0")
        label = f"{name}, p = {paired.p_value:.2g}"
        axis.text(paired.difference, y + 0.08, label, ha="center", va="bottom")
    axis.axvline(0, color="grey", linewidth=1)
    axis.set(ylim=(-0.5, 1.6), yticks=[])


def _plot_classes(axis: Any, predictions: Predictions) -> None:
    rows = class_rows(predictions, names={})
    first = [row["top1_first"] for row in rows]
    second = [row["top1_second"] for row in rows]
    axis.axline((100, 100), slope=1, color="grey", linewidth=1)
    axis.scatter(second, first, s=9, alpha=0.5)
