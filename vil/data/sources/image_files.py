"""Search for image files in a folder, skipping links that leave the data set or lead to files found before."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from timm.data import add_img_extensions, get_img_extensions
from timm.utils.misc import natural_key

from ...distributed import warn_on_rank0
from ...fault_tolerance.machine_errors import retry
from ...text import counted

# timm only knows the extensions of JPEG and PNG, but `vil.security` also decodes other formats
add_img_extensions((".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif"))
HEIC_EXTENSIONS = (".heic", ".heif")
if importlib.util.find_spec("pillow_heif"):
    add_img_extensions(HEIC_EXTENSIONS)


def list_images(
    folder: str, data_dir: str, left_out: Counter[str] | None = None, dangling: list[str] | None = None
) -> list[str]:
    """Return the files with an image extension in timm's order, and log how many links were skipped.

    Args:
        folder: Folder of the files.
        data_dir: Folder of the data set, inside which links are followed.
        left_out: Counter to which the extensions of other files, and hidden files and folders as 'hidden', are added.
        dangling: List to which image links and folder links without a target are added.
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
            "left out %s in %r, such as %r: links must not lead out of the data set, or to files that the data set "
            "contains already. Copy the images, or mount their folder inside the data set",
            counted(len(links_left_out), "link"), folder, os.path.relpath(links_left_out[0], folder),
        )  # fmt: skip
    if heic := sum(found.others[extension] for extension in HEIC_EXTENSIONS):
        files = counted(heic, "HEIC file")
        warn_on_rank0(__name__, "left out %s in %r: to read HEIC files, pip install pillow-heif", files, folder)
    found.files.sort()
    return sorted(found.files, key=natural_key)


class _Found:
    """Image files and links that a search through folders has found, and counts of files that are not images."""

    def __init__(self, folder: str):
        self.root = os.path.realpath(folder)
        self.suffixes = get_img_extensions(as_set=True)
        self.files: list[str] = []
        self.dangling: list[str] = []
        self.others: Counter[str] = Counter()  # number of other files by extension, and of hidden files and folders
        self.links: list[str] = []
        self.targets: set[str] = set()  # resolved paths of followed links and of folders inside linked folders

    def walk(self, folder: str, is_linked: bool = False) -> None:
        """Collect the image files and links in a folder and its subfolders, without following links.

        Args:
            folder: Path of the folder.
            is_linked: Whether the path is a link, so that its target may be found a second time.
        """
        folders = [folder]
        while folders:
            folder = folders.pop()
            if is_linked:
                target = os.path.realpath(folder)
                if target in self.targets:
                    continue
                self.targets.add(target)
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
        """Add the target of a link. Return False if the target is outside the data set or was found before."""
        target = os.path.realpath(link)
        is_folder = os.path.isdir(target)
        # a link without a target may have led to an image or, if the link has no extension, to a class folder
        if not os.path.exists(target) and (self._is_image(link) or not os.path.splitext(link)[1]):
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
    """Return whether a name marks a hidden file or folder, as operating systems and archive programs add them."""
    return name.startswith(".") or name == "__MACOSX"


def has_images(folder: Path) -> bool:
    """Return whether a folder contains an image that is not hidden, at any depth."""
    images = (path for path in folder.rglob("*") if path.suffix.lower() in get_img_extensions())
    return not all(any(map(is_hidden, path.relative_to(folder).parts)) for path in images)


def _is_in(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def folders_in(root: str, files: Iterable[str]) -> list[str]:
    """Return the path of each file's folder relative to `root`, with "/" as the separator."""
    known: dict[str, str] = {}
    return [
        known.get(folder) or known.setdefault(folder, folder[len(root) :].replace(os.sep, "/").strip("/"))
        for folder in map(os.path.dirname, files)
    ]
