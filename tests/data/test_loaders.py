"""Tests that loaders equal timm's transforms, and that either workers or the device augments images, as appropriate."""

import dataclasses
import tarfile
from collections import UserList
from types import SimpleNamespace

import pytest
import torch
from pictures import CPU, CUDA, DATA_CONFIG, PHOTO, by_timm, encode, joined, small_config, training_set
from PIL import Image
from timm.data import create_transform
from timm.data.dataset import IterableImageDataset

from vil.config import Config, ConfigError
from vil.data.device import decoding, encoded
from vil.data.device.loader import DeviceLoader
from vil.data.device.parameter_loader import ParameterLoader
from vil.data.host.loader import HostLoader
from vil.data.loaders import TrainingLoader, _say_once, evaluation_loader, training_loader
from vil.data.samplers import TrainingBatches
from vil.data.sources.splits import open_split, open_splits


@pytest.mark.parametrize(
    "options",
    [
        {}, dict(workers=2), dict(aug_repeats=3, batch_size=4), dict(rank=1, world_size=2), dict(scale=(0.5, 0.6)),
        dict(ratio=(2.0, 2.5)), dict(hflip=1.0), dict(aa=None), dict(aa=None, color_jitter=0.9),
        dict(aa=None, color_jitter=None), dict(aa="rand-m5-n3-p0.8-tweights"), dict(train_interpolation="bilinear"),
        dict(train_interpolation="random"),
    ],
    ids=lambda options: " ".join(options) or "defaults",
)  # fmt: skip
def test_an_image_is_augmented_by_timms_transform_with_its_seed(pictures, options):
    loader, keys = training_set(pictures, epoch=2, **options)
    images, targets = joined(loader)
    dataset = loader.dataset.dataset
    others = ["workers", "aug_repeats", "batch_size", "rank", "world_size"]
    of_transform = {name: value for name, value in options.items() if name not in others}
    expected, expected_targets, _ = by_timm(dataset, keys, **of_transform)
    assert torch.equal(images, expected)
    assert targets == expected_targets
    assert torch.equal(expected, by_timm(dataset, keys)[0]) == (not of_transform)  # transform options change images


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_evaluation_batches_equal_timms_transform_of_each_image(pictures, crop_mode):
    dataset = open_split(str(pictures), "", "validation")
    config = DATA_CONFIG | dict(crop_mode=crop_mode, input_size=(3, 16, 16), interpolation="bicubic")
    images, targets = joined(evaluation_loader(dataset, config, CPU, workers=0, batch_size=3, rank=1, world_size=2))
    paths = sorted((pictures / "val").glob("*/*"))[1::2]
    transform = create_transform(use_prefetcher=True, **config)
    expected = [torch.as_tensor(transform(Image.open(path).convert("RGB"))) for path in paths]
    assert torch.equal(images, torch.stack(expected))
    assert targets == [0, 0, 0, 0, 1, 1, 1, 1]


def test_synthetic_images_are_noise(image_folder):
    config = Config(synthetic=60, global_batch_size=8, num_classes=3)
    train, val, num_classes = open_splits(config)
    assert (len(train), len(val), num_classes) == (60, 3, 3)
    # one validation image per 25 training images, about as in ImageNet
    assert len(open_splits(Config(synthetic=101))[1]) == 5
    assert open_splits(Config(synthetic=1_281_167))[2] == 1000
    batches = TrainingBatches(60, config, 4, 0, 1)
    loader, other = (training_loader(train, config, DATA_CONFIG, CPU, batches, 3).images for _ in range(2))
    images, targets = joined(loader)
    assert (images.shape, targets) == ((56, 3, 12, 16), [0, 1, 0, 1] * 14)
    assert torch.equal(images, next(iter(other))[0].repeat(14, 1, 1, 1))
    assert 120 < images.float().mean() < 135
    assert (images.min() < 10) & (images.max() > 245)
    assert loader.description == "noise, kept on the device"
    loader = evaluation_loader(val, DATA_CONFIG, CPU, 0, 2, 0, 1)
    assert [len(images) for images, _ in loader] == [2, 1]
    assert loader.take_unreadable() == 0


