"""Images for training and evaluation: which, in what order, from which files, and how they are augmented."""

import io
import json
import math
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures import CLASSES, TRAIN_IMAGES, VAL_IMAGES
from PIL import Image, ImageOps
from processes import SMALL
from sklearn.datasets import load_digits
from timm.data import Mixup, create_transform, resolve_data_config
from timm.data.random_erasing import RandomErasing

from train_imagenet import Trainer
from vil.config import Config, ConfigError
from vil.data.augmentation import BatchAugmentation
from vil.data.digits import write_digits
from vil.data.images import UNREADABLE
from vil.data.loaders import describe, evaluation_loader, micro_batches, training_loader, unreadable_images
from vil.data.readers import ImageReader
from vil.data.samplers import EvaluationBatches, TrainingBatches, split_global_batch
from vil.data.seeds import derive_seed, seed_everything
from vil.data.splits import class_names, open_split, open_splits

CPU = torch.device("cpu")


def small_config(image_folder, **options) -> Config:
    return Config(**SMALL | dict(data_dir=str(image_folder), workers=0, experiment="run") | options)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# order


@pytest.mark.parametrize(("share", "batch_size"), [(16, None), (16, 16), (16, 5), (12, 8), (12, 7), (6, 1), (96, 20)])
def test_a_micro_batch_is_the_largest_that_shares_equally_and_fits(share, batch_size):
    fits = [size for size in range(1, share + 1) if share % size == 0 and size <= (batch_size or share)]
    for world_size in (1, 3):
        config = Config(global_batch_size=share * world_size, batch_size=batch_size, mixup=0.0, cutmix=0.0)
        assert split_global_batch(config, world_size) == (max(fits), share // max(fits))


def test_a_global_batch_that_cannot_be_shared_is_refused(image_folder):
    with pytest.raises(ConfigError, match="global_batch_size 16 is not a multiple of 3 processes"):
        split_global_batch(small_config(image_folder), 3)
    odd = dict(global_batch_size=18)  # 9 a process
    with pytest.raises(ConfigError, match="mixup pairs images.* 9 of global_batch_size 18 .*micro-batches of 9"):
        split_global_batch(small_config(image_folder, **odd), 2)
    with pytest.raises(ConfigError, match="mixup pairs images"):
        split_global_batch(small_config(image_folder, **odd, mixup=0.0), 2)
    for unmixed in (dict(mixup_prob=0.0), dict(mixup=0.0, cutmix=0.0)):
        assert split_global_batch(small_config(image_folder, **odd, **unmixed), 2) == (9, 1)


def global_batches(config, num_images, world_size, epoch=3):
    """The (index, seed) pairs of each global batch of an epoch, over all processes and in order."""
    micro_batch, _ = split_global_batch(config, world_size)
    ranks = [TrainingBatches(num_images, config, micro_batch, rank, world_size) for rank in range(world_size)]
    for batches in ranks:
        batches.set_epoch(epoch)
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
    for repeats in (0, 1):
        once = [i for b in global_batches(small_config(image_folder, aug_repeats=repeats), 100, 1) for i, _ in b]
        assert len(set(once)) == len(once) == 96
        assert set(once) < set(range(100))
    batches = global_batches(small_config(image_folder, aug_repeats=3, global_batch_size=12), 100, 1)
    seen = []
    for batch in batches:
        indices = [i for i, _ in batch]
        assert sorted(indices.count(i) for i in set(indices)) == [3, 3, 3, 3]
        assert len({seed for _, seed in batch}) == 12  # each copy is augmented differently
        seen += set(indices)
    assert len(set(seen)) == len(seen) == 4 * len(batches) == 32


@pytest.mark.parametrize("global_batch_size", [12, 16, 24, 64])
def test_an_image_is_never_mixed_with_a_copy_of_itself(image_folder, global_batch_size):
    config = small_config(image_folder, aug_repeats=3, global_batch_size=global_batch_size, cutmix=0.0, reprob=0.0)
    augment = BatchAugmentation(config, 200, DATA_CONFIG)
    for batch in global_batches(config, 200, 1):
        indices = torch.tensor([i for i, _ in batch])
        images = torch.zeros(len(batch), 3, 2, 2, dtype=torch.uint8)
        _, targets = augment(images, indices, epoch=0, position=0)
        # every image has a class of its own, so a target with one peak is an image by itself
        assert ((targets > targets.min(dim=1, keepdim=True).values).sum(dim=1) == 2).all()


def test_epochs_and_seeds_shuffle_and_augment_differently(image_folder):
    def drawn(seed, epoch):
        pairs = [pair for b in global_batches(small_config(image_folder, seed=seed), 100, 1, epoch) for pair in b]
        return [i for i, _ in pairs], {seed for _, seed in pairs}

    assert drawn(0, 0) == drawn(0, 0)
    orders, seeds = zip(*(drawn(*key) for key in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]))
    assert len(set(map(tuple, orders))) == 5
    assert len(set.union(*seeds)) == 5 * 96  # no image is augmented as any other was
    assert max(max(s) for s in seeds) >= 2**31 > min(min(s) for s in seeds)


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, None), (2, 4)])
def test_an_epoch_goes_on_where_it_stopped(image_folder, world_size, batch_size):
    config = small_config(image_folder, batch_size=batch_size)
    micro_batch, accumulation = split_global_batch(config, world_size)
    for rank in range(world_size):
        batches = TrainingBatches(100, config, micro_batch, rank, world_size)
        batches.set_epoch(5)
        whole = list(zip(batches, batches.first_positions()))
        share = 16 // world_size
        assert [position for _, position in whole] == [
            16 * step + share * rank + micro_batch * part for step in range(6) for part in range(accumulation)
        ]
        batches.set_epoch(5, first_step=4)
        assert list(zip(batches, batches.first_positions())) == whole[4 * accumulation :]
        assert len(batches) == len(whole) - 4 * accumulation == 2 * accumulation
        assert list(batches.sizes()) == [micro_batch] * len(batches)


