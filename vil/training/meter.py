"""Measurements of a run: losses and gradient norms averaged over all ranks, waiting times, and peak memory."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import all_reduce_sum, is_rank0

_logger = logging.getLogger(__name__)

TIMES = ("seconds", "waited", "waited_for_gpu", "waited_at_looks")  # attributes of an `EpochMeter`, in seconds
IDLE = 0.02  # fraction of time; if the host waits less for the GPU (except for losses), the GPU waits for the host
AHEAD = 4  # maximum steps that the host queues ahead: enough to keep the GPU busy without piling up images


class EpochMeter:
    """Losses and gradient norms of an epoch's steps, averaged over all ranks, and the time that the host waited."""

    def __init__(self):
        self.losses: list[float] = []
        self.norms: list[float] = []
        # total time; time waiting for the loader, for the GPU, and for the GPU when losses are read (part of the
        # former)
        self.seconds = self.waited = self.waited_for_gpu = self.waited_at_looks = 0.0
        self.pending: list[Tensor] = []  # not yet read from the device
        self.under_way: deque[torch.cuda.Event] = deque()
        self.clock = time.perf_counter()

    @property
    def steps(self) -> int:
        return len(self.losses) + len(self.pending)

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Record a step, and on a GPU wait until all but the last `AHEAD` steps are done."""
        self.pending.append(torch.stack([loss, norm]))
        if loss.is_cuda:
            self.under_way.append(torch.cuda.Event(blocking=True))
            self.under_way[-1].record()
            if len(self.under_way) > AHEAD:
                self._wait_for_gpu(self.under_way.popleft())
        self._lap()

    def _wait_for_gpu(self, event: torch.cuda.Event) -> None:
        then = time.perf_counter()
        event.synchronize()
        self.waited_for_gpu += time.perf_counter() - then

    def collect(self) -> None:
        """Wait for the recorded steps and all-reduce their values. All ranks must call this after the same steps."""
        if self.pending:
            before = self.waited_for_gpu
            while self.under_way:
                self._wait_for_gpu(self.under_way.popleft())
            self.waited_at_looks += self.waited_for_gpu - before
            # fp64 sums of a few fp32 numbers are exact, so results do not depend on their order or on restarts
            values = torch.stack(self.pending)
            values = all_reduce_sum((values.cpu() if values.is_mps else values).double())  # MPS does not support fp64
            values /= dist.get_world_size() if dist.is_initialized() else 1
            losses, norms = values.T.tolist()
            self.losses, self.norms, self.pending = self.losses + losses, self.norms + norms, []
            self._lap()

    def timed(self, batches: Iterable) -> Iterator:
        """Iterate over the batches and measure the time waiting for them."""
        then = self.clock = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - then
            yield batch
            then = time.perf_counter()

    def _lap(self) -> None:
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now

    def summary(self, global_batch_size: int) -> dict[str, float]:
        """Return the training columns of summary.csv, after `collect` has read all steps."""
        seconds, waited, waited_for_gpu, _ = all_reduce_sum(torch.tensor(self.times, dtype=torch.float64)).tolist()
        norms = [norm for norm in self.norms if math.isfinite(norm)]
        return {
            "train_loss": statistics.fmean(self.losses),
            "grad_norm": statistics.fmean(norms) if norms else math.nan,
            "images_per_second": self.steps * global_batch_size / self.seconds,
            "data_wait_percent": 100 * waited / seconds,
            "gpu_wait_percent": 100 * waited_for_gpu / seconds,
            "peak_memory_gib": peak_memory() / 2**30,
        }

    @property
    def times(self) -> tuple[float, float, float, float]:
        """Seconds in total, waiting for the loader, waiting for the GPU, and waiting for the GPU to read losses."""
        return self.seconds, self.waited, self.waited_for_gpu, self.waited_at_looks

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("losses", "norms", *TIMES)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.norms = ([float(value) for value in state[name]] for name in ("losses", "norms"))
        for name in TIMES:
            setattr(self, name, float(state.get(name, 0.0)))


class Bottleneck:
    """Warns once, early in a run, what the host spends its time on if the GPU has to wait for the host.

    The warning cannot tell how long the GPU waits: a GPU that waits briefly after every step may still be busy most of
    the time.

    Args:
        interval: Logging interval in steps.
    """

    def __init__(self, interval: int):
        self.interval, self.found = interval, False
        self.before: tuple[EpochMeter, list[float]] | None = None

    def look(self, meter: EpochMeter, how_loaded: str, for_model: float, for_preparation: float) -> None:
        """Compare the times of two consecutive logging intervals of an epoch, and warn once. Called after each step.

        Args:
            meter: Meter of the epoch.
            how_loaded: Short description of who loads the images.
            for_model: Total seconds in which prepared images waited for the model.
            for_preparation: Total seconds in which this process decoded and augmented images.
        """
        if self.found or meter.steps % self.interval:
            return
        times = all_reduce_sum(torch.tensor([*meter.times, for_model, for_preparation], dtype=torch.float64)).tolist()
        before, self.before = self.before, (meter, times)
        if before is None or before[0] is not meter:
            return
        self.found = True
        seconds, data, gpu, at_looks, model, preparation = (now - then for now, then in zip(times, before[1]))
        # the GPU is busy if the host waits for it
        if not is_rank0() or gpu - at_looks + model >= IDLE * seconds:
            return
        host, workers = seconds - data - gpu, data - preparation
        longest = max(host, workers, preparation)
        if longest == host:
            what = "work of the training process itself"
            remedy = "--cuda-graphs, a larger --batch-size or --torchcompile"
        elif longest == preparation:
            what = f"preparing images ({how_loaded})"
            remedy = "--no-augment-on-device"
        else:
            what = f"waiting for images ({how_loaded})"
            remedy = "more --workers, files that a GPU decodes (baseline JPEGs) or a faster disk"
        share = 100 * longest / seconds
        _logger.warning(
            "the GPU waits for the host, which spends its time on %s (%.0f%%): %s may help", what, share, remedy
        )


def peak_memory() -> int:
    """Return the peak memory in bytes: GPU tensors if CUDA is in use, otherwise this process's; 0 on Windows."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
