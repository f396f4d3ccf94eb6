"""Files with the predicted class of each image, and comparison of two models by McNemar's test."""

from __future__ import annotations

import csv
import gzip
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vil.evaluation.comparison import ContingencyTable
from vil.evaluation.markdown import markdown_table
from vil.fault_tolerance.files import write_atomically


def name_of(model: str, seed: int) -> str:
    return f"{model}-{seed}"


def job_of(run: dict[str, Any]) -> tuple[str, int]:
    return run["model"], run["seed"]


class Judged:
    """Predictions of several runs for the images of a split.

    Attributes:
        targets_N: Class of each image.
        predicted_NM: Predicted class of each image by each run.
        images: Names of the N images.
        runs: Names of the M runs.
    """

    def __init__(self, targets_N: np.ndarray, predicted_NM: np.ndarray, images: list[str], runs: list[str]):
        self.targets_N, self.predicted_NM, self.images, self.runs = targets_N, predicted_NM, images, runs

    @property
    def right_NM(self) -> np.ndarray:
        return self.predicted_NM == self.targets_N[:, None]

    def write(self, path: Path) -> None:
        """Write a gzipped CSV file with each image's path, class and predictions."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["image", "target", *self.runs])
        writer.writerows(zip(self.images, self.targets_N.tolist(), *self.predicted_NM.T.tolist()))
        write_atomically(path, gzip.compress(text.getvalue().encode(), mtime=0))

    @classmethod
    def read(cls, path: Path) -> Judged:
        (_, _, *runs), *rows = csv.reader(gzip.decompress(path.read_bytes()).decode().splitlines())
        numbers = np.array([row[1:] for row in rows], dtype=np.int64)
        return cls(numbers[:, 0], numbers[:, 1:], [row[0] for row in rows], runs)


def joined(parts: list[Judged], runs: list[str]) -> Judged:
    """Join the predictions of different runs for the same images, with the runs in the order of `runs`.

    Raises:
        SystemExit: The parts have different images or classes of images, or a run has no predictions.
    """
    for part in parts[1:]:
        if part.images != parts[0].images or not np.array_equal(part.targets_N, parts[0].targets_N):
            sys.exit(
                "earlier runs must be evaluated on the same images: leave out --earlier, or render those images again"
            )
    columns = {name: part.predicted_NM[:, i] for part in parts for i, name in enumerate(part.runs)}
    if missing := [name for name in runs if name not in columns]:
        sys.exit(f"the earlier results have no predictions of {', '.join(missing)}: leave out --earlier")
    return Judged(parts[0].targets_N, np.stack([columns[name] for name in runs], axis=1), parts[0].images, runs)


def compare_images(runs: list[dict[str, Any]], judged: Judged) -> str:
    """Return a Markdown table of McNemar's tests, for each seed, between the first model and each other model."""
    columns = {(run["model"], run["seed"]): judged.right_NM[:, i] for i, run in enumerate(runs)}
    first, *others = dict.fromkeys(run["model"] for run in runs)
    table = [
        ["models", "seed", "both correct", "only the first", "only the second", "neither", "difference", "McNemar's p"]
    ]
    for other in others:
        for (model, seed), right_N in columns.items():
            if model == other and (first, seed) in columns:
                pair = ContingencyTable.of(columns[first, seed], right_N)
                low, high = pair.interval
                counts = (pair.both, pair.only_first, pair.only_second, pair.neither)
                difference = f"{pair.difference:+.2f} ({low:+.2f} to {high:+.2f})"
                p_value = f"{pair.p_value:.2g}" if pair.p_value else "< 1e-300"
                table.append([f"{first}, {other}", str(seed), *map(str, counts), difference, p_value])
    return markdown_table(table)
