"""Implementation of `vil viz`: plot evidence, scans and receptive fields of a trained model for image files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from ..checkpoint import Checkpoint
from ..classes import ends_of, names_of, normal
from ..config import ConfigError
from ..data.sources.image_files import list_images
from ..data.sources.images import read_image
from ..data_config import data_config_of
from ..errors import reject_url
from ..factory import create_model, from_checkpoint, pretrained_model
from ..fault_tolerance.files import write_atomically
from ..fault_tolerance.machine_errors import MachineError
from ..models.vision_longhorn import VisionLonghorn
from ..prediction import Prediction, predict
from ..prediction.loading import classifier_of
from ..text import counted, label_of
from .evidence import class_evidence, deletion_curve, effective_receptive_field, patch_sums
from .plots import plot_receptive_fields, plot_scans, plot_why
from .traces import reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_READ = 64  # maximum number of images over which receptive fields are averaged
SHOWN = 8  # maximum number of images per plot, because Matplotlib needs seconds for each image


def draw(options: argparse.Namespace) -> None:
    """Write the plots why.png, scans.png and fields.png to the output folder.

    Raises:
        ConfigError, CheckpointError: The model cannot be created or loaded, a requested block does not exist, or no
            image can be read.
    """
    if options.count < 1:
        raise ConfigError(f"--count must be at least 1, got {options.count}")
    model, untrained, note = load_models(options)
    blocks = checked_blocks(options.blocks, len(model.blocks))
    data_config = data_config_of(model)
    files, pictures = zip(*read_pictures(image_files(options.images)))
    transform = create_transform(**data_config)
    images = torch.stack([transform(picture) for picture in pictures])

    analysed = images[: options.count]
    mean, std = (torch.tensor(data_config[name]).view(3, 1, 1) for name in ("mean", "std"))
    shown = (analysed[:SHOWN] * std + mean).clamp(0, 1)
    titles = titles_of(model, files[: len(shown)], pictures[: len(shown)])

    out: Path = options.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} exists but is not a folder; move it, or set another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    figure, summary = why(model, analysed, shown, titles)
    save(figure, out / "why.png")
    notes = filter(None, [counted(len(shown), "image"), summary, note])
    print(f"{out / 'why.png'}: {'; '.join(notes)}", flush=True)
    save(plot_scans(model, analysed[: len(shown)], shown, titles, blocks), out / "scans.png")
    save(plot_receptive_fields(receptive_fields(model, untrained, images)), out / "fields.png")
    print(
        f"{out / 'scans.png'}: {counted(len(shown), 'image')}; "
        f"{out / 'fields.png'}: mean over {counted(len(images), 'image')}"
    )


def load_models(options: argparse.Namespace) -> tuple[VisionLonghorn, VisionLonghorn, str]:
    """Return the trained model, an untrained model with the same arguments, and where the trained weights are from.

    Raises:
        ConfigError: The checkpoint does not store the model's name, the model has no pretrained weights, or the model
            is not a ViL or ViM.
        CheckpointError: The checkpoint's weights do not fit the model.
    """
    model: Any
    if options.checkpoint:
        source = Checkpoint(options.checkpoint)
        model = from_checkpoint(source, options.model, use_ema=options.use_ema)
        _check_kind(model, options.checkpoint)
        note = source.note_on_weights(options.use_ema)
    else:
        with torch.device("meta"):  # check the model before its weights are downloaded
            _check_kind(create_model(options.model), "--model")
        model, note = pretrained_model(options.model).eval(), "pretrained weights"
    torch.manual_seed(0)
    arguments = model.model_args | dict(img_size=model.patch_embed.img_size, pretrained=False)
    untrained: Any = create_model(model.pretrained_cfg["architecture"], **arguments).eval()
    return model, untrained, note


def _check_kind(model: Any, owner: str) -> None:
    if not isinstance(model, VisionLonghorn):
        raise ConfigError(f"{owner} must be a ViL or ViM, got {model.pretrained_cfg['architecture']}")


def checked_blocks(blocks: list[int] | None, depth: int) -> list[int]:
    """Return the requested block indices, or by default the indices of the first, middle and last block.

    Raises:
        ConfigError: A block index is out of range.
    """
    blocks = blocks or sorted({0, depth // 2, depth - 1})
    for block in blocks:
        if not 0 <= block < depth:
            raise ConfigError(f"--blocks must be between 0 and {depth - 1} for this model, got {block}")
    return blocks


def titles_of(model: VisionLonghorn, files: Sequence[Path], pictures: Sequence[Image.Image]) -> list[str]:
    """Return a title per image with the folder and file name, the true class if known, and the predicted class.

    Titles are short enough for adjacent plots.
    """
    predicted = cast("list[list[Prediction]]", predict(model, pictures, topk=1))  # `predict` returns one list per image
    titles = []
    for path, (best,) in zip(files, predicted):
        name = label_of("/".join(path.parts[-2:]))
        lines = [name if len(name) <= 24 else f"…{name[-23:]}"]
        true_class = true_class_of(path, model)
        if true_class is not None:
            lines.append(f"true: {label_of(true_class)[:24]}")
        lines.append(f"predicted: {label_of(best.label)[:20]} ({best.probability:.1%})")
        titles.append("\n".join(lines))
    return titles


def true_class_of(path: Path, model: VisionLonghorn) -> str | None:
    """Return the model's class that has the name of the image's folder, or None if no class has this name."""
    indices = {normal(name): index for index, name in enumerate(names_of(model))}
    folders = map(normal, ends_of(path.absolute().parent.as_posix()))
    index = next((indices[folder] for folder in folders if folder in indices), None)
    return None if index is None else classifier_of(model).labels[index]


def receptive_fields(model: VisionLonghorn, untrained: VisionLonghorn, images: Tensor) -> dict[str, Tensor]:
    """Return the receptive fields of the central patch and the class token, with plot titles as keys."""
    return {
        f"{name}, {token}": effective_receptive_field(of, images, token)
        for name, of in (("untrained", untrained), ("trained", model))
        for token in ("centre", "class")
    }


def save(figure: Figure, path: Path) -> None:
    write_atomically(path, partial(figure.savefig, dpi=110))


def why(model: VisionLonghorn, images: Tensor, shown: Tensor, titles: list[str]) -> tuple[Figure, str]:
    """Plot which patches affect the predictions, and summarize how hiding these patches changes class probabilities."""
    evidence = patch_sums(model, class_evidence(model, images))
    read = reading(model, images)
    random_maps = torch.rand(4, *read.shape, generator=torch.Generator().manual_seed(0))
    curves = {
        "evidence": deletion_curve(model, images, evidence),
        "most read": deletion_curve(model, images, read),
        "at random": torch.stack([deletion_curve(model, images, maps) for maps in random_maps]).mean(0),
    }
    fifths = ", ".join(f"{name} {curve[:, 2].mean():.2f}" for name, curve in curves.items())
    whole = f"probability of the class {curves['evidence'][:, 0].mean():.2f}"
    summary = f"mean over {counted(len(images), 'image')}: {whole}, with a fifth of the patches hidden: {fifths}"
    maps = {"evidence for the predicted class": evidence, "what the class token reads": read}
    return plot_why(shown, titles, maps, curves), summary


def image_files(paths: list[Path]) -> list[Path]:
    """Return the image files in files and folders, alternating between the given paths.

    Raises:
        ConfigError: A path does not exist, or the paths contain no image files.
    """
    for path in paths:
        if not path.exists():
            reject_url(path)
            raise ConfigError(f"--images: {path} does not exist")
    folders = [map(Path, list_images(str(path), str(path))) if path.is_dir() else [path] for path in paths]
    files = [path for files in zip_longest(*folders) for path in files if path]
    if not files:
        raise ConfigError("--images: found no images in " + " ".join(map(str, paths)))
    return files


def read_pictures(files: list[Path]) -> list[tuple[Path, Image.Image]]:
    """Read the first `MOST_READ` readable image files, and report unreadable files on stderr.

    Raises:
        ConfigError: No file can be read.
    """
    found = []
    for path in files:
        try:
            found.append((path, read_image(path)))
        except MachineError:
            raise
        except Exception as error:  # decoders have no common exception type
            print(f"{str(path)!r} cannot be read as an image: {error}", file=sys.stderr)
        if len(found) == MOST_READ:
            break
    if not found:
        raise ConfigError("--images: none of the files can be read as an image")
    return found
