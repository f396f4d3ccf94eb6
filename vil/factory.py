"""Creation of models from names and weights, with errors that a user can act on."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config, resolve_model_data_config
from timm.layers import to_2tuple
from torch import Tensor, nn

from .checkpoint import Checkpoint, fitted, load_weights
from .classes import first_difference, order_of
from .config import ConfigError
from .distributed import warn_on_rank0
from .models.vision_longhorn import VisionLonghorn, resample_pos_embed
from .state_dicts import parts_of
from .text import nearest, one_line, printable


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
    start: dict[str, Any] = {}
    source = Checkpoint.of(pretrained_path) if pretrained_path else None
    if source:
        given = _first_blocks(source.weights(), arguments.get("depth"))
        weights = _adapted(model, arguments, given, source, start=True)
        weights, head = _fit_head(model, weights, source, label_names)
        classes = _classes_of(model, weights) or -1  # timm creates a new head for -1
        start = dict(pretrained=True, pretrained_cfg_overlay=dict(state_dict=weights, num_classes=classes))
    try:
        created = _create(model, arguments, **start)
        own = created.state_dict().keys()
        if start and 2 * len(there := fitted(weights, created).keys() & own) < len(own):  # timm would continue
            raise RuntimeError(f"{len(there)} of its {len(own)} tensors are in {source}")
    except RuntimeError as error:
        names = [] if timm.is_model(model) else timm.list_models()
        unknown = nearest(model, names) or "; timm.list_models() has those that there are" * bool(names)
        parts = parts_of(given) if source else ""
        reason = printable(one_line(error, 2000) + parts)  # the error may contain names of tensors
        raise ConfigError(f"cannot create the model {model}: {reason}{unknown}{_how_it_was_built(source)}") from error
    except Exception as error:  # unexpected arguments raise various types
        raise ConfigError(f"cannot create the model {model}: {type(error).__name__}: {error}") from error
    if source:
        taken = printable(_what_was_taken(created, weights, given))
        warn_on_rank0(__name__, "started from %s: %s%s", source, taken, printable(head))
    return created


def _create(model: str, arguments: dict[str, Any], **start: Any) -> nn.Module:
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


def _first_blocks(weights: dict[str, Tensor], depth: Any) -> dict[str, Tensor]:
    """Return the weights without the blocks from index `depth` on, for our names and ViM's published names."""
    blocks = {name: re.match(r"(?:blocks|layers)\.(\d+)\.", name) for name in weights}
    later = {name for name, block in blocks.items() if block and isinstance(depth, int) and int(block[1]) >= depth}
    return {name: tensor for name, tensor in weights.items() if name not in later}


def _adapted(
    model: str, arguments: dict[str, Any], weights: dict[str, Tensor], source: Checkpoint, start: bool = False
) -> dict[str, Tensor]:
    """Resample the position embeddings to the model's patch grid if the file stores its own grid, which need not be
    square.

    Pooled and other models have interchangeable weights but compute different functions, so `start`ing from the other
    kind logs a warning.

    Raises:
        ConfigError: All weights of a pooled model would be loaded into another model, or vice versa.
    """
    said, positions = _said_by(source), weights.get("pos_embed")
    if "model" not in said or positions is None:
        return weights
    with torch.device("meta"):
        own = {"img_size": said.get("img_size"), **(said.get("model_kwargs") or {})}
        built, target = create_model(said["model"], **own), create_model(model, **arguments)
    if not isinstance(built, VisionLonghorn) or not isinstance(target, VisionLonghorn):
        return weights
    if built.pooled != target.pooled:
        difference = f"{source} is of {said['model']}, whose scans read other tokens than those of {model}"
        if not start:
            raise ConfigError(f"{difference}: name {said['model']}")
        warn_on_rank0(__name__, "%s: weights of the same kind of model are a better start", difference)
    if positions.shape != built.pos_embed.shape:
        return weights
    grids = target.patch_embed.grid_size, built.patch_embed.grid_size
    return weights | {"pos_embed": resample_pos_embed(positions.to(target.pos_embed.dtype), *grids)}


def _said_by(source: Checkpoint) -> dict[str, Any]:
    """Return the options in a file, or none if the file has options that it may not have."""
    with suppress(ConfigError):
        return source.options
    return {}


def _how_it_was_built(source: Checkpoint | None) -> str:
    """Return the options that build the model of a file, if the file stores them."""
    saved = _said_by(source) if source else {}
    if "model" not in saved:
        return ""
    not_of_weights = ("img_size", "drop_rate", "drop_path_rate")
    arguments = [(name, v) for name, v in (saved.get("model_kwargs") or {}).items() if name not in not_of_weights]
    words = ["--model-kwargs", *(f"{name}={json.dumps(value)}" for name, value in arguments)] if arguments else []
    return "; it was built with " + shlex.join(["--model", saved["model"], *words])


def _heads_of(model: str) -> tuple[str, ...]:
    """Return the names of a model's classifiers, as timm knows them."""
    known = timm.get_pretrained_cfg(model)
    head = (known.classifier if known else None) or "head"
    return (head,) if isinstance(head, str) else tuple(head)


