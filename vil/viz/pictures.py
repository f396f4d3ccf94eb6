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
        image_axis, *map_axes, curve_axis = row
        picture_HW3 = _picture(shown[i])
        image_axis.imshow(picture_HW3)
        image_axis.set_title(titles[i], fontsize=8, parse_math=False)
        for axis, (name, maps_Bhw) in zip(map_axes, maps.items()):
            axis.imshow(picture_HW3.mean(-1), cmap="gray", vmin=0, vmax=1)
            overlay = _overlay(axis, maps_Bhw[i].numpy(force=True), picture_HW3.shape)
            _add_colorbar(figure, overlay, axis)
            axis.set_title(name if i == 0 else "", fontsize=8)
        for axis in (image_axis, *map_axes):
            axis.set(xticks=[], yticks=[])
        _plot_curves(curve_axis, {name: curve[i] for name, curve in curves.items()})
        if i == 0:
            curve_axis.legend(fontsize=6, title="hidden first", title_fontsize=6)
    curve_axis.set_xlabel("% of patches hidden", fontsize=8)
    return figure


def _picture(shown_3HW: Tensor) -> np.ndarray:
    """Return an image as Matplotlib shows it."""
    return shown_3HW.permute(1, 2, 0).numpy(force=True)


def _add_colorbar(figure: Figure, plotted: Any, axes: Any) -> None:
    figure.colorbar(plotted, ax=axes, shrink=0.8).ax.tick_params(labelsize=6)


def _plot_curves(axis: Any, curves: dict[str, Tensor]) -> None:
    """Plot the deletion curves of an image."""
    for name, curve in curves.items():
        axis.plot(np.linspace(0, 100, len(curve)), curve.numpy(force=True), label=name)
    axis.set(ylim=(-0.03, 1.03), ylabel="probability")
    axis.tick_params(labelsize=6)


def _overlay(axis: Any, values_hw: np.ndarray, shape: Sequence[int]) -> Any:
    """Plot a semi-transparent map over the image of an axis."""
    is_signed = values_hw.min() < 0
    largest = abs(values_hw).max()
    return axis.imshow(
        values_hw,
        cmap="RdBu" if is_signed else "viridis",
        vmin=-largest if is_signed else 0,
        vmax=largest,
        alpha=0.65,
        extent=(-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5),
    )


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
    fields = {"relevance": "relevance", step: "step", "state norm": "state_norm"}
    rows = [(i, b) for i in range(len(images)) for b in blocks]
    columns = 1 + 2 * len(fields)
    figure = Figure(figsize=(1.7 * columns, 1.8 * len(rows) + 0.4), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (i, b) in zip(axes, rows):
        row[0].imshow(_picture(shown[i]))
        row[0].set_ylabel(f"block {b}")
        if b == blocks[0]:
            row[0].set_title(titles[i], fontsize=8, parse_math=False)
        for c, (name, field) in enumerate(fields.items()):
            values_1GL = getattr(traces[b], field)[i : i + 1]
            maps_Ghw = patch_maps(model, values_1GL, images.shape)[0].numpy(force=True)
            pair = row[1 + 2 * c : 3 + 2 * c]
            for axis, direction, map_hw in zip(pair, DIRECTIONS, maps_Ghw):
                plotted = axis.imshow(map_hw, cmap="viridis", vmin=maps_Ghw.min(), vmax=maps_Ghw.max())
                if (i, b) == rows[0]:
                    axis.set_title(f"{name},\n{direction}", fontsize=8)
            _add_colorbar(figure, plotted, list(pair))
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
