"""Tiny ImageNet in the splits of research/photographs.md, packed for a machine that has no network.

    python -m research.tiny_imagenet SOURCE data/tiny_parts    # e.g. a clone of github.com/seshuad/IMagenet
    mkdir -p data/tiny_imagenet && for part in data/tiny_parts/*.tar.gz; do tar xzf $part -C data/tiny_imagenet; done

SOURCE is a git repository, bare or not, whose tip has the data set as a folder with train/ and val/ somewhere in it.
Files go on as they are, to train/, choose/ and test/ with a folder for each class: 50 training images of each class to
choose on, the others to train on, the official validation images, whose classes are published, to test on. Those to
choose on are the 50 whose names have the lowest SHA-256 behind SEED, so that everybody has the same.
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
CHOSEN = 50  # of each class, to choose on
PART_MEGABYTES = 53  # with the repository but for its weights it stays below the 64 MiB of a call (sitting.sh)


def git(repository: Path, *words: str, given: bytes = b"") -> bytes:
    return subprocess.run(["git", "-C", repository, *words], input=given, capture_output=True, check=True).stdout


def files_of(repository: Path) -> dict[str, str]:
    """The id of every file of the data set, by its path below the folder that has train/ and val/.

    Raises:
        SystemExit: There is none.
    """
    listed = (line.split("\t") for line in git(repository, "ls-tree", "-r", "HEAD").decode().splitlines())
    ids = {path: head.split()[2] for head, path in listed}
    annotations = "val/val_annotations.txt"
    roots = [path.removesuffix(annotations) for path in ids if path.endswith(annotations)]
    if not roots:
        sys.exit(f"{repository} has no {annotations}: give a repository of Tiny ImageNet")
    return {path.removeprefix(roots[0]): blob for path, blob in ids.items() if path.startswith(roots[0])}


def splits(files: dict[str, str], annotations: str) -> dict[str, str]:
    """The id of every image by its place, SPLIT/CLASS/NAME, those of a split and class beside each other."""
    names = defaultdict(list)
    for path in files:
        if path.startswith("train/") and path.endswith(".JPEG"):
            _, label, *_, name = path.split("/")
            names[label].append((hashlib.sha256(f"{SEED} {name}".encode()).digest(), name, path))
    places = {}
    for label in sorted(names):
        for i, (_, name, path) in enumerate(sorted(names[label])):
            places[f"{'choose' if i < CHOSEN else 'train'}/{label}/{name}"] = files[path]
    for line in annotations.splitlines():
        name, label = line.split("\t")[:2]
        places[f"test/{label}/{name}"] = files[f"val/images/{name}"]
    return dict(sorted(places.items()))


def contents(repository: Path, ids: list[str]) -> Iterator[bytes]:
    """The files of these ids."""
    answers = BytesIO(git(repository, "cat-file", "--batch", given="\n".join(ids).encode() + b"\n"))
    for blob in ids:
        name, _, size = answers.readline().decode().split()
        assert name == blob
        yield answers.read(int(size))
        answers.read(1)


def pack(images: Iterator[tuple[str, bytes]], folder: Path, part_bytes: int) -> list[Path]:
    """Writes part-0.tar.gz, part-1.tar.gz, ... of at most `part_bytes` each, every one a tar file by itself.

    Compression takes the tables away that the small JPEG files have in common, and the tar file's padding.
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
            while waiting and file.tell() < part_bytes - 2**18:  # what the compressor holds back comes on top
                name, content = waiting
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, BytesIO(content))
                waiting = next(images, None)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="git repository of the data set")
    parser.add_argument("folder", type=Path, help="gets the parts; made here")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} exists: give the name of a folder that is to be made")
    files = files_of(options.source)
    (annotations,) = contents(options.source, [files["val/val_annotations.txt"]])
    places = splits(files, annotations.decode())
    images = zip(places, contents(options.source, list(places.values())))
    parts = pack(images, options.folder, int(1e6 * PART_MEGABYTES))
    for split in ("train", "choose", "test"):
        print(f"{split}: {sum(place.startswith(f'{split}/') for place in places)} images")
    for part in parts:
        print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
