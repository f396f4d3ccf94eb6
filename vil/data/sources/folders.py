"""Images of a split's folder, without following links that leave the data set or lead to images found already."""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from timm.data import add_img_extensions, get_img_extensions
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils.misc import natural_key

from ...classes import check_distinct, ends_of, normal, quoted
from ...config import ConfigError
from ...distributed import warn_on_rank0
from ...fault_tolerance.machine_errors import retry

SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "val", "valid", "eval")}

# beside timm's, which are those of JPEG and PNG: of what `decoder` reads; in tar files, too
add_img_extensions((".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif"))


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


class FolderReader(ClassReader, ReaderImageFolder):
    """timm's reader of a folder, with the same order and classes (see `ClassFolders`).

    Args:
        root: Folder of the split; may itself be a link.
        data_dir: Folder of the data set, in which links of the split may lead.
        known: See `ClassFolders`.

    Raises:
        RuntimeError: There are no images.
        ConfigError: There are no class folders, or a link has no target.
    """

    def __init__(self, root: str, data_dir: str, known: Sequence[str] = ()):
        Reader.__init__(self)
        self.root, self.left_out = root, Counter()
        dangling: list[str] = []
        files = list_images(root, data_dir, self.left_out, dangling)
        if dangling:
            raise ConfigError(
                f"{len(dangling)} links in {root} have no target, such as {dangling[0]!r}: mount the disk that they "
                "lead to, or remove them"
            )
        if not files:
            raise RuntimeError(f"no images in subfolders of {root}{endings(self.left_out)}")
        targets = self.find_classes(files, folders_in(root, files), root, known)
        self.samples = [(files[i], target) for i, target in targets.items()]

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self.samples]

    @targets.setter
    def targets(self, targets: list[int]) -> None:
        self.samples = [(file, target) for (file, _), target in zip(self.samples, targets)]


class TarReader(ClassReader, ReaderImageInTar):
    """timm's reader of a tar file, with the classes that the same files in a folder have (see `ClassFolders`).

    Args:
        root: The tar file, which may hold a tar file for each class.
        known: See `ClassFolders`.
        use_list: Read and write timm's list of the members of a large file.

    Raises:
        ConfigError: There are no class folders.
    """

    def __init__(self, root: str, known: Sequence[str] = (), use_list: bool = True):
        ReaderImageInTar.__init__(self, root, cache_tarinfo=None if use_list else False)
        if any(member.issparse() for member, *_ in self.samples):  # of a list; `check_tar` has refused others
            raise ValueError("a sparse member, which can claim any size")
        members = [_path_of(member, child) for member, _, child in self.samples]
        shown = [i for i, path in enumerate(members) if not any(map(is_hidden, path.split("/")))]
        self.left_out = Counter({"hidden": len(members) - len(shown)} if len(shown) < len(members) else {})
        if not shown:
            raise RuntimeError(f"no images in {root}{endings(self.left_out)}")
        files = [members[i] for i in shown]
        targets = self.find_classes(files, [posixpath.dirname(file) for file in files], root, known)
        self.samples, self.targets = self.samples[[shown[i] for i in targets]], [*targets.values()]


def _path_of(member: tarfile.TarInfo, tar: tarfile.TarInfo | None) -> str:
    """Return the path of a member of a tar file, which may lie in a tar file inside of that."""
    folder = posixpath.splitext(tar.name)[0] if tar else ""
    return posixpath.normpath(posixpath.join(folder, member.name.lstrip("/")))


def folders_in(root: str, files: Iterable[str]) -> list[str]:
    """Return the path of each file's folder inside of `root`, with "/"."""
    known: dict[str, str] = {}
    return [
        known.get(folder) or known.setdefault(folder, folder[len(root) :].replace(os.sep, "/").strip("/"))
        for folder in map(os.path.dirname, files)
    ]


def endings(left_out: Counter[str]) -> str:
    """Format the counts of unread files by file name extension."""
    kinds = [f"{count} {ending!r}" for ending, count in left_out.most_common(5)]
    return "; not read as images: " + ", ".join(kinds) + ", ..." * (len(left_out) > 5) if left_out else ""


def list_images(
    folder: str, data_dir: str, left_out: Counter[str] | None = None, dangling: list[str] | None = None
) -> list[str]:
    """Return the files with an image extension in timm's order, and log how many links were skipped.

    The extensions of other files and the number of hidden files are counted in `left_out`. Hidden are names that begin
    with a dot, and `__MACOSX`.
    """
    found = _Found(folder)
    found.walk(folder)
    links_left_out = []
    while found.links:
        links, found.links = sorted(found.links), []
        links_left_out += [link for link in links if not found.follow(link, os.path.realpath(data_dir))]
    if left_out is not None:
        left_out.update(found.others)
    if dangling is not None:
        dangling += found.dangling
    if links_left_out:
        warn_on_rank0(
            __name__,
            "%d links in %r are left out, such as %r: they lead out of the data set, or to what it has already. Copy "
            "the images, or mount their folder there",
            len(links_left_out), folder, os.path.relpath(links_left_out[0], folder),
        )  # fmt: skip
    found.files.sort()
    return sorted(found.files, key=natural_key)


class _Found:
    """Result of walking through folders."""

    def __init__(self, folder: str):
        self.root, self.suffixes = os.path.realpath(folder), get_img_extensions(as_set=True)
        self.files: list[str] = []
        self.dangling: list[str] = []
        self.others: Counter[str] = Counter()  # extensions of files that are not images
        self.links: list[str] = []
        self.targets: set[str] = set()  # targets of links, and folders below them

    def walk(self, folder: str, is_linked: bool = False) -> None:
        folders = [folder]
        while folders:
            folder = folders.pop()
            if is_linked:
                if (place := os.path.realpath(folder)) in self.targets:
                    continue
                self.targets.add(place)
            with retry(partial(os.scandir, folder)) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        self.others["hidden"] += 1
                    elif entry.is_symlink():
                        self.links.append(entry.path)
                    elif entry.is_dir():
                        folders.append(entry.path)
                    elif self._is_image(entry.path):
                        self.files.append(entry.path)
                    else:
                        self.others[os.path.splitext(entry.name)[1].lower() or entry.name] += 1

    def follow(self, link: str, data_dir: str) -> bool:
        """Add the target of a link if it is inside the data set and new; return False if the link is skipped."""
        target = os.path.realpath(link)
        is_folder = os.path.isdir(target)
        if not os.path.exists(target) and (self._is_image(link) or not os.path.splitext(link)[1]):  # or a class folder
            self.dangling.append(link)
        if not is_folder and not self._is_image(link):
            return True
        if os.path.exists(target):
            known = _is_in(target, self.root) or _is_in(self.root, target) or target in self.targets
            if known or not _is_in(target, data_dir):
                return False
        if is_folder:
            self.walk(link, is_linked=True)
        else:
            self.targets.add(target)
            self.files.append(link)
        return True

    def _is_image(self, path: str) -> bool:
        return os.path.splitext(path)[1].lower() in self.suffixes


def is_hidden(name: str) -> bool:
    """Return whether editors, operating systems or archive programs create files with this name."""
    return name.startswith(".") or name == "__MACOSX"


def _is_in(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)