@pytest.mark.parametrize("in_worker", [False, True])
def test_a_resumed_iterable_dataset_rereads_and_drops_the_images_of_earlier_steps(image_folder, in_worker):
    class Stream(list):
        dataset = SimpleNamespace(set_epoch=lambda epoch: epochs.append(epoch))

    epochs, batches = [], TrainingBatches(70, small_config(image_folder, batch_size=8), 8, 0, 1)
    stream = Stream((letter, letter.upper()) for letter in "abcdefgh")

    class Augmentation:
        def sample(self, count, height, width, epoch, position):
            return f"{epoch}-{position}"

        def __call__(self, images, targets, parameters):
            return images + parameters, targets

    augment = Augmentation()
    loader = TrainingLoader(stream, batches, augment, ParameterLoader(augment, batches, (2, 2), in_worker))
    for epoch in (3, 0):
        left = [(f"{c}{epoch}-{position}", c.upper(), position) for c, position in zip("efgh", (32, 40, 48, 56))]
        assert list(loader.epoch(epoch, first_step=2)) == left
    assert epochs == [3, 0]


def test_a_loader_may_be_empty(image_folder):
    """A loader is empty after the last step of an epoch, or on a rank without images in a small split."""
    config = small_config(image_folder)
    dataset = open_split(str(image_folder), "", "train")
    batches = TrainingBatches(len(dataset), config, 16, 0, 1)
    assert list(training_loader(dataset, config, DATA_CONFIG, CPU, batches, 4).epoch(0, batches.steps)) == []
    images = open_split(str(image_folder), "", "val")
    for rank, count in ((27, 1), (28, 0)):
        loader = evaluation_loader(images, DATA_CONFIG, CPU, 0, 4, rank, world_size=29)
        assert sum(len(batch) for batch, _ in loader) == count


# Tests of augmentation on the device or in workers


@pytest.fixture
def said(caplog, monkeypatch):
    """Simulate a GPU that decodes JPEGs, and return a function that returns the messages logged by loaders."""
    _say_once.cache_clear()
    monkeypatch.setattr("vil.data.plan.decoder_is_missing", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)

    def lines():
        return [record.getMessage() for record in caplog.records if record.name == "vil.data.loaders"]

    return lines


def loader_for_training(folder, device, dataset=None, **options):
    config = Config(data_dir=str(folder), global_batch_size=4, workers=0, **{"aug_repeats": 0, **options})
    if dataset is None:
        dataset = open_split(config.data_dir, "", "train", is_training=True)
    return training_loader(dataset, config, DATA_CONFIG, device, TrainingBatches(8, config, 4, 0, 1), 2).images


def loader_for_evaluation(folder, device, **options):
    return evaluation_loader(open_split(str(folder), "", "val"), DATA_CONFIG, device, 0, 4, 0, 1, **options).images


@pytest.mark.parametrize(
    ("device", "wanted", "kind"),
    [
        (CUDA, None, DeviceLoader), (CUDA, False, HostLoader),
        (CPU, None, HostLoader), (CPU, False, HostLoader), (CPU, True, DeviceLoader),
    ],
    ids=str,
)  # fmt: skip
def test_jpegs_are_augmented_on_a_gpu_by_default_and_on_a_cpu_on_request(
    photo_folder, said, device, wanted, kind, monkeypatch
):
    """JPEG files are augmented on a GPU unless augment_on_device is False, and on a CPU only if it is True.

    Small images are decoded by workers and need no preparation thread.
    """
    here = "in the training process"
    for make in (loader_for_training, loader_for_evaluation):
        for small, place in ((0, "and augmenting on the device"), (2**20, f"{here} and augmenting on the device")):
            monkeypatch.setattr(encoded, "SMALL", small)
            loader = make(photo_folder, device, augment_on_device=wanted)
            assert type(loader) is kind
            if kind is DeviceLoader:
                assert loader.plan.in_thread == (not small)
            assert loader.loader.pin_memory == (device == CUDA and kind is HostLoader)
            place = place if kind is DeviceLoader else f"and augmenting {here}"
            assert loader.description == f"no workers, decoding {place}"
    assert said() == []


def piece_bytes(dataset, batch_size, on_device=None):
    """Return the bytes of shared memory that a loader reserves per piece (images that a worker returns together)."""
    loader = evaluation_loader(dataset, DATA_CONFIG, CPU, 0, batch_size, 0, 1, on_device)
    return loader.images.plan.piece_bytes


def test_pieces_reserve_shared_memory_for_the_images_that_workers_have_augmented(photo_folder):
    folder = open_split(str(photo_folder), "", "val")
    assert piece_bytes(folder, 2) == 2 * 3 * 12 * 16
    assert piece_bytes(folder, 100) == 64 * 3 * 12 * 16
    assert piece_bytes(folder, 100, on_device=True) is None  # encoded images are sent without /dev/shm
    streaming = IterableImageDataset("", reader=UserList())
    streaming.set_loader_cfg = lambda num_workers: None
    assert piece_bytes(streaming, 100) == 100 * 3 * 12 * 16  # workers do not split batches into pieces


