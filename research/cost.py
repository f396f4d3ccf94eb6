"""GPU minutes that models need to reach an accuracy, from curves of accuracy and measured training throughput."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import mean, median

from research.seeds import ROOT
from vil.evaluation.markdown import markdown_table

THROUGHPUT = ROOT / "benchmarks" / "results" / "h200_train_224.json"  # written by benchmarks/throughput.py
MODES = ("eager", "graph", "compiled", "compiled+graph")


def throughput(path: Path = THROUGHPUT) -> dict[str, float]:
    """Return the training images/s of each model in its fastest mode, or {} if the file does not exist.

    If a model was measured several times, the result is the median.
    """
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    found: dict[str, list[float]] = {}
    for row in rows:
        speeds = [row[mode]["images_per_second"] for mode in MODES if mode in row]
        if speeds:  # a model that could not be measured has a row without modes
            found.setdefault(row["model"], []).append(max(speeds))
    return {model: median(speeds) for model, speeds in found.items()}


def minutes_to(top1: float, curves: Sequence[Sequence[float]], epoch_minutes: float) -> float | None:
    """Return the minutes of training up to the first epoch in which the mean accuracy is at least `top1`, or None.

    A run that diverged has a shorter curve, and its accuracy counts as 0% in the missing epochs.

    Args:
        top1: Accuracy in percent.
        curves: Accuracy in percent after each epoch, for each run of a model.
        epoch_minutes: Duration of an epoch in minutes.
    """
    by_epoch = enumerate(zip_longest(*curves, fillvalue=0.0), start=1)
    epochs = (epoch for epoch, values in by_epoch if mean(values) >= top1)
    return next((epoch * epoch_minutes for epoch in epochs), None)


def cost_table(
    curves: Mapping[str, Sequence[Sequence[float]]], images: int, levels: Sequence[float], speeds: Mapping[str, float]
) -> str:
    """Return a Markdown table of the GPU minutes that each model needs to reach each accuracy of `levels`.

    Args:
        curves: Accuracy in percent after each epoch, by model and run. A model without runs has the cells `-`.
        images: Number of training images of an epoch.
        levels: Accuracies in percent.
        speeds: Training throughput in images/s by model. A model that is missing has the cells `-`.
    """
    table = [["model", "images/s", *(f"GPU minutes to {level:g}%" for level in levels), "GPU minutes of a run"]]
    for model, runs in curves.items():
        if model not in speeds or not runs:
            table.append([model, *["-"] * (len(levels) + 2)])
            continue
        epoch = images / speeds[model] / 60
        minutes = [minutes_to(level, runs, epoch) for level in levels]
        cells = ["not reached" if found is None else f"{found:.1f}" for found in minutes]
        table.append([model, f"{speeds[model]:,.0f}", *cells, f"{epoch * max(map(len, runs)):.1f}"])
    return markdown_table(table)
