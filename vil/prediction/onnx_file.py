"""Classifier that runs an untrusted ONNX file written by `vil.export` in onnxruntime."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ConfigError
from ..errors import reject_url
from ..security.checkpoint_options import check_preprocessing, options_of_checkpoint
from ..text import label_of, printable
from .classifier import Classifier, reason_of


@dataclass
class Metadata:
    """Metadata that `vil.export` stores in an ONNX file."""

    data_config: dict[str, Any]
    label_names: list[str]  # class names by class index; empty if unknown


def classifier_of_onnx(path: Path) -> Classifier:
    """Return a Classifier that runs an ONNX file in onnxruntime.

    Raises:
        ConfigError: onnxruntime is not installed, or the file is missing or is not a classifier written by
            `vil.export`.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(f"{path} needs the package onnxruntime: pip install onnxruntime ({error})") from error
    if not path.is_file():
        reject_url(path)
        raise ConfigError(f"{path} does not exist or is not a regular file")

    try:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        metadata = _read_metadata(session.get_modelmeta().custom_metadata_map, path)
    except Exception as error:  # onnxruntime's errors have no common base class
        raise ConfigError(f"{path} must be an ONNX file written by vil.export: {reason_of(error)}") from error

    outputs = [output.name for output in session.get_outputs()]
    if "logits" not in outputs:
        raise ConfigError(
            f"{path} must have the output 'logits', got {printable(', '.join(outputs))}: export the model with its head"
        )

    def run(images: Tensor) -> Tensor:
        try:
            (logits,) = session.run(["logits"], {"images": images.numpy()})
        except Exception as error:  # onnxruntime's errors have no common base class
            raise ConfigError(
                f"running {path} on images of shape {tuple(images.shape)} failed: {reason_of(error)}"
            ) from error
        return torch.from_numpy(logits)

    return Classifier(run, torch.device("cpu"), metadata.data_config, metadata.label_names)


def _read_metadata(stored: dict[str, str], path: Path) -> Metadata:
    """Parse and validate the metadata of an untrusted ONNX file.

    Raises:
        ConfigError, CheckpointError, KeyError, TypeError, ValueError, RecursionError: A value is missing or invalid.
    """
    config: dict[str, Any] = {name: stored[name] for name in ("crop_mode", "interpolation")}
    for name in ("input_size", "mean", "std", "crop_pct"):
        config[name] = json.loads(stored[name])
    check_preprocessing(config, path)

    channels, *size = config["input_size"]
    for side in size:
        options_of_checkpoint(dict(img_size=side), path)
    if channels != 3 or len(size) != 2:
        raise ConfigError(f"input_size must be [3, height, width], got {config['input_size']}")

    label_names = json.loads(stored.get("label_names", "[]"))
    if not isinstance(label_names, list) or any(name != label_of(name) for name in label_names):
        raise ConfigError("label_names must be a list of printable strings of at most 1,000 characters")
    return Metadata(config, label_names)
