"""History of a run: a row of numbers for each finished epoch, as in summary.csv."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ..evaluation.evaluator import Evaluation


def history_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the history rows of a checkpoint as numbers, with counts as integers.

    Raises:
        ValueError, KeyError, TypeError: A row is not one that training writes.
    """
    history = [{str(name): _number(value) for name, value in row.items()} for row in rows]
    for epoch, row in enumerate(history, start=1):
        has_plain_names = all(name.isidentifier() for name in row)
        if row["epoch"] != epoch or math.isnan(best_top1(row)) or not has_plain_names:
            raise ValueError(f"the history has no row of epoch {epoch} as training writes it")
    return history


def _number(value: Any) -> int | float:
    return int(float(value)) if isinstance(value, int) else float(value)


def evaluation_columns(results: Sequence[Evaluation]) -> dict[str, float]:
    """Return the columns of an epoch's evaluation.

    Args:
        results: Result of the model and, if any, of its EMA.
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
    """Return the better top-1 of an epoch's model and EMA weights."""
    return max(row["eval_top1"], row.get("eval_top1_ema", 0.0))


def is_better(row: dict[str, Any], best: dict[str, Any]) -> bool:
    """Return whether an epoch is at least as good as the best one so far.

    An epoch that was evaluated on fewer images is worse, whatever its top-1 is. Rows of old runs lack this number.
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
    """Return the best epoch and its top-1 as text."""
    row = best_row(history)
    return f"top-1 {best_top1(row):.2f}% in epoch {row['epoch']:.0f}"
