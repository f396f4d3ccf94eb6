"""Functions of tensors that are captured as a CUDA graph once and then replayed."""

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

_logger = logging.getLogger(__name__)


class UncapturableError(RuntimeError):
    """The function cannot be captured, because a CUDA graph would not repeat what the function does."""


class Replayed:
    """Capture `function(*tensors)` as a CUDA graph and replay the graph for inputs of the captured shapes.

    Inputs are copied to the graph's input buffers, and each call overwrites the outputs of the call before. Inputs of
    other shapes run eagerly. If the function cannot be captured, a warning gives the reason and every call runs
    eagerly. Random numbers equal those of an eager call, because replays advance the GPU's RNG state.

    Args:
        function: Function from tensors on the current GPU to tensors or collections of tensors.
        inputs: Example tensors with the shapes of later inputs; their values do not matter.
        name: Name of the function in the warning.
        changed: Tensors that the function modifies in place, such as gradients. Warm-up and capture leave their values
            unchanged.
        tried: Whether the function has run before and needs no warm-up.

    Raises:
        torch.OutOfMemoryError: Warm-up or capture exceeds the GPU's memory.
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
                # "thread_local" lets other threads, such as the loader's, call CUDA during the capture
                with nothing_collected(), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.outputs = function(*inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.graph = None
                reason = str(error).strip().splitlines()[0]
                _logger.warning("cannot capture %s as a CUDA graph, so it runs in eager mode: %s", name, reason)

    def __call__(self, *inputs: Tensor):
        fits = all(t.shape == buffer.shape for t, buffer in zip(inputs, self.buffers))
        if self.graph is None or not fits:
            return self.function(*inputs)
        for t, buffer in zip(inputs, self.buffers):
            buffer.copy_(t)
        self.graph.replay()
        return self.outputs

    def _try_out(self) -> None:
        """Run the function twice as a warm-up, until kernels are compiled and selected.

        A failed capture leaves PyTorch's allocator and generator in an undefined state. Therefore the warm-up already
        raises the errors that would break the capture or its replay.
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
        finally:  # the restoring copies of `unchanged` must wait for the stream, too
            torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore these tensors and the GPU's RNG state when the context exits."""
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
    """Collect garbage before the context and disable the garbage collector inside.

    If an earlier run's CUDA graph is destroyed during a capture, the capture fails.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rng_state_of_host() -> tuple:
    _, key, *others = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(key).tobytes(), others, torch.get_rng_state().numpy().tobytes()


@contextmanager
def _synchronization_raises() -> Iterator[None]:
    """Raise an error on each operation inside the context that makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
