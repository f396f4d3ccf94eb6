"""Tests of finding a dataset's splits and classes, and of messages about missing or mismatched splits and classes."""

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures import CLASSES, TRAIN_IMAGES, VAL_IMAGES
from pictures import CPU, DATA_CONFIG, joined, small_config
from PIL import Image
from processes import call
from timm.data import create_transform
from timm.data.readers.reader_image_folder import ReaderImageFolder

from vil.cli.split import main
from vil.config import ConfigError
from vil.data import folders
from vil.data.host.workers import BATCHES_AHEAD
from vil.data.loaders import evaluation_loader, training_loader
from vil.data.samplers import TrainingBatches
from vil.data.sources.class_folders import endings
from vil.data.sources.folders import FolderReader
from vil.data.sources.shards import LabelError, Shards
from vil.data.sources.splits import (
    class_names,
    count_images,
    describe_split,
    follow_classes,
    open_split,
    open_splits,
)
from vil.evaluation.split import open_evaluation_split
from vil.training.trainer import Trainer


@pytest.mark.parametrize(
    ("wanted", "there", "found"),
    [
        ("train", "training train", "train"), ("train", "training val", "training"), ("training", "train", "train"),
        ("validation", "test val train", "val"), ("validation", "eval test", "eval"), ("test", "val test", "test"),
        ("validation", "test valid", "valid"), ("val", "validation", "validation"), ("val", "validation val", "val"),
        ("holdout", "holdout", "holdout"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tar", [False, True])
def test_splits_are_found_by_common_names(tmp_path, wanted, there, found, tar, caplog):
    for name in there.split():
        (tmp_path / name / "a").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name / "a" / f"{name}.png")
        if tar:
            with tarfile.open(tmp_path / f"{name}.tar", "w") as file:
                file.add(tmp_path / name, ".")
            shutil.rmtree(tmp_path / name)
        else:
            (tmp_path / f"{name}.tar").touch()  # a folder takes precedence over the .tar file
    images = open_split(str(tmp_path), "", wanted)
    assert [os.path.basename(name) for name in images.filenames()] == [f"{found}.png"]
    assert describe_split(wanted, images) == f"{wanted}: 1 image of 1 class, 'a'"
    lines = [record.getMessage() for record in caplog.records]
    if wanted in (found, "train", "validation"):
        assert lines == []
    else:  # using another folder than the requested one is logged, unless a default name is requested
        assert lines == [f"{tmp_path} has no split {wanted!r}: {found}{'.tar' * tar} is used instead"]


def test_a_folder_is_split_by_the_command_that_the_error_names(tmp_path, monkeypatch, capsys):
    files = {"cat": "png jpg webp bmp gif tif ppm WEBP jpeg", "dog": "PNG png PSD txt txt txt"}
    for name, suffixes in files.items():
        for i, suffix in enumerate(suffixes.split()):
            path = tmp_path / "a pet" / name / f"{i}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if suffix in ("PSD", "txt"):
                path.write_text("none")
            else:
                Image.new("RGB", (4, 4)).save(path)
            (hidden := path.parent / ".ipynb_checkpoints").mkdir(exist_ok=True)
            for litter in (hidden / "0.png", path.parent / "._0.PNG", tmp_path / "a pet" / "__MACOSX" / name / "0.png"):
                litter.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (4, 4)).save(litter)
    monkeypatch.chdir(tmp_path / "a pet")
    with pytest.raises(ConfigError, match="If these folders are classes, this command splits them: ") as refused:
        open_split(".", "", "train")
    words = shlex.split(str(refused.value).rpartition(": ")[2])
    assert words[:2] == ["vil", "split"]
    call(main, *words[2:])
    assert capsys.readouterr().out == "".join(
        f"{tmp_path}/a pet_split/{split}: {count} images\n" for split, count in (("train", 8), ("validation", 3))
    )
    names = sorted(path.name for path in (tmp_path / "a pet_split").glob("*/cat/*"))
    assert names == sorted(f"{i}.{suffix}" for i, suffix in enumerate(files["cat"].split()))
    found = [describe_split(split, open_split("../a pet_split", "", split)) for split in ("train", "validation")]
    assert found[0] == "train: 8 images of 2 classes, 1 ('dog') to 7 ('cat') images per class"
    assert found[1] == "validation: 3 images of 2 classes, 1 ('dog') to 2 ('cat') images per class"
    (tmp_path / "a pet/train").mkdir()
    for name in files:
        (tmp_path / "a pet" / name).rename(tmp_path / "a pet/train" / name)
        (tmp_path / "a pet/train" / name / "README").touch()
    assert describe_split("train", open_split(".", "", "train")).endswith(
        "; not read as images: 4 'hidden', 3 '.txt', 2 'README', 1 '.psd'"
    )
    kinds = Counter({f".{i}": 9 - i for i in range(6)})
    five = "; not read as images: 9 '.0', 8 '.1', 7 '.2', 6 '.3', 5 '.4'"
    assert endings(kinds) == f"{five}, ..."
    assert endings(kinds - Counter({".5": 4})) == five
    with pytest.raises(SystemExit, match="is already split into train: train on this folder directly, or split one of"):
        call(main, *words[2:])
    monkeypatch.chdir("train/cat")
    with pytest.raises(SystemExit, match="has no class folders, only images"):
        call(main, *words[2:])
    monkeypatch.chdir("..")
    shutil.rmtree("dog")
    with pytest.raises(SystemExit, match="^error: . must have at least two class folders .*, got 1: add folders$"):
        call(main, *words[2:])


def pets(folder, count):
    """Write two class folders of `count` images each. The images of a class have different sizes."""
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (4, 4 + i)).save(folder / name / f"{i}.png")
    return folder


