"""Self-contained HTML report of a model's classes, confusions, calibration and mistakes."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from ..data.sources.readers import ImageReader
from ..data.sources.splits import streams
from ..text import label_of
from .comparison import Comparison

MOST_CLASSES = 30  # maximum number of classes in a confusion matrix
MOST_PAIRS = 40  # maximum length of the list of confusions
MOST_MISTAKES = 32  # maximum number of images shown for each model
BINS = 10  # bins of probability in the calibration plot
SIDE = 160  # maximum side of a shown image, in pixels


def report_page(
    title: str,
    models: Sequence[dict[str, Any]],
    found: Comparison,
    names: dict[int, str],
    notes: Sequence[str],
    images: Any,
) -> str:
    """Return the report as an HTML page.

    Args:
        title: Title of the page.
        models: JSON results of validate.py, one for each model.
        found: Predictions of the models.
        names: Class names by class index.
        notes: Further remarks for the reader.
        images: timm's dataset. Its images are shown unless it is an iterable dataset.
    """

    def name_of(number: int) -> str:
        return label_of(names.get(number, str(number)))

    present = sorted({*found.targets_N.tolist(), *found.best_NMK[..., 0].flatten().tolist()})
    sections = []
    for m, model in enumerate(models):
        counts = Counter(zip(found.targets_N, found.best_NMK[:, m, 0]))
        bins, error = calibration(found.shares_NMK[:, m, 0], found.top1_NM[:, m])
        own = dict(bins=bins, calibration_error=error, mistakes=_mistakes(found, m, name_of, images))
        if len(present) <= MOST_CLASSES:
            own["matrix"] = [[_cell(counts, row, column) for column in present] for row in present]
        pairs = [(count, *pair) for pair, count in counts.most_common() if pair[0] != pair[1]][:MOST_PAIRS]
        own["confusions"] = [dict(name=name_of(a), predicted_name=name_of(b), count=n) for n, a, b in pairs]
        sections.append(model | own)
    environment = jinja2.Environment(autoescape=True)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    several = len(models) > 1
    page = template.render(
        title=title, models=sections, several=several, notes=notes, paired=found.top1 if several else None,
        classes=_classes(found, name_of), names=[name_of(number) for number in present], most_classes=MOST_CLASSES,
    )  # fmt: skip
    return page.encode(errors="replace").decode()  # names of files and folders may not be UTF-8


def calibration(shares_N: np.ndarray, right_N: np.ndarray) -> tuple[list[dict[str, Any]], float]:
    """Return calibration bins, and the expected calibration error (ECE) in percentage points.

    Args:
        shares_N: Probability of the predicted class of each image.
        right_N: Whether each prediction is correct.
    """
    places, bins, error = np.minimum((shares_N * BINS).astype(int), BINS - 1), [], 0.0
    for place in range(BINS):
        chosen = places == place
        count = chosen.sum()
        accuracy, confidence = (100 * values[chosen].mean() if count else 0.0 for values in (right_N, shares_N))
        bins.append(dict(images=count, accuracy=accuracy, confidence=confidence))
        error += count * abs(accuracy - confidence) / max(1, len(shares_N))
    return bins, error


def _cell(counts: Counter, row: int, column: int) -> dict[str, Any]:
    count = counts[row, column]
    of_row = sum(n for (target, _), n in counts.items() if target == row)
    return dict(count=count, share=count / max(1, of_row), colour="46 160 67" if row == column else "207 34 46")


def _classes(found: Comparison, name_of) -> list[dict[str, Any]]:
    """Return a row for each class that has images, sorted by the first model's recall in ascending order."""
    rows = []
    for target in np.unique(found.targets_N):
        of_class, columns = found.targets_N == target, []
        for m in range(found.best_NMK.shape[1]):
            said = found.best_NMK[:, m, 0]
            called = said == target
            wrong = Counter(said[of_class & ~found.top1_NM[:, m]]).most_common(1)
            precision = 100 * found.top1_NM[called, m].mean() if called.any() else None
            mistake = "".join(f"{name_of(number)} ({count})" for number, count in wrong)
            columns.append(dict(recall=100 * found.top1_NM[of_class, m].mean(), precision=precision, mistake=mistake))
        rows.append(dict(name=name_of(target), images=of_class.sum(), models=columns))
    return sorted(rows, key=lambda row: row["models"][0]["recall"])


def _mistakes(found: Comparison, m: int, name_of, images: Any) -> list[dict[str, Any]]:
    wrong = np.flatnonzero(~found.top1_NM[:, m]).tolist()
    return [
        {
            "is": name_of(found.targets_N[i]),
            "said": [(name_of(n), 100 * s) for n, s in zip(found.best_NMK[i, m, :3], found.shares_NMK[i, m])],
            **_picture(images, found.places_N[i]),
        }
        for i in sorted(wrong, key=lambda i: -found.shares_NMK[i, m, 0])[:MOST_MISTAKES]
    ]


def _picture(images: Any, place: int) -> dict[str, str]:
    """Return an image as base64 JPEG and its file name; {} for iterable datasets, which have no index."""
    if streams(images):
        return {}
    image, _ = ImageReader(images, None, is_training=False).read(place)
    image.thumbnail((SIDE, SIDE))
    image.save(jpeg := io.BytesIO(), "JPEG")
    return dict(picture=base64.b64encode(jpeg.getvalue()).decode(), file=label_of(images.filename(place)))
