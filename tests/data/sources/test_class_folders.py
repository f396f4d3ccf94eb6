"""Tests of assigning images to classes by folder names, in image folders, tar files and `vil split`."""

import logging
import os
import shutil
import sys
import tarfile
import unicodedata

import pytest
from pictures import small_config
from PIL import Image
from processes import run

from vil.config import ConfigError
from vil.data import folders as split_command
from vil.data.sources.splits import class_names, describe_split, open_split, open_splits

NFC, NFD = (unicodedata.normalize(form, "Café") for form in ("NFC", "NFD"))


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name, format="PNG")


@pytest.fixture(params=["folder", "tar", "wrapped tar"])
def packed(request):
    """Return a function that keeps a data folder or packs each split into a tar file.

    In a wrapped tar file, the class folders lie inside a folder of the split's name.
    """

    def pack(root):
        for split in [path for path in root.iterdir() if path.is_dir()] if request.param != "folder" else ():
            with tarfile.open(root / f"{split.name}.tar", "w") as tar:
                tar.add(split, "." if request.param == "tar" else split.name)
            shutil.rmtree(split)
        return str(root)

    return pack


def by_file(images):
    """Return a dict from the last three parts of each image's path to the image's class name."""
    names = {index: name for name, index in class_names(images).items()}
    return {"/".join(images.filename(i).split("/")[-3:]): names[images.reader[i][1]] for i in range(len(images))}


def test_folders_with_equal_names_are_separate_classes(tmp_path, packed):
    leaves = ["abbey", "bazaar/indoor", "bazaar/outdoor", "church/indoor", "church/outdoor", "shop/toys"]
    write(tmp_path, *(f"{split}/{leaf}/{i}.png" for split in ("train", "val") for leaf in leaves for i in range(2)))
    train, val, num_classes = open_splits(small_config(packed(tmp_path)))
    # the folder name "toys" is unique, so the class name does not contain the parent folder
    names = [name.removeprefix("shop/") for name in leaves]
    assert num_classes == 6
    assert class_names(train) == class_names(val) == {name: index for index, name in enumerate(names)}
    assert "named by their paths, such as 'bazaar/indoor'" in describe_split("train", train)
    assert {file: name for file, name in by_file(train).items() if "church" in file or "toys" in file} == {
        "church/indoor/0.png": "church/indoor", "church/indoor/1.png": "church/indoor",
        "church/outdoor/0.png": "church/outdoor", "church/outdoor/1.png": "church/outdoor",
        "shop/toys/0.png": "toys", "shop/toys/1.png": "toys",
    }  # fmt: skip


def test_the_splitting_tool_keeps_the_classes_of_training(tmp_path, caplog):
    leaves = "church/indoor", "bazaar/indoor", "cat", "x/y"
    write(tmp_path, *(f"all/{leaf}/{i}.png" for leaf in leaves for i in (1, 2)))
    before = class_names(open_split(str(tmp_path), "", "all"))
    split_command.split_folder(tmp_path / "all", tmp_path / "split")
    for split in ("train", "validation"):
        assert class_names(open_split(str(tmp_path / "split"), "", split)) == before
    assert "named by their paths, such as 'bazaar/indoor', 'church/indoor'" in caplog.text


def test_a_class_folder_may_contain_another_class_folder(tmp_path, packed, caplog):
    write(tmp_path, *(f"train/{folder}/0.png" for folder in ("a", "a/b", "c")), "val/a/0.png", "val/a/b/1.png")
    _, val, num_classes = open_splits(small_config(packed(tmp_path)))
    assert num_classes == 3
    assert sorted(by_file(val).values()) == ["a", "b"]
    assert "left out" not in caplog.text


def test_the_splitting_tool_prints_names_that_are_not_utf_8(tmp_path):
    source, target = tmp_path / "all", tmp_path / os.fsdecode(b"caf\xe9")
    write(source, *(f"{name}/{i}.png" for name in ("ant", "bee") for i in (1, 2)))
    ended = run([sys.executable, "-m", "vil", "split", str(source), str(target)])
    assert ended.stdout.splitlines() == [f"{tmp_path}/caf?/{split}: 2 images" for split in ("train", "validation")]
    assert (target / "train").is_dir()


def test_a_split_with_one_of_two_equal_folder_names_matches_the_class_by_path(tmp_path, packed):
    write(tmp_path, *(f"train/{top}/indoor/0.png" for top in ("bazaar", "church")), "val/church/indoor/0.png")
    _, val, _ = open_splits(small_config(packed(tmp_path)))
    assert val.reader[0][1] == 1


@pytest.mark.parametrize("other", ["bazaar/indoor", "deep/bazaar/indoor"])
def test_an_equal_folder_name_under_another_parent_is_another_class(tmp_path, packed, other):
    write(tmp_path, "train/church/indoor/0.png", "train/cat/0.png", "val/church/indoor/0.png", f"val/{other}/0.png")
    with pytest.raises(ConfigError, match="Several folders are called 'indoor', but only one class has this name"):
        open_splits(small_config(packed(tmp_path), val_split="val"))
    write(tmp_path, "one/indoor/0.png", "one/church/indoor/0.png", f"two/{other}/0.png")
    with pytest.raises(ConfigError, match="'two' of .* has classes that training does not have: 'indoor'"):
        open_splits(small_config(tmp_path, train_split="one", val_split="two"))


def test_an_image_next_to_the_class_folders_is_skipped_and_logged(tmp_path, packed, caplog):
    write(tmp_path, *(f"{split}/{name}/0.png" for split in ("train", "val") for name in ("ant", "bee")))
    write(tmp_path, "train/sheet.png", "train/b.png", "val/sheet.png")
    train, val, num_classes = open_splits(small_config(packed(tmp_path)))
    assert num_classes == 2
    assert class_names(train) == class_names(val) == {"ant": 0, "bee": 1}
    assert sorted(by_file(train).values()) == sorted(by_file(val).values()) == ["ant", "bee"]
    lines = [message for message in caplog.messages if "beside the class folders" in message]
    assert [line[: line.index(" of ")] for line in lines] == ["left out 2 images", "left out 1 image"]
    assert "b.png" in lines[0]
    assert "sheet.png" in lines[1]


def test_images_outside_the_class_folders_change_no_class(tmp_path, packed):
    write(tmp_path, *(f"{split}/images/{name}/0.png" for split in ("train", "val") for name in ("ant", "bee")))
    write(tmp_path, "train/sheet.png", "train/images/sheet.png")
    train, val, num_classes = open_splits(small_config(packed(tmp_path)))
    assert num_classes == 2
    assert sorted(by_file(train).values()) == sorted(by_file(val).values()) == ["ant", "bee"]


@pytest.mark.parametrize("place", ["val/ILSVRC2012_val_0.png", "val/images/ILSVRC2012_val_0.png"])
def test_a_flat_split_is_rejected_with_the_remedy(tmp_path, packed, place):
    write(tmp_path, "train/ant/0.png", "train/bee/0.png", place)
    with pytest.raises(ConfigError, match="a folder (that is named like the image's class|of its images)"):
        open_splits(small_config(packed(tmp_path)))


def test_two_unicode_forms_of_a_name_are_one_class(tmp_path, packed, caplog):
    write(tmp_path, f"train/{NFC}/0.png", "train/tea/0.png", f"val/{NFD}/0.png", "val/tea/0.png")
    train, val, num_classes = open_splits(small_config(packed(tmp_path)))
    assert num_classes == 2
    assert [*by_file(val).values()] == [*by_file(train).values()] == [NFC, "tea"]
    assert "no images of" not in caplog.text
    write(tmp_path, f"both/{NFC}/0.png", f"both/{NFD}/0.png")  # NFC and NFD of a name look the same
    with pytest.raises(ConfigError, match="must differ after Unicode normalization"):
        open_split(str(tmp_path), "", "both")


@pytest.mark.parametrize("names", [(b"caf\xe8", b"caf\xe9"), (b"a\x07", b"a\x1b")])
def test_names_that_differ_only_in_unprintable_characters_are_rejected(tmp_path, names):
    write(tmp_path, *(f"train/{os.fsdecode(name)}/0.png" for name in names))
    with pytest.raises(ConfigError, match="must differ after Unicode normalization"):
        open_split(str(tmp_path), "", "train")


@pytest.mark.parametrize(
    ("there", "hint"),
    [
        ("Bee/0.png", "'Bee'.*differs from 'bee' only in case or spaces"),
        ("bee /0.png", "'bee '.*differs from 'bee' only in case or spaces"),
        ("bee/batch1/0.png", "move the images of 'bee/batch1' up into the folder 'bee'"),
        ("wasp/0.png", "'wasp'. Give these folders the names"),
    ],
)
def test_an_unknown_class_is_reported_with_the_likely_cause(tmp_path, packed, there, hint):
    write(tmp_path, "train/ant/0.png", "train/bee/0.png", "val/ant/0.png", f"val/{there}")
    with pytest.raises(ConfigError, match=hint):
        open_splits(small_config(packed(tmp_path)))


def test_classes_in_deeper_training_folders_are_reported(tmp_path, packed):
    write(tmp_path, *(f"train/{name}/batch1/0.png" for name in ("ant", "bee")), "val/ant/0.png", "val/bee/0.png")
    with pytest.raises(ConfigError, match="The class 'ant/batch1' is nested deeper"):
        open_splits(small_config(packed(tmp_path)))


