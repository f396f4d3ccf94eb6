"""Tests of detecting how a folder of images is arranged, and of holding out images for validation."""

import tarfile
from types import SimpleNamespace

import pytest
from pictures import small_config
from PIL import Image

from vil.config import ConfigError
from vil.data import folders as split_command
from vil.data.sources.layout import Layout, find_layout
from vil.data.sources.splits import class_names, hold_out, open_split, open_splits


def write(root, *folders, count=5):
    """Write `count` images of different sizes into each folder."""
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.new("RGB", (8, 8 + i)).save(root / folder / f"{i}.png")
    return str(root)


@pytest.mark.parametrize(
    ("folders", "inside", "train", "validation", "images"),
    [
        ("cat dog", "", ".", None, 10),
        ("animals/cat animals/dog/big animals/dog/small", "", ".", None, 15),
        ("photos/cat photos/dog", "", ".", None, 10),
        ("train plane car", "", ".", None, 15),  # `train` is a class of vehicles
        ("train/cat train/dog", "", "train", None, 10),
        ("train/cat train/dog test/cat test/dog", "", "train", None, 10),
        ("train/cat train/dog test", "", "train", None, 10),  # test images often have no classes
        ("Training/cat Training/dog Valid/cat Valid/dog", "", "train", "validation", 10),
        ("train/cat train/dog val/cat val/dog test/cat", "", "train", "validation", 10),
        ("data/train/cat data/train/dog data/validation/cat", "data", "train", "validation", 10),
        ("a/b/train/cat a/b/train/dog a/b/eval/cat", "a/b", "train", "validation", 10),
    ],
)
def test_layouts_are_detected(tmp_path, folders, inside, train, validation, images):
    folder = write(tmp_path, *folders.split())
    (tmp_path / "README.txt").touch()
    (tmp_path / "__MACOSX").mkdir()
    layout = find_layout(folder)
    assert layout[:3] == (str(tmp_path / inside), train, validation)
    assert layout.num_images == images
    assert {*layout.class_sizes} == {5}


def test_tar_files_are_splits(tmp_path):
    write(tmp_path / "photos", "cat", "dog")
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        tar.add(tmp_path / "photos", ".")
    assert find_layout(str(tmp_path)) == Layout(str(tmp_path), "train", None, (5, 5))
    train, validation, num_classes = open_splits(small_config(tmp_path, val_fraction=0.4))
    assert (len(train), len(validation), num_classes) == (6, 4, 2)
    assert {*train.filenames()}.isdisjoint(validation.filenames())
    assert sorted(train.reader.targets) == [0, 0, 0, 1, 1, 1]
    assert sorted(validation.reader.targets) == [0, 0, 1, 1]
    sizes = {image.size for part in (train, validation) for image, target in map(part.__getitem__, range(len(part)))}
    assert sizes == {(8, 8 + i) for i in range(5)}


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (
            [""],
            "has 5 images such as '0.png', '1.png', but no class folders, .* a folder named like the class, such as",
        ),
        (["train", "val"], "train has 5 images such as '0.png', '1.png', but no class folders"),
        (["train", "test"], "lie directly in 'test', 'train', which are names of splits"),
        (["train", "test/cat", "test/dog"], "train has 5 images such as '0.png', '1.png', but no class folders"),
        (["cat/train", "cat/val", "dog/train", "dog/val"], "lie directly in 'cat/train', 'cat/val'"),
        (["val/cat", "val/dog", "test/cat"], "has 'test', 'val', but no folder 'train' for the training images"),
        (["a/train/cat", "b/train/cat"], "has 2 data sets, in 'a', 'b': pass a folder with only one of them"),
        (["train/cat", "b/train/cat"], "has 2 data sets, in '.', 'b': "),
        ([], "has no images; not read as images: 1 '.txt': put the images of each class into a folder"),
    ],
)
def test_folders_without_known_classes_are_rejected(tmp_path, folders, message):
    write(tmp_path, *folders)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=message):
        find_layout(str(tmp_path))
    with pytest.raises(ConfigError, match="nothing' does not exist"):
        find_layout("nothing")
    (tmp_path / "photos").mkdir()
    with pytest.raises(ConfigError, match="Photos' does not exist: did you mean 'photos'"):
        find_layout(str(tmp_path / "Photos"))
    with pytest.raises(ConfigError, match="notes.txt' is not a folder: pass a folder"):
        find_layout(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (
            "choose/cat choose/dog test/cat test/dog",
            "the splits 'choose', 'test': set --train-split choose --val-split test. .* --train-split . --val-fraction",
        ),
        ("choose/cat choose/dog test/cat", "set --train-split choose --val-split test"),
        ("photos/cat photos/dog test/cat test/dog Valid/cat", "set --train-split photos --val-split Valid"),
        ("a/cat a/dog b/cat b/dog test/cat", "the splits 'a', 'b', 'test': set --train-split [ab] --val-split test"),
        ("holdout/cat holdout/dog photos/cat photos/dog photos", "--train-split photos --val-split holdout"),
        ("a/b/my/x/cat a/b/my/x/dog a/b/test/x/cat a/b/test/x/dog", "pass the folder .*/a/b and set --train-split my"),
        ("cat dog test/cat test/dog", "the split 'test': move the training images into .*/train"),
        ("data/val/cat data/val/dog data/test/cat", "the splits 'test', 'val': move the training images into .*/train"),
    ],
)
def test_splits_that_would_be_read_as_classes_are_rejected(tmp_path, folders, message):
    folder = write(tmp_path, *folders.split(), count=1)
    if folders.endswith(" photos"):
        write(tmp_path, "photos", count=9)
    with pytest.raises(ConfigError, match=message):
        find_layout(folder, reject_splits=True)
    assert find_layout(folder).train_split == "."


