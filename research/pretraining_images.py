"""Join Tiny ImageNet and mini-ImageNet for pre-training, and leave out near-duplicates of test images.

    python -m research.pretraining_images data/tiny_imagenet data/mini_imagenet data/pretraining_parts \\
        --test data/imagenette/val data/downstream/*/test
    mkdir -p data/pretraining && for part in data/pretraining_parts/*.tar.gz; do tar xzf $part -C data/pretraining; done

The folders tiny_imagenet and mini_imagenet have the splits train, choose and test of research/tiny_imagenet.py and
research/mini_imagenet.py. The splits of the same name are joined, and files are copied unchanged. An image of train or
choose is left out if it is a near-duplicate of an image of one of the two test splits or of the folders of `--test`. An
image of train is also left out if it is a near-duplicate of an image of choose. The file near_duplicates.csv.gz beside
the parts lists each image that was left out, with the most similar image of each folder.

Two images are near-duplicates if their copies with 12 x 12 pixels have similar edges and similar colors. The edges are
similar if the differences of adjacent gray pixels have a correlation of at least 0.65. The colors are similar if the
mean absolute difference of the RGB values is at most 25 of 255. Tiny ImageNet has the central squares of photographs.
Copies of Tiny ImageNet's images are therefore compared with copies of whole images and with copies of the central
squares of photographs with the aspect ratios 4:3, 3:2, 3:4 and 2:3.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from research.tiny_imagenet import PART_MEGABYTES, pack
from vil.evaluation.markdown import markdown_table

PIXELS = 12  # width and height of the compared copies
SAME_EDGES = 0.65  # smallest correlation of the differences of adjacent pixels of near-duplicates
SAME_COLORS = 25  # largest mean absolute difference of the RGB values of near-duplicates
GRAY = np.array((0.299, 0.587, 0.114), dtype=np.float32)  # weights of red, green and blue (ITU-R BT.601)
WHOLE = (1.0, 1.0)
# Shares of a photograph's width and height that its central square covers, for the aspect ratios 4:3, 3:2, 3:4, 2:3
SQUARES = ((3 / 4, 1.0), (2 / 3, 1.0), (1.0, 3 / 4), (1.0, 2 / 3))
ENDINGS = (".jpg", ".jpeg", ".png")
AT_ONCE = 1024  # number of images that are compared at a time with all images of a folder
DUPLICATES = "near_duplicates.csv.gz"


class Pictures(NamedTuple):
    """Image files of a folder, with small copies (V, N, H, W, 3) and standardized edges (V, N, E) in V views."""

    files: list[Path]
    copies: np.ndarray
    edges: np.ndarray


class Duplicate(NamedTuple):
    """Image that is left out of a split because it resembles a held-out image."""

    image: str  # SPLIT/CLASS/NAME
    folder: str  # folder of the held-out image
    held_out: str  # path of the held-out image in `folder`
    correlation: float  # correlation of the edges of both images


def read(folder: Path, views: Sequence[tuple[float, float]], pool: ProcessPoolExecutor) -> Pictures:
    """Read the images in `folder` and its subfolders as small copies in each of `views`."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in ENDINGS)
    copies = np.stack(list(pool.map(partial(small_copies, views=views), files, chunksize=256)), axis=1)
    return Pictures(files, copies, edges(copies @ GRAY))


