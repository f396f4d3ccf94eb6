"""Command line of a training run: `-c FILE`, and options that override the config file."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..text import nearest, shown
from .options import FIELDS, Config, ConfigError
from .timm_args import from_timm, img_size_of
from .values import COMMAND_LINE, KINDS, checked, flag_of, kind_of, may_be_pair, override, read_yaml, unknown_option

SHIPPED = Path(__file__).parents[1] / "configs"  # folder of this package's configs
SHORT_FLAGS = {"batch_size": ["-b"], "workers": ["-j"]}  # short options, as in timm
SOURCE = COMMAND_LINE  # name of the source of options, for error messages

_logger = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """argparse parser that raises one-line ConfigErrors and suggests similar names for unknown options.

    Hyphens and underscores in the names of options may be exchanged or left out.
    """

    def parse_args(self, args=None, namespace=None):
        words = [self._hyphenated(word) for word in (sys.argv[1:] if args is None else args)]
        options, unknown = self.parse_known_args(words, namespace)
        for word in unknown:
            if not word.startswith("-"):
                folder = getattr(options, "folder", None)
                if folder and not self._is_after_switch(words, word):
                    raise ConfigError(
                        f"only one folder is accepted, got {shown(folder)} and {shown(word)}: remove one, or quote a "
                        "path that contains spaces"
                    )
                raise ConfigError(f"unexpected argument {shown(word)} on {SOURCE}: {self._remedy(words, word)}")
            name = word.split("=")[0].lstrip("-").replace("-", "_")
            if name in vars(options) and word.split("=")[0] not in self._option_string_actions:
                flag = word.split("=")[0]
                raise ConfigError(f"{name} is a positional argument: remove {flag}, and pass only the value")
            flags = [action.dest for action in self._actions if action.option_strings]
            message = unknown_option(name, f"on {SOURCE}", flags, spelled=flag_of)
            raise ConfigError(message if ";" in message else f"{message}; {self.prog} --help lists the options")
        return options

    def _remedy(self, words: Sequence[str], word: str) -> str:
        """Return the remedy for a word that is not the value of an option, such as "yes" in `--amp yes`."""
        if self._is_after_switch(words, word):
            return f"remove the word, because {words[words.index(word) - 1]} accepts no value"
        if "--checkpoint" in self._option_string_actions and Path(word).is_file():
            return f"set --checkpoint {word}"
        return "remove the word, or put an option before it"

    def _is_after_switch(self, words: Sequence[str], word: str) -> bool:
        """Return whether a word follows an option that accepts no value, such as --amp."""
        option = self._option_string_actions.get(words[words.index(word) - 1])
        return bool(option and option.nargs == 0)

    def _hyphenated(self, word: str) -> str:
        """Return a word of the command line with the hyphens of the known option, such as --data-dir for --data_dir."""
        name, sign, value = word.partition("=")
        known = {_letters(flag): flag for flag in self._option_string_actions if flag.startswith("--")}
        return f"{known[_letters(name)]}{sign}{value}" if name.startswith("--") and _letters(name) in known else word

    def error(self, message):
        if found := re.fullmatch(r"argument (?:\S+/)?(\S+): invalid (int|float) value: (.*)", message):
            message = f"{found[1]} must be {KINDS[int if found[2] == 'int' else float]}, got {found[3]}"
        raise ConfigError(message)


def load_config(
    description: str,
    arguments: Sequence[str] | None = None,
    saved_options: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None,
    prog: str | None = None,
    complete: Callable[[dict[str, Any], bool], dict[str, Any]] | None = None,
) -> Config:
    """Load the config file `-c FILE` and the command-line options, which override the config file.

    Args:
        description: Description in `--help`, after the usage.
        arguments: Command-line arguments; None uses `sys.argv`.
        saved_options: Function that returns the options in a checkpoint, given the checkpoint file and the command-line
            options. The function is called for `--resume FILE` without `-c`.
        prog: Name of the program in `--help`; None uses the name of the script.
        complete: Function that adds options that are not given. The arguments are the given options, and whether the
            given options include a config file. The function is not called for `--resume FILE`.

    Raises:
        ConfigError: An option or value is invalid, or a phase in the file overrides a command-line option. The message
            contains the option, and a similar name for an unknown option.
    """
    options = vars(_parser(description, prog).parse_args(arguments))
    file = path_of_config(options.pop("config"))
    return resolve_config(_checked_options(options), file, saved_options, complete)


def resolve_config(
    given: dict[str, Any],
    file: str | None = None,
    saved_options: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None,
    complete: Callable[[dict[str, Any], bool], dict[str, Any]] | None = None,
) -> Config:
    """Return the options of a run from the given options, which override a config file or a checkpoint's options.

    The model arguments in `model_kwargs` override single arguments of the config file or checkpoint.

    Args:
        given: Checked options of the user, by name.
        file: Config file.
        saved_options: As for `load_config`.
        complete: As for `load_config`.

    Raises:
        ConfigError: As for `load_config`.
    """
    resumed = given.get("resume")
    defaults: dict[str, Any] = {}
    if file:
        defaults = _options_of_file(file, given)
    elif saved_options and resumed not in (None, "auto"):
        folder = Path(resumed).resolve().parent  # the run continues in the checkpoint's folder
        defaults = {"output": str(folder.parent), "experiment": folder.name, **saved_options(resumed, given)}
    _check_phases(defaults, given, file or resumed)

    options = override(defaults, given)
    if options.get("data_dir"):
        options["data_dir"] = os.path.expanduser(options["data_dir"])  # the shell keeps ~ in --data-dir=~/photos
    if complete and resumed in (None, "auto"):
        options = complete(options, bool(file))
    config = Config(**options)
    if not config.experiment:
        config.experiment = Path(file).stem if file else config.model
    return config


def _parser(description: str, prog: str | None) -> Parser:
    """Return a parser with one option per field of `Config`. The parser does not convert values to their types."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=prog, description=description, formatter_class=formatter, allow_abbrev=False)
    help = "YAML file of options, or the name of a config of this package"
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="folder of images, the same as --data-dir")
    parser.add_argument("-c", "--config", metavar="NAME|FILE", help=help)
    for name, field in FIELDS.items():
        flags = [flag_of(name), *SHORT_FLAGS.get(name, ())]
        help = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
        if kind_of(name)[0] is bool:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            bare = field.metadata["bare"]
            parser.add_argument(*flags, nargs=_number_of_words(name), const=bare, metavar="VALUE", help=help)
    parser.add_argument("--input-size", nargs=3, metavar="VALUE", help="timm's form of --img-size: 3 HEIGHT WIDTH")
    return parser


