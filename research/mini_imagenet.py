"""Split mini-ImageNet for the study in research/longer.md, and pack it for a machine without network access.

    python -m research.mini_imagenet SOURCE data/mini_parts    # e.g. a clone of github.com/Deo0330/split_minidataset
    mkdir -p data/mini_imagenet && for part in data/mini_parts/*.tar.gz; do tar xzf $part -C data/mini_imagenet; done

SOURCE is a git repository, bare or not, whose HEAD contains train/CLASS/NAME.jpg and val/CLASS/NAME.jpg. Files are
copied unchanged to train/, choose/ and test/, with a folder for each class. choose/ has 50 training images per class
for selecting hyperparameters, sampled as for Tiny ImageNet, and train/ has the other training images. test/ has the
images of val/. Training images that show the same photograph as a test image are left out.
"""

from __future__ import annotations

import sys

from research.tiny_imagenet import blobs, parse_arguments, training_splits, write_parts

# The first of these training images has the same bytes as a test image. The second image is a test image in another
# compression, and was found by comparing the correlation of images of 16 x 16 pixels, mirrored images included.
SEEN_IN_TEST = ("n02091831/n0209183100000748.jpg", "n02606052/n0260605200000096.jpg")


def splits(files: dict[str, str]) -> dict[str, str]:
    """Return a dict from each image's output path SPLIT/CLASS/NAME to its git blob, sorted by path."""
    training = {path: blob for path, blob in files.items() if path.removeprefix("train/") not in SEEN_IN_TEST}
    places = training_splits(training, ".jpg")
    places |= {f"test/{path.removeprefix('val/')}": blob for path, blob in files.items() if path.startswith("val/")}
    return dict(sorted(places.items()))


def main() -> None:
    options = parse_arguments(__doc__)
    places = splits(blobs(options.source))
    if {place.split("/")[0] for place in places} != {"train", "choose", "test"}:
        sys.exit(f"{options.source} must contain train/ and val/: pass a git repository of mini-ImageNet")
    write_parts(options.source, places, options.folder)


if __name__ == "__main__":
    main()
