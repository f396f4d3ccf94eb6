"""Building the model of a run, with errors that a user can act on."""

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
from .processes import warn
from .state_dicts import parts_of
from .text import nearest, one_line, printable
from .vision_longhorn import VisionLonghorn, resample_pos_embed


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
        classes = _classes_of(model, weights) or -1  # timm: -1 for a new head
        start = dict(pretrained=True, pretrained_cfg_overlay=dict(state_dict=weights, num_classes=classes))
    try:
        created = _create(model, arguments, **start)
        own = created.state_dict().keys()
        if start and 2 * len(there := fitted(weights, created).keys() & own) < len(own):  # timm goes on
            raise RuntimeError(f"{len(there)} of its {len(own)} tensors are in {source}")
    except RuntimeError as error:
        names = [] if timm.is_model(model) else timm.list_models()
        unknown = nearest(model, names) or "; timm.list_models() has those that there are" * bool(names)
        parts = parts_of(given) if source else ""
        reason = printable(one_line(error, 2000) + parts)  # with names of tensors in it
        raise ConfigError(f"cannot create the model {model}: {reason}{unknown}{_how_it_was_built(source)}") from error
    except Exception as error:  # of arguments that are not what the model expects
        raise ConfigError(f"cannot create the model {model}: {type(error).__name__}: {error}") from error
    if source:
        taken = printable(_what_was_taken(created, weights, given))
        warn(__name__, "started from %s: %s%s", source, taken, printable(head))
    return created


def _create(model: str, arguments: dict[str, Any], **start: Any) -> nn.Module:
    try:
        created: Any = timm.create_model(model, **arguments | start)
        # not in the config, whose keys timm knows: it could not read what its push_to_hf_hub writes
        created.model_args = arguments
        return created
    except TypeError as error:  # ResNet and its like take images of any size, and no argument that says it
        unknown = [name for name in ("img_size", "drop_path_rate") if name in arguments and f"'{name}'" in str(error)]
        if not unknown:
            raise
        if unknown == ["drop_path_rate"] and arguments["drop_path_rate"]:
            raise TypeError("it has no stochastic depth, so give --drop-path 0") from error
    return _create(model, {name: value for name, value in arguments.items() if name not in unknown}, **start)


def _first_blocks(weights: dict[str, Tensor], depth: Any) -> dict[str, Tensor]:
    """Weights without the blocks from number `depth` on, if that is given; ours, or under ViM's published names."""
    blocks = {name: re.match(r"(?:blocks|layers)\.(\d+)\.", name) for name in weights}
    later = {name for name, block in blocks.items() if block and isinstance(depth, int) and int(block[1]) >= depth}
    return {name: tensor for name, tensor in weights.items() if name not in later}


def _adapted(
    model: str, arguments: dict[str, Any], weights: dict[str, Tensor], source: Checkpoint, start: bool = False
) -> dict[str, Tensor]:
    """Weights with positions for the model's grid of patches, if their file says from which: it need not be square.

    Pooled models have the weights of others and compute something else: to `start` from these is worth a warning.

    Raises:
        ConfigError: A pooled model is to have all weights of one that is not, or the other way round.
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
        warn(__name__, "%s: it learns more from weights of its own form", difference)
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
    """Return the number of classes of a file's head; 0 without a head."""
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
    """How the tensors `given` by a file were used by the model that was started from them, once on its grid."""
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
    with torch.device("meta"):  # a file that asks for more than it holds is refused before memory is taken
        load_weights(create_model(model, **arguments), weights, source.path)
    loaded = create_model(model, **arguments)
    load_weights(loaded, weights, source.path)
    return loaded


def from_checkpoint(
    path: str | Path | Checkpoint, model: str | None = None, *, use_ema: bool | None = None, **arguments: Any
) -> nn.Module:
    """A trained model, on the CPU and in evaluation mode, which knows what images it is for and what its classes are.

    `timm.data.resolve_model_data_config(model)` gives their size, mean, standard deviation, crop and interpolation, as
    `validate.py` prepares them; `model.pretrained_cfg["label_names"]` are the names of the classes by their numbers,
    where the file says them.

    Args:
        path: A checkpoint of train_imagenet.py or a file or folder of weights of `vil.export`, which say their model
            with its arguments, or any other file of weights.
        model: timm's name of the model, where the file does not say it.
        use_ema: Take the moving average of the weights. None: if the file says that it is better (best.pt does).
        arguments: The model's, in place of what the file says; with `img_size` it is fitted to images of another size,
            with `num_classes=0` it gives pooled features, without the file's head.

    Raises:
        ConfigError: The file does not say its model and `model` is not given, there is no such model, or it does not
            take the arguments.
        CheckpointError: The file is missing or corrupt, or of another architecture or number of classes.
    """
    source = Checkpoint.of(path)
    saved = source.options
    name = model or saved.get("model")
    if not name:
        call = f"vil.from_checkpoint({str(source)!r}, 'vim_tiny')"
        raise ConfigError(f"{source} does not say its model: give the name as well, {call}")
    said = {option: saved[option] for option in ("num_classes", "img_size") if saved.get(option)}
    arguments = said | (saved.get("model_kwargs") or {}) | arguments
    without_head = arguments.get("num_classes") == 0
    if without_head:  # it is loaded with the head that the file has
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
    """The channels, height and width that a model was built for, which timm's `config` of its images may not know."""
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
        raise ConfigError(f"the model takes images of {channels} channels, and pictures have 3")
    config = chosen_data_config(model, **chosen)
    return config | {"input_size": input_size(model, config)}
