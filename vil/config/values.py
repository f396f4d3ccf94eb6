"""Parsing, conversion and validation of option values from files, command lines and checkpoints."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import yaml

from ..text import nearest, shown
from .options import FIELDS, PHASE_OPTIONS, SYNONYMS, Config, ConfigError, check_sizes, unknown_models, wrong_choices

MOST_BYTES = 2**17  # maximum size of a config file in bytes, because YAML parsing needs much time and memory per byte
LONGEST_NUMBER = 400  # maximum number of characters in a number; the largest float needs fewer
COMMAND_LINE = "the command line"  # how error messages name the command line as the source of an option
KINDS = {
    int: "an integer", float: "a number", bool: "true or false", str: "a text", tuple: "a list of numbers",
    dict: "a mapping",
}  # fmt: skip
_TYPES = typing.get_type_hints(Config)


def parse_key_values(words: Sequence[str]) -> dict[str, Any]:
    """Parse arguments of the form KEY=VALUE, with values in YAML.

    Raises:
        ConfigError: An argument has no "=", or a value is not valid YAML.
    """
    for word in words:
        if "=" not in word:
            raise ConfigError(f"model arguments must have the form KEY=VALUE, got {word!r}")
    return {key: _parse_yaml(value, f"the value of {key}") for key, value in (word.split("=", 1) for word in words)}


def read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"config file {path} must be at most {MOST_BYTES} bytes, got a larger file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be a text file in UTF-8: {error}") from error
    values = _parse_yaml(text, path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a YAML mapping such as 'epochs: 100', got {type(values).__name__}")
    return values


def _parse_yaml(text: str, source: str) -> Any:
    """Parse YAML, but reject aliases, because nested aliases can expand to unlimited size."""
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ConfigError("YAML aliases (*) are not supported: write out the value instead")
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"values in {source} are nested too deeply for YAML's parser: flatten the values") from None
    except (yaml.YAMLError, ValueError) as error:  # PyYAML raises ValueError for dates such as 2024-13-32
        if isinstance(error, ConfigError):
            raise ConfigError(f"{source}: {error}") from None
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys and ambiguous numbers such as 010 (8 in YAML) and 1:30 (90 in YAML)."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key) if isinstance(key, yaml.ScalarNode) else key
            if name in seen:
                raise ConfigError(
                    f"keys must be unique, got {shown(name)} again in line {key.start_mark.line + 1}: remove one"
                )
            seen.add(name)
        return super().construct_mapping(node, deep)

    def number(self, node):
        line = f"line {node.start_mark.line + 1}"
        if len(node.value) > LONGEST_NUMBER:
            raise ConfigError(f"numbers must have at most {LONGEST_NUMBER} characters, got {len(node.value)} in {line}")
        if re.match(r"[-+]?0[0-9_]+$|.*:", node.value):
            raise ConfigError(
                f"numbers must be decimal, got {node.value} in {line}, which YAML reads as octal or sexagesimal"
            )
        kind = node.tag.rpartition(":")[2]
        return getattr(super(), f"construct_yaml_{kind}")(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.number)


def override(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options`, overridden by the given options.

    The given model arguments override only the model arguments of the same name in `options`. If `model_kwargs` is
    given as None, all model arguments of `options` are removed.
    """
    both = {**options, **given}
    if options.get("model_kwargs") and given.get("model_kwargs") is not None:
        both["model_kwargs"] = {**options["model_kwargs"], **given["model_kwargs"]}
    return both


def checked(values: dict[str, Any], source: str, errors: Sequence[str] = ()) -> dict[str, Any]:
    """Check the names of options and convert the values to the options' types.

    Args:
        values: Values by option name.
        source: Name of the file or command line, for messages.
        errors: Messages about errors that were already found in the same source.

    Raises:
        ConfigError: Options are unknown or have invalid values, or `errors` is not empty. The message lists all errors.
    """
    errors, converted = [*errors], {}
    for name, value in values.items():
        if name not in FIELDS:
            errors.append(unknown_option(name, f"in {source}", FIELDS))
            continue
        try:
            # An empty string means None, because scripts may pass an empty environment variable.
            empty = value == "" and kind_of(name)[1]
            converted[name] = None if empty else convert(name, value, source)
            if name == "model_kwargs":
                check_sizes(converted[name] or {})
        except ConfigError as error:
            errors.append(str(error))
    errors += wrong_choices(converted) + unknown_models(converted)
    if len(errors) > 1:
        numbered = (f"({number}) {error}" for number, error in enumerate(errors, start=1))
        errors = [f"{len(errors)} errors in {source}: {' '.join(numbered)}"]
    if errors:
        raise ConfigError(errors[0])
    return converted


