"""Creation of models from names, arguments and weights."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from .checkpoint import Checkpoint
from .classes import warn_of_assumed_order
from .config import ConfigError
from .config.options import check_sizes
from .distributed import warn_on_rank0
from .download import check_download
from .initial_weights import describe_initialization, fit_head, names_taken, num_classes_of
from .models import shipped
from .models.pretrained import first_blocks
from .models.tokens import resample_pos_embed
from .models.vision_longhorn import VisionLonghorn
from .security.checkpoint_options import MODEL_KWARGS
from .state_dicts import fitted, has_ema, load_weights, parts_of
from .text import nearest, one_line, printable


def from_checkpoint(
    path: str | Path | Checkpoint, model: str | None = None, *, use_ema: bool | None = None, **arguments: Any
) -> nn.Module:
    """Load a trained model on the CPU in eval mode, with the model's preprocessing and class names.

    `timm.data.resolve_model_data_config(model)` returns the preprocessing that `vil validate` uses for the model.
    `model.pretrained_cfg["label_names"]` contains the class names by index if the file stores one name per class.

    Args:
        path: Checkpoint of `vil train`, or weights written by `vil.export`, which store the model's name and
            arguments; or any other weights file.
        model: Model name in timm, if the file does not store the name.
        use_ema: Whether to load the EMA weights. None loads the better weights of best.pt, and the raw weights of other
            files. EMA weights are also loaded if the file has no other weights.
        arguments: Model arguments that override the arguments in the file. `img_size` adapts the model to another image
            size; `num_classes=0` removes the head, so that the model returns pooled features; `features_only=True`,
            with `out_indices` as in timm, returns the feature maps of blocks instead of the logits.

    Raises:
        ConfigError: The model's name is neither given nor stored in the file, the model is unknown, or the model does
            not support the arguments.
        CheckpointError: The file is missing or corrupt, or has another architecture or number of classes.
    """
    source = Checkpoint.of(path)
    name = model or source.options.get("model")
    if not name:
        raise ConfigError(
            f"{source} does not store the name of the model: set --model NAME, pass the name to vil.from_checkpoint, "
            f"or convert the file with vil export --checkpoint {source} --model NAME --out model.safetensors, and with "
            "--model-kwargs and --img-size if the model has other values than its default"
        )
    arguments = saved_arguments(source.options) | arguments
    of_features = {}
    if arguments.get("features_only"):  # first load all weights, also those that feature maps do not need
        of_features = {key: arguments.pop(key) for key in ("features_only", "out_indices") if key in arguments}
    loaded: Any = load_model(name, source, source.prefers_ema(use_ema), **arguments).eval()
    arguments["num_classes"] = loaded.num_classes
    loaded.pretrained_cfg = loaded.default_cfg = _pretrained_cfg(loaded, source, arguments)
    return _features_of(loaded, name, arguments | of_features) if of_features else loaded


def _features_of(model: Any, name: str, arguments: dict[str, Any]) -> nn.Module:
    """Return timm's `features_only` model with the weights and the preprocessing of a complete model."""
    features: Any = create_model(name, **arguments).eval()
    weights = model.state_dict()
    # a timm model of feature maps has the complete model as attribute `model`, or only the layers of the complete model
    features.load_state_dict({key: weights[key.removeprefix("model.")] for key in features.state_dict()})
    known = features.pretrained_cfg
    features.pretrained_cfg = features.default_cfg = {k: v for k, v in model.pretrained_cfg.items() if k in known}
    return features


def saved_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the model's keyword arguments that the options of a run specify."""
    sizes = {name: options[name] for name in ("num_classes", "img_size") if options.get(name)}
    return sizes | _model_kwargs(options)


def _model_kwargs(options: dict[str, Any]) -> dict[str, Any]:
    return options.get("model_kwargs") or {}


