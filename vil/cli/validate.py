r"""Evaluate top-1, top-5 and loss of a model on a validation split.

    python validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet
    python validate.py --model vim_tiny --checkpoint vim_t_midclstok_76p1acc.pth --data-dir /imagenet
    torchrun --nproc_per_node=8 validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet

Checkpoints of train_imagenet.py store the model, image size and dataset, which options can override. With torchrun,
each image is counted exactly once. Two models can be compared on the same images:

    python validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet \\
        --against vim_t_midclstok_76p1acc.pth --against-model vim_tiny
    python validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet --against deit_tiny_patch16_224

To evaluate on another test set, set its folder as the split, such as --data-dir /data --split
imagenetv2-matched-frequency-format-val. If the folder contains only some of ImageNet's classes, named by WordNet id,
predictions are restricted to these classes, as for ImageNet-A and ImageNet-R.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import torch.distributed as dist

from ..checkpoint import Checkpoint
from ..config import ConfigError, Parser, check_choices, convert, parse_key_values
from ..devices import known_device
from ..distributed import init_distributed_device, is_rank0
from ..evaluation.models import build
from ..evaluation.plot import plot_comparison
from ..evaluation.report import report_page
from ..evaluation.results import Validation
from ..evaluation.settings import (
    DataSettings,
    EvaluationSettings,
    ModelOptions,
    ModelSettings,
    resolve_data,
    resolve_model,
    with_sizes_of,
)
from ..evaluation.tables import TABLES, write_tables
from ..evaluation.validation import validate
from ..fault_tolerance import output
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.output import LostResultError, errors_in_a_line, print_result
from ..fault_tolerance.streams import outlive_output

PAGE = "index.html"
WEIGHT_FILES = (".pt", ".pth", ".tar", ".safetensors", ".bin")


def main() -> None:
    logging.basicConfig(format="%(message)s")
    try:
        with errors_in_a_line():
            options = parse_options()
            device, rank, world_size = init_distributed_device(known_device(options.device))

            data, settings = resolve_settings(options)
            models = [build(model, device) for model in settings]
            evaluation = evaluation_settings(options)
            validation = validate(models, data, evaluation, device, rank, world_size)
            if rank == 0:
                report(validation, options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        ConfigError: An option is unknown or has an invalid value, or a requested output file cannot be written.
    """
    options = _parser().parse_args()
    if not options.against and (options.plot or options.against_model):
        raise ConfigError("--against-model and --plot need a second model; set --against")
    for name in ("num_classes", "img_size", "crop_pct", "interpolation", "batch_size", "workers"):
        value = getattr(options, name)
        if value is not None:
            setattr(options, name, convert(name, value, "the command line"))
    check_choices(vars(options))
    if is_rank0():  # only rank 0 writes files
        check_outputs(options)
    return options


def _parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="timm model name; by default the one that the checkpoint stores")
    add("--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="keyword arguments of the model")
    add("--checkpoint", help="weights file; by default the pretrained weights of timm")
    add(
        "--use-ema",
        action=argparse.BooleanOptionalAction,
        help="evaluate the EMA weights; by default the better weights if the file is a best.pt",
    )
    add("--data-dir", help="folder that contains the split")
    add("--dataset", help="timm dataset name, such as hfds/NAME; '' for folders and tar files")
    add("--split", help="name of the split (default: validation)")
    add("--num-classes", help="number of classes of the model")
    add("--img-size", nargs="+", metavar="SIZE", help="image size, or height and width")
    add("--crop-pct", help="share of the image inside the centre crop")
    add("--interpolation", help="interpolation of the resize")
    add("--batch-size", default=128, help="batch size of each process (default: 128)")
    add("--workers", help="data loading workers of each process; by default chosen by the number of cores")
    add("--device", help="device; by default a GPU if available")
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


def check_outputs(options: argparse.Namespace) -> None:
    """Raise a ConfigError if a requested output file is not writable, before evaluating."""
    paths = []
    if options.csv:
        paths += [options.csv / table for table in TABLES]
    if options.report:
        paths.append(options.report / PAGE)
    if options.plot:
        paths.append(options.plot)
    if options.json and options.json != "-":
        paths.append(Path(options.json))
    output.check_outputs(paths)
    if options.plot:
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--plot needs the package matplotlib; run pip install matplotlib ({error})") from error


def resolve_settings(options: argparse.Namespace) -> tuple[DataSettings, list[ModelSettings]]:
    """Return the data settings and the settings of one or two models."""
    given = ModelOptions(
        model=options.model,
        checkpoint=options.checkpoint,
        use_ema=options.use_ema,
        num_classes=options.num_classes,
        img_size=options.img_size,
        crop_pct=options.crop_pct,
        interpolation=options.interpolation,
        model_kwargs=parse_key_values(options.model_kwargs),
    )
    source = Checkpoint(options.checkpoint) if options.checkpoint else None
    data = resolve_data(options.data_dir, options.dataset, options.split, source)
    first = resolve_model(given, source)
    if not options.against:
        return data, [first]
    return data, [first, _second_settings(options, first)]


def _second_settings(options: argparse.Namespace, first: ModelSettings) -> ModelSettings:
    path = Path(options.against)
    is_file = path.exists() or path.suffix in WEIGHT_FILES
    given = ModelOptions(
        model=options.against_model or (None if is_file else options.against),
        checkpoint=options.against if is_file else None,
        use_ema=options.against_use_ema,
        num_classes=options.num_classes,
        img_size=options.img_size,
        crop_pct=options.crop_pct,
        interpolation=options.interpolation,
        model_kwargs=parse_key_values(options.against_model_kwargs),
    )
    source = Checkpoint(options.against) if is_file else None
    second = resolve_model(given, source, option="--against-model")
    # timm's pretrained weights come with their own number of classes and image size
    return with_sizes_of(second, first) if is_file else second


def evaluation_settings(options: argparse.Namespace) -> EvaluationSettings:
    return EvaluationSettings(
        batch_size=options.batch_size,
        workers=options.workers,
        amp=options.amp,
        real_labels=options.real_labels,
        keep_predictions=bool(options.csv or options.report),
    )


def report(validation: Validation, options: argparse.Namespace) -> None:
    """Print the results and write the requested files.

    Raises:
        LostResultError: A result file could not be written. The results are still printed.
    """
    as_json = json.dumps(validation.as_dict(), indent=2)
    text = validation.as_text()
    try:
        write_files(validation, as_json, options)
        if options.report:
            text += f"\n{options.report / PAGE}"
    except OSError as error:  # for example a full disk
        raise LostResultError(f"failed to write the results: {error}") from error
    finally:
        if options.json == "-":
            print(text, file=sys.stderr)
        print_result(as_json if options.json == "-" else text)


def write_files(validation: Validation, as_json: str, options: argparse.Namespace) -> None:
    names = [model.settings.model for model in validation.models]
    if options.json and options.json != "-":
        write_atomically(Path(options.json), as_json + "\n")
    if options.csv and validation.predictions:
        write_tables(options.csv, validation.predictions, validation.class_names)
    if options.plot and validation.predictions and validation.comparison:
        write_atomically(options.plot, plot_comparison(names, validation.comparison, validation.predictions))
    if options.report and validation.predictions:
        data = validation.data
        title = f"Validation of {' and '.join(names)} on {data.data_dir or data.dataset}, {data.split}"
        page = report_page(
            title,
            validation.rows(),
            validation.predictions,
            validation.class_names,
            validation.notes,
            validation.images,
        )
        write_atomically(options.report / PAGE, page)


if __name__ == "__main__":
    outlive_output("stderr")
    main()
