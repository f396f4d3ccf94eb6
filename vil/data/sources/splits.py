"""Opening of a run's data splits as timm datasets, which read folders, tar files, shards or datasets of a hub."""

from __future__ import annotations

import contextlib
import copy
import math
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from timm.data import create_dataset
from timm.data.dataset import ImageDataset, IterableImageDataset

from ...classes import find, quoted
from ...config import DATASETS, Config, ConfigError
from ...distributed import warn_on_rank0
from ...security.tars import check_tar
from ..held_out import held_out
from .class_folders import ClassReader
from .folders import FolderReader
from .image_files import has_images, is_hidden
from .images import open_file, restrict_pillow
from .readers import count_rotated
from .split_paths import called, find_split
from .synthetic import SyntheticImages
from .tars import TarReader

# packages that timm needs to read a dataset, by the prefix of the dataset's name
PACKAGES = {
    "wds": "webdataset",
    "hfds": "datasets",
    "hfids": "datasets",
    "tfds": "tensorflow tensorflow-datasets",
}


def open_split(
    data_dir: str | None, dataset: str, split: str, num_classes: int | None = None, known: Sequence[str] = (), **kwargs
):
    """Open timm's dataset of one split.

    Args:
        data_dir, dataset, split: Values of the options `data_dir` and `dataset`, and the name of the split.
        num_classes: Number of classes that the split must have.
        known: Class names that decide which folders are class folders (see `ClassFolders`).
        kwargs: Arguments of timm's `create_dataset` or of `Shards`, ignored for folders and tar files.

    Raises:
        ConfigError: The split is missing, cannot be opened, or does not have `num_classes` classes. If the folder
            `data_dir` lacks the split, the message lists what exists.
    """
    kind, _, name = dataset.lower().partition("/")
    if dataset and not (kind in DATASETS and name):
        kinds = ", ".join(f"{name}/..." for name in DATASETS)
        raise ConfigError(
            f"dataset must be one of {kinds}, got {dataset!r}: leave out --dataset for folders and tar files"
        )
    try:
        if kind == "wds":
            images: Any = _open_shards(data_dir, num_classes, split=split, **kwargs)
        elif kind:  # a dataset of a hub needs no folder for its split
            restrict_pillow()
            images = create_dataset(dataset, root=data_dir, split=split, **kwargs)
        else:
            images = _open_local(data_dir, split, known)
    except ConfigError:
        raise
    except Exception as error:  # damaged data can raise any type of exception
        if isinstance(error, ImportError) and kind:
            message = f"--dataset {dataset} needs additional packages: pip install {PACKAGES[kind]} ({error})"
            raise ConfigError(message) from error
        where = called(split, data_dir or dataset)
        raise ConfigError(f"cannot open {where}: {type(error).__name__}: {error}") from error
    remedy = f"set --num-classes {len(class_names(images))}, or remove num_classes"
    check_count(images, num_classes, split, data_dir, remedy)
    return images


def _open_shards(data_dir: str | None, num_classes: int | None, **kwargs) -> IterableImageDataset:
    from .shards import Shards  # webdataset is an optional dependency

    images: Any = IterableImageDataset(data_dir, reader=Shards(data_dir, num_classes, **kwargs))
    images.unreadable = images.reader.unreadable
    return images


def _open_local(data_dir: str | None, split: str, known: Sequence[str]) -> ImageDataset:
    """Open a split that is a folder or a tar file."""
    path = find_split(data_dir, split)
    if path.is_dir():
        return ImageDataset(str(path), reader=FolderReader(str(path), str(data_dir), known))
    return _open_tar(path, known)


def check_count(images, num_classes: int | None, split: str, data_dir: str | None, remedy: str) -> None:
    """Raise a ConfigError that ends with `remedy` if the number of classes of a split and of the model differ."""
    classes = len(class_names(images))
    if classes and num_classes and classes != num_classes:
        raise ConfigError(
            f"{called(split, data_dir)} has {classes} classes, but the model has {num_classes} (num_classes): {remedy}"
        )


def follow_classes(
    images, known: Sequence[str], owner: str, data_dir: str | None, dataset: str, split: str
) -> tuple[Any, list[int]]:
    """Renumber the classes of an opened split so that each class has the index of the known class of the same name.

    Args:
        images: The split, opened with `data_dir`, `dataset` and `split`.
        known: Class names by index.
        owner: Description of the source of `known` in messages, such as "training".
        data_dir, dataset, split: As for `open_split`.

    Returns:
        The split, and the indices of its classes.

    Raises:
        ConfigError: The split has a class that is not in `known`.
    """
    reader = images.reader
    names = class_names(images)
    folders = reader.folders if isinstance(reader, ClassReader) else None
    candidates = folders.candidates() if folders else {name: [name] for name in names}
    found = find(candidates, known, owner)
    if unknown := [name for name in names if found[name] is None]:
        paths = {name: folders.inside(path) for path, name in folders.names.items()} if folders else {}
        hint = _hint(paths[unknown[0]], len(names), known) if folders else ""
        raise ConfigError(f"{called(split, data_dir)} has classes that {owner} does not have: {quoted(unknown)}{hint}")

    indices = {name: index for name, index in found.items() if index is not None}
    indices_of_known = {name: index for index, name in enumerate(known)}
    if folders:
        reader.renumber(indices, indices_of_known)
    elif indices != names:
        images = open_split(data_dir, dataset, split, class_map=indices_of_known | indices)
    return images, sorted(indices.values())


