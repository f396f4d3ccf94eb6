"""Implementation of `vil predict`: print the predictions for image files, and write tables of predictions."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..checkpoint import Checkpoint
from ..config import ConfigError, model_arguments
from ..config.values import flag_of
from ..data.sources.class_folders import endings
from ..data.sources.image_files import list_images
from ..devices import known_device
from ..errors import reject_url
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.output import print_result
from ..security.csv_tables import csv_text
from ..text import label_of
from .classifier import Classifier, Prediction, predictions, reason_of
from .loading import classifier_of, pretrained_classifier

_logger = logging.getLogger(__name__)

MODEL_SUFFIXES = (".pt", ".pth", ".safetensors", ".onnx")


def predict_files(options: argparse.Namespace) -> tuple[int, int]:
    """Print predictions, write the requested files, and return the numbers of unreadable images and of all images."""
    files = image_files(options.images)
    device = known_device(options.device)
    classifier = _classifier(options, device)
    is_json_printed = options.json == Path("-")
    found = print_predictions(classifier, files, options.topk, options.batch_size, is_quiet=is_json_printed)
    names = _names_to_write(classifier)
    if options.csv:
        rows = [_row(file, classes, names) for file, classes in found]
        write_atomically(options.csv, csv_text(rows, list(rows[0]) if rows else ["file"]))
    if options.json:
        entries = [_entry(file, classes, names) for file, classes in found]
        text = json.dumps(entries, indent=2)
        if is_json_printed:
            print_result(text)
        else:
            write_atomically(options.json, text + "\n")
    return len(files) - len(found), len(files)


def _classifier(options: argparse.Namespace, device: str | None) -> Classifier:
    """Load the classifier, and log whether a checkpoint's EMA weights or raw weights are used."""
    path, arguments = options.checkpoint, model_arguments(options)
    if options.use_ema is not None and (not path or path.endswith(".onnx")):
        raise ConfigError("--use-ema needs --checkpoint with a checkpoint of vil train")
    if not path:
        return pretrained_classifier(options.model, device, **arguments)
    if path.endswith(".onnx"):
        given = [flag_of(name) for name in ("model", "model_kwargs", "img_size") if getattr(options, name)]
        if given:
            raise ConfigError(f"{path} already contains a model: remove {', '.join(given)}")
        return classifier_of(path)
    source = Checkpoint(path)
    if note := source.note_on_weights(options.use_ema):
        _logger.warning("%s: using the %s", path, note)
    return classifier_of(source, device, options.use_ema, options.model, **arguments)


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Return the image files in `paths`, where each folder is replaced by the images in the folder."""
    files: list[Path] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        if not path.exists():
            reject_url(path)
        if path.suffix == ".pt2":
            raise ConfigError(
                f"{path} is a torch.export program, which vil predict does not run: set --checkpoint to the model's "
                "checkpoint, or to an .onnx file"
            )
        if path.suffix in MODEL_SUFFIXES:
            raise ConfigError(f"{path} is a model, not an image: set --checkpoint {path}")
        inside = [Path(name) for name in list_images(str(path), str(path), left_out)] if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"there are no images in {path}{endings(left_out)}")
        files += inside
    if left_out:
        _logger.warning("%d images%s", len(files), endings(left_out))
    return files


def print_predictions(
    classifier: Classifier, files: Sequence[Path], topk: int, batch_size: int, is_quiet: bool = False
) -> list[tuple[Path, list[Prediction]]]:
    """Print one line of predictions per image unless `is_quiet`, and return the predictions of all readable images."""
    read = []
    with tqdm(total=len(files), unit="img", disable=None if len(files) > batch_size else True) as bar:
        for file, found in predictions(classifier, files, topk, batch_size):
            bar.update()
            if isinstance(found, Exception):
                tqdm.write(f"{str(file)!r} cannot be read as an image: {reason_of(found)}", file=sys.stderr)
                continue
            read.append((file, found))
            if is_quiet:
                continue
            classes = "; ".join(f"{p.label} {p.probability:.1%}" for p in found)
            with bar.external_write_mode():
                print_result(f"{label_of(str(file))}: {classes}")
    return read


def _names_to_write(classifier: Classifier) -> Sequence[str]:
    """Return the class names by class index if any name differs from the class's label, otherwise an empty sequence."""
    return classifier.label_names if [*classifier.label_names] != [*classifier.labels] else ()


def _row(file: Path, found: list[Prediction], names: Sequence[str]) -> dict[str, Any]:
    """Return the row of an image in the CSV table."""
    row: dict[str, Any] = {"file": str(file)}
    for rank, prediction in enumerate(found, start=1):
        suffix = f"_{rank}" if rank > 1 else ""
        row |= {f"{name}{suffix}": value for name, value in _described(prediction, names).items()}
    return row


def _entry(file: Path, found: list[Prediction], names: Sequence[str]) -> dict[str, Any]:
    """Return the entry of an image in the JSON list."""
    return {"file": str(file), "predictions": [_described(p, names) | {"number": p.number} for p in found]}


def _described(prediction: Prediction, names: Sequence[str]) -> dict[str, Any]:
    """Return label, class name if `names` are given, and probability of a predicted class."""
    class_name = {"class_name": names[prediction.number]} if names else {}
    return {"class": prediction.label, **class_name, "probability": prediction.probability}
