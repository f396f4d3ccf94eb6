"""Train, validate and use image classifiers, with the image backbones of Vision Longhorn and of timm.

    vil train photos                          # a folder with one folder of images per class
    vil predict --checkpoint output/photos/best.pt photo.jpg
    torchrun --nproc_per_node=8 -m vil train -c vil_tiny --data-dir /imagenet

`vil COMMAND --help` lists the options of a command.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from ..errors import ConfigError
from ..fault_tolerance.early_signals import exit_on_signals
from ..fault_tolerance.output import errors_in_a_line, print_result
from ..fault_tolerance.streams import outlive_output
from ..text import nearest, shown

# subcommand -> summary; the module `vil.cli.SUBCOMMAND` defines the options of the subcommand
COMMANDS = {
    "train": "train an image classifier",
    "validate": "evaluate a model on a validation split, or compare two models",
    "predict": "predict the classes of images",
    "export": "export a model to ONNX, torch.export or .safetensors",
    "viz": "plot which parts of an image a model uses",
    "split": "split a folder of classes into training and validation images",
    "info": "print the versions, commit and hardware that a bug report needs",
}


def main() -> None:
    """Run the command line of this process."""
    words = sys.argv[1:]
    if words[:1] == ["train"]:
        exit_on_signals()  # before the slow imports of training, so that signals are handled during the imports
        outlive_output()
    else:
        outlive_output("stderr")
    run(words)


def run(words: Sequence[str]) -> None:
    """Run the subcommand named by the first word, with the other words as options."""
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        _parser().print_help()
        return
    if name in ("-V", "--version"):
        print_result(f"vil {version('vision-longhorn')}")
        return
    if name not in COMMANDS:
        with errors_in_a_line():
            remedy = nearest(name, COMMANDS) or f"; choose one of {', '.join(COMMANDS)}"
            raise ConfigError(f"unknown command {shown(name)}{remedy}")
    importlib.import_module(f"vil.cli.{name}").main(words[1:], prog=f"vil {name}")


def _parser() -> argparse.ArgumentParser:
    """Return the parser that prints the help of `vil`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="vil", description=__doc__, formatter_class=formatter)
    parser.add_argument("-V", "--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser
