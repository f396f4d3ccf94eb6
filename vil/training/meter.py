"""Measurements of a run: losses and gradient norms over all processes, where the time goes, and memory."""

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

from ..processes import is_first_process, sum_over_processes

_logger = logging.getLogger(__name__)

TIMES = ("seconds", "waited", "waited_for_gpu", "waited_at_looks")  # of an `EpochMeter`
IDLE = 0.02  # of the time: a host that waits less for its GPU, but for when it looks at losses, keeps it waiting
AHEAD = 4  # steps that the host may be ahead of a GPU: enough to keep it busy, while images do not pile up


class EpochMeter:
    """The losses and gradient norms of an epoch's steps so far, means over all processes, and where the time went."""

    def __init__(self):
        self.losses: list[float] = []
        self.norms: list[float] = []
        # in all, for the loader, for steps to be done, and that for the last steps before a look at losses
        self.seconds = self.waited = self.waited_for_gpu = self.waited_at_looks = 0.0
        self.pending: list[Tensor] = []  # still on the device
        self.under_way: deque[torch.cuda.Event] = deque()
        self.clock = time.perf_counter()

    @property
    def steps(self) -> int:
        return len(self.losses) + len(self.pending)

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Notes a step, and waits for a GPU until it has done all but the last `AHEAD`."""
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
        """Waits for the steps noted. All processes must do so after the same steps."""
        if self.pending:
            before = self.waited_for_gpu
            while self.under_way:
                self._wait_for_gpu(self.under_way.popleft())
            self.waited_at_looks += self.waited_for_gpu - before
            # sums of a few fp32 numbers are exact in fp64: they do not depend on the order, so neither on restarts
            values = torch.stack(self.pending)
            values = sum_over_processes(
                (values.cpu() if values.is_mps else values).double()
            )  # Apple's GPUs have no fp64
            values /= dist.get_world_size() if dist.is_initialized() else 1
            losses, norms = values.T.tolist()
            self.losses, self.norms, self.pending = self.losses + losses, self.norms + norms, []
            self._lap()

    def timed(self, batches: Iterable) -> Iterator:
        """The batches, while the wait for them is timed."""
        then = self.clock = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - then
            yield batch
            then = time.perf_counter()

    def _lap(self) -> None:
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now

    def summary(self, global_batch_size: int) -> dict[str, float]:
        """The columns of summary.csv that training fills, once all steps are collected."""
        seconds, waited, waited_for_gpu, _ = sum_over_processes(torch.tensor(self.times, dtype=torch.float64)).tolist()
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
        """Seconds: in all, waiting for the loader, waiting for a GPU, and the part of that at looks."""
        return self.seconds, self.waited, self.waited_for_gpu, self.waited_at_looks

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("losses", "norms", *TIMES)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.norms = ([float(value) for value in state[name]] for name in ("losses", "norms"))
        for name in TIMES:
            setattr(self, name, float(state.get(name, 0.0)))


class Bottleneck:
    """Says once, when a run has got under way, what its host's time goes into, if it keeps the GPU waiting.

    For how long is not known: a GPU that waits a little after every step is busy most of the time.

    Args:
        interval: Steps from one look at an epoch to the next.
    """

    def __init__(self, interval: int):
        self.interval, self.found = interval, False
        self.before: tuple[EpochMeter, list[float]] | None = None

    def look(self, meter: EpochMeter, how_loaded: str, for_model: float, for_preparation: float) -> None:
        """The first look at an epoch is at a start, the next may find something. Called after each step.

        Args:
            how_loaded: Who loads the images, in a few words.
            for_model: Seconds in all in which prepared images waited for the model.
            for_preparation: Seconds in all in which this process decoded and augmented images.
        """
        if self.found or meter.steps % self.interval:
            return
        times = sum_over_processes(
            torch.tensor([*meter.times, for_model, for_preparation], dtype=torch.float64)
        ).tolist()
        before, self.before = self.before, (meter, times)
        if before is None or before[0] is not meter:
            return
        self.found = True
        seconds, data, gpu, at_looks, model, preparation = (now - then for now, then in zip(times, before[1]))
        # a host that waits for a GPU keeps it busy
        if not is_first_process() or gpu - at_looks + model >= IDLE * seconds:
            return
        host, workers = seconds - data - gpu, data - preparation
        longest = max(host, workers, preparation)
        if longest == host:
            what = "what it does itself"
            remedy = "--cuda-graphs, a larger --batch-size or --torchcompile"
        elif longest == preparation:
            what = f"preparing images ({how_loaded})"
            remedy = "--no-augment-on-device"
        else:
            what = f"waiting for images ({how_loaded})"
            remedy = "more --workers, files that a GPU decodes (baseline JPEGs) or a faster disk"
        share = 100 * longest / seconds
        _logger.warning(
            "the GPU waits for the host, whose time goes into %s (%.0f%%): %s may help", what, share, remedy
        )


def peak_memory() -> int:
    """Bytes: the most that tensors have taken of the GPU, or else that this process has taken; 0 where nobody knows."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
