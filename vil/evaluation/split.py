"""Opening of a split, such as ImageNet-A or ImageNet-R, with the class indices of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..classes import imagenet_ids, order_of, warn_of_assumed_order
from ..data.sources.splits import check_count, class_names, follow_classes, hold_out, limit_classes, open_split
from ..published import IMAGENET_CLASSES


class EvaluationSplit(NamedTuple):
    """Images to evaluate on, and the classes that may be predicted.

    Attributes:
        images: timm dataset.
        classes: Indices of the classes that may be predicted; None for all classes. If a split such as ImageNet-A
            contains only some of ImageNet's classes, predictions are restricted to these classes.
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
    val_fraction: float | None = None,
) -> EvaluationSplit:
    """Open a split with the class indices of a model.

    Classes are matched by `label_names`. Without `label_names`, the split's own class indices are used, unless the
    model has 1000 classes and the split's classes are named by WordNet ids of ImageNet's classes.

    Args:
        data_dir, dataset, split: As for `open_split`.
        num_classes: Number of classes of the model.
        label_names: Class names of the model by index; empty if unknown.
        owner: Description of the source of `label_names`, for messages.
        val_fraction: Share of each class that training held out of this split; None opens the whole split.

    Raises:
        ConfigError: As for `open_split` and `hold_out`, or the model does not have a class of the split.
    """
    images = open_split(data_dir, dataset, split, known=label_names)
    if val_fraction:
        _, images = hold_out(images, val_fraction)
    limit_classes(images, num_classes)
    indices = class_names(images)
    names = sorted(indices, key=lambda name: indices[name])
    if not names or order_of(names, label_names or names) == [*range(num_classes)]:
        if not label_names:
            warn_of_assumed_order(names, owner)
        return EvaluationSplit(images, classes=None)

    imagenet = imagenet_ids()
    is_imagenet = num_classes == IMAGENET_CLASSES and {*(label_names or imagenet)} == {*imagenet}
    if not label_names and (not is_imagenet or not {*names} <= {*imagenet}):
        remedy = "the split must have the classes on which the model was trained"
        check_count(images, num_classes, split, data_dir, remedy)
    images, present = follow_classes(images, label_names or imagenet, owner, data_dir, dataset, split)
    lacks_classes = len(present) < num_classes
    return EvaluationSplit(images, classes=present if is_imagenet and lacks_classes else None)
