"""The best epoch of a run, and whether best.pt still holds it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint import BrokenCheckpointError, Checkpoint
from ..fault_tolerance.machine_errors import exists
from .resumption import history_of
from .summary import best_row, is_better

_logger = logging.getLogger(__name__)


class BestCheckpoint:
    """best.pt of a run's folder: the weights of the best epoch so far, without the optimizer's state.

    Args:
        folder: The folder of the run.

    Attributes:
        row: The history row of the epoch that best.pt holds; None if best.pt holds no epoch of this run.
    """

    def __init__(self, folder: Path):
        self.path = folder / "best.pt"
        self.row: dict[str, Any] | None = None

    def find(self, history: list[dict[str, Any]]) -> str | None:
        """Set `row` by what best.pt holds. Return what is wrong with best.pt, or None.

        Raises:
            CheckpointError: The machine cannot read best.pt.
        """
        self.row = None
        if not history:
            return None
        if not exists(self.path):
            return "is missing"
        try:
            rows = history_of(Checkpoint(self.path).content["history"])
        except BrokenCheckpointError:
            return "is damaged"
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
            return "is not a checkpoint of this run"
        shared = min(len(rows), len(history))
        if not rows or repr(rows[:shared]) != repr(history[:shared]):  # NaN is not equal to itself
            return "is of another run"
        if len(rows) > len(history):  # the run was killed before it wrote last.pt, and will train this epoch again
            return None
        self.row = history[len(rows) - 1]
        if self.row is not (best := best_row(history)):
            return f"holds epoch {len(rows)}, because the weights of the best epoch {best['epoch']:.0f} are lost"
        return None

    def resume(self, history: list[dict[str, Any]]) -> None:
        """Find the best epoch of a resumed run, and warn if its weights are lost."""
        if problem := self.find(history):
            _logger.warning("%s %s. It will hold the best of the epochs from here on", self.path, problem)

    def is_beaten_by(self, row: dict[str, Any]) -> bool:
        """Return whether best.pt is to hold the epoch of this history row."""
        if self.row is None or not exists(self.path):
            return True
        images, most = row.get("eval_images"), self.row.get("eval_images")
        if images is not None and most is not None and images < most:
            _logger.warning(
                "epoch %d was evaluated on %d images, and the best epoch %d on %d: it cannot become the best",
                row["epoch"], images, self.row["epoch"], most,
            )  # fmt: skip
        return is_better(row, self.row)

    def write(self, state: dict[str, Any]) -> None:
        """Write the state of a run after its last epoch. `best` names the better of the model and its EMA."""
        self.row = row = state["history"][-1]
        better_average = "state_dict_ema" in state and row["eval_top1_ema"] >= row["eval_top1"]
        best = {"best": "state_dict_ema" if better_average else "state_dict"}
        # the optimizer's state is twice as large as the weights
        best |= {name: part for name, part in state.items() if name != "optimizer"}
        checkpoint.save_checkpoint(best, self.path)
