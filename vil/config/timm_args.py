"""Translation of config files of timm's train.py, such as args.yaml, to options of `Config`.

timm saves every option in args.yaml. Options that `Config` also has are kept, unless timm's value is empty and `Config`
needs a value. Options that `Config` has under another name are renamed. Other options are ignored if they are off, have
a value with which timm trains like this package, have no effect on the run, or are in `HARMLESS`. All remaining options
raise an error, because ignoring these options would silently change the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..text import shown
from .options import FIELDS, SYNONYMS, ConfigError
from .timm_options import HARMLESS, MODEL_ARGUMENTS, ONLY_TIMMS, RENAMED, SCHEDULES, SWITCHES, UNSUPPORTED
from .values import convert, kind_of, unknown_option

EMPTY: tuple = (None, "", False, [], {})  # values that timm treats as "not given" or "off"


@dataclass
class Translation:
    """Options of a timm config file, translated to options of `Config`."""

    options: dict[Any, Any]
    ignored: list[str] = field(default_factory=list)  # names of options that are ignored
    errors: list[str] = field(default_factory=list)  # error messages about unsupported or invalid options


def from_timm(values: Mapping[Any, Any], source: str, given: Mapping[str, Any]) -> Translation:
    """Translate the options of a config file that was written for timm's train.py.

    A file is treated as timm's if the file contains an option that exists only in timm. The options of other files are
    returned unchanged.

    Args:
        values: Options in the file.
        source: Name of the file, for messages.
        given: Options from the command line, which override the file.
    """
    if not ONLY_TIMMS & values.keys():
        return Translation(dict(values))

    options: dict[Any, Any] = {}
    ignored: list[str] = []
    unsupported: dict[str, Any] = {}
    in_effect = {**values, **given}
    for name, value in values.items():
        if name in FIELDS:
            if _is_off(name, value):
                ignored.append(name)
            else:
                options[name] = _as_ours(name, value)
        elif _is_empty(value):
            ignored.append(str(name))
        elif name in RENAMED or name in MODEL_ARGUMENTS:
            continue  # `_rename` and `_move_model_arguments` translate the option `name`
        elif _changes_training(name, value, in_effect):
            unsupported[str(name)] = value
        else:
            ignored.append(str(name))

    errors = _rename(values, options, source)
    _move_model_arguments(values, options)
    _drop_image_size_of_model(options)
    errors += _describe_ambiguous_batch_size(options, given, source)
    errors += _describe_unsupported(unsupported, source)
    return Translation(options, ignored, errors)


def _is_empty(value: Any) -> bool:
    return any(value is empty or (type(value) is type(empty) and value == empty) for empty in EMPTY)


def _is_off(name: str, value: Any) -> bool:
    """Return whether timm's value of an option means "off", but the option cannot be off in `Config`."""
    kind, is_optional = kind_of(name)
    return _is_empty(value) and not is_optional and kind is not bool


def _as_ours(name: str, value: Any) -> Any:
    """Convert timm's value of an option to the value of the `Config` option with the same name."""
    kind, _ = kind_of(name)
    if name == "torchcompile":  # timm stores the name of the compiler backend
        return True if value == "inductor" else value or False
    if _is_empty(value) and kind is not bool:
        return None
    return value


def _changes_training(name: str, value: Any, options: Mapping[str, Any]) -> bool:
    """Return whether an option that `Config` does not have affects training, given the other options of the run."""
    if name not in UNSUPPORTED:  # options unknown to timm, such as options of a fork, count as off if 0
        return name not in HARMLESS and value != 0
    if value == UNSUPPORTED[name]:
        return False

    def in_effect(ours: str) -> Any:
        return options.get(ours, FIELDS[ours].default if ours in FIELDS else None)

    if name.startswith("lr_base"):
        return _is_empty(options.get("lr"))
    if name in ("lr_cycle_decay", "lr_cycle_mul"):
        return options.get("lr_cycle_limit", 1) != 1
    if name in SCHEDULES:
        return in_effect("sched") in SCHEDULES[name]
    if name == "momentum":
        from timm.optim import get_optimizer_info, list_optimizers

        optimizer = in_effect("opt")
        return optimizer not in map(str, list_optimizers()) or get_optimizer_info(optimizer).has_momentum
    if name in SWITCHES:
        return in_effect(SWITCHES[name]) not in (None, "", False, 0, "none", "null")
    return True