def small_copies(file: Path, views: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return small copies (V, PIXELS, PIXELS, 3) of V central parts of an image.

    Args:
        file: Image file.
        views: For each part, the shares of the image's width and height that the part covers.
    """
    image = Image.open(file).convert("RGB")
    size = np.array(image.size)
    boxes = [(*(size * (1 - np.array(view)) / 2), *(size * (1 + np.array(view)) / 2)) for view in views]
    return np.stack([np.asarray(image.resize((PIXELS, PIXELS), Image.Resampling.BOX, box)) for box in boxes])


def edges(gray: np.ndarray) -> np.ndarray:
    """Return the differences of adjacent pixels of images (V, N, H, W), scaled so that dot products are correlations.

    The differences of horizontally adjacent pixels and those of vertically adjacent pixels have the same weight.
    """
    both = [np.diff(gray, axis=axis).reshape(*gray.shape[:2], -1) for axis in (2, 3)]
    centered = [part - part.mean(-1, keepdims=True) for part in both]
    scaled = [part / np.maximum(np.linalg.norm(part, axis=-1, keepdims=True), 1e-6) for part in centered]
    return np.concatenate(scaled, axis=-1) / np.sqrt(2, dtype=np.float32)


def near_duplicates(images: Pictures, others: Pictures) -> dict[int, tuple[float, int]]:
    """Return {image: (correlation, index of the most similar image of `others`)} for images that have a near-duplicate.

    If both folders contain whole photographs, their central squares are not compared.
    """
    views = [range(len(part.copies)) for part in (images, others)]
    views = [range(1)] * 2 if min(map(len, views)) > 1 else views
    found: dict[int, tuple[float, int]] = {}
    for (a, b), start in product([*product(*views)], range(0, len(images.files), AT_ONCE)):
        correlations = images.edges[a, start : start + AT_ONCE] @ others.edges[b].T
        rows, columns = np.nonzero(correlations >= SAME_EDGES)
        gaps = images.copies[a, start + rows].astype(np.float32) - others.copies[b, columns]
        same = np.abs(gaps).mean((1, 2, 3)) <= SAME_COLORS
        for row, column in zip(rows[same].tolist(), columns[same].tolist()):
            found[start + row] = max(found.get(start + row, (0.0, 0)), (float(correlations[row, column]), column))
    return found


def name_of(file: Path) -> str:
    return "/".join(file.parts[-3:])


def title_of(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def listed(images: Pictures, folder: Path, others: Pictures) -> list[Duplicate]:
    """Return the images that have a near-duplicate in a folder of held-out images."""
    found = sorted(near_duplicates(images, others).items())
    place = title_of(folder)
    return [
        Duplicate(name_of(images.files[i]), place, str(others.files[j].relative_to(folder)), round(correlation, 3))
        for i, (correlation, j) in found
    ]


def find_duplicates(tiny: Path, mini: Path, tests: Sequence[Path]) -> Iterator[Duplicate]:
    """Yield the near-duplicates of held-out images in the splits train and choose of both data sets."""
    with ProcessPoolExecutor() as pool:
        views = {tiny: [WHOLE], mini: [WHOLE, *SQUARES]}
        own = {source / split: read(source / split, views[source], pool)
               for split in ("train", "choose") for source in (tiny, mini)}  # fmt: skip
        for folder in (tiny / "test", mini / "test", *tests, tiny / "choose", mini / "choose"):
            others = own.get(folder) or read(folder, views.get(folder.parent, [WHOLE, *SQUARES]), pool)
            splits = ["train"] if folder.name == "choose" else ["train", "choose"]
            found = [row for place in own if place.name in splits for row in listed(own[place], folder, others)]
            print(f"{title_of(folder)}: {len(others.files)} images, {len(found)} near-duplicates", flush=True)
            yield from found


def write_duplicates(rows: Iterable[Duplicate], file: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Duplicate._fields, *rows])
    file.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read_duplicates(file: Path) -> list[Duplicate]:
    _, *rows = csv.reader(gzip.decompress(file.read_bytes()).decode().splitlines())
    return [Duplicate(image, folder, held_out, float(value)) for image, folder, held_out, value in rows]


def duplicates_table(rows: Sequence[Duplicate]) -> str:
    """Return a Markdown table of how many images of each split were left out, by the folder of the held-out images."""
    kinds = {"train, Tiny ImageNet": ("train", True), "train, mini-ImageNet": ("train", False),
             "choose, Tiny ImageNet": ("choose", True), "choose, mini-ImageNet": ("choose", False)}  # fmt: skip
    table = [["near-duplicates of", *kinds]]
    for title in [*dict.fromkeys(row.folder for row in rows), "all together"]:
        images = {row.image for row in rows if row.folder == title or title == "all together"}
        found = [(image.split("/")[0], image.endswith(".JPEG")) for image in images]
        table.append([title, *(f"{found.count(kind):,}" for kind in kinds.values())])
    return markdown_table(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiny", type=Path, help="folder of Tiny ImageNet")
    parser.add_argument("mini", type=Path, help="folder of mini-ImageNet")
    parser.add_argument("folder", type=Path, help="new folder for the parts")
    parser.add_argument("--test", type=Path, nargs="+", default=[], help="folders of further test images")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} must not exist: choose a new folder")
    rows = [*find_duplicates(options.tiny, options.mini, options.test)]
    left_out = {row.image for row in rows}
    files = sorted((name_of(file), file) for source in (options.tiny, options.mini) for file in source.glob("*/*/*"))
    kept = [(name, file) for name, file in files if name not in left_out]
    parts = pack(((name, file.read_bytes()) for name, file in kept), options.folder, int(1e6 * PART_MEGABYTES))
    write_duplicates(rows, options.folder / DUPLICATES)
    print(duplicates_table(rows))
    for split in ("train", "choose", "test"):
        print(f"{split}: {sum(name.startswith(f'{split}/') for name, _ in kept)} images")
    for part in parts:
        print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
