"""Split a folder of class folders into train and validation, with a fifth of each class for validation.

python -m vil.data.folders pets data/pets
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path

from ..distributed import warn_on_rank0
from ..text import printable
from .sources.class_folders import ClassFolders
from .sources.image_files import folders_in, list_images
from .sources.split_paths import SPLIT_NAMES


def split_folder(source: Path, target: Path, validation: float = 0.2) -> dict[str, int]:
    """Create `target`/{train,validation}/CLASS from `source`/CLASS; the same files give the same splits.

    Classes are those that training on `source` would have (see `ClassFolders`), and keep the paths of their folders.
    The new files are hard links, or copies where the file system does not support hard links.

    Returns:
        Number of images in each split.

    Raises:
        ConfigError: `source` has no class folders.
        ValueError: `source` is split already, a class has fewer than two images, `target` is not empty or lies inside
            of `source`.
        OSError: A file cannot be read or written; then `target` does not exist.
    """
    if not 0 < validation < 1:
        raise ValueError(f"the share of validation must be between 0 and 1, got {validation}")
    target = target.resolve()
    if target.is_relative_to(source.resolve()):
        raise ValueError(f"target must be outside {source}, got {target}: choose a folder beside it")
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}")
    files = list_images(str(source), str(source))
    folders = folders_in(str(source), files)
    found = ClassFolders(files, folders, str(source)) if files else None
    classes: dict[str, list[Path]] = {path: [] for path in (found.names if found else ())}
    for file, folder in zip(files, folders):
        if folder in classes:
            classes[folder].append(Path(file))
    tops = {path.split("/")[0] for path in classes}
    if tops and all(name.lower() in {"test", *chain(*SPLIT_NAMES.values())} for name in tops):
        raise ValueError(
            f"{source} is split already, into {', '.join(sorted(tops))}: train on it as it is, or split one of "
            "these folders"
        )
    if found is None or len(classes) < 2:
        raise ValueError(f"{source} has {len(classes)} folders of images: it needs one for each class")
    for note in found.notes():
        warn_on_rank0(__name__, "%s: %s", source, note)
    if few := [path for path, images in classes.items() if len(images) < 2]:
        raise ValueError(
            f"the class folder {few[0]!r} has one image, and each split needs one: add images, or move this image to "
            "another class folder"
        )
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"there is something in {target}: name a folder that is new")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as unfinished:
        (whole := Path(unfinished) / target.name).mkdir()  # with the user's usual permissions
        counts = _fill(whole, classes, validation)
        if target.exists():
            target.rmdir()  # Windows would not replace it
        whole.rename(target)
    return counts


def _fill(target: Path, classes: dict[str, list[Path]], validation: float) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for folder, files in classes.items():
        random.Random(0).shuffle(files)
        held_out = min(len(files) - 1, max(1, round(validation * len(files))))
        for number, file in enumerate(files):
            split = "validation" if number < held_out else "train"
            copy = target / split / folder / file.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            while os.path.lexists(copy):  # A.png on a file system that takes it for a.png
                copy = copy.with_name(f"_{copy.name}")
            try:
                os.link(file.resolve(), copy)  # no link that leads nowhere
            except OSError:
                shutil.copyfile(file, copy)
            counts[split] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vil.data.folders", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder with a folder of images for each class")
    parser.add_argument("target", type=Path, help="the new folder")
    parser.add_argument("--validation", type=float, default=0.2, help="share of each class (default: 0.2)")
    options = parser.parse_args()
    try:
        for split, count in sorted(split_folder(options.source, options.target, options.validation).items()):
            print(printable(f"{options.target / split}: {count} images"))
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
