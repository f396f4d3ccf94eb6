r"""Evaluate top-1, top-5 and loss of a model on a validation split, beside published accuracies of its size.

    python validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet
    python validate.py --model vim_tiny --checkpoint vim_t_midclstok_76p1acc.pth --data-dir /imagenet
    torchrun --nproc_per_node=8 validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet

A checkpoint of train_imagenet.py stores its model, image size and data; options override them. With torchrun, each
image is counted exactly once. Two models can be compared on the same images:

    python validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet \\
        --against vim_t_midclstok_76p1acc.pth --against-model vim_tiny
    python validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet --against deit_tiny_patch16_224

Other test sets are other splits, such as --data-dir /data --split imagenetv2-matched-frequency-format-val. On a folder
with some of ImageNet's classes, named by their WordNet ids, models choose only among these classes, as for ImageNet-A
and ImageNet-R.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timm
import torch
import torch.distributed as dist
from tqdm import tqdm

from ..checkpoint import Checkpoint
from ..classes import Reordered, check_order, imagenet_ids, names_of
from ..config import ConfigError, Parser, check_choices, confirm_dataset, convert, parse_key_values
from ..data.host.workers import share_cores
from ..data.loaders import evaluation_loader
from ..data.sources.images import UnreadableSplitError
from ..data.sources.splits import class_names, count_images, describe_split
from ..devices import autocast, known_device
from ..distributed import init_processes, is_first_process
from ..evaluation.comparison import Comparison, Predictions, Speed, markdown, measure_speed
from ..evaluation.evaluator import Evaluation, Evaluator
from ..evaluation.imagenet import OnlyClasses, Renormalized, open_test_split, real_labels
from ..evaluation.report import report_page
from ..factory import create_model, data_config_of, load_model
from ..fault_tolerance import output
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.output import LostResultError, errors_in_a_line, print_result
from ..fault_tolerance.streams import outlive_output
from ..published import IMAGENET_CLASSES, published_for

PAGE = "index.html"
SHARED = "crop_pct", "crop_mode", "interpolation"  # settings of the first model that both models use


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="timm model name; by default the checkpoint's")
    parser.add_argument(
        "--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="keyword arguments of the model"
    )
    parser.add_argument("--checkpoint", help="file with the weights; by default timm's pretrained weights")
    average = dict(action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--use-ema", **average, help="evaluate the EMA weights (best.pt chooses by itself)")
    parser.add_argument("--data-dir", help="folder that contains the split")
    parser.add_argument("--dataset", help="timm dataset name, such as hfds/NAME; '' for folders and tar files")
    parser.add_argument("--split", help="name of the split (default: validation)")
    parser.add_argument("--num-classes", help="number of classes of the model")
    parser.add_argument("--img-size", nargs="+", metavar="SIZE", help="image size, or height and width")
    parser.add_argument("--crop-pct", help="share of the image inside the centre crop")
    parser.add_argument("--interpolation", help="interpolation of the resize")
    parser.add_argument("--batch-size", default=128, help="batch size of each process (default: 128)")
    parser.add_argument("--workers", help="workers of each process (chosen by the number of cores if not set)")
    parser.add_argument("--device", help="device (a GPU if available)")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True, help="bf16 autocast on GPUs")
    parser.add_argument("--json", metavar="FILE", help="also write the results to a JSON file; - for stdout")
    parser.add_argument(
        "--report", type=Path, metavar="FOLDER", help="write an HTML report with plots and mistakes, index.html"
    )
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="write classes.csv and confusions.csv there")
    parser.add_argument(
        "--real-labels", nargs="?", const="", metavar="FILE",
        help="evaluate with ImageNet's reassessed labels (ReaL), timm's or those of a JSON file",
    )  # fmt: skip
    two = parser.add_argument_group("comparison with a second model")
    two.add_argument(
        "--against", metavar="FILE|MODEL", help="weights of the second model, or a timm model with pretrained weights"
    )
    two.add_argument(
        "--against-model", metavar="MODEL", help="timm model name of these weights; by default the checkpoint's"
    )
    two.add_argument(
        "--against-model-kwargs",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="keyword arguments of the second model",
    )
    two.add_argument("--against-use-ema", **average, help="evaluate the second model's EMA weights")
    two.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG plot of the comparison")
    options = parser.parse_args()
    if not options.against and (options.plot or options.against_model):
        parser.error("--against-model and --plot need a second model: set --against")
    for name in ("num_classes", "img_size", "crop_pct", "interpolation", "batch_size", "workers"):
        if (value := getattr(options, name)) is not None:
            setattr(options, name, convert(name, value, "the command line"))
    check_choices(vars(options))
    if is_first_process():  # rank 0 writes the files
        check_outputs(options)
    return options


def check_outputs(options: argparse.Namespace) -> None:
    """Raise a ConfigError if a requested output could not be written at the end."""
    tables = [options.csv / f"{name}.csv" for name in ("classes", "confusions")] if options.csv else []
    tables += [options.report / PAGE] if options.report else []
    output.check_outputs([*tables, *(Path(word) for word in (options.plot, options.json) if word and word != "-")])
    if options.plot:
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--plot needs a package: pip install matplotlib ({error})") from error


def main() -> None:
    logging.basicConfig(format="%(message)s")
    try:
        with errors_in_a_line():
            options = parse_options()
            device = init_processes(process := SimpleNamespace(device=known_device(options.device)))
            runs = [resolve_settings(options, "--model")]
            if options.against:
                runs.append(second_settings(options, runs[0]))
            models = [model_of(settings).to(device).eval() for settings in runs]
            outcome = validate(models, runs, options, device, process.rank, process.world_size)
            if process.rank == 0:
                report(runs, models, outcome, options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def resolve_settings(options: argparse.Namespace, model_option: str) -> dict[str, Any]:
    """Return the model and data of the checkpoint, overridden by the command line."""
    path = options.checkpoint
    source = Checkpoint(path) if path else None
    saved = source.options | source.preprocessing if source else {}
    names = ("model", "data_dir", "dataset", "num_classes", "img_size", "crop_pct", "interpolation")
    given = {name: getattr(options, name) for name in names}
    settings = {name: saved.get(name) if value is None else value for name, value in given.items()}
    if not options.data_dir and not settings["dataset"] and not Path(settings["data_dir"] or ".").is_dir():
        raise ConfigError(
            f"data_dir {settings['data_dir']}, on which {options.checkpoint} was trained, does not exist here: set "
            "--data-dir"
        )
    settings |= {name: saved.get(name) for name in ("mean", "std", "crop_mode")}
    settings["split"] = options.split or saved.get("val_split", "validation")
    settings["dataset"] = settings["dataset"] or ""
    own = {k: v for k, v in (saved.get("model_kwargs") or {}).items() if k != "img_size" or not options.img_size}
    settings["model_kwargs"] = own | parse_key_values(options.model_kwargs)
    use_ema = options.use_ema
    if use_ema is None:
        use_ema = bool(source and source.average_is_best)
    settings |= {"checkpoint": options.checkpoint, "use_ema": use_ema, "source": source}
    if not settings["model"]:
        raise ConfigError(
            f"{model_option} is required, unless a checkpoint of train_imagenet.py stores the model's name"
        )
    return settings


def second_settings(options: argparse.Namespace, first: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the second model on the first model's data."""
    path = Path(options.against)
    is_file = path.exists() or path.suffix in (".pt", ".pth", ".tar", ".safetensors", ".bin")
    second = argparse.Namespace(**vars(options))
    second.model = options.against_model or (None if is_file else options.against)
    second.checkpoint = options.against if is_file else None
    second.model_kwargs, second.use_ema = options.against_model_kwargs, options.against_use_ema
    second.data_dir, second.dataset = first["data_dir"], first["dataset"]
    settings = resolve_settings(second, "--against-model")
    if is_file:  # pretrained weights of timm specify their preprocessing
        settings |= {name: settings[name] or first[name] for name in ("num_classes", "img_size")}
    return settings | {name: first[name] for name in ("data_dir", "dataset", "split")}


