"""Detection of how a folder of images is arranged: splits with class folders, or only class folders."""

from __future__ import annotations

import posixpath
import shlex
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from timm.data import get_img_extensions

from ...classes import quoted
from ...config import ConfigError
from ...errors import reject_url
from ..held_out import SHARE, count_held_out
from .class_folders import class_paths, endings, shards_hint
from .image_files import folders_in, has_images, is_hidden, list_images
from .split_paths import SPLIT_NAMES, WHOLE, missing_folder, split_in

NAMES = {"test", "testing", *SPLIT_NAMES["train"], *SPLIT_NAMES["validation"]}


class Layout(NamedTuple):
    """Location of the splits or class folders inside a data folder.

    Attributes:
        data_dir: Folder that contains the splits or class folders.
        train_split: Name of the training split; `WHOLE` if there are only class folders.
        val_split: Name of the validation split; None if there is none.
        class_sizes: Number of images of each class in the training split, in ascending order.
    """

    data_dir: str
    train_split: str
    val_split: str | None
    class_sizes: tuple[int, ...]

    @property
    def num_images(self) -> int:
        """Number of images of the training split."""
        return sum(self.class_sizes)

    def count_held_out(self, share: float) -> int:
        """Return how many training images are held out for validation if the held-out share is `share`."""
        return sum(count_held_out(size, share) for size in self.class_sizes)


def find_layout(folder: str, reject_splits: bool = False) -> Layout:
    """Find the splits or class folders in a folder, at any depth.

    Args:
        folder: Data folder.
        reject_splits: Whether to raise an error if class folders are in folders that look like splits, because the
            same class in two of these folders would become two classes.

    Raises:
        ConfigError: The folder does not exist, has no images, more than one data set or an unreadable tar file, or its
            subfolders do not determine the classes of the images.
    """
    root = Path(folder)
    if not root.is_dir():
        reject_url(folder)
        raise missing_folder(root, "pass a folder that has one folder of images per class")
    train = split_in(root, "train")
    if train and (train.is_file() or split_in(root, "validation")):
        return _layout_of_splits(root, train)

    left_out: Counter[str] = Counter()
    files = list_images(folder, folder, left_out)
    if not files:
        raise ConfigError(f"{folder} has no images{endings(left_out)}: {_expected(root)}{shards_hint(left_out)}")
    folders = folders_in(folder, files)
    classes = {*folders} - {""}
    parents = _folders_with_split(classes, SPLIT_NAMES["train"])
    if len(parents) > 1:
        names = quoted([parent or "." for parent in parents])
        raise ConfigError(f"{folder} has {len(parents)} data sets, in {names}: pass a folder with only one of them")
    if parents:
        root = root / parents[0]
        train = split_in(root, "train")
        assert train is not None  # `parents` has only folders with a training split
        return _layout_of_splits(root, train)
    _check_classes(root, classes, files)
    if reject_splits:
        _reject_splits(root, Counter(folders))
    return Layout(folder, WHOLE, None, _class_sizes(folders, folder))


def unused_splits(root: Path, train: Path, output: Path) -> list[str]:
    """Return names of folders and tar files that could be validation splits, those called like a split first.

    Args:
        root: Folder that contains the splits.
        train: Training split, which is left out.
        output: Folder of runs, which is left out.
    """
    names = []
    for path in root.iterdir():
        name = path.name.removesuffix(".tar")
        is_other = name != train.name.removesuffix(".tar") and not is_hidden(name)
        is_split_file = path.suffix == ".tar" and name.casefold() in NAMES
        if is_other and not output.resolve().is_relative_to(path.resolve()) and (is_split_file or has_images(path)):
            names.append(name)
    return sorted(names, key=lambda name: (name.casefold() not in NAMES, name))


def _class_sizes(folders: Sequence[str], where: str) -> tuple[int, ...]:
    """Return the number of images of each class, without images that are in no class folder."""
    sizes = Counter(folders)
    return tuple(sorted(sizes[path] for path in class_paths(folders, where)))


