"""best.pt: the weights of a run's best epoch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint import Checkpoint
from ..fault_tolerance.machine_errors import exists
from ..weight_files import BrokenCheckpointError
from .history import best_row, history_of, is_better

_logger = logging.getLogger(__name__)


class BestCheckpoint:
    """best.pt of a run folder: the weights of the best epoch so far, without the optimizer's state.

    Args:
        folder: Run folder.

    Attributes:
        row: History row of the epoch that best.pt holds; None if best.pt holds no epoch of this run.
    """

    def __init__(self, folder: Path):
        self.path = folder / "best.pt"
        self.row: dict[str, Any] | None = None

    def find(self, history: list[dict[str, Any]]) -> str | None:
        """Set `row` to the epoch that best.pt holds. Return the problem with best.pt, or None.

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
        best = best_row(history)
        if self.row is not best:
            return f"holds epoch {len(rows)}, because the weights of the best epoch {best['epoch']:.0f} are lost"
        return None

    def resume(self, history: list[dict[str, Any]]) -> None:
        """Find the best epoch of a resumed run, and warn if its weights are lost."""
        problem = self.find(history)
        if problem:
            _logger.warning("%s %s. It will hold the best of the epochs from here on", self.path, problem)

    def is_beaten_by(self, row: dict[str, Any]) -> bool:
        """Return whether best.pt must be replaced by the epoch of this history row."""
        if self.row is None or not exists(self.path):
            return True
        images = row.get("eval_images")
        most_images = self.row.get("eval_images")
        if images is not None and most_images is not None and images < most_images:
            _logger.warning(
                "epoch %d was evaluated on %d images, and the best epoch %d on %d: it cannot become the best",
                row["epoch"], images, self.row["epoch"], most_images,
            )  # fmt: skip
        return is_better(row, self.row)

    def write(self, saved: dict[str, Any]) -> None:
        """Write the content of last.pt after an epoch, and whether the model or its EMA weights are better."""
        self.row = saved["history"][-1]
        ema_is_better = "state_dict_ema" in saved and self.row["eval_top1_ema"] >= self.row["eval_top1"]
        # the optimizer's state is twice as large as the weights
        content = {name: part for name, part in saved.items() if name != "optimizer"}
        content["best"] = "state_dict_ema" if ema_is_better else "state_dict"
        checkpoint.save_checkpoint(content, self.path)
