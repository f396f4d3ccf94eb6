"""The images of a split's folder, found without links that lead out of the data set or to what it already has."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from timm.data import add_img_extensions, get_img_extensions
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.utils.misc import natural_key

from ..processes import is_first_process

_logger = logging.getLogger(__name__)

# beside timm's, which are those of JPEG and PNG: of what `decoder` reads; in tar files, too
add_img_extensions((".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif"))


class FolderReader(ReaderImageFolder):
    """timm's reader of a folder, with the same order and classes.

    Args:
        root: Folder of the split; it may itself be a link.
        data_dir: Folder of the data set, in which links of the split may lead.
        class_map: The number of each class by name; None to number the names that there are.

    Raises:
        RuntimeError: There are no images.
    """

    def __init__(self, root: str, data_dir: str, class_map: dict[str, int] | None = None):
        Reader.__init__(self)
        self.root = root
        files = list_images(root, data_dir)
        names = [os.path.basename(os.path.dirname(file)) if os.path.dirname(file) != root else "" for file in files]
        if class_map is None:
            class_map = {name: number for number, name in enumerate(sorted(sorted(set(names)), key=natural_key))}
        self.class_to_idx = class_map
        self.samples = [(file, class_map[name]) for file, name in zip(files, names) if name in class_map]
        if not self.samples:
            raise RuntimeError(f"no images in subfolders of {root}")


def list_images(folder: str, data_dir: str) -> list[str]:
    """Files with the suffix of an image, in timm's order; one line says how many links were left out."""
    found = _Found(folder)
    found.walk(folder)
    left_out = []
    while found.links:
        links, found.links = sorted(found.links), []
        left_out += [link for link in links if not found.follow(link, os.path.realpath(data_dir))]
    if left_out and is_first_process():
        _logger.warning(
            "%d links in %r are left out, such as %r: they lead out of the data set, or to what it has already. Copy "
            "the images, or mount their folder there",
            len(left_out), folder, os.path.relpath(left_out[0], folder),
        )  # fmt: skip
    found.files.sort()
    return sorted(found.files, key=natural_key)


class _Found:
    """What a walk through folders has met."""

    def __init__(self, folder: str):
        self.root, self.suffixes = os.path.realpath(folder), get_img_extensions(as_set=True)
        self.files: list[str] = []
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
                    if entry.is_symlink():
                        self.links.append(entry.path)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif self._is_image(entry.path):
                        self.files.append(entry.path)

    def follow(self, link: str, data_dir: str) -> bool:
        """Takes what a link leads to, if that is in the data set and not yet met. Returns False if it is left out."""
        target = os.path.realpath(link)
        is_folder = os.path.isdir(target)
        if not is_folder and not self._is_image(link):
            return True
        if is_folder or os.path.exists(target):  # who reads one that leads nowhere says so
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


def _is_in(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)
