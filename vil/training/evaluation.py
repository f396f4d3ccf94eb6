"""Top-1, top-5 and loss of a model over a split, exact for any number of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ConfigError
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
        from scipy.stats import binomtest  # which takes a second to import, and training does not need

        if self.images == 0:
            return 0.0, 100.0
        low, high = binomtest(self.top1_correct, self.images).proportion_ci(method="wilson")
        return 100 * low, 100 * high


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def known_device(name: str | None) -> str:
    """The device of that name, or the default.

    Raises:
        ConfigError: There is none on this machine.
    """
    name = name or default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown to PyTorch: try cuda or cpu") from error
    backend = None if device.type == "cpu" else getattr(torch, device.type, None)
    if device.type != "cpu" and not (hasattr(backend, "is_available") and backend.is_available()):
        raise ConfigError(f"device {name!r}: there is none that PyTorch can use on this machine; try --device cpu")
    if device.index is not None and backend and device.index >= backend.device_count():
        raise ConfigError(f"device {name!r}: this machine has {backend.device_count()} of them, counted from 0")
    return name


def autocast(device: torch.device, enabled: bool, dtype: str) -> AbstractContextManager:
    """Mixed precision on GPUs, fp32 on a CPU."""
    return torch.autocast(device.type, getattr(torch, dtype)) if enabled and device.type != "cpu" else nullcontext()


@torch.inference_mode()
def evaluate(
    models: Sequence[nn.Module],
    loader,
    device: torch.device,
    precision: AbstractContextManager,
    observe: Callable[[Tensor, list[Tensor]], None] | None = None,
) -> list[Evaluation]:
    """Evaluates models on the same images in one pass; every process of a run gets the results over all of them.

    `observe`, if given, is called with the targets and every model's logits of each batch of this process.
    """
    was_training = [model.training for model in models]
    sums = torch.zeros(len(models), 5, dtype=torch.float64, device=device)
    start = time.perf_counter()
    for model in models:
        model.eval()
    for images, targets in loader:
        readable = targets != UNREADABLE
        with precision:
            outputs = [model(images) for model in models]
        for logits, model_sums in zip(outputs, sums):
            model_sums += _batch_sums(logits[readable].float(), targets[readable], (~readable).sum())
        if observe:
            observe(targets, outputs)
    if dist.is_initialized():
        dist.all_reduce(sums)
    rows = sums.tolist()
    seconds = time.perf_counter() - start
    for model, training in zip(models, was_training):
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


def _batch_sums(logits: Tensor, targets: Tensor, unreadable: Tensor) -> Tensor:
    """(images, top-1, top-5, loss, unreadable) of a batch."""
    correct = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    images = torch.full_like(unreadable, len(targets))
    return torch.stack([images, correct[:, 0].sum(), correct.sum(), loss, unreadable])
