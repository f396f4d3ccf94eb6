"""Shrink the photographs of clothing-dataset-small to reduce the size of the data set.

    git clone https://github.com/alexeygrigorev/clothing-dataset-small
    python -m research.clothing_images clothing-dataset-small data/clothing

Each image of train/, validation/ and test/ is shrunk to at most 300 pixels on its longer side and saved as JPEG.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image

PIXELS = 300  # maximum longer side of an image in pixels
QUALITY = 85


def shrink(source: Path, target: Path) -> None:
    """Write a smaller copy of one image."""
    image = Image.open(source).convert("RGB")
    image.thumbnail((PIXELS, PIXELS))
    target.parent.mkdir(parents=True, exist_ok=True)
    image.save(target, "JPEG", quality=QUALITY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="clone of the data set")
    parser.add_argument("folder", type=Path, help="folder to create")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} exists; give the name of a new folder")
    for split in ("train", "validation", "test"):
        files = sorted((options.source / split).glob("*/*.jpg"))
        for file in files:
            shrink(file, options.folder / file.relative_to(options.source))
        print(f"{split}: {len(files)} images")


if __name__ == "__main__":
    main()
