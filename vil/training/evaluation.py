"""Top-1, top-5 and loss of a model over a split, exact for any number of processes."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import nn

from .data import UNREADABLE


@dataclass
class Evaluation:
    """Counts over all processes. `loss` is the mean cross-entropy in nats; shares are in percent."""

    images: int
    top1_correct: int
    top5_correct: int
    loss: float
    unreadable: int
    images_per_second: float

    @property
    def top1(self) -> float:
        return 100 * self.top1_correct / max(1, self.images)

    @property
    def top5(self) -> float:
        return 100 * self.top5_correct / max(1, self.images)

    @property
    def top1_interval(self) -> tuple[float, float]:
        """The 95% interval of top-1 (Wilson's score interval)."""
        if self.images == 0:
            return 0.0, 100.0
        low, high = binomtest(self.top1_correct, self.images).proportion_ci(method="wilson")
        return 100 * low, 100 * high


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def autocast(device: torch.device, enabled: bool, dtype: str) -> AbstractContextManager:
    """Mixed precision on GPUs, fp32 on a CPU."""
    return torch.autocast(device.type, getattr(torch, dtype)) if enabled and device.type != "cpu" else nullcontext()


@torch.inference_mode()
def evaluate(model: nn.Module, loader, device: torch.device, precision: AbstractContextManager) -> Evaluation:
    """Evaluates `model` on the images of `loader`; every process of a run gets the result over all of them."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=device)  # images, top-1, top-5, loss, unreadable
    start = time.perf_counter()
    for images, targets in loader:
        with precision:
            logits = model(images)
        logits, readable = logits.float(), targets != UNREADABLE
        logits, targets = logits[readable], targets[readable]
        correct = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        sums += torch.stack([readable.sum(), correct[:, 0].sum(), correct.sum(), loss, (~readable).sum()])
    if dist.is_initialized():
        dist.all_reduce(sums)
    images, top1, top5, loss, unreadable = sums.tolist()
    seconds = time.perf_counter() - start
    model.train(was_training)
    return Evaluation(
        int(images), int(top1), int(top5), loss / max(1, images), int(unreadable), (images + unreadable) / seconds
    )
