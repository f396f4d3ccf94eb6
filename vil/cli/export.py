"""Export a model as ONNX, as a torch.export program, or as weights to share.

ONNX files and torch.export programs run without this package.

    vil export --checkpoint output/vil_tiny/best.pt --out vil_tiny.onnx
    vil export --checkpoint output/vil_tiny/best.pt --out vil_tiny.pt2
    vil export --checkpoint output/vil_tiny/best.pt --out vil_tiny.safetensors
    vil export --checkpoint output/vil_tiny/best.pt --out my_model/

The extension of --out selects the format. A .safetensors file stores weights in half precision, and the model's name
and arguments, so that `vil.from_checkpoint` can load the file. If --out has no extension, a folder that contains
model.safetensors is written, for timm's `local-dir:` and the Hugging Face Hub.
The input `images` of an exported model has shape (B, 3, H, W) and dtype fp32, and is preprocessed as specified in the
file's metadata. The outputs are `logits` (B, classes), or `embedding` (B, C) with --num-classes 0, and
`features_N` (B, C, h, w) for each requested block N. The batch size B is dynamic. H and W are fixed to the model's
image size.
Before a file is written, the outputs of the exported model are compared with the outputs of the original model.
docs/export.md lists programs that can read the files.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from ..config import Parser, add_model_arguments
from ..fault_tolerance.output import errors_in_a_line


def main(words: Sequence[str] | None = None, prog: str = "vil export") -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("vil.exporting").setLevel(logging.INFO)  # log the steps of a long export
    with errors_in_a_line(OSError):
        options = parse_options(words, prog)
        from ..exporting import ExportError
        from ..exporting.command import export

        with errors_in_a_line(ExportError):
            export(options)


def parse_options(words: Sequence[str] | None = None, prog: str = "vil export") -> argparse.Namespace:
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="timm model name (default: name stored in the checkpoint)")
    add_model_arguments(parser)
    add("--checkpoint", help="checkpoint file with the weights (default: timm's pretrained weights of --model)")
    add(
        "--use-ema",
        action=argparse.BooleanOptionalAction,
        help="export the EMA weights; by default the better weights of a best.pt, otherwise the raw weights",
    )
    add("--num-classes", type=int, help="number of classes; 0 exports pooled features instead of logits")
    add(
        "--features",
        nargs="+",
        type=int,
        default=[],
        metavar="BLOCK",
        help="indices of blocks whose feature maps are additional outputs",
    )
    add("--opset", type=int, help="ONNX opset version, by default one that all common runtimes support")
    add(
        "--metadata", nargs="+", type=_key_and_text, default=[], metavar="KEY=TEXT",
        help="additional metadata entries to store in the file",
    )  # fmt: skip
    add(
        "--out",
        type=Path,
        required=True,
        metavar="FILE|FOLDER",
        help="path to write: *.onnx, *.pt2, *.safetensors, or a folder",
    )
    return parser.parse_args(words)


def _key_and_text(word: str) -> tuple[str, str]:
    key, sign, text = word.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"metadata must have the form KEY=TEXT, got {word!r}")
    return key, text
