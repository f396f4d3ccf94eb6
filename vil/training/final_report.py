"""Report page on the best epoch of a run, saved as report.html when the run ends."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from timm.layers import to_2tuple
from torch import Tensor

from ..checkpoint import Checkpoint, CheckpointError
from ..config import ConfigError
from ..data.sources.splits import count_images, streams
from ..distributed import broadcast_from_rank0
from ..evaluation.evaluator import Evaluation
from ..evaluation.predictions import PredictionCollector, Predictions
from ..evaluation.report import report_page
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.machine_errors import MachineError
from .best import BestCheckpoint
from .curve import missing_matplotlib, note_on_losses, plot_history
from .data import Splits
from .history import best_row
from .run_info import RunInfo

_logger = logging.getLogger(__name__)

# A run with more than MOST_IMAGES validation images writes no report, because evaluating best.pt again would take long.
MOST_IMAGES = 10_000
MOST_CLASSES = 200  # maximum number of classes of a run that writes a report

SELECTION = (
    "the best epoch was chosen on these images, so the accuracy is optimistic; vil validate on a separate test split "
    "measures an unbiased accuracy"
)

# function that evaluates a state dict on the validation split
Evaluate = Callable[[dict[str, Tensor]], tuple[Evaluation, PredictionCollector]]


def is_reported(splits: Splits, world_size: int) -> bool:
    """Return whether a run writes report.html.

    A run writes no report if the validation split is streamed or synthetic, has more than `MOST_IMAGES` images, or has
    fewer images than there are processes, or if the run has more than `MOST_CLASSES` classes.
    """
    if streams(splits.validation) or not hasattr(splits.validation, "reader"):
        return False
    return world_size <= count_images(splits.validation) <= MOST_IMAGES and splits.num_classes <= MOST_CLASSES


def write_final_report(
    run: RunInfo, splits: Splits, best: BestCheckpoint, history: list[dict[str, Any]], rank: int, evaluate: Evaluate
) -> None:
    """Evaluate best.pt on the validation split, and write report.html. All ranks must call this function.

    A failure to read best.pt or to write the report raises no error, because the run is complete without the report. If
    a signal interrupts the evaluation, no report is written.
    """
    found = broadcast_from_rank0(functools.partial(_best_weights, best, history, run.phase.config.img_size))
    if found is None:
        return
    key, weights = found
    result, collector = evaluate(weights)
    if result.images + result.unreadable < count_images(splits.validation):
        if rank == 0:
            _logger.warning("%s/report.html is not written, because the evaluation was interrupted", run.folder)
        return

    predictions = Predictions.of(*collector.gather())
    if rank > 0:
        return
    try:
        page = _page(run, splits, history, key == "state_dict_ema", result, predictions)
        write_atomically(run.folder / "report.html", page)
    except (OSError, MachineError) as error:
        _logger.warning("failed to write %s/report.html: %s", run.folder, error)


def _best_weights(best: BestCheckpoint, history: list[dict[str, Any]], img_size: Any) -> list | None:
    """Return the key and state dict that best.pt marks as best.

    The result is None if the best weights are lost or unreadable, or if an earlier phase trained the best weights at
    another image size than `img_size`, the image size of the last phase.
    """
    try:
        if best.find(history):
            return None
        source = Checkpoint(best.path)
        if to_2tuple(source.options.get("img_size")) != to_2tuple(img_size):
            _logger.warning(
                "%s/report.html is not written, because an earlier phase trained the best weights at another image "
                "size: run vil validate --checkpoint %s --report FOLDER", best.path.parent, best.path,
            )  # fmt: skip
            return None
        return [source.content["best"], source.content[source.content["best"]]]
    except (CheckpointError, ConfigError) as error:
        _logger.warning("%s/report.html is not written: %s", best.path.parent, error)
        return None


def _page(
    run: RunInfo, splits: Splits, history: list[dict[str, Any]], is_ema: bool, result: Evaluation,
    predictions: Predictions,
) -> str:  # fmt: skip
    config = run.phase.config
    epoch = best_row(history)["epoch"]
    weights = f"best.pt, epoch {epoch:.0f} of {config.total_epochs}" + ", EMA weights" * is_ema
    columns = {name: getattr(result, name) for name in ("images", "top1", "top1_interval", "top5", "loss")}
    notes = [result.unreadable_note] if result.unreadable else []
    if len(history) > 1:
        notes.append(SELECTION)
    return report_page(
        title=f"{config.model} on {config.data_dir or config.dataset}, {config.val_split}",
        models=[{"model": config.model, "weights": weights, **columns}],
        predictions=predictions,
        names=dict(enumerate(run.label_names)),
        notes=notes,
        images=splits.validation,
        curve=None if missing_matplotlib() else plot_history(history, note_on_losses(config)),
    )
