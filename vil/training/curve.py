"""Plot of a run's training history, saved as curve.png."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from .history import best_row, format_best

# panel title -> {column of summary.csv: label of the line, or None}
PANELS: dict[str, dict[str, str | None]] = {
    "loss": {"train_loss": "training", "eval_loss": "validation", "eval_loss_ema": "validation, EMA"},
    "top-1 (%)": {"eval_top1": "model", "eval_top1_ema": "EMA"},
    "top-5 (%)": {"eval_top5": "model", "eval_top5_ema": "EMA"},
    "learning rate": {"lr": None},
    "gradient norm": {"grad_norm": None},
    "images/s": {"images_per_second": "training", "eval_images_per_second": "validation"},
    "host waiting (% of time)": {"data_wait_percent": "for data", "gpu_wait_percent": "for the GPU"},
    "unreadable images": {"unreadable_images": None},
}
ALWAYS = ("loss", "top-1 (%)")  # panels plotted even if their values are constant
COLUMNS = 3  # panels per row
WIDTH = 12  # width of the figure in inches
HEIGHT = 3  # height of a row of panels in inches
DOTS_PER_INCH = 100


def plot_history(history: list[dict[str, Any]]) -> bytes:
    """Plot the history by epoch and return a PNG.

    Panels with constant values are left out. A dotted line marks the best epoch.
    """
    from matplotlib.figure import Figure  # instead of pyplot, which needs a display and keeps global state

    titles = [title for title, columns in PANELS.items() if title in ALWAYS or _changes(history, columns)]
    rows = math.ceil(len(titles) / COLUMNS)
    height = HEIGHT * rows + 0.5
    figure = Figure(figsize=(WIDTH, height))
    figure.suptitle(f"best: {format_best(history)}")

    # fixed margins, because a "constrained" layout takes twice as long and training waits for the plot
    bottom = 1 - (height - 0.55) / height
    top = 1 - 0.8 / height
    figure.subplots_adjust(left=0.07, right=0.99, bottom=bottom, top=top, wspace=0.25, hspace=0.4)

    axes = list(figure.subplots(rows, COLUMNS).flat)
    for unused in axes[len(titles) :]:
        unused.remove()
    for axis, title in zip(axes, titles):
        _plot_panel(axis, title, history)

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=DOTS_PER_INCH)
    return png.getvalue()


def _plot_panel(axis: Any, title: str, history: list[dict[str, Any]]) -> None:
    for epoch in _first_epochs_of_phases(history):
        axis.axvline(epoch - 0.5, color="grey", linewidth=0.8)

    epochs = [row["epoch"] for row in history]
    marker = "-" if len(epochs) > 1 else "o"
    for name, label in PANELS[title].items():
        if name in history[-1] and (title in ALWAYS or _changes(history, [name])):
            values = [row.get(name, math.nan) for row in history]
            axis.plot(epochs, values, marker, label=label)
    if title in ALWAYS:
        axis.axvline(best_row(history)["epoch"], color="grey", linestyle=":")

    axis.set_title(title)
    axis.set_xlabel("epoch")
    axis.grid(alpha=0.3)
    if len(PANELS[title]) > 1:
        axis.legend()


def _changes(history: list[dict[str, Any]], columns: Iterable[str]) -> bool:
    """Return whether any of the columns has different values in different epochs."""
    return any(len({row[name] for row in history if name in row}) > 1 for name in columns)


def _first_epochs_of_phases(history: list[dict[str, Any]]) -> list[int]:
    return [row["epoch"] for before, row in pairwise(history) if row.get("phase") != before.get("phase")]
