"""Plot training throughput against image size, for light and dark pages.

python docs/figures/speed.py        # benchmarks/results/h100_resolutions.json to docs/images/speed-*.svg
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
from block import THEMES
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
LINES = {
    "vil_small_pooled": ("ViL-small, pooled", "accent"),
    "vil_small": ("ViL-small", "backward"),
    "deit_small_patch16_224": ("DeiT-small", "forward"),
}


def draw(theme: dict[str, str]) -> Figure:
    """Plot megapixels per second against image size, and label each point with images per second.

    The curve is horizontal if the cost is linear in the number of pixels.
    """
    rows = json.loads((ROOT / "benchmarks" / "results" / "h100_resolutions.json").read_text())["rows"]
    sizes = sorted({row["img_size"] for row in rows})
    speeds = {m: {r["img_size"]: r["graph"]["images_per_second"] for r in rows if r["model"] == m} for m in LINES}
    lowest = {size: min(speeds, key=lambda model: speeds[model][size]) for size in sizes}
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    for model, (label, colour) in LINES.items():
        heights = [speeds[model][size] * size**2 / 1e6 for size in sizes]
        axes.plot(sizes, heights, "o-", color=theme[colour], linewidth=2, markersize=6, zorder=3)
        write(axes, label, sizes[-1], heights[-1], (12, 0), ha="left", va="center", color=theme[colour], weight="bold")
        for size, height in zip(sizes, heights):
            below = lowest[size] == model
            style = dict(va="top" if below else "bottom", color=theme[colour])
            write(axes, f"{speeds[model][size]:,.0f} images/s", size, height, (0, -8 if below else 8), **style)
    axes.set(xlim=(120, 1860), ylim=(0, 460), yticks=(0, 100, 200, 300, 400), facecolor="none")
    axes.set_xticks(sizes, [f"{size} x {size}" for size in sizes])
    axes.tick_params(colors=theme["soft"], length=0)
    axes.grid(axis="y", color=theme["edge"], linewidth=0.6)
    axes.spines[:].set_visible(False)
    axes.set_title("Training on one H100, megapixels/s", loc="left", color=theme["ink"], fontsize=10, weight="bold")
    return figure


def write(axes: Axes, words: str, x: float, y: float, shift: tuple[float, float], **style) -> None:
    """Write text beside a point, shifted by an offset in points (1/72 inch)."""
    style = dict(ha="center", fontsize=9) | style
    axes.annotate(words, (x, y), xytext=shift, textcoords="offset points", **style)


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "speed"})
    for name, theme in THEMES.items():
        path = ROOT / "docs" / "images" / f"speed-{name}.svg"
        draw(theme).savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
