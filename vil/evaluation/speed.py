"""Inference speed and memory of a model."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Speed:
    """Inference throughput and peak memory of one model.

    `peak_mib` is the peak CUDA memory of the weights, images and activations in MiB, or None on other devices.
    """

    images_per_second: float
    peak_mib: float | None


@torch.inference_mode()
def measure_speed(model: nn.Module, images: Tensor, precision: AbstractContextManager, seconds: float = 1.0) -> Speed:
    """Measure inference throughput and peak memory on one batch, repeated for `seconds` after one warm-up call."""
    model.eval()
    on_gpu = images.device.type == "cuda"

    def call() -> None:
        with precision:
            model(images)
        if on_gpu:
            torch.cuda.synchronize(images.device)

    call()
    if on_gpu:
        allocated_before = torch.cuda.memory_allocated(images.device)
        torch.cuda.reset_peak_memory_stats(images.device)

    start = time.perf_counter()
    calls = 0
    while calls == 0 or time.perf_counter() - start < seconds:
        call()
        calls += 1
    images_per_second = len(images) * calls / (time.perf_counter() - start)

    if not on_gpu:
        return Speed(images_per_second, peak_mib=None)
    activations = torch.cuda.max_memory_allocated(images.device) - allocated_before
    weights_and_images = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), images))
    return Speed(images_per_second, peak_mib=(activations + weights_and_images) / 2**20)
