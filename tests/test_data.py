"""Images for training and evaluation: which, in what order, from which files, and how they are augmented."""

import io
import json
import multiprocessing
import os
import shutil
import tarfile
import time

import pytest
import torch
from conftest import CLASSES, TRAIN_IMAGES, VAL_IMAGES
from processes import SMALL
from timm.data import resolve_data_config

from train_imagenet import Trainer
from vil.training import data
from vil.training.config import Config, ConfigError


def small_config(image_folder, **options) -> Config:
    return Config(**SMALL | dict(data_dir=str(image_folder), workers=0, experiment="run") | options)


def global_batches(config, num_images, world_size):
    """The (index, seed) pairs of each global batch of an epoch, over all processes and in order."""
    micro_batch, _ = data.split_global_batch(config, world_size)
    ranks = [data.TrainingBatches(num_images, config, micro_batch, rank, world_size) for rank in range(world_size)]
    for batches in ranks:
        batches.set_epoch(3)
    share = config.global_batch_size // world_size
    pairs = [[pair for batch in batches for pair in batch] for batches in ranks]
    steps = range(ranks[0].steps)
    return [[pair for rank in pairs for pair in rank[step * share : (step + 1) * share]] for step in steps]


@pytest.mark.parametrize("repeats", [0, 3])
def test_global_batches_do_not_depend_on_processes_or_accumulation(image_folder, repeats):
    config = small_config(image_folder, aug_repeats=repeats)
    expected = global_batches(config, 100, world_size=1)
    assert len(expected) == 100 // 16
    for world_size, batch_size in [(2, None), (4, None), (1, 4), (2, 5)]:
        split = small_config(image_folder, aug_repeats=repeats, batch_size=batch_size)
        assert global_batches(split, 100, world_size) == expected


def test_an_epoch_sees_each_image_once_or_as_often_as_augmentation_repeats_it(image_folder):
    once = [i for batch in global_batches(small_config(image_folder, aug_repeats=0), 100, 1) for i, _ in batch]
    assert len(set(once)) == len(once) == 96
    for batch in global_batches(small_config(image_folder, aug_repeats=3, global_batch_size=12), 100, 1):
        indices = [i for i, _ in batch]
        assert sorted(indices.count(i) for i in set(indices)) == [3, 3, 3, 3]
        assert len({seed for _, seed in batch}) == 12  # each copy is augmented differently


def test_epochs_and_seeds_shuffle_differently(image_folder):
    def order(seed, epoch):
        batches = data.TrainingBatches(100, small_config(image_folder, seed=seed), 16, 0, 1)
        batches.set_epoch(epoch)
        return list(batches)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 1)


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, None), (2, 4)])
def test_an_epoch_goes_on_where_it_stopped(image_folder, world_size, batch_size):
    config = small_config(image_folder, batch_size=batch_size)
    micro_batch, accumulation = data.split_global_batch(config, world_size)
    for rank in range(world_size):
        batches = data.TrainingBatches(100, config, micro_batch, rank, world_size)
        batches.set_epoch(5)
        whole = list(zip(batches, batches.first_positions()))
        batches.set_epoch(5, first_step=4)
        assert list(zip(batches, batches.first_positions())) == whole[4 * accumulation :]
        assert len(batches) == len(whole) - 4 * accumulation == 2 * accumulation


def test_evaluation_counts_every_image_once(image_folder):
    for world_size in (1, 2, 3, 5):
        indices = []
        for rank in range(world_size):
            batches = data.EvaluationBatches(28, 4, rank, world_size)
            assert len(batches) == len(list(batches))
            indices += [i for batch in batches for i, _ in batch]
        assert sorted(indices) == list(range(28))


def test_augmentation_on_the_device_does_not_depend_on_the_micro_batch(image_folder):
    config = small_config(image_folder)
    augment = data.BatchAugmentation(config, 4, torch.device("cpu"))
    images, targets = torch.rand(32, 3, 16, 16), torch.arange(32) % 4
    whole = augment(images.clone(), targets, epoch=1, position=64)
    parts = [augment(images[i : i + 8].clone(), targets[i : i + 8], epoch=1, position=64 + i) for i in range(0, 32, 8)]
    assert not torch.equal(whole[0], images)
    for tensor, pieces in zip(whole, zip(*parts)):
        assert torch.equal(tensor, torch.cat(pieces))


def test_workers_start_with_their_loader(image_folder):
    before = set(multiprocessing.active_children())
    trainer = Trainer(small_config(image_folder, workers=2), torch.device("cpu"), 0, 1)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 4  # two for either split
    assert len(list(data.micro_batches(trainer.train_loader, trainer.batches, 0, 1))) == trainer.batches.steps - 1
    assert sum(len(images) for images, _ in trainer.val_loader) == 28
    assert set(multiprocessing.active_children()) - before == workers


def test_a_loader_may_have_no_batch(image_folder):
    """Of an epoch that was left behind its last step; and of a split with fewer images than there are processes."""
    device = torch.device("cpu")
    trainer = Trainer(small_config(image_folder), device, 0, 1)
    assert list(data.micro_batches(trainer.train_loader, trainer.batches, 0, trainer.batches.steps)) == []
    images, data_config = trainer.val_loader.dataset.dataset, resolve_data_config({}, model=trainer.model)
    for rank, count in ((27, 1), (28, 0)):
        loader = data.evaluation_loader(images, data_config, device, 0, 4, rank, world_size=29)
        assert sum(len(batch) for batch, _ in loader) == count


