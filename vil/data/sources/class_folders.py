"""Class folders of a split, and the base class of readers whose classes are folders."""

from __future__ import annotations

import posixpath
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from timm.data.readers.reader import Reader
from timm.utils.misc import natural_key

from ...classes import check_distinct, ends_of, normal, quoted
from ...config import ConfigError
from ...distributed import warn_on_rank0
from ...text import counted


class ClassFolders:
    """Class names and indices of a split, derived from the folders that contain its images.

    As in timm, the folder that directly contains an image is the image's class. The name of a class is the name of the
    folder. If several class folders have the same name, the names of their classes are the paths inside `root`. Images
    beside the class folders, or in a folder that contains all class folders, belong to no class.

    Args:
        files: Paths of the images.
        folders: Path of each image's folder inside the split, with "/"; "" is the split itself.
        where: Name of the split in messages.
        known: Class names of the training split or model. A folder with such a name is a class folder, even if the
            folder contains all other class folders.

    Attributes:
        root: Path of the folder inside the split that contains all class folders.
        names: Name of each class folder, by path.
        class_to_idx: Index of each class, by name, in timm's order.

    Raises:
        ConfigError: There are no class folders, or the names of two classes are equal after normalization.
    """

    def __init__(self, files: Sequence[str], folders: Sequence[str], where: str, known: Sequence[str] = ()):
        paths = class_paths(folders, where, known)
        common = posixpath.commonpath(paths)
        self.root = posixpath.dirname(common) if common in paths else common

        if strays := [file for file, folder in zip(files, folders) if folder not in paths]:
            warn_on_rank0(
                __name__,
                "left out %s of %r beside the class folders, such as %r: to use an image, move the image into a class "
                "folder",
                counted(len(strays), "image"), where, strays[0],
            )  # fmt: skip

        folders_of_name = Counter(map(posixpath.basename, paths))
        self.names: dict[str, str] = {}
        for path in sorted(paths):
            name = posixpath.basename(path)
            self.names[path] = name if folders_of_name[name] == 1 else self.inside(path)
        # sort twice, so that names with equal `natural_key` are in alphabetical order
        names = sorted(sorted(self.names.values()), key=natural_key)
        self.class_to_idx = {name: i for i, name in enumerate(names)}
        check_distinct(self.class_to_idx, where)

    def inside(self, path: str) -> str:
        """Return the path of a class folder relative to `root`."""
        return path[len(self.root) :].strip("/")

    def candidates(self) -> dict[str, list[str]]:
        """Return, for each class, the names that the class may have in another split, with the longest path first."""
        return {name: ends_of(path)[name.count("/") :][::-1] for path, name in self.names.items()}

    def notes(self) -> list[str]:
        """Return clauses about unusual class names, for a log line."""
        notes = []
        if by_path := [name for name in self.class_to_idx if "/" in name]:
            notes.append(f"classes with equal folder names are named by their paths, such as {quoted(by_path[:2])}")

        folders = {*map(PurePosixPath, self.names)}
        if nested := sorted(str(folder) for folder in folders if not folders.isdisjoint(folder.parents)):
            notes.append(f"a class is the folder that contains an image, even {nested[0]!r} inside another class")

        alike: dict[str, list[str]] = defaultdict(list)
        for name in self.class_to_idx:
            alike[" ".join(name.casefold().split())].append(name)
        if similar := [names for names in alike.values() if len(names) > 1]:
            notes.append(f"the classes {quoted(similar[0])} differ only in case or spaces")
        return notes


def class_paths(folders: Iterable[str], where: str, known: Sequence[str] = ()) -> set[str]:
    """Return the paths of the class folders, given the paths of the folders that contain images.

    Raises:
        ConfigError: All images are in the split itself.
    """
    paths = {*folders}
    if paths == {""}:
        raise ConfigError(
            f"{where} has no class folders, only images: move each image into a folder that is named like the image's "
            "class (for ImageNet's validation images, the script valprep.sh does so)"
        )
    paths.discard("")

    known_names = {*map(normal, known)}
    while len(paths) > 1:
        outer = posixpath.commonpath(paths)
        if outer not in paths or not known_names.isdisjoint(map(normal, ends_of(outer))):
            break
        paths.discard(outer)  # a folder that contains all class folders is not a class
    return paths


class ClassReader(Reader):
    """Base class of the readers whose classes are folders.

    Attributes:
        root: Folder or tar file.
        folders: Class folders.
        class_to_idx: Index of each class, by name.
        left_out: Number of files that are not read, by extension, and of hidden files and folders as 'hidden'.
        targets: Class index of each image.
    """

    root: str
    folders: ClassFolders
    class_to_idx: dict[str, int]
    left_out: Counter[str]
    targets: list[int]

    def find_classes(
        self, files: Sequence[str], folders: Sequence[str], where: str, known: Sequence[str]
    ) -> dict[int, int]:
        """Set the classes from each image's folder. Return the class index of each image that belongs to a class."""
        self.folders = ClassFolders(files, folders, where, known)
        self.class_to_idx = self.folders.class_to_idx
        names = self.folders.names
        return {i: self.class_to_idx[names[folder]] for i, folder in enumerate(folders) if folder in names}

    def renumber(self, indices: Mapping[str, int], known: Mapping[str, int]) -> None:
        """Replace each target by the new index of its class in `indices`, and use `known` as `class_to_idx`."""
        new = {index: indices[name] for name, index in self.class_to_idx.items()}
        self.targets = [new[target] for target in self.targets]
        self.class_to_idx = dict(known)

    def keep(self, images: Sequence[int]) -> None:
        """Remove all images except those with the given indices. The classes and their indices stay the same."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return a line with the number of images and classes, and with the files that are not read."""
        names = {index: name for name, index in self.class_to_idx.items()}
        counts = Counter(self.targets).most_common()
        (largest, most), (smallest, fewest) = counts[0], counts[-1]
        if len(counts) == 1:
            sizes = repr(names[largest])
        elif fewest == most:
            sizes = f"{counted(most, 'image')} per class"
        else:
            sizes = f"{fewest} ({names[smallest]!r}) to {most} ({names[largest]!r}) images per class"
        images = f"{counted(len(self.targets), 'image')} of {counted(len(counts), 'class', 'classes')}, {sizes}"
        return "; ".join([images, *self.folders.notes()]) + endings(self.left_out)


def endings(left_out: Counter[str]) -> str:
    """Format the counts of unread files by file name extension."""
    if not left_out:
        return ""
    kinds = [f"{count} {ending!r}" for ending, count in left_out.most_common(5)]
    if len(left_out) > 5:
        kinds.append("...")
    return f"; not read as images: {', '.join(kinds)}"


def shards_hint(left_out: Counter[str]) -> str:
    """Return a hint for error messages on reading .tar files as WebDataset shards, or "" if no .tar was left out."""
    if not left_out[".tar"]:
        return ""
    return "; if the .tar files are WebDataset shards, set --dataset wds/NAME and --num-classes (see docs/options.md)"
