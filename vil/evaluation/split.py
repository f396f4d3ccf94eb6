"""Split for an evaluation, such as ImageNet-A or ImageNet-R, with the class indices of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..classes import imagenet_ids, order_of
from ..data.sources.splits import check_count, class_names, follow_classes, limit_classes, open_split
from ..published import IMAGENET_CLASSES


class EvaluationSplit(NamedTuple):
    """Opened split.

    Attributes:
        images: timm's dataset.
        classes: Classes that a model can choose from; None for all. On a split with some of ImageNet's classes, such as
            ImageNet-A and ImageNet-R, a model chooses from these.
    """

    images: Any
    classes: list[int] | None


def open_evaluation_split(
    data_dir: str | None,
    dataset: str,
    split: str,
    num_classes: int,
    label_names: Sequence[str] = (),
    owner: str = "the model",
) -> EvaluationSplit:
    """Open a split with the class indices of a model.

    The indices follow the `label_names`. A model without names has the indices of the split, unless the split's folders
    are named by the WordNet ids of some of ImageNet's classes.

    Args:
        data_dir, dataset, split: As for `open_split`.
        num_classes: Number of classes of the model.
        label_names: Class names of the model by index; empty if unknown.
        owner: What has these class names, in messages.

    Raises:
        ConfigError: As `open_split`, or the model lacks a class of the split.
    """
    images = open_split(data_dir, dataset, split, known=label_names)
    limit_classes(images, num_classes)
    indices = class_names(images)
    names = sorted(indices, key=lambda name: indices[name])
    if not names or order_of(names, label_names or names) == [*range(num_classes)]:
        return EvaluationSplit(images, classes=None)

    imagenet = imagenet_ids()
    is_imagenet = num_classes == IMAGENET_CLASSES and {*(label_names or imagenet)} == {*imagenet}
    if not label_names and (not is_imagenet or not {*names} <= {*imagenet}):
        check_count(images, num_classes, split, data_dir)
    images, present = follow_classes(images, label_names or imagenet, owner, data_dir, dataset, split)
    lacks_classes = len(present) < num_classes
    return EvaluationSplit(images, classes=present if is_imagenet and lacks_classes else None)
