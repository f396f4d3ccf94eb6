"""Forward and backward pass of a micro-batch that fits into GPU memory, optionally captured as a CUDA graph."""

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
    """Adds the gradients of a micro-batch to the flat gradient buffer and returns the micro-batch's share of the loss.

    On a GPU, `fit` must be called before the first micro-batch.

    Args:
        config: Options of the run.
        state: Training state, which contains the model and the gradient scaler.
        loss_fn: Training loss.
        gradients: Flat gradient buffer of the model.
        precision: Autocast context of the forward pass.
        micro_batch: Maximum micro-batch size.
        world_size: Number of processes.

    Attributes:
        micro_batch: Micro-batch size, the number of images per forward pass.
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
        self.images_per_step = config.global_batch_size // world_size  # images per optimizer step in this process
        self.graph: Replayed | None = None

    @property
    def accumulation(self) -> int:
        """Number of micro-batches per optimizer step in this process."""
        return self.images_per_step // self.micro_batch

    @property
    def is_graph(self) -> bool:
        return self.graph is not None and self.graph.graph is not None

    def micro_batches(self, images: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Split a batch from the loader into pairs of images and targets, one pair per micro-batch."""
        return zip(images.split(self.micro_batch), targets.split(self.micro_batch))

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        return (self.graph or self.run)(images, targets)

    def run(self, images: Tensor, targets: Tensor) -> Tensor:
        """Run the forward and backward pass without a CUDA graph."""
        with self.precision:
            loss = self.loss_fn(self.network(images), targets, images) / self.accumulation
        self.gradients.add(self.scaler.scale(loss))
        return loss.detach()

    def fit(self, input_size: tuple[int, ...], num_classes: int) -> None:
        """On a GPU, choose the largest micro-batch that fits into memory, and capture a CUDA graph if requested.

        Raises:
            ConfigError: Not even a micro-batch of one image fits into GPU memory.
        """
        device = self.gradients.flat.device
        if device.type != "cuda":
            return
        self.model.train()
        size = largest_that_fits(self.micro_batch, lambda size: self._try_out(size, input_size, num_classes))
        if size is None:
            raise ConfigError(f"{device} has too little memory to train {self.config.model} on one image")

    def _try_out(self, micro_batch: int, input_size: tuple[int, ...], num_classes: int) -> None:
        """Run a micro-batch of zeros, captured as a CUDA graph if requested. Gradients and buffers stay unchanged."""
        self.micro_batch = micro_batch
        images = self.gradients.flat.new_zeros(self.micro_batch, *input_size)
        if self.config.mixing:
            targets = images.new_zeros(self.micro_batch, num_classes)
        else:
            targets = images.new_zeros(self.micro_batch, dtype=torch.long)
        changed = [self.gradients.flat, *self.model.buffers()]
        # reserve the memory that the optimizer state (for AdamW, two tensors per parameter) needs later
        optimizer_state = images.new_empty(2, self.gradients.flat.numel())
        if self.config.cuda_graphs:
            self.graph = Replayed(self.run, [images, targets], "training", changed)
        else:
            with unchanged(changed):
                self.run(images, targets)
        del optimizer_state


def largest_that_fits(micro_batch: int, try_out: Callable[[int], None]) -> int | None:
    """Return the largest divisor of `micro_batch` for which `try_out` fits into GPU memory, or None."""
    for size in range(micro_batch, 0, -1):
        if micro_batch % size == 0:
            with suppress(torch.OutOfMemoryError):
                try_out(size)
                return size
            torch.cuda.empty_cache()
    return None
