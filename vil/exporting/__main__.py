"""Command line of `python -m vil.exporting`."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from torch import nn

from ..config import ConfigError, convert, parse_key_values
from ..factory import create_model, from_checkpoint
from ..fault_tolerance.output import errors_in_a_line
from . import OPSET, ExportError, check_options, export_model
from . import __doc__ as description


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vil.exporting", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="timm model name (default: name stored in the checkpoint)")
    parser.add_argument(
        "--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="keyword arguments that create the model"
    )
    parser.add_argument("--checkpoint", help="checkpoint file with the weights (default: random weights)")
    parser.add_argument("--use-ema", action=argparse.BooleanOptionalAction, help="whether to export the EMA weights")
    parser.add_argument(
        "--img-size", nargs="+", metavar="SIZE", help="image size in pixels: one number, or height and width"
    )
    parser.add_argument(
        "--num-classes", type=int, help="number of classes; 0 exports pooled features instead of logits"
    )
    parser.add_argument(
        "--features",
        nargs="+",
        type=int,
        default=[],
        metavar="BLOCK",
        help="indices of blocks whose feature maps are additional outputs",
    )
    parser.add_argument("--opset", type=int, default=OPSET, help=f"ONNX opset version (default: {OPSET})")
    parser.add_argument(
        "--metadata", nargs="+", type=_key_and_text, default=[], metavar="KEY=TEXT",
        help="additional metadata entries to store in the file",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE|FOLDER",
        help="path to write: *.onnx, *.pt2, *.safetensors, or a folder",
    )
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("vil.exporting").setLevel(logging.INFO)  # log the steps of a long export
    with errors_in_a_line(ExportError, OSError):
        check_options(options.out, options.opset, options.features)
        arguments = dict(features=options.features, opset=options.opset, metadata=dict(options.metadata))
        report = export_model(_model_of(options), options.out, **arguments)
        # pretrained=True in --model-kwargs loads timm's weights
        trained = options.checkpoint or parse_key_values(options.model_kwargs).get("pretrained")
        print(report if trained else f"{report}; weights are random because no --checkpoint was given")


def _key_and_text(word: str) -> tuple[str, str]:
    key, sign, text = word.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"metadata must have the form KEY=TEXT, got {word!r}")
    return key, text


def _model_of(options: argparse.Namespace) -> nn.Module:
    img_size = options.img_size and convert("img_size", options.img_size, "the command line")
    chosen = {"num_classes": options.num_classes, "img_size": img_size}
    arguments = {name: value for name, value in chosen.items() if value is not None}
    arguments |= parse_key_values(options.model_kwargs)
    if options.checkpoint:
        return from_checkpoint(options.checkpoint, options.model, use_ema=options.use_ema, **arguments)
    if not options.model:
        raise ConfigError("--model or --checkpoint is required")
    return create_model(options.model, **arguments)


if __name__ == "__main__":
    main()
