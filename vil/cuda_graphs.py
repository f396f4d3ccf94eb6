"""Capture of functions as CUDA graphs."""

from __future__ import annotations

import gc
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from .kernels.cuda.graphs import without_garbage_collection

_logger = logging.getLogger(__name__)


class UncapturableError(RuntimeError):
    """Raised if a function must not be captured, because a CUDA graph could not reproduce the function's results."""


class Replayed:
    """Function of tensors that is captured as a CUDA graph and replayed for inputs of the captured shapes.

    Inputs are copied to the graph's input buffers, and each replay overwrites the outputs of the previous replay.
    Inputs of other shapes run in eager mode. If the function cannot be captured, a warning gives the reason and every
    call runs in eager mode. Random numbers are the same as in eager mode, because replays advance the GPU's RNG state.

    Args:
        function: Function of tensors on the current GPU that returns tensors or collections of tensors.
        inputs: Tensors with the shapes of later inputs and any values, which become the graph's input buffers.
        name: Name of the function, for the warning.
        changed: Tensors that the function modifies in place, such as gradients. After warm-up and capture, the
            tensors have their original values.
        tried: Whether the function needs no warm-up, because the function has already run.

    Raises:
        torch.OutOfMemoryError: Warm-up or capture exceeds the GPU memory.
    """

    def __init__(
        self,
        function: Callable,
        inputs: Sequence[Tensor],
        name: str,
        changed: Sequence[Tensor] = (),
        tried: bool = False,
    ):
        self.function = function
        self.buffers = inputs
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        with unchanged(changed):
            try:
                if not tried:
                    self._try_out()
                # "thread_local" allows CUDA calls from other threads, such as the loader's, during the capture
                with nothing_collected(), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.outputs = function(*inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.graph = None
                reason = str(error).strip().splitlines()[0]
                _logger.warning("cannot capture %s as a CUDA graph, running in eager mode instead: %s", name, reason)

    def __call__(self, *inputs: Tensor):
        fits = all(t.shape == buffer.shape for t, buffer in zip(inputs, self.buffers))
        if self.graph is None or not fits:
            return self.function(*inputs)
        for t, buffer in zip(inputs, self.buffers):
            buffer.copy_(t)
        self.graph.replay()
        return self.outputs

    def _try_out(self) -> None:
        """Run the function twice as a warm-up, so that kernels are compiled and selected before the capture.

        A failed capture leaves PyTorch's allocator and RNG in an undefined state. Therefore the warm-up already raises
        errors that would break the capture or the replay.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for synchronization in (nullcontext(), _synchronization_raises()):
                    host_state = _rng_state_of_host()
                    with synchronization:
                        self.function(*self.buffers)
                    if _rng_state_of_host() != host_state:
                        raise UncapturableError("the function samples random numbers on the host")
        finally:  # the side stream must finish before the caller restores tensors on the current stream
            torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the given tensors and the GPU's RNG state when the context exits."""
    before = [t.detach().clone() for t in tensors]
    rng_state = torch.cuda.get_rng_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(tensors, before):
                t.copy_(value)
        torch.cuda.set_rng_state(rng_state)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collect garbage, and disable Python's garbage collector inside the context.

    Collecting garbage first destroys unreachable CUDA graphs and releases their memory.
    """
    gc.collect()
    with without_garbage_collection():
        yield


def _rng_state_of_host() -> tuple:
    _, key, *others = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(key).tobytes(), others, torch.get_rng_state().numpy().tobytes()


@contextmanager
def _synchronization_raises() -> Iterator[None]:
    """Make operations that wait for the GPU raise an error inside the context."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
