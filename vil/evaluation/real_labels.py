"""ReaL labels (reassessed labels) of the ImageNet validation images."""

from __future__ import annotations

from typing import Any

import numpy as np
from timm.data import RealLabelsImagenet

from ..config import ConfigError


def real_labels(images: Any, num_classes: int, file: str | None = None) -> np.ndarray:
    """Return a boolean array (images, classes) that marks the correct classes of each image by the ReaL labels.

    The labels are from Beyer et al., "Are we done with ImageNet?", 2020. Some images have no correct class.

    Args:
        images: timm dataset of the validation images, with file names ILSVRC2012_val_*.JPEG.
        num_classes: Number of classes of the model.
        file: JSON file with a list of classes per image; None uses the labels included in timm.

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
        raise ConfigError(f"ReaL labels must fit the model and all images, ILSVRC2012_val_*.JPEG: {error!r}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the ReaL labels from {file}: {error}") from error
    return is_correct
