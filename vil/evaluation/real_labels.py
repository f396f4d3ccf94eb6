"""ImageNet's reassessed labels (ReaL)."""

from __future__ import annotations

from typing import Any

import numpy as np
from timm.data import RealLabelsImagenet

from ..config import ConfigError


def real_labels(images: Any, num_classes: int, file: str | None = None) -> np.ndarray:
    """Return which classes are correct for each image by ImageNet's reassessed labels, as booleans (images, classes).

    The labels are from Beyer et al., "Are we done with ImageNet?", 2020. Images without a correct class do not count.

    Args:
        images: timm's dataset of the validation images, with their names ILSVRC2012_val_*.JPEG.
        num_classes: Number of classes of the model.
        file: JSON list of the classes of each image; None for the labels that timm includes.

    Raises:
        ConfigError: The images are not ImageNet's validation images, or the file cannot be read.
    """
    try:
        names = images.filenames(basename=True)
        labels = RealLabelsImagenet(names, file).real_labels
        is_correct = np.zeros((len(names), num_classes), dtype=bool)
        for row, name in zip(is_correct, names):
            row[labels[name]] = True
    except (AssertionError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"ReaL labels are for ImageNet's validation images (ILSVRC2012_val_*.JPEG, all of them): {error!r}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the ReaL labels {file}: {error}") from error
    return is_correct
