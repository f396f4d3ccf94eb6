"""Mosaic of the first augmented images of a training phase with their labels, saved as augmented.png."""

from __future__ import annotations

import io
import logging
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fault_tolerance.files import write_atomically
from ..text import label_of
from .curve import DOTS_PER_INCH, missing_matplotlib
from .run_info import RunInfo

_logger = logging.getLogger(__name__)

ROWS, COLUMNS = 4, 8  # number of images per column and per row of the mosaic
LARGEST_SIDE = 160  # pixels; maximum side of a plotted image
LONGEST_NAME = 16  # maximum number of characters of a class name in a title
TITLE_HEIGHT = 0.17  # inches; height of one line of a title
SMALLEST_SHARE = 0.005  # minimum share of the second class in a mixed image's label; smaller shares are not shown


class Mosaic:
    """Mosaic of the first augmented images after a phase starts or resumes. The images are copied to the host once.

    Args:
        run: Information about the run, such as the folder and class names.
        data_config: timm's data config, with `mean` and `std` of pixels in 0..1.
        rank: Rank of this process. Only rank 0 writes the mosaic.
    """

    def __init__(self, run: RunInfo, data_config: dict[str, Any], rank: int):
        self.path = run.folder / "augmented.png"
        self.label_names = run.label_names
        self.smoothing = run.phase.config.smoothing
        self.mean = torch.tensor(data_config["mean"]).view(3, 1, 1)
        self.std = torch.tensor(data_config["std"]).view(3, 1, 1)
        # number of images that the mosaic still lacks
        self.missing = ROWS * COLUMNS if rank == 0 and not missing_matplotlib() else 0
        self.images: list[Tensor] = []  # batches (B, 3, h, w) of normalized images
        self.targets: list[Tensor] = []

    def add(self, images_B3HW: Tensor, targets: Tensor) -> None:
        """Collect augmented images, and write augmented.png when the mosaic is full. Later images are ignored.

        Args:
            images_B3HW: Normalized images.
            targets: Class indices (B,) or class probabilities (B, classes).
        """
        if not self.missing:
            return
        self.images.append(_scaled_down(images_B3HW[: self.missing]))
        self.targets.append(targets[: self.missing])
        self.missing -= len(self.images[-1])
        if not self.missing:
            self._write()

    def finish(self) -> None:
        """Write augmented.png if the phase had fewer images than the mosaic has room for, unless the file exists."""
        if self.images and not self.path.exists():  # a resumed run keeps the old mosaic, which may have more images
            self._write()

    def _write(self) -> None:
        try:
            write_atomically(self.path, self._plot())
        except OSError as error:
            _logger.warning("cannot write %s: %s; training continues", self.path, error)
        self.images, self.targets = [], []

    def _plot(self) -> bytes:
        from matplotlib.figure import Figure

        images_B3HW = torch.cat(self.images).cpu() * self.std + self.mean
        images_BHW3 = images_B3HW.clamp(0, 1).permute(0, 2, 3, 1).numpy()
        labels = self._labels(torch.cat(self.targets).cpu())

        rows = math.ceil(len(labels) / COLUMNS)
        title = TITLE_HEIGHT * (1 + any("\n" in label for label in labels))
        height = 1.42 * images_BHW3.shape[1] / images_BHW3.shape[2]  # inches; a column is 1.42 inches wide
        total = rows * (height + title) + 0.06
        figure = Figure(figsize=(1.5 * COLUMNS, total))
        figure.subplots_adjust(0.005, 0.06 / total, 0.995, 1 - title / total, wspace=0.05, hspace=title / height)
        axes = [*figure.subplots(rows, COLUMNS, squeeze=False).flat]
        for axis in axes:
            axis.set_axis_off()
        for axis, image_HW3, label in zip(axes, images_BHW3, labels):
            axis.imshow(image_HW3)
            axis.set_title(label, fontsize=8, pad=2, parse_math=False)
        png = io.BytesIO()
        with warnings.catch_warnings():
            # suppress warnings about characters of the class names that Matplotlib's font lacks
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(png, format="png", dpi=DOTS_PER_INCH)
        return png.getvalue()

    def _labels(self, targets: Tensor) -> list[str]:
        """Return the class of each image, or the two classes of a mixed image with their shares."""
        if targets.ndim == 1:
            return [self._name(index) for index in targets.tolist()]
        classes = targets.shape[1]
        shares_BK = (targets - self.smoothing / classes) / max(1 - self.smoothing, 1e-6)
        top = shares_BK.topk(min(2, classes))
        labels = []
        for shares, indices in zip(top.values.tolist(), top.indices.tolist()):
            mixed = [(share, index) for share, index in zip(shares, indices) if share >= SMALLEST_SHARE]
            if len(mixed) == 1:
                labels.append(self._name(mixed[0][1]))
            else:
                labels.append("\n".join(f"{self._name(index)} {share:.0%}" for share, index in mixed))
        return labels

    def _name(self, index: int) -> str:
        name = self.label_names[index] if index < len(self.label_names) else str(index)
        return label_of(name)[:LONGEST_NAME]


def _scaled_down(images_B3HW: Tensor) -> Tensor:
    """Scale images down so that no side exceeds `LARGEST_SIDE`."""
    largest = max(images_B3HW.shape[2:])
    if largest <= LARGEST_SIDE:
        return images_B3HW
    size = [max(1, round(side * LARGEST_SIDE / largest)) for side in images_B3HW.shape[2:]]
    return F.interpolate(images_B3HW, size, mode="area")
