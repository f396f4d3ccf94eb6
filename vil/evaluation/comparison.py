"""Predictions of one or two models on the same images, and paired tests of their difference.

Dimension letters:

    N images    M = 1 or 2 models    K best classes of a model, at most 5
"""

from __future__ import annotations

import io
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.sources.images import UNREADABLE
from ..distributed import interleave_over_processes
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.output import csv_text
from ..published import published
from .evaluator import Z_95, Evaluation


class Predictions:
    """Targets, best classes and class probabilities of every image, in the order of the split.

    An instance is the `observe` callback of `Evaluator`.
    """

    def __init__(self):
        self._targets: list[Tensor] = []
        self._best: list[Tensor] = []
        self._shares: list[Tensor] = []

    def __call__(self, targets: Tensor, logits: Sequence[Tensor]) -> None:
        self._targets.append(targets)
        best = [x.float().topk(min(5, x.shape[1])) for x in logits]
        self._best.append(torch.stack([indices for _, indices in best], dim=1))
        shares = [(values - x.float().logsumexp(1, keepdim=True)).exp() for x, (values, _) in zip(logits, best)]
        self._shares.append(torch.stack(shares, dim=1))

    def gather(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return targets_N, best_NMK and shares_NMK (class probabilities) of all images on every rank.

        Rank r has evaluated the images r, r + world size, ...
        """
        parts = self._targets, self._best, self._shares
        targets_N, best_NMK, shares_NMK = (interleave_over_processes(torch.cat(part)).cpu().numpy() for part in parts)
        return targets_N, best_NMK, shares_NMK


@dataclass
class Paired:
    """Numbers of images that both models, only one of them, or neither classifies correctly."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @classmethod
    def of(cls, first_N: np.ndarray, second_N: np.ndarray) -> Paired:
        counts = (first_N & second_N, first_N & ~second_N, ~first_N & second_N, ~first_N & ~second_N)
        return cls(*(int(count.sum()) for count in counts))

    @property
    def images(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Accuracy of the first model minus accuracy of the second, in percentage points."""
        return 100 * (self.only_first - self.only_second) / max(1, self.images)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of `difference`: Wald's after adding half an image to each of the four counts (Agresti & Min,
        2005).
        """
        b, c, n = self.only_first + 0.5, self.only_second + 0.5, self.images + 2
        half = Z_95 * math.sqrt(b + c - (b - c) ** 2 / n)
        return 100 * max(-1.0, (b - c - half) / n), 100 * min(1.0, (b - c + half) / n)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of McNemar's exact test.

        Under the null hypothesis, each image that only one model classifies correctly is equally likely to be either
        model's.
        """
        discordant, term, tail = self.only_first + self.only_second, 1, 0
        for i in range(min(self.only_first, self.only_second) + 1):  # term: the choices of i of them
            tail, term = tail + term, term * (discordant - i) // (i + 1)
        return min(1.0, 2 * tail / 2**discordant)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "interval": self.interval, "p_value": self.p_value}


@dataclass
class Comparison:
    """Predictions of one or two models on the counted images: readable and, with ReaL labels, labelled."""

    targets_N: np.ndarray  # noqa: N815
    best_NMK: np.ndarray  # noqa: N815
    right_NMK: np.ndarray  # noqa: N815
    shares_NMK: np.ndarray  # noqa: N815
    places_N: np.ndarray  # noqa: N815  indices in the split

    @classmethod
    def of(
        cls,
        targets_N: np.ndarray,
        best_NMK: np.ndarray,
        shares_NMK: np.ndarray,
        real_labels_NC: np.ndarray | None = None,
    ) -> Comparison:
        """Select the counted images and mark which predictions are correct.

        A prediction is correct if it equals the target or, with ReaL labels, is one of the image's labels.
        """
        counted = targets_N != UNREADABLE
        if real_labels_NC is None:
            right_NMK = best_NMK == targets_N[:, None, None]
        else:
            right_NMK = real_labels_NC[np.arange(len(targets_N))[:, None, None], best_NMK]
            counted &= real_labels_NC.any(1)
        judged = (values[counted] for values in (targets_N, best_NMK, right_NMK, shares_NMK, np.arange(len(counted))))
        return cls(*judged)

    @property
    def top1_NM(self) -> np.ndarray:
        return self.right_NMK[..., 0]

    @property
    def top5_NM(self) -> np.ndarray:
        return np.asarray(self.right_NMK.any(-1))

    @property
    def top1(self) -> Paired:
        return Paired.of(*self.top1_NM.T)

    @property
    def top5(self) -> Paired:
        return Paired.of(*self.top5_NM.T)

    def judge(self, result: Evaluation, m: int) -> Evaluation:
        """Replace the counts of model m's result by the counts on these images and labels; keep the loss on the
        targets.
        """
        top1, top5 = self.top1_NM[:, m].sum(), self.top5_NM[:, m].sum()
        return replace(result, images=len(self.targets_N), top1_correct=top1, top5_correct=top5)

    @property
    def agreement(self) -> float:
        """Percentage of the images for which both models predict the same class, correct or not."""
        return 100 * (self.best_NMK[:, 0, 0] == self.best_NMK[:, 1, 0]).sum() / max(1, len(self.targets_N))

    def classes(self, names: dict[int, str]) -> list[dict[str, Any]]:
        """Return a row of accuracies for each target class that has images."""
        rows = []
        for target in np.unique(self.targets_N):
            right_NM = self.top1_NM[self.targets_N == target]
            row = {"class": target, "name": names.get(target), "images": len(right_NM)}
            if right_NM.shape[1] == 1:
                rows.append(row | {"top1": 100 * right_NM.mean()})
                continue
            first, second = right_NM.T
            paired = Paired.of(first, second)
            rows.append(
                row
                | {
                    "top1_first": 100 * first.mean(),
                    "top1_second": 100 * second.mean(),
                    "difference": paired.difference,
                    "only_first": paired.only_first,
                    "only_second": paired.only_second,
                }
            )
        return rows

    def confusions(self, names: dict[int, str]) -> list[dict[str, Any]]:
        """Return a row for each pair of target and wrongly predicted class, the most frequent first.

        For two models, rows have both counts and are sorted by the difference; pairs of equal counts are omitted.
        """
        counts = [Counter(zip(self.targets_N, said_N)) for said_N in self.best_NMK[..., 0].T]
        rows = []
        for target, predicted in sorted(set().union(*counts)):
            row: dict[str, Any] = {"class": target, "name": names.get(target)}
            row |= {"predicted": predicted, "predicted_name": names.get(predicted)}
            if len(counts) == 1:
                row["images"] = difference = counts[0][target, predicted]
            else:
                first, second = (count[target, predicted] for count in counts)
                row |= {"first": first, "second": second, "difference": (difference := first - second)}
            if target != predicted and difference:
                rows.append(row)
        of = "images" if len(counts) == 1 else "difference"
        return sorted(rows, key=lambda row: -abs(row[of]))

    def write_tables(self, folder: Path, names: dict[int, str]) -> None:
        """Write classes.csv and confusions.csv to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in (("classes", self.classes(names)), ("confusions", self.confusions(names))):
            write_atomically(folder / f"{name}.csv", csv_text(rows, list(rows[0]) if rows else ["class"]))

    def plot(self, labels: Sequence[str]) -> bytes:
        """Return a PNG plot of the accuracy differences with intervals, and of both models' top-1 accuracy by class."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.8), layout="constrained")
        differences, by_class = figure.subplots(1, 2)
        for y, (name, paired) in enumerate((("top-5", self.top5), ("top-1", self.top1))):
            low, high = paired.interval
            differences.plot([low, high], [y, y], color="C0")
            differences.plot([paired.difference], [y], "o", color="C0")
            differences.text(paired.difference, y + 0.08, f"{name}, p = {paired.p_value:.2g}", ha="center", va="bottom")
        differences.axvline(0, color="grey", linewidth=1)
        differences.set(ylim=(-0.5, 1.6), yticks=[], xlabel=f"{labels[0]} minus {labels[1]}, points, 95% interval")
        rows = self.classes({})
        by_class.axline((100, 100), slope=1, color="grey", linewidth=1)
        by_class.scatter([r["top1_second"] for r in rows], [r["top1_first"] for r in rows], s=9, alpha=0.5)
        by_class.set(xlabel=f"{labels[1]}, top-1 of a class (%)", ylabel=f"{labels[0]} (%)")
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=150)
        return png.getvalue()


@dataclass
class Speed:
    """Inference throughput of one model. `peak_mib` is the peak GPU memory in MiB, None on a CPU."""

    images_per_second: float
    peak_mib: float | None


@torch.inference_mode()
def measure_speed(model: nn.Module, images: Tensor, precision: AbstractContextManager, seconds: float = 1.0) -> Speed:
    """Measure inference on one batch, repeated for `seconds` after one warm-up call."""
    model.eval()
    on_gpu = images.device.type == "cuda"

    def call() -> None:
        with precision:
            model(images)
        if on_gpu:
            torch.cuda.synchronize(images.device)

    call()
    if on_gpu:
        before = torch.cuda.memory_allocated(images.device)
        torch.cuda.reset_peak_memory_stats(images.device)
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < seconds:
        call()
        calls += 1
    speed = len(images) * calls / (time.perf_counter() - start)
    if not on_gpu:
        return Speed(speed, None)
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), images))
    return Speed(speed, (torch.cuda.max_memory_allocated(images.device) - before + own) / 2**20)


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)) + "\n"


def markdown(result: dict[str, Any]) -> str:
    """Return the JSON result of validate.py --against as a Markdown table and explanatory sentences."""
    first, second = rows = result["models"]
    paired = result["paired"]

    def row(name: str, text: Callable[[dict], str], third: str = "") -> list[str]:
        return [name, text(first), text(second), third]

    def difference(name: str) -> str:
        low, high = paired[name]["interval"]
        return f"{paired[name]['difference']:+.2f} ({low:+.2f} to {high:+.2f}), p = {paired[name]['p_value']:.3g}"

    def ratio(name: str) -> str:
        values = [r[name] for r in rows]
        return f"{values[0] / values[1]:.2f} x" if all(values) else ""

    def published_text(r: dict) -> str:
        numbers = published(r["model"]) if r["published"] else (None, None)
        return " / ".join("-" if number is None else str(number) for number in numbers)

    table = [
        row("", lambda r: r["model"], "first minus second (95% interval), McNemar's test"),
        row("weights", lambda r: r["weights"]),
        row(
            "top-1 %", lambda r: "{:.2f} ({:.2f} to {:.2f})".format(r["top1"], *r["top1_interval"]), difference("top1")
        ),
        row("top-5 %", lambda r: f"{r['top5']:.2f}", difference("top5")),
        row("published top-1 / top-5 %", published_text),
        row("loss", lambda r: f"{r['loss']:.4f}", f"{first['loss'] - second['loss']:+.4f}"),
        row("parameters", lambda r: f"{r['parameters']:,}", ratio("parameters")),
        row("images/s", lambda r: f"{r['images_per_second']:.0f}", ratio("images_per_second")),
        row("peak MiB", lambda r: f"{r['peak_mib']:.0f}" if r["peak_mib"] else "-", ratio("peak_mib")),
    ]
    if not any(r["published"] for r in rows):
        table = [cells for cells in table if not cells[0].startswith("published")]
    top1 = paired["top1"]
    sentences = [
        f"Of {first['images']} images, both models classify {top1['both']} correctly, only the first "
        f"{top1['only_first']}, only the second {top1['only_second']}, and neither {top1['neither']}. "
        f"The models predict the same class for {paired['agreement']:.2f}% of the images.",
        *(note[0].upper() + note[1:] + "." for note in result["notes"]),
        "Intervals are Wilson's for top-1 and Agresti and Min's for differences. McNemar's test is exact. Speed and "
        "memory are those of inference on one batch, with one model at a time. Published numbers are for the "
        "ImageNet-1k validation images at 224 pixels.",
    ]
    return markdown_table(table) + "\n" + "\n".join(sentences)