@pytest.mark.parametrize(
    "folders",
    [
        "cat", "animals/cat animals/dog", "test plane car", "data/test/cat data/test/dog",
        "abbey bazaar/indoor bazaar/outdoor church/indoor church/outdoor", "cat/photos dog/photos",
        "cats/old cats/young dogs/old dogs/young dogs/puppy", "photos photos/cat photos/dog",
    ],
)  # fmt: skip
def test_nested_class_folders_are_not_mistaken_for_splits(tmp_path, folders):
    folder = write(tmp_path, *folders.split(), count=1)
    assert find_layout(folder, reject_splits=True) == find_layout(folder)


def test_tar_files_that_are_no_splits_are_suggested_as_shards(tmp_path):
    hint = "if the .tar files are WebDataset shards, set --dataset wds/NAME and --num-classes"
    (tmp_path / "train").mkdir()
    for i in range(2):
        (tmp_path / "train" / f"train-000{i}.tar").touch()
    with pytest.raises(ConfigError, match=f"train has no images; not read as images: 2 '.tar': put .*; {hint}"):
        find_layout(str(tmp_path / "train"))
    with pytest.raises(ConfigError, match=f"no images in subfolders of .*train; not read as images: 2 '.tar'; {hint}"):
        open_split(str(tmp_path), "", "train")


def test_class_folders_are_divided_like_the_split_command_divides_them(tmp_path, caplog):
    folder = write(tmp_path / "pets", "cat", "dog", "animals/elk", count=11)
    write(tmp_path / "pets", "yak", count=1)
    with pytest.raises(ValueError, match="class folder 'yak' must have at least two images"):
        split_command.split_folder(tmp_path / "pets", tmp_path / "copy")
    config = small_config(folder, train_split=".", val_fraction=0.2)
    train, validation, num_classes = open_splits(config)
    line = "warning: the split 'validation' has no images of 1 of the 4 classes, so accuracies say nothing about 'yak'"
    assert line in caplog.text
    assert num_classes == 4
    assert class_names(train) == class_names(validation) == {"cat": 0, "dog": 1, "elk": 2, "yak": 3}
    (tmp_path / "pets/yak/0.png").unlink()
    (tmp_path / "pets/yak").rmdir()
    train, validation, _ = open_splits(config)
    split_command.split_folder(tmp_path / "pets", tmp_path / "copy")
    for part, name in ((train, "train"), (validation, "validation")):
        copies = (tmp_path / "copy" / name).rglob("*.png")
        assert sorted(part.filenames()) == sorted(str(path.relative_to(tmp_path / "copy" / name)) for path in copies)


def test_one_image_of_each_class_cannot_be_held_out(tmp_path):
    folder = write(tmp_path, "cat", "dog", count=1)
    with pytest.raises(ConfigError, match="has one image of each class, so none can be held out for validation: add"):
        open_splits(small_config(folder, train_split=".", val_fraction=0.2))
    with pytest.raises(ConfigError, match="val_fraction needs class folders or a tar file of them: remove --val-frac"):
        hold_out(SimpleNamespace(reader="shards, which store no class folders"), 0.2)
