"""Split and shrink the five data sets of research/downstream.md, and pack them for a machine without network access.

    mkdir -p data/sources && cd data/sources
    git clone https://github.com/MachineLearning2020/Homework2-Caltech101 caltech101
    git clone https://github.com/marcusklasson/GroceryStoreDataset groceries
    git clone https://github.com/MachineLearning2020/Homework3-PACS pacs
    git clone https://github.com/zlima/testtensor aid
    git clone https://github.com/alexeygrigorev/clothing-dataset-small clothing
    cd ../.. && python -m research.downstream_images data/sources data/downstream_parts
    mkdir -p data/downstream && for part in data/downstream_parts/*/*.tar.gz; do tar xzf $part -C data/downstream; done

The parts of a data set are written to data/downstream_parts/DATASET, and contain DATASET/SPLIT/CLASS/NAME with the
splits train, validation and test. Each image is shrunk to at most 300 pixels on its longer side and saved as JPEG.
Groceries and clothing keep their official splits. In the other data sets, images are sorted by the SHA-256 of their
seeded names, so that everybody gets the same splits. If a repository stores an image twice, only one copy is kept, in
the test images if one of the copies is a test image.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from research.clothing_images import shrunk
from research.tiny_imagenet import PART_MEGABYTES, SEED, contents, git, pack

SPLITS = ("test", "validation", "train")  # an image that is in several splits stays only in the first of them
TEST_DOMAIN = "sketch"  # domain of PACS that is left out of training


def caltech101(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield 25 training, 5 validation and up to 50 test images of each of the 101 classes.

    The classes Faces and Faces_easy have the same photographs under the same names. Because images are sorted by name,
    both copies of a photograph are in the same split.
    """
    kept = (path for path in paths if path.startswith("101_") and "/BACKGROUND_Google/" not in path)
    for label, own in grouped(kept, lambda path: path.parent.name).items():
        for i, path in enumerate(own[:80]):
            yield f"{'train' if i < 25 else 'validation' if i < 30 else 'test'}/{label}/{path.name}", str(path)


def groceries(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the output path and the path of each image of the official splits. Classes are the deepest folders."""
    for path in map(PurePosixPath, paths):
        if path.parts[0] == "dataset" and path.parts[1] in ("train", "val", "test"):
            split = {"val": "validation"}.get(path.parts[1], path.parts[1])
            yield f"{split}/{path.parent.name}/{path.name}", str(path)


def pacs(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield TEST_DOMAIN for testing, a tenth of the other domains for validation, and the rest for training."""
    kept = (path for path in paths if path.startswith("PACS/"))
    for (domain, label), own in grouped(kept, lambda path: path.parts[1:3]).items():
        for i, path in enumerate(own):
            split = "test" if domain == TEST_DOMAIN else "validation" if i < len(own) // 10 else "train"
            yield f"{split}/{label}/{domain}_{path.name}", str(path)


def aid(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a fifth of each class for training, a twentieth for validation and the other images for testing."""
    kept = (path for path in paths if path.startswith("AID/"))
    for label, own in grouped(kept, lambda path: path.parent.name).items():
        for i, path in enumerate(own):
            share = i / len(own)
            split = "train" if share < 0.2 else "validation" if share < 0.25 else "test"
            yield f"{split}/{label}/{path.name}", str(path)


def clothing(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the images of the official splits."""
    yield from ((path, path) for path in paths)


DATA_SETS = {function.__name__: function for function in (caltech101, groceries, pacs, aid, clothing)}


def grouped(paths: Iterable[str], key: Callable[[PurePosixPath], Any]) -> dict[Any, list[PurePosixPath]]:
    """Group the paths by `key`. Groups are sorted by key, and the paths of each group by `rank`."""
    groups = defaultdict(list)
    for path in map(PurePosixPath, paths):
        groups[key(path)].append(path)
    return {label: sorted(own, key=rank) for label, own in sorted(groups.items())}


def rank(path: PurePosixPath) -> bytes:
    """Return the SHA-256 of the seed and the file name, by which the images of a class are sorted."""
    return hashlib.sha256(f"{SEED} {path.name}".encode()).digest()


def splits(name: str, files: dict[str, str]) -> dict[str, str]:
    """Return a dict from each image's output path SPLIT/CLASS/NAME to its git blob, sorted by path.

    Args:
        name: Name of the data set.
        files: Git blob of each image in the repository, by path.
    """
    places: dict[str, str] = {}  # output path by blob
    for place, path in sorted(DATA_SETS[name](files), key=lambda item: SPLITS.index(item[0].split("/")[0])):
        places.setdefault(files[path], place)
    assert len(set(places.values())) == len(places)
    return dict(sorted((place, blob) for blob, place in places.items()))


def files_of(repository: Path) -> dict[str, str]:
    """Return a dict from the path of each JPEG and PNG file of the repository to the file's git blob."""
    listed = (line.split("\t") for line in git(repository, "ls-tree", "-r", "-z", "HEAD").decode().split("\0") if line)
    return {path: head.split()[2] for head, path in listed if path.lower().endswith((".jpg", ".jpeg", ".png"))}


def images(name: str, repository: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the output path and the content of each image of a data set. Print the number of images of each split."""
    places = splits(name, files_of(repository))
    counts = (f"{split} {sum(place.startswith(f'{split}/') for place in places)}" for split in reversed(SPLITS))
    print(f"{name}: {', '.join(counts)}", flush=True)
    for place, content in zip(places, contents(repository, list(places.values()))):
        yield f"{name}/{place.rsplit('.', 1)[0]}.jpg", shrunk(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help=f"folder of the git repositories {', '.join(DATA_SETS)}")
    parser.add_argument("folder", type=Path, help="new folder for the parts")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} must not exist: choose a new folder")
    for name in DATA_SETS:
        for part in pack(images(name, options.sources / name), options.folder / name, int(1e6 * PART_MEGABYTES)):
            print(f"{part}: {part.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
