"""Detection of a diverged run."""

from __future__ import annotations

import math
from pathlib import Path

from .state import TrainState


class DivergenceError(RuntimeError):
    """The loss or the gradient is not finite."""


def check_divergence(state: TrainState, last: Path) -> None:
    """Check the steps since the last call, for which the host waits. All ranks must call this after the same steps.

    Args:
        state: State of the run.
        last: Path of the last checkpoint, for the message.

    Raises:
        DivergenceError: A loss or a gradient norm is not finite.
    """
    meter = state.meter
    first_step = len(meter.losses)
    meter.collect()
    for step in range(first_step, meter.steps):
        _check("loss", meter.losses[step], step, state, last)
        # float16's gradient scaler skips steps whose gradient overflows
        if not state.scaler.is_enabled():
            _check("gradient's norm", meter.norms[step], step, state, last)


def _check(name: str, value: float, step: int, state: TrainState, last: Path) -> None:
    if not math.isfinite(value):
        raise DivergenceError(
            f"the {name} is {value} at step {step + 1} of epoch {len(state.history) + 1}, at learning rate "
            f"{state.learning_rate:.3g}; the last checkpoint before is {last if last.exists() else 'none yet'}. A "
            "lower --lr, --clip-grad or --no-amp may help; --resume auto resumes from the checkpoint"
        )
