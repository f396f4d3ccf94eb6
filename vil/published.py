"""Published accuracy on the ImageNet-1k validation set at 224x224 pixels.

ViL's accuracies are from Liu et al., "Longhorn: State Space Models are Amortized Online Learners", 2024. ViM's
accuracies are from Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space
Model", 2024, and from the released checkpoints of ViM.
"""

from typing import NamedTuple

IMAGENET_CLASSES = 1000


class Accuracy(NamedTuple):
    """Published accuracy in percent; None if unpublished."""

    top1: float | None
    top5: float | None


PUBLISHED: dict[str, dict[str, Accuracy]] = {
    "tiny": {"ViL-tiny": Accuracy(76.4, None), "ViM-tiny": Accuracy(76.1, 93.0)},
    "small": {"ViL-small": Accuracy(80.7, None), "ViM-small": Accuracy(80.5, 95.1)},
    "base": {"ViM-base": Accuracy(81.9, 95.8)},
}


def published_for(model: str) -> dict[str, Accuracy]:
    """Return the published accuracies of all models of the same size as `model`, such as "vil_tiny".

    The dict is empty if the name does not end with a known size.
    """
    architecture = model.split(".")[0]
    size = architecture.rsplit("_", 1)[-1]
    return PUBLISHED.get(size, {})


def published(model: str) -> Accuracy:
    """Return the published accuracy of one model, such as "vil_tiny"."""
    architecture = model.split(".")[0].replace("_", "-")
    for name, accuracy in published_for(model).items():
        if name.lower() == architecture:
            return accuracy
    return Accuracy(None, None)
