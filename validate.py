"""Top-1, top-5 and loss of a model on a validation split, beside the published numbers of its size.

    python validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet
    python validate.py --model vim_tiny --checkpoint vim_t_midclstok_76p1acc.pth --data-dir /imagenet
    torchrun --nproc_per_node=8 validate.py --checkpoint output/vil_tiny/best.pt --data-dir /imagenet

A checkpoint of train_imagenet.py knows its model, image size and data; options override what it says. Under torchrun
each image is counted exactly once.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from timm.data import resolve_data_config
from timm.utils import init_distributed_device
from tqdm import tqdm

import vil  # noqa: F401  registers the models
from vil.published import IMAGENET_CLASSES, published_for
from vil.training import checkpoint, data
from vil.training.config import ConfigError, parse_key_values
from vil.training.evaluation import Evaluation, autocast, default_device, evaluate
from vil.training.models import create_model
from vil.training.summary import write_atomically


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="timm model; the checkpoint's if it says")
    parser.add_argument("--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the model")
    parser.add_argument("--checkpoint", help="weights; timm's pretrained ones if not given")
    parser.add_argument("--use-ema", action="store_true", help="the checkpoint's moving average of the weights")
    parser.add_argument("--data-dir", help="folder that holds the split")
    parser.add_argument("--dataset", help="timm dataset name, such as hfds/NAME; folders and tar files if not given")
    parser.add_argument("--split", help="name of the split (default: validation)")
    parser.add_argument("--num-classes", type=int, help="classes of the model")
    parser.add_argument("--img-size", type=int, help="image size")
    parser.add_argument("--crop-pct", type=float, help="share of the image inside the centre crop")
    parser.add_argument("--interpolation", help="interpolation of the resize")
    parser.add_argument("--batch-size", type=int, default=128, help="images a process holds at once (default: 128)")
    parser.add_argument("--workers", type=int, default=8, help="loader processes per process (default: 8)")
    parser.add_argument("--device", default=default_device(), help="a GPU if there is one")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True, help="bf16 autocast on GPUs")
    parser.add_argument("--json", metavar="FILE", help="also write the results to a file; - for the standard output")
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(format="%(message)s")
    options = parse_options()
    try:
        device = init_distributed_device(process := SimpleNamespace(device=options.device))
        settings = resolve_settings(options)
        model = load_model(settings, options).to(device).eval()
        result = validate(model, settings, options, device, process.rank, process.world_size)
        if process.rank == 0:
            print(validation_line(settings["model"], model.num_classes, result))
            if options.json:
                text = json.dumps(as_dict(settings, options, model, result), indent=2) + "\n"
                sys.stdout.write(text) if options.json == "-" else write_atomically(Path(options.json), text)
    except (ConfigError, checkpoint.CheckpointError) as error:
        sys.exit(f"error: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def resolve_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the checkpoint says of its model and data, overridden by the command line."""
    saved = checkpoint.saved_config(options.checkpoint) if options.checkpoint else {}
    names = ("model", "data_dir", "dataset", "num_classes", "img_size", "crop_pct", "interpolation")
    settings = {name: getattr(options, name) or saved.get(name) for name in names}
    settings["split"] = options.split or saved.get("val_split", "validation")
    settings["dataset"] = settings["dataset"] or ""
    settings["model_kwargs"] = {**saved.get("model_kwargs", {}), **parse_key_values(options.model_kwargs)}
    if not settings["model"]:
        raise ConfigError("--model is not given, and no checkpoint of train_imagenet.py says it")
    return settings


def load_model(settings: dict[str, Any], options: argparse.Namespace) -> torch.nn.Module:
    arguments = {name: settings[name] for name in ("num_classes", "img_size") if settings[name]}
    model = create_model(
        settings["model"], pretrained=options.checkpoint is None, **arguments, **settings["model_kwargs"]
    )
    if options.checkpoint:
        checkpoint.load_weights(model, options.checkpoint, options.use_ema)
    return model


def validate(model, settings, options, device: torch.device, rank: int, world_size: int) -> Evaluation:
    data.share_cores(device, options.workers)
    choices = {name: settings[name] for name in ("img_size", "crop_pct", "interpolation")}
    data_config = resolve_data_config(choices, model=model)
    images = data.open_split(settings["data_dir"], settings["dataset"], settings["split"], model.num_classes)
    loader = data.evaluation_loader(images, data_config, device, options.workers, options.batch_size, rank, world_size)
    loader = tqdm(loader, total=len(loader), unit="batch", disable=None if rank == 0 else True)
    return evaluate([model], loader, device, autocast(device, options.amp, "bfloat16"))[0]


def validation_line(name: str, num_classes: int, result: Evaluation) -> str:
    low, high = result.top1_interval
    line = (
        f"{name}: top-1 {result.top1:.2f}% (95% interval {low:.2f} to {high:.2f}), top-5 {result.top5:.2f}%, "
        f"loss {result.loss:.4f} on {result.images} images, {result.images_per_second:.0f} images/s"
    )
    if result.unreadable:
        line += f"; {result.unreadable} unreadable images were left out"
    if num_classes != IMAGENET_CLASSES:
        return line + f"; published numbers are for ImageNet-1k, not for these {num_classes} classes"
    published = [
        f"{peer} {top1}" + (f" (top-5 {top5})" if top5 else "") for peer, (top1, top5) in published_for(name).items()
    ]
    return line + ("; published top-1 on ImageNet-1k: " + ", ".join(published) if published else "")


def as_dict(settings: dict[str, Any], options: argparse.Namespace, model, result: Evaluation) -> dict[str, Any]:
    return {
        **settings,
        "checkpoint": options.checkpoint,
        "use_ema": options.use_ema,
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


if __name__ == "__main__":
    main()
