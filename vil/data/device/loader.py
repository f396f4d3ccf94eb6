"""Loader whose batches are decoded and transformed on the model's device, on GPUs by nvJPEG and batched kernels.

The workers read files and sample random parameters. Workers also decode small images, and decode and transform images
that the device does not support (see `EncodedReader`).
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..host.loader import PieceLoader, Waits
from ..plan import LoadingPlan
from ..samplers import EvaluationBatches
from .cache import DecodedCache
from .encoded import EncodedBatch, join_pieces
from .preparation import Preparation

FILL_SECONDS = 10  # seconds after which the loader stops filling the cache before the first batch


@dataclass
class PreparedGroup:
    """Consecutive batches that the device has decoded and transformed together."""

    images: Tensor  # (B, 3, H, W) uint8 images
    targets: Tensor  # (B,) class indices
    rejected: np.ndarray  # (F,) records of the files that the device could not decode
    start: float  # time in seconds at which decoding started, after waiting for the model
    # the encoded images, whose memory is freed in the caller's thread, because freeing would delay the next group
    encoded: EncodedBatch


@dataclass
class PendingGroup:
    """Consecutive batches that a thread decodes and transforms, or that a call of `result` decodes and transforms."""

    result: Callable[[], PreparedGroup]
    sizes: list[int]  # number of images in each batch


class DeviceLoader(PieceLoader):
    """Loader that decodes and transforms images on the device; on a GPU, on a separate CUDA stream.

    The loader decodes the ith group of batches after the model has finished group i - 3, because batches ahead of the
    model occupy memory.

    Args:
        loader: Loader of encoded pieces, which are sub-batches that one worker loads.
        batches: Batch sampler.
        plan: Loading plan of the split.
        cache: Cache of decoded images, which creates the workers' tasks.
    """

    def __init__(self, loader: DataLoader, batches, plan: LoadingPlan, cache: DecodedCache):
        super().__init__(loader, batches, plan)
        assert plan.sampler
        self.cache = cache
        self.prepare = Preparation(plan.device, plan.sampler, cache)
        self.fill_bytes = plan.fill_bytes
        # the stream has high priority, so that its small kernels run between the model's kernels
        self.stream = torch.cuda.Stream(plan.device, priority=-1) if plan.device.type == "cuda" else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.fill_bytes and self.cache.reserve(self.fill_bytes):
            self._fill_cache()
        self.fill_bytes = None

        pending: deque[PendingGroup] = deque()
        # CUDA events that complete when the model has used the last two groups of batches
        uses: deque[torch.cuda.Event | None] = deque([None, None], maxlen=2)
        thread = ThreadPoolExecutor(max_workers=1)  # the thread is created when the first task is submitted
        try:
            batches = map(list, self.gathered())
            while group := [*islice(batches, self.plan.batches_together)]:
                pending.append(self._start(group, uses[0], thread))
                if len(pending) > 1:
                    yield from self._batches(pending.popleft())
                    uses.append(self._record_use())
            while pending:
                yield from self._batches(pending.popleft())
        finally:  # stop the thread even if the run is interrupted
            thread.shutdown(cancel_futures=True)

    def _start(
        self, group: list[list[EncodedBatch]], use: torch.cuda.Event | None, thread: ThreadPoolExecutor
    ) -> PendingGroup:
        """Schedule decoding and transforming of batches, each of which is a list of pieces (see `PieceLoader`)."""
        sizes = [sum(len(piece.targets) for piece in pieces) for pieces in group]
        prepare = functools.partial(self._prepare, join_pieces(group), use)
        return PendingGroup(thread.submit(prepare).result if self.plan.in_thread else prepare, sizes)

    def _prepare(self, batch: EncodedBatch, use: torch.cuda.Event | None) -> PreparedGroup:
        """Wait for the CUDA event `use`, then decode and transform consecutive batches on the device."""
        if use:
            use.synchronize()
        start = time.perf_counter()
        with self._on_stream():
            images, targets, rejected = self.prepare(batch)
        if self.stream:
            self.stream.synchronize()  # the files must stay alive until the decoder has read them
        return PreparedGroup(images, targets, rejected, start, batch)

    def _batches(self, pending: PendingGroup) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait until batches are decoded and transformed, and return an iterator over their images and targets."""
        group = self._wait_for(pending)
        if self.stream:
            for tensor in (group.images, group.targets):
                tensor.record_stream(torch.cuda.current_stream(self.device))
        # run timm's transforms in the main thread, because they use the global RNGs
        for file in group.rejected:
            image, target = self.dataset.finish(int(file["index"]), int(file["seed"]))
            row = int(file["row"])
            group.images[row] = image.to(self.device)
            group.targets[row] = target
        return zip(group.images.split(pending.sizes), group.targets.split(pending.sizes))

    def _wait_for(self, pending: PendingGroup) -> PreparedGroup:
        """Wait until batches are decoded and transformed, and add the waiting time to `waits`."""
        begin = time.perf_counter()
        group = pending.result()
        end = time.perf_counter()
        self.waits = Waits(
            for_model=self.waits.for_model + max(0.0, group.start - begin),
            for_preparation=self.waits.for_preparation + end - max(group.start, begin),
        )
        return group

    def _record_use(self) -> torch.cuda.Event | None:
        """Record a CUDA event after the current stream's queued work, such as the model's use of the last batch."""
        if not self.stream:
            return None
        event = torch.cuda.Event(blocking=True)  # with `blocking`, a waiting thread does not occupy a CPU core
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _fill_cache(self) -> None:
        """Decode as many of the split's images as possible in `FILL_SECONDS` seconds."""
        pieces: Any = self.loader.batch_sampler
        batches, start = pieces.batches, time.monotonic()
        pieces.batches = EvaluationBatches(len(self.dataset), self.plan.piece_size, 0, 1)
        try:
            for piece in self._loaded():
                batch = join_pieces([[piece]])
                with self._on_stream():
                    self.prepare.fill_cache(batch)
                if self.stream:
                    self.stream.synchronize()
                if time.monotonic() - start > FILL_SECONDS:
                    break
        finally:
            pieces.batches = batches
            self.dataset.unreadable.take()  # reset the count: an unreadable image counts when its batch is delivered

    def _on_stream(self) -> AbstractContextManager:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()
