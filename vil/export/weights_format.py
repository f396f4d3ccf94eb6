"""Serialization of a model's weights in half precision, for `vil.from_checkpoint`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from ..config import ConfigError
from ..data_config import input_size
from ..errors import CheckpointError
from ..factory import from_checkpoint
from ..security.checkpoint_options import MODEL_KWARGS
from ..weight_files import pack_weights
from .serialized import Serialized, text_of
from .traced import ExportError, as_evaluated, outputs_of


def to_safetensors(model: Any, metadata: dict[str, Any]) -> Serialized:
    """Serialize the weights; the result runs the model that `vil.from_checkpoint` loads from the content.

    Raises:
        ExportError: A weight exceeds fp16, the model has no head, or the model does not record its arguments.
    """
    if not model.num_classes:
        raise ExportError(
            "num_classes must be positive for .safetensors files, got 0: export the model with its head and load it "
            "with vil.from_checkpoint(num_classes=0)"
        )
    texts = {name: text_of(value) for name, value in metadata.items()}
    content = pack_weights(_weights_in_half_precision(model), _options_of(model, metadata), texts)
    loaded = _reload(content)
    return Serialized(content, run=lambda images: outputs_of(loaded, (), images))


def _weights_in_half_precision(model: Any) -> dict[str, Tensor]:
    weights = as_evaluated(model).state_dict()
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            weights[name] = tensor.half()

    too_large = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if too_large:
        raise ExportError(
            f"weights must be below 65504 in magnitude, the range of half precision, in {', '.join(too_large[:3])}"
        )
    return weights


def _options_of(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `Config` by which `vil.from_checkpoint` creates the model."""
    options = {name: metadata[name] for name in ("model", "num_classes", "crop_pct", "interpolation")}
    height, width = metadata["input_size"][1:]
    options["img_size"] = height if height == width else [height, width]
    options["model_kwargs"] = {name: value for name, value in arguments_of(model).items() if name != "img_size"}
    return options


def arguments_of(model: Any) -> dict[str, Any]:
    """Return the arguments that build the model with its current image and patch size.

    Only models of `vil.from_checkpoint` or of this package's commands record their arguments.
    """
    recorded = getattr(model, "model_args", {})
    arguments = {name: value for name, value in recorded.items() if name in MODEL_KWARGS}
    if hasattr(model, "set_input_size"):
        arguments["img_size"] = input_size(model)[1:]
    patch_size = getattr(model, "_model_args", {}).get("patch_size")  # set_input_size records the patch size here
    if patch_size:
        arguments["patch_size"] = patch_size
    return arguments


def _reload(content: bytes) -> Any:
    """Return the model that `vil.from_checkpoint` loads from the content of a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        path.write_bytes(content)
        try:
            return from_checkpoint(path)
        except (ConfigError, CheckpointError) as error:
            raise ExportError(
                "the model must record the arguments that it was built with: create it with vil.from_checkpoint "
                f"({error})"
            ) from error
