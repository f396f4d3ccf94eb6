"""Which images a run has, and of which classes: timm's datasets for folders, tar files, shards and hubs."""

from __future__ import annotations

import functools
import math
import shlex
from pathlib import Path
from typing import Any

from timm.data import create_dataset, get_img_extensions
from timm.data.dataset import ImageDataset, IterableImageDataset

from ..config import DATASETS, Config, ConfigError
from ..processes import warn
from .folders import SPLIT_NAMES, FolderReader, is_hidden
from .images import restrict_pillow
from .synthetic import SyntheticImages


def open_split(data_dir: str | None, dataset: str, split: str, num_classes: int | None = None, **kwargs):
    """timm's dataset for one split.

    Raises:
        ConfigError: The split is not there or cannot be opened, or it does not have `num_classes` classes; the message
            says what is there.
    """
    kind, _, name = dataset.lower().partition("/")
    if dataset and not (kind in DATASETS and name):
        known = ", ".join(f"{name}/..." for name in DATASETS)
        raise ConfigError(f"dataset {dataset!r} is none of {known}: leave it out for folders and tar files")
    try:
        if kind == "wds":
            from .shards import Shards  # webdataset is an optional dependency

            images: Any = IterableImageDataset(data_dir, reader=Shards(data_dir, num_classes, split=split, **kwargs))
            images.unreadable = images.reader.unreadable
        elif kind:  # there a split need not be a folder
            restrict_pillow()
            images = create_dataset(dataset, root=data_dir, split=split, **kwargs)
        elif (root := _find_split(data_dir, split)).is_dir():
            images = ImageDataset(str(root), reader=FolderReader(str(root), str(data_dir)))
        else:
            images = _open_tar(root, **kwargs)
    except ConfigError:
        raise
    except Exception as error:  # of whatever is there, and of the packages that read it
        raise ConfigError(f"cannot open the split {split!r} of {data_dir}: {type(error).__name__}: {error}") from error
    classes = len(class_names(images))
    if classes and num_classes and classes != num_classes:
        raise ConfigError(
            f"the split {split!r} of {data_dir} has {classes} classes but the model {num_classes} (num_classes)"
        )
    return images


def renumbered(images, class_map: dict[str, int], data_dir: str | None, dataset: str, split: str):
    """The split that was opened so, its classes with other numbers by their names, all of which the map has."""
    if isinstance(images.reader, FolderReader):
        images.reader.renumber(class_map)
        return images
    return open_split(data_dir, dataset, split, class_map=class_map)


def _open_tar(path: Path, **kwargs):
    """timm's dataset of a tar file, without its list of what is in a large one where that is broken or no list.

    timm keeps such a list beside a file of more than 10 GB, and reads it by an unpickler that runs no code.
    """
    opened = functools.partial(create_dataset, "", root=str(path), **kwargs)
    try:
        return opened()
    except Exception as error:
        listed = path.with_name(f"_{path.stem}_tarinfos.pickle")
        if not listed.exists():
            raise
        warn(__name__, "%s is passed over, as it cannot be read (%r); remove it to have it made anew", listed, error)
        return opened(cache_tarinfo=False)


def _refuse_empty_classes(images) -> None:
    """timm leaves out a class folder without images, and the classes after it have other numbers then."""
    if not isinstance(images.reader, FolderReader):  # the root of others is where they keep files, or none
        return
    folder, known = Path(images.reader.root), class_names(images)
    folders = [e for e in folder.iterdir() if e.is_dir() and not e.is_symlink() and not is_hidden(e.name)]
    empty = sorted(entry.name for entry in folders if entry.name not in known and not _has_images(entry))
    if empty:
        raise ConfigError(
            f"class folders of {str(folder)!r} have no images: {_quoted(empty)}. Copy the images or remove the folders"
        )


def _has_images(folder: Path) -> bool:
    images = (path for path in folder.rglob("*") if path.suffix.lower() in get_img_extensions())
    return not all(any(map(is_hidden, path.relative_to(folder).parts)) for path in images)


