"""Optimizer step and EMA update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from ..cuda_graphs import Replayed
from .gradients import FlatGradients


class ListedEma(ModelEmaV3):
    """timm's EMA, but without timm's two `state_dict` calls per step, which take milliseconds."""

    def __init__(self, model: nn.Module, **options):
        super().__init__(model, **options)
        self.averages: list[Tensor] = []
        self.values: list[Tensor] = []
        # pairs (EMA model's buffer, model's buffer) for buffers of integers or booleans, such as BatchNorm's counters
        self.copies: list[tuple[Tensor, Tensor]] = []
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values()):
            if average.is_floating_point():
                self.averages.append(average)
                self.values.append(value)
            else:
                self.copies.append((average, value))

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        torch._foreach_lerp_(self.averages, self.values, weight=1.0 - decay)
        for copy, value in self.copies:
            copy.copy_(value)


class Update:
    """Averages and clips the gradients, runs the optimizer step, updates the EMA, and zeros the gradients.

    With PyTorch's fused AdamW, everything after the all-reduce can be captured as a CUDA graph. The first call creates
    the optimizer state, so the second call captures the graph. The graph reads the learning rates from GPU memory.
    Results are bitwise identical with and without the graph.

    Args:
        model: Model to update.
        gradients: Flat gradient buffer of `model`.
        optimizer: Optimizer of the run.
        scaler: Gradient scaler for float16; disabled for other precisions.
        ema: timm's EMA of the weights; None without EMA.
        clip_grad: Maximum gradient norm; None disables clipping.
        as_graph: Whether to use a CUDA graph if the optimizer is fused and `scaler` is disabled.
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: FlatGradients,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        ema: ModelEmaV3 | None,
        clip_grad: float | None,
        as_graph: bool,
    ):
        self.model = model
        self.gradients = gradients
        self.optimizer = optimizer
        self.scaler = scaler
        self.ema = ema
        self.clip_grad = clip_grad
        self.is_fused = bool(optimizer.defaults.get("fused"))
        self.as_graph = as_graph and self.is_fused and not scaler.is_enabled()
        self.run = self._run
        self.calls = 0
        self.learning_rates: list[float] = []  # learning rates of the parameter groups that `rates_on_device` holds
        self.rates_on_device = gradients.flat.new_empty(len(optimizer.param_groups))

    def __call__(self) -> Tensor:
        """Update the weights and return the gradient norm before clipping, which the next call may overwrite."""
        self.gradients.average_over_processes()
        learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        if learning_rates != self.learning_rates:
            self.learning_rates = learning_rates
            self.rates_on_device.copy_(torch.tensor(learning_rates))
        if self.as_graph and self.calls == 1:
            self.run = Replayed(self._run, (), "the optimizer step", tried=True)
        self.calls += 1
        return self.run()

    def _run(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        norm = self.gradients.norm()
        if self.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.gradients.parameters, self.clip_grad, norm)
        with self._rates_on_device() if self.is_fused else nullcontext():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.gradients.zero()
        if self.ema:
            self.ema.update(self.model)
        return norm

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Make the fused optimizer read learning rates from GPU memory, so that CUDA graphs use the current values."""
        groups = self.optimizer.param_groups
        before = [(group["lr"], group["capturable"]) for group in groups]
        is_capturing = torch.cuda.is_current_stream_capturing()
        try:
            for group, rate in zip(groups, self.rates_on_device):
                group["lr"] = rate
                group["capturable"] = is_capturing
            yield
        finally:
            for group, (rate, capturable) in zip(groups, before):
                group["lr"] = rate
                group["capturable"] = capturable
