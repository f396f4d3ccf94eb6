"""A function of tensors as a CUDA graph: the GPU is told once what to do, and then only to do it again."""

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
    """A CUDA graph would not do what the function does."""


class Replayed:
    """`function(*tensors)`, captured as a CUDA graph and replayed where inputs have the shapes of the first ones.

    Inputs are copied to where the graph reads them; the next call overwrites the outputs. Other shapes, and everything
    if the function cannot be captured, go to the function itself; then a warning says why. The graph draws the random
    numbers that the function would, from the state of the GPU's generator at each call.

    Args:
        function: Takes tensors on the current GPU, and returns tensors or collections of them.
        inputs: Tensors of the shapes to come, whatever they hold.
        name: For the warning.
        changed: The tensors that the function changes beside its outputs, such as gradients: trying it out leaves them
            as they were.
        tried: Whether the function has run before, so that it is not tried out.

    Raises:
        torch.OutOfMemoryError: The GPU's memory does not suffice, with or without a graph.
    """

    def __init__(
        self,
        function: Callable,
        inputs: Sequence[Tensor],
        name: str,
        changed: Sequence[Tensor] = (),
        tried: bool = False,
    ):
        self.function, self.inputs = function, inputs
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        with unchanged(changed):
            try:
                if not tried:
                    self._try_out()
                # other threads, such as the loader's, go on meanwhile
                with nothing_collected(), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.outputs = function(*inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.graph = None
                reason = str(error).strip().splitlines()[0]
                _logger.warning("no CUDA graph of %s, which goes on in eager mode: %s", name, reason)

    def __call__(self, *inputs: Tensor):
        if self.graph is None or any(t.shape != place.shape for t, place in zip(inputs, self.inputs)):
            return self.function(*inputs)
        for t, place in zip(inputs, self.inputs):
            place.copy_(t)
        self.graph.replay()
        return self.outputs

    def _try_out(self) -> None:
        """Runs the function until all is compiled and chosen.

        A capture that fails half-way leaves PyTorch's allocator and generator in the midst of it: so what would make it
        fail, or the graph do something else, is found here.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for synchronizing in (nullcontext(), _refused()):
                    host = _random_state_of_host()
                    with synchronizing:
                        self.function(*self.inputs)
                    if _random_state_of_host() != host:
                        raise UncapturableError("it draws random numbers on the host")
        finally:  # also ahead of what undoes what has been changed
            torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Leaves these tensors and the state of the GPU's generator as they were, whatever is done within."""
    before, state = [t.detach().clone() for t in tensors], torch.cuda.get_rng_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(tensors, before):
                t.copy_(value)
        torch.cuda.set_rng_state(state)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Garbage goes ahead, not within: an earlier run's graph that is destroyed within a capture makes that one fail."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _random_state_of_host() -> tuple:
    _, key, *others = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(key).tobytes(), others, torch.get_rng_state().numpy().tobytes()


@contextmanager
def _refused() -> Iterator[None]:
    """Whatever makes the host wait for the GPU within is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
