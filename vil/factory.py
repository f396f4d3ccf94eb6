"""Creation of models from names and weights, with errors that a user can act on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from .checkpoint import Checkpoint
from .config import ConfigError
from .distributed import warn_on_rank0
from .initial_weights import describe_initialization, first_blocks, fit_head, num_classes_of
from .models.tokens import resample_pos_embed
from .models.vision_longhorn import VisionLonghorn
from .state_dicts import fitted, load_weights, parts_of
from .text import nearest, one_line, printable


def from_checkpoint(
    path: str | Path | Checkpoint, model: str | None = None, *, use_ema: bool | None = None, **arguments: Any
) -> nn.Module:
    """Load a trained model on the CPU in eval mode, with its preprocessing and class names.

    `timm.data.resolve_model_data_config(model)` returns the size, mean, standard deviation, crop and interpolation of
    its images, as `validate.py` prepares them. `model.pretrained_cfg["label_names"]` are the class names by index, if
    the file stores them.

    Args:
        path: A checkpoint of train_imagenet.py or a file or folder of weights of `vil.export`, which store the model's
            name and arguments, or any other file of weights.
        model: timm's name of the model, if the file does not store it.
        use_ema: Load the EMA weights. None loads them if the file says that they are better (best.pt does).
        arguments: Keyword arguments of the model that override those of the file. `img_size` adapts the model to
            another image size; `num_classes=0` removes the head, so that the model returns pooled features.

    Raises:
        ConfigError: The file does not store its model's name and `model` is not given, the model is unknown, or it does
            not support the arguments.
        CheckpointError: The file is missing or corrupt, or has another architecture or number of classes.
    """
    source = Checkpoint.of(path)
    name = model or source.options.get("model")
    if not name:
        call = f"vil.from_checkpoint({str(source)!r}, 'vim_tiny')"
        raise ConfigError(f"{source} does not store its model's name: pass the name, {call}")
    arguments = saved_arguments(source.options) | arguments
    without_head = arguments.get("num_classes") == 0
    if without_head:  # load the model with the file's head first
        arguments["num_classes"] = source.options.get("num_classes") or num_classes_of(name, source.weights())
    if use_ema is None:
        use_ema = bool(source.ema_is_best)

    loaded: Any = load_model(name, source, use_ema, **arguments).eval()
    if without_head:
        loaded.reset_classifier(0)
    loaded.pretrained_cfg = loaded.default_cfg = _pretrained_cfg(loaded, source, arguments)
    return loaded


def saved_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that build the model of a run with these options."""
    sizes = {name: options[name] for name in ("num_classes", "img_size") if options.get(name)}
    return sizes | _model_kwargs(options)


def _model_kwargs(options: dict[str, Any]) -> dict[str, Any]:
    return options.get("model_kwargs") or {}


