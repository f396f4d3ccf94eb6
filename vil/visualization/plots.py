"""Matplotlib plots of attributions, scan traces and receptive fields.

The docstring of `vil.viz` lists the dimension letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..models.vision_longhorn import VisionLonghorn
from .traces import Trace, blocks_of, check_model, patch_maps, trace_scans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = ("first to last", "last to first")
STEP_NAMES = {"longhorn": "beta", "selective": "dt"}  # symbols of `Trace.step` in ViL and in ViM
SMALLEST = 1e-4  # lower limit of the colour scale of a receptive field, relative to the largest value


def plot_why(shown: Tensor, titles: Sequence[str], maps: dict[str, Tensor], curves: dict[str, Tensor]) -> Figure:
    """Plot one row per image: the image, overlaid maps, and the class probability while patches are hidden.

    Args:
        shown: Images to plot, (B, 3, H, W) with values from 0 to 1.
        titles: One title per image.
        maps: Maps (B, h, w) with their names as keys. If a map has negative values, red marks negative values and blue
            positive values.
        curves: Deletion curves (B, steps + 1), with the name of the map that ranks the patches as keys.
    """
    from matplotlib.figure import Figure

    columns = 2 + len(maps)
    figure = Figure(figsize=(2.5 * columns, 2.2 * len(shown) + 0.3), layout="constrained")
    rows = figure.subplots(len(shown), columns, squeeze=False)
    for i, (image_axis, *map_axes, curve_axis) in enumerate(rows):
        image_HW3 = _as_array(shown[i])
        image_axis.imshow(image_HW3)
        image_axis.set_title(titles[i], fontsize=8, parse_math=False)

        for axis, maps_Bhw in zip(map_axes, maps.values()):
            axis.imshow(image_HW3.mean(-1), cmap="gray", vmin=0, vmax=1)
            overlay = _overlay(axis, maps_Bhw[i].numpy(force=True), image_HW3.shape)
            _add_colorbar(figure, overlay, axis)
        _plot_curves(curve_axis, {name: curve[i] for name, curve in curves.items()})
        _hide_ticks([image_axis, *map_axes])

    for axis, name in zip(rows[0, 1:-1], maps):
        axis.set_title(name, fontsize=8)
    rows[0, -1].legend(fontsize=6, title="hidden first", title_fontsize=6)
    rows[-1, -1].set_xlabel("% of patches hidden", fontsize=8)
    return figure


def _overlay(axis: Any, values_hw: np.ndarray, shape: Sequence[int]) -> Any:
    """Plot a semi-transparent map over the image in `axis`."""
    height, width = shape[:2]
    is_signed = values_hw.min() < 0
    largest = abs(values_hw).max()
    return axis.imshow(
        values_hw,
        cmap="RdBu" if is_signed else "viridis",
        vmin=-largest if is_signed else 0,
        vmax=largest,
        alpha=0.65,
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )


def _plot_curves(axis: Any, curves: dict[str, Tensor]) -> None:
    """Plot the deletion curves of one image."""
    for name, curve in curves.items():
        axis.plot(np.linspace(0, 100, len(curve)), curve.numpy(force=True), label=name)
    axis.set(ylim=(-0.03, 1.03), ylabel="probability")
    axis.tick_params(labelsize=6)


def plot_scans(
    model: VisionLonghorn, images: Tensor, shown: Tensor, titles: Sequence[str], blocks: Sequence[int] | None = None
) -> Figure:
    """Plot three maps per scan direction, image and block: token relevance, step size and norm of the scan state.

    The maps of both directions share a colour scale.

    Args:
        model: Any VisionLonghorn.
        images: The model's input, (B, 3, H, W).
        shown: Images to plot beside the maps, (B, 3, H, W) with values from 0 to 1.
        titles: One title per image.
        blocks: Indices of the blocks to plot; all blocks if None.
    """
    from matplotlib.figure import Figure

    traces = trace_scans(model, images)
    blocks = range(len(traces)) if blocks is None else blocks
    recurrence = blocks_of(check_model(model))[0].mixer.recurrence
    fields = ["relevance", STEP_NAMES[recurrence], "state norm"]

    num_rows = len(images) * len(blocks)
    num_columns = 1 + len(fields) * len(DIRECTIONS)
    figure = Figure(figsize=(1.7 * num_columns, 1.8 * num_rows + 0.4), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    rows = iter(axes)
    for i in range(len(images)):
        for b in blocks:
            image_axis, *map_axes = next(rows)
            image_axis.imshow(_as_array(shown[i]))
            image_axis.set_ylabel(f"block {b}")
            if b == blocks[0]:
                image_axis.set_title(titles[i], fontsize=7, parse_math=False)
            _plot_trace(figure, map_axes, _maps_of(model, traces[b], i, images.shape))

    column_titles = [f"{field},\n{direction}" for field in fields for direction in DIRECTIONS]
    for axis, title in zip(axes[0, 1:], column_titles):
        axis.set_title(title, fontsize=8)
    _hide_ticks(axes.flat)
    return figure


def _maps_of(model: VisionLonghorn, trace: Trace, i: int, image_size: Sequence[int]) -> list[np.ndarray]:
    """Return the relevance, step size and state norm of each patch of image `i`, each of shape (G, h, w)."""
    values_BGL = (trace.relevance, trace.step, trace.state_norm)
    return [patch_maps(model, values[i : i + 1], image_size)[0].numpy(force=True) for values in values_BGL]


def _plot_trace(figure: Figure, axes: Sequence[Any], maps: Sequence[np.ndarray]) -> None:
    """Plot maps (G, h, w) in consecutive axes. The maps of the two directions share a colour bar."""
    for field, maps_Ghw in enumerate(maps):
        pair = axes[2 * field : 2 * field + 2]
        for axis, map_hw in zip(pair, maps_Ghw):
            plotted = axis.imshow(map_hw, cmap="viridis", vmin=maps_Ghw.min(), vmax=maps_Ghw.max())
        _add_colorbar(figure, plotted, list(pair))


def plot_receptive_fields(fields: dict[str, Tensor]) -> Figure:
    """Plot receptive fields (H, W), given by title, each on a logarithmic colour scale of four decades."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(fields), 2.9), layout="constrained")
    (axes,) = figure.subplots(1, len(fields), squeeze=False)
    for axis, (title, field_HW) in zip(axes, fields.items()):
        largest = float(field_HW.max())
        smallest = largest * SMALLEST
        visible_HW = field_HW.clamp(min=smallest).numpy(force=True)
        plotted = axis.imshow(visible_HW, cmap="magma", norm=LogNorm(smallest, largest))
        _add_colorbar(figure, plotted, axis, shrink=0.7)
        axis.set_title(title, fontsize=9)
    _hide_ticks(axes)
    return figure


def _as_array(image_3HW: Tensor) -> np.ndarray:
    """Convert an image (3, H, W) to an array (H, W, 3) for Matplotlib."""
    return image_3HW.permute(1, 2, 0).numpy(force=True)


def _add_colorbar(figure: Figure, plotted: Any, axes: Any, shrink: float = 0.8) -> None:
    colorbar = figure.colorbar(plotted, ax=axes, shrink=shrink)
    colorbar.ax.tick_params(labelsize=6)


def _hide_ticks(axes: Any) -> None:
    for axis in axes:
        axis.set(xticks=[], yticks=[])
