"""Self-contained HTML report on one or two models: accuracy per class, confusions, calibration and mistakes."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from ..data.host.reader import ImageReader
from ..data.sources.splits import streams
from ..text import label_of
from .calibration import calibration_bins, expected_calibration_error
from .comparison import ContingencyTable
from .predictions import Predictions
from .tables import confusion_counts

MAX_MATRIX_CLASSES = 30  # maximum number of classes in a confusion matrix
MAX_CONFUSIONS = 40  # maximum number of listed confusions
MAX_MISTAKES = 32  # maximum number of images shown for each model
THUMBNAIL_SIZE = 160  # maximum side of a thumbnail in pixels
GREEN, RED = "46 160 67", "207 34 46"

NameOf = Callable[[int], str]


def report_page(
    title: str,
    models: Sequence[dict[str, Any]],
    predictions: Predictions,
    names: dict[int, str],
    notes: Sequence[str],
    images: Any,
) -> str:
    """Render the report as an HTML page.

    Args:
        title: Title of the page.
        models: JSON result of `vil validate` for each model.
        predictions: Predictions of all models.
        names: Class names by class index.
        notes: Additional remarks on the evaluation.
        images: timm dataset. Thumbnails are shown unless this is an iterable dataset.
    """

    def name_of(index: int) -> str:
        return label_of(names.get(index, str(index)))

    several = len(models) > 1
    present = sorted({*predictions.targets_N.tolist(), *predictions.predicted_NM.flatten().tolist()})
    sections = [
        model
        | _calibration(predictions, m)
        | _confusions(confusion_counts(predictions)[m], present, name_of)
        | {"mistakes": _mistakes(predictions, m, name_of, images)}
        for m, model in enumerate(models)
    ]
    environment = jinja2.Environment(autoescape=True)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    page = template.render(
        title=title,
        models=sections,
        several=several,
        notes=notes,
        paired=ContingencyTable.of(*predictions.top1_NM.T) if several else None,
        classes=_classes(predictions, name_of),
        names=[name_of(index) for index in present],
        most_classes=MAX_MATRIX_CLASSES,
    )
    return page.encode(errors="replace").decode()  # file and folder names may be invalid UTF-8


def _calibration(predictions: Predictions, m: int) -> dict[str, Any]:
    bins = calibration_bins(predictions.probabilities_NMK[:, m, 0], predictions.top1_NM[:, m])
    return {"bins": bins, "calibration_error": expected_calibration_error(bins)}


def _confusions(counts: Counter[tuple[int, int]], present: Sequence[int], name_of: NameOf) -> dict[str, Any]:
    """Return the most frequent confusions and, if there are few classes, the confusion matrix.

    Args:
        counts: Number of images per pair (true class, predicted class).
        present: Classes that occur in any pair.
        name_of: Function from class index to class name.
    """
    pairs = [(pair, images) for pair, images in counts.most_common() if pair[0] != pair[1]]
    confusions = [
        {"name": name_of(target), "predicted_name": name_of(predicted), "count": images}
        for (target, predicted), images in pairs[:MAX_CONFUSIONS]
    ]
    if len(present) > MAX_MATRIX_CLASSES:
        return {"confusions": confusions}
    matrix = [[_cell(counts, target, predicted) for predicted in present] for target in present]
    return {"confusions": confusions, "matrix": matrix}


def _cell(counts: Counter[tuple[int, int]], target: int, predicted: int) -> dict[str, Any]:
    """Return the count, share of the true class's images, and colour of a confusion-matrix cell."""
    images_of_class = sum(images for (other, _), images in counts.items() if other == target)
    count = counts[target, predicted]
    return {
        "count": count,
        "share": count / max(1, images_of_class),
        "colour": GREEN if target == predicted else RED,
    }


def _classes(predictions: Predictions, name_of: NameOf) -> list[dict[str, Any]]:
    """Return one row per class that has images, sorted by the first model's recall, lowest first."""
    rows = []
    for target in np.unique(predictions.targets_N):
        is_target_N = predictions.targets_N == target
        columns = [_class_scores(predictions, m, target, name_of) for m in range(predictions.models)]
        rows.append({"name": name_of(target), "images": is_target_N.sum(), "models": columns})
    return sorted(rows, key=lambda row: row["models"][0]["recall"])


def _class_scores(predictions: Predictions, m: int, target: int, name_of: NameOf) -> dict[str, Any]:
    """Return a model's recall, precision and most frequent confusion for a class."""
    predicted_N = predictions.predicted_NM[:, m]
    correct_N = predictions.top1_NM[:, m]
    is_target_N = predictions.targets_N == target
    is_predicted_N = predicted_N == target
    confusions = Counter(predicted_N[is_target_N & ~correct_N]).most_common(1)
    return {
        "recall": 100 * correct_N[is_target_N].mean(),
        "precision": 100 * correct_N[is_predicted_N].mean() if is_predicted_N.any() else None,
        "mistake": "".join(f"{name_of(predicted)} ({images})" for predicted, images in confusions),
    }


def _mistakes(predictions: Predictions, m: int, name_of: NameOf, images: Any) -> list[dict[str, Any]]:
    """Return a model's wrong predictions with thumbnails, most confident first."""
    probabilities_NK = predictions.probabilities_NMK[:, m]
    mistakes = np.flatnonzero(~predictions.top1_NM[:, m]).tolist()
    mistakes.sort(key=lambda n: -probabilities_NK[n, 0])
    shown = []
    for n in mistakes[:MAX_MISTAKES]:
        best = zip(predictions.classes_NMK[n, m, :3], probabilities_NK[n])
        shown.append(
            {
                "is": name_of(predictions.targets_N[n]),
                "said": [(name_of(predicted), 100 * probability) for predicted, probability in best],
                **_picture(images, predictions.indices_N[n]),
            }
        )
    return shown


def _picture(images: Any, index: int) -> dict[str, str]:
    """Return a base64 JPEG thumbnail and the file name of an image; {} for iterable datasets, which have no index."""
    if streams(images):
        return {}
    image, _ = ImageReader(images, None, is_training=False).read(index)
    image.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE))
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG")
    return {"picture": base64.b64encode(jpeg.getvalue()).decode(), "file": label_of(images.filename(index))}
