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
    """The file best.pt of a run folder, which holds the weights of the best epoch so far without the optimizer state.

    Args:
        folder: Run folder.

    Attributes:
        row: History row of the epoch whose weights best.pt holds; None if best.pt holds no epoch of the run's history.
    """

    def __init__(self, folder: Path):
        self.path = folder / "best.pt"
        self.row: dict[str, Any] | None = None

    def find(self, history: list[dict[str, Any]]) -> str | None:
        """Read best.pt and set `row`. Return a description of the problem if best.pt does not hold the best epoch.

        Raises:
            CheckpointError: Reading best.pt fails with an I/O error.
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
        if not rows or repr(rows[:shared]) != repr(history[:shared]):  # repr, because NaN is not equal to itself
            return "belongs to another run"
        if len(rows) > len(history):  # best.pt is newer than last.pt, so the run trains the best epoch again
            return None
        self.row = history[len(rows) - 1]
        best = best_row(history)
        if self.row is not best:
            return f"holds epoch {len(rows)}, because the weights of the best epoch {best['epoch']:.0f} are lost"
        return None

    def resume(self, history: list[dict[str, Any]]) -> None:
        """Find the best epoch of a resumed run, and warn if the weights of the best epoch are lost."""
        problem = self.find(history)
        if problem:
            _logger.warning("%s %s. It will be rewritten with the best epoch from now on", self.path, problem)

    def is_beaten_by(self, row: dict[str, Any]) -> bool:
        """Return whether the epoch in `row` is at least as good as the epoch in best.pt, or best.pt is lost."""
        if self.row is None or not exists(self.path):
            return True
        images = row.get("eval_images")
        most_images = self.row.get("eval_images")
        if images is not None and most_images is not None and images < most_images:
            _logger.warning(
                "epoch %d (evaluated on %d images) cannot replace the best epoch %d (evaluated on %d images)",
                row["epoch"], images, self.row["epoch"], most_images,
            )  # fmt: skip
        return is_better(row, self.row)

    def write(self, saved: dict[str, Any]) -> None:
        """Write best.pt: the given content of last.pt without the optimizer state, plus an entry `best`.

        `best` is the key of the better state dict of the epoch, `state_dict` or `state_dict_ema`.
        """
        self.row = saved["history"][-1]
        ema_is_better = "state_dict_ema" in saved and self.row["eval_top1_ema"] >= self.row["eval_top1"]
        # best.pt has no optimizer state, which for AdamW is twice as large as the weights
        content = {name: part for name, part in saved.items() if name != "optimizer"}
        content["best"] = "state_dict_ema" if ema_is_better else "state_dict"
        checkpoint.save_checkpoint(content, self.path)
