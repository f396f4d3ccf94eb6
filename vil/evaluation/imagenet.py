"""Additional test sets with ImageNet's classes, and its reassessed labels (ReaL)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from timm.data import RealLabelsImagenet
from torch import Tensor, nn

from ..classes import imagenet_ids, order_of
from ..config import ConfigError
from ..data.sources.splits import check_count, class_names, follow_classes, limit_classes, open_split
from ..published import IMAGENET_CLASSES


def open_test_split(
    data_dir: str | None, dataset: str, split: str, num_classes: int, label_names: Sequence[str] = (),
    owner: str = "the model",
):  # fmt: skip
    """Open a split with the class indices of a model.

    The indices follow the `label_names`. A model without names has the indices of the split, unless the split's folders
    are named by the WordNet ids of some of ImageNet's classes.

    Args:
        data_dir, dataset, split: As for `open_split`.
        num_classes: Classes of the model.
        label_names: Class names of the model by index; empty if unknown.
        owner: What has these class names, in messages.

    Returns:
        timm's dataset, and the classes among which its images are to be judged; None for all. A split with some of
        ImageNet's classes, such as ImageNet-A and ImageNet-R, is judged among these.

    Raises:
        ConfigError: As `open_split`, or the split has a class that the model has not.
    """
    images = open_split(data_dir, dataset, split, known=label_names)
    limit_classes(images, num_classes)
    numbers = class_names(images)
    names = sorted(numbers, key=lambda name: numbers[name])
    if not names or order_of(names, label_names or names) == [*range(num_classes)]:
        return images, None
    imagenet = imagenet_ids()
    is_imagenet = num_classes == IMAGENET_CLASSES and {*(label_names or imagenet)} == {*imagenet}
    if not label_names and (not is_imagenet or not {*names} <= {*imagenet}):
        check_count(images, num_classes, split, data_dir)
    images, present = follow_classes(images, label_names or imagenet, owner, data_dir, dataset, split)
    return images, present if is_imagenet and len(present) < num_classes else None


class OnlyClasses(nn.Module):
    """A classifier that can predict some of its classes only."""

    def __init__(self, model: nn.Module, classes: list[int], num_classes: int):
        super().__init__()
        self.model = model
        excluded = torch.ones(num_classes, dtype=torch.bool)
        excluded[classes] = False
        self.register_buffer("excluded", excluded)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).masked_fill(self.excluded, -torch.inf)


class Renormalized(nn.Module):
    """Model for images that were normalized for another model; `given` and `own` are timm's data configs."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, given: dict[str, Any], own: dict[str, Any]):
        super().__init__()
        self.model = model
        mean, std, own_mean, own_std = (
            torch.tensor(config[name]).view(-1, 1, 1) for config in (given, own) for name in ("mean", "std")
        )
        device = next(model.parameters()).device
        self.register_buffer("scale", (std / own_std).to(device))
        self.register_buffer("shift", ((mean - own_mean) / own_std).to(device))

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images * self.scale + self.shift)


def real_labels(images, num_classes: int, file: str | None = None) -> np.ndarray:
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
        right = np.zeros((len(names), num_classes), dtype=bool)
        for row, name in zip(right, names):
            row[labels[name]] = True
    except (AssertionError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"ReaL labels are for ImageNet's validation images (ILSVRC2012_val_*.JPEG, all of them): {error!r}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the ReaL labels {file}: {error}") from error
    return right
