"""Other test sets with ImageNet's classes, and its reassessed labels: which folders and files they take."""

import shutil

import pytest
from PIL import Image
from timm.data import ImageNetInfo

from vil.config import ConfigError
from vil.evaluation.imagenet import open_test_split, real_labels


@pytest.fixture(scope="module")
def imagenet_like(tmp_path_factory):
    """{some,real}/...: two of ImageNet's classes by WordNet id, and images under the names of its validation images."""
    root, ids = tmp_path_factory.mktemp("imagenet"), ImageNetInfo().label_names()
    for split, folder, names in (
        ("some", ids[7], ["a", "b"]),
        ("some", ids[301], ["c"]),
        ("real", ids[7], ["ILSVRC2012_val_00000001", "ILSVRC2012_val_00000003"]),
        ("real", ids[301], ["ILSVRC2012_val_00000002"]),
    ):
        (root / split / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            Image.new("RGB", (16, 16), (200, 30, 90)).save(root / split / folder / f"{name}.JPEG")
    return root


def test_folders_named_by_class_numbers_keep_them_as_in_imagenet_v2(tmp_path):
    for number in range(12):  # in the order of their names 10 would come before 2
        (tmp_path / "v2" / str(number)).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "v2" / str(number) / "image.png")
    images, classes = open_test_split(str(tmp_path), "", "v2", 12)
    assert classes is None
    assert all(int(images.filename(i).split("/")[0]) == images.reader[i][1] for i in range(12))


def test_other_folders_must_have_the_classes_of_the_model(image_folder, imagenet_like, tmp_path):
    assert open_test_split(str(image_folder), "", "val", 4)[1] is None
    with pytest.raises(ConfigError, match="has 4 classes but the model 1000"):
        open_test_split(str(image_folder), "", "val", 1000)
    with pytest.raises(ConfigError, match="has 2 classes but the model 21"):  # not ImageNet's, by any name
        open_test_split(str(imagenet_like), "", "some", 21)
    shutil.copytree(imagenet_like / "some", tmp_path / "some")
    shutil.copytree(image_folder / "val" / "ant", tmp_path / "some" / "ant")  # which ImageNet has not
    with pytest.raises(ConfigError, match="has 3 classes but the model 1000"):
        open_test_split(str(tmp_path), "", "some", 1000)


def test_real_labels_go_with_the_names_of_the_images(imagenet_like, tmp_path):
    labels = tmp_path / "real.json"
    labels.write_text("[[7, 8], [], [9]]")
    images, classes = open_test_split(str(imagenet_like), "", "real", 1000)
    assert classes == [7, 301]
    right = real_labels(images, 1000, str(labels))
    by_name = {images.filename(i, basename=True)[-6]: row.nonzero()[0].tolist() for i, row in enumerate(right)}
    assert by_name == {"1": [7, 8], "2": [], "3": [9]}
    with pytest.raises(ConfigError, match="ReaL labels are for ImageNet's validation images"):
        real_labels(open_test_split(str(imagenet_like), "", "some", 1000)[0], 1000, str(labels))
    with pytest.raises(ConfigError, match="cannot read the ReaL labels"):
        real_labels(images, 1000, str(tmp_path / "none.json"))
