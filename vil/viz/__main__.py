"""Command line of `python -m vil.viz`."""

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
from ..data.sources.folders import list_images
from ..data.sources.images import read_image
from ..data_config import data_config_of
from ..factory import create_model, from_checkpoint
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.machine_errors import MachineError
from ..fault_tolerance.output import errors_in_a_line
from ..models.vision_longhorn import VisionLonghorn
from ..predict import Prediction, predict
from ..text import label_of
from . import __doc__ as description
from .evidence import class_evidence, deletion_curve, effective_receptive_field, patch_sums
from .pictures import plot_receptive_fields, plot_scans, plot_why
from .traces import reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_READ = 64  # maximum number of images that receptive fields are averaged over
SHOWN = 8  # maximum number of images in a plot; Matplotlib lays them out in seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vil.viz", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="checkpoint of train_imagenet.py")
    parser.add_argument("--images", required=True, type=Path, nargs="+", help="image files, or folders of them")
    parser.add_argument(
        "--count", type=int, default=3, help=f"number of images to analyse (default: 3); at most {SHOWN} are plotted"
    )
    parser.add_argument(
        "--blocks", type=int, nargs="+", help="indices of the blocks in scans.png (default: first, middle and last)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("output/viz"), help="output folder for why.png, scans.png and fields.png"
    )
    options = parser.parse_args()
    try:
        import matplotlib.figure  # noqa: F401  fail before the slow loading of the model
    except ImportError as error:
        sys.exit(f"error: vil.viz needs matplotlib: pip install matplotlib ({error})")
    with errors_in_a_line(OSError):
        draw(options)


def draw(options: argparse.Namespace) -> None:
    """Write the plots that the command line requests.

    Raises:
        ConfigError, CheckpointError: The checkpoint is broken or was not written by train_imagenet.py, a block does not
            exist, or no image can be read.
    """
    if options.count < 1:
        raise ConfigError(f"--count must be at least 1, got {options.count}")
    source = Checkpoint(options.checkpoint)
    config = source.options
    if not config.get("model"):
        raise ConfigError(
            f"{options.checkpoint} must be a checkpoint of train_imagenet.py, but does not store its model's name"
        )
    arguments = {name: config[name] for name in ("num_classes", "img_size") if config.get(name)}
    arguments |= config.get("model_kwargs") or {}
    # create this model first, because the checkpoint may have another size than its config says
    model = from_checkpoint(source)
    torch.manual_seed(0)
    untrained = create_model(config["model"], **arguments).eval()
    if not (isinstance(model, VisionLonghorn) and isinstance(untrained, VisionLonghorn)):
        raise ConfigError(f"{options.checkpoint} must hold a ViL or ViM model, got {config['model']}")
    depth = len(model.blocks)
    blocks = options.blocks or sorted({0, depth // 2, depth - 1})
    for block in blocks:
        if not 0 <= block < depth:
            raise ConfigError(f"--blocks must be between 0 and {depth - 1} for this model, got {block}")
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
    """Return the plot why.png and a line with the mean probability of the class after deletion by each map."""
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
    said = f"mean over {len(images)} images: {whole}, with a fifth of the patches hidden: {fifths}"
    return plot_why(shown, titles, maps, curves), said


def image_files(paths: list[Path]) -> list[Path]:
    """Return the image files among `paths`, taking the folders' files in turn: the first of each folder, then the
    second.

    Raises:
        ConfigError: A path does not exist, or the paths contain no image files.
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--images: {path} does not exist")
    folders = [map(Path, list_images(str(path), str(path))) if path.is_dir() else [path] for path in paths]
    files = [path for files in zip_longest(*folders) for path in files if path]
    if not files:
        raise ConfigError("--images: found no images in " + " ".join(map(str, paths)))
    return files


def read_pictures(files: list[Path]) -> list[tuple[Path, Image.Image]]:
    """Read the first `MOST_READ` readable files. Unreadable files are reported to stderr.

    Raises:
        ConfigError: No file can be read.
    """
    found = []
    for path in files:
        try:
            found.append((path, read_image(path)))
        except MachineError:
            raise
        except Exception as error:  # PIL's decoders have no common exception type
            print(f"{str(path)!r} cannot be read as an image: {error}", file=sys.stderr)
        if len(found) == MOST_READ:
            break
    if not found:
        raise ConfigError("--images: none of the files can be read as an image")
    return found


if __name__ == "__main__":
    main()
