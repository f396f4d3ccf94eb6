"""CSV tables of a validation: accuracy per class, and confusions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..fault_tolerance.files import write_atomically
from ..security.csv_tables import csv_text
from .comparison import ContingencyTable
from .predictions import Predictions

TABLES = ("classes.csv", "confusions.csv")


def write_tables(folder: Path, predictions: Predictions, names: Mapping[int, str]) -> None:
    """Write classes.csv and confusions.csv to `folder`.

    Args:
        folder: Output folder, created if missing.
        predictions: Predictions of one or two models.
        names: Class names by class index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, rows in zip(TABLES, (class_rows(predictions, names), confusion_rows(predictions, names))):
        columns = list(rows[0]) if rows else ["class"]
        write_atomically(folder / file, csv_text(rows, columns))


def class_rows(predictions: Predictions, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return one table row per class with images: class, image count, top-1 and, for two models, a comparison."""
    rows = []
    for target in np.unique(predictions.targets_N):
        correct_NM = predictions.top1_NM[predictions.targets_N == target]
        row = {"class": target, "name": names.get(target), "images": len(correct_NM)}
        if predictions.models == 1:
            row["top1"] = 100 * correct_NM.mean()
        else:
            first_N, second_N = correct_NM.T
            paired = ContingencyTable.of(first_N, second_N)
            row["top1_first"] = 100 * first_N.mean()
            row["top1_second"] = 100 * second_N.mean()
            row["difference"] = paired.difference
            row["only_first"] = paired.only_first
            row["only_second"] = paired.only_second
        rows.append(row)
    return rows


def confusion_rows(predictions: Predictions, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the number of images per pair of a true class and a wrong prediction, most frequent first.

    For two models, rows contain the numbers of both models and are sorted by the absolute difference. Rows with equal
    numbers are left out.
    """
    counts = confusion_counts(predictions)
    sort_key = "images" if predictions.models == 1 else "difference"
    rows = []
    for target, predicted in sorted(set().union(*counts)):
        if target == predicted:
            continue
        row: dict[str, Any] = {
            "class": target,
            "name": names.get(target),
            "predicted": predicted,
            "predicted_name": names.get(predicted),
        }
        images = [count[target, predicted] for count in counts]
        if predictions.models == 1:
            row["images"] = images[0]
        else:
            row["first"], row["second"] = images
            row["difference"] = row["first"] - row["second"]
        if row[sort_key]:
            rows.append(row)
    return sorted(rows, key=lambda row: -abs(row[sort_key]))


def confusion_counts(predictions: Predictions) -> list[Counter[tuple[int, int]]]:
    """Return for each model the number of images per pair (true class, predicted class)."""
    return [Counter(zip(predictions.targets_N, predicted_N)) for predicted_N in predictions.predicted_NM.T]
