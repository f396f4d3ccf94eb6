"""Models on the same images: what each gets right, and of two whether the difference is more than chance.

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

from ..data.images import UNREADABLE
from ..files import write_atomically
from ..output import csv_text
from ..processes import interleave_over_processes
from ..published import published
from .evaluator import Z_95, Evaluation


class Predictions:
    """Targets of every image in the order of the split, and its best classes with their probabilities.

    `evaluate` fills it as its `observe`.
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
        """targets_N, best_NMK and their shares_NMK, their probabilities, over all processes, in each of them.

        Process r saw images r, r + processes, ...
        """
        parts = self._targets, self._best, self._shares
        targets_N, best_NMK, shares_NMK = (interleave_over_processes(torch.cat(part)).cpu().numpy() for part in parts)
        return targets_N, best_NMK, shares_NMK


@dataclass
class Paired:
    """How many images both models, one of them, or neither gets right."""

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
        """Accuracy of the first model less that of the second, in percentage points."""
        return 100 * (self.only_first - self.only_second) / max(1, self.images)

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95% interval: Wald's after adding half an image to each of the four counts (Agresti & Min, 2005)."""
        b, c, n = self.only_first + 0.5, self.only_second + 0.5, self.images + 2
        half = Z_95 * math.sqrt(b + c - (b - c) ** 2 / n)
        return 100 * max(-1.0, (b - c - half) / n), 100 * min(1.0, (b - c + half) / n)

    @property
    def p_value(self) -> float:
        """McNemar's exact test: an image that one model alone gets right is as likely either's."""
        discordant, term, tail = self.only_first + self.only_second, 1, 0
        for i in range(min(self.only_first, self.only_second) + 1):  # term: the choices of i of them
            tail, term = tail + term, term * (discordant - i) // (i + 1)
        return min(1.0, 2 * tail / 2**discordant)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "interval": self.interval, "p_value": self.p_value}


@dataclass
class Comparison:
    """One model or two on the images that count: those that could be read and, with ReaL labels, have one."""

    targets_N: np.ndarray  # noqa: N815
    best_NMK: np.ndarray  # noqa: N815
    right_NMK: np.ndarray  # noqa: N815
    shares_NMK: np.ndarray  # noqa: N815
    places_N: np.ndarray  # noqa: N815  in the split

    @classmethod
    def of(
        cls,
        targets_N: np.ndarray,
        best_NMK: np.ndarray,
        shares_NMK: np.ndarray,
        real_labels_NC: np.ndarray | None = None,
    ) -> Comparison:
        """Right is the target or, with ReaL labels, every class that they have for the image."""
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
        """The counts of model m by these images and labels; the loss stays that of the targets."""
        top1, top5 = self.top1_NM[:, m].sum(), self.top5_NM[:, m].sum()
        return replace(result, images=len(self.targets_N), top1_correct=top1, top5_correct=top5)

    @property
    def agreement(self) -> float:
        """Percent of the images for which both models predict the same class, right or wrong."""
        return 100 * (self.best_NMK[:, 0, 0] == self.best_NMK[:, 1, 0]).sum() / max(1, len(self.targets_N))

    def classes(self, names: dict[int, str]) -> list[dict[str, Any]]:
        """A row for each class that has images, by the folder that they are in."""
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
        """How often each model predicts a class for one that it is not; of two where they differ; the largest first."""
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
        """Writes classes.csv and confusions.csv."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in (("classes", self.classes(names)), ("confusions", self.confusions(names))):
            write_atomically(folder / f"{name}.csv", csv_text(rows, list(rows[0]) if rows else ["class"]))

    def plot(self, labels: Sequence[str]) -> bytes:
        """A PNG: the differences with their intervals, and the top-1 accuracy of both models by class."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.8), layout="constrained")
        differences, by_class = figure.subplots(1, 2)
        for y, (name, paired) in enumerate((("top-5", self.top5), ("top-1", self.top1))):
            low, high = paired.interval
            differences.plot([low, high], [y, y], color="C0")
            differences.plot([paired.difference], [y], "o", color="C0")
            differences.text(paired.difference, y + 0.08, f"{name}, p = {paired.p_value:.2g}", ha="center", va="bottom")
        differences.axvline(0, color="grey", linewidth=1)
        differences.set(ylim=(-0.5, 1.6), yticks=[], xlabel=f"{labels[0]} less {labels[1]}, points, 95% interval")
        rows = self.classes({})
        by_class.axline((100, 100), slope=1, color="grey", linewidth=1)
        by_class.scatter([r["top1_second"] for r in rows], [r["top1_first"] for r in rows], s=9, alpha=0.5)
        by_class.set(xlabel=f"{labels[1]}, top-1 of a class (%)", ylabel=f"{labels[0]} (%)")
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=150)
        return png.getvalue()


@dataclass
class Speed:
    """Inference alone. `peak_mib` is what the GPU held for weights and activations; None on a CPU."""

    images_per_second: float
    peak_mib: float | None


@torch.inference_mode()
def measure_speed(model: nn.Module, images: Tensor, precision: AbstractContextManager, seconds: float = 1.0) -> Speed:
    """Evaluates a model, alone, on one batch again and again for so long, after one call to warm up."""
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
    """The table of what validate.py --against writes as JSON, and under it what the table rests on."""
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
        row("", lambda r: r["model"], "first less second (95% interval), McNemar's test"),
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
        f"{first['images']} images: both right {top1['both']}, only the first {top1['only_first']}, only the second "
        f"{top1['only_second']}, neither {top1['neither']}; the same prediction on {paired['agreement']:.2f}%.",
        *(note[0].upper() + note[1:] + "." for note in result["notes"]),
        "Intervals: top-1 by Wilson, differences by Agresti and Min; the test is exact. Speed and memory: inference on "
        "one batch, each model alone. Published numbers: ImageNet-1k's validation images at 224 pixels.",
    ]
    return markdown_table(table) + "\n" + "\n".join(sentences)
