"""Evaluation of top-1, top-5 and loss, with every image counted exactly once for any world size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..cuda_graphs import Replayed
from ..data.sources.images import UNREADABLE
from ..text import counted
from .statistics import wilson_interval


@dataclass
class Evaluation:
    """Evaluation result over all ranks. `loss` is the mean cross-entropy in nats; `top1` and `top5` are percentages."""

    images: int
    top1_correct: int
    top5_correct: int
    loss: float
    unreadable: int
    images_per_second: float

    @property
    def is_blind(self) -> bool:
        """Whether the evaluation has no result, because no image could be read."""
        return self.unreadable > 0 and self.images == 0

    @property
    def unreadable_note(self) -> str:
        """Remark on the number of skipped unreadable images."""
        return f"{counted(self.unreadable, 'unreadable image')} {'was' if self.unreadable == 1 else 'were'} skipped"

    @property
    def top1(self) -> float:
        return 100 * self.top1_correct / max(1, self.images)

    @property
    def top5(self) -> float:
        return 100 * self.top5_correct / max(1, self.images)

    @property
    def top1_interval(self) -> tuple[float, float]:
        """95% confidence interval of top-1 (Wilson's score interval), in percent."""
        low, high = wilson_interval(self.top1_correct, self.images)
        return 100 * low, 100 * high


class Evaluator:
    """Evaluates models on the same images in one pass. Every rank returns the results over all ranks.

    Args:
        models: Classifiers that map normalized images (B, 3, H, W) to logits (B, classes).
        input_size: Channels, height and width of the images.
        device: Device of the models.
        precision: Autocast context of the forward pass.
        batch_size: Batch size for which a CUDA graph is captured on a GPU; None disables CUDA graphs.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        input_size: tuple[int, int, int],
        device: torch.device,
        precision: AbstractContextManager,
        batch_size: int | None,
    ):
        self.models = models
        self.device = device
        self.precision = precision
        self.graph_shape = (batch_size, *input_size) if batch_size and device.type == "cuda" else None
        self.run: Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]] | None = None  # set by the first call

    @torch.inference_mode()
    def __call__(self, loader, observe: Callable[[Tensor, list[Tensor]], None] | None = None) -> list[Evaluation]:
        """Evaluate all models on the batches of a loader.

        Args:
            loader: Yields normalized images (B, 3, H, W) and targets (B,).
            observe: Function called for each batch of this rank with the targets and the logits of every model.

        Returns:
            One result per model.
        """
        was_training = [model.training for model in self.models]
        for model in self.models:
            model.eval()
        self.run = self.run or self._as_graph()
        start = time.perf_counter()

        sums_device = "cpu" if self.device.type == "mps" else self.device  # MPS does not support fp64
        sums = torch.zeros(len(self.models), 5, dtype=torch.float64, device=sums_device)
        for images, targets in loader:
            batch_sums, logits = self.run(images, targets)
            sums += batch_sums.to(sums_device)
            if observe:
                observe(targets, logits)
        if dist.is_initialized():
            dist.all_reduce(sums)
        rows = sums.tolist()

        seconds = time.perf_counter() - start
        for model, training in zip(self.models, was_training):
            model.train(training)
        return [
            Evaluation(
                images=int(images),
                top1_correct=int(top1),
                top5_correct=int(top5),
                loss=loss / max(1, images),
                unreadable=int(unreadable),
                images_per_second=(images + unreadable) / seconds,
            )
            for images, top1, top5, loss, unreadable in rows
        ]

    def _as_graph(self) -> Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]:
        """Return the function that evaluates a batch. On a GPU, full batches replay a CUDA graph of the function."""
        if not self.graph_shape:
            return self._run
        images = torch.zeros(self.graph_shape, device=self.device)
        targets = torch.zeros(len(images), dtype=torch.long, device=self.device)
        return Replayed(self._run, [images, targets], "evaluation")

    def _run(self, images: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the sums of `_batch_sums` for every model, stacked to (models, 5), and the logits of every model."""
        with self.precision:
            logits = [model(images) for model in self.models]
        return torch.stack([_batch_sums(x.float(), targets) for x in logits]), logits


def _batch_sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Return five sums over a batch: images, correct top-1, correct top-5, loss, and unreadable images."""
    readable = targets != UNREADABLE  # UNREADABLE replaces the class index of images that cannot be read
    correct = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=UNREADABLE)
    return torch.stack([readable.sum(), correct[:, 0].sum(), correct.sum(), loss, (~readable).sum()])
