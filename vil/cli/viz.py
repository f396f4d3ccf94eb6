"""Plot which parts of an image a ViL or ViM uses: evidence for a class, scan traces and receptive fields.

    vil viz --checkpoint output/digits/last.pt --images data/digits/validation/3 --out output/viz
    vil viz --model vil_tiny_pooled photo.jpg

A checkpoint is a file written by `vil train`, or a .safetensors file or folder written by `vil export`. With --model, a
checkpoint can be a file that stores only weights.
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
    add("--model", help="timm model name (default: name stored in the checkpoint)")
    add("--checkpoint", help="checkpoint file with the weights (default: timm's pretrained weights of --model)")
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
    if not (options.model or options.checkpoint):
        raise ConfigError("--model or --checkpoint is required")
    if options.use_ema is not None and not options.checkpoint:
        raise ConfigError("--use-ema needs --checkpoint with a checkpoint of vil train")
    options.images = [*options.files, *options.images]
    if not options.images:
        raise ConfigError("images are required: give image files or folders with images")
    return options
