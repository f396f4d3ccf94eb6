"""Write scikit-learn's handwritten digits as a folder of image files, for `make demo`.

    python -m vil.data.digits data/digits
    python -m vil.data.digits data/digits_few --train-per-class 20            # harder: 200 training images
    python -m vil.data.digits data/digits_five --train-per-class 5 --seed 3   # 50 training images, sampled by the seed
    python -m vil.data.digits data/high --digits 5 6 7 8 9                    # images of five digits only

The dataset has 1,797 real images of 8x8 pixels, scanned from forms that 13 people filled in (the test set of UCI
"Optical Recognition of Handwritten Digits"). A fixed, stratified quarter is held out as the validation split. With
`--rehearse`, the validation split consists of other training images instead, so that choices can be made without the
held-out images.
"""

from __future__ import annotations

import argparse
from collections.abc import Container
from pathlib import Path

import numpy as np
from PIL import Image

REHEARSED = 45  # number of validation images per class with --rehearse, about a quarter of each class


def split_digits(
    classes: np.ndarray, train_per_class: int | None = None, seed: int | None = None, rehearse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training images and the indices of the validation images.

    Args:
        classes: Class (N,) of each image, in scikit-learn's order.
        train_per_class: Number of training images of each class; all if None.
        seed: Seed for sampling the training images. If None, a fixed order is used.
        rehearse: Use `REHEARSED` training images per class as the validation split instead of the held-out images.
            The `REHEARSED` images are removed from the training split.

    Raises:
        ValueError: A class has too few training images.
    """
    from sklearn.model_selection import train_test_split

    train, held_out = train_test_split(np.arange(len(classes)), test_size=0.25, random_state=0, stratify=classes)
    if seed is not None:
        train = np.random.default_rng(seed).permutation(train)
    if rehearse:
        held_out = np.concatenate([train[classes[train] == digit][:REHEARSED] for digit in np.unique(classes)])
        train = train[~np.isin(train, held_out)]

    if train_per_class:
        of_class = [train[classes[train] == digit][:train_per_class] for digit in np.unique(classes)]
        fewest = min(map(len, of_class))
        if fewest < train_per_class:
            raise ValueError(
                f"train_per_class must be at most {fewest} (the number of training images of the rarest digit), got "
                f"{train_per_class}"
            )
        train = np.concatenate(of_class)
    return train, held_out


def picture(pixels: np.ndarray) -> Image.Image:
    """Convert scikit-learn's digit (8, 8), with values from 0 to 16, to an 8-bit greyscale image."""
    return Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8))


def write_digits(
    root: Path,
    train_per_class: int | None = None,
    wanted: Container[int] = range(10),
    seed: int | None = None,
    rehearse: bool = False,
    copies: int = 1,
) -> None:
    """Write 8-bit greyscale images `root`/{train,validation}/{0..9}/*.png, split by `split_digits`.

    Args:
        root: Output folder.
        train_per_class: Number of training images of each class; all if None.
        wanted: Classes (digits from 0 to 9) to write.
        seed: Seed for sampling the training images.
        rehearse: Use training images as the validation split instead of the held-out images (see `split_digits`).
        copies: Number of files per training image, so that an epoch contains each image that many times.

    Raises:
        ValueError: A class has too few training images.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    train, validation = split_digits(digits.target, train_per_class, seed, rehearse)
    for split, indices, files_of_image in (("train", train, copies), ("validation", validation, 1)):
        chosen = [i for i in indices if digits.target[i] in wanted]
        for i in chosen:
            folder = root / split / str(digits.target[i])
            folder.mkdir(parents=True, exist_ok=True)
            image = picture(digits.images[i])
            for copy in range(files_of_image):
                name = f"{i:04d}-{copy}.png" if copy else f"{i:04d}.png"
                image.save(folder / name)
        print(f"{root / split}: {len(chosen)} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m vil.data.digits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, help="output folder")
    parser.add_argument("--train-per-class", type=int, help="number of training images per digit (default: all)")
    parser.add_argument("--digits", type=int, nargs="+", choices=range(10), default=range(10), metavar="DIGIT")
    parser.add_argument("--seed", type=int, help="seed for sampling the training images (default: a fixed order)")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="use other training images as the validation split instead of the held-out images",
    )
    parser.add_argument("--copies", type=int, default=1, help="number of files per training image (default: 1)")
    options = parser.parse_args()
    try:
        write_digits(
            options.root,
            train_per_class=options.train_per_class,
            wanted=options.digits,
            seed=options.seed,
            rehearse=options.rehearse,
            copies=options.copies,
        )
    except ImportError as error:
        parser.error(f"vil.data.digits needs scikit-learn: pip install scikit-learn ({error})")
    except ValueError as error:
        parser.error(str(error))
