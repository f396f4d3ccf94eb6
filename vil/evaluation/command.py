"""The work of `vil validate`: evaluate one or two models, print the results and write the requested files."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from ..checkpoint import Checkpoint
from ..config import ConfigError, parse_key_values
from ..devices import known_device
from ..distributed import init_distributed_device, is_rank0
from ..fault_tolerance import output
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.output import LostResultError, print_result
from .models import build
from .plot import plot_comparison
from .report import report_page
from .results import Validation
from .settings import (
    DataSettings,
    EvaluationSettings,
    ModelOptions,
    ModelSettings,
    resolve_data,
    resolve_model,
    with_sizes_of,
)
from .tables import TABLES, write_tables
from .validation import validate

PAGE = "index.html"
WEIGHT_FILES = (".pt", ".pth", ".tar", ".safetensors", ".bin")


def evaluate(options: argparse.Namespace) -> None:
    """Evaluate the models, print the results and write the requested files.

    Raises:
        ConfigError, CheckpointError: The models or the data cannot be read, or a file cannot be written.
        LostResultError: A result could not be written.
    """
    try:
        if is_rank0():  # only rank 0 writes files
            check_outputs(options)
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


def check_outputs(options: argparse.Namespace) -> None:
    """Raise a ConfigError before evaluation if an output file is not writable, or matplotlib is missing for a plot."""
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
    """Return the data settings and one or two models' settings, given the options of `vil validate`."""
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
    data = resolve_data(options.data_dir, options.dataset, options.split, source, options.apply_exif_orientation)
    first = resolve_model(given, source)
    if not options.against:
        return data, [first]

    path = Path(options.against)
    is_file = path.exists() or path.suffix in WEIGHT_FILES
    given = replace(
        given,
        model=options.against_model or (None if is_file else options.against),
        checkpoint=options.against if is_file else None,
        use_ema=options.against_use_ema,
        model_kwargs=parse_key_values(options.against_model_kwargs),
    )
    source = Checkpoint(options.against) if is_file else None
    second = resolve_model(given, source, option="--against-model")
    # timm's pretrained weights keep their own number of classes and image size.
    return data, [first, with_sizes_of(second, first) if is_file else second]


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
    except OSError as error:  # an OSError is raised if, for example, the disk is full
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
        title = f"Validation of {' and '.join(names)} on {data.data_dir or data.dataset}, {data.images}"
        page = report_page(
            title,
            validation.rows(),
            validation.predictions,
            validation.class_names,
            validation.notes,
            validation.images,
        )
        write_atomically(options.report / PAGE, page)
