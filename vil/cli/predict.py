"""Predict the classes of images with a trained model, as names and probabilities.

    vil predict photo.jpg
    vil predict --checkpoint output/pets/best.pt photos --csv photos.csv
    vil predict --model resnet18 photo.jpg
    vil predict photo.jpg --checkpoint weights.pth --model vil_tiny_pooled --model-kwargs patch_size=8 --img-size 64

Without --checkpoint and --model, the pretrained model vil_tiny_pooled.tiny_in200 recognizes the 200 classes of Tiny
ImageNet. A checkpoint is a file written by `vil train`, or a .safetensors file, .onnx file or folder written by
`vil export`. With --model, a checkpoint can be a file that stores only weights. Such a file also needs --model-kwargs
and --img-size if the model has other values than its defaults.
Images are rotated by their EXIF orientation, and preprocessed as in `vil validate`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import ConfigError, Parser, add_model_arguments
from ..fault_tolerance.output import check_outputs, errors_in_a_line
from ..text import counted


def main(words: Sequence[str] | None = None, prog: str = "vil predict") -> None:
    logging.basicConfig(format="%(message)s")
    with errors_in_a_line(OSError):  # an OSError is raised if, for example, the disk is full
        options = parse_options(words, prog)
        from ..prediction.command import predict_files

        unreadable, count = predict_files(options)
    if unreadable:
        sys.exit(f"{unreadable} of {counted(count, 'image')} cannot be read")


def parse_options(words: Sequence[str] | None = None, prog: str = "vil predict") -> argparse.Namespace:
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--model",
        help="timm model name (default: name stored in the checkpoint; without a checkpoint, the pretrained weights of "
        "this model are used, or vil_tiny_pooled.tiny_in200)",
    )
    add_model_arguments(parser)
    add(
        "--checkpoint",
        metavar="FILE|FOLDER",
        help="path of the trained model: .pt, .safetensors or .onnx file, or folder written by vil export "
        "(default: pretrained weights)",
    )
    add(
        "--use-ema",
        action=argparse.BooleanOptionalAction,
        help="use the EMA weights; by default the better weights of a best.pt, otherwise the raw weights",
    )
    add("images", nargs="*", type=Path, metavar="IMAGE|FOLDER", help="image files, or folders with images")
    add("--topk", type=int, default=5, help="number of classes per image (default: 5)")
    add("-b", "--batch-size", type=int, default=32, help="number of images per forward pass (default: 32)")
    add("--device", help="device to run on, such as cuda or cpu (default: cuda if available)")
    add("--csv", type=Path, metavar="FILE", help="also write the predictions to a CSV file, one image per row")
    add("--json", type=Path, metavar="FILE", help="also write the predictions to a JSON file; - prints only the JSON")
    options = parser.parse_args(words)
    if not options.images:
        raise ConfigError(
            "the following arguments are required: IMAGE|FOLDER; if they are given, move them before --img-size and "
            "--model-kwargs, which accept several values"
        )
    for name in ("topk", "batch_size"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    check_outputs([path for path in (options.csv, options.json) if path and path != Path("-")])
    return options