def open_splits(config: Config):
    """The training split, the validation split and the number of classes.

    Raises:
        ConfigError: A split or the number of classes is missing, or the two splits do not agree on the classes.
    """
    if config.synthetic:
        if (num_classes := config.num_classes or 1000) < 2:
            raise ConfigError("num_classes 1: there is nothing to tell apart, give two or more")
        return SyntheticImages(config.synthetic), SyntheticImages(math.ceil(config.synthetic / 25)), num_classes
    location = config.data_dir, config.dataset
    train = open_split(*location, config.train_split, config.num_classes, is_training=True, seed=config.seed)
    _refuse_empty_classes(train)
    val = open_split(*location, config.val_split)
    if not (num_classes := len(class_names(train)) or config.num_classes or 0):
        raise ConfigError(f"the dataset {config.dataset} does not say how many classes it has: give num_classes")
    limit_classes(val, num_classes)
    if num_classes < 2:
        raise ConfigError(
            f"the split {config.train_split!r} of {config.data_dir} has one class: each class needs a folder of its "
            "images"
        )
    known, found = class_names(train), class_names(val)
    if known != found:
        if unknown := [name for name in found if name not in known]:
            raise ConfigError(f"the split {config.val_split!r} has classes that training has not: {_quoted(unknown)}")
        missing = [name for name in known if name not in found]
        warn(
            __name__, "the split %r has no images of %d of the %d classes: %s",
            config.val_split, len(missing), num_classes, _quoted(missing),
        )  # fmt: skip
        val = renumbered(val, known, *location, config.val_split)
    return train, val, num_classes


def _quoted(names: list[str]) -> str:
    """Some names in a line, with what a terminal would obey escaped."""
    return ", ".join(map(repr, names[:5])) + (", ..." if names[5:] else "")


def limit_classes(images, num_classes: int) -> None:
    """Has shards, which name no classes, count a sample of one beyond these as unreadable."""
    images.reader.num_classes = num_classes


def class_names(images) -> dict[str, int]:
    """The number of each class by name; empty where a dataset does not know."""
    reader = getattr(images, "reader", None)  # timm's reader of tar files has a name of its own for them
    return dict(getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None) or {})


def streams(images) -> bool:
    """Whether a dataset has no images by index, but an order of its own, in which each comes once."""
    return isinstance(images, IterableImageDataset)


def count_images(images) -> int:
    """Over all processes; the length of a dataset that streams is a process's share."""
    return getattr(getattr(images, "reader", None), "num_samples", 0) or len(images)


def _find_split(data_dir: str | None, split: str) -> Path:
    if not data_dir:
        raise ConfigError("data_dir is not given: the folder that holds the splits")
    root = Path(data_dir)
    if not root.is_dir():
        raise ConfigError(f"data_dir {data_dir} is not a folder")
    names = next((names for names in SPLIT_NAMES.values() if split in names), (split,))
    for name in (split, *names):
        for path in (root / name, root / f"{name}.tar"):
            if path.is_dir() or path.is_file():
                if name != split and split not in SPLIT_NAMES:  # these stand for any of theirs
                    warn(__name__, "%s has no split %r: %s in its place", data_dir, split, path.name)
                return path
    found = _quoted(sorted(p.name for p in root.iterdir())) or "nothing"
    remedy = ""
    for folder, what in ((root, "If these are classes, this splits them"), (root / "train", "This splits 'train'")):
        if _count_classes(folder) > 1 and (folder == root or split in SPLIT_NAMES["validation"]):
            command = ["python", "-m", "vil.data.folders", str(folder), f"{root.resolve()}_split"]
            remedy = f". {what}: {shlex.join(command)}"
    raise ConfigError(
        f"{data_dir} has no split {split!r} (a folder or .tar called {' or '.join(names)}); it has {found}{remedy}"
    )


def _count_classes(root: Path) -> int:
    suffixes = get_img_extensions()
    return sum(any(file.suffix.lower() in suffixes for file in folder.glob("*")) for folder in root.glob("*/"))


def describe_split(name: str, images) -> str:
    """What a split has, in a line."""
    reader = images.reader
    return f"{name}: {reader if isinstance(reader, FolderReader) else f'{count_images(images)} images'}"
