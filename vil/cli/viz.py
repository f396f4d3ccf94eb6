"""Plot which parts of an image a ViL or ViM uses: evidence for a class, scan traces and receptive fields.

    vil viz --checkpoint output/digits/last.pt --images data/digits/validation/3 --out output/viz

docs/seeing-inside.md explains how to read the plots.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..config import ConfigError, Parser
from ..fault_tolerance.output import errors_in_a_line


def main(words: Sequence[str] | None = None, prog: str = "vil viz") -> None:
    with errors_in_a_line(OSError):
        options = parse_options(words, prog)
        try:
            import matplotlib.figure  # noqa: F401  fail before the slow loading of the model
        except ImportError as error:
            raise ConfigError(f"vil viz needs matplotlib: pip install matplotlib ({error})") from error
        from ..visualization.command import draw

        draw(options)


def parse_options(words: Sequence[str] | None = None, prog: str = "vil viz") -> argparse.Namespace:
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", required=True, help="checkpoint written by vil train, or weights written by vil export")
    add(
        "--use-ema",
        action=argparse.BooleanOptionalAction,
        help="use the EMA weights; by default the better weights of a best.pt, otherwise the raw weights",
    )
    add("files", nargs="*", type=Path, metavar="IMAGE|FOLDER", help="image files, or folders with images")
    add("--images", default=[], type=Path, nargs="+", metavar="IMAGE|FOLDER", help="the same as IMAGE|FOLDER")
    add("--count", type=int, default=3, help="number of images to analyse (default: 3); the first 8 are plotted")
    add(
        "--blocks",
        type=int,
        nargs="+",
        help="indices of the blocks to plot in scans.png (default: first, middle and last block)",
    )
    add("--out", type=Path, default=Path("output/viz"), help="output folder for why.png, scans.png and fields.png")
    options = parser.parse_args(words)
    options.images = [*options.files, *options.images]
    if not options.images:
        raise ConfigError("images are required: give image files or folders with images")
    return options
