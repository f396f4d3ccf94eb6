"""Split Tiny ImageNet for the study in research/photographs.md, and pack it for a machine without network access.

    python -m research.tiny_imagenet SOURCE data/tiny_parts    # e.g. a clone of github.com/seshuad/IMagenet
    mkdir -p data/tiny_imagenet && for part in data/tiny_parts/*.tar.gz; do tar xzf $part -C data/tiny_imagenet; done

SOURCE is a git repository, bare or not, whose HEAD contains the data set as a folder with train/ and val/. Files are
copied unchanged to train/, choose/ and test/, with a folder for each class. choose/ has 50 training images per class
for selecting hyperparameters, and train/ has the other training images. test/ has the official validation images,
whose classes are published. choose/ has the images whose seeded names have the lowest SHA-256, so that everybody gets
the same split.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

SEED = 0
CHOSEN = 50  # number of training images per class held out for selecting hyperparameters
PART_MEGABYTES = 53  # maximum size of a part; a part and the source code must fit in an upload of 64 MiB


def git(repository: Path, *words: str, given: bytes = b"") -> bytes:
    return subprocess.run(["git", "-C", repository, *words], input=given, capture_output=True, check=True).stdout


def blobs(repository: Path) -> dict[str, str]:
    """Return a dict from the path of each file in the repository's HEAD to the file's git blob."""
    listed = (line.split("\t") for line in git(repository, "ls-tree", "-r", "HEAD").decode().splitlines())
    return {path: head.split()[2] for head, path in listed}


def files_of(repository: Path) -> dict[str, str]:
    """Return a dict from each file's path, relative to the data set's root folder, to the file's git blob.

    Raises:
        SystemExit: The repository does not contain Tiny ImageNet.
    """
    ids = blobs(repository)
    annotations = "val/val_annotations.txt"
    roots = [path.removesuffix(annotations) for path in ids if path.endswith(annotations)]
    if not roots:
        sys.exit(f"{repository} must contain {annotations}: pass a git repository of Tiny ImageNet")
    return {path.removeprefix(roots[0]): blob for path, blob in ids.items() if path.startswith(roots[0])}


def training_splits(files: dict[str, str], ending: str) -> dict[str, str]:
    """Return a dict from the output paths train/CLASS/NAME and choose/CLASS/NAME to the git blobs of training images.

    Args:
        files: Git blob of each file of the data set, by path.
        ending: End of the names of the image files.
    """
    names = defaultdict(list)
    for path in files:
        if path.startswith("train/") and path.endswith(ending):
            _, label, *_, name = path.split("/")
            names[label].append((hashlib.sha256(f"{SEED} {name}".encode()).digest(), name, path))
    places = {}
    for label in sorted(names):
        for i, (_, name, path) in enumerate(sorted(names[label])):
            places[f"{'choose' if i < CHOSEN else 'train'}/{label}/{name}"] = files[path]
    return places


def splits(files: dict[str, str], annotations: str) -> dict[str, str]:
    """Return a dict from each image's output path SPLIT/CLASS/NAME to its git blob, sorted by path."""
    places = training_splits(files, ".JPEG")
    for line in annotations.splitlines():
        name, label = line.split("\t")[:2]
        places[f"test/{label}/{name}"] = files[f"val/images/{name}"]
    return dict(sorted(places.items()))


def contents(repository: Path, ids: list[str]) -> Iterator[bytes]:
    """Yield the content of each git blob in `ids`."""
    answers = BytesIO(git(repository, "cat-file", "--batch", given="\n".join(ids).encode() + b"\n"))
    for blob in ids:
        name, _, size = answers.readline().decode().split()
        assert name == blob
        yield answers.read(int(size))
        answers.read(1)


def pack(images: Iterator[tuple[str, bytes]], folder: Path, part_bytes: int) -> list[Path]:
    """Write part-0.tar.gz, part-1.tar.gz, ... of at most `part_bytes` each. Each part is a complete tar file.

    Compression removes the tables that the small JPEG files have in common, and the padding of the tar format.
    """
    folder.mkdir(parents=True)
    parts, waiting = [], next(images, None)
    while waiting:
        parts.append(folder / f"part-{len(parts)}.tar.gz")
        with (
            open(parts[-1], "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as tar,
        ):
            while waiting and file.tell() < part_bytes - 2**18:  # 2**18 bytes for the compressor's buffer
                name, content = waiting
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, BytesIO(content))
                waiting = next(images, None)
    return parts


def write_parts(repository: Path, places: dict[str, str], folder: Path) -> None:
    """Write the images of `places`, a dict from output path to git blob, to parts in a new folder, and print sizes."""
    images = zip(places, contents(repository, list(places.values())))
    parts = pack(images, folder, int(1e6 * PART_MEGABYTES))
    for split in ("train", "choose", "test"):
        print(f"{split}: {sum(place.startswith(f'{split}/') for place in places)} images")
    for part in parts:
        print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")


def parse_arguments(description: str) -> argparse.Namespace:
    """Return the command-line arguments `source` and `folder`.

    Raises:
        SystemExit: The folder exists already.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="git repository of the data set")
    parser.add_argument("folder", type=Path, help="new folder for the parts")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} must not exist: choose a new folder")
    return options


def main() -> None:
    options = parse_arguments(__doc__)
    files = files_of(options.source)
    (annotations,) = contents(options.source, [files["val/val_annotations.txt"]])
    write_parts(options.source, splits(files, annotations.decode()), options.folder)


if __name__ == "__main__":
    main()