def _classes_of(model: str, weights: dict[str, Tensor]) -> int:
    """Return the number of classes of a file's head, by timm's name of the head; 0 without a head."""
    name = f"{_heads_of(model)[0]}.bias"
    return weights[name].numel() if name in weights else 0


def _fit_head(
    model: str, weights: dict[str, Tensor], source: Checkpoint, label_names: Sequence[str]
) -> tuple[dict[str, Tensor], str]:
    """Return the weights with the rows of the head in the order of `label_names`, and what became of the head.

    Weights of other classes are returned without their head.
    """
    if not label_names or not (names := source.label_names):
        return weights, ""
    heads = [f"{head}.{part}" for head in _heads_of(model) for part in ("weight", "bias")]
    heads = [name for name in heads if name in weights and len(weights[name]) == len(names)]
    if (order := order_of(names, label_names)) is None:
        difference = first_difference(names, label_names, "the file", "the data")
        return {name: t for name, t in weights.items() if name not in heads}, f"; the head is new: {difference}"
    if order == [*range(len(order))]:
        return weights, ""
    return weights | {name: weights[name][order] for name in heads}, "; the head's rows follow the class names"


def _what_was_taken(model: nn.Module, weights: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    """Describe how a model that was started from a file used the file's tensors `given`."""
    own = model.state_dict()
    adapted = fitted(weights, model)
    taken = [n for n in own if n in adapted and torch.equal(adapted[n].to(own[n]), own[n])]
    resampled = [n for n in taken if n in given and given[n].shape != own[n].shape]
    others = {"resampled": resampled, "new": [n for n in own if n not in taken]}
    others["not used"] = [n for n in adapted if n not in own]
    said = [f"{what}: {', '.join(names[:8])}{', ...' * (len(names) > 8)}" for what, names in others.items() if names]
    return "; ".join([f"{len(taken) - len(resampled)} of {len(own)} tensors as they are", *said])


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
    saved = source.options
    name = model or saved.get("model")
    if not name:
        call = f"vil.from_checkpoint({str(source)!r}, 'vim_tiny')"
        raise ConfigError(f"{source} does not store its model's name: pass the name, {call}")
    said = {option: saved[option] for option in ("num_classes", "img_size") if saved.get(option)}
    arguments = said | (saved.get("model_kwargs") or {}) | arguments
    without_head = arguments.get("num_classes") == 0
    if without_head:  # load the model with the file's head first
        arguments["num_classes"] = said.get("num_classes") or _classes_of(name, source.weights())
    if use_ema is None:
        use_ema = bool(source.average_is_best)
    loaded: Any = load_model(name, source, use_ema, **arguments).eval()
    if without_head:
        loaded.reset_classifier(0)
    config = {key: value for key, value in loaded.pretrained_cfg.items() if not key.startswith("test_")}
    channels, *size = config["input_size"]
    channels, size = arguments.get("in_chans") or channels, to_2tuple(arguments.get("img_size") or size)
    config |= {"input_size": (channels, *size), "num_classes": loaded.num_classes}
    config |= {option: saved[option] for option in ("crop_pct", "interpolation") if saved.get(option)}
    config |= source.preprocessing
    config |= {name: list(config[name]) * channels for name in ("mean", "std") if len(config[name]) == 1}
    names = source.label_names
    if names and len(names) == loaded.num_classes:
        config["label_names"] = names
    loaded.pretrained_cfg = loaded.default_cfg = config
    return loaded


def unwrapped(model: Any) -> Any:
    """Return the model inside of wrappers of PyTorch and timm, which hide its attributes.

    These are DataParallel, DistributedDataParallel, AveragedModel, timm's EMA models and compiled models, also within
    one another.
    """
    while type(model).__module__.partition(".")[0] in ("torch", "timm"):
        inner = [part for name in ("_orig_mod", "module", "ema") if (part := getattr(model, name, None)) is not None]
        if not inner:
            break
        model = inner[0]
    return model


def input_size(model: Any, config: dict[str, Any] | None = None) -> tuple[int, int, int]:
    """Return the channels, height and width that a model was built for, which timm's data `config` may not contain."""
    channels, *size = (config or resolve_model_data_config(model))["input_size"]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    return getattr(model, "in_chans", channels), *size


def chosen_data_config(
    model: nn.Module, img_size: int | tuple[int, int] | None = None, **chosen: Any
) -> dict[str, Any]:
    """Return timm's data config of a model with the chosen values; timm itself accepts only square `img_size`."""
    if img_size:
        chosen["input_size"] = (3, *to_2tuple(img_size))
    return resolve_data_config(chosen, model=model)


def data_config_of(model: Any, **chosen: Any) -> dict[str, Any]:
    """Return timm's data config of a model, with the image size that the model was built for.

    Raises:
        ConfigError: The model does not accept images of three channels.
    """
    model = unwrapped(model)
    if (channels := getattr(model, "in_chans", 3)) != 3:
        raise ConfigError(f"the model must accept images of 3 channels, got {channels}")
    config = chosen_data_config(model, **chosen)
    return config | {"input_size": input_size(model, config)}