def _layout_of_splits(root: Path, train: Path) -> Layout:
    validation = "validation" if split_in(root, "validation") else None
    if train.is_dir():
        files = list_images(str(train), str(root))
        folders = folders_in(str(train), files)
        if {*folders} == {""}:
            raise _unknown_classes(train, files)
        return Layout(str(root), "train", validation, _class_sizes(folders, str(train)))
    try:
        with tarfile.open(train) as tar:
            paths = [Path(name) for name in tar.getnames()]
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"cannot read {train}: {error}") from error
    folders = [str(path.parent) for path in paths if path.suffix.lower() in get_img_extensions()]
    return Layout(str(root), "train", validation, _class_sizes(folders, str(train)))


def _folders_with_split(classes: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the folders that contain a split with class folders, sorted. `names` are the accepted split names."""
    found = set()
    for path in classes:
        *parents, _ = path.split("/")
        for depth, name in enumerate(parents):
            if name.casefold() in names:
                found.add("/".join(parents[:depth]))
                break
    return sorted(found)


def _check_classes(root: Path, classes: set[str], files: list[str]) -> None:
    """Raise a ConfigError unless the folders that contain the images are class folders.

    Raises:
        ConfigError: There are no class folders, the folders are splits, or the training split has no class folders.
    """
    if not classes:
        raise _unknown_classes(root, files)
    if {posixpath.basename(path).casefold() for path in classes} <= NAMES:
        raise ConfigError(
            f"the images of {root} lie directly in {quoted(sorted(classes))}, which are names of splits, so the "
            f"classes are unknown: {_expected(root / 'train')}"
        )
    if {path.split("/")[0].casefold() for path in classes} <= NAMES:
        found = sorted({path.split("/")[0] for path in classes})
        if train := [name for name in found if name.casefold() in SPLIT_NAMES["train"]]:
            raise _unknown_classes(root / train[0], [file for file in files if Path(file).parent == root / train[0]])
        raise ConfigError(f"{root} has {quoted(found)}, but no folder 'train' for the training images: add one")


def _reject_splits(root: Path, sizes: Mapping[str, int]) -> None:
    """Raise a ConfigError if class folders are in splits of which none is called "train".

    Sibling folders are splits if all of them contain the same classes, or if one of them is called like a split.

    Args:
        root: Data folder.
        sizes: Number of images by class folder.
    """
    parents = _folders_with_split(sizes, NAMES)
    parent = parents[0] if parents else posixpath.commonpath([path for path in sizes if path])
    images: Counter[str] = Counter()
    classes: dict[str, set[str]] = defaultdict(set)
    for path, size in sizes.items():
        if PurePosixPath(path).is_relative_to(parent) and path not in ("", parent):
            folder, *inside = PurePosixPath(path).relative_to(parent).parts
            images[folder] += size
            classes[folder] |= {"/".join(inside)} - {""}
    named = [folder for folder in classes if folder.casefold() in NAMES and classes[folder]]
    first, *others = classes.values() or [set()]
    have_same_classes = len(first) > 1 and all(found == first for found in others)
    if len(classes) < 2 or not (named or have_same_classes):
        return

    owners = Counter(name for found in classes.values() for name in found)
    splits = [folder for folder, found in classes.items() if folder in named or any(owners[name] > 1 for name in found)]
    splits.sort(
        key=lambda folder: (
            folder.casefold() in NAMES,
            folder.casefold() not in SPLIT_NAMES["validation"],
            -images[folder],
        )
    )
    where = root / parent
    remedy = f"move the training images into {where / 'train'}"
    if splits[0].casefold() not in NAMES:
        validation = next((folder for folder in splits if folder in named), splits[1])
        flags = shlex.join(["--train-split", splits[0], "--val-split", validation])
        remedy = f"set {flags}" if where == root else f"pass the folder {where} and set {flags}"
    names = f"the {'split' if len(splits) == 1 else 'splits'} {quoted(sorted(splits))}"
    raise ConfigError(
        f"{where} looks like a folder with {names}: {remedy}. If each folder of images is a class, set "
        f"--train-split {WHOLE} --val-fraction {SHARE}"
    )


def _unknown_classes(folder: Path, files: list[str]) -> ConfigError:
    names = quoted([Path(file).name for file in files[:2]])
    return ConfigError(
        f"{folder} has {len(files)} images such as {names}, but no class folders, so the classes are unknown: "
        f"{_expected(folder)}"
    )


def _expected(folder: Path) -> str:
    """Return a description of the expected folders, to append to an error message."""
    return f"put the images of each class into a folder named like the class, such as {folder / 'cat' / '1.jpg'}"