def test_classes_that_differ_only_in_case_or_spaces_are_logged(tmp_path, packed):
    write(tmp_path, "train/Ant/0.png", "train/ant/0.png", "train/bee/0.png")
    images = open_split(packed(tmp_path), "", "train")
    assert class_names(images) == {"Ant": 0, "ant": 1, "bee": 2}
    assert "'Ant', 'ant' differ only in case or spaces" in describe_split("train", images)


def test_hidden_files_belong_to_no_class(tmp_path, packed):
    write(tmp_path, "train/ant/0.png", "train/ant/._0.png", "train/__MACOSX/ant/0.png", "train/bee/0.png")
    write(tmp_path, "train/.thumbnails/0.png", "train/bee/.cache/1.png")
    images = open_split(packed(tmp_path), "", "train")
    assert sorted(by_file(images).values()) == ["ant", "bee"]
    assert "'hidden'" in describe_split("train", images)


@pytest.mark.parametrize("empty", ["cat", "church/indoor"])
def test_an_empty_class_folder_is_rejected(tmp_path, packed, empty):
    write(tmp_path, *(f"{split}/{name}/0.png" for split in ("train", "val") for name in ("ant", "church/outdoor")))
    (tmp_path / "train" / empty).mkdir(parents=True)
    (tmp_path / "train" / "ant" / "notes").mkdir()  # an empty folder inside a class folder is accepted
    (tmp_path / "train" / ".cache").mkdir()
    with pytest.raises(ConfigError, match=f"have no images: '(train/)?{empty}'\\. Copy"):
        open_splits(small_config(packed(tmp_path)))


def test_a_tar_file_without_images_is_reported_by_name(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        tar.add(__file__, "ant/notes.txt")
    with pytest.raises(ConfigError, match="no images in .*train.tar"):
        open_split(str(tmp_path), "", "train")


def test_a_tar_of_tars_has_the_classes_of_the_folders(tmp_path):
    write(tmp_path, *(f"all/{leaf}/0.png" for leaf in ("church/indoor", "bazaar/indoor")))
    with tarfile.open(tmp_path / "train.tar", "w") as outer:
        for top in ("church", "bazaar"):
            with tarfile.open(tmp_path / f"{top}.tar", "w") as inner:
                inner.add(tmp_path / "all" / top / "indoor", ".")
            outer.add(tmp_path / f"{top}.tar", f"{top}/indoor.tar")
    assert [*class_names(open_split(str(tmp_path), "", "train"))] == ["bazaar/indoor", "church/indoor"]


@pytest.mark.parametrize("names", [("Train", "Val"), ("TRAIN", "VALIDATION"), ("Training", "Valid")])
def test_split_names_are_found_in_upper_case(tmp_path, packed, names):
    write(tmp_path, *(f"{split}/{name}/0.png" for split in names for name in ("ant", "bee")))
    assert open_splits(small_config(packed(tmp_path)))[2] == 2


def test_splits_that_differ_only_in_case_must_be_chosen_by_the_user(tmp_path):
    write(tmp_path, *(f"{split}/{name}/0.png" for split in ("Val", "VAL") for name in ("ant", "bee")))
    with pytest.raises(ConfigError, match="'VAL', 'Val', which differ only in case"):
        open_split(str(tmp_path), "", "val")
    assert len(open_split(str(tmp_path), "", "Val")) == 2


def test_a_missing_validation_split_is_reported_with_the_test_split_as_remedy(tmp_path, packed):
    write(tmp_path, *(f"{split}/{name}/0.png" for split in ("train", "Test") for name in ("ant", "bee")))
    with pytest.raises(ConfigError, match="--val-split Test in training"):
        open_splits(small_config(packed(tmp_path)))
    assert open_splits(small_config(str(tmp_path), val_split="Test"))[2] == 2


def test_a_linked_class_folder_is_named_after_the_link(tmp_path, caplog):
    write(tmp_path, "train/ant/0.png", "store/x/0.png", "store/x/1.png")
    (tmp_path / "train" / "bee").symlink_to(tmp_path / "store" / "x")
    (tmp_path / "train" / "wasp").symlink_to(tmp_path / "train" / "ant")  # the class has the images of another class
    with caplog.at_level(logging.WARNING):
        images = open_split(str(tmp_path), "", "train")
    assert class_names(images) == {"ant": 0, "bee": 1}
    assert "left out 1 link in" in caplog.text


def test_splits_one_folder_deeper_are_reported(tmp_path):
    write(tmp_path, *(f"unpacked/{split}/{name}/0.png" for split in ("Train", "val") for name in ("ant", "bee")))
    for split in ("train", "validation"):
        with pytest.raises(ConfigError, match=f"set --data-dir {tmp_path}/unpacked$"):
            open_split(str(tmp_path), "", split)