def test_an_epoch_without_a_whole_global_batch_is_refused(image_folder):
    config = small_config(image_folder)
    assert TrainingBatches(16, config, 16, 0, 1).steps == 1
    with pytest.raises(ConfigError, match="has 15 images, less than one global batch of 16"):
        TrainingBatches(15, config, 16, 0, 1)


def test_process_r_of_several_evaluates_every_nth_image_from_r_on():
    for world_size in (1, 2, 3, 5, 29):
        for rank in range(world_size):
            batches = EvaluationBatches(28, 4, rank, world_size)
            indices = list(range(28))[rank::world_size]
            expected = [indices[start : start + 4] for start in range(0, len(indices), 4)]
            assert [[i for i, _ in batch] for batch in batches] == expected
            assert len(batches) == len(expected)
            assert list(batches.sizes()) == [len(batch) for batch in expected]


def test_seeds_follow_from_their_key_and_reach_every_generator():
    keys = [(0, 1), (1, 0), (0, 1, 0, 1), (0, 1, 0, 2), (0, 0, 1, 1), (7, 2**33)]
    for key in keys:
        assert derive_seed(*key) == np.random.SeedSequence(key).generate_state(1)[0]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    seed_everything(2**32 - 5)
    drawn = random.random(), np.random.rand(), torch.rand(())
    seed_all(2**32 - 5)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))


# pixels

LITERAL = dict(
    scale=(0.08, 1.0),
    ratio=(3 / 4, 4 / 3),
    hflip=0.5,
    color_jitter=0.3,
    auto_augment="rand-m9-mstd0.5-inc1",
    interpolation="bicubic",
    mean=(0.3, 0.5, 0.6),
    std=(0.4, 0.2, 0.3),
)
DATA_CONFIG = dict(input_size=(3, 12, 16), crop_pct=0.8, crop_mode="center", interpolation="bilinear")
DATA_CONFIG |= dict(mean=LITERAL["mean"], std=LITERAL["std"])


