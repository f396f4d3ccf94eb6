"""Validation of one or two models on a split, in one pass over the images."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ..classes import check_order, imagenet_ids
from ..config import ConfigError
from ..data.host.workers import share_cores
from ..data.loaders import evaluation_loader
from ..data.sources.images import UnreadableSplitError
from ..data.sources.split_paths import called
from ..data.sources.splits import apply_exif_orientation, class_names, count_images, describe_split
from ..devices import autocast
from .comparison import Comparison
from .evaluator import Evaluation, Evaluator
from .models import EvaluatedModel, adapt, check_comparable
from .predictions import PredictionCollector, Predictions
from .real_labels import real_labels
from .results import Validation
from .settings import DataSettings, EvaluationSettings
from .speed import measure_speed
from .split import EvaluationSplit, open_evaluation_split

_logger = logging.getLogger(__name__)


def validate(
    models: Sequence[EvaluatedModel],
    data: DataSettings,
    settings: EvaluationSettings,
    device: torch.device,
    rank: int,
    world_size: int,
) -> Validation:
    """Evaluate one or two models on the same split, with the first model's preprocessing.

    Raises:
        ConfigError: The split or the ReaL labels cannot be read, the models or the split differ in classes or image
            size, or the world size exceeds the number of images.
        UnreadableSplitError: No image can be read, or no image has a class label.
    """
    share_cores(device, settings.workers)
    first = models[0]
    for other in models[1:]:
        check_comparable(first, other)

    split = _open(first, data, rank, world_size)
    images = split.images
    class_order = first.label_names or _names_by_index(images)
    classifiers = [adapt(model, first, data.split, class_order, split.classes) for model in models]
    labels = None if settings.real_labels is None else _real_labels(images, first, settings.real_labels)

    loader = evaluation_loader(
        images, first.data_config, device, settings.workers, settings.batch_size, rank, world_size
    )
    precision = autocast(device, settings.amp, "bfloat16")
    evaluator = Evaluator(classifiers, first.data_config["input_size"], device, precision, settings.batch_size)
    collector = PredictionCollector(len(models), first.num_classes, device)
    results = evaluator(_with_progress(loader, rank), collector)
    _check_images(results[0], data)

    predictions = None
    if settings.keep_predictions or labels is not None or len(models) > 1:
        predictions = Predictions.of(*collector.gather(), labels)
        results = [predictions.recount(result, m) for m, result in enumerate(results)]
    comparison = Comparison.of(predictions) if predictions and len(models) > 1 else None
    speeds = []
    if comparison and rank == 0:
        batch = next(iter(loader))[0]
        speeds = [measure_speed(model.module, batch, precision) for model in models]

    return Validation(
        data=data,
        models=models,
        results=results,
        notes=_notes(models, data, split, settings, results[0]),
        class_names=_names_in_results(images, class_order),
        images=images,
        predictions=predictions,
        comparison=comparison,
        speeds=speeds,
    )


def _open(first: EvaluatedModel, data: DataSettings, rank: int, world_size: int) -> EvaluationSplit:
    """Open the split with the first model's class indices."""
    split = open_evaluation_split(
        data.data_dir,
        data.dataset,
        data.split,
        first.num_classes,
        first.label_names,
        first.settings.owner,
        data.val_fraction,
    )
    apply_exif_orientation(split.images, data.apply_exif_orientation)
    count = count_images(split.images)
    if world_size > count:
        raise ConfigError(f"world size must be at most the number of images, {count}, got {world_size}")
    if rank == 0:
        _logger.warning("%s", describe_split(data.images, split.images))
    return split


def _names_by_index(images: Any) -> list[str]:
    """Return the class names of a split by index; empty if the dataset does not store class names."""
    indices = class_names(images)
    return sorted(indices, key=lambda name: indices[name])


def _names_in_results(images: Any, class_order: Sequence[str]) -> dict[int, str]:
    """Return the split's class names by index, or `class_order` if the dataset does not store class names."""
    names = {index: name for name, index in class_names(images).items()}
    return names or dict(enumerate(class_order))


def _real_labels(images: Any, first: EvaluatedModel, file: str) -> np.ndarray:
    """Return the ReaL labels with classes in the order of the first model."""
    labels = real_labels(images, first.num_classes, file or None)
    remedy = "remove --real-labels"
    order = check_order(imagenet_ids(), first.label_names, "the ReaL labels", first.settings.owner, remedy)
    return labels if order is None else labels[:, order]


def _with_progress(loader: Any, rank: int) -> Iterable[Any]:
    """Iterate over a loader. On rank 0, show a progress bar if stderr is a terminal."""
    return tqdm(loader, total=len(loader), unit="batch", disable=None if rank == 0 else True)


def _check_images(result: Evaluation, data: DataSettings) -> None:
    if not result.images:
        missing = "can be read" if result.unreadable else "has a class label"
        raise UnreadableSplitError(f"no image of {called(data.split, data.data_dir)} {missing}")


def _notes(
    models: Sequence[EvaluatedModel],
    data: DataSettings,
    split: EvaluationSplit,
    settings: EvaluationSettings,
    result: Evaluation,
) -> list[str]:
    """Return remarks on the evaluation, for the user."""
    notes = []
    if data.val_fraction:
        notes.append(f"the images are the {data.val_fraction:.0%} of each class that training held out")
    if len(models) == 1 and (weights := models[0].settings.note_on_weights):
        notes.append(weights)
    if split.classes:
        notes.append(f"predictions restricted to the {len(split.classes)} classes of this split")
    if settings.real_labels is not None:
        notes.append("evaluated with ReaL labels, excluding images without a ReaL label")
    if result.unreadable:
        notes.append(result.unreadable_note)
    return notes
