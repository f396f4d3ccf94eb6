"""Shrink the photographs of clothing-dataset-small to reduce the size of the data set.

    git clone https://github.com/alexeygrigorev/clothing-dataset-small
    python -m research.clothing_images clothing-dataset-small data/clothing

Each image of train/, validation/ and test/ is shrunk to at most 300 pixels on its longer side and saved as JPEG.
"""

from __future__ import annotations

import argparse
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

PIXELS = 300  # maximum longer side of an image in pixels
QUALITY = 85


def shrunk(content: bytes) -> bytes:
    """Return an image file as a JPEG file with at most PIXELS pixels on the longer side."""
    image, target = Image.open(BytesIO(content)).convert("RGB"), BytesIO()
    image.thumbnail((PIXELS, PIXELS))
    image.save(target, "JPEG", quality=QUALITY)
    return target.getvalue()


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
            target = options.folder / file.relative_to(options.source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(shrunk(file.read_bytes()))
        print(f"{split}: {len(files)} images")


if __name__ == "__main__":
    main()