def _hint(unknown: str, classes: int, known: Sequence[str]) -> str:
    """Return the likely cause and the remedy of an unknown class folder, to append to an error message.

    Args:
        unknown: Path of the folder in its split.
        classes: Number of classes of the split.
        known: Expected class names.
    """
    if similar := [name for name in known if name.casefold().split() == unknown.casefold().split()]:
        return f". The name differs from {similar[0]!r} only in case or spaces: rename the folder"
    *parents, leaf = unknown.split("/")
    if outer := [parent for parent in parents if parent in known]:
        return (
            f". An image's class is the folder that contains the image: move the images of {unknown!r} up into the "
            f"folder {outer[-1]!r}"
        )
    if parents and leaf in known:
        return f". Several folders are called {leaf!r}, but only one class has this name: rename or merge these folders"
    if deeper := [name for name in known if unknown in name.split("/")]:
        return f". The class {deeper[0]!r} is nested deeper: use the same folders in both splits"
    if classes == 1:
        return ". All images lie in this folder: each class needs a folder of its images"
    return ". Give these folders the names of the classes, or remove them"


def _open_tar(path: Path, known: Sequence[str]) -> ImageDataset:
    """Open a tar file, without timm's list of the members if the list is broken.

    timm stores a list of the members beside a file of more than 10 GiB, and reads the list with an unpickler that runs
    no code.
    """
    listed = path.with_name(f"_{path.stem}_tarinfos.pickle")
    with open_file(path) as file:
        check_tar(file)
    try:
        reader = TarReader(str(path), known)
    except ConfigError:
        raise
    except Exception as error:
        # timm raises ValueError for a tar file without images
        if not listed.exists() and isinstance(error, ValueError):
            raise RuntimeError(f"no images in {path}") from error
        if not listed.exists():
            raise
        warn_on_rank0(__name__, "ignored %s, which cannot be read (%r): remove the file to recreate it", listed, error)
        reader = TarReader(str(path), known, use_list=False)
    return ImageDataset(str(path), reader=reader)


def _refuse_empty_classes(images) -> None:
    """Raise a ConfigError if a class folder has no images, because timm would omit the class and shift the indices."""
    reader = images.reader
    if not isinstance(reader, ClassReader):  # only a `ClassReader` has class folders
        return

    classes = {*map(PurePosixPath, reader.folders.names)}
    outer = {parent for folder in classes for parent in folder.parents}
    folders = _folders_of_tar(reader.root) if isinstance(reader, TarReader) else _folders_in(Path(reader.root), outer)
    empty = sorted(str(folder) for folder in folders - classes - outer if classes.isdisjoint(folder.parents))
    empty = [folder for folder in empty if str(PurePosixPath(folder).parent) not in empty]
    if empty:
        raise ConfigError(
            f"class folders of {reader.root!r} have no images: {quoted(empty)}. Copy the images or remove the folders"
        )


def _folders_of_tar(path: str) -> set[PurePosixPath]:
    """Return the folders that are members of a tar file, except hidden folders."""
    with tarfile.open(path) as tar:
        folders = {PurePosixPath(member.name.lstrip("/")) for member in tar if member.isdir()}
    return {folder for folder in folders if not any(map(is_hidden, folder.parts))}


def _folders_in(root: Path, outer: set[PurePosixPath]) -> set[PurePosixPath]:
    """Return the folders whose parent is `root` or one of `outer`, and that contain no images at any depth.

    Hidden folders and links are left out.
    """
    found = set()
    for folder in outer | {PurePosixPath()}:
        with contextlib.suppress(OSError):  # a folder that cannot be read is skipped
            for entry in (root / folder).iterdir():
                if entry.is_dir() and not entry.is_symlink() and not is_hidden(entry.name):
                    found.add(folder / entry.name)
    return {folder for folder in found if not has_images(root / folder)}


