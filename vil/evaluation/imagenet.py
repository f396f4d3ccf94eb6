"""Other test sets with ImageNet's classes, and its reassessed labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor, nn

from ..config import ConfigError
from ..data.splits import class_names, limit_classes, open_split, renumbered
from ..published import IMAGENET_CLASSES


def open_test_split(data_dir: str | None, dataset: str, split: str, num_classes: int, label_names: Sequence[str] = ()):
    """timm's dataset for a split, and the classes that can be in it, None for all.

    A split whose folders are named by the WordNet ids of some of ImageNet's classes, such as ImageNet-A and ImageNet-R,
    gets the class numbers of ImageNet. One that lacks classes of the model's `label_names` gets theirs, and is judged
    among all, as in training.

    Raises:
        ConfigError: As `open_split`.
    """
    images = open_split(data_dir, dataset, split)
    limit_classes(images, num_classes)
    names = class_names(images)
    if not names or len(names) == num_classes:
        return images, None
    is_imagenet = num_classes == IMAGENET_CLASSES
    known = ImageNetInfo().label_names() if is_imagenet else label_names
    class_map = {name: number for number, name in enumerate(known[:num_classes]) if name in names}
    if len(class_map) < len(names):  # it has others: the error says how many
        return open_split(data_dir, dataset, split, num_classes), None
    return renumbered(images, class_map, data_dir, dataset, split), list(class_map.values()) if is_imagenet else None


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
    """A model on images that were normalised for another; `given` and `own` are timm's data configs."""

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
    """Which classes are right for each image, (images, classes), by ImageNet's reassessed labels.

    Beyer et al., "Are we done with ImageNet?", 2020. An image for which none is right does not count.

    Args:
        images: timm's dataset of the validation images, under their names ILSVRC2012_val_*.JPEG.
        num_classes: Classes of the model.
        file: JSON list of lists of classes by the number of the image; None for those that come with timm.

    Raises:
        ConfigError: The images are others, or the file cannot be read.
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
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the ReaL labels {file}: {error}") from error
    return right
