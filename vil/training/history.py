"""Training history: one row of numbers per finished epoch, as in summary.csv."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ..evaluation.evaluator import Evaluation


def history_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validate the history rows of a checkpoint and convert their values to int or float.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, OverflowError: A row is invalid.
    """
    history = [{str(name): _number(value) for name, value in row.items()} for row in rows]
    for epoch, row in enumerate(history, start=1):
        has_plain_names = all(name.isidentifier() for name in row)
        if row["epoch"] != epoch or math.isnan(best_top1(row)) or not has_plain_names:
            raise ValueError(f"the history row of epoch {epoch} is missing or invalid")
    return history


def _number(value: Any) -> int | float:
    return int(float(value)) if isinstance(value, int) else float(value)


def evaluation_columns(results: Sequence[Evaluation]) -> dict[str, float]:
    """Return the evaluation columns of a history row.

    Args:
        results: Evaluation of the model and, if the run has an EMA, of the EMA model.
    """
    columns: dict[str, float] = {
        "eval_images": results[0].images,
        "eval_images_per_second": results[0].images_per_second,
    }
    for suffix, result in zip(("", "_ema"), results):
        columns[f"eval_loss{suffix}"] = result.loss
        columns[f"eval_top1{suffix}"] = result.top1
        columns[f"eval_top5{suffix}"] = result.top5
    return columns


def best_top1(row: dict[str, Any]) -> float:
    """Return the top-1 accuracy of an epoch: that of the model or of the EMA weights, whichever is higher."""
    return max(row["eval_top1"], row.get("eval_top1_ema", 0.0))


def is_better(row: dict[str, Any], best: dict[str, Any]) -> bool:
    """Return whether the epoch in `row` is at least as good as the best earlier epoch.

    An epoch that was evaluated on fewer images always counts as worse. The rows of old runs do not store the number of
    images, and are compared by top-1 only.
    """
    images = row.get("eval_images")
    most_images = best.get("eval_images")
    if images is not None and most_images is not None and images != most_images:
        return images > most_images
    return best_top1(row) >= best_top1(best)


def best_row(history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the history row of the best epoch (the latest one on ties)."""
    return functools.reduce(lambda best, row: row if is_better(row, best) else best, history)


def format_best(history: list[dict[str, Any]]) -> str:
    """Return a text with the best top-1 accuracy of a run and the number of the best epoch."""
    row = best_row(history)
    return f"top-1 {best_top1(row):.2f}% in epoch {row['epoch']:.0f}"
