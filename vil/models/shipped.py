"""Weights in the package, which timm loads by `pretrained=True` and by tagged names such as `vil_tiny.tiny_in200`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timm.models import resolve_pretrained_cfg

FOLDER = Path(__file__).parents[1] / "weights"
TAG = "tiny_in200"  # timm tag of weights for the 200 classes of Tiny ImageNet
FILES = {f"{model}.{TAG}": FOLDER / f"{model}_photographs.safetensors" for model in ("vil_tiny_pooled", "vil_tiny")}


def pretrained_cfgs(model: str) -> dict[str, dict[str, Any]]:
    """Return a dict from a tagged model name to timm's `pretrained_cfg` of the packaged weights; empty without weights.

    The weights were trained on images of 64 pixels with patches of 4. A model for 256 pixels with patches of 16 has the
    same number of tokens and, with resampled patch embeddings, about the same accuracy (vil/weights/README.md).
    """
    name = f"{model}.{TAG}"
    if name not in FILES:
        return {}
    label_names = tuple((FOLDER / f"{TAG}.txt").read_text().split())
    source = dict(file=str(FILES[name]), label_names=label_names, num_classes=len(label_names))
    return {name: source | dict(input_size=(3, 256, 256), crop_pct=1.0)}


def file_of(model: str) -> Path | None:
    """Return the path of the packaged weights of a model name with or without a tag, or None without such weights."""
    return FILES.get(model) or FILES.get(f"{model}.{TAG}")


def pretrained_cfg(model: str, given: Any, overlay: dict[str, Any] | None) -> Any:
    """Return the `pretrained_cfg` with which timm loads pretrained weights.

    Args:
        model: Model name without a tag.
        given: `pretrained_cfg` of `timm.create_model`: a tag, a config, or None.
        overlay: `pretrained_cfg_overlay` of `timm.create_model`.

    Returns:
        `given` if `given` or `overlay` specify weights, otherwise the tag of the model's weights in the package.

    Raises:
        RuntimeError: No weights are specified, and the package has no weights for the model.
    """
    config = resolve_pretrained_cfg(model, given, overlay)
    if config.has_weights or config.state_dict:
        return given
    if not file_of(model):
        raise RuntimeError(f"{model} has no pretrained weights: set pretrained=False, or choose {' or '.join(FILES)}")
    return TAG
