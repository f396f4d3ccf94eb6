"""Validation of the options that an untrusted checkpoint may set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import timm
from timm.layers import to_2tuple

from ..text import nearest, shown
from .options import DATASETS, FIELDS, ConfigError, choices_of_options
from .values import convert

# options that an untrusted checkpoint must not set: where files are read and written, and with which programs
NOT_FROM_CHECKPOINTS = {
    "output", "experiment", "resume", "pretrained_path", "teacher_checkpoint", "device", "log_tensorboard", "log_wandb",
}  # fmt: skip
# model arguments that a checkpoint may set, with their maximum or their valid words
MODEL_KWARGS: dict[str, int | tuple[str, ...]] = {
    "embed_dim": 8192, "depth": 512, "patch_size": 512, "stride": 512, "in_chans": 1024, "dynamic_img_size": 1,
    "drop_rate": 1, "drop_path_rate": 1, "img_size": 8192, "global_pool": ("", "token", "avg"),
    "num_heads": 512, "mlp_ratio": 64, "qkv_bias": 1,  # arguments of DeiT and similar models
}  # fmt: skip
MOST_PHASES = 100
MOST_RESIZED = 2**14  # pixels of an image's side before the crop to img_size
PLAIN_NAMES = "letters, digits, spaces and . _ + - in names, which / joins"


def options_of_checkpoint(values: Any, path: str | Path) -> dict[str, Any]:
    """Return the options of a checkpoint that apply to whoever loads it, all of them plain names and numbers.

    Raises:
        ConfigError: An option has a wrong type, is out of range, or is a model, argument, path or split that a
            checkpoint must not name.
    """
    where = f"the checkpoint {path}"
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds {type(values).__name__} instead of options")
    known = {name: value for name, value in values.items() if name in FIELDS and name not in NOT_FROM_CHECKPOINTS}
    options = {name: convert(name, value, where) for name, value in known.items()}
    for name in ("model", "teacher"):
        model = options.get(name)
        if model is not None and not (re.fullmatch(r"[\w.]+", model) and timm.is_model(model)):
            raise ConfigError(f"{where} has {name} {shown(model)}, which is not a model of timm or this package")
    for name, value in (options.get("model_kwargs") or {}).items():
        if (allowed := MODEL_KWARGS.get(name)) is None:
            raise ConfigError(
                f"{where} has the model argument {shown(name)}, but a checkpoint may only set "
                + ", ".join(MODEL_KWARGS)
                + nearest(name, MODEL_KWARGS)
            )
        if isinstance(allowed, tuple):
            if value not in allowed:
                raise ConfigError(
                    f"{where} has {name} {shown(value)}, but it must be one of {', '.join(map(repr, allowed))}"
                )
            continue
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if len(numbers) > 2 or not all(isinstance(v, (int, float)) and 0 <= v <= allowed for v in numbers):
            raise ConfigError(f"{where} has {name} {shown(value)}, but it must be at most {allowed}")
    for name, choices in choices_of_options().items():
        if options.get(name) is not None and options[name] not in choices:
            raise ConfigError(f"{where} has {name} {shown(options[name])}, which is unknown")
    side = max(to_2tuple(options.get("img_size") or 224))
    for name, value, most in (("num_classes", options.get("num_classes") or 0, 10**6), ("img_size", side, 8192)):
        if value > most:
            raise ConfigError(f"{where} has {name} {options[name]}, but it must be at most {most}")
    if side > MOST_RESIZED * (options.get("crop_pct") or 1):
        raise ConfigError(
            f"{where} has crop_pct {options['crop_pct']}, which would resize images to more than {MOST_RESIZED} pixels"
        )
    phases = options.get("phases") or []
    if len(phases) > MOST_PHASES:
        raise ConfigError(f"{where} has {len(phases)} phases, but must have at most {MOST_PHASES}")
    for phase in phases:
        options_of_checkpoint({**values, "phases": None, **phase}, path)
    dataset = options.get("dataset", "")
    if not re.fullmatch(rf"|({'|'.join(DATASETS)})/[\w./-]+(:[\w.*-]+)?", dataset, re.IGNORECASE):
        raise ConfigError(f"{where} has dataset {shown(dataset)}, which is not a plain dataset name")
    for name in ("train_split", "val_split"):
        if not _is_plain_split(options.get(name, "x"), dataset):
            raise ConfigError(f"{where} has {name} {shown(options[name])}, which is not a plain name: {PLAIN_NAMES}")
    if dataset:  # data of a hub: whoever loads the checkpoint must say where they are stored
        options.pop("data_dir", None)
    if re.search(r"^pipe:|://|[\0-\x1f]", options.get("data_dir") or ""):
        raise ConfigError(f"{where} has data_dir {shown(options['data_dir'])}, which is not the path of a folder")
    return options


def _is_plain_split(split: str, dataset: str) -> bool:
    """Return whether a split consists of plain names joined by /, or has a suffix that its kind of dataset supports."""
    if len(split) > 200:
        return False
    if dataset.lower().startswith("wds/"):  # numbered shards and a number of images: x-{0000..0099}.tar|50000
        split = re.sub(r"\{0*\d{1,5}\.\.0*\d{1,5}\}", "0", re.sub(r"\|\d{1,12}$", "", split), count=1)
    elif dataset:  # a part of a split: train[:10%]
        split = re.sub(r"\[[\d:%]*\]", "", split)
    return all(re.fullmatch(r"[\w .+-]+", n) and n.strip(".") for n in split.split("/"))


def confirm_dataset(saved: dict[str, Any], given: dict[str, Any], path: str | Path) -> None:
    """Raise a ConfigError if only a checkpoint specifies that data are read from another source than a folder."""
    dataset = saved.get("dataset")
    if not dataset or given.get("dataset") is not None or (dataset.startswith("wds/") and given.get("data_dir")):
        return
    confirmation = "--data-dir" if dataset.startswith("wds/") else f"--dataset {dataset}, and its --data-dir if any"
    raise ConfigError(f"the checkpoint {path} was trained on the dataset {dataset!r}: to read it, set {confirmation}")


def confirm_teacher(saved: dict[str, Any], given: dict[str, Any], path: str | Path) -> None:
    """Raise a ConfigError if only a checkpoint specifies that a teacher's weights are downloaded."""
    teacher = saved.get("teacher")
    if teacher and "teacher" not in given:
        confirmation = f"--teacher {teacher}, and its --teacher-checkpoint if any"
        raise ConfigError(
            f"the checkpoint {path} was trained with the teacher {teacher!r}: to use it, set {confirmation}"
        )
