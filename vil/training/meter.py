"""Per-epoch losses and gradient norms averaged over all ranks, waiting times, and peak memory."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import all_reduce_sum

T = TypeVar("T")

AHEAD = 4  # maximum number of steps queued on the GPU; more queued steps would only keep more images in memory


@dataclass
class Times:
    """Training time of one process in an epoch, in seconds.

    Attributes:
        seconds: Total time without evaluation.
        waited: Time in which the host waited for the loader.
        waited_for_gpu: Time in which the host waited for the GPU.
        waited_at_looks: The part of `waited_for_gpu` in which the host waited to read losses.
    """

    seconds: float = 0.0
    waited: float = 0.0
    waited_for_gpu: float = 0.0
    waited_at_looks: float = 0.0


class EpochMeter:
    """Records the losses and gradient norms of an epoch's steps, averaged over all ranks, and the host's waiting times.

    `add` leaves the values on the device, because reading them would make the host wait. `collect` reads the values.
    """

    def __init__(self):
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.times = Times()
        self.pending: list[Tensor] = []  # loss and gradient norm of each step, until `collect` reads them
        self.queued: deque[torch.cuda.Event] = deque()  # one CUDA event per step that the GPU may not have finished
        self.clock = time.perf_counter()

    @property
    def steps(self) -> int:
        return len(self.losses) + len(self.pending)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over the batches and measure the time spent waiting for the batches."""
        begin = self.clock = time.perf_counter()
        for batch in batches:
            self.times.waited += time.perf_counter() - begin
            yield batch
            begin = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context from the measured training time."""
        self._stop_clock()
        yield
        self.clock = time.perf_counter()

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Record a step's loss and gradient norm. On a GPU, wait until all but the last `AHEAD` steps are finished."""
        self.pending.append(torch.stack([loss, norm]))
        if loss.is_cuda:
            end = torch.cuda.Event(blocking=True)
            end.record()
            self.queued.append(end)
            if len(self.queued) > AHEAD:
                self._wait_for_gpu(self.queued.popleft())
        self._stop_clock()

    def collect(self) -> None:
        """Wait for the recorded steps and average their values over ranks. All ranks must call `collect` together."""
        if not self.pending:
            return
        before = self.times.waited_for_gpu
        while self.queued:
            self._wait_for_gpu(self.queued.popleft())
        self.times.waited_at_looks += self.times.waited_for_gpu - before

        values = torch.stack(self.pending)
        if values.is_mps:  # MPS does not support fp64
            values = values.cpu()
        # In fp64, sums of a few fp32 numbers of similar size are exact, so the order of ranks does not change results.
        values = all_reduce_sum(values.double())
        if dist.is_initialized():
            values /= dist.get_world_size()
        losses, norms = values.T.tolist()
        self.losses += losses
        self.norms += norms
        self.pending = []
        self._stop_clock()

    def _wait_for_gpu(self, event: torch.cuda.Event) -> None:
        begin = time.perf_counter()
        event.synchronize()
        self.times.waited_for_gpu += time.perf_counter() - begin

    def _stop_clock(self) -> None:
        """Add the time since `clock` to `times.seconds`, and set `clock` to the current time."""
        now = time.perf_counter()
        self.times.seconds += now - self.clock
        self.clock = now

    def summary(self, global_batch_size: int) -> dict[str, float]:
        """Return the training columns of summary.csv. `collect` must have read all steps."""
        times = Times(*all_reduce_sum(torch.tensor(astuple(self.times), dtype=torch.float64)).tolist())
        norms = [norm for norm in self.norms if math.isfinite(norm)]
        return {
            "train_loss": statistics.fmean(self.losses),
            "grad_norm": statistics.fmean(norms) if norms else math.nan,
            "images_per_second": self.steps * global_batch_size / self.times.seconds,
            "data_wait_percent": 100 * times.waited / times.seconds,
            "gpu_wait_percent": 100 * times.waited_for_gpu / times.seconds,
            "peak_memory_gib": peak_memory() / 2**30,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, **asdict(self.times)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the losses and gradient norms of an unfinished epoch.

        Raises:
            KeyError, TypeError, ValueError: The state was not returned by `state_dict`.
        """
        self.losses = [float(value) for value in state["losses"]]
        self.norms = [float(value) for value in state["norms"]]
        if len(self.losses) != len(self.norms):
            raise ValueError(
                f"progress must have one loss and one norm per step, got {len(self.losses)} and {len(self.norms)}"
            )
        self.times = Times(**{name: float(state.get(name, 0.0)) for name in asdict(Times())})


def peak_memory() -> int:
    """Return the peak memory in bytes: of GPU tensors if CUDA is in use, otherwise of this process (0 on Windows)."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows has no module `resource`
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, and in KiB on Linux
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