def test_a_loader_recommends_the_number_of_workers_that_the_cores_allow(photo_folder, said, monkeypatch):
    monkeypatch.setattr("vil.data.plan.default_workers", lambda device: 3)
    plan = loader_for_training(photo_folder, CUDA).plan
    assert plan.remedy == "--workers 3"
    assert dataclasses.replace(plan, workers=2).remedy == "--workers 3"
    assert "only for a slow disk, --workers 6" in dataclasses.replace(plan, workers=3).remedy
    assert "baseline JPEGs" in dataclasses.replace(plan, workers=3, sampler=None).remedy


@pytest.mark.parametrize(
    ("options", "missing", "reason"),
    [
        ({"aa": "augmix-m5"}, None, "AugMix"),
        ({}, "cuda cannot decode JPEG files", "cuda cannot decode JPEG files"),
    ],
)
def test_workers_augment_with_one_log_message_if_the_gpu_cannot(
    photo_folder, said, monkeypatch, options, missing, reason
):
    monkeypatch.setattr("vil.data.plan.decoder_is_missing", lambda device: missing)
    assert type(loader_for_training(photo_folder, CUDA, **options)) is HostLoader
    assert type(loader_for_evaluation(photo_folder, CUDA)) is (HostLoader if missing else DeviceLoader)
    (line,) = said()
    assert "instead of the GPU" in line
    assert reason in line
    with pytest.raises(ConfigError, match=f"augment_on_device.*{reason}"):
        loader_for_training(photo_folder, CUDA, augment_on_device=True, **options)
    _say_once.cache_clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    loader_for_training(photo_folder, CUDA, **options)
    assert said() == [line]


def test_workers_augment_a_split_of_other_formats_with_one_log_message(tmp_path, said):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(8):  # all files are named .jpg, but half of them are PNG files
            file = encode(PHOTO.resize((200, 150)), format="JPEG" if i < 4 else "PNG")
            (tmp_path / split / "a" / f"{i}.jpg").write_bytes(file)
    assert type(loader_for_training(tmp_path, CUDA)) is HostLoader
    assert type(loader_for_evaluation(tmp_path, CUDA)) is HostLoader
    assert said() == ["images are decoded and augmented by the workers instead of the GPU: most files are not JPEGs"]
    assert type(loader_for_training(tmp_path, CPU, augment_on_device=True)) is DeviceLoader
    for path in (tmp_path / "train" / "a").iterdir():  # workers decode small PNG images too
        path.write_bytes(encode(PHOTO, format="PNG"))
    assert type(loader_for_training(tmp_path, CUDA)) is DeviceLoader


def test_jpegs_in_a_tar_are_recognized_by_name(photo_folder, said, tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        for path in (photo_folder / "train").glob("*/*"):  # rename files to .JPEG, as in ImageNet
            tar.add(path, f"{path.parent.name}/{path.name.replace('.jpg', '.JPEG')}")
    loader = loader_for_training(tmp_path, CUDA)
    assert type(loader) is DeviceLoader
    assert loader.dataset.dataset.reader.tar_state.tf is None  # each worker opens its own file
    # the numbers of pixels of images inside a .tar are unknown
    assert loader_for_training(tmp_path, CUDA, aug_repeats=3).plan.fill_bytes is None


def test_workers_augment_iterable_datasets(photo_folder, said):
    streaming = IterableImageDataset("", reader=UserList())
    reason = "an iterable dataset has no access to images by index"
    with pytest.raises(ConfigError, match=f"augment_on_device cannot be used: {reason}"):
        loader_for_training(photo_folder, CUDA, streaming, augment_on_device=True)
    streaming.set_loader_cfg = lambda num_workers: None
    assert type(loader_for_training(photo_folder, CUDA, streaming)) is HostLoader
    assert said() == [f"images are decoded and augmented by the workers instead of the GPU: {reason}"]


@pytest.mark.parametrize("error", [ImportError("no decode_jpeg"), AttributeError("gone"), RuntimeError("a\nb" * 99)])
def test_device_decoding_is_detected_by_decoding_an_image(monkeypatch, error, device):
    decoding.decoder_is_missing.cache_clear()
    assert decoding.decoder_is_missing(device) is None
    decoding.decoder_is_missing.cache_clear()

    def fail(*_):
        raise error

    monkeypatch.setattr(decoding, "_decode_all", fail)
    reason = decoding.decoder_is_missing(device)
    assert reason == f"{device} cannot decode JPEG files: {repr(error)[:200]}"
    decoding.decoder_is_missing.cache_clear()
