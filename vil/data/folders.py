"""Split a folder of class folders into a training and a validation split, with a share of each class for validation."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path

from ..distributed import warn_on_rank0
from ..errors import reject_url
from .held_out import SHARE, held_out
from .sources.class_folders import ClassFolders
from .sources.image_files import folders_in, list_images
from .sources.split_paths import SPLIT_NAMES


def split_folder(source: Path, target: Path, validation: float = SHARE) -> dict[str, int]:
    """Split the class folders `source`/CLASS into `target`/train/CLASS and `target`/validation/CLASS.

    The validation images are those that training on `source` would hold out. The same file names and share always give
    the same splits (see `vil.data.held_out`). The classes are found as in training (see `ClassFolders`), and class
    folders keep their paths. New files are hard links, or copies if a hard link cannot be created.

    Returns:
        Number of images per split.

    Raises:
        ConfigError: `source` has no class folders.
        ValueError: `validation` is not in (0, 1), `source` is missing, already split or has fewer than two
            classes, a class has fewer than two images, or `target` is not empty or lies inside `source`.
        OSError: A file cannot be read or written, so `target` is not created.
    """
    if not 0 < validation < 1:
        raise ValueError(f"the share of validation must be greater than 0 and less than 1, got {validation}")
    target = target.resolve()
    if target.is_relative_to(source.resolve()):
        raise ValueError(
            f"target folder must not be inside the source folder {source}, got {target}: choose another target"
        )
    if not source.is_dir():
        reject_url(source, ValueError)
        raise ValueError(f"folder {source} does not exist: set the folder that contains the class folders")
    files_of_class = _files_of_classes(source)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"folder {target} must be empty or new: choose another target folder")

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as unfinished:
        whole = Path(unfinished) / target.name
        whole.mkdir()  # create a subfolder, because the temporary folder itself has restricted permissions
        counts = _fill(whole, source, files_of_class, validation)
        if target.exists():
            target.rmdir()  # on Windows, rename cannot replace an empty folder
        whole.rename(target)
    return counts


def _files_of_classes(source: Path) -> dict[str, list[Path]]:
    """Return the images of each class, with the paths of class folders as keys.

    Raises:
        ConfigError: `source` has no class folders.
        ValueError: `source` is already split or has fewer than two classes, or a class has only one image.
    """
    files = list_images(str(source), str(source))
    if not files:
        raise ValueError(
            f"{source} must have at least two class folders with images, got 0: create one folder per class"
        )
    folders = folders_in(str(source), files)
    classes = ClassFolders(files, folders, str(source))
    files_of_class: dict[str, list[Path]] = {path: [] for path in classes.names}
    for file, folder in zip(files, folders):
        if folder in files_of_class:
            files_of_class[folder].append(Path(file))

    top_folders = {path.split("/")[0] for path in files_of_class}
    if all(name.lower() in {"test", *chain(*SPLIT_NAMES.values())} for name in top_folders):
        raise ValueError(
            f"{source} is already split into {', '.join(sorted(top_folders))}: train on this folder directly, or split "
            "one of its subfolders"
        )
    if len(files_of_class) < 2:
        raise ValueError(
            f"{source} must have at least two class folders with images, got {len(files_of_class)}: add folders"
        )
    for note in classes.notes():
        warn_on_rank0(__name__, "%s: %s", source, note)
    if few := [path for path, images in files_of_class.items() if len(images) < 2]:
        raise ValueError(
            f"class folder {few[0]!r} must have at least two images, one per split, but has one: add images, or move "
            "this image to another class folder"
        )
    return files_of_class


def _fill(target: Path, source: Path, files_of_class: dict[str, list[Path]], validation: float) -> dict[str, int]:
    """Create the files of both splits, and return the number of images per split."""
    pairs = [(file, folder) for folder, files in files_of_class.items() for file in files]
    names = [file.relative_to(source).as_posix() for file, _ in pairs]
    counts: Counter[str] = Counter()
    for (file, folder), is_held_out in zip(pairs, held_out(names, [folder for _, folder in pairs], validation)):
        split = "validation" if is_held_out else "train"
        _link_or_copy(file, target / split / folder)
        counts[split] += 1
    return counts


def _link_or_copy(file: Path, folder: Path) -> None:
    """Create a hard link to a file in a folder, or a copy if the hard link cannot be created."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / file.name
    while os.path.lexists(new):  # case-insensitive file systems do not distinguish A.png from a.png
        new = new.with_name(f"_{new.name}")
    try:
        os.link(file.resolve(), new)  # resolve symbolic links, because they may be relative
    except OSError:
        shutil.copyfile(file, new)