def model_of(settings: dict[str, Any]) -> torch.nn.Module:
    arguments = {name: settings[name] for name in ("num_classes", "img_size") if settings[name]}
    arguments |= settings["model_kwargs"]
    if source := settings["source"]:
        return load_model(settings["model"], source, settings["use_ema"], **arguments)
    name = settings["model"]
    if timm.is_model(name) and not timm.is_model_pretrained(name) and "pretrained_cfg_overlay" not in arguments:
        raise ConfigError(
            f"timm has no pretrained weights for {name}: set --checkpoint FILE, or --against FILE for the second model"
        )
    return create_model(name, pretrained=True, **arguments)


@dataclass
class Outcome:
    """Results of the models, remarks for the reader, and the comparison of two models."""

    results: list[Evaluation]
    notes: list[str]
    class_names: dict[int, str]
    comparison: Comparison | None
    speeds: list[Speed]
    dataset: Any


def validate(models, runs, options, device: torch.device, rank: int, world_size: int) -> Outcome:
    """Evaluate the models of the settings in `runs` on the split."""
    share_cores(device, options.workers)
    settings = runs[0]
    chosen = "img_size", "crop_pct", "interpolation", "mean", "std", "crop_mode"
    choices = [{name: run[name] for name in chosen} for run in runs]
    data_config, *others = [data_config_of(model, **choice) for choice, model in zip(choices, models)]
    num_classes = models[0].num_classes
    if any(model.num_classes != num_classes for model in models):
        raise ConfigError(
            "the models must have equally many classes, got " + " and ".join(str(model.num_classes) for model in models)
        )
    judged = [models[0], *(same_input(model, config, data_config) for model, config in zip(models[1:], others))]
    for run in runs[1:]:
        run |= {name: settings[name] for name in SHARED}
    confirm_dataset(settings, vars(options), settings["checkpoint"])
    learned = [run["source"].label_names if run["source"] else names_of(model) for run, model in zip(runs, models)]
    owners = [str(run["source"] or run["model"]) for run in runs]
    place = settings["data_dir"], settings["dataset"], settings["split"]
    images, classes = open_test_split(*place, num_classes, learned[0], owners[0])
    if world_size > (count := count_images(images)):
        raise ConfigError(f"the world size must be at most {count}, the number of images, got {world_size}")
    if rank == 0:
        logging.warning("%s", describe_split(settings["split"], images))
    numbers = class_names(images)
    reference = learned[0] or sorted(numbers, key=lambda name: numbers[name])
    for m, (names, owner) in enumerate(zip(learned, owners)):
        other = owners[0] if learned[0] else f"the split {settings['split']!r}"
        if order := check_order(names, reference, owner, other, "the models and the split must have the same classes"):
            judged[m] = Reordered(judged[m], order).to(device)
    notes = ["EMA weights"] if settings["use_ema"] and len(runs) == 1 else []
    if classes:
        judged = [OnlyClasses(model, classes, num_classes).to(device) for model in judged]
        notes.append(f"evaluated among the {len(classes)} classes of this split")
    labels = None
    if options.real_labels is not None:
        labels = real_labels(images, num_classes, options.real_labels or None)
        if order := check_order(imagenet_ids(), learned[0], "the ReaL labels", owners[0], "leave out --real-labels"):
            labels = labels[:, order]
        notes.append("evaluated with ReaL labels, without images that have none")
    loader = evaluation_loader(images, data_config, device, options.workers, options.batch_size, rank, world_size)
    batches = tqdm(loader, total=len(loader), unit="batch", disable=None if rank == 0 else True)
    predictions, precision = Predictions(), autocast(device, options.amp, "bfloat16")
    evaluate = Evaluator(judged, data_config, device, precision, options.batch_size)
    results = evaluate(batches, predictions)
    if not results[0].images:
        missing = "can be read" if results[0].unreadable else "has a class"
        raise UnreadableSplitError(f"no image of the split {settings['split']!r} {missing}")
    if results[0].unreadable:
        notes.append(f"{results[0].unreadable} unreadable images were left out")
    comparison = None
    if labels is not None or len(models) > 1 or options.csv or options.report:
        comparison = Comparison.of(*predictions.gather(), labels)
        results = [comparison.judge(result, m) for m, result in enumerate(results)]
    speeds = []
    if len(models) > 1 and rank == 0:
        batch = evaluate.normalised(next(iter(loader))[0])
        speeds = [measure_speed(model, batch, precision) for model in models]
    names = {number: name for name, number in numbers.items()} or dict(enumerate(reference))
    return Outcome(results, notes, names, comparison, speeds, images)


