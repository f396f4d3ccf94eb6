"""Export of a model as ONNX, as a torch.export program, or as weights to share."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_model_data_config
from torch import nn

from ..data_config import input_size
from ..fault_tolerance.files import write_atomically
from ..text import label_of
from ..wrappers import unwrapped
from .hub import card_of, config_of
from .onnx_format import OPSET, onnx_packages, to_onnx
from .program_format import to_pt2
from .serialized import Run, Serialized
from .traced import Exported, ExportError, as_evaluated, outputs_of, pictures
from .weights_format import arguments_of, to_safetensors

_logger = logging.getLogger(__name__)

__all__ = ["ExportError", "Report", "export_model"]

# extensions of exported weights: a .safetensors file, or a folder (no extension) that contains model.safetensors
WEIGHTS = (".safetensors", "")
TOLERANCE = 1e-4  # maximum difference between outputs of model and file, relative to max(1, the largest output)
TOLERANCE_OF_HALVES = 2e-2  # tolerance for weights in half precision
PREPROCESSING = ("mean", "std", "crop_pct", "crop_mode", "interpolation")


@dataclass
class Report:
    """Report on an exported file and the agreement of its outputs with the outputs of the model.

    Attributes:
        path: Path of the file or folder.
        size: Size of the file in bytes; for a folder, the size of its model.safetensors.
        difference: Largest absolute difference between the outputs of the file and the outputs of the model.
        images: Number of images on which outputs were compared.
        same_top1: Number of images for which the file and the model predict the same top-1 class.
    """

    path: Path
    size: int
    difference: float
    images: int
    same_top1: int

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.size / 1e6:.1f} MB; the largest difference from PyTorch is {self.difference:.1e}, "
            f"top-1 is the same on {self.same_top1} of {self.images} images"
        )


def export_model(
    model: nn.Module,
    path: str | Path,
    *,
    features: Sequence[int] = (),
    opset: int = OPSET,
    metadata: dict[str, str] | None = None,
    **preprocessing: Any,
) -> Report:
    """Export a timm model to a file, after comparing the outputs of the file with the outputs of the model.

    Args:
        model: A timm model, which may be wrapped by PyTorch or timm. A copy in fp32 and eval mode is exported, and the
            model is not changed.
        path: Path of an .onnx, .pt2 or .safetensors file, which is written atomically. A .safetensors file stores
            weights in half precision. If the path has no extension, model.safetensors, config.json and README.md are
            written to a folder; an existing README.md is kept.
        features: Indices of the blocks whose feature maps are additional outputs, in ascending order of the indices.
        opset: ONNX opset version.
        metadata: Additional metadata entries for the file.
        **preprocessing: Values of mean, std, crop_pct, crop_mode or interpolation to store instead of the values in
            timm's data config of the model.

    Raises:
        ExportError: A package is missing, the path, the model or an argument is not supported, or the outputs of the
            file differ from the outputs of the model.
    """
    path = Path(path)
    model = unwrapped(model)
    check_options(path, opset, features)
    exported = Exported(model, features, for_onnxruntime=path.suffix == ".onnx")
    described = describe(model, preprocessing)
    taken = {*described, "label_names"} & (metadata or {}).keys()
    if taken:
        raise ExportError(f"metadata must not set {', '.join(sorted(taken))}: these entries describe the model itself")
    described |= metadata or {}

    file: Serialized
    tolerance = TOLERANCE
    if path.suffix in WEIGHTS:
        file = to_safetensors(model, described)
        tolerance = TOLERANCE_OF_HALVES
    else:
        _logger.info("%s, step 1 of 2: tracing and exporting the model", path)
        file = to_onnx(exported, described, opset) if path.suffix == ".onnx" else to_pt2(exported, described)
        _logger.info("%s, step 2 of 2: comparing the exported outputs with the outputs of the model", path)
    difference, images, same_top1 = compare(model, exported, file.run, tolerance)

    if path.suffix:
        write_atomically(path, file.content)
    else:
        _write_folder(path, file.content, model, described, metadata or {})
    _logger.info("to use the file in Python: %s", usage(path, exported.outputs))
    return Report(path, len(file.content), difference, images, same_top1)


def _write_folder(
    folder: Path, weights: bytes, model: nn.Module, described: dict[str, Any], metadata: dict[str, str]
) -> None:
    """Write model.safetensors, config.json and README.md to a folder. An existing README.md is kept."""
    config = config_of(model, described, arguments_of(model))
    folder.mkdir(exist_ok=True)
    write_atomically(folder / "config.json", config)
    card = folder / "README.md"
    if card.exists():
        _logger.info("%s exists and was not overwritten; edit or delete the file to change the model card", card)
    else:
        write_atomically(card, card_of(folder.resolve().name, described, metadata))
    write_atomically(folder / "model.safetensors", weights)


def usage(path: Path, outputs: Sequence[str]) -> str:
    """Return a line of Python code that runs the exported file, or that creates a model from exported weights."""
    file = repr(str(path))
    assigned = "(" + ", ".join(outputs) + "," * (len(outputs) == 1) + ")"
    if path.suffix in WEIGHTS:
        return f"model = vil.from_checkpoint({file})"
    if path.suffix == ".pt2":
        return f"{assigned} = torch.export.load({file}).module()(images)"
    return f"{assigned} = onnxruntime.InferenceSession({file}).run(None, {{'images': images}})"


def check_options(path: Path, opset: int, features: Sequence[int] = ()) -> None:
    if path.suffix not in (".onnx", ".pt2", *WEIGHTS):
        raise ExportError(
            f"extension of {path} must be .onnx for ONNX, .pt2 for a torch.export program, or .safetensors for "
            "weights; use a path without an extension for a folder"
        )
    if path.is_dir() if path.suffix else path.is_file():
        found, expected = ("folder", "file") if path.suffix else ("file", "folder")
        raise ExportError(
            f"{path} must be a {expected}, but a {found} with this name exists: move or remove the {found}"
        )
    if path.suffix != ".onnx" and opset != OPSET:
        raise ExportError(f"opset applies only to .onnx files, not to {path}: remove the option opset")
    if path.suffix in WEIGHTS and features:
        raise ExportError(f"{path} stores only weights; features need an .onnx or .pt2 file")
    if not path.parent.is_dir():
        raise ExportError(f"folder {path.parent} does not exist: create it first")
    if not path.suffix and path.is_dir() and not _accepts_export(path):
        raise ExportError(f"folder {path} contains files that are not from an earlier export: choose a new folder")
    if path.suffix == ".onnx":
        onnx_packages()


def _accepts_export(folder: Path) -> bool:
    """Return whether a folder has only hidden files and a README.md, or the files of an earlier export."""
    names = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    if names <= {"README.md"}:
        return True
    if not names >= {"config.json", "model.safetensors"}:
        return False
    try:
        return "architecture" in json.loads((folder / "config.json").read_bytes())
    except (ValueError, TypeError, RecursionError):  # the file is not JSON, or not a mapping
        return False


def describe(model: Any, preprocessing: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an exported model: name, number and names of classes, input size and preprocessing."""
    if unknown := preprocessing.keys() - set(PREPROCESSING):
        raise ExportError(
            f"preprocessing options must be among {', '.join(PREPROCESSING)}, got {', '.join(sorted(unknown))}"
        )
    config = resolve_model_data_config(model) | {name: v for name, v in preprocessing.items() if v is not None}
    size = list(input_size(model))
    for name in ("mean", "std"):
        if len(config[name]) not in (1, size[0]):
            remedy = f"pass {name}= to export_model"
            raise ExportError(f"{name} must have {size[0]} values, one per channel, got {config[name]}: {remedy}")
    # `pretrained_cfg` is missing if the model was not created by timm.create_model
    pretrained_cfg: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    names: Any = pretrained_cfg.get("label_names")  # `label_names` is outdated if the head was replaced
    known = isinstance(names, (list, tuple)) and 0 < len(names) == model.num_classes
    return {
        "model": pretrained_cfg.get("architecture", type(model).__name__),
        "num_classes": model.num_classes,
        "input_size": size,
        **{name: config[name] for name in PREPROCESSING},
        **({"label_names": [label_of(str(name)) for name in names]} if known else {}),
    }