def _pretrained_cfg(model: Any, source: Checkpoint, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return timm's pretrained config of a model with the preprocessing and class names of its checkpoint."""
    config = {name: value for name, value in model.pretrained_cfg.items() if not name.startswith("test_")}
    channels, *size = config["input_size"]
    channels = arguments.get("in_chans") or channels
    size = to_2tuple(arguments.get("img_size") or size)
    config |= {"input_size": (channels, *size), "num_classes": model.num_classes}
    config |= {name: source.options[name] for name in ("crop_pct", "interpolation") if source.options.get(name)}
    config |= source.preprocessing
    for name in ("mean", "std"):
        if len(config[name]) == 1:
            config[name] = list(config[name]) * channels
    if source.label_names and len(source.label_names) == model.num_classes:
        config["label_names"] = source.label_names
    return config


def load_model(model: str, path: str | Path | Checkpoint, use_ema: bool = False, **arguments: Any) -> nn.Module:
    """Create timm's model of this name with all of its weights from a file.

    Raises:
        ConfigError: There is no such model, or it does not accept the arguments.
        CheckpointError: The file is missing or corrupt, or has another architecture or number of classes.
    """
    source = Checkpoint.of(path)
    weights = _adapted(model, arguments, source.weights(use_ema), source)
    with torch.device("meta"):  # reject a file that claims more than it holds before allocating memory
        load_weights(create_model(model, **arguments), weights, source.path)
    loaded = create_model(model, **arguments)
    load_weights(loaded, weights, source.path)
    return loaded


def create_model(
    model: str,
    pretrained_path: str | Path | Checkpoint | None = None,
    *,
    label_names: Sequence[str] = (),
    **arguments: Any,
) -> nn.Module:
    """Create timm's model of this name, initialized with the weights in a file if one is given.

    The file's head is kept if it has as many classes as the model. If the class names in the file and `label_names` are
    the same in another order, the head's rows are reordered; if they are other classes, the head is new. Position
    embeddings and patches are resampled. If `depth` is less than the file's, the model has the file's first blocks.

    Args:
        model: timm's name.
        pretrained_path: File of weights, or its content.
        label_names: Class names of the data by index; empty if unknown.
        arguments: The model's.

    Raises:
        ConfigError: There is no such model, it does not take the arguments, or it does not fit the weights.
        CheckpointError: The file is missing or corrupt.
    """
    if pretrained_path:
        return _initialized(model, arguments, Checkpoint.of(pretrained_path), label_names)
    try:
        return _create(model, arguments)
    except Exception as error:  # unexpected arguments raise various types
        raise _creation_error(model, error) from error


def _initialized(model: str, arguments: dict[str, Any], source: Checkpoint, label_names: Sequence[str]) -> nn.Module:
    """Create a model that is initialized with the weights of a file, as far as they fit."""
    given = first_blocks(source.weights(), arguments.get("depth"))
    weights = _adapted(model, arguments, given, source, is_start=True)
    weights, head = fit_head(model, weights, source.label_names if label_names else (), label_names)
    overlay = {"state_dict": weights, "num_classes": num_classes_of(model, weights) or -1}  # timm adds a head for -1
    try:
        created = _create(model, arguments, pretrained=True, pretrained_cfg_overlay=overlay)
        own = created.state_dict().keys()
        common = fitted(weights, created).keys() & own
        if 2 * len(common) < len(own):  # timm would continue
            raise RuntimeError(f"{len(common)} of its {len(own)} tensors are in {source}")
    except Exception as error:  # unexpected arguments raise various types
        raise _creation_error(model, error, source, given) from error
    taken = printable(describe_initialization(created, weights, given))
    warn_on_rank0(__name__, "started from %s: %s%s", source, taken, printable(head))
    return created


def _create(model: str, arguments: dict[str, Any], **start: Any) -> nn.Module:
    """Create timm's model without arguments that it does not support but that change nothing."""
    try:
        created: Any = timm.create_model(model, **arguments | start)
        # an attribute instead of a config entry, because timm could not read configs that its push_to_hf_hub writes
        # with it
        created.model_args = arguments
        return created
    except TypeError as error:  # ResNet and similar models accept images of any size, and no img_size argument
        unknown = [name for name in ("img_size", "drop_path_rate") if name in arguments and f"'{name}'" in str(error)]
        if not unknown:
            raise
        if unknown == ["drop_path_rate"] and arguments["drop_path_rate"]:
            raise TypeError("the model does not support stochastic depth: set --drop-path 0") from error
    return _create(model, {name: value for name, value in arguments.items() if name not in unknown}, **start)


def _creation_error(
    model: str, error: Exception, source: Checkpoint | None = None, weights: dict[str, Tensor] | None = None
) -> ConfigError:
    """Return the error that explains why a model could not be created, with a remedy.

    Args:
        model: timm's name of the model.
        error: The original error.
        source: File of weights from which the model was to be initialized.
        weights: State dict of the file.
    """
    if not isinstance(error, RuntimeError):
        return ConfigError(f"cannot create the model {model}: {type(error).__name__}: {error}")
    reason = printable(one_line(error, 2000) + parts_of(weights or ()))  # the error may contain names of tensors
    remedy = ""
    if not timm.is_model(model):
        remedy = nearest(model, timm.list_models()) or "; timm.list_models() has those that there are"
    return ConfigError(f"cannot create the model {model}: {reason}{remedy}{_how_it_was_built(source)}")


def _how_it_was_built(source: Checkpoint | None) -> str:
    """Return the options that build the model of a file, if the file stores them."""
    options = _saved_options(source) if source else {}
    if "model" not in options:
        return ""
    not_of_weights = ("img_size", "drop_rate", "drop_path_rate")
    arguments = {name: value for name, value in _model_kwargs(options).items() if name not in not_of_weights}
    words = ["--model", options["model"]]
    if arguments:
        words += ["--model-kwargs", *(f"{name}={json.dumps(value)}" for name, value in arguments.items())]
    return "; it was built with " + shlex.join(words)


def _saved_options(source: Checkpoint) -> dict[str, Any]:
    """Return the options in a file, or none if the file has options that it may not have."""
    with suppress(ConfigError):
        return source.options
    return {}


def _adapted(
    model: str, arguments: dict[str, Any], weights: dict[str, Tensor], source: Checkpoint, is_start: bool = False
) -> dict[str, Tensor]:
    """Resample the position embeddings to the model's patch grid if the file stores its own grid, which need not be
    square.

    Pooled and other models have interchangeable weights but compute different functions. Initializing a model with
    weights of the other kind (`is_start`) logs a warning.

    Raises:
        ConfigError: All weights of a pooled model would be loaded into another model, or vice versa.
    """
    options = _saved_options(source)
    positions = weights.get("pos_embed")
    if "model" not in options or positions is None:
        return weights
    with torch.device("meta"):
        built = create_model(options["model"], **{"img_size": options.get("img_size"), **_model_kwargs(options)})
        target = create_model(model, **arguments)
    if not isinstance(built, VisionLonghorn) or not isinstance(target, VisionLonghorn):
        return weights

    if built.pooled != target.pooled:
        difference = f"{source} is of {options['model']}, whose scans read other tokens than those of {model}"
        if not is_start:
            raise ConfigError(f"{difference}: name {options['model']}")
        warn_on_rank0(__name__, "%s: weights of the same kind of model are a better start", difference)
    if positions.shape != built.pos_embed.shape:
        return weights
    positions = positions.to(target.pos_embed.dtype)
    resampled = resample_pos_embed(positions, target.patch_embed.grid_size, built.patch_embed.grid_size)
    return weights | {"pos_embed": resampled}