def same_input(model: torch.nn.Module, own: dict[str, Any], shared: dict[str, Any]) -> torch.nn.Module:
    """Adapt the second model to images that are prepared for the first.

    Raises:
        ConfigError: The models have different image sizes.
    """
    if own["input_size"] != shared["input_size"]:
        sizes = "{} and {}".format(shared["input_size"][1:], own["input_size"][1:])
        raise ConfigError(f"the models must have the same image size, got {sizes}: set --img-size for both")
    for name in SHARED:
        if own[name] != shared[name]:
            logging.warning(
                "both models see images prepared with %s %s; the second's own is %s", name, shared[name], own[name]
            )
    return Renormalized(model, shared, own)


def report(runs: list[dict[str, Any]], models: list[torch.nn.Module], outcome: Outcome, options) -> None:
    """Print the results and write the requested files.

    Raises:
        LostResultError: A result could not be written; all others were.
    """
    rows = [as_dict(*parts) for parts in zip(runs, models, outcome.results)]
    if options.against:
        result = as_comparison(rows, outcome)
        text = markdown(result)
    else:
        result = rows[0]
        text = validation_line(runs[0]["model"], models[0].num_classes, outcome.results[0], outcome.notes)
    as_json = json.dumps(result, indent=2)
    try:
        if options.json and options.json != "-":
            write_atomically(Path(options.json), as_json + "\n")
        write_files(runs, rows, outcome, options)
        if options.report:
            text += f"\n{options.report / PAGE}"
    except OSError as error:  # such as a full disk
        raise LostResultError(f"failed to write a file: {error}") from error
    finally:
        if options.json == "-":
            print(text, file=sys.stderr)
        print_result(as_json if options.json == "-" else text)


