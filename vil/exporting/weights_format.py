"""Serialization of a model's weights in half precision as .safetensors, for `vil.from_checkpoint`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from ..config import ConfigError
from ..data_config import input_size
from ..errors import CheckpointError
from ..factory import from_checkpoint
from ..models.vision_longhorn import VisionLonghorn
from ..security.checkpoint_options import MODEL_KWARGS
from ..weight_files import pack_weights
from .serialized import Serialized, text_of
from .traced import ExportError, as_evaluated, outputs_of


def to_safetensors(model: Any, metadata: dict[str, Any]) -> Serialized:
    """Serialize the weights of a model, and reload them with `vil.from_checkpoint` for the check of the outputs.

    Raises:
        ExportError: A weight is not finite in fp16, the model has no head, or the model's arguments are unknown.
    """
    if not model.num_classes:
        raise ExportError(
            "num_classes must be positive for .safetensors files, got 0: export the model with its head, and load the "
            "file with vil.from_checkpoint(num_classes=0)"
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
            "weights must be finite and at most 65504 in magnitude to be stored in half precision, got other values in "
            f"{', '.join(too_large[:3])}"
        )
    return weights


def _options_of(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the training options from which `vil.from_checkpoint` creates the model."""
    options = {name: metadata[name] for name in ("model", "num_classes", "crop_pct", "interpolation")}
    height, width = metadata["input_size"][1:]
    options["img_size"] = height if height == width else [height, width]
    options["model_kwargs"] = {name: value for name, value in arguments_of(model).items() if name != "img_size"}
    return options


def arguments_of(model: Any) -> dict[str, Any]:
    """Return the keyword arguments that create the model with its current image size, patch size, depth and pooling.

    The arguments are recorded by the models of this package, by `vil.from_checkpoint` and by the commands of this
    package. Other models record no arguments.
    """
    recorded = getattr(model, "model_args", {})
    arguments = {name: value for name, value in recorded.items() if name in MODEL_KWARGS}
    if hasattr(model, "set_input_size"):
        arguments["img_size"] = input_size(model)[1:]
    if isinstance(model, VisionLonghorn):  # methods of the model change arguments, but not the recorded arguments
        arguments |= {"depth": len(model.blocks), "global_pool": model.global_pool}
        if model.patch_embed.stride == model.patch_embed.patch_size:
            arguments.pop("stride", None)
    patch_size = getattr(model, "_model_args", {}).get("patch_size")  # a patch size set by set_input_size
    if patch_size:
        arguments["patch_size"] = patch_size
    return arguments


def _reload(content: bytes) -> Any:
    """Load a model from the content of a .safetensors file with `vil.from_checkpoint`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        path.write_bytes(content)
        try:
            return from_checkpoint(path)
        except (ConfigError, CheckpointError) as error:
            raise ExportError(
                f"the weights file cannot recreate the model ({error}): the model must record the arguments that "
                "created it, as models from vil.from_checkpoint do"
            ) from error
