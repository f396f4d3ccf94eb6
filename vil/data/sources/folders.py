"""Reader of folders, in which subfolders are classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder

from ...config import ConfigError
from .class_folders import ClassReader, endings, shards_hint
from .image_files import folders_in, list_images


class FolderReader(ClassReader, ReaderImageFolder):
    """Reader of a folder of class folders, with the order and classes of timm's reader (see `ClassFolders`).

    Args:
        root: Folder of the split; may itself be a link.
        data_dir: Folder of the data set, inside which links are followed.
        known: See `ClassFolders`.

    Raises:
        RuntimeError: There are no images.
        ConfigError: There are no class folders, or a link has no target.
    """

    def __init__(self, root: str, data_dir: str, known: Sequence[str] = ()):
        Reader.__init__(self)
        self.root = root
        self.left_out = Counter()
        dangling: list[str] = []
        files = list_images(root, data_dir, self.left_out, dangling)
        if dangling:
            raise ConfigError(
                f"{len(dangling)} links in {root} have no target, such as {dangling[0]!r}: mount the disk to which "
                "the links lead, or remove the links"
            )
        if not files:
            raise RuntimeError(f"no images in subfolders of {root}{endings(self.left_out)}{shards_hint(self.left_out)}")

        targets = self.find_classes(files, folders_in(root, files), root, known)
        self.samples = [(files[i], target) for i, target in targets.items()]

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self.samples]

    @targets.setter
    def targets(self, targets: list[int]) -> None:
        self.samples = [(file, target) for (file, _), target in zip(self.samples, targets)]

    def keep(self, images: Sequence[int]) -> None:
        self.samples = [self.samples[image] for image in images]
