"""Warning about the slowest part of the host's work in runs in which the GPU waits for the host."""

from __future__ import annotations

import logging
from dataclasses import asdict, astuple, dataclass

import torch

from ..data.device.synthetic import SyntheticLoader
from ..data.host.loader import PieceLoader
from ..distributed import all_reduce_sum, is_rank0
from .meter import EpochMeter, Times

_logger = logging.getLogger(__name__)

IDLE = 0.02  # the GPU is assumed to wait for the host if the host waits for the GPU for less than IDLE of the time


@dataclass
class HostTimes(Times):
    """Seconds that the host spent on each activity, of one rank or summed over all ranks.

    Attributes:
        waited_for_model: The part of `waited` until the model had finished earlier batches, so that memory for the next
            batch was free.
        preparing: The part of `waited` in which the training process decoded and augmented images.
    """

    waited_for_model: float = 0.0
    preparing: float = 0.0

    def minus(self, other: HostTimes) -> HostTimes:
        return HostTimes(*(now - then for now, then in zip(astuple(self), astuple(other))))


class Bottleneck:
    """Warns once, early in a run, if the GPU waits for the host, and names the slowest part of the host's work.

    The warning does not tell how long the GPU waits. A GPU that waits briefly after every step can still be busy most
    of the time.

    Args:
        interval: Number of steps between two measurements.
    """

    def __init__(self, interval: int):
        self.interval = interval
        self.is_known = False
        self.epoch: EpochMeter | None = None  # epoch of the previous measurement
        self.times: HostTimes | None = None  # times of the epoch, summed over ranks, at the previous measurement

    def look(self, meter: EpochMeter, loader: PieceLoader | SyntheticLoader) -> None:
        """Warn if the GPU waited for the host since the previous measurement. Call `look` after each step.

        Args:
            meter: Meter of the epoch.
            loader: Loader of the training images, which provides waiting times, and descriptions for the warning.
        """
        if self.is_known or meter.steps % self.interval:
            return
        waits = loader.waits
        own = HostTimes(**asdict(meter.times), waited_for_model=waits.for_model, preparing=waits.for_preparation)
        times = HostTimes(*all_reduce_sum(torch.tensor(astuple(own), dtype=torch.float64)).tolist())
        before = self.times if self.epoch is meter else None
        self.epoch = meter
        self.times = times
        if before is not None:
            self.is_known = True
            self._warn(times.minus(before), loader)

    def _warn(self, interval: HostTimes, loader: PieceLoader | SyntheticLoader) -> None:
        # If the host is the bottleneck, the host hardly waits for the GPU.
        waited_for_gpu = interval.waited_for_gpu - interval.waited_at_looks + interval.waited_for_model
        if not is_rank0() or waited_for_gpu >= IDLE * interval.seconds:
            return
        own_work = interval.seconds - interval.waited - interval.waited_for_gpu
        waiting = interval.waited - interval.preparing
        longest = max(own_work, waiting, interval.preparing)
        if longest == own_work:
            what = "launching work from the training process"
            remedy = "--cuda-graphs, a larger --batch-size or --torchcompile"
        elif longest == interval.preparing:
            what = f"preparing images ({loader.description})"
            remedy = "files of fewer pixels"
        else:
            what = f"waiting for images ({loader.description})"
            remedy = loader.remedy
        _logger.warning(
            "the GPU waits for the host, which spends its time on %s (%.0f%%): %s may help",
            what, 100 * longest / interval.seconds, remedy,
        )  # fmt: skip