def _rename(values: Mapping[Any, Any], options: dict[Any, Any], source: str) -> list[str]:
    """Copy options with timm's names from `values` to `options`, renamed to this package's names.

    Return error messages about invalid and contradictory options.
    """
    errors = []
    for name, ours in RENAMED.items():
        value = values.get(name)
        if _is_empty(value):
            continue
        if name == "input_size":
            try:
                value = img_size_of(value, source)
            except ConfigError as error:
                errors.append(str(error))
                continue

        if options.get(ours) is None:
            options[ours] = value
        elif options[ours] != value and name != "data":  # if `data` and `data_dir` differ, timm uses `data_dir`
            errors.append(f"option {name!r} in {source} contradicts {ours!r}: set only one of them")
    return errors


def _move_model_arguments(values: Mapping[Any, Any], options: dict[Any, Any]) -> None:
    """Move timm options that are model arguments into `model_kwargs`. Existing entries take precedence."""
    arguments = {ours: values[name] for name, ours in MODEL_ARGUMENTS.items() if values.get(name)}
    model_kwargs = options.get("model_kwargs")
    is_valid = model_kwargs is None or isinstance(model_kwargs, dict)  # if not, `checked` raises an error later
    if arguments and is_valid:
        options["model_kwargs"] = arguments | (model_kwargs or {})


def img_size_of(input_size: Any, source: str) -> int | tuple[int, int]:
    """Return the image size from timm's `input_size` (channels, height, width).

    Raises:
        ConfigError: `input_size` is not three numbers, or the number of channels is not 3.
    """
    if not isinstance(input_size, (list, tuple)) or len(input_size) != 3 or input_size[0] not in (3, "3"):
        raise ConfigError(f"option 'input_size' in {source} must be (3, height, width), got {shown(input_size)}")
    return convert("img_size", input_size[1:], source)


def _drop_image_size_of_model(options: dict[Any, Any]) -> None:
    """Remove `img_size` from `model_kwargs` if the option `img_size` has the same value, which timm needs twice."""
    from timm.layers import to_2tuple

    model_kwargs, size = options.get("model_kwargs"), options.get("img_size")
    if isinstance(model_kwargs, dict) and size and to_2tuple(model_kwargs.get("img_size")) == to_2tuple(size):
        options["model_kwargs"] = {name: value for name, value in model_kwargs.items() if name != "img_size"}


def _describe_ambiguous_batch_size(options: Mapping[str, Any], given: Mapping[str, Any], source: str) -> list[str]:
    """Return an error message in a list if the file sets timm's `batch_size`, and nothing sets `global_batch_size`."""
    if _is_empty(options.get("batch_size")) or "global_batch_size" in options or "global_batch_size" in given:
        return []
    return [
        f"option 'batch_size' {shown(options['batch_size'])} in {source} is the batch size per process in "
        "timm's train.py: set --global-batch-size N, the batch size per optimizer step over all processes"
    ]


def _describe_unsupported(unsupported: Mapping[str, Any], source: str) -> list[str]:
    """Return error messages about unsupported options: one per remedy, and one for all options without a remedy."""
    messages = []
    scaling = [name for name in unsupported if name.startswith("lr_base")]
    if scaling:
        messages.append(
            f"option {scaling[0]!r} in {source} scales the learning rate by the batch size, which is not "
            "supported: set --lr, the learning rate without scaling"
        )

    synonyms = {synonym for words in SYNONYMS.values() for synonym in words.split()}
    rest = [name for name in unsupported if name not in scaling]
    messages += [unknown_option(name, f"in {source}", FIELDS) for name in rest if name in synonyms]
    others = [f"option {name!r} ({shown(unsupported[name])})" for name in rest if name not in synonyms]
    if others:
        messages.append(f"{source} has unsupported options: {', '.join(others)}. Remove these options")
    return messages
