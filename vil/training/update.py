"""One optimizer step: gradient clipping, weight update and EMA update."""

from __future__ import annotations

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from ..cuda_graphs import Replayed
from .gradients import FlatGradients


class ListedEma(ModelEmaV3):
    """timm's EMA of a model that lists the tensors only once; two `state_dict` calls a step would take milliseconds."""

    def __init__(self, model: nn.Module, **options):
        super().__init__(model, **options)
        pairs = list(zip(self.module.state_dict().values(), model.state_dict().values()))
        self.averages = [ours for ours, _ in pairs if ours.is_floating_point()]
        self.values = [theirs for ours, theirs in pairs if ours.is_floating_point()]
        self.copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        torch._foreach_lerp_(self.averages, self.values, weight=1.0 - decay)
        for ours, theirs in self.copied:
            ours.copy_(theirs)


class Update:
    """Clip the gradients, run the optimizer step, update the EMA weights, and zero the gradients.

    With PyTorch's fused AdamW, the whole update can be replayed as a CUDA graph. The first call creates the optimizer's
    state, so the second call captures the graph. The graph reads the learning rates from GPU memory, and results are
    bitwise identical with and without the graph.

    Args:
        model: Model to update.
        gradients: Gradients of `model`.
        optimizer: Optimizer of the run.
        scaler: Gradient scaler for float16; disabled for other precisions.
        average: timm's EMA of the weights; None without EMA.
        clip_grad: Maximum gradient norm; None disables clipping.
        as_graph: Whether to use a CUDA graph if possible.
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: FlatGradients,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        average: ModelEmaV3 | None,
        clip_grad: float | None,
        as_graph: bool,
    ):
        self.model, self.gradients, self.optimizer, self.scaler = model, gradients, optimizer, scaler
        self.average, self.clip_grad = average, clip_grad
        self.fused = bool(optimizer.defaults.get("fused"))
        self.as_graph = as_graph and self.fused and not scaler.is_enabled()
        self.run = self._run
        self.calls, self.rates = 0, gradients.flat.new_empty(len(optimizer.param_groups))
        self.chosen: list[float] = []  # learning rates stored in `rates`

    def __call__(self) -> Tensor:
        """Return the gradient norm before clipping; a CUDA graph overwrites the returned tensor in the next call."""
        chosen = [group["lr"] for group in self.optimizer.param_groups]
        if chosen != self.chosen:
            self.chosen = chosen
            self.rates.copy_(torch.tensor(chosen))
        if self.as_graph and self.calls == 1:
            self.run = Replayed(self._run, (), "the optimizer step", tried=True)
        self.calls += 1
        return self.run()

    def _run(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        norm = self.gradients.norm()
        if self.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.gradients.parameters, self.clip_grad, norm)
        groups = self.optimizer.param_groups
        options = [(group["lr"], group.get("capturable")) for group in groups]
        try:
            if self.fused:
                for group, rate in zip(groups, self.rates):
                    group["lr"], group["capturable"] = rate, torch.cuda.is_current_stream_capturing()
            self.scaler.step(self.optimizer)
        finally:
            for group, (rate, capturable) in zip(groups, options):
                group["lr"] = rate
                if self.fused:
                    group["capturable"] = capturable
        self.scaler.update()
        self.gradients.zero()
        if self.average:
            self.average.update(self.model)
        return norm
