"""The command line of `python -m vil.viz`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from ..checkpoint import Checkpoint
from ..config import ConfigError
from ..data.folders import list_images
from ..data.images import read_image
from ..factory import create_model, data_config_of, from_checkpoint
from ..files import write_atomically
from ..output import errors_in_a_line
from ..predict import Prediction, predict
from ..text import label_of
from ..vision_longhorn import VisionLonghorn
from . import __doc__ as description
from .evidence import class_evidence, deletion_curve, effective_receptive_field, patch_sums
from .pictures import plot_receptive_fields, plot_scans, plot_why
from .traces import reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_READ = 64  # images, over which fields are averaged
SHOWN = 8  # images of a picture at most, which Matplotlib lays out in seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vil.viz", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="checkpoint of train_imagenet.py")
    parser.add_argument("--images", required=True, type=Path, nargs="+", help="image files, or folders of them")
    parser.add_argument("--count", type=int, default=3, help=f"images (default: 3), of which {SHOWN} are drawn")
    parser.add_argument("--blocks", type=int, nargs="+", help="blocks in scans.png (default: first, middle, last)")
    parser.add_argument(
        "--out", type=Path, default=Path("output/viz"), help="folder of why.png, scans.png and fields.png"
    )
    options = parser.parse_args()
    try:
        import matplotlib.figure  # noqa: F401  before the model takes its time
    except ImportError as error:
        sys.exit(f"error: the pictures need a package: pip install matplotlib ({error})")
    with errors_in_a_line(OSError):
        draw(options)


def draw(options: argparse.Namespace) -> None:
    """Draws the pictures that the command line asks for.

    Raises:
        ConfigError, CheckpointError: The checkpoint is not one of train_imagenet.py or broken, a block does not exist,
            or no image can be read.
    """
    if options.count < 1:
        raise ConfigError(f"--count must be at least 1, not {options.count}")
    source = Checkpoint(options.checkpoint)
    config = source.options
    if not config.get("model"):
        raise ConfigError(f"{options.checkpoint} is not a checkpoint of train_imagenet.py, and does not say its model")
    arguments = {name: config[name] for name in ("num_classes", "img_size") if config.get(name)}
    arguments |= config.get("model_kwargs") or {}
    model = from_checkpoint(source)  # first: it may be of another size than it says
    torch.manual_seed(0)
    untrained = create_model(config["model"], **arguments).eval()
    if not (isinstance(model, VisionLonghorn) and isinstance(untrained, VisionLonghorn)):
        raise ConfigError(f"{options.checkpoint} is of {config['model']}, which has no scans to look into")
    depth = len(model.blocks)
    blocks = options.blocks or sorted({0, depth // 2, depth - 1})
    for block in blocks:
        if not 0 <= block < depth:
            raise ConfigError(f"--blocks: there is no block {block}; the model has 0 to {depth - 1}")
    data_config = data_config_of(model)
    transform = create_transform(**data_config)
    files, opened = zip(*read_pictures(image_files(options.images)))
    images = torch.stack([transform(image) for image in opened])
    mean, std = (torch.tensor(data_config[name]).view(3, 1, 1) for name in ("mean", "std"))

    options.out.mkdir(parents=True, exist_ok=True)
    asked = images[: options.count]
    shown = (asked[:SHOWN] * std + mean).clamp(0, 1)
    # of several images
    predicted = cast("list[list[Prediction]]", predict(model, opened[: len(shown)], topk=1))
    titles = [
        f"{label_of('/'.join(path.parts[-2:]))[-30:]}\n{label_of(best.label)[:30]} ({best.probability:.1%})"
        for path, (best,) in zip(files, predicted)
    ]
    figure, said = why(model, asked, shown, titles)
    write_atomically(options.out / "why.png", partial(figure.savefig, dpi=110))
    print(f"{options.out / 'why.png'}: {len(shown)} images; {said}", flush=True)
    figure = plot_scans(model, asked[: len(shown)], shown, titles, blocks)
    write_atomically(options.out / "scans.png", partial(figure.savefig, dpi=110))
    fields = {
        f"{name}, {token}": effective_receptive_field(m, images, token)
        for name, m in (("untrained", untrained), ("trained", model))
        for token in ("centre", "class")
    }
    write_atomically(options.out / "fields.png", partial(plot_receptive_fields(fields).savefig, dpi=110))
    print(f"{options.out / 'scans.png'}: {len(shown)} images; {options.out / 'fields.png'}: over {len(images)} images")


def why(model: VisionLonghorn, images: Tensor, shown: Tensor, titles: list[str]) -> tuple[Figure, str]:
    """The picture of why a model sees the classes that it does, and in a line how far that is to be believed."""
    maps = {
        "evidence for the class": patch_sums(model, class_evidence(model, images)),
        "what the class token reads": reading(model, images),
    }
    evidence, read = maps.values()
    curves = {"evidence": deletion_curve(model, images, evidence), "most read": deletion_curve(model, images, read)}
    draws = torch.rand(4, *read.shape, generator=torch.Generator().manual_seed(0))
    curves["at random"] = torch.stack([deletion_curve(model, images, draw) for draw in draws]).mean(0)
    fifths = ", ".join(f"{name} {curve[:, 2].mean():.2f}" for name, curve in curves.items())
    whole = f"probability of the class {curves['evidence'][:, 0].mean():.2f}"
    said = f"over {len(images)}: {whole}, with a fifth of the patches hidden: {fifths}"
    return plot_why(shown, titles, maps, curves), said


def image_files(paths: list[Path]) -> list[Path]:
    """Files, and those of folders: one of each folder, then the next of each.

    Raises:
        ConfigError: There is none, or not one of `paths`.
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--images: there is no {path}")
    folders = [map(Path, list_images(str(path), str(path))) if path.is_dir() else [path] for path in paths]
    files = [path for files in zip_longest(*folders) for path in files if path]
    if not files:
        raise ConfigError("--images: there are no images in " + " ".join(map(str, paths)))
    return files


def read_pictures(files: list[Path]) -> list[tuple[Path, Image.Image]]:
    """The first of them that can be read, and these pictures; the others are named.

    Raises:
        ConfigError: None can be read.
    """
    found = []
    for path in files:
        try:
            found.append((path, read_image(path)))
        except Exception as error:  # PIL's decoders have no common type of error
            print(f"{str(path)!r} cannot be read as an image: {error}", file=sys.stderr)
        if len(found) == MOST_READ:
            break
    if not found:
        raise ConfigError("--images: none can be read")
    return found


if __name__ == "__main__":
    main()
