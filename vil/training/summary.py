"""What a run writes for people: summary.csv and a picture of it."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is never seen half-written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def write_summary(history: list[dict[str, Any]], folder: Path) -> None:
    """Writes summary.csv, a row for each epoch, and its picture curve.png."""
    text = io.StringIO()
    writer = csv.DictWriter(text, history[-1])
    writer.writeheader()
    writer.writerows(history)
    write_atomically(folder / "summary.csv", text.getvalue())
    write_atomically(folder / "curve.png", plot_history(history))


def plot_history(history: list[dict[str, Any]]) -> bytes:
    """A PNG of loss, learning rate and top-1 by epoch."""
    from matplotlib.figure import Figure  # no pyplot: it needs no display and keeps no state

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    loss, rate, top1 = figure.subplots(1, 3)
    epochs = [row["epoch"] for row in history]
    for axis, title, columns in (
        (loss, "loss", {"train_loss": "training", "eval_loss": "validation"}),
        (rate, "learning rate", {"lr": None}),
        (top1, "top-1 (%)", {"eval_top1": "model", "eval_top1_ema": "EMA"}),
    ):
        for name, label in columns.items():
            if name in history[-1]:
                axis.plot(epochs, [row[name] for row in history], label=label)
        axis.set_title(title)
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
        if len(axis.get_lines()) > 1:
            axis.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()
