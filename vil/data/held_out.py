"""Choice of the images that are held out for validation."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Sequence

SHARE = 0.2  # share of each class that is held out for validation by default


def held_out(names: Sequence[str], classes: Sequence[Hashable], share: float = SHARE) -> list[bool]:
    """Return for each image whether the image is held out for validation.

    In each class, the images with the smallest hashes of their names are held out. The choice therefore depends only on
    the names, the classes and `share`. If images are added, most of the other images stay in their split. If a class
    has two or more images, at least one image is held out and at least one is kept. The only image of a class is kept.

    Args:
        names: Path of each image inside the data set, with "/" as the separator.
        classes: Class of each image.
        share: Share of each class to hold out, between 0 and 1.
    """
    images_of_class: dict[Hashable, list[int]] = defaultdict(list)
    for image, image_class in enumerate(classes):
        images_of_class[image_class].append(image)

    is_held_out = [False] * len(names)
    for images in images_of_class.values():
        images.sort(key=lambda image: hashlib.sha256(names[image].encode(errors="surrogateescape")).digest())
        for image in images[: count_held_out(len(images), share)]:
            is_held_out[image] = True
    return is_held_out


def count_held_out(num_images: int, share: float = SHARE) -> int:
    """Return how many images of a class are held out."""
    return min(num_images - 1, max(1, round(share * num_images)))
