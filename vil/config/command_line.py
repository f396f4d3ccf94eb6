"""Command line of a training run: `-c FILE` and options that override the file; `--help` lists them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..distributed import is_rank0
from ..text import shown
from .options import FIELDS, Config, ConfigError
from .timm_args import from_timm, img_size_of
from .values import checked, kind_of, may_be_pair, read_yaml, unknown_option

_logger = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """argparse parser that raises one-line ConfigErrors and suggests the nearest option for an unknown one."""

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            if not word.startswith("-"):
                raise ConfigError(f"{shown(word)} on the command line belongs to no option")
            name = word.split("=")[0].lstrip("-").replace("-", "_")
            raise ConfigError(unknown_option(name, "on the command line", vars(options)))
        return options

    def error(self, message):
        raise ConfigError(message)


def load_config(
    description: str,
    arguments: Sequence[str] | None = None,
    saved_options: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None,
) -> Config:
    """Read `-c FILE` and the options of a command line, which override the file.

    Args:
        description: First lines of `--help`.
        arguments: Words of the command line; the program's own if None.
        saved_options: Function that reads the options of a checkpoint, which apply with `--resume FILE` but without
            `-c`. Its arguments are the file and the options of the command line.

    Raises:
        ConfigError: An option or value is invalid, or a phase of the file overrides an option of the command line. The
            message names the option, and the nearest valid one.
    """
    # one option for each field; `checked` validates the values like those of the file
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=description, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file of options")
    for name, field in FIELDS.items():
        flag, kind = "--" + name.replace("_", "-"), kind_of(name)[0]
        help = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            bare = field.metadata["bare"]
            nargs = "+" if kind in (tuple, dict, list) or may_be_pair(name) else "?" if bare else None
            parser.add_argument(flag, nargs=nargs, const=bare, metavar="VALUE", help=help)
    parser.add_argument("--input-size", nargs=3, metavar="VALUE", help="timm's --img-size: 3, height and width")
    values = vars(parser.parse_args(arguments))
    path = values.pop("config")
    given = {name: value for name, value in values.items() if value is not None}
    if input_size := given.pop("input_size", None):
        given["img_size"] = given.get("img_size") or img_size_of(input_size, "the command line")
    given = checked(given, "the command line")
    from_file: dict[str, Any] = {}
    if path:
        options, ignored, errors = from_timm(read_yaml(path), path, given)
        from_file = checked(options, path, errors)
        if ignored and is_rank0():
            names = ", ".join(ignored)
            _logger.warning("%s: ignored %d options of timm that change nothing here: %s", path, len(ignored), names)
    resumed = given.get("resume")
    if saved_options and not path and resumed not in (None, "auto"):
        folder = Path(resumed).resolve().parent  # resume in the checkpoint's folder
        from_file = {"output": str(folder.parent), "experiment": folder.name, **saved_options(resumed, given)}
    for phase in () if "phases" in given else from_file.get("phases") or ():
        if decided := phase.keys() & given:
            flag = "--" + min(decided).replace("_", "-")
            raise ConfigError(f"{flag} would change nothing: the phases of {path or resumed} say it. Give --phases")
    config = Config(**{**from_file, **given})
    config.experiment = config.experiment or (Path(path).stem if path else config.model)
    return config