def test_a_worker_that_hangs_ends_the_run(image_folder, monkeypatch):
    monkeypatch.setattr(data, "STALLED", 1)
    monkeypatch.setattr(data.ImageReader, "__getitem__", lambda *_: time.sleep(3600))
    trainer = Trainer(small_config(image_folder, workers=1), torch.device("cpu"), 0, 1)
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        next(data.micro_batches(trainer.train_loader, trainer.batches, 0, 0))


def test_an_unreadable_image_is_named_counted_and_replaced(image_folder, tmp_path, caplog):
    root = tmp_path / "images"
    shutil.copytree(image_folder, root)
    broken = [root / "train" / "bee" / "3.png", root / "val" / "cat" / "2.png"]
    for path in broken:
        path.write_bytes(path.read_bytes()[:100])
    config = small_config(root, aa=None)
    train, val, _ = data.open_splits(config)

    reader = data.ImageReader(train, lambda image: image.size, is_training=True)
    targets = [reader[i, 0][1] for i in range(len(reader))]
    assert (len(targets), reader.skipped) == (4 * TRAIN_IMAGES, 1)
    assert set(targets) == {0, 1, 2, 3}
    assert os.path.join("bee", "3.png") in caplog.text

    reader = data.ImageReader(val, lambda image: image.size, is_training=False)
    targets = [reader[i, 0][1] for i in range(len(reader))]
    assert (targets.count(data.UNREADABLE), reader.skipped) == (1, 1)
    assert os.path.join("cat", "2.png") in caplog.text


def test_tar_files_of_the_splits(image_folder, tmp_path):
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            tar.add(image_folder / split, ".")
    train, val, num_classes = data.open_splits(small_config(tmp_path))
    assert (len(train), len(val), num_classes) == (4 * TRAIN_IMAGES, 4 * VAL_IMAGES, 4)


def test_webdataset_shards_stream_whole_epochs(image_folder, tmp_path):
    info = {"splits": {}}
    for split, shards in (("train", 4), ("validation", 3)):
        paths = sorted((image_folder / {"train": "train", "validation": "val"}[split]).glob("*/*.png"))
        names = [f"{split}-{shard}.tar" for shard in range(shards)]
        for shard, name in enumerate(names):
            with tarfile.open(tmp_path / name, "w") as tar:
                for path in paths[shard::shards]:
                    tar.add(path, f"{path.parent.name}{path.stem}.png")
                    label = tarfile.TarInfo(f"{path.parent.name}{path.stem}.cls")
                    label.size = 1
                    tar.addfile(label, io.BytesIO(str(CLASSES.index(path.parent.name)).encode()))
        lengths = [len(paths[shard::shards]) for shard in range(shards)]
        info["splits"][split] = dict(name=split, num_samples=len(paths), filenames=names, shard_lengths=lengths)
    (tmp_path / "_info.json").write_text(json.dumps(info))

    config = small_config(tmp_path, dataset="wds/x", num_classes=4)
    train, val, num_classes = data.open_splits(config)
    data_config = dict(input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    data_config |= dict(crop_pct=1.0, crop_mode="center", interpolation="bicubic")
    batches = data.TrainingBatches(len(train), config, 16, 0, 1)
    loader = data.training_loader(train, config, data_config, torch.device("cpu"), batches)
    assert len(list(zip(loader, batches.first_positions()))) == batches.steps == 4 * TRAIN_IMAGES // 16
    assert len(list(data.micro_batches(loader, batches, epoch=1, first_step=2))) == batches.steps - 2
    loader = data.evaluation_loader(val, data_config, torch.device("cpu"), 0, 5, 0, 1)
    targets = torch.cat([targets for _, targets in loader])
    assert targets.bincount().tolist() == [VAL_IMAGES] * num_classes


def test_a_validation_split_without_some_class_keeps_the_numbers_of_training(image_folder, tmp_path):
    shutil.copytree(image_folder, tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "val" / "bee")
    _, val, num_classes = data.open_splits(small_config(tmp_path / "images"))
    assert num_classes == 4
    assert {val.reader[i][1] for i in range(len(val))} == {0, 2, 3}


def test_data_that_does_not_fit_is_refused(image_folder, tmp_path):
    with pytest.raises(ConfigError, match="data_dir .*nowhere is not a folder"):
        data.open_splits(small_config(tmp_path / "nowhere"))
    (tmp_path / "train").mkdir()
    shutil.copytree(image_folder / "train", tmp_path / "images" / "train")
    with pytest.raises(ConfigError, match=r"has no split 'validation' \(.*val.*\); it has train"):
        data.open_splits(small_config(tmp_path / "images"))
    shutil.copytree(image_folder / "val", tmp_path / "images" / "val")
    (tmp_path / "images" / "val" / "bee").rename(tmp_path / "images" / "val" / "wasp")
    with pytest.raises(ConfigError, match=r"classes that training has not: \['wasp'\]"):
        data.open_splits(small_config(tmp_path / "images"))
    with pytest.raises(ConfigError, match="has 4 classes but num_classes is 1000"):
        data.open_splits(small_config(image_folder, num_classes=1000))
    with pytest.raises(ConfigError, match="has 68 images, less than one global batch of 1024"):
        data.TrainingBatches(68, small_config(image_folder, global_batch_size=1024), 1024, 0, 1)


def test_a_global_batch_that_cannot_be_shared_is_refused(image_folder):
    assert data.split_global_batch(small_config(image_folder, global_batch_size=96, batch_size=20), 2) == (16, 3)
    with pytest.raises(ConfigError, match="global_batch_size 16 is not a multiple of 3 processes"):
        data.split_global_batch(small_config(image_folder), 3)
    with pytest.raises(ConfigError, match="mixup pairs images"):
        data.split_global_batch(small_config(image_folder, global_batch_size=18), 2)
