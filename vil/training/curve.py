"""Plot of a run's training history, saved as curve.png."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ..config import Config
from .history import best_row, format_best

# panel title -> {column of summary.csv: legend label, or None without a legend}
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
HEIGHT = 3  # height of each panel in inches
DOTS_PER_INCH = 100
FEWEST_TO_CUT = 5  # the y-axis may exclude the first epoch only if the run has at least this many epochs
MARGIN = 0.05  # space above and below the plotted lines, as a fraction of the lines' range


def missing_matplotlib() -> ImportError | None:
    """Return the error raised by importing Matplotlib, or None if the import succeeds."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return error
    return None


def plot_history(history: list[dict[str, Any]], note: str = "") -> bytes:
    """Plot the history by epoch and return a PNG.

    Panels with constant values are left out, except loss and top-1. A dotted line in the panels of loss and top-1 marks
    the best epoch.

    Args:
        history: One row per epoch.
        note: Remark to print below the panels.
    """
    from matplotlib.figure import Figure  # matplotlib.pyplot would keep the figure in global state

    titles = [title for title, columns in PANELS.items() if title in ALWAYS or _changes(history, columns)]
    rows = math.ceil(len(titles) / COLUMNS)
    height = HEIGHT * rows + 0.7
    figure = Figure(figsize=(WIDTH, height))
    figure.suptitle(f"best: {format_best(history)} (dotted line)")
    figure.text(0.01, 0.08 / height, note, fontsize="small")

    # The margins are fixed, because a "constrained" layout takes longer and training waits for the plot.
    bottom = 0.7 / height
    top = 1 - 0.95 / height
    figure.subplots_adjust(left=0.07, right=0.99, bottom=bottom, top=top, wspace=0.25, hspace=0.55)

    axes = list(figure.subplots(rows, COLUMNS).flat)
    for unused in axes[len(titles) :]:
        unused.remove()
    for axis, title in zip(axes, titles):
        _plot_panel(axis, title, history)

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=DOTS_PER_INCH)
    return png.getvalue()


def note_on_losses(config: Config) -> str:
    """Return a note on how label smoothing, mixing or BCE changes the training loss, or "" if none is used."""
    if config.bce_loss:
        return "The training loss is binary cross-entropy, and the validation loss is cross-entropy."
    parts = {
        "label smoothing": config.smoothing > 0,
        "mixup": config.mixing and config.mixup > 0,
        "cutmix": config.mixing and config.cutmix > 0,
    }
    causes = [name for name, is_used in parts.items() if is_used]
    if not causes:
        return ""
    *others, last = causes
    subject = f"{', '.join(others)} and {last} raise" if others else f"{last} raises"
    return f"{subject[0].upper()}{subject[1:]} only the training loss, which can therefore exceed the validation loss."


def _plot_panel(axis: Any, title: str, history: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    for epoch in _first_epochs_of_phases(history):
        axis.axvline(epoch - 0.5, color="grey", linewidth=0.8)

    epochs = [row["epoch"] for row in history]
    marker = "-" if len(epochs) > 1 else "o"
    plotted = []
    for name, label in PANELS[title].items():
        if name in history[-1] and (title in ALWAYS or _changes(history, [name])):
            values = [row.get(name, math.nan) for row in history]
            axis.plot(epochs, values, marker, label=label)
            plotted.append(values)
    if title in ALWAYS:
        axis.axvline(best_row(history)["epoch"], color="grey", linestyle=":")

    axis.set_title(title, loc="left", pad=16)
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.grid(alpha=0.3)
    _cut_off_first_epoch(axis, plotted)
    if len(PANELS[title]) > 1:
        # Place the legend above the panel, so that it covers no line.
        axis.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="small",
            borderaxespad=0, borderpad=0.2, handlelength=1, columnspacing=1,
        )  # fmt: skip


def _cut_off_first_epoch(axis: Any, plotted: Sequence[Sequence[float]]) -> None:
    """Exclude the first epoch from the y-axis if the later epochs would fill less than half of the axis otherwise."""
    later = [value for values in plotted for value in values[1:] if math.isfinite(value)]
    if len(plotted[0]) < FEWEST_TO_CUT or len({*later}) < 2:
        return
    low, high = min(later), max(later)
    span = high - low
    first = [values[0] for values in plotted if math.isfinite(values[0])]
    if max(*first, high) - min(*first, low) <= 2 * span:
        return
    low, high = low - MARGIN * span, high + MARGIN * span
    axis.set_ylim(low, high)
    cut = ", ".join(f"{value:.3g}" for value in first if not low <= value <= high)
    axis.set_xlabel(f"epoch (epoch 1 is cut off: {cut})")


def _changes(history: list[dict[str, Any]], columns: Iterable[str]) -> bool:
    """Return whether any of the columns has different values in different epochs."""
    return any(len({row[name] for row in history if name in row}) > 1 for name in columns)


def _first_epochs_of_phases(history: list[dict[str, Any]]) -> list[int]:
    return [row["epoch"] for before, row in pairwise(history) if row.get("phase") != before.get("phase")]
