"""Detection of a diverged run."""

from __future__ import annotations

import math
from pathlib import Path

from .state import TrainState


class DivergenceError(RuntimeError):
    """Raised if the loss or the gradient norm is not finite."""


def check_divergence(state: TrainState, last: Path) -> None:
    """Check that losses and, without a gradient scaler, gradient norms since the last call are finite.

    The host waits until the device has finished all steps. All ranks must call this function after the same step.

    Args:
        state: State of the run.
        last: Path of last.pt, for the error message.

    Raises:
        DivergenceError: A loss or gradient norm is not finite.
    """
    meter = state.meter
    first_step = len(meter.losses)
    meter.collect()
    for step in range(first_step, meter.steps):
        _check("loss", meter.losses[step], step, state, last)
        # The gradient scaler for float16 skips steps whose gradients overflow, so infinite norms are no divergence.
        if not state.scaler.is_enabled():
            _check("gradient norm", meter.norms[step], step, state, last)


def _check(name: str, value: float, step: int, state: TrainState, last: Path) -> None:
    if not math.isfinite(value):
        raise DivergenceError(
            f"the {name} is {value} at step {step + 1} of epoch {len(state.history) + 1}, at learning rate "
            f"{state.learning_rate:.3g}. Try a lower --lr, --clip-grad or --no-amp. "
            + (f"--resume auto resumes from {last}" if last.exists() else "No checkpoint has been written yet")
        )