def unknown_option(name: Any, where: str, options: Iterable[str], spelled: Callable[[str], str] = repr) -> str:
    """Return the message for an unknown option. `spelled` formats the name of a suggested option."""
    unknown, words = f"unknown option {shown(name)} {where}", re.sub(r"^no_(?=.)", "", str(name).lower())
    for ours, synonyms in SYNONYMS.items():
        if ours in options and words in synonyms.split():
            return f"{unknown}; use {spelled(ours)}: {FIELDS[ours].metadata['help']}"
    return unknown + nearest(words, options, spelled)


def kind_of(name: str) -> tuple[type, bool]:
    """Return the type of an option, and whether the option may be None."""
    hint = _TYPES[name]
    optional = isinstance(hint, types.UnionType)
    hint = hint.__args__[0] if optional else hint
    return typing.get_origin(hint) or hint, optional


def may_be_pair(name: str) -> bool:
    """Return whether an option accepts two numbers (height and width) instead of one."""
    return any(typing.get_origin(hint) is tuple for hint in typing.get_args(_TYPES[name])[1:])


def convert(name: str, value: Any, source: str) -> Any:
    """Convert the value of an option to the option's type.

    Raises:
        ConfigError: The value cannot be converted or is out of the option's range.
    """
    kind, optional = kind_of(name)
    if optional and (value is None or value in ("none", "null") or value == ["none"]):
        return None
    if kind is list:
        return _checked_phases(value, source)
    # The command line gives a dict as a list of words KEY=VALUE.
    if kind is dict and isinstance(value, list) and all(isinstance(word, str) for word in value):
        return parse_key_values(value)
    if may_be_pair(name) and isinstance(value, (list, tuple)) and len(value) in (1, 2):
        sides = tuple(convert(name, side, source) for side in value)
        if all(isinstance(side, int) for side in sides):
            return sides if len({*sides}) == 2 else sides[0]
    converted: Any = None
    try:
        if kind is tuple and isinstance(value, (list, tuple)):
            converted = tuple(float(v) for v in value)
        elif kind is float and not isinstance(value, bool):
            converted = float(value)  # YAML reads '1e-3' as a string
        elif kind is int and not isinstance(value, bool) and int(value) == float(value):
            converted = int(value)
        elif kind is str and type(value) is int:
            converted = str(value)
        elif type(value) is kind:  # compare types exactly, because bool is a subclass of int
            converted = value
    except (TypeError, ValueError, OverflowError):
        pass
    if converted is None:
        expected = f"{KINDS[kind]}{' or a pair (height and width)' * may_be_pair(name)}"
        raise ConfigError(f"{_called(name, source)} must be {expected}, got {shown(value)}")
    for number in converted if kind is tuple else [converted] if kind in (int, float) else []:
        if complaint := _out_of_range(number, **{key: FIELDS[name].metadata[key] for key in ("low", "high", "above")}):
            raise ConfigError(f"{_called(name, source)} must be {complaint}, got {shown(value)}")
    return converted


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _called(name: str, source: str) -> str:
    """Return the description of an option for messages, such as "--img-size" or "option 'img_size' in FILE"."""
    return flag_of(name) if source == COMMAND_LINE else f"option {name!r} in {source}"


def _checked_phases(value: Any, source: str) -> list[dict[str, Any]]:
    """Validate the options of each phase. Strings from the command line are parsed as YAML."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(
            f"option 'phases' in {source} must be a list with a mapping of options per phase, got {shown(value)}"
        )
    phases = []
    for number, phase in enumerate(value, start=1):
        where = f"phase {number} in {source}"
        phase = _parse_yaml(phase, where) if isinstance(phase, str) else phase
        if not isinstance(phase, dict):
            raise ConfigError(f"{where} must be a mapping such as {{epochs: 100, lr: 4e-4}}, got {shown(phase)}")
        if of_run := [name for name in phase if name in FIELDS and name not in PHASE_OPTIONS]:
            raise ConfigError(
                f"{where} must not set {of_run[0]!r}, which applies to all phases: set {of_run[0]!r} outside of "
                "'phases'"
            )
        phases.append(checked(phase, where))
    return phases


def _out_of_range(number: float, low: float, high: float, above: float) -> str | None:
    """Return a text that describes the bound that a number violates, or None if the number is valid."""
    if not math.isfinite(number):
        return "a finite number"
    if number < low:
        return f"at least {low}"
    if number > high:
        return f"at most {high}"
    return f"greater than {above}" if number <= above else None