def open_splits(config: Config):
    """Return the training split, the validation split and the number of classes.

    Raises:
        ConfigError: A split or the number of classes is missing, there are fewer than two classes, a class folder has
            no images, or the validation split has a class that the training split lacks.
    """
    if config.synthetic:
        return _synthetic_splits(config)

    location = config.data_dir, config.dataset
    train = open_split(*location, config.train_split, config.num_classes, is_training=True, seed=config.seed)
    _refuse_empty_classes(train)
    known = class_names(train)
    if config.val_fraction:
        train, val = hold_out(train, config.val_fraction)
    else:
        val = open_split(*location, config.val_split, known=[*known])

    num_classes = len(known) or config.num_classes or 0
    if not num_classes:
        raise ConfigError(f"the dataset {config.dataset} does not store its number of classes: set --num-classes")
    limit_classes(val, num_classes)
    if num_classes < 2:
        raise ConfigError(
            f"{getattr(train.reader, 'root', config.data_dir)} has one class{_named(known)}: each class needs a folder "
            "of its images, and training needs two or more classes"
        )

    found = class_names(val)
    if config.val_fraction:
        _warn_of_missing_classes("validation", known, val.reader.targets)
    elif found and known != found:
        names = sorted(known, key=lambda name: known[name])
        val, present = follow_classes(val, names, "training", *location, config.val_split)
        _warn_of_missing_classes(config.val_split, known, present)
    for images in (train, val):
        apply_exif_orientation(images, config.apply_exif_orientation)
    return train, val, num_classes


def _named(classes: Iterable[str]) -> str:
    return f", {quoted([*classes])}" if classes else ""


def hold_out(images, fraction: float) -> tuple[ImageDataset, ImageDataset]:
    """Divide an opened split into images for training and images that are held out for validation.

    Args:
        images: Split of class folders, in a folder or a tar file.
        fraction: Share of each class to hold out (see `vil.data.held_out`).

    Raises:
        ConfigError: The split has no class folders, or each class has only one image.
    """
    reader = images.reader
    if not isinstance(reader, ClassReader):
        raise ConfigError("val_fraction needs class folders or a tar file of them: remove --val-fraction")
    is_held_out = held_out(images.filenames(), reader.targets, fraction)
    if not any(is_held_out):
        raise ConfigError(
            f"{reader.root} has one image of each class, so none can be held out for validation: add images to the "
            "class folders"
        )
    parts = []
    for wanted in (False, True):
        part = copy.copy(images)
        part.reader = copy.copy(reader)
        part.reader.keep([image for image, is_held in enumerate(is_held_out) if is_held == wanted])
        parts.append(part)
    return parts[0], parts[1]


def _warn_of_missing_classes(split: str, known: Mapping[str, int], present: Iterable[int]) -> None:
    """Warn if a split lacks some of the `known` classes. `present` contains the class indices of the split."""
    indices = {*present}
    if missing := [name for name, index in known.items() if index not in indices]:
        warn_on_rank0(
            __name__, "warning: the split %r has no images of %d of the %d classes, so accuracies say nothing about %s",
            split, len(missing), len(known), quoted(missing),
        )  # fmt: skip


def _synthetic_splits(config: Config) -> tuple[SyntheticImages, SyntheticImages, int]:
    num_classes = config.num_classes or 1000
    if num_classes < 2:
        raise ConfigError("num_classes must be at least 2, got 1")
    train = SyntheticImages(config.synthetic)
    val = SyntheticImages(math.ceil(config.synthetic / 25))
    return train, val, num_classes


def limit_classes(images, num_classes: int) -> None:
    """Make a reader of shards reject samples whose class index is `num_classes` or higher."""
    images.reader.num_classes = num_classes


def apply_exif_orientation(images, is_applied: bool) -> None:
    """Set whether the images of a split are rotated by their EXIF orientation, which iterable hub datasets ignore."""
    images.reader.is_upright = is_applied


def class_names(images) -> dict[str, int]:
    """Return a dict from class names to class indices, which is empty if the dataset does not store class names."""
    return dict(getattr(getattr(images, "reader", None), "class_to_idx", None) or {})


def streams(images) -> bool:
    """Return whether a dataset is iterable, with its own order of images and no access by index."""
    return isinstance(images, IterableImageDataset)


def count_images(images) -> int:
    """Return the number of images over all ranks, unlike the length of an iterable dataset, which is per rank."""
    return getattr(getattr(images, "reader", None), "num_samples", 0) or len(images)


def describe_split(name: str, images) -> str:
    """Return a log line with a split's name, numbers of images and classes, and EXIF rotations if any."""
    reader = images.reader
    line = f"{name}: {reader if isinstance(reader, ClassReader) else f'{count_images(images)} images'}"
    rotated, inspected = count_rotated(images)
    if not rotated:
        return line
    effect = "is applied" if getattr(reader, "is_upright", False) else "is ignored without --apply-exif-orientation"
    return f"{line}; {rotated} of {inspected} files specify an EXIF rotation, which {effect}"
