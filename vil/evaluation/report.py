"""Self-contained HTML report on one or two models: accuracy per class, confusions, calibration and example images."""

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
MAX_MISTAKES = 32  # maximum number of misclassified images shown for each model
MAX_CORRECT = 16  # maximum number of correctly classified images shown for each model
MAX_DIFFERING = 16  # maximum number of images shown for each group of `_differing`
THUMBNAIL_SIZE = 160  # maximum side of a thumbnail in pixels

NameOf = Callable[[int], str]


def report_page(
    title: str,
    models: Sequence[dict[str, Any]],
    predictions: Predictions,
    names: dict[int, str],
    notes: Sequence[str],
    images: Any,
    curve: bytes | None = None,
) -> str:
    """Render the report as an HTML page.

    Args:
        title: Title of the page.
        models: JSON result of `vil validate` for each model.
        predictions: Predictions of all models.
        names: Class names by class index.
        notes: Additional remarks on the evaluation.
        images: timm dataset. Thumbnails are shown unless the dataset is iterable.
        curve: PNG of the training curve, if the report is on a training run.
    """

    def name_of(index: int) -> str:
        return label_of(names.get(index, str(index)))

    several = len(models) > 1
    present = sorted({*predictions.targets_N.tolist(), *predictions.predicted_NM.flatten().tolist()})
    sections = [
        model
        | _calibration(predictions, m)
        | _confusions(confusion_counts(predictions)[m], present, name_of)
        | _examples(predictions, m, name_of, images)
        for m, model in enumerate(models)
    ]
    environment = jinja2.Environment(autoescape=True)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    page = template.render(
        title=title,
        models=sections,
        curve=base64.b64encode(curve).decode() if curve else None,
        several=several,
        differing=_differing(predictions, name_of, images) if several else [],
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
    """Return the most frequent confusions and, for at most `MAX_MATRIX_CLASSES` classes, the confusion matrix.

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
    matrix = [_matrix_row(counts, target, present) for target in present]
    return {"confusions": confusions, "matrix": matrix}


def _matrix_row(counts: Counter[tuple[int, int]], target: int, present: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row of the confusion matrix: count, share of the true class's images and CSS class of each cell."""
    row = [counts[target, predicted] for predicted in present]
    images_of_class = max(1, sum(row))
    return [
        {"count": count, "share": count / images_of_class, "mark": "right" if predicted == target else "wrong"}
        for predicted, count in zip(present, row)
    ]


def _classes(predictions: Predictions, name_of: NameOf) -> list[dict[str, Any]]:
    """Return one row for each class that has images. Rows are sorted by the first model's recall, lowest first."""
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


def _examples(predictions: Predictions, m: int, name_of: NameOf, images: Any) -> dict[str, Any]:
    """Return a model's most confident mistakes, and correctly classified images at equal distances in the split."""
    mistakes = np.flatnonzero(~predictions.top1_NM[:, m])
    correct = np.flatnonzero(predictions.top1_NM[:, m])
    by_confidence = mistakes[np.argsort(-predictions.probabilities_NMK[mistakes, m, 0], kind="stable")]
    spread = np.linspace(0, len(correct) - 1, min(MAX_CORRECT, len(correct))).astype(int)
    return {
        "mistakes": [_example(predictions, n, [m], name_of, images) for n in by_confidence[:MAX_MISTAKES]],
        "correct": [_example(predictions, n, [m], name_of, images) for n in correct[spread]],
    }


def _differing(predictions: Predictions, name_of: NameOf, images: Any) -> list[dict[str, Any]]:
    """Return the images for which two models predict different classes, unless both are correct by ReaL labels.

    The images are grouped by which model is correct. The images of a group are sorted by the highest probability of a
    wrong prediction, highest first.
    """
    first_N, second_N = predictions.top1_NM.T
    differs_N = predictions.predicted_NM[:, 0] != predictions.predicted_NM[:, 1]
    groups = {
        "Only the first model is correct": differs_N & first_N & ~second_N,
        "Only the second model is correct": differs_N & ~first_N & second_N,
        "Both models are wrong": differs_N & ~first_N & ~second_N,
    }
    error_N = np.where(predictions.top1_NM, 0, predictions.probabilities_NMK[..., 0]).max(1)
    shown = []
    for title, is_member_N in groups.items():
        members = np.flatnonzero(is_member_N)
        members = members[np.argsort(-error_N[members], kind="stable")]
        examples = [_example(predictions, n, [0, 1], name_of, images) for n in members[:MAX_DIFFERING]]
        shown.append({"title": title, "images": len(members), "examples": examples})
    return shown


def _example(predictions: Predictions, n: int, models: Sequence[int], name_of: NameOf, images: Any) -> dict[str, Any]:
    """Return an image's true class, thumbnail and predictions (top 3 of one model, or top 1 of each of two)."""
    owners = [""] if len(models) == 1 else ["first model: ", "second model: "]
    said = [
        {
            "owner": owner,
            "name": name_of(predictions.classes_NMK[n, m, k]),
            "share": 100 * predictions.probabilities_NMK[n, m, k],
            "mark": "right" if predictions.correct_NMK[n, m, k] else "wrong" if k == 0 else "",
        }
        for m, owner in zip(models, owners)
        for k in range(min(3 if len(models) == 1 else 1, predictions.classes_NMK.shape[2]))
    ]
    true_class = name_of(predictions.targets_N[n])
    best = ", ".join(f"{line['owner']}{line['name']}" for line in said[: len(models)])
    alt = f"true class {true_class}, predicted {best}" if len(models) == 1 else f"true class {true_class}, {best}"
    return {"is": true_class, "said": said, "alt": alt, **_picture(images, predictions.indices_N[n])}


def _picture(images: Any, index: int) -> dict[str, str]:
    """Return a base64 JPEG thumbnail and the file name of an image; {} for iterable datasets."""
    if streams(images):
        return {}
    image, _ = ImageReader(images, None, is_training=False).read(index)
    image.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE))
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG")
    return {"picture": base64.b64encode(jpeg.getvalue()).decode(), "file": label_of(images.filename(index))}
