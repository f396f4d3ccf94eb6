"""Validation results, formatted as JSON or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..published import IMAGENET_CLASSES, published_for
from .comparison import Comparison
from .evaluator import Evaluation
from .markdown import comparison_text
from .models import EvaluatedModel
from .predictions import Predictions
from .settings import DataSettings, ModelSettings
from .speed import Speed


@dataclass(frozen=True)
class Validation:
    """Validation results of one or two models on a split.

    Attributes:
        data: Settings of the split.
        models: Evaluated models.
        results: Evaluation result of each model.
        notes: Remarks on the evaluation, for the user.
        class_names: Class names by class index; incomplete or empty if unknown.
        images: timm dataset of the split.
        predictions: Predictions of all models; None for a single model without ReaL labels, unless predictions are
            requested.
        comparison: Paired comparison of two models; None for a single model.
        speeds: Speed of each model, measured on rank 0 if there are two models; otherwise empty.
    """

    data: DataSettings
    models: Sequence[EvaluatedModel]
    results: Sequence[Evaluation]
    notes: Sequence[str]
    class_names: dict[int, str]
    images: Any
    predictions: Predictions | None = None
    comparison: Comparison | None = None
    speeds: Sequence[Speed] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return the JSON result of each model."""
        preprocessing = self.models[0].settings
        rows = [_row(model, result, self.data, preprocessing) for model, result in zip(self.models, self.results)]
        for row, speed in zip(rows, self.speeds):
            row |= asdict(speed)  # replaces images_per_second with the speed without image loading
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON result of the validation."""
        rows = self.rows()
        if self.comparison is None:
            return rows[0]
        return {"models": rows, "paired": self.comparison.as_dict(), "notes": self.notes}

    def as_text(self) -> str:
        """Format the result of one model as one line, or of two models as a Markdown table."""
        if self.comparison is not None:
            return comparison_text(self.as_dict())
        name, result = self.models[0].settings.model, self.results[0]
        low, high = result.top1_interval
        line = (
            f"{name}: top-1 {result.top1:.2f}% (95% interval {low:.2f} to {high:.2f}), top-5 {result.top5:.2f}%, "
            f"loss {result.loss:.4f} on {result.images} images, {result.images_per_second:.0f} images/s"
        )
        return "; ".join([line, *self.notes, *_published_note(name, self.models[0].num_classes)])


def _row(model: EvaluatedModel, result: Evaluation, data: DataSettings, preprocessing: ModelSettings) -> dict[str, Any]:
    """Return the JSON result of a model. `preprocessing` has the settings of crop and interpolation that were used."""
    settings = model.settings
    return {
        "model": settings.model,
        "data_dir": data.data_dir,
        "dataset": data.dataset,
        "num_classes": model.num_classes,
        "img_size": settings.img_size,
        "crop_pct": preprocessing.crop_pct,
        "interpolation": preprocessing.interpolation,
        "mean": settings.mean,
        "std": settings.std,
        "crop_mode": preprocessing.crop_mode,
        "split": data.split,
        "model_kwargs": settings.model_kwargs,
        "checkpoint": settings.checkpoint,
        "use_ema": settings.use_ema,
        "weights": (settings.checkpoint or "pretrained") + ", EMA weights" * settings.use_ema,
        "parameters": model.parameters,
        "images": result.images,
        "unreadable": result.unreadable,
        "top1": result.top1,
        "top1_interval": result.top1_interval,
        "top5": result.top5,
        "loss": result.loss,
        "images_per_second": result.images_per_second,
        "published": published_for(settings.model) if model.num_classes == IMAGENET_CLASSES else {},
    }


def _published_note(name: str, num_classes: int) -> list[str]:
    if num_classes != IMAGENET_CLASSES:
        return []
    peers = [
        f"{peer} {accuracy.top1}" + (f" (top-5 {accuracy.top5})" if accuracy.top5 else "")
        for peer, accuracy in published_for(name).items()
    ]
    return ["published top-1 on ImageNet-1k: " + ", ".join(peers)] if peers else []
