"""Training state: everything that changes during training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from .history import history_of
from .meter import EpochMeter
from .update import ListedEma


@dataclass
class TrainState:
    """Training state, stored in checkpoints under timm's key names where timm has them.

    Attributes:
        model: Trained model.
        ema: EMA of the model's weights; None without EMA.
        optimizer: Optimizer of the phase.
        scheduler: Learning-rate scheduler of the phase.
        scaler: Gradient scaler for float16; disabled for other precisions.
        first_epoch: First epoch of the phase, counted from 0 over the whole run.
        history: One row per finished epoch, as in summary.csv.
        meter: Losses, gradient norms and times of the current epoch.
    """

    model: nn.Module
    ema: ListedEma | None
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    scaler: torch.amp.GradScaler
    first_epoch: int
    history: list[dict[str, Any]] = field(default_factory=list)
    meter: EpochMeter = field(default_factory=EpochMeter)

    @property
    def models(self) -> list[nn.Module]:
        """The model, followed by the EMA model if the run has one."""
        return [self.model] if self.ema is None else [self.model, self.ema.module]

    @property
    def learning_rate(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def finish_epoch(self, row: dict[str, Any]) -> None:
        """Append the history row of the current epoch and step the learning-rate scheduler."""
        self.history.append(row)
        self.meter = EpochMeter()
        self._step_scheduler()

    def _step_scheduler(self) -> None:
        self.scheduler.step(len(self.history) - self.first_epoch)

    def state_dict(self) -> dict[str, Any]:
        saved = {
            "epoch": len(self.history),
            "history": self.history,
            "progress": self.meter.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp_scaler": self.scaler.state_dict(),
        }
        if self.ema is not None:
            saved["state_dict_ema"] = self.ema.module.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a state saved in the same phase, except the learning rates and other options of the optimizer.

        Raises:
            Exception: The state is invalid or does not fit the model. PyTorch raises exceptions of various types.
        """
        self.load_weights_and_history(saved)
        for group, own in zip(saved["optimizer"]["param_groups"], self.optimizer.param_groups):
            group.update({name: value for name, value in own.items() if name != "params"})
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["amp_scaler"])
        self.meter.load_state_dict(saved["progress"])
        if len(self.history) > self.first_epoch:
            self._step_scheduler()

    def load_weights_and_history(self, saved: dict[str, Any]) -> None:
        """Restore only the weights, EMA weights and history, from which a new phase starts."""
        self.model.load_state_dict(saved["state_dict"])
        if self.ema is not None:
            self.ema.module.load_state_dict(saved["state_dict_ema"])
        self.history = history_of(saved["history"])


def check_optimizer(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise a ValueError if the optimizer state is invalid. `name` is the optimizer's name in timm."""
    for parameter, state in optimizer.state.items():
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        steps = float(state.get("step", 0))
        is_finite = all(tensor.isfinite().all() for tensor in tensors.values())
        if not (_fits(tensors, parameter, name) and is_finite and 0 <= steps < 2**53):
            raise ValueError(f"invalid {name} state for a parameter of shape {tuple(parameter.shape)}")


def _fits(tensors: dict[str, Tensor], parameter: Tensor, name: str) -> bool:
    """Return whether the optimizer state of a parameter is valid.

    For AdamW, the names, shapes and dtypes of the tensors are checked. For other optimizers, only the shape of the
    momentum is checked.
    """
    if name == "adamw":
        moment = (parameter.shape, torch.float32)
        expected = {"step": ((), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}
        return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()} == expected
    moments = [tensors[key] for key in ("exp_avg", "momentum_buffer") if key in tensors]
    return all(moment.shape in ((), parameter.shape) for moment in moments)