def test_splitting_holds_out_images_of_every_class_and_leaves_the_source_unchanged(tmp_path, monkeypatch):
    source = pets(tmp_path / "pets", 30)
    Image.new("RGB", (3, 3)).save(source / "cover.jpg")  # the image belongs to no class
    before = {path: path.read_bytes() for path in source.rglob("*.png")}
    monkeypatch.setattr("tempfile.tempdir", "/on/another/disk")
    (gone := source / "dog" / "gone.png").symlink_to("../0.png")
    with pytest.raises(FileNotFoundError, match="pets/dog/gone.png"):
        folders.split_folder(source, tmp_path / "one", 0.5)
    gone.unlink()
    counts = folders.split_folder(source, tmp_path / "one", 0.5)
    assert folders.split_folder(source, tmp_path / "two", 0.5) == counts == dict(train=30, validation=30)
    assert {path: path.read_bytes() for path in source.rglob("*.png")} == before
    assert (tmp_path / "one").stat().st_mode == source.stat().st_mode  # a temporary folder would have a different mode
    one, two = ({p.relative_to(tmp_path / n): p for p in (tmp_path / n).rglob("*.png")} for n in ("one", "two"))
    assert one.keys() == two.keys()
    assert sorted(path.read_bytes() for path in one.values()) == sorted(before.values())
    numbers = sorted(int(path.stem) for path in (tmp_path / "one" / "validation" / "dog").iterdir())
    assert len(numbers) == 15
    assert numbers[0] < 10 < 20 < numbers[-1]  # held-out images are spread over the class
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "pets", "two"]
    (tmp_path / "here" / "new").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "link", lambda *_: os.stat("nothing"))  # hard links between two disks fail
    for target in ("here/new", "there/is/new"):
        assert folders.split_folder(Path("pets"), Path(target), 0.5) == counts
        assert sorted(p.read_bytes() for p in Path(target).rglob("*.png")) == sorted(before.values())
    for share, counts in ((0.999, dict(train=2, validation=58)), (0.001, dict(train=58, validation=2))):
        assert folders.split_folder(source, tmp_path / f"{share}", share) == counts
    (source / "fox").mkdir()
    Image.new("RGB", (1, 1)).save(source / "fox" / "0.png")
    with pytest.raises(ValueError, match="class folder 'fox' must have at least two images, .* but has one"):
        folders.split_folder(source, tmp_path / "three")
    with pytest.raises(ValueError, match="folder .*none does not exist"):
        folders.split_folder(tmp_path / "none", tmp_path / "four")
    (tmp_path / "one" / "validation").rename(tmp_path / "one" / "Test")
    with pytest.raises(ValueError, match="one is already split into Test, train: train on this folder"):
        folders.split_folder(tmp_path / "one", tmp_path / "five")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_splitting_leaves_no_files(tmp_path, monkeypatch, error):
    source, linked = pets(tmp_path / "pets", 3), []

    def fail(*_):
        linked.append(None)
        if len(linked) > 3:
            raise error

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        folders.split_folder(source, tmp_path / "split")
    assert [path.name for path in tmp_path.iterdir()] == ["pets"]


