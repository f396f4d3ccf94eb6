"""Choice of splits, weights and recipe for a folder of images.

`choose_recipe` chooses the recipe, and `_choose_start` chooses the model and weights. The recipes and weights for CPUs
were designed with the measurements in research/small_recipes.md.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
from timm.layers import to_2tuple

from ..checkpoint import Checkpoint, options_to_restart, options_to_resume
from ..classes import quoted
from ..config import ConfigError
from ..config.values import checked, override, read_yaml
from ..data.held_out import SHARE
from ..data.sources.class_folders import ClassReader
from ..data.sources.layout import Layout, find_layout, unused_splits
from ..data.sources.split_paths import WHOLE, split_in
from ..data.sources.splits import count_images, open_split
from ..devices import known_device
from ..distributed import warn_on_rank0
from ..models.shipped import TAG, file_of
from ..text import counted
from ..weight_files import BrokenCheckpointError

FINETUNE = Path(__file__).parents[1] / "configs" / "finetune.yaml"
MODEL = "vil_tiny_pooled"
PACKAGED_WIDTH, PACKAGED_DEPTH = 192, 24  # embed_dim and depth of the weights in the package
MOST_IMAGES = 100_000  # a run with more training images uses the default recipe, and random weights if none are given

BATCH_SIZES = (4, 8, 16, 32)
STEPS_PER_EPOCH = 12  # minimum number of steps per epoch, if the smallest batch size permits
STEPS = {"cpu": 500, "gpu": 5000}  # target number of optimizer steps; the limits in EPOCHS take precedence
EPOCHS = {"cpu": (10, 60), "gpu": (20, 100)}  # minimum and maximum number of epochs
# Learning rate at a batch size of at least BATCH_SIZES[-1]. For smaller batches, the learning rate is proportional to
# the square root of the batch size.
LR = 1e-3
# Because CPUs are slower, a run on a CPU has a third of the patches per image and half of the blocks of a run on a GPU.
IMG_SIZE = {"cpu": 64, "gpu": 224}
BLOCKS = {"cpu": 12, "gpu": 24}


def choose_recipe(num_images: int, device: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the recipe that override the config `finetune`, except options that the user has set.

    Args:
        num_images: Number of training images.
        device: "cpu" or "gpu".
        given: Options of the user, by name.
    """
    largest = max([size for size in BATCH_SIZES if size <= num_images / STEPS_PER_EPOCH], default=BATCH_SIZES[0])
    batch_size = given.get("global_batch_size", max(1, min(largest, num_images)))
    fewest, most = EPOCHS[device]
    enough = math.ceil(STEPS[device] / max(1, num_images // batch_size))
    epochs = given.get("epochs", min(most, max(fewest, enough)))
    shortest = min(phase.get("epochs", epochs) for phase in given.get("phases") or [{}])
    lr = LR * math.sqrt(min(1, batch_size / BATCH_SIZES[-1]))
    recipe = {
        "epochs": epochs,
        "global_batch_size": batch_size,
        "lr": float(f"{lr:.1g}"),
        "warmup_epochs": shortest // 10,
        "apply_exif_orientation": True,
    }
    return {name: value for name, value in recipe.items() if name not in given}


def complete_options(given: Mapping[str, Any], has_config: bool) -> dict[str, Any]:
    """Add options that the user has not given for a run on a folder of images, and log the choices.

    Args:
        given: Options of the user, by name.
        has_config: Whether `given` contains a config file's options. If so, only the splits are chosen.

    Returns:
        The given and the chosen options. `data_dir` is the folder that contains the splits or class folders.

    Raises:
        ConfigError: The classes of the images cannot be inferred from the folder (see `find_layout`), or the run
            folder would be among the class folders.
        CheckpointError: The checkpoint in the run folder or the file in `pretrained_path` cannot be read.
    """
    if not given.get("data_dir") or given.get("dataset") or given.get("synthetic"):
        return dict(given)
    # The user has made all choices, so the files need not be listed, which would take minutes for ImageNet.
    if has_config and _has_splits(given):
        return dict(given)
    layout = _layout(given)
    if not has_config:
        given = {**given, "experiment": given.get("experiment") or Path(given["data_dir"]).resolve().name or "images"}
        if given.get("resume") == "auto" and (saved := _options_of_run(given)):
            return override(saved, {**given, "data_dir": layout.data_dir})
    _check_output(layout, given)

    chosen = _choose_splits(layout, given)
    if not has_config:
        share = given.get("val_fraction") or chosen.get("val_fraction")
        num_held_out = layout.count_held_out(share) if share else 0
        chosen |= _choose_training(layout.num_images - num_held_out, given)
    return override(chosen, {**given, "data_dir": layout.data_dir})


def _has_splits(given: Mapping[str, Any]) -> bool:
    """Return whether the training split is given, or the data folder has both splits under their usual names."""
    root = Path(given["data_dir"])
    if "train_split" in given or not root.is_dir():
        return "train_split" in given
    return bool(split_in(root, "train") and split_in(root, "validation"))


def _layout(given: Mapping[str, Any]) -> Layout:
    """Return the layout of the data folder. If the training split is given, the folder is not searched for splits."""
    if "train_split" not in given:
        try:
            return find_layout(given["data_dir"], reject_splits=True)
        except OSError as error:
            raise ConfigError(f"cannot read the folder {given['data_dir']}: {error}") from error
    train = open_split(given["data_dir"], "", given["train_split"])
    sizes = Counter(train.reader.targets).values() if isinstance(train.reader, ClassReader) else [count_images(train)]
    return Layout(given["data_dir"], given["train_split"], "validation", tuple(sizes))


def _options_of_run(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options in the newest readable checkpoint of the run folder, or in config.yaml without a checkpoint.

    If the run folder has neither a checkpoint nor config.yaml, the result is None.
    """
    folder = Path(given.get("output", "output")) / given["experiment"]
    for path in (folder / "last.pt", folder / "previous.pt"):
        with suppress(BrokenCheckpointError):
            if path.is_file():
                return options_to_resume(str(path), dict(given))
    config = folder / "config.yaml"
    if not config.is_file():
        return None
    warn_on_rank0(__name__, "using the options in %s", config)
    return options_to_restart(str(config), dict(given))


def _check_output(layout: Layout, given: Mapping[str, Any]) -> None:
    """Raise a ConfigError if the run folder is inside a folder of class folders, and would be read as a class."""
    output = Path(given.get("output", "output")).resolve()
    data_dir = Path(layout.data_dir).resolve()
    if layout.train_split == WHOLE and output.is_relative_to(data_dir):
        raise ConfigError(
            f"--output must be outside {data_dir}, got {output}: images that the run writes would be read as a class"
        )


def _choose_splits(layout: Layout, given: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the training split and, if there is no validation split, a held-out fraction. Log the chosen images."""
    chosen: dict[str, Any] = {"train_split": layout.train_split}
    root = Path(layout.data_dir)
    train = None if layout.train_split == WHOLE else split_in(root, layout.train_split)
    classes = counted(len(layout.class_sizes), "class", "classes")
    line = f"{train or root}: {counted(layout.num_images, 'image')} of {classes}"
    if share := given.get("val_fraction"):
        line += f"; {share:.0%} of each class are held out for validation (set --val-fraction)"
    elif layout.val_split or "val_split" in given:
        split = str(given.get("val_split") or layout.val_split)
        line += f"; validation on {split_in(root, split) or repr(split)} (set --val-split)"
    else:
        chosen["val_fraction"] = SHARE
        line += f"; no validation split, so {SHARE:.0%} of each class are held out for validation (set --val-fraction)"
        if train and (unused := unused_splits(root, train, Path(given.get("output", "output")))):
            flags = shlex.join(["--val-split", unused[0]])
            line += f"; not used: {quoted(unused)} (to validate on {unused[0]!r}, set {flags})"
    warn_on_rank0(__name__, "%s", line)
    return chosen


def _choose_training(num_images: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return and log the options of model, weights and recipe."""
    if num_images > MOST_IMAGES:
        weights = given.get("pretrained_path") or ("timm's" if given.get("pretrained") else "random") + " weights"
        warn_on_rank0(
            __name__, "more than %d training images, so training starts from %s with the default options, ViM's recipe "
            "for ImageNet (set -c CONFIG, or --pretrained-path)", MOST_IMAGES, weights,
        )  # fmt: skip
        return {}
    device = "cpu" if known_device(given.get("device")) == "cpu" else "gpu"
    start = _choose_start(given, device)
    recipe = choose_recipe(num_images, device, given)
    if flags := _as_flags(_not_given(start, given)):
        is_random = start.get("pretrained_path", "") is None
        hint = "; for timm's weights, set --pretrained" if timm.is_model_pretrained(start.get("model", "")) else ""
        note = f" (random weights, because the package has no weights that fit this model{hint})" if is_random else ""
        warn_on_rank0(__name__, "%s", f"model and weights: {flags}{note}")
    line = f"recipe for {num_images} training images on a {device.upper()}: -c finetune {_as_flags(recipe)}"
    warn_on_rank0(__name__, "%s", line)
    warn_on_rank0(__name__, "each of these options can be set on the command line; -c CONFIG replaces the whole recipe")
    return {**checked(read_yaml(str(FINETUNE)), str(FINETUNE)), **start, **recipe}


def _not_given(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chosen options without those that the user has given, also inside `model_kwargs`."""
    options = {name: value for name, value in chosen.items() if name not in given}
    if given.get("model_kwargs") is not None:
        arguments = chosen.get("model_kwargs", {}).items()
        kwargs = {name: value for name, value in arguments if name not in given["model_kwargs"]}
        options |= {"model_kwargs": kwargs} if kwargs else {}
    return options


def _choose_start(given: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the options of the model and of the initial weights."""
    path = given.get("pretrained_path")
    if path and not file_of(path):
        saved = Checkpoint(path, whole=False).options
        if not (saved.get("model") or given.get("model")):
            raise ConfigError(
                f"{path} does not store the name of its model: set --model, and --model-kwargs if the model has other "
                "arguments than its default"
            )
        return {name: saved[name] for name in ("model", "img_size", "model_kwargs") if saved.get(name)}
    model = given.get("model", (path or MODEL).removesuffix(f".{TAG}"))
    if not file_of(model) or not (path or _has_packaged_size(given)):
        return {"model": model} if given.get("pretrained") else {"model": model, "pretrained_path": None}
    img_size = given.get("img_size") or IMG_SIZE[device]
    patch_size = 8 if max(to_2tuple(img_size)) < 128 else 16
    kwargs = {"patch_size": patch_size, "depth": BLOCKS[device]}
    weights = f"{model.removesuffix(f'.{TAG}')}.{TAG}"
    return {"model": model, "pretrained_path": weights, "img_size": img_size, "model_kwargs": kwargs}


def _has_packaged_size(given: Mapping[str, Any]) -> bool:
    """Return whether weights in the package fit the given embed_dim and depth, if any."""
    arguments = given.get("model_kwargs") or {}
    return arguments.get("embed_dim", PACKAGED_WIDTH) == PACKAGED_WIDTH and arguments.get("depth", 1) <= PACKAGED_DEPTH


def _as_flags(options: Mapping[str, Any]) -> str:
    """Return options as flags and values of the command line, such as "--epochs 20"."""
    words = []
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, dict):
            words += [f"{key}={setting}" for key, setting in value.items()]
        elif value is not True:
            words.append("none" if value is None else str(value))
    return shlex.join(words)
