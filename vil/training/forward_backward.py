"""Forward and backward pass of a micro-batch, fitted to the memory of the device and captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from ..config import Config, ConfigError
from ..cuda_graphs import Replayed, unchanged
from .gradients import FlatGradients
from .losses import Loss
from .state import TrainState


class ForwardBackward:
    """Add the gradients of a micro-batch to the flat gradient buffer, and return the micro-batch's part of the loss.

    On a GPU, `fit` must be called before the first micro-batch.

    Args:
        config: Options of the run.
        state: State of the run, with the model and the gradient scaler.
        loss_fn: Loss of a batch.
        gradients: Gradients of the model.
        precision: Autocast context of the forward pass.
        micro_batch: Maximum micro-batch size.
        world_size: Number of processes.

    Attributes:
        micro_batch: Micro-batch size; the number of images in memory at once.
    """

    def __init__(
        self,
        config: Config,
        state: TrainState,
        loss_fn: Loss,
        gradients: FlatGradients,
        precision: AbstractContextManager,
        micro_batch: int,
        world_size: int,
    ):
        self.config = config
        self.model = state.model
        self.network = torch.compile(self.model) if config.torchcompile else self.model
        self.scaler = state.scaler
        self.loss_fn = loss_fn
        self.gradients = gradients
        self.precision = precision
        self.micro_batch = micro_batch
        self.images_per_step = config.global_batch_size // world_size  # of this process
        self.graph: Replayed | None = None

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of this process in an optimizer step."""
        return self.images_per_step // self.micro_batch

    @property
    def is_graph(self) -> bool:
        return self.graph is not None and self.graph.graph is not None

    def micro_batches(self, images: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Split a batch of the loader into micro-batches."""
        return zip(images.split(self.micro_batch), targets.split(self.micro_batch))

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        return (self.graph or self.run)(images, targets)

    def run(self, images: Tensor, targets: Tensor) -> Tensor:
        """Run the pass in eager mode."""
        with self.precision:
            loss = self.loss_fn(self.network(images), targets, images) / self.accumulation
        self.gradients.add(self.scaler.scale(loss))
        return loss.detach()

    def fit(self, input_size: tuple[int, ...], num_classes: int) -> None:
        """On a GPU, choose the largest micro-batch that fits into memory, and capture the pass as a CUDA graph.

        Raises:
            ConfigError: A micro-batch of one image exceeds the memory.
        """
        device = self.gradients.flat.device
        if device.type != "cuda":
            return
        self.model.train()
        size = largest_that_fits(self.micro_batch, lambda size: self._try_out(size, input_size, num_classes))
        if size is None:
            raise ConfigError(f"{device} has too little memory to train {self.config.model} on one image")

    def _try_out(self, micro_batch: int, input_size: tuple[int, ...], num_classes: int) -> None:
        """Run the pass on a micro-batch of zeros, as a CUDA graph if requested. Gradients and buffers are unchanged."""
        self.micro_batch = micro_batch
        images = self.gradients.flat.new_zeros(self.micro_batch, *input_size)
        if self.config.mixing:
            targets = images.new_zeros(self.micro_batch, num_classes)
        else:
            targets = images.new_zeros(self.micro_batch, dtype=torch.long)
        changed = [self.gradients.flat, *self.model.buffers()]
        optimizer_state = images.new_empty(2, self.gradients.flat.numel())  # memory that the optimizer needs later
        if self.config.cuda_graphs:
            self.graph = Replayed(self.run, [images, targets], "training", changed)
        else:
            with unchanged(changed):
                self.run(images, targets)
        del optimizer_state


def largest_that_fits(micro_batch: int, try_out: Callable[[int], None]) -> int | None:
    """Return the largest divisor of `micro_batch` for which `try_out` does not exceed the GPU's memory, or None."""
    for size in range(micro_batch, 0, -1):
        if micro_batch % size == 0:
            with suppress(torch.OutOfMemoryError):
                try_out(size)
                return size
            torch.cuda.empty_cache()
    return None
