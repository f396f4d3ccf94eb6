"""Detection of a diverged run."""

from __future__ import annotations

import math

from .meter import EpochMeter


class DivergenceError(RuntimeError):
    """The loss or the gradient is not finite."""


def find_divergence(meter: EpochMeter, first_step: int, skips_overflows: bool) -> str | None:
    """Return which value of which step is not finite, or None.

    Args:
        meter: Meter of the epoch, whose steps have been collected.
        first_step: First step to look at.
        skips_overflows: Whether a gradient scaler skips steps whose gradient overflows.
    """
    for step in range(first_step, len(meter.losses)):
        values = {"loss": meter.losses[step]}
        if not skips_overflows:
            values["gradient's norm"] = meter.norms[step]
        for name, value in values.items():
            if not math.isfinite(value):
                return f"the {name} is {value} at step {step + 1}"
    return None