@pytest.mark.parametrize(
    ("target", "share", "error"),
    [
        *(("split", share, "greater than 0 and less than 1, got ") for share in ("nan", "inf", "0", "1", "-1")),
        ("pets", "0.2", "must not be inside .* pets, got .*cats"),
        ("pets/split", "0.2", "must not be inside .* pets, got .*split"),
        ("cats/split", "0.2", "must not be inside .* pets, got .*split"),
        ("full", "0.2", "folder .*full must be empty or new"), ("file", "0.2", "folder .*file must be empty or new"),
        ("file/new", "0.2", r"\[Errno"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_split_is_reported_in_one_line(tmp_path, monkeypatch, target, share, error):
    pets(tmp_path / "cats", 2)
    (tmp_path / "pets").symlink_to("cats")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full" / "old").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"^error: .*{error}[^\n]*$"):
        call(main, "pets", target, f"--validation={share}")


def test_class_indices_equal_timms(tmp_path):
    for name in ("10", "9", "a2", "a10", "B"):
        (tmp_path / name).mkdir(exist_ok=True)
        for i in (1, 2, 10):
            Image.new("RGB", (4, 4)).save(tmp_path / name / f"{i}.png")
    timms, ours = ReaderImageFolder(str(tmp_path)), FolderReader(str(tmp_path), str(tmp_path))
    assert (ours.class_to_idx, ours.samples) == (timms.class_to_idx, timms.samples)
    # names that differ only in case, which timm orders arbitrarily
    alike = [a + b + c for a in "aA" for b in "bB" for c in "cC"]
    (tmp_path / "more" / "a").mkdir(parents=True)
    for name, suffix in zip(alike, ["bmp", "gif", "tif", "tiff", "ppm", "pgm", "avif", "webp"]):
        (tmp_path / "more" / name).mkdir()
        (tmp_path / "more" / name / f"1.{suffix}").touch()
        (tmp_path / "more" / "a" / f"{name}.png").touch()
    ours = FolderReader(str(tmp_path / "more"), str(tmp_path))
    assert [*ours.class_to_idx] == ["a", *sorted(alike)]
    assert [Path(file).stem for file, number in ours.samples if number == 0] == sorted(alike)
    assert "inside of another" not in str(ours)
    (tmp_path / "more" / "abc" / "all" / "batch2").mkdir(parents=True)
    (tmp_path / "more" / "abc" / "all" / "batch2" / "1.png").touch()
    nested = FolderReader(str(tmp_path / "more"), str(tmp_path))
    assert [*nested.class_to_idx] == ["a", *sorted(alike), "batch2"]
    assert "; a class is the folder that contains an image, even 'abc/all/batch2' inside another class" in str(nested)


def test_a_class_folder_without_read_permission_is_an_error(image_folder, monkeypatch):
    scandir = os.scandir

    def refuse(folder):
        if os.path.basename(folder) == "bee":
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match="cannot open the split 'val' .*Permission denied.*bee"):
        open_split(str(image_folder), "", "val")


def test_a_class_may_have_the_name_of_a_split(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "val" / name / "image.png")
    assert class_names(open_split(str(tmp_path), "", "validation")) == {"train": 0, "validation": 1}


def test_a_missing_split_is_reported_with_the_existing_splits(image_folder, tmp_path):
    # a missing data_dir must not stand for the current folder
    for dataset, data_dir in (("", None), ("", ""), ("wds/x", None), ("wds/x", "")):
        with pytest.raises(ConfigError, match="^data_dir is required"):
            open_splits(small_config(image_folder, data_dir=data_dir, dataset=dataset))
    with pytest.raises(ConfigError, match="the data folder .*nowhere' does not exist"):
        open_splits(small_config(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="has no split 'holdout' .*called holdout.; it has nothing"):
        open_split(str(tmp_path), "", "holdout")
    for name in ("more", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("none")
    (tmp_path / "more" / "a.png").touch()
    with pytest.raises(ConfigError, match="it has 'more', 'notes'$"):  # neither folder contains class folders
        open_split(str(tmp_path), "", "holdout")
    with pytest.raises(ConfigError, match="no images in subfolders of .*notes; not read as images: 1 '.txt'$"):
        open_split(str(tmp_path), "", "notes")
    shutil.copytree(image_folder / "train", tmp_path / "train")
    with pytest.raises(ConfigError, match=r"'validation' \(.*val or .*eval\); it has 'more', 'notes', 'train'"):
        open_splits(small_config(tmp_path))
    shutil.copytree(image_folder / "val", tmp_path / "val")
    with pytest.raises(ConfigError, match="no split 'test' .*called test.; it has 'more', 'notes', 'train', 'val'$"):
        open_split(str(tmp_path), "", "test")  # the validation split does not replace a missing test split
    (tmp_path / "val").rename(tmp_path / "test")  # the test split must not be used for model selection
    with pytest.raises(ConfigError, match="'validation' .*has 'more', 'notes', 'test', 'train'. .*vil split .*/train "):
        open_splits(small_config(tmp_path))


def test_a_missing_split_is_reported_beside_a_file(tmp_path):
    (tmp_path / "labels.csv").touch()
    with pytest.raises(ConfigError, match="has no split 'train' .*; it has 'labels.csv'$"):
        open_split(str(tmp_path), "", "train")


def test_unknown_classes_of_a_hub_dataset_are_reported_without_advice_about_folders():
    images = SimpleNamespace(reader=SimpleNamespace(class_to_idx={"cat": 0}))
    with pytest.raises(ConfigError, match="has classes that the model does not have: 'cat'$"):
        follow_classes(images, ["dog"], "the model", None, "hfds/x", "test")


def test_splits_must_have_the_same_classes(image_folder, tmp_path):
    shutil.copytree(image_folder, tmp_path / "images")
    config = small_config(tmp_path / "images", num_classes=4)
    (tmp_path / "images" / "val" / "bee").rename(tmp_path / "images" / "val" / "wasp")
    with pytest.raises(ConfigError, match=r"'validation' of .* has classes that training does not have: 'wasp'"):
        open_splits(config)
    message = r"the split 'train' of .* has 4 classes, but the model has 1000 \(num_classes\): set --num-classes 4"
    with pytest.raises(ConfigError, match=message):
        open_splits(small_config(image_folder, num_classes=1000))
    with pytest.raises(ConfigError, match="^the folder .*/train has 4 classes, but the model has 1000"):
        open_split(str(image_folder / "train"), "", ".", 1000)
    shutil.rmtree(tmp_path / "images" / "val" / "wasp")  # the remaining classes keep their indices
    for packed in (False, True):
        for split in ("train", "val") if packed else ():
            shutil.make_archive(str(tmp_path / "images" / split), "tar", tmp_path / "images" / split)
            shutil.rmtree(tmp_path / "images" / split)
        train, val, num_classes = open_splits(config)
        assert (len(train), len(val), num_classes) == (4 * TRAIN_IMAGES, 3 * VAL_IMAGES, 4)
        assert {val.filename(i).split("/")[-2]: val.reader[i][1] for i in range(len(val))} == dict(ant=0, cat=2, dog=3)


def test_images_without_class_folders_are_rejected(image_folder, tmp_path):
    for split in ("train", "val"):
        shutil.copytree(image_folder / split / "ant", tmp_path / split)
    with pytest.raises(ConfigError, match="/train has no class folders, .* named like the image's class"):
        open_splits(small_config(tmp_path))
    for split in ("train", "val"):
        shutil.copytree(image_folder / split / "ant", tmp_path / "wrapped" / split / "images")
    with pytest.raises(ConfigError, match="/train has one class, 'images': each class needs a folder of its im"):
        open_splits(small_config(tmp_path / "wrapped"))
    with pytest.raises(ConfigError, match="num_classes must be at least 2, got 1"):
        open_splits(small_config(tmp_path, synthetic=8, num_classes=1))
    assert open_splits(small_config(tmp_path, synthetic=8, num_classes=2))[2] == 2


def test_a_class_folder_without_images_is_rejected_by_name(image_folder, tmp_path):
    """Reject a class folder without images, because timm would skip the class and renumber the later classes."""
    shutil.copytree(image_folder, tmp_path / "images")
    config, train = small_config(tmp_path / "images"), tmp_path / "images" / "train"
    for name in (".cache", "__MACOSX", "bird/egg"):
        (train / name).mkdir(parents=True)
    (train / "link").symlink_to(train.parent / "empty")  # a link to an empty folder is not rejected
    (train.parent / "empty").mkdir()
    with pytest.raises(ConfigError, match="no images: 'bird'. Copy"):
        open_splits(config)
    for name in "fghij":
        (train / name).mkdir()
    (train / "bird" / "notes.txt").write_text("none yet")
    (train / "bird" / "egg" / ".ipynb_checkpoints").mkdir()
    shutil.copy(train / "ant" / "0.png", train / "bird" / "egg" / ".ipynb_checkpoints")  # hidden folders are skipped
    with pytest.raises(ConfigError, match=r"no images: 'bird', 'f', 'g', 'h', 'i', \.{4} Copy"):
        open_splits(config)
    for name in ("bird", *"fghij"):
        shutil.rmtree(train / name)
    assert open_splits(config)[2] == 4
    (train / "eel" / "1").mkdir(parents=True)
    shutil.copy(train / "ant" / "0.png", train / "eel" / "1" / "0.PNG")
    assert open_splits(config)[2] == 5


def write_shards(image_folder, root, train=4, validation=3):
    splits = {}
    for split, folder, shards in (("train", "train", train), ("validation", "val", validation)):
        paths = sorted((image_folder / folder).glob("*/*.png"))
        names, lengths = [f"{split}-{i}.tar" for i in range(shards)], [len(paths[i::shards]) for i in range(shards)]
        for shard, name in enumerate(names):
            with tarfile.open(root / name, "w") as tar:
                for path in paths[shard::shards]:
                    tar.add(path, f"{path.parent.name}{path.stem}.{('png', 'PNG')[shard % 2]}")
                    number = CLASSES.index(path.parent.name)
                    for ending, text in (("cls", f"{number * (split == 'train')}"), ("json", f'{{"kind": {number}}}')):
                        label = tarfile.TarInfo(f"{path.parent.name}{path.stem}.{ending}")
                        label.size = len(text)
                        tar.addfile(label, io.BytesIO(text.encode()))
        splits[split] = dict(name=split, num_samples=len(paths), filenames=names, shard_lengths=lengths)
    splits["validation"]["alt_label"] = "kind"
    (root / "_info.json").write_text(json.dumps({"splits": splits}))


def test_shards_without_a_list_of_their_split_are_an_error(image_folder, tmp_path):
    write_shards(image_folder, tmp_path)
    (tmp_path / "_info.json").unlink()
    config = small_config(tmp_path, dataset="wds/x", num_classes=4, val_split="validation-0.tar|1")
    for split, samples in (("train", ""), ("train-{0..3}.tar", ""), ("train-{0..3}.tar", "|12")):
        config = dataclasses.replace(config, train_split=split + samples)
        if samples:
            assert len(open_splits(config)[0]) == 12
        else:
            with pytest.raises(ConfigError, match=rf"^_info.json in .* must list the split '{re.escape(split)}' with"):
                open_splits(config)


@pytest.mark.parametrize(("workers", "shards"), [(0, 4), (3, 4), (3, 1)])
def test_webdataset_shards_stream_whole_epochs(image_folder, tmp_path, caplog, workers, shards):
    write_shards(image_folder, tmp_path, shards)
    with pytest.raises(ConfigError, match="wds/x does not store its number of classes: set --num-classes"):
        open_splits(small_config(tmp_path, dataset="wds/x"))
    config = small_config(tmp_path, dataset="wds/x", num_classes=4, batch_size=8, workers=workers)
    train, val, num_classes = open_splits(config)
    assert num_classes == 4
    batches = TrainingBatches(len(train), config, 8, 0, 1)
    loader = training_loader(train, config, DATA_CONFIG, CPU, batches, 4)

    def targets(epoch, first_step=0):
        parts = list(loader.epoch(epoch, first_step))
        assert all(batch.images.shape == (8, 3, 12, 16) for batch in parts)
        return [(batch.targets.tolist(), batch.position) for batch in parts]

    whole = targets(epoch=1)
    assert [position for _, position in whole] == list(range(0, 64, 8))
    assert len(whole) == batches.accumulation * batches.steps == 2 * (4 * TRAIN_IMAGES // 16)
    assert [position for _, position in targets(epoch=2, first_step=2)] == list(range(32, 64, 8))
    assert targets(epoch=2) != whole
    assert train.reader.epoch_count.value == 2  # the shuffle depends on the epoch and the seed
    assert open_splits(small_config(tmp_path, dataset="wds/x", num_classes=4, seed=5))[0].reader.common_seed == 5
    assert evaluation_loader(val, DATA_CONFIG, CPU, 1, 256, 0, 1).images.plan.prefetch == BATCHES_AHEAD
    loader = evaluation_loader(val, DATA_CONFIG, CPU, workers, 5, 0, 1)
    images, labels = joined(loader)
    assert sorted(labels) == [number for number in range(4) for _ in range(VAL_IMAGES)]
    one = create_transform(use_prefetcher=True, **DATA_CONFIG)(Image.open(image_folder / "val" / "bee" / "3.png"))
    assert any(torch.equal(image, torch.as_tensor(one)) for image in images)
    Trainer(dataclasses.replace(config, output=str(tmp_path), global_batch_size=12), CPU, 0, 1)
    assert "aug_repeats 3 has no effect" in caplog.text
    assert "each epoch skips 8 of 68 images" in caplog.text


def test_training_skips_samples_of_out_of_range_classes_and_evaluation_stops(image_folder, tmp_path):
    write_shards(image_folder, tmp_path)
    train, val, _ = open_splits(small_config(tmp_path, dataset="wds/x", num_classes=3))
    for images in (val, open_evaluation_split(str(tmp_path), "wds/x", "validation", 3)[0]):
        with pytest.raises(LabelError, match=r"^classes of shards must be 0 to 2, got 3 in .*validation-0.tar: number"):
            list(images)
    assert {label for _, label in train} == {0, 1, 2}
    assert {label for _, label in open_split(str(tmp_path), "wds/x", "train")} == {0, 1, 2, 3}


@pytest.mark.parametrize("shards", [1, 3])
def test_ranks_share_the_samples_of_shards_without_duplicates(image_folder, tmp_path, shards, monkeypatch):
    write_shards(image_folder, tmp_path, validation=shards)
    labels, read, read_one = [], [set(), set()], Shards._read
    monkeypatch.setattr(Shards, "_read", lambda self, s: read[self.dist_rank].add(s["__url__"]) or read_one(self, s))
    for rank in range(2):
        train, val, _ = open_splits(small_config(tmp_path, dataset="wds/x", num_classes=4))
        for reader in (train.reader, val.reader):
            reader.dist_rank, reader.dist_num_replicas, reader.global_num_workers = rank, 2, 2
        # `count_images` counts the samples of all ranks, because the number determines the steps per epoch
        assert count_images(train) == 4 * TRAIN_IMAGES
        assert len(list(train)) == 2 * TRAIN_IMAGES
        share = [label for _, label in val]
        assert share == sorted(share) or shards > 1  # the samples of a shard are sorted by name
        assert share
        labels += share
    assert len(read[0] & read[1]) == (shards == 1)  # ranks that share one shard take turns in reading it
    assert sorted(labels) == [number for number in range(4) for _ in range(VAL_IMAGES)]
