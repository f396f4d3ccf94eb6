"""Published accuracy on the ImageNet-1k validation images at 224 pixels, in percent, as (top-1, top-5).

ViL: Liu et al., "Longhorn: State Space Models are Amortized Online Learners", 2024. ViM: Zhu et al., "Vision Mamba:
Efficient Visual Representation Learning with Bidirectional State Space Model", 2024, and its released checkpoints.
"""

IMAGENET_CLASSES = 1000

PUBLISHED: dict[str, dict[str, tuple[float, float | None]]] = {
    "tiny": {"ViL-tiny": (76.4, None), "ViM-tiny": (76.1, 93.0)},
    "small": {"ViL-small": (80.7, None), "ViM-small": (80.5, 95.1)},
    "base": {"ViM-base": (81.9, 95.8)},
}


def published_for(model: str) -> dict[str, tuple[float, float | None]]:
    """Return the published accuracies of all models of the same size as `model`, such as "vil_tiny"; {} without a known
    size.
    """
    return PUBLISHED.get(model.split(".")[0].rsplit("_", 1)[-1], {})


def published(model: str) -> tuple[float | None, float | None]:
    """Return the published (top-1, top-5) of one model, such as "vil_tiny"; (None, None) if unpublished."""
    name = model.split(".")[0].replace("_", "-")
    return next((numbers for peer, numbers in published_for(model).items() if peer.lower() == name), (None, None))
