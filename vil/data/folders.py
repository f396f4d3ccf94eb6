"""The images of a split's folder, found without links that lead out of the data set or to what it already has.

A folder of class folders, without splits, becomes one with train and validation, a fifth of each class:

    python -m vil.data.folders pets data/pets
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path

from timm.data import add_img_extensions, get_img_extensions
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.utils.misc import natural_key

from ..processes import warn

SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "val", "valid", "eval")}

# beside timm's, which are those of JPEG and PNG: of what `decoder` reads; in tar files, too
add_img_extensions((".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif"))


class FolderReader(ReaderImageFolder):
    """timm's reader of a folder, with the same order and classes.

    Args:
        root: Folder of the split; it may itself be a link.
        data_dir: Folder of the data set, in which links of the split may lead.

    Attributes:
        left_out: How many files with which ending are none that are read.
        nested: The classes whose folders lie in those of others.

    Raises:
        RuntimeError: There are no images.
    """

    def __init__(self, root: str, data_dir: str):
        Reader.__init__(self)
        self.root = root
        self.left_out: Counter[str] = Counter()
        files = list_images(root, data_dir, self.left_out)
        folders = [os.path.dirname(file) for file in files]
        names = [os.path.basename(folder) if folder != root else "" for folder in folders]
        of_classes = {Path(folder) for folder in {*folders} - {root}}
        self.nested = sorted({folder.name for folder in of_classes if not of_classes.isdisjoint(folder.parents)})
        self.class_to_idx = {name: i for i, name in enumerate(sorted(sorted(set(names)), key=natural_key))}
        self.samples = [(file, self.class_to_idx[name]) for file, name in zip(files, names)]
        if not self.samples:
            raise RuntimeError(f"no images in subfolders of {root}{endings(self.left_out)}")

    def renumber(self, class_map: dict[str, int]) -> None:
        """Gives the classes other numbers, by their names, without a second look at the folder."""
        numbers = {number: class_map[name] for name, number in self.class_to_idx.items()}
        self.class_to_idx = class_map
        self.samples = [(file, numbers[number]) for file, number in self.samples]

    def __str__(self) -> str:
        """How many images there are of how many classes, and what else lies there, in a line."""
        names = {number: name for name, number in self.class_to_idx.items()}
        counts = Counter(number for _, number in self.samples).most_common()
        most, fewest = (f"{count} of {names[number]!r}" for number, count in (counts[0], counts[-1]))
        images = f"{len(self.samples)} images of {len(counts)} classes, from {fewest} to {most}"
        if self.nested:
            images += f"; a class is the folder that an image is in, also {self.nested[0]!r} inside of another"
        return images + endings(self.left_out)


def endings(left_out: Counter[str]) -> str:
    """Files that are not read, by their endings."""
    kinds = [f"{count} {ending!r}" for ending, count in left_out.most_common(5)]
    return "; not read as images: " + ", ".join(kinds) + ", ..." * (len(left_out) > 5) if left_out else ""


def list_images(folder: str, data_dir: str, left_out: Counter[str] | None = None) -> list[str]:
    """Files with the suffix of an image, in timm's order; one line says how many links were left out.

    The endings of other files are counted in `left_out`, and what is hidden: names that begin with a dot, `__MACOSX`.
    """
    found = _Found(folder)
    found.walk(folder)
    links_left_out = []
    while found.links:
        links, found.links = sorted(found.links), []
        links_left_out += [link for link in links if not found.follow(link, os.path.realpath(data_dir))]
    if left_out is not None:
        left_out.update(found.others)
    if links_left_out:
        warn(
            __name__,
            "%d links in %r are left out, such as %r: they lead out of the data set, or to what it has already. Copy "
            "the images, or mount their folder there",
            len(links_left_out), folder, os.path.relpath(links_left_out[0], folder),
        )  # fmt: skip
    found.files.sort()
    return sorted(found.files, key=natural_key)


class _Found:
    """What a walk through folders has met."""

    def __init__(self, folder: str):
        self.root, self.suffixes = os.path.realpath(folder), get_img_extensions(as_set=True)
        self.files: list[str] = []
        self.others: Counter[str] = Counter()  # endings of files that are no images
        self.links: list[str] = []
        self.targets: set[str] = set()  # of links, and the folders below them

    def walk(self, folder: str, is_linked: bool = False) -> None:
        folders = [folder]
        while folders:
            folder = folders.pop()
            if is_linked:
                if (place := os.path.realpath(folder)) in self.targets:
                    continue
                self.targets.add(place)
            with contextlib.suppress(OSError), os.scandir(folder) as entries:  # as os.walk does
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
        """Takes what a link leads to, if that is in the data set and not yet met. Returns False if it is left out."""
        target = os.path.realpath(link)
        is_folder = os.path.isdir(target)
        if not is_folder and not self._is_image(link):
            return True
        if os.path.exists(target):  # who reads one that leads nowhere says so
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
    """Whether a name is one that editors, systems and archives give their files."""
    return name.startswith(".") or name == "__MACOSX"


def _is_in(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def split_folder(source: Path, target: Path, validation: float = 0.2) -> dict[str, int]:
    """Makes `target`/{train,validation}/CLASS of `source`/CLASS, the same for the same files.

    The files are hard links where that is possible, which take no room, and else copies.

    Returns:
        How many images each split has.

    Raises:
        ValueError: It is split already, a class has less than two images, there is something at `target`, or that is
            inside of `source`.
        OSError: Something cannot be read or written; then there is nothing at `target`.
    """
    if not 0 < validation < 1:
        raise ValueError(f"the share of validation must be between 0 and 1, not {validation}")
    target = target.resolve()
    if target.is_relative_to(source.resolve()):
        raise ValueError(f"{target} is in {source}, of whose classes it would be one: name a folder beside it")
    classes = defaultdict(list)
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}")
    for file in map(Path, list_images(str(source), str(source))):
        inside = file.relative_to(source)
        if len(inside.parts) > 1:
            classes[inside.parts[0]].append(file)
    if len(classes) < 2:
        raise ValueError(f"{source} has {len(classes)} folders of images: it needs one for each class")
    if all(name.lower() in {"test", *chain(*SPLIT_NAMES.values())} for name in classes):
        raise ValueError(f"{source} is split already, into {', '.join(sorted(classes))}: train on it as it is")
    if few := [name for name, files in classes.items() if len(files) < 2]:
        raise ValueError(f"the class {few[0]!r} has one image, and each split needs one")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"there is something in {target}: name a folder that is new")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as unfinished:
        (whole := Path(unfinished) / target.name).mkdir()  # with the user's usual permissions
        counts = _fill(whole, source, classes, validation)
        if target.exists():
            target.rmdir()  # Windows would not replace it
        whole.rename(target)
    return counts


def _fill(target: Path, source: Path, classes: dict[str, list[Path]], validation: float) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, files in classes.items():
        random.Random(0).shuffle(files)
        held_out = min(len(files) - 1, max(1, round(validation * len(files))))
        for place, file in enumerate(files):
            split = "validation" if place < held_out else "train"
            copy = target / split / name / "-".join(file.relative_to(source / name).parts)
            copy.parent.mkdir(parents=True, exist_ok=True)
            while os.path.lexists(copy):  # a-b.png beside a/b.png, or A.png where a disk takes it for a.png
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
            print(f"{options.target / split}: {count} images")
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
