r"""Evaluate top-1, top-5 and loss of a model on a validation split.

    vil validate --checkpoint output/vil_tiny/best.pt --data-dir /imagenet
    vil validate --model vim_tiny --checkpoint vim_t_midclstok_76p1acc.pth --data-dir /imagenet
    torchrun --nproc_per_node=8 -m vil validate --checkpoint output/vil_tiny/best.pt --data-dir /imagenet

Checkpoints of `vil train` store the model, image size and dataset, which options can override. With torchrun, the
images are divided among the processes, and each image is counted exactly once. Two models can be compared on the same
images:

    vil validate --checkpoint output/vil_tiny/best.pt --data-dir /imagenet \
        --against vim_t_midclstok_76p1acc.pth --against-model vim_tiny
    vil validate --checkpoint output/vil_tiny/best.pt --data-dir /imagenet --against deit_tiny_patch16_224

To evaluate on another test set, set its folder as the split, such as --data-dir /data --split
imagenetv2-matched-frequency-format-val. If the split contains only some of ImageNet's classes, named by WordNet id,
predictions are restricted to these classes, as for ImageNet-A and ImageNet-R.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ..config import ConfigError, Parser, add_model_arguments, check_choices, convert
from ..fault_tolerance.output import errors_in_a_line


def main(words: Sequence[str] | None = None, prog: str | None = None) -> None:
    logging.basicConfig(format="%(message)s")
    with errors_in_a_line():
        options = parse_options(words, prog)
        from ..evaluation.command import evaluate

        evaluate(options)


def parse_options(words: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        ConfigError: An option is unknown or has an invalid value.
    """
    options = _parser(prog).parse_args(words)
    if options.folder:
        if options.data_dir:
            raise ConfigError(f"the folder is given twice, as {options.folder!r} and --data-dir {options.data_dir!r}")
        options.data_dir = options.folder
    if options.data_dir:
        options.data_dir = os.path.expanduser(options.data_dir)
        if options.folder and options.folder.endswith((".pt", ".pth", ".safetensors")):
            raise ConfigError(f"{options.folder} is a weights file, not a folder: set --checkpoint {options.folder}")
    if not options.against and (options.plot or options.against_model):
        raise ConfigError("--against-model and --plot need a second model; set --against")
    for name in ("num_classes", "img_size", "crop_pct", "interpolation", "batch_size", "workers"):
        value = getattr(options, name)
        if value is not None:
            setattr(options, name, convert(name, value, "the command line"))
    check_choices(vars(options))
    return options


def _parser(prog: str | None) -> Parser:
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", nargs="?", metavar="FOLDER", help="folder that contains the split, the same as --data-dir")
    add("--model", help="timm model name; by default the one that the checkpoint stores")
    add_model_arguments(parser)
    add("--checkpoint", help="weights file; by default the pretrained weights of timm")
    add(
        "--use-ema",
        action=argparse.BooleanOptionalAction,
        help="evaluate the EMA weights; by default the better weights of a best.pt, otherwise the raw weights",
    )
    add("--data-dir", help="folder that contains the split")
    add("--dataset", help="timm dataset name, such as hfds/NAME; '' for folders and tar files")
    add("--split", help="name of the split (default: validation)")
    add(
        "--apply-exif-orientation",
        action=argparse.BooleanOptionalAction,
        help="rotate images by their EXIF orientation; by default as in the training of the checkpoint",
    )
    add("--num-classes", help="number of classes of the model; by default as in the checkpoint")
    add("--crop-pct", help="side of the centre crop, as a share of the resized image's shorter side")
    add("--interpolation", help="interpolation of the resize")
    add("-b", "--batch-size", default=128, help="batch size of each process (default: 128)")
    add("-j", "--workers", help="data loading workers of each process; by default chosen by the number of cores")
    add("--device", help="device; by default cuda if available")
    add("--amp", action=argparse.BooleanOptionalAction, default=True, help="bf16 autocast on GPUs")
    add("--json", metavar="FILE", help="also write the results to a JSON file; - for stdout")
    add("--report", type=Path, metavar="FOLDER", help="write an HTML report, index.html, to this folder")
    add("--csv", type=Path, metavar="FOLDER", help="write classes.csv and confusions.csv to this folder")
    add(
        "--real-labels",
        nargs="?",
        const="",
        metavar="FILE",
        help="evaluate with ImageNet's ReaL labels, from timm or a JSON file",
    )
    _add_comparison(parser)
    return parser


def _add_comparison(parser: Parser) -> None:
    add = parser.add_argument_group("comparison with a second model").add_argument
    add("--against", metavar="FILE|MODEL", help="weights of the second model, or a timm model with pretrained weights")
    add(
        "--against-model",
        metavar="MODEL",
        help="timm model name for --against; by default the one that its checkpoint stores",
    )
    add(
        "--against-model-kwargs",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="keyword arguments of the second model",
    )
    add("--against-use-ema", action=argparse.BooleanOptionalAction, help="evaluate the second model's EMA weights")
    add("--plot", type=Path, metavar="FILE", help="write a PNG plot of the comparison")
