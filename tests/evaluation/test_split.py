"""Tests of class indices in test sets: subsets of ImageNet's classes, ImageNet-V2's numbered folders, ReaL labels."""

import shutil
from types import SimpleNamespace

import pytest
from PIL import Image
from timm.data import ImageNetInfo

from vil.classes import order_of
from vil.config import ConfigError
from vil.data.sources.splits import describe_split
from vil.evaluation.real_labels import real_labels
from vil.evaluation.split import open_evaluation_split


@pytest.mark.parametrize("names", [[*map(str, range(12))], ImageNetInfo().label_names()], ids=["numbers", "ImageNet"])
def test_folders_may_be_named_by_wordnet_id_or_class_index(names, tmp_path):
    """Class folders may be named by WordNet id, or by class index (in numerical order) as in ImageNet-V2."""
    for name in names:
        (tmp_path / "all" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "all" / name / "image.png")
    images, classes = open_evaluation_split(str(tmp_path), "", "all", len(names))
    assert classes is None
    assert [images.filename(i).split("/")[0] for i in range(len(names))] == names
    assert [images.reader[i][1] for i in range(len(names))] == [*range(len(names))]


def test_a_split_without_some_classes_keeps_the_trained_class_indices(image_folder, tmp_path):
    """If a split lacks some of the model's classes, images of the other classes keep the class indices of training."""
    for name in ("ant", "cat", "dog"):
        shutil.copytree(image_folder / "val" / name, tmp_path / "val" / name)
    shutil.make_archive(str(tmp_path / "packed"), "tar", tmp_path / "val")
    for split in ("val", "packed"):
        images, classes = open_evaluation_split(str(tmp_path), "", split, 4, ["ant", "bee", "cat", "dog"])
        assert (classes, {images.reader[i][1] for i in range(len(images))}) == (None, {0, 2, 3})
        if split == "val":
            assert describe_split(split, images) == "val: 21 images of 3 classes, 7 images per class"
    with pytest.raises(ConfigError, match="has classes that best.pt does not have: 'cat'"):
        open_evaluation_split(str(tmp_path), "", "val", 4, ["ant", "bee", "crow", "dog"], "best.pt")
    # Without the model's class names, only the numbers of classes are compared.
    with pytest.raises(ConfigError, match="has 3 classes, but the model has 4"):
        open_evaluation_split(str(tmp_path), "", "val", 4)


@pytest.mark.parametrize(
    ("names", "difference"),
    [
        (["1", "2", "10"], "class 1 is '2' in this order, but '10' in torchvision's ImageFolder"),
        (["apple", "Zebra"], "class 0 is 'apple' in this order, but 'Zebra' in torchvision's ImageFolder"),
        (["ant", "bee"], None),
    ],
)  # fmt: skip
def test_a_warning_names_the_assumed_order_of_classes(names, difference, tmp_path, caplog):
    """torchvision sorts folders alphabetically, so weights without class names may have another order of classes."""
    for name in names:
        (tmp_path / "all" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "all" / name / "image.png")
    open_evaluation_split(str(tmp_path), "", "all", len(names), names, "best.pt")
    assert not caplog.messages
    open_evaluation_split(str(tmp_path), "", "all", len(names), owner="weights.pth")
    assert ["weights.pth stores no class names" in said for said in caplog.messages] == [True] * bool(difference)
    assert all(f"in the natural order of the class names ({difference}). If" in said for said in caplog.messages)


def test_folders_with_unknown_names_must_match_the_models_number_of_classes(image_folder, tmp_path):
    assert open_evaluation_split(str(image_folder), "", "val", 4)[1] is None
    with pytest.raises(ConfigError, match="has 4 classes, but the model has 1000"):
        open_evaluation_split(str(image_folder), "", "val", 1000)
    root, ids = str(tmp_path), ImageNetInfo().label_names()
    for name in (ids[7], ids[301]):
        shutil.copytree(image_folder / "val" / "ant", tmp_path / "some" / name)
    assert open_evaluation_split(root, "", "some", 1000)[1] == [7, 301]
    # Only a model with 1000 classes is assumed to have ImageNet's class names.
    with pytest.raises(ConfigError, match="has 2 classes, but the model has 21"):
        open_evaluation_split(root, "", "some", 21)
    shutil.copytree(image_folder / "val" / "ant", tmp_path / "some" / "ant")  # "ant" is not a WordNet id of ImageNet
    with pytest.raises(ConfigError, match="has 3 classes, but the model has 1000"):
        open_evaluation_split(root, "", "some", 1000)


@pytest.mark.parametrize(("number", "text"), [(2, "[[0]]"), (1, "[[4]]"), (1, "5"), (1, "[[0]")])
def test_real_labels_that_do_not_fit_the_split_raise_a_one_line_error(tmp_path, number, text):
    (tmp_path / "real.json").write_text(text)
    images = SimpleNamespace(filenames=lambda basename: [f"ILSVRC2012_val_{number:08}.JPEG"])
    with pytest.raises(ConfigError, match="ReaL labels"):
        real_labels(images, 4, str(tmp_path / "real.json"))


def test_class_indices_as_names_match_only_imagenets_classes():
    ids, numbers = ImageNetInfo().label_names(), [str(number) for number in range(1000)]
    assert order_of(numbers, ids) == order_of(ids, numbers) == [*range(1000)]
    assert order_of(numbers, ids[::-1]) == order_of(ids[::-1], numbers) == [*range(999, -1, -1)]
    assert order_of(numbers, [f"{number:04}" for number in range(1000)]) == [*range(1000)]
    others = [f"class{number}" for number in range(1000)]
    assert order_of(numbers, others) is order_of(others, numbers) is None