def normalised(images):
    """What a model takes of images of 0..255."""
    mean, std = (torch.tensor(LITERAL[name]).view(3, 1, 1) for name in ("mean", "std"))
    assert images.dtype == torch.uint8
    return (images / 255 - mean) / std


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """{train,val}/{x,y}/*: gradients with noise in files of every mode."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for split, name in (("train", "x"), ("train", "y"), ("val", "x"), ("val", "y")):
        (root / split / name).mkdir(parents=True)
        for i, mode in enumerate(("RGB", "L", "P", "RGBA", "CMYK", "RGB", "RGB", "RGB")):
            corners = Image.fromarray(rng.integers(0, 256, (2, 2, 3), dtype=np.uint8))
            pixels = np.asarray(corners.resize((30 + i, 24 + 2 * i), Image.Resampling.BILINEAR)).astype(int)
            noisy = Image.fromarray((pixels + rng.integers(-30, 31, pixels.shape)).clip(0, 255).astype(np.uint8))
            noisy.convert(mode).save(root / split / name / f"{i}.{'jpg' if mode == 'CMYK' else 'png'}")
    return root


def training(folder, rank=0, world_size=1, epoch=2, **options):
    """The images, normalised, and targets of an epoch, and the (index, seed) of each, one after the other."""
    config = Config(**dict(data_dir=str(folder), global_batch_size=8, workers=0, aug_repeats=0) | options)
    dataset = open_split(config.data_dir, "", "train", is_training=True)
    micro_batch, _ = split_global_batch(config, world_size)
    batches = TrainingBatches(len(dataset), config, micro_batch, rank, world_size)
    loader = training_loader(dataset, config, DATA_CONFIG, CPU, batches)
    images, targets = zip(*(batch for batch, _ in micro_batches(loader, batches, epoch)))
    assert len(loader) == len(images) == len(batches)
    keys = [key for batch in batches for key in batch]
    return normalised(torch.cat(images)), torch.cat(targets).tolist(), keys


def by_timm(folder, keys, **options):
    """The same images by PIL and timm alone, from the seed of each."""
    paths = sorted((folder / "train").glob("*/*"))
    transform = create_transform((3, 12, 16), is_training=True, **LITERAL | options)
    images = []
    for index, seed in keys:
        image = Image.open(paths[index]).convert("RGB")
        seed_all(seed)
        images.append(transform(image))
    return torch.stack(images), [int(paths[index].parent.name == "y") for index, _ in keys]


@pytest.mark.parametrize(
    ("options", "literal"),
    [
        ({}, {}),
        ({"workers": 2}, {}),
        ({"aug_repeats": 3, "batch_size": 4}, {}),
        ({"scale": (0.5, 0.6)}, {}),
        ({"ratio": (2.0, 2.5)}, {}),
        ({"hflip": 1.0}, {}),
        ({"aa": None}, {"auto_augment": None}),
        ({"aa": None, "color_jitter": 0.9}, {"auto_augment": None, "color_jitter": 0.9}),
        ({"aa": None, "color_jitter": None}, {"auto_augment": None, "color_jitter": None}),
        ({"aa": "rand-m5-n3-p0.8-tweights"}, {"auto_augment": "rand-m5-n3-p0.8-tweights"}),
        ({"train_interpolation": "bilinear"}, {"interpolation": "bilinear"}),
        ({"train_interpolation": "random"}, {"interpolation": "random"}),
    ],
    ids=lambda value: " ".join(value) or "defaults",
)
def test_an_image_is_augmented_as_by_timms_transform_of_its_options_from_its_seed(pictures, options, literal):
    images, targets, keys = training(pictures, **options)
    transformed = {name: value for name, value in options.items() if name in ("scale", "ratio", "hflip")}
    expected, expected_targets = by_timm(pictures, keys, **transformed, **literal)
    torch.testing.assert_close(images, expected, rtol=1e-5, atol=1e-5)
    assert targets == expected_targets
    if transformed or literal:
        assert not torch.allclose(expected, by_timm(pictures, keys)[0], atol=0.1)  # the option counts


def test_processes_share_the_augmented_images_of_one(pictures):
    whole, targets, _ = training(pictures)
    shares = [training(pictures, rank, 2) for rank in (0, 1)]
    for step in range(2):
        both = [torch.as_tensor(share[part][4 * step : 4 * step + 4]) for part in (0, 1) for share in shares]
        assert torch.equal(torch.cat(both[:2]), whole[8 * step : 8 * step + 8])
        assert torch.cat(both[2:]).tolist() == targets[8 * step : 8 * step + 8]


def test_without_anything_random_an_image_is_resized_mirrored_and_normalised(pictures):
    options = dict(scale=(1.0, 1.0), ratio=(36 / 36, 36 / 36), hflip=1.0, aa=None, color_jitter=None)
    images, _, keys = training(pictures, **options)
    paths = sorted((pictures / "train").glob("*/*"))
    (row,) = [row for row, (index, _) in enumerate(keys) if paths[index].name == "6.png" and index < 8]
    image = Image.open(paths[keys[row][0]])
    assert image.size == (36, 36)
    pixels = np.asarray(ImageOps.mirror(image.resize((16, 12), Image.Resampling.BICUBIC))) / 255
    expected = torch.tensor((pixels - LITERAL["mean"]) / LITERAL["std"]).permute(2, 0, 1)
    torch.testing.assert_close(images[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_evaluation_prepares_images_as_timm_does_one_by_one(pictures, crop_mode):
    dataset = open_split(str(pictures), "", "validation")
    config = DATA_CONFIG | dict(crop_mode=crop_mode, input_size=(3, 16, 16))
    loader = evaluation_loader(dataset, config, CPU, workers=0, batch_size=3, rank=1, world_size=2)
    images, targets = (torch.cat(parts) for parts in zip(*loader))
    paths = sorted((pictures / "val").glob("*/*"))[1::2]
    transform = create_transform(is_training=False, **config)
    expected = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    torch.testing.assert_close(normalised(images), expected, rtol=1e-5, atol=1e-5)
    assert targets.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


# on the device


def augmented_by_timm(images, targets, config, num_classes, epoch, position):
    """Groups of eight images, each with a seed of its own: timm's random erasing, to grey, then timm's mixup."""
    parts = []
    for start in range(0, len(images), 8):
        group, labels = normalised(images[start : start + 8]), targets[start : start + 8]
        seed_all(int(np.random.SeedSequence((config["seed"], epoch, position + start, 1)).generate_state(1)[0]))
        if config["reprob"]:
            group = RandomErasing(config["reprob"], mode="const", device="cpu")(group)
        if config["mixup_prob"] and (config["mixup"] or config["cutmix"]):
            mixup = Mixup(
                config["mixup"],
                config["cutmix"],
                prob=config["mixup_prob"],
                switch_prob=config["mixup_switch_prob"],
                label_smoothing=config["smoothing"],
                num_classes=num_classes,
            )
            group, labels = mixup(group, labels)
        parts.append((group, labels))
    return [torch.cat(tensors) for tensors in zip(*parts)]


RECIPE = dict(mixup=0.8, cutmix=1.0, mixup_prob=1.0, mixup_switch_prob=0.5, smoothing=0.1, reprob=0.25, remode="const")


def random_images(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixup": 0.2, "cutmix": 0.0, "reprob": 0.0},
        {"cutmix": 0.4, "mixup": 0.0, "smoothing": 0.3},
        {"mixup_prob": 0.5, "seed": 5, "reprob": 0.9},
        {"mixup_switch_prob": 0.9, "smoothing": 0.0},
        {"mixup_switch_prob": 0.1, "reprob": 1.0},
        {"mixup_prob": 0.0, "reprob": 1.0},
        {"mixup": 0.0, "cutmix": 0.0},
        {"mixup_prob": 0.0, "reprob": 0.0},
    ],
    ids=lambda options: " ".join(options) or "recipe",
)
def test_a_batch_is_erased_and_mixed_as_by_timm(options):
    """All of a batch's groups at once against timm's on one after the other; the last group is of four images."""
    config = dict(RECIPE, seed=0) | options
    images, targets = random_images(68, 3, 12, 20), torch.arange(68) % 10
    given = images.clone()
    expected = augmented_by_timm(images, targets, config, 10, epoch=3, position=40)
    augment = BatchAugmentation(Config(**config), 10, DATA_CONFIG)
    for ours, theirs in zip(augment(images, targets, epoch=3, position=40), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(images, given)  # noise that stands for images is given again and again
    if config["reprob"] or config["mixup_prob"]:
        for other in (dict(epoch=2, position=40), dict(epoch=3, position=48)):
            assert not torch.allclose(augment(images, targets, **other)[0], expected[0], atol=1e-3)


@pytest.mark.parametrize("mode", ["pixel", "rand"])
def test_what_is_erased_becomes_noise_of_the_images_own(mode):
    config, images, targets = dict(RECIPE, reprob=0.7, mixup_prob=0.0), random_images(96, 3, 40, 48), torch.arange(96)
    (grey, _), (noisy, _), (again, _), (part, _) = (
        BatchAugmentation(Config(**config | dict(remode=kind)), 100, DATA_CONFIG)(images[first:], targets, 1, first)
        for kind, first in (("const", 0), (mode, 0), (mode, 0), (mode, 32))
    )
    erased = (grey == 0).all(dim=1)
    assert 0.5 < erased.any(dim=(1, 2)).float().mean() < 0.9
    assert torch.equal(noisy.movedim(1, -1)[~erased], grey.movedim(1, -1)[~erased])
    assert torch.equal(noisy, again)
    assert torch.equal(noisy[32:], part)
    values = [noisy[i][:, erased[i]] for i in range(96) if erased[i].any()]
    if mode == "rand":  # a colour for each image
        assert all((v == v[:, :1]).all() for v in values)
        values = [v[:, :1] for v in values]
    starts = torch.stack([v[:, 0] for v in values])
    assert len(starts.flatten().unique()) == starts.numel()
    noise = torch.cat([v.flatten() for v in values])
    assert noise.mean().abs() < 4 / math.sqrt(len(noise))
    assert (noise.std() - 1).abs() < 4 / math.sqrt(2 * len(noise))


def test_augmentation_on_the_device_does_not_depend_on_the_micro_batch(image_folder):
    augment = BatchAugmentation(small_config(image_folder), 4, DATA_CONFIG)
    images, targets = random_images(32, 3, 16, 16), torch.arange(32) % 4
    whole = augment(images, targets, epoch=1, position=64)
    parts = [augment(images[i : i + 8], targets[i : i + 8], epoch=1, position=64 + i) for i in range(0, 32, 8)]
    assert not torch.allclose(whole[0], normalised(images), atol=1e-3)
    for tensor, pieces in zip(whole, zip(*parts)):
        assert torch.equal(tensor, torch.cat(pieces))


def test_noise_stands_for_images(image_folder):
    config = Config(synthetic=60, global_batch_size=8, num_classes=3)
    train, val, num_classes = open_splits(config)
    assert (len(train), len(val), num_classes) == (60, 3, 3)
    assert len(open_splits(Config(synthetic=101))[1]) == 5  # one for 25, as in ImageNet
    assert open_splits(Config(synthetic=1_281_167))[2] == 1000
    batches = TrainingBatches(60, config, 4, 0, 1)
    loader = training_loader(train, config, DATA_CONFIG, CPU, batches)
    found = [next(iter(training_loader(train, config, DATA_CONFIG, CPU, batches)))]  # of another loader
    for images, targets in loader:
        assert (images.shape, images.dtype) == ((4, 3, 12, 16), torch.uint8)
        found.append((images, targets))
    assert len(found) - 1 == len(loader) == 14
    assert all(torch.equal(images, found[0][0]) for images, _ in found)
    assert found[0][1].tolist() == [0, 1, 0, 1]
    assert 120 < found[0][0].float().mean() < 135
    assert (found[0][0].min() < 10) & (found[0][0].max() > 245)
    assert describe(loader) == "noise, made on the device"
    loader = evaluation_loader(val, DATA_CONFIG, CPU, 0, 2, 0, 1)
    assert [len(images) for images, _ in loader] == [2, 1]
    assert unreadable_images(loader) == 0


# files


@pytest.mark.parametrize(
    ("wanted", "there", "found"),
    [
        ("train", ["training", "train"], "train"),
        ("train", ["training", "val"], "training"),
        ("training", ["train"], "train"),
        ("validation", ["test", "val", "train"], "val"),
        ("validation", ["eval", "test"], "eval"),
        ("validation", ["test", "valid"], "valid"),
        ("test", ["val", "test"], "test"),
        ("val", ["validation"], "validation"),
        ("holdout", ["holdout", "val"], "holdout"),
    ],
)
@pytest.mark.parametrize("tar", [False, True])
def test_a_split_is_found_by_the_names_in_use(tmp_path, wanted, there, found, tar, caplog):
    for name in there:
        (tmp_path / name / "a").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name / "a" / f"{name}.png")
        if tar:
            with tarfile.open(tmp_path / f"{name}.tar", "w") as file:
                file.add(tmp_path / name, ".")
            shutil.rmtree(tmp_path / name)
    images = open_split(str(tmp_path), "", wanted)
    assert [os.path.basename(name) for name in images.filenames()] == [f"{found}.png"]
    lines = [record.getMessage() for record in caplog.records]
    if wanted in (found, "train", "validation"):
        assert lines == []
    else:  # who asks for a folder by its name hears of another one
        assert lines == [f"{tmp_path} has no split {wanted!r}: {found}{'.tar' * tar} in its place"]


def test_a_class_may_be_called_as_a_split_is(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "val" / name / "image.png")
    assert class_names(open_split(str(tmp_path), "", "validation")) == {"train": 0, "validation": 1}


def test_a_split_that_is_not_there_is_named_with_what_is(image_folder, tmp_path):
    with pytest.raises(ConfigError, match="data_dir is not given"):
        open_splits(small_config(image_folder, data_dir=None))
    with pytest.raises(ConfigError, match="data_dir .*nowhere is not a folder"):
        open_splits(small_config(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="has no split 'holdout' .*called holdout.; it has nothing"):
        open_split(str(tmp_path), "", "holdout")
    shutil.copytree(image_folder / "train", tmp_path / "train")
    with pytest.raises(ConfigError, match=r"has no split 'validation' \(.*validation or val or .*eval\); it has train"):
        open_splits(small_config(tmp_path))
    shutil.copytree(image_folder / "val", tmp_path / "val")
    with pytest.raises(ConfigError, match="has no split 'test' .*called test.; it has train, val"):
        open_split(str(tmp_path), "", "test")  # what is held out to the end is not what models are chosen by
    (tmp_path / "val").rename(tmp_path / "test")
    with pytest.raises(ConfigError, match="has no split 'validation' .*it has test, train"):
        open_splits(small_config(tmp_path))


def test_splits_must_agree_on_the_classes(image_folder, tmp_path):
    shutil.copytree(image_folder, tmp_path / "images")
    config = small_config(tmp_path / "images")
    (tmp_path / "images" / "val" / "bee").rename(tmp_path / "images" / "val" / "wasp")
    with pytest.raises(ConfigError, match=r"'validation' has classes that training has not: \['wasp'\]"):
        open_splits(config)
    with pytest.raises(ConfigError, match=r"the split 'train' of .* has 4 classes but the model 1000 \(num_classes\)"):
        open_splits(small_config(image_folder, num_classes=1000))
    shutil.rmtree(tmp_path / "images" / "val" / "wasp")  # a class less keeps the others' numbers
    train, val, num_classes = open_splits(config)
    assert (len(train), num_classes) == (4 * TRAIN_IMAGES, 4)
    assert {os.path.dirname(val.filename(i)): val.reader[i][1] for i in range(len(val))} == dict(ant=0, cat=2, dog=3)


def test_images_without_folders_of_classes_are_nothing_to_train_on(image_folder, tmp_path):
    for split in ("train", "val"):
        shutil.copytree(image_folder / split / "ant", tmp_path / split)
    with pytest.raises(ConfigError, match="the split 'train' of .* has one class: each class needs a folder of its im"):
        open_splits(small_config(tmp_path))


def test_a_class_folder_without_images_is_refused_by_name(image_folder, tmp_path):
    """timm would leave it out, and number the classes behind it otherwise."""
    shutil.copytree(image_folder, tmp_path / "images")
    for name in (".cache", "bird/egg"):
        (tmp_path / "images" / "train" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match="no images: bird. Copy"):
        open_splits(small_config(tmp_path / "images"))
    for name in "fghij":
        (tmp_path / "images" / "train" / name).mkdir()
    (tmp_path / "images" / "train" / "bird" / "notes.txt").write_text("none yet")
    with pytest.raises(ConfigError, match="no images: bird, f, g, h, i, .... Copy"):
        open_splits(small_config(tmp_path / "images"))
    for name in ("bird", *"fghij"):
        shutil.rmtree(tmp_path / "images" / "train" / name)
    assert open_splits(small_config(tmp_path / "images"))[2] == 4
    shutil.copy(tmp_path / "images" / "train" / "ant" / "0.png", tmp_path / "0.PNG")
    (tmp_path / "images" / "train" / "eel" / "1").mkdir(parents=True)
    shutil.move(tmp_path / "0.PNG", tmp_path / "images" / "train" / "eel" / "1" / "0.PNG")
    assert open_splits(small_config(tmp_path / "images"))[2] == 5


def test_tar_files_of_the_splits(image_folder, tmp_path):
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            tar.add(image_folder / split, ".")
    train, val, num_classes = open_splits(small_config(tmp_path))
    assert (len(train), len(val), num_classes) == (4 * TRAIN_IMAGES, 4 * VAL_IMAGES, 4)


def truncate(path):
    path.write_bytes(path.read_bytes()[:100])


def test_an_unreadable_image_is_named_counted_and_replaced_by_the_next(image_folder, tmp_path, caplog):
    """With the target of the image that takes its place; behind the last comes the first."""
    root = tmp_path / "images"
    shutil.copytree(image_folder, root)
    paths = sorted((root / "train").glob("*/*.png"), key=lambda path: (path.parent.name, int(path.stem)))
    broken, taking = (TRAIN_IMAGES - 1, 2 * TRAIN_IMAGES - 2, 2 * TRAIN_IMAGES - 1, len(paths) - 1), (1, 2, 2, 0)
    for index in broken:
        truncate(paths[index])
    train = open_split(str(root), "", "train", is_training=True)
    reader = ImageReader(train, lambda image: image, is_training=True)
    for index, target in zip(broken, taking):
        image, found = reader[index, 0]
        replacement = paths[target * TRAIN_IMAGES % len(paths)]
        assert found == target == CLASSES.index(replacement.parent.name)
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(replacement)))
        assert os.path.join(paths[index].parent.name, paths[index].name) in caplog.text
    assert reader.unreadable.count == 5  # two in a row make one be met twice
    assert [reader[index, 0][1] for index in (0, TRAIN_IMAGES, 2 * TRAIN_IMAGES)] == [0, 1, 2]
    for path in paths:
        truncate(path)
    with pytest.raises(ConfigError, match="no image of the training split can be read"):
        _ = reader[3, 0]


def test_evaluation_gets_a_blank_image_for_one_that_cannot_be_read(image_folder, tmp_path, caplog, monkeypatch):
    root = tmp_path / "images" / "val"
    shutil.copytree(image_folder / "val", root)
    truncate(root / "cat" / "2.png")
    content = (root / "cat" / "4.png").read_bytes()
    place = content.index(b"IDAT")
    (root / "cat" / "4.png").write_bytes(content[: place - 4] + bytes([0, 0, 0, 5]) + content[place:])  # a wrong length
    Image.new("RGB", (100, 100)).save(root / "dog" / "0.png")  # more than PIL takes for harmless
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1300)
    val = open_split(str(root.parent), "", "val")
    loader = evaluation_loader(val, DATA_CONFIG, CPU, 0, 5, 0, 1)
    images, targets = (torch.cat(parts) for parts in zip(*loader))
    broken = [2 * VAL_IMAGES + 2, 2 * VAL_IMAGES + 4, 3 * VAL_IMAGES]
    assert torch.where(targets == UNREADABLE)[0].tolist() == broken
    assert not images[broken].any()
    assert unreadable_images(loader) == 3
    assert all(os.path.join(*name) in caplog.text for name in (("cat", "2.png"), ("cat", "4.png"), ("dog", "0.png")))


def test_of_a_stream_what_was_seen_is_read_again_and_dropped(image_folder):
    class Stream(list):
        dataset = SimpleNamespace(set_epoch=lambda epoch: epochs.append(epoch))

    epochs, batches = [], TrainingBatches(70, small_config(image_folder, batch_size=8), 8, 0, 1)
    left = micro_batches(Stream("abcdefghi"), batches, epoch=3, first_step=2)
    assert list(left) == [("e", 32), ("f", 40), ("g", 48), ("h", 56)]
    assert epochs == [3]


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

    with pytest.raises(ConfigError, match="wds/x does not say how many classes it has: give num_classes"):
        open_splits(small_config(tmp_path, dataset="wds/x"))
    config = small_config(tmp_path, dataset="wds/x", num_classes=4, batch_size=8)
    train, val, num_classes = open_splits(config)
    assert num_classes == 4
    batches = TrainingBatches(len(train), config, 8, 0, 1)
    loader = training_loader(train, config, DATA_CONFIG, CPU, batches)

    def targets(epoch, first_step=0):
        parts = list(micro_batches(loader, batches, epoch, first_step))
        assert all(images.shape == (8, 3, 12, 16) for (images, _), _ in parts)
        return [(labels.tolist(), position) for (_, labels), position in parts]

    whole = targets(epoch=1)
    assert [position for _, position in whole] == list(range(0, 64, 8))
    assert len(whole) == batches.accumulation * batches.steps == 2 * (4 * TRAIN_IMAGES // 16)
    assert [position for _, position in targets(epoch=2, first_step=2)] == list(range(32, 64, 8))
    assert targets(epoch=2) != whole
    assert train.reader.epoch_count.value == 2  # from which its shuffle follows, and from the seed
    assert open_splits(small_config(tmp_path, dataset="wds/x", num_classes=4, seed=5))[0].reader.common_seed == 5
    loader = evaluation_loader(val, DATA_CONFIG, CPU, 0, 5, 0, 1)
    images, labels = (torch.cat(parts) for parts in zip(*loader))
    assert labels.bincount().tolist() == [VAL_IMAGES] * 4
    transform = create_transform(is_training=False, **DATA_CONFIG)
    first = transform(Image.open(image_folder / "val" / "bee" / "3.png"))
    assert (normalised(images) - first).abs().amax(dim=(1, 2, 3)).min() < 1e-4


# processes


def test_workers_start_with_their_loader(image_folder):
    before = set(multiprocessing.active_children())
    trainer = Trainer(small_config(image_folder, workers=2), CPU, 0, 1)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 4  # two for either split
    assert len(list(micro_batches(trainer.train_loader, trainer.batches, 0, 1))) == trainer.batches.steps - 1
    assert sum(len(images) for images, _ in trainer.val_loader) == 28
    assert set(multiprocessing.active_children()) - before == workers


def test_a_worker_heeds_its_parents_signals_alone(pictures, monkeypatch):
    """A scheduler signals every process of a job, and then images are still needed."""
    monkeypatch.setattr("vil.data.loaders.STALLED", 60)
    before, threads = set(multiprocessing.active_children()), torch.get_num_threads()
    dataset = open_split(str(pictures), "", "validation")
    try:
        torch.set_num_threads(
            threads + 2
        )  # then PyTorch starts threads in a worker, before anything of ours runs there
        loader = evaluation_loader(dataset, DATA_CONFIG, CPU, 1, 2, 0, 1)
    finally:
        torch.set_num_threads(threads)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []).isdisjoint({signal.SIGTERM, signal.SIGUSR1})
    (worker,) = set(multiprocessing.active_children()) - before
    expected = [images for images, _ in loader]
    for name in ("-TERM", "-USR1"):
        subprocess.run(["kill", name, str(worker.pid)], check=True)
    assert all(torch.equal(ours, theirs) for (ours, _), theirs in zip(loader, expected, strict=True))
    assert worker.is_alive()
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(timeout=60)
    assert worker.exitcode == 0


def test_a_loader_may_have_no_batch(image_folder):
    """Of an epoch that was left behind its last step; and of a split with fewer images than there are processes."""
    trainer = Trainer(small_config(image_folder), CPU, 0, 1)
    assert list(micro_batches(trainer.train_loader, trainer.batches, 0, trainer.batches.steps)) == []
    images, data_config = trainer.val_loader.dataset.dataset, resolve_data_config({}, model=trainer.model)
    for rank, count in ((27, 1), (28, 0)):
        loader = evaluation_loader(images, data_config, CPU, 0, 4, rank, world_size=29)
        assert sum(len(batch) for batch, _ in loader) == count


def test_a_worker_that_hangs_ends_the_run(image_folder, monkeypatch):
    monkeypatch.setattr("vil.data.loaders.STALLED", 0.2)
    monkeypatch.setattr(ImageReader, "__getitem__", lambda *_: time.sleep(1))
    loader = evaluation_loader(open_split(str(image_folder), "", "val"), DATA_CONFIG, CPU, 1, 1, 0, 1)
    with pytest.raises(RuntimeError, match="timed out after 0.2 seconds"):
        next(iter(loader))


# digits


def written(root):
    """{split: {number of the image: digit}} of a folder of digits."""
    return {
        split: {int(path.stem): int(path.parent.name) for path in root.glob(f"{split}/*/*.png")}
        for split in ("train", "validation")
    }


def test_digits_are_held_out_alike_however_many_are_trained_on(tmp_path, monkeypatch):
    digits = load_digits()
    write_digits(tmp_path / "new" / "all")
    write_digits(tmp_path / "few", 5)
    monkeypatch.setattr("sys.argv", ["digits", str(tmp_path / "command"), "--train-per-class", "5"])
    monkeypatch.delitem(sys.modules, "vil.data.digits")
    runpy.run_module("vil.data.digits", run_name="__main__")
    everything, few = written(tmp_path / "new" / "all"), written(tmp_path / "few")
    assert written(tmp_path / "command") == few
    assert everything["train"].keys().isdisjoint(everything["validation"])
    assert {**everything["train"], **everything["validation"]} == dict(enumerate(digits.target.tolist()))
    assert few["validation"] == everything["validation"]
    assert len(few["validation"]) == math.ceil(1797 / 4) == 450
    held_out = list(everything["validation"].values())
    assert all(abs(held_out.count(digit) - (digits.target == digit).sum() / 4) < 1 for digit in range(10))
    assert sorted(few["train"].values()) == [digit for digit in range(10) for _ in range(5)]
    assert few["train"].items() <= everything["train"].items()
    number, digit = next(iter(few["train"].items()))
    pixels = np.asarray(Image.open(tmp_path / "few" / "train" / str(digit) / f"{number:04d}.png"))
    assert np.abs(pixels / 255 - digits.images[number] / 16).max() <= 0.5 / 255 + 1e-9
