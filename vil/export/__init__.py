"""Export a model to a file that runs without this package: ONNX, a torch.export program, or shareable weights.

    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.onnx
    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.pt2
    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.safetensors
    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out my_model/

The file's extension selects the format. A .safetensors file stores only weights, in half precision, and the model's
name and arguments, so that `vil.from_checkpoint` can load it. A path without an extension is a folder with such a file,
for timm's `local-dir:` and the Hugging Face Hub.
The input is `images` (B, 3, H, W), fp32, preprocessed as the file's metadata specify. The outputs are `logits` (B,
classes) and `features_N` (B, C, h, w) for each requested block N. The batch size B is dynamic; H and W are fixed to the
model's size.
Before the file is written, its outputs are compared with the model's. docs/export.md lists programs that read the
files.
"""

from __future__ import annotations

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

WEIGHTS = (".safetensors", "")  # extensions of weights: a file, or a folder that contains one
TOLERANCE = 1e-4  # relative to the output's largest magnitude; absolute if that is below 1
TOLERANCE_OF_HALVES = 2e-2  # TOLERANCE for weights in half precision
PREPROCESSING = ("mean", "std", "crop_pct", "crop_mode", "interpolation")


@dataclass
class Report:
    """Written file and the agreement of its outputs with the model's.

    Attributes:
        path: Path of the file.
        size: Size of the file in bytes.
        difference: Largest absolute difference between the file's outputs and the model's.
        images: Number of compared images, noise and smooth ones.
        same_top1: Number of images with the model's top-1 class.
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
    """Export a timm model to a file that runs without this package, after comparing the file's outputs with the
    model's.

    Args:
        model: A timm model, also in wrappers of PyTorch or timm. The export is in fp32 and eval mode; the model itself
            stays unchanged.
        path: Path *.onnx, *.pt2, or *.safetensors (weights in half precision); the file is written atomically. A path
            without an extension is a folder, which receives model.safetensors, config.json and, unless it exists,
            README.md.
        features: Indices of blocks whose feature maps are additional outputs, in ascending order.
        opset: ONNX opset version.
        metadata: Additional metadata entries, beside the model's name and preprocessing.
        **preprocessing: mean, std, crop_pct, crop_mode and interpolation for the metadata, if they differ from timm's
            data config of the model.

    Raises:
        ExportError: A package is missing, the format does not support the request, or the exported outputs differ from
            the model's.
    """
    path = Path(path)
    model = unwrapped(model)
    check_options(path, opset, features)
    exported = Exported(model, features)
    described = describe(model, preprocessing)
    taken = {*described, "label_names"} & (metadata or {}).keys()
    if taken:
        raise ExportError(f"metadata must not set {', '.join(sorted(taken))}: set it in the model's pretrained_cfg")
    described |= metadata or {}

    file: Serialized
    tolerance = TOLERANCE
    if path.suffix in WEIGHTS:
        file = to_safetensors(model, described)
        tolerance = TOLERANCE_OF_HALVES
    else:
        _logger.info("%s, step 1 of 2: tracing and exporting the model", path)
        file = to_onnx(exported, described, opset) if path.suffix == ".onnx" else to_pt2(exported, described)
        _logger.info("%s, step 2 of 2: comparing its outputs with the model's", path)
    difference, images, same_top1 = compare(model, exported, file.run, tolerance)

    if path.suffix:
        write_atomically(path, file.content)
    else:
        _write_folder(path, file.content, model, described, metadata or {})
    _logger.info("use it in Python: %s", usage(path, exported.outputs))
    return Report(path, len(file.content), difference, images, same_top1)


def _write_folder(
    folder: Path, weights: bytes, model: nn.Module, described: dict[str, Any], metadata: dict[str, str]
) -> None:
    """Write model.safetensors, config.json and, unless it exists, README.md."""
    config = config_of(model, described, arguments_of(model))
    folder.mkdir(exist_ok=True)
    write_atomically(folder / "config.json", config)
    card = folder / "README.md"
    if card.exists():
        _logger.info("%s exists and is not overwritten", card)
    else:
        write_atomically(card, card_of(folder.resolve().name, described, metadata))
    write_atomically(folder / "model.safetensors", weights)


def usage(path: Path, outputs: Sequence[str]) -> str:
    """Return a line of Python that runs the file, or that creates the model from its weights."""
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
        raise ExportError(f"{path} must be a {expected}, but a {found} with this name exists: move it away")
    if path.suffix != ".onnx" and opset != OPSET:
        raise ExportError(f"opset applies only to .onnx files, not to {path}: leave it out")
    if path.suffix in WEIGHTS and features:
        raise ExportError(f"{path} stores only weights; features need an .onnx or .pt2 file")
    if not path.parent.is_dir():
        raise ExportError(f"folder {path.parent} does not exist: create it first")
    if path.suffix == ".onnx":
        onnx_packages()


def describe(model: Any, preprocessing: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an exported model: its name, classes, input size and preprocessing."""
    if unknown := preprocessing.keys() - set(PREPROCESSING):
        raise ExportError(
            f"preprocessing options must be among {', '.join(PREPROCESSING)}, got {', '.join(sorted(unknown))}"
        )
    config = resolve_model_data_config(model) | {name: v for name, v in preprocessing.items() if v is not None}
    size = list(input_size(model))
    for name in ("mean", "std"):
        if len(config[name]) not in (1, size[0]):
            remedy = f"pass {name}= to export_model"
            raise ExportError(f"{name} must have {size[0]} values, one a channel, got {config[name]}: {remedy}")
    names = model.pretrained_cfg.get("label_names")  # may describe a head that was replaced
    known = isinstance(names, (list, tuple)) and 0 < len(names) == model.num_classes
    return {
        "model": model.pretrained_cfg.get("architecture", type(model).__name__),
        "num_classes": model.num_classes,
        "input_size": size,
        **{name: config[name] for name in PREPROCESSING},
        **({"label_names": [label_of(str(name)) for name in names]} if known else {}),
    }


@torch.no_grad()
def compare(
    model: nn.Module, exported: Exported, run: Run, tolerance: float = TOLERANCE, count: int = 4
) -> tuple[float, int, int]:
    """Compare the exported outputs with the model's on `count` images.

    Returns:
        The largest absolute difference, the number of images, and the number of images with equal top-1.

    Raises:
        ExportError: An output differs by more than `tolerance`.
    """
    images = pictures(count, exported.input_size)
    expected = outputs_of(as_evaluated(model), exported.features, images)
    found = [torch.cat(parts) for parts in zip(run(images[:-1]), run(images[-1:]))]  # with two batch sizes
    largest = 0.0
    for name, truth, value in zip(exported.outputs, expected, found, strict=True):
        difference = (truth - value).abs().max().item()
        if not difference <= tolerance * max(1, truth.abs().max().item()):  # "not <=" also catches NaN
            raise ExportError(
                f"{name} differs from the model's by {difference:.1e}, which is more than rounding errors"
            )
        largest = max(largest, difference)
    has_same_top1 = expected[0].argmax(-1) == found[0].argmax(-1)
    return largest, count, int(has_same_top1.reshape(count, -1).all(1).sum())
