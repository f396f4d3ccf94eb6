"""Pad the training images of Tiny ImageNet with black pixels, for research/published_vit.md.

    python -m research.pad_images data/tiny_imagenet data/tiny_imagenet_padded

SOURCE has the folders train/, choose/ and test/ of research/tiny_imagenet.py. TARGET/train gets the images of train/
and choose/, padded on all sides and stored as PNG. TARGET/validation gets the unchanged files of test/. A random crop
of 64 x 64 pixels of a padded image is a shift without resampling.
"""

from __future__ import annotations

import argparse
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from PIL import Image, ImageOps

PADDING = 4  # number of pixels to add on each side


def pad_class(source: Path, target: Path) -> None:
    """Pad the images of one class folder, and write them to another folder as PNG files."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        with Image.open(path) as image:
            padded = ImageOps.expand(image.convert("RGB"), PADDING)
        padded.save(target / f"{path.stem}.png", compress_level=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with train, choose and test")
    parser.add_argument("target", type=Path, help="new folder with train and validation")
    options = parser.parse_args()
    folders = [folder for split in ("train", "choose") for folder in sorted((options.source / split).iterdir())]
    with ProcessPoolExecutor() as pool:
        list(pool.map(pad_class, folders, [options.target / "train" / folder.name for folder in folders]))
    shutil.copytree(options.source / "test", options.target / "validation")


if __name__ == "__main__":
    main()