def _pretrained_cfg(model: Any, source: Checkpoint, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return timm's pretrained config of a model, updated with preprocessing and class names from the checkpoint."""
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
    """Create a model by its timm name and load all weights from a file.

    Without `num_classes`, the model has as many classes as the file. With `num_classes=0`, the model has no head.

    Raises:
        ConfigError: The model is unknown or does not accept the arguments.
        CheckpointError: The file is missing or corrupt, or has another architecture or number of classes.
    """
    source = Checkpoint.of(path)
    given = source.weights(use_ema)
    without_head = arguments.get("num_classes") == 0
    if not arguments.get("num_classes"):  # load the weights including the head, also if the head is removed afterwards
        stored = source.options.get("num_classes") or num_classes_of(model, given)
        if stored or without_head:
            arguments["num_classes"] = stored
    weights = _adapted(model, arguments, given, source)
    with torch.device("meta"):  # check the shapes on the meta device before allocating memory
        load_weights(create_model(model, **arguments), weights, source.path)
    loaded: Any = create_model(model, **arguments)
    load_weights(loaded, weights, source.path)
    if without_head:
        loaded.reset_classifier(0)
    return loaded


def check_pretrained(model: str, arguments: Mapping[str, Any], remedy: str) -> None:
    """Check that a model has pretrained weights, and that the weights are on this machine or can be downloaded.

    Args:
        model: Model name in timm, or a model of the Hugging Face Hub such as "hf-hub:OWNER/NAME". Other names that
            timm does not list are not checked.
        arguments: Keyword arguments of the model. Weights that the arguments specify are not checked.
        remedy: How to use other weights, for the error message.

    Raises:
        ConfigError: The model has no pretrained weights, or the weights cannot be downloaded.
    """
    if model.startswith(("hf-hub:", "hf_hub:")):
        check_download(model, re.split("[:@]", model)[1], remedy)  # a revision may follow after @
    if not timm.is_model(model) or shipped.file_of(model) or "pretrained_cfg_overlay" in arguments:
        return
    if not timm.is_model_pretrained(model):
        raise ConfigError(f"timm has no pretrained weights for {model}; {remedy}")
    config = timm.get_pretrained_cfg(model)
    if config and config.hf_hub_id and "pretrained_cfg" not in arguments:
        check_download(model, config.hf_hub_id, remedy)


def pretrained_model(model: str, remedy: str = "set --checkpoint FILE", **arguments: Any) -> nn.Module:
    """Create a model by its timm name with timm's pretrained weights, or random weights if `pretrained` is False.

    Args:
        model: Model name in timm.
        remedy: How to use other weights, for the error message.
        arguments: Keyword arguments of the model.

    Raises:
        ConfigError: The model is unknown, has no pretrained weights, does not accept the arguments, or would get a
            randomly initialized head, because the weights have another number of classes; or the weights cannot be
            downloaded.
    """
    pretrained = arguments.pop("pretrained", True)
    if pretrained:
        check_pretrained(model, arguments, remedy)
    created: Any = create_model(model, pretrained=pretrained, **arguments)
    trained = created.pretrained_cfg.get("num_classes")
    if pretrained and trained and created.num_classes not in (0, trained):
        raise ConfigError(
            f"num_classes must be {trained}, as in the pretrained weights of {model}, got {created.num_classes}: with "
            "another number, the head would be random. Fine-tune the model with vil train, and set --checkpoint FILE"
        )
    return created


def create_model(
    model: str,
    pretrained_path: str | Path | Checkpoint | None = None,
    *,
    label_names: Sequence[str] = (),
    **arguments: Any,
) -> nn.Module:
    """Create a model by its timm name, initialized from a weights file if `pretrained_path` is given.

    The file's head is kept if the number of classes is the same. The head's rows are reordered if `label_names` has the
    same classes as the file in another order. If the classes differ, the head is randomly initialized. Position
    embeddings and patch embeddings are resampled. If `depth` is less than in the file, only the first blocks are
    loaded.

    Args:
        model: Model name in timm.
        pretrained_path: Weights file, a `Checkpoint` read from a weights file, or the name of weights in the package,
            such as vil_tiny.tiny_in200.
        label_names: Class names of the data by index; empty if unknown.
        arguments: Keyword arguments of the model.

    Raises:
        ConfigError: The model is unknown, does not accept the arguments, or does not fit the weights.
        CheckpointError: The file is missing or corrupt.
    """
    check_sizes(arguments)
    if pretrained_path:
        source: Any = pretrained_path
        if isinstance(source, str) and not os.path.exists(source):
            source = shipped.file_of(source) or source
        return _initialized(model, arguments, Checkpoint.of(source), label_names, str(pretrained_path))
    try:
        return _create(model, arguments)
    except Exception as error:  # models raise exceptions of various types for invalid arguments
        raise _creation_error(model, error) from error


def _initialized(
    model: str, arguments: dict[str, Any], source: Checkpoint, label_names: Sequence[str], source_name: str
) -> nn.Module:
    """Create a model initialized from a weights file, whose tensors are resampled to the model's shapes if possible.

    `source_name` is the name under which the user has given the weights, for the log.
    """
    given = first_blocks(source.weights(), arguments.get("depth"))
    weights = _adapted(model, arguments, given, source, is_start=True)
    weights, head = fit_head(model, weights, source.label_names if label_names else (), label_names)
    if not source.label_names and num_classes_of(model, weights) == len(label_names):
        warn_of_assumed_order(label_names, source_name)
    # If num_classes is -1 in the overlay, timm keeps the new head of the model instead of reading the file's head.
    overlay = {"state_dict": weights, "num_classes": num_classes_of(model, weights) or -1}
    try:
        created = _create(model, arguments, pretrained=True, pretrained_cfg_overlay=overlay)
        own = created.state_dict().keys()
        common = fitted(weights, created).keys() & own
        if 2 * len(common) < len(own):  # timm does not report missing tensors if the model has a new head
            raise RuntimeError(f"only {len(common)} of the model's {len(own)} tensors are in the file")
        if not names_taken(created, weights):
            raise RuntimeError(
                f"no tensor of the weights file was loaded: the registered function of {model} must pass its "
                "keyword arguments to timm.models.build_model_with_cfg"
            )
    except Exception as error:  # models raise exceptions of various types for invalid arguments
        raise _creation_error(model, error, source, given) from error
    taken = printable(describe_initialization(created, weights, given))
    kind = " (EMA weights)" if has_ema(source.content) and source.ema_is_best is not False else ""
    warn_on_rank0(__name__, "initialized from %s%s: %s%s", source_name, kind, taken, printable(head))
    return created


def _create(model: str, arguments: dict[str, Any], **start: Any) -> nn.Module:
    """Create a timm model. Omit `img_size` and a `drop_path_rate` of 0 if the model does not support them."""
    try:
        created: Any = timm.create_model(model, **arguments | start)
        # without this line, the memory of the weights file would never be freed
        getattr(created, "pretrained_cfg", {}).pop("state_dict", None)
        # `model_args` is no entry of pretrained_cfg, because timm cannot load a config.json with additional entries.
        created.model_args = {name: value for name, value in arguments.items() if name != "pretrained_cfg_overlay"}
        return created
    except TypeError as error:  # for example, ResNets have no argument img_size, because they accept any size
        unknown = [name for name in ("img_size", "drop_path_rate") if name in arguments and f"'{name}'" in str(error)]
        if not unknown:
            raise
        if unknown == ["drop_path_rate"] and arguments["drop_path_rate"]:
            raise TypeError("the model does not support stochastic depth: set --drop-path 0") from error
    return _create(model, {name: value for name, value in arguments.items() if name not in unknown}, **start)


def _creation_error(
    model: str, error: Exception, source: Checkpoint | None = None, weights: dict[str, Tensor] | None = None
) -> ConfigError:
    """Convert an error from the creation of a model to a ConfigError whose message has a remedy if one is known.

    Args:
        model: Model name in timm.
        error: Original error.
        source: Weights file for the initialization, if any.
        weights: State dict of the file.
    """
    failed = f"cannot create the model {model}" + (f" with the weights in {source}" if source else "")
    if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
        remedy = nearest(unknown[1], MODEL_KWARGS.keys() - {unknown[1]}) or "; remove the argument"
        return ConfigError(f"{failed}: {model} does not support the argument {unknown[1]!r}{remedy}")
    if isinstance(error, ValueError):
        return ConfigError(f"{failed}: {error}")
    if not isinstance(error, RuntimeError):
        return ConfigError(f"{failed}: {type(error).__name__}: {error}")
    reason = printable(one_line(error, 2000) + parts_of(weights or ()))  # the error may contain untrusted tensor names
    remedy = ""
    if not timm.is_model(model):
        remedy = nearest(model, timm.list_models()) or "; timm.list_models() lists all models"
    return ConfigError(f"{failed}: {reason}{remedy}{_how_it_was_built(source)}")


def _how_it_was_built(source: Checkpoint | None) -> str:
    """Return a hint with the options that create the model of a weights file, or "" if the file stores no options."""
    options = _saved_options(source) if source else {}
    if "model" not in options:
        return ""
    not_of_weights = ("img_size", "drop_rate", "drop_path_rate")
    arguments = {name: value for name, value in _model_kwargs(options).items() if name not in not_of_weights}
    words = ["--model", options["model"]]
    if arguments:
        words += ["--model-kwargs", *(f"{name}={json.dumps(value)}" for name, value in arguments.items())]
    return "; the weights fit " + shlex.join(words)


def _saved_options(source: Checkpoint) -> dict[str, Any]:
    """Return the options in a checkpoint, or an empty dict if the options are invalid."""
    with suppress(ConfigError):
        return source.options
    return {}


def _adapted(
    model: str, arguments: dict[str, Any], weights: dict[str, Tensor], source: Checkpoint, is_start: bool = False
) -> dict[str, Tensor]:
    """Resample position embeddings from the checkpoint's patch grid to the model's. Grids need not be square.

    Pooled and unpooled models have the same weight shapes but compute different functions. If weights
    of a pooled model only initialize (`is_start`) an unpooled model, or vice versa, a warning is logged.

    Raises:
        ConfigError: The weights of a pooled model would be loaded into an unpooled model, or vice versa.
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
        kinds = ["pooled", "unpooled"] if built.pooled else ["unpooled", "pooled"]
        difference = f"{source} has weights of the {kinds[0]} model {options['model']}, but {model} is {kinds[1]}"
        if not is_start:
            raise ConfigError(f"{difference}: set --model {options['model']}")
        warn_on_rank0(__name__, "%s; prefer to start from weights of the same kind of model", difference)
    if positions.shape != built.pos_embed.shape:
        return weights
    positions = positions.to(target.pos_embed.dtype)
    resampled = resample_pos_embed(positions, target.patch_embed.grid_size, built.patch_embed.grid_size)
    return weights | {"pos_embed": resampled}
