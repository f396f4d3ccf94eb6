"""Validation of the training options and preprocessing stored in an untrusted checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import timm
from timm.layers import to_2tuple

from ..config.options import DATASETS, FIELDS, MOST_PIXELS, choices_of_options
from ..config.values import convert
from ..errors import CheckpointError, ConfigError
from ..models import vision_longhorn as _registered  # noqa: F401  registers the models with timm
from ..models.shipped import file_of
from ..text import nearest, shown

# options that an untrusted checkpoint must not set, because they select paths, downloads, the device or loggers
NOT_FROM_CHECKPOINTS = {
    "output", "experiment", "resume", "pretrained", "pretrained_path", "teacher_checkpoint", "device",
    "log_tensorboard", "log_wandb",
}  # fmt: skip
# model arguments that a checkpoint may set, with the maximum or the valid strings of each argument
MODEL_KWARGS: dict[str, int | tuple[str, ...]] = {
    "embed_dim": 8192, "depth": 512, "patch_size": 512, "stride": 512, "in_chans": 1024, "dynamic_img_size": 1,
    "drop_rate": 1, "drop_path_rate": 1, "img_size": MOST_PIXELS, "global_pool": ("", "token", "avg"),
    "num_heads": 512, "mlp_ratio": 64, "qkv_bias": 1,  # arguments of ViT-like models such as DeiT
}  # fmt: skip
MOST_CLASSES = 10**6
MOST_RESIZED = 2**14  # maximum height or width of the resized image before the crop, in pixels
MOST_PHASES = 100
LARGEST = 1e6  # maximum magnitude of the mean and std for pixel values between 0 and 1
CROP_MODES = "center", "squash", "border"


def options_of_checkpoint(values: Any, path: str | Path) -> dict[str, Any]:
    """Return the validated options of a checkpoint, without the options in `NOT_FROM_CHECKPOINTS`.

    The returned options select no files except a local data folder and its splits, so that an untrusted checkpoint
    cannot select other files or programs of the user who loads the checkpoint.

    Raises:
        ConfigError: An option has a wrong type or is out of range, or names a model, argument, path or split that a
            checkpoint must not name.
    """
    source = f"the checkpoint {path}"
    if not isinstance(values, dict):
        raise ConfigError(f"the options in {source} must be a dict, got {type(values).__name__}")
    options = {
        name: convert(name, value, source)
        for name, value in values.items()
        if name in FIELDS and name not in NOT_FROM_CHECKPOINTS
    }
    _check_models(options, source)
    _check_model_kwargs(options.get("model_kwargs") or {}, source)
    _check_choices(options, source)
    _check_sizes(options, source)
    _check_data(options, source)

    phases = options.get("phases") or []
    if len(phases) > MOST_PHASES:
        raise ConfigError(f"{source} must have at most {MOST_PHASES} phases, got {len(phases)}")
    for phase in phases:
        options_of_checkpoint({**values, "phases": None, **phase}, path)

    if options.get("dataset"):  # the user must specify the folder of shards or of a hub dataset
        options.pop("data_dir", None)
    return options


def _check_models(options: dict[str, Any], source: str) -> None:
    for name in ("model", "teacher"):
        model = options.get(name)
        if model is not None and not (re.fullmatch(r"[\w.]+", model) and timm.is_model(model)):
            raise ConfigError(f"{source} has {name} {shown(model)}, which is not a model of timm or this package")


def _check_model_kwargs(arguments: dict[str, Any], source: str) -> None:
    for name, value in arguments.items():
        allowed = MODEL_KWARGS.get(name)
        if allowed is None:
            known = ", ".join(MODEL_KWARGS)
            raise ConfigError(
                f"{source} has the model argument {shown(name)}, but a checkpoint may only set {known}"
                f"{nearest(name, MODEL_KWARGS)}"
            )
        if isinstance(allowed, tuple):
            if value not in allowed:
                words = ", ".join(map(repr, allowed))
                raise ConfigError(f"{source} has {name} {shown(value)}, but {name} must be one of {words}")
            continue
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if len(numbers) > 2 or not all(isinstance(n, (int, float)) and 0 <= n <= allowed for n in numbers):
            raise ConfigError(
                f"{source} has {name} {shown(value)}, but {name} must be one or two numbers between 0 and {allowed}"
            )


def _check_choices(options: dict[str, Any], source: str) -> None:
    for name, choices in choices_of_options().items():
        if options.get(name) is not None and options[name] not in choices:
            raise ConfigError(
                f"{name} in {source} must be a supported value such as {choices[0]}, got {shown(options[name])}"
            )


def _check_sizes(options: dict[str, Any], source: str) -> None:
    side = max(to_2tuple(options.get("img_size") or 224))
    num_classes = options.get("num_classes") or 0
    for name, value, most in (("num_classes", num_classes, MOST_CLASSES), ("img_size", side, MOST_PIXELS)):
        if value > most:
            raise ConfigError(f"{source} has {name} {options[name]}, but {name} must be at most {most}")
    if side > MOST_RESIZED * (options.get("crop_pct") or 1):
        raise ConfigError(
            f"{source} has crop_pct {options['crop_pct']}, which would resize images to a height or width of more than "
            f"{MOST_RESIZED} pixels"
        )


def _check_data(options: dict[str, Any], source: str) -> None:
    dataset = options.get("dataset", "")
    if not re.fullmatch(rf"|({'|'.join(DATASETS)})/[\w./-]+(:[\w.*-]+)?", dataset, re.IGNORECASE):
        names = ", ".join(f"{reader}/NAME" for reader in DATASETS)
        raise ConfigError(f"{source} has dataset {shown(dataset)}, but dataset must be empty or one of {names}")
    for name in ("train_split", "val_split"):
        if not _is_plain_split(options.get(name, "x"), dataset):
            raise ConfigError(
                f"{name} in {source} must be a relative path without .., of at most 200 letters, digits, spaces and "
                f". _ + - /, got {shown(options[name])}"
            )
    data_dir = options.get("data_dir") or ""
    if not dataset and re.search(r"^pipe:|://|[\0-\x1f]", data_dir):
        raise ConfigError(f"{source} has data_dir {shown(data_dir)}, but data_dir must be the path of a local folder")


def _is_plain_split(split: str, dataset: str) -> bool:
    """Return whether a split is a plain path such as a/b, with no suffix except those of its dataset reader."""
    if len(split) > 200:
        return False
    if split == "." and not dataset:  # the split "." is the data folder itself
        return True
    if dataset.lower().startswith("wds/"):
        # allow a number of images and a range of shards, as in x-{0000..0099}.tar|50000
        split = re.sub(r"\|\d{1,12}$", "", split)
        split = re.sub(r"\{0*\d{1,5}\.\.0*\d{1,5}\}", "0", split, count=1)
    elif dataset:  # allow a slice of a split, such as train[:10%]
        split = re.sub(r"\[[\d:%]*\]", "", split)
    return all(re.fullmatch(r"[\w .+-]+", name) and name.strip(".") for name in split.split("/"))


def confirm_dataset(saved: dict[str, Any], given: dict[str, Any], path: str | Path) -> None:
    """Raise a ConfigError if a checkpoint selects shards or a hub dataset that the user has not confirmed."""
    dataset = saved.get("dataset")
    if not dataset or given.get("dataset") is not None or (dataset.startswith("wds/") and given.get("data_dir")):
        return
    confirmation = "--data-dir" if dataset.startswith("wds/") else f"--dataset {dataset}, and its --data-dir if any"
    raise ConfigError(
        f"the checkpoint {path} was trained on the dataset {dataset!r}: to read this dataset, set {confirmation}"
    )


def confirm_teacher(saved: dict[str, Any], given: dict[str, Any], path: str | Path) -> None:
    """Raise a ConfigError if a checkpoint names a teacher and the user has not set `teacher`."""
    teacher = saved.get("teacher")
    if teacher and "teacher" not in given:
        confirmation = f"--teacher {teacher}, and its --teacher-checkpoint if any"
        raise ConfigError(
            f"the checkpoint {path} was trained with the teacher {teacher!r}: to use this teacher, set {confirmation}"
        )


def confirm_weights(saved: dict[str, Any], given: dict[str, Any], path: str | Path) -> None:
    """Raise a ConfigError if a config.yaml names initial weights outside of the package that the user has not set."""
    weights = {**saved, **given}.get("pretrained_path")
    name = "pretrained_path" if weights else "pretrained"
    if name in given or not saved.get(name) or file_of(weights or ""):
        return
    source, flag = (weights, f"--pretrained-path {weights}") if weights else ("timm's weights", "--pretrained")
    raise ConfigError(
        f"the run with the options in {path} starts from {source}: to load these weights, set {flag}, or start another "
        "run with --experiment NAME"
    )


def check_preprocessing(values: dict[str, Any], path: str | Path, channels: int = 3) -> None:
    """Validate the mean, std, crop_mode, crop_pct and interpolation stored in a file. Missing values are skipped.

    Raises:
        CheckpointError: The mean or std is not a list of one number, or of one number per channel, or a number is out
            of range, or the crop mode is unknown.
        ConfigError: The crop_pct or interpolation is invalid (see `options_of_checkpoint`).
    """
    for name in ("mean", "std"):
        numbers = values.get(name, [0.5])
        is_valid = isinstance(numbers, list) and len(numbers) in (1, channels) and all(map(_is_moderate, numbers))
        if not is_valid or (name == "std" and min(numbers) < 1 / LARGEST):
            raise CheckpointError(
                f"{name} in {path} must be a list of one number, or of one number per channel, at most 1e6 in "
                f"magnitude (std at least 1e-6), got {str(numbers)[:100]}"
            )
    if values.get("crop_mode", "center") not in CROP_MODES:
        raise CheckpointError(
            f"crop_mode in {path} must be center, squash or border, got {str(values['crop_mode'])[:100]}"
        )
    options_of_checkpoint({name: values[name] for name in ("crop_pct", "interpolation") if name in values}, path)


def _is_moderate(number: Any) -> bool:
    return type(number) in (int, float) and abs(number) <= LARGEST
