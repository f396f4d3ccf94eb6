"""scikit-learn's handwritten digits as a folder of image files, for `make demo`.

    python -m vil.training.digits data/digits
    python -m vil.training.digits data/digits_few --train-per-class 20    # harder: 200 of them to learn from
    python -m vil.training.digits data/high --digits 5 6 7 8 9            # some of the classes

1,797 real images of 8x8 pixels, scanned from forms that 43 people filled in (UCI "Optical Recognition of Handwritten
Digits"). A quarter, the same every time and equal in every class, is held out as the validation split.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def write_digits(root: Path, train_per_class: int | None = None, wanted: Iterable[int] = range(10)) -> None:
    """Writes `root`/{train,validation}/{0..9}/*.png, 8-bit grey; of the training images only so many of each class."""
    wanted = set(wanted)
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    splits = train_test_split(np.arange(len(digits.target)), test_size=0.25, random_state=0, stratify=digits.target)
    for split, indices in zip(("train", "validation"), splits):
        if split == "train" and train_per_class:
            of_class = [indices[digits.target[indices] == digit][:train_per_class] for digit in range(10)]
            indices = np.concatenate(of_class)
        indices = [i for i in indices if digits.target[i] in wanted]
        for i in indices:
            folder = root / split / str(digits.target[i])
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.round(digits.images[i] * (255 / 16)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:04d}.png")
        print(f"{root / split}: {len(indices)} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--train-per-class", type=int, help="training images of each digit (default: all)")
    parser.add_argument("--digits", type=int, nargs="+", choices=range(10), default=range(10), metavar="DIGIT")
    options = parser.parse_args()
    write_digits(options.root, options.train_per_class, options.digits)
