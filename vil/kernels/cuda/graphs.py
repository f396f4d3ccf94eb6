"""CUDA graphs of a plan, which replay all steps of the plan with one launch.

A CUDA graph contains the addresses of its kernels' tensors, so a plan needs one graph per set of addresses. PyTorch's
caching allocator returns the same addresses in each step of a training loop, as long as the loop allocates tensors of
the same sizes in the same order. Therefore a plan allocates all of its buffers first, and captures a graph as soon as
the same addresses occur for the third time. The lifetimes of tensors are the same with and without graphs, because a
graph owns no tensor.

Graphs are captured on a separate stream per stream of the caller. On the separate stream, cuBLAS has a workspace that
no other work uses. The workspace is in a memory pool that the first graph of the stream keeps alive.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_logger = logging.getLogger(__name__)

SIGHTINGS = 3  # the SIGHTINGS-th call with the same addresses captures a graph
GRAPHS = 256  # maximum number of graphs per plan
KEYS = 4096  # maximum number of sets of addresses per plan whose calls are counted

_lock = threading.Lock()  # allows one capture at a time, because captures may share a stream


class Graphs:
    """CUDA graphs of one plan: one graph for each combination of the caller's stream and the buffers' addresses."""

    def __init__(self) -> None:
        self.captured: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.calls: dict[tuple, int] = {}  # number of calls by stream and addresses without a graph
        self.enabled = True

    def replay(self, device: torch.device, addresses: list[int], run: Callable[[], None]) -> bool:
        """Replay the graph for the current stream and `addresses`, and return whether a graph was replayed.

        Args:
            device: Current GPU.
            addresses: Addresses of all buffers that the graph reads or writes.
            run: Function to capture, which launches all steps on the current stream and allocates no memory.
        """
        if not self.enabled or torch.cuda.is_current_stream_capturing():
            return False
        stream = torch.cuda.current_stream(device).cuda_stream
        key = (stream, *addresses)
        graph = self.captured.get(key)
        if graph is None:
            graph = self._count(device, stream, key, run)
            if graph is None:
                return False
        graph.replay()
        return True

    def _count(
        self, device: torch.device, stream: int, key: tuple, run: Callable[[], None]
    ) -> torch.cuda.CUDAGraph | None:
        """Count a call without a graph, and capture a graph if the same addresses have occurred often enough."""
        calls = self.calls.pop(key, 0) + 1
        if calls < SIGHTINGS:
            while len(self.calls) >= KEYS:
                self.calls.pop(next(iter(self.calls)))
            self.calls[key] = calls
            return None
        with _lock:
            if key in self.captured:
                return self.captured[key]
            try:
                graph = _capture(device, stream, run)
            except RuntimeError as error:
                self.enabled = False
                _logger.warning("cannot capture a plan as a CUDA graph: %s", str(error).strip().splitlines()[0])
                return None
            while len(self.captured) >= GRAPHS:
                self.captured.pop(next(iter(self.captured)))
            self.captured[key] = graph
        return graph


class CaptureStream:
    """Stream and memory pool for captures, and the first captured graph, which keeps the pool alive."""

    def __init__(self, device: torch.device):
        from cuda.bindings import driver

        # create a stream with the driver, because torch.cuda.Stream() may return a stream that the caller also uses
        error, handle = driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cannot create a CUDA stream: {error.name}")
        self.stream = torch.cuda.ExternalStream(int(handle), device)
        self.pool = torch.cuda.graph_pool_handle()
        self.first: torch.cuda.CUDAGraph | None = None


@functools.cache
def _capture_stream(device: torch.device, stream: int) -> CaptureStream:
    return CaptureStream(device)


def _capture(device: torch.device, stream: int, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture `run` as a graph. The caller replays the graph on `stream`, the id of a CUDA stream."""
    torch.cuda.current_blas_handle()  # cuBLAS must not be initialized during a capture
    of = _capture_stream(device, stream)
    graph = torch.cuda.CUDAGraph()
    with without_garbage_collection(), torch.cuda.stream(of.stream):
        # "thread_local" allows CUDA calls from other threads during the capture
        graph.capture_begin(pool=of.pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    of.first = of.first or graph
    return graph


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector, because a capture fails if another graph is destroyed meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