def path_of_config(given: str | None) -> str | None:
    """Return the path of a config file. A name without an extension denotes a config of this package.

    Raises:
        ConfigError: There is no such file or config.
    """
    if given is None or (Path(given).exists() and not Path(given).is_dir()):
        return given
    names = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    if given in names:
        return str(SHIPPED / f"{given}.yaml")
    if Path(given).is_dir():
        raise ConfigError(f"{given} is a folder, not a config file: pass a folder of images without -c")
    remedy = nearest(Path(given).stem, names) or f"; configs of this package are {', '.join(names)}"
    raise ConfigError(f"config file {given} does not exist{remedy}")


def _letters(flag: str) -> str:
    return flag.replace("-", "").replace("_", "")


def _number_of_words(name: str) -> str | None:
    """Return argparse's `nargs` for an option, which is None for exactly one value."""
    kind, _ = kind_of(name)
    if kind in (tuple, dict, list) or may_be_pair(name):
        return "+"
    can_be_bare = bool(FIELDS[name].metadata["bare"])
    return "?" if can_be_bare else None


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options set on the command line, converted to their types."""
    given = {name: value for name, value in options.items() if value is not None}
    folder = given.pop("folder", None)
    if folder and "data_dir" in given:
        raise ConfigError(f"the folder is given twice, as {shown(folder)} and --data-dir {shown(given['data_dir'])}")
    if folder:
        given["data_dir"] = folder
    input_size = given.pop("input_size", None)
    if input_size and not given.get("img_size"):
        given["img_size"] = img_size_of(input_size, SOURCE)
    return checked(given, SOURCE)


def _options_of_file(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a config file of this package or of timm's train.py."""
    translation = from_timm(read_yaml(path), path, given)
    options = checked(translation.options, path, translation.errors)
    ignored = translation.ignored
    from ..distributed import is_rank0  # imported here, because `distributed` imports PyTorch

    if ignored and is_rank0():
        names = ", ".join(ignored)
        _logger.warning("%s: ignored %d timm options without effect here: %s", path, len(ignored), names)
    return options


def _check_phases(defaults: Mapping[str, Any], given: Mapping[str, Any], source: str | None) -> None:
    """Raise a ConfigError for a command-line option that the phases in the config file or checkpoint override."""
    if "phases" in given:
        return
    for phase in defaults.get("phases") or ():
        overridden = phase.keys() & given
        if overridden:
            flag = flag_of(min(overridden))
            raise ConfigError(f"{flag} has no effect, because the phases in {source} override it: set --phases instead")
