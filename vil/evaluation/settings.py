"""Settings of a validation. Options of the command line take precedence over options stored in the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..config import ConfigError
from ..data.sources.layout import Layout, find_layout
from ..data.sources.split_paths import WHOLE, split_in
from ..security.checkpoint_options import confirm_dataset

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSettings:
    """Data to evaluate on: a folder or timm dataset, the split, and optionally only a held-out share of the split.

    Attributes:
        val_fraction: Share of each class that training held out of the split; None evaluates the whole split.
        apply_exif_orientation: Whether to rotate images by their EXIF orientation.
    """

    data_dir: str | None
    dataset: str
    split: str
    val_fraction: float | None = None
    apply_exif_orientation: bool = False

    @property
    def images(self) -> str:
        """Name of the evaluated images, for messages and titles."""
        if self.val_fraction:
            return "held-out images"
        return "all images" if self.split == WHOLE else self.split


@dataclass(frozen=True)
class ModelOptions:
    """Command-line options of one model. None means that the value in the checkpoint is used."""

    model: str | None = None
    checkpoint: str | None = None
    use_ema: bool | None = None
    num_classes: int | None = None
    img_size: int | tuple[int, int] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSettings:
    """Model, weights and preprocessing of an evaluation. None means that the model's default is used.

    Attributes:
        model: Model name in timm.
        checkpoint: Path of the weights file; None for the model's pretrained weights.
        source: Content of the weights file.
    """

    model: str
    checkpoint: str | None
    source: Checkpoint | None
    use_ema: bool
    num_classes: int | None
    img_size: int | tuple[int, int] | None
    crop_pct: float | None
    crop_mode: str | None
    interpolation: str | None
    mean: list[float] | None
    std: list[float] | None
    model_kwargs: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for creating the model."""
        sizes = {"num_classes": self.num_classes, "img_size": self.img_size}
        return {name: value for name, value in sizes.items() if value} | dict(self.model_kwargs)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Options that override the model's timm data config, as keyword arguments of `data_config_of`."""
        names = ("img_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")
        return {name: getattr(self, name) for name in names}

    @property
    def note_on_weights(self) -> str:
        """Note about the use of raw or EMA weights, which is empty if the checkpoint has only raw weights."""
        return self.source.note_on_weights(self.use_ema) if self.source else ""

    @property
    def owner(self) -> str:
        """Description of the source of the model's class names, for messages."""
        return str(self.source or self.model)


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation.

    Attributes:
        batch_size: Batch size of each process.
        workers: Number of workers of each process; None chooses the number by the available cores.
        amp: Whether to run under bf16 autocast on GPUs.
        real_labels: JSON file of ReaL labels; "" for timm's ReaL labels, None for the labels of the split.
        keep_predictions: Whether to return predictions even for a single model without ReaL labels.
    """

    batch_size: int
    workers: int | None
    amp: bool
    real_labels: str | None
    keep_predictions: bool


def resolve_data(
    data_dir: str | None,
    dataset: str | None,
    split: str | None,
    source: Checkpoint | None,
    apply_exif_orientation: bool | None = None,
) -> DataSettings:
    """Return the split given on the command line, otherwise the validation split of the run in the checkpoint.

    If the run held out images of its data folder for validation, only the held-out images are evaluated. If another
    folder is given that has only class folders, all images are evaluated.

    Raises:
        ConfigError: The data folder stored in the checkpoint does not exist, the stored dataset must be confirmed on
            the command line, or the folder has no validation split and no class folders.
    """
    saved = source.options if source else {}
    saved_rotation = saved.get("apply_exif_orientation", False)
    data = DataSettings(
        data_dir=saved.get("data_dir") if data_dir is None else data_dir,
        dataset=(saved.get("dataset") if dataset is None else dataset) or "",
        split=split or saved.get("val_split", "validation"),
        apply_exif_orientation=saved_rotation if apply_exif_orientation is None else apply_exif_orientation,
    )
    if not data_dir and not data.dataset and not Path(data.data_dir or ".").is_dir():
        raise ConfigError(f"data_dir {data.data_dir} stored in {source} does not exist on this machine: set --data-dir")
    confirm_dataset({"dataset": data.dataset}, {"dataset": dataset, "data_dir": data_dir}, str(source))
    if split or data.dataset or not data.data_dir:
        return data
    return _find_images(data, data.data_dir, source)


def _find_images(data: DataSettings, folder: str, source: Checkpoint | None) -> DataSettings:
    """Choose which images of a folder to evaluate: those that training held out, the validation split, or all."""
    saved = source.options if source else {}
    fraction = saved.get("val_fraction")
    has_split = Path(folder).is_dir() and split_in(Path(folder), data.split) is not None
    if has_split and not (fraction and _is_same(folder, saved.get("data_dir"))):
        return data
    layout = find_layout(folder)
    is_split_alike = layout.train_split == saved.get("train_split")
    if source and fraction and is_split_alike and _is_folder_of_run(layout, fraction, source):
        return replace(data, data_dir=layout.data_dir, split=layout.train_split, val_fraction=fraction)
    split = layout.val_split or (WHOLE if layout.train_split == WHOLE else data.split)
    return replace(data, data_dir=layout.data_dir, split=split)


def _is_folder_of_run(layout: Layout, fraction: float, source: Checkpoint) -> bool:
    """Return whether a run trained on a folder. A moved folder is recognized by its number of training images."""
    count = layout.num_images - layout.count_held_out(fraction)
    expected = source.content.get("num_images")
    if count == expected:
        return True
    if not _is_same(layout.data_dir, source.options.get("data_dir")):
        return False
    if expected:
        _logger.warning(
            "%s has changed since training (%d training images, was %d): some of the held-out images may have been "
            "trained on", layout.data_dir, count, expected,
        )  # fmt: skip
    return True


def _is_same(folder: str, other: str | None) -> bool:
    return Path(folder).resolve() == Path(other or "").resolve()


def resolve_model(given: ModelOptions, source: Checkpoint | None, option: str = "--model") -> ModelSettings:
    """Combine the command-line options of a model with the options stored in the checkpoint.

    Args:
        given: Command-line options of the model.
        source: Content of the checkpoint, if one is given.
        option: Command-line option for the model name, for messages.

    Raises:
        ConfigError: Neither the command line nor the checkpoint specifies the model's name.
    """
    saved = source.options | source.preprocessing if source else {}
    name = saved.get("model") if given.model is None else given.model
    if not name and source is None:
        raise ConfigError(f"no model is given: set --checkpoint FILE or {option} NAME for pretrained weights")
    if not name:
        raise ConfigError(f"{option} is required, because {source} does not store the model's name")
    saved_kwargs = dict(saved.get("model_kwargs") or {})
    if given.img_size:
        saved_kwargs.pop("img_size", None)
    return ModelSettings(
        model=name,
        checkpoint=given.checkpoint,
        source=source,
        use_ema=source.prefers_ema(given.use_ema) if source else bool(given.use_ema),
        num_classes=saved.get("num_classes") if given.num_classes is None else given.num_classes,
        img_size=saved.get("img_size") if given.img_size is None else given.img_size,
        crop_pct=saved.get("crop_pct") if given.crop_pct is None else given.crop_pct,
        crop_mode=saved.get("crop_mode"),
        interpolation=saved.get("interpolation") if given.interpolation is None else given.interpolation,
        mean=saved.get("mean"),
        std=saved.get("std"),
        model_kwargs=saved_kwargs | dict(given.model_kwargs),
    )


def with_sizes_of(settings: ModelSettings, first: ModelSettings) -> ModelSettings:
    """Fill in the number of classes and the image size from the first model's settings if `settings` lacks them."""
    return replace(
        settings,
        num_classes=settings.num_classes or first.num_classes,
        img_size=settings.img_size or first.img_size,
    )
