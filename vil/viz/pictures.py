"""Matplotlib plots of attributions, scan traces and receptive fields. `vil.viz` lists the dimension letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..models.vision_longhorn import VisionLonghorn
from .traces import blocks_of, check_model, patch_maps, trace_scans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = ("first to last", "last to first")


def plot_why(shown: Tensor, titles: Sequence[str], maps: dict[str, Tensor], curves: dict[str, Tensor]) -> Figure:
    """Plot a row for each image: the image, overlaid maps, and the class's probability while patches are hidden.

    Args:
        shown: Images (B, 3, H, W) with values from 0 to 1.
        titles: Titles of the images.
        maps: Maps (B, h, w) by name. Maps with negative values use a red-to-blue scale, red for negative values.
        curves: Deletion curves (B, steps + 1) by the name of the map that ordered the patches.
    """
    from matplotlib.figure import Figure

    columns = 2 + len(maps)
    figure = Figure(figsize=(2.5 * columns, 2.2 * len(shown) + 0.3), layout="constrained")
    for i, row in enumerate(figure.subplots(len(shown), columns, squeeze=False)):
        picture = shown[i].permute(1, 2, 0).numpy(force=True)
        row[0].imshow(picture)
        row[0].set_title(titles[i], fontsize=8, parse_math=False)
        for axis, (name, values) in zip(row[1:], maps.items()):
            axis.imshow(picture.mean(-1), cmap="gray", vmin=0, vmax=1)
            bar = figure.colorbar(_overlay(axis, values[i].numpy(force=True), picture.shape), ax=axis, shrink=0.8)
            bar.ax.tick_params(labelsize=6)
            axis.set_title(name if i == 0 else "", fontsize=8)
        for axis in row[:-1]:
            axis.set(xticks=[], yticks=[])
        for name, values in curves.items():
            row[-1].plot(np.linspace(0, 100, values.shape[1]), values[i].numpy(force=True), label=name)
        row[-1].set(ylim=(-0.03, 1.03), ylabel="probability")
        row[-1].tick_params(labelsize=6)
        if i == 0:
            row[-1].legend(fontsize=6, title="hidden first", title_fontsize=6)
    row[-1].set_xlabel("% of patches hidden", fontsize=8)
    return figure


def _overlay(axis: Any, values_hw: np.ndarray, shape: Sequence[int]) -> Any:
    """Plot a semi-transparent map over the image of an axis."""
    signed = values_hw.min() < 0
    most = abs(values_hw).max()
    return axis.imshow(
        values_hw, cmap="RdBu" if signed else "viridis", vmin=-most if signed else 0, vmax=most, alpha=0.65,
        extent=(-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5),
    )  # fmt: skip


def plot_scans(
    model: VisionLonghorn, images: Tensor, shown: Tensor, titles: Sequence[str], blocks: Sequence[int] | None = None
) -> Figure:
    """Plot relevance, step and state norm of both directions for each image and block; each pair shares a colour scale.

    Args:
        model: Any VisionLonghorn.
        images: The model's input, (B, 3, H, W).
        shown: Images to plot beside the maps, (B, 3, H, W) with values from 0 to 1.
        titles: Titles of the images.
        blocks: Block indices; all blocks if None.
    """
    from matplotlib.figure import Figure

    traces = trace_scans(model, images)
    blocks = range(len(traces)) if blocks is None else blocks
    step = {"longhorn": "beta", "selective": "dt"}[blocks_of(check_model(model))[0].mixer.recurrence]
    columns = [
        (name, field) for name, field in zip(("relevance", step, "state norm"), ("relevance", "step", "state_norm"))
    ]
    rows = [(i, b) for i in range(len(images)) for b in blocks]
    figure = Figure(figsize=(1.7 * 7, 1.8 * len(rows) + 0.4), layout="constrained")
    axes = figure.subplots(len(rows), 7, squeeze=False)
    for row, (i, b) in zip(axes, rows):
        row[0].imshow(shown[i].permute(1, 2, 0).numpy(force=True))
        row[0].set_ylabel(f"block {b}")
        if b == blocks[0]:
            row[0].set_title(titles[i], fontsize=8, parse_math=False)
        for c, (name, field) in enumerate(columns):
            maps = patch_maps(model, getattr(traces[b], field)[i : i + 1], images.shape)[0].numpy(force=True)
            pair = row[1 + 2 * c : 3 + 2 * c]
            for g, axis in enumerate(pair):
                drawn = axis.imshow(maps[g], cmap="viridis", vmin=maps.min(), vmax=maps.max())
                if (i, b) == rows[0]:
                    axis.set_title(f"{name},\n{DIRECTIONS[g]}", fontsize=8)
            figure.colorbar(drawn, ax=list(pair), shrink=0.8).ax.tick_params(labelsize=6)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure


def plot_receptive_fields(fields: dict[str, Tensor]) -> Figure:
    """Plot receptive fields (H, W) by title, each on a logarithmic scale of four decades below its maximum."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(fields), 2.9), layout="constrained")
    for axis, (title, field_HW) in zip(figure.subplots(1, len(fields), squeeze=False)[0], fields.items()):
        top = float(field_HW.max())
        visible_HW = field_HW.clamp(min=top * 1e-4).numpy(force=True)
        drawn = axis.imshow(visible_HW, cmap="magma", norm=LogNorm(top * 1e-4, top))
        figure.colorbar(drawn, ax=axis, shrink=0.7).ax.tick_params(labelsize=6)
        axis.set_title(title, fontsize=9)
        axis.set(xticks=[], yticks=[])
    return figure
