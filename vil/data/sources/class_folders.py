"""Classes of a split, which are the folders of its images, and the part of a reader that assigns them."""

from __future__ import annotations

import posixpath
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from timm.data.readers.reader import Reader
from timm.utils.misc import natural_key

from ...classes import check_distinct, ends_of, normal, quoted
from ...config import ConfigError
from ...distributed import warn_on_rank0


class ClassFolders:
    """The classes of a split: which folder's images belong to which class.

    A class is the folder that an image is in, as timm has it. Its name is the folder's name. If several class folders
    have the same name, it is the path of the folder inside the folder that holds all classes. Images beside all class
    folders, or in a folder around all of them, belong to no class.

    Args:
        files: The images.
        folders: Path of each image's folder inside the split, with "/"; "" is the split itself.
        where: Name of the split in messages.
        known: Class names of the training split or model. A folder that has one of these names is a class folder.

    Attributes:
        root: Path of the folder inside the split that holds all class folders.
        names: Name of each class folder, by path.
        class_to_idx: Index of each class, by name, in timm's order.

    Raises:
        ConfigError: There are no class folders, or two of them have names that only differ in their Unicode form.
    """

    def __init__(self, files: Sequence[str], folders: Sequence[str], where: str, known: Sequence[str] = ()):
        paths = {*folders}
        if paths == {""}:
            raise ConfigError(
                f"{where} has no class folders, its images lie directly in it: move each image into a folder that is "
                "named like its class (for ImageNet's validation images, the script valprep.sh does so)"
            )
        paths.discard("")
        names = {*map(normal, known)}
        while len(paths) > 1 and (around := posixpath.commonpath(paths)) in paths:
            if not names.isdisjoint(map(normal, ends_of(around))):
                break
            paths.discard(around)  # a folder around all class folders is not a class
        common = posixpath.commonpath(paths)
        self.root = posixpath.dirname(common) if common in paths else common
        if strays := [file for file, folder in zip(files, folders) if folder not in paths]:
            warn_on_rank0(
                __name__, "%d images of %r are left out, such as %r: they lie beside the class folders, in no class",
                len(strays), where, strays[0],
            )  # fmt: skip
        leaves = Counter(map(posixpath.basename, paths))
        self.names = {
            path: leaf if leaves[leaf := posixpath.basename(path)] == 1 else self.inside(path) for path in sorted(paths)
        }
        self.class_to_idx = {name: i for i, name in enumerate(sorted(sorted(self.names.values()), key=natural_key))}
        check_distinct(self.class_to_idx, where)

    def inside(self, path: str) -> str:
        """Return the path of a class folder inside the folder that all of them lie in."""
        return path[len(self.root) :].strip("/")

    def candidates(self) -> dict[str, list[str]]:
        """Return the names that each class may have in another split: the ends of its path, the whole path first."""
        return {name: ends_of(path)[name.count("/") :][::-1] for path, name in self.names.items()}

    def notes(self) -> list[str]:
        """Return what a reader of the class names has to know, as clauses."""
        notes = []
        if by_path := [name for name in self.class_to_idx if "/" in name]:
            notes.append(f"classes with equal folder names are named by their paths, such as {quoted(by_path[:2])}")
        folders = {*map(PurePosixPath, self.names)}
        if nested := sorted(str(folder) for folder in folders if not folders.isdisjoint(folder.parents)):
            notes.append(f"a class is the folder that an image is in, also {nested[0]!r} inside of another class")
        alike: dict[str, list[str]] = defaultdict(list)
        for name in self.class_to_idx:
            alike[" ".join(name.casefold().split())].append(name)
        if similar := [names for names in alike.values() if len(names) > 1]:
            notes.append(f"the classes {quoted(similar[0])} differ only in case or spaces")
        return notes


class ClassReader(Reader):
    """What the readers of folders and of tar files share: classes by folder, and their description.

    Attributes:
        root: The folder or tar file.
        class_to_idx: Index of each class, by name.
        left_out: How many files are not read, by file name extension.
    """

    root: str
    class_to_idx: dict[str, int]
    left_out: Counter[str]
    targets: list[int]

    def find_classes(
        self, files: Sequence[str], folders: Sequence[str], where: str, known: Sequence[str]
    ) -> dict[int, int]:
        """Set the classes from each image's folder. Return the class index of each image that belongs to a class."""
        self.folders = ClassFolders(files, folders, where, known)
        self.class_to_idx, names = self.folders.class_to_idx, self.folders.names
        return {i: self.class_to_idx[names[folder]] for i, folder in enumerate(folders) if folder in names}

    def renumber(self, indices: Mapping[str, int], known: Mapping[str, int]) -> None:
        """Replace the class indices by those of the `known` classes; `indices` has those of the present classes."""
        new = {index: indices[name] for name, index in self.class_to_idx.items()}
        self.targets = [new[target] for target in self.targets]
        self.class_to_idx = dict(known)

    def __str__(self) -> str:
        """Return how many images there are of how many classes, and what was left out, in a line."""
        names = {index: name for name, index in self.class_to_idx.items()}
        counts = Counter(self.targets).most_common()
        most, fewest = (f"{count} of {names[index]!r}" for index, count in (counts[0], counts[-1]))
        images = f"{len(self.targets)} images of {len(counts)} classes, from {fewest} to {most}"
        return "; ".join([images, *self.folders.notes()]) + endings(self.left_out)


def endings(left_out: Counter[str]) -> str:
    """Format the counts of unread files by file name extension."""
    kinds = [f"{count} {ending!r}" for ending, count in left_out.most_common(5)]
    return "; not read as images: " + ", ".join(kinds) + ", ..." * (len(left_out) > 5) if left_out else ""
