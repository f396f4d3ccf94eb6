"""Other test sets with ImageNet's classes, and its reassessed labels: which folders and files they take."""

import pytest
from PIL import Image
from timm.data import ImageNetInfo

from vil.config import ConfigError
from vil.evaluation.imagenet import open_test_split, real_labels


def test_folders_named_by_class_numbers_keep_them_as_in_imagenet_v2(tmp_path):
    for number in range(12):  # in the order of their names 10 would come before 2
        (tmp_path / "v2" / str(number)).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "v2" / str(number) / "image.png")
    images, classes = open_test_split(str(tmp_path), "", "v2", 12)
    assert classes is None
    assert all(int(images.filename(i).split("/")[0]) == images.reader[i][1] for i in range(12))


IDS = ImageNetInfo().label_names()


def images_of(root, **names):
    """root/some/CLASS/*.JPEG under these names; the folder."""
    for folder, images in names.items():
        (root / "some" / folder).mkdir(parents=True)
        for name in images:
            Image.new("RGB", (16, 16), (200, 30, 90)).save(root / "some" / folder / f"{name}.JPEG")
    return str(root)


def test_other_folders_must_have_the_classes_of_the_model(image_folder, tmp_path):
    assert open_test_split(str(image_folder), "", "val", 4)[1] is None
    with pytest.raises(ConfigError, match="has 4 classes but the model 1000"):
        open_test_split(str(image_folder), "", "val", 1000)
    root = images_of(tmp_path, **{IDS[7]: "ab", IDS[301]: "c"})
    assert open_test_split(root, "", "some", 1000)[1] == [7, 301]
    with pytest.raises(ConfigError, match="has 2 classes but the model 21"):  # not ImageNet's, by any name
        open_test_split(root, "", "some", 21)
    images_of(tmp_path, ant="d")  # which ImageNet has not
    with pytest.raises(ConfigError, match="has 3 classes but the model 1000"):
        open_test_split(root, "", "some", 1000)


def test_real_labels_go_with_the_names_of_the_images(tmp_path):
    labels = tmp_path / "real.json"
    labels.write_text("[[7, 8], [], [9]]")
    names = [f"ILSVRC2012_val_0000000{number}" for number in (1, 3, 2)]
    images, _ = open_test_split(images_of(tmp_path, **{IDS[7]: names[:2], IDS[301]: names[2:]}), "", "some", 1000)
    right = real_labels(images, 1000, str(labels))
    by_name = {images.filename(i, basename=True)[-6]: row.nonzero()[0].tolist() for i, row in enumerate(right)}
    assert by_name == {"1": [7, 8], "2": [], "3": [9]}
    with pytest.raises(ConfigError, match="cannot read the ReaL labels"):
        real_labels(images, 1000, str(tmp_path / "none.json"))