def write_files(runs: list[dict[str, Any]], rows: list[dict[str, Any]], outcome: Outcome, options) -> None:
    if options.csv:
        outcome.comparison.write_tables(options.csv, outcome.class_names)
    if options.plot:
        write_atomically(options.plot, outcome.comparison.plot([settings["model"] for settings in runs]))
    if options.report:
        models, place = " and ".join(run["model"] for run in runs), runs[0]["data_dir"] or runs[0]["dataset"]
        title = f"Validation of {models} on {place}, {runs[0]['split']}"
        page = report_page(title, rows, outcome.comparison, outcome.class_names, outcome.notes, outcome.dataset)
        write_atomically(options.report / PAGE, page)


def validation_line(name: str, num_classes: int, result: Evaluation, notes: Sequence[str] = ()) -> str:
    low, high = result.top1_interval
    line = (
        f"{name}: top-1 {result.top1:.2f}% (95% interval {low:.2f} to {high:.2f}), top-5 {result.top5:.2f}%, "
        f"loss {result.loss:.4f} on {result.images} images, {result.images_per_second:.0f} images/s"
    )
    line = "; ".join([line, *notes])
    if num_classes != IMAGENET_CLASSES:
        return line + f"; published numbers are for ImageNet-1k, not for these {num_classes} classes"
    published = [
        f"{peer} {top1}" + (f" (top-5 {top5})" if top5 else "") for peer, (top1, top5) in published_for(name).items()
    ]
    return line + ("; published top-1 on ImageNet-1k: " + ", ".join(published) if published else "")


def as_dict(settings: dict[str, Any], model: torch.nn.Module, result: Evaluation) -> dict[str, Any]:
    return {
        **{name: value for name, value in settings.items() if name != "source"},
        "weights": (settings["checkpoint"] or "pretrained") + ", the moving average" * settings["use_ema"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "images": result.images,
        "unreadable": result.unreadable,
        "top1": result.top1,
        "top1_interval": result.top1_interval,
        "top5": result.top5,
        "loss": result.loss,
        "images_per_second": result.images_per_second,
        "published": published_for(settings["model"]) if model.num_classes == IMAGENET_CLASSES else {},
    }


def as_comparison(rows: list[dict[str, Any]], outcome: Outcome) -> dict[str, Any]:
    found = outcome.comparison
    for row, speed in zip(rows, outcome.speeds):
        row |= asdict(speed)  # replaces the speed of both models and the loader together
    paired = {"top1": found.top1.as_dict(), "top5": found.top5.as_dict(), "agreement": found.agreement}
    return {"models": rows, "paired": paired, "notes": outcome.notes}


if __name__ == "__main__":
    outlive_output("stderr")
    main()
