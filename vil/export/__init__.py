"""A model in a file that runs without this package: ONNX, or PyTorch's own exported program. Or weights to hand on.

    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.onnx
    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.pt2
    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.safetensors
    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out my_model/

The ending says the format; a .safetensors file has weights alone, in half precision, and says of which model they are:
`vil.from_checkpoint` needs nothing else. A name without an ending is a folder with such a file, for timm's `local-dir:`
and the hub. The input is `images` (B, 3, H, W), fp32, prepared as the file's metadata say;
the outputs are `logits` (B, classes) and, for each block N asked for, `features_N` (B, C, h, w). B is free, H and W are
the model's. The file's outputs are compared with the model's before it is written. docs/export.md says what reads it.
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

from ..factory import input_size
from ..files import write_atomically
from ..text import label_of
from .formats import OPSET, Run, arguments_of, onnx_packages, to_onnx, to_pt2, to_safetensors
from .hub import card_of, config_of
from .traced import Exported, ExportError, as_evaluated, outputs_of, pictures

_logger = logging.getLogger(__name__)

__all__ = ["ExportError", "Report", "export_model"]

WEIGHTS = (".safetensors", "")  # a file, or a folder with one
TOLERANCE = 1e-4  # of an output's largest magnitude, or absolute where that is below 1
TOLERANCE_OF_HALVES = 2e-2  # the same for weights in half precision
PREPROCESSING = ("mean", "std", "crop_pct", "crop_mode", "interpolation")


@dataclass
class Report:
    """The file that was written, and how far its outputs are from the model's.

    Attributes:
        path: The file.
        size: Its bytes.
        difference: The largest between an output and the model's own, on noise and on smooth pictures.
        images: How many pictures these were.
        same_top1: For how many of them the largest logit is the model's.
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
    """Writes a model to a file that runs without this package, once what is in it has been compared with the model.

    Args:
        model: A model of timm, which is left as it is; exported in fp32, as in evaluation.
        path: The file, *.onnx or *.pt2, or *.safetensors for weights in half precision; written whole or not at all.
            Without an ending it is a folder, which gets model.safetensors, config.json and, if it has none, README.md.
        features: Numbers of blocks whose maps are outputs too.
        opset: Version of ONNX's operators.
        metadata: Further entries of the file, beside the model and its preprocessing.
        **preprocessing: mean, std, crop_pct, crop_mode and interpolation for the metadata, where they are not timm's
            for this model.

    Raises:
        ExportError: A package is missing, the format cannot have what was asked for, or what is in the file
            computes something else.
    """
    path = Path(path)
    check_options(path, opset, features)
    exported = Exported(model, features)
    described = describe(model, preprocessing)
    if taken := {*described, "label_names"} & (metadata or {}).keys():
        raise ExportError(f"{', '.join(sorted(taken))} in the metadata is for the model itself to say (pretrained_cfg)")
    described |= metadata or {}
    tolerance = TOLERANCE
    others: dict[str, str] = {}
    if path.suffix in WEIGHTS:
        content, run = to_safetensors(model, described)
        tolerance = TOLERANCE_OF_HALVES
        if not path.suffix:
            others["config.json"] = config_of(model, described, arguments_of(model))
            if (card := path / "README.md").exists():
                _logger.info("%s is left as it is", card)
            else:
                others["README.md"] = card_of(path.resolve().name, described, metadata or {})
    else:
        _logger.info("%s, 1 of 2: tracing and translating the model", path)
        content, run = to_onnx(exported, described, opset) if path.suffix == ".onnx" else to_pt2(exported, described)
        _logger.info("%s, 2 of 2: comparing it with the model", path)
    found = compare(model, exported, run, tolerance)
    if others:
        path.mkdir(exist_ok=True)
    for name, text in others.items():
        write_atomically(path / name, text)
    write_atomically(path / "model.safetensors" if others else path, content)
    _logger.info("in Python: %s", usage(path, exported.outputs))
    return Report(path, len(content), *found)


def usage(path: Path, outputs: Sequence[str]) -> str:
    """A line that runs a file with these outputs, or makes the model whose weights it has."""
    name, found = repr(str(path)), ", ".join(outputs) + "," * (len(outputs) == 1)
    if path.suffix in WEIGHTS:
        return f"model = vil.from_checkpoint({name})"
    if path.suffix == ".pt2":
        return f"({found}) = torch.export.load({name}).module()(images)"
    return f"({found}) = onnxruntime.InferenceSession({name}).run(None, {{'images': images}})"


def check_options(path: Path, opset: int, features: Sequence[int] = ()) -> None:
    if path.suffix not in (".onnx", ".pt2", *WEIGHTS):
        raise ExportError(
            f"{path} must end with .onnx for ONNX, .pt2 for PyTorch's exported program, or .safetensors for weights; "
            "a folder has no ending"
        )
    if path.is_dir() if path.suffix else path.is_file():
        raise ExportError(f"{path} is a {'folder' if path.suffix else 'file'}, and would become the other")
    if path.suffix != ".onnx" and opset != OPSET:
        raise ExportError(f"opset is of ONNX files, and {path} is none")
    if path.suffix in WEIGHTS and features:
        raise ExportError(f"{path} has weights, not outputs: features are of .onnx and .pt2 files")
    if not path.parent.is_dir():
        raise ExportError(f"there is no folder {path.parent}")
    if path.suffix == ".onnx":
        onnx_packages()


def describe(model: Any, preprocessing: dict[str, Any]) -> dict[str, Any]:
    """The metadata of an exported model: what it is, and what is done to a picture before it."""
    if unknown := preprocessing.keys() - set(PREPROCESSING):
        raise ExportError(f"{', '.join(sorted(unknown))} is none of {', '.join(PREPROCESSING)}")
    config = resolve_model_data_config(model) | {name: v for name, v in preprocessing.items() if v is not None}
    size = list(input_size(model))
    for name in ("mean", "std"):
        if len(config[name]) not in (1, size[0]):
            remedy = "give export_model the mean and std of these"
            raise ExportError(f"{name} {config[name]} is not of images of {size[0]} channels: {remedy}")
    names = model.pretrained_cfg.get("label_names")  # of a head that has been replaced, perhaps
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
    """The largest difference of an output, the number of images, and of those with the same largest logit.

    Raises:
        ExportError: An output differs by more than `tolerance`.
    """
    images = pictures(count, exported.input_size)
    expected = outputs_of(as_evaluated(model), exported.features, images)
    found = [torch.cat(parts) for parts in zip(run(images[:-1]), run(images[-1:]))]  # of two numbers of images
    largest = 0.0
    for name, truth, value in zip(exported.outputs, expected, found, strict=True):
        difference = (truth - value).abs().max().item()
        if not difference <= tolerance * max(1, truth.abs().max().item()):  # also if it is not a number
            raise ExportError(f"{name} differs from the model's by {difference:.1e}, more than rounding can")
        largest = max(largest, difference)
    return largest, count, int((expected[0].argmax(-1) == found[0].argmax(-1)).reshape(count, -1).all(1).sum())