@torch.no_grad()
def compare(model: nn.Module, exported: Exported, run: Run, tolerance: float = TOLERANCE) -> tuple[float, int, int]:
    """Compare the exported outputs with the outputs of the model on a few images.

    Returns:
        The largest absolute difference, the number of images, and the number of images with the same top-1 class.

    Raises:
        ExportError: An output differs by more than `tolerance` times max(1, the largest output).
    """
    images = pictures(4, exported.input_size)
    expected = outputs_of(as_evaluated(model), exported.features, images)
    # Run two batches of different sizes, because the exported batch size must be dynamic.
    found = [torch.cat(parts) for parts in zip(run(images[:-1]), run(images[-1:]))]
    largest = 0.0
    for name, truth, value in zip(exported.outputs, expected, found, strict=True):
        difference = (truth - value).abs().max().item()
        if not difference <= tolerance * max(1, truth.abs().max().item()):  # "not <=" also catches NaN
            raise ExportError(
                f"the output {name} of the exported model differs from that of the PyTorch model by up to "
                f"{difference:.1e}: no file was written"
            )
        largest = max(largest, difference)
    has_same_top1 = expected[0].argmax(-1) == found[0].argmax(-1)
    return largest, len(images), int(has_same_top1.reshape(len(images), -1).all(1).sum())
