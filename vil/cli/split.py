"""Split a folder of class folders into a training and a validation split, with 20% of each class for validation.

vil split pets data/pets
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..config import Parser
from ..data.held_out import SHARE
from ..fault_tolerance.output import errors_in_a_line
from ..text import printable


def main(words: Sequence[str] | None = None, prog: str = "vil split") -> None:
    with errors_in_a_line(OSError, ValueError):
        options = parse_options(words, prog)
        from ..data.folders import split_folder

        counts = split_folder(options.source, options.target, options.validation)
        for split, count in sorted(counts.items()):
            print(printable(f"{options.target / split}: {count} images"))


def parse_options(words: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", type=Path, help="folder that contains one folder of images per class")
    add("target", type=Path, help="new folder to create, with the subfolders train and validation")
    add(
        "--validation",
        type=float,
        default=SHARE,
        help=f"share of each class to hold out for validation, greater than 0 and less than 1 (default: {SHARE})",
    )
    return parser.parse_args(words)
