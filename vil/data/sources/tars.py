"""Reader of tar files, in which folders are classes."""

from __future__ import annotations

import posixpath
import tarfile
from collections import Counter
from collections.abc import Sequence

from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from .class_folders import ClassReader, endings
from .image_files import is_hidden


class TarReader(ClassReader, ReaderImageInTar):
    """timm's reader of a tar file, with the classes that the same files in a folder have (see `ClassFolders`).

    Args:
        root: The tar file, which may hold a tar file for each class.
        known: See `ClassFolders`.
        use_list: Whether to read and write timm's list of the members, which timm stores beside a large tar file.

    Raises:
        ConfigError: There are no class folders.
        ValueError: There are no images, or timm's list of the members contains a sparse file.
        RuntimeError: All images are hidden.
    """

    def __init__(self, root: str, known: Sequence[str] = (), use_list: bool = True):
        ReaderImageInTar.__init__(self, root, cache_tarinfo=None if use_list else False)
        # `check_tar` rejects sparse members of the tar file, but timm's cached list may contain additional members
        if any(member.issparse() for member, *_ in self.samples):
            raise ValueError("sparse files in a tar file are not supported, because their size is unbounded")
        members = [_path_of(member, child) for member, _, child in self.samples]
        shown = [i for i, path in enumerate(members) if not any(map(is_hidden, path.split("/")))]
        hidden = len(members) - len(shown)
        self.left_out = Counter({"hidden": hidden} if hidden else {})
        if not shown:
            raise RuntimeError(f"no images in {root}{endings(self.left_out)}")

        files = [members[i] for i in shown]
        targets = self.find_classes(files, [posixpath.dirname(file) for file in files], root, known)
        self.samples = self.samples[[shown[i] for i in targets]]
        self.targets = [*targets.values()]

    def keep(self, images: Sequence[int]) -> None:
        self.samples = self.samples[[*images]]
        self.targets = [self.targets[image] for image in images]


def _path_of(member: tarfile.TarInfo, tar: tarfile.TarInfo | None) -> str:
    """Return the path of a tar member. A member of a nested tar file lies in a folder named like the nested file."""
    folder = posixpath.splitext(tar.name)[0] if tar else ""
    return posixpath.normpath(posixpath.join(folder, member.name.lstrip("/")))
