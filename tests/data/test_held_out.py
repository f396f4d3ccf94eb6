"""Tests of the choice of images that are held out for validation."""

import random

import pytest

from vil.data.held_out import held_out

CLASSES = {"ant": 1, "bee": 2, "cat": 3, "dog": 50, "elk": 400}
IMAGES = [(f"{name}/{i}.jpg", name) for name, count in CLASSES.items() for i in range(count)]


def names_held_out(images, share=0.2):
    names, classes = zip(*images)
    return {name for name, is_held_out in zip(names, held_out(names, classes, share)) if is_held_out}


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.9])
def test_each_class_keeps_and_holds_out_images(share):
    chosen = names_held_out(IMAGES, share)
    counts = {name: sum(path.startswith(name) for path in chosen) for name in CLASSES}
    assert counts["ant"] == 0  # a class with a single image holds out no image
    assert counts["bee"] == 1
    for name in ("cat", "dog", "elk"):
        assert counts[name] == min(CLASSES[name] - 1, max(1, round(share * CLASSES[name])))


def test_the_choice_depends_on_neither_order_nor_other_classes():
    chosen = names_held_out(IMAGES)
    assert names_held_out(random.Random(0).sample(IMAGES, len(IMAGES))) == chosen
    assert names_held_out([image for image in IMAGES if image[1] == "elk"]) == {n for n in chosen if n[:3] == "elk"}
    numbers = sorted(int(name[4:-4]) for name in chosen if name.startswith("elk"))
    assert 150 < sum(numbers) / len(numbers) < 250  # spread over the 400 images of the class


def test_few_images_change_their_split_when_images_are_added():
    more = [*IMAGES, *((f"elk/new_{i}.jpg", "elk") for i in range(40))]
    before, after = names_held_out(IMAGES), {name for name in names_held_out(more) if "new" not in name}
    assert len(before ^ after) < 20
