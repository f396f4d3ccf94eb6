"""Tests of the device loader: decoded and transformed images equal timm's, and a thread prefetches batches."""

import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pictures import DATA_CONFIG, PHOTO, by_timm, damage_tables, encode, joined, training_set
from PIL import Image
from timm.data import create_transform

from vil.data import plan
from vil.data.device import cache, encoded, preparation
from vil.data.device import loader as device_loader
from vil.data.device.decoded import DecodedImages
from vil.data.device.decoding import decode
from vil.data.device.encoded import EncodedImage, collate_encoded, join_pieces
from vil.data.device.loader import DeviceLoader
from vil.data.device.transform_parameters import TransformParameters
from vil.data.loaders import evaluation_loader
from vil.data.samplers import TrainingBatches
from vil.data.sources.images import UNREADABLE
from vil.data.sources.splits import open_split

SIZE = dict(input_size=(3, 48, 40))


@pytest.fixture
def files(photo_folder, tmp_path):
    shutil.copytree(photo_folder, tmp_path / "files")
    return tmp_path / "files"


def test_joined_pieces_equal_the_batch_of_their_samples():
    parameters = TransformParameters((1, 2, 3, 4), (5, 6), (7, 8), True, [("Invert", ())])
    encoded_image = EncodedImage(3, 5, b"abc", (4, 6), (9, 10), parameters)
    image = torch.zeros(3, 2, 2, dtype=torch.uint8)
    samples = [(0, image, 5), (1, encoded_image, 6), (2, image, 7)]
    whole, pieces = collate_encoded(samples, (2, 2)), [collate_encoded([sample], (2, 2)) for sample in samples]
    for name, array in vars(join_pieces([pieces])).items():
        if name not in ("contents", "finished"):
            np.testing.assert_array_equal(array, getattr(whole, name), strict=True)
    joined = join_pieces([pieces, pieces[::-1]])
    assert joined.targets.tolist() == [5, 6, 7] * 2
    assert joined.files["row"].tolist() == [1, 4]
    assert joined.finished_rows.tolist() == [0, 2, 5, 3]


def test_a_worker_reads_adjacent_copies_of_a_file_once(files, monkeypatch):
    loader, _ = on_device(files, torch.device("cpu"), aug_repeats=3, global_batch_size=12)
    reader, cache = loader.dataset, loader.cache
    tasks = cache.tasks([(4, 1), (4, 2), (7, 3), (7, 4), (4, 5)], [3, 0, 1, 2, 4])
    expected = [sample for task in tasks for sample in reader.__getitems__(np.array([task]))]
    contents = []
    monkeypatch.setattr(reader, "_content", lambda i, read=reader._content: contents.append(i) or read(i))
    samples = reader.__getitems__(tasks)
    assert contents == [4, 7, 4]
    assert [bool(image.data) for _, image, _ in samples] == [True, False, True, False, True]
    for (row, image, target), (own_row, own_image, own_target) in zip(samples, expected, strict=True):
        assert (row, target, image.size, image.version) == (own_row, own_target, own_image.size, own_image.version)
        assert image.parameters == own_image.parameters


def test_a_batch_that_is_decoded_at_once_is_not_copied(files, monkeypatch):
    loader, _ = on_device(files, torch.device("cpu"))
    tasks = loader.cache.tasks([(4, 1), (4, 2), (7, 3)], [2, 0, 1])
    batch = join_pieces([[collate_encoded(loader.dataset.__getitems__(tasks), loader.prepare.sampler.size)]])
    transformed = []
    real = loader.prepare._transform
    monkeypatch.setattr(loader.prepare, "_transform", lambda *given: transformed.append(real(*given)) or transformed[0])
    images, _, _ = loader.prepare(batch)
    assert images is transformed[0]


def on_device(folder, device, rank=0, world_size=1, **options):
    options = dict(augment_on_device=True, global_batch_size=24) | SIZE | options
    return training_set(folder, device, rank, world_size, **options)


@pytest.mark.parametrize(
    "options",
    [
        {}, dict(SMALL=0, PIECE=7, aug_repeats=3, seed=9), dict(SMALL=2**24, TOGETHER=2**30, global_batch_size=12),
        dict(aa=None), dict(aa="3a", SMALL=2**24, TOGETHER=1), dict(aa="original"),
        dict(workers=2, train_interpolation="bilinear", hflip=0.0), dict(aa=None, color_jitter=0.9, hflip=1.0),
        dict(aa="rand-m5-n3-p0.8-tweights"), dict(scale=(0.5, 0.6), ratio=(2.0, 2.5)),
    ],
    ids=lambda options: " ".join(options) or "defaults",
)  # fmt: skip
def test_batches_equal_timms_transform_of_each_image(photo_folder, device, options, monkeypatch):
    options = dict(options)
    # workers decode images of at most SMALL pixels
    monkeypatch.setattr(encoded, "SMALL", options.pop("SMALL", encoded.SMALL))
    # Batches are transformed together if they have at most PIXELS_TOGETHER pixels in all.
    monkeypatch.setattr(plan, "PIXELS_TOGETHER", options.pop("TOGETHER", 2**20))
    # A worker returns at most PIECE images at a time.
    monkeypatch.setattr(plan, "PIECE", options.pop("PIECE", plan.PIECE))
    loader, keys = on_device(photo_folder, device, **options)
    images, targets = joined(loader)
    assert len(images) == 48
    not_of_transform = "workers", "aug_repeats", "seed", "global_batch_size"
    of_transform = {name: value for name, value in options.items() if name not in not_of_transform}
    expected, expected_targets, broken = by_timm(loader.dataset.dataset, keys, **SIZE, **of_transform)
    assert targets == expected_targets
    differences = (images.float() - expected).abs().mean(dim=(1, 2, 3))
    # Decoding and resizing round differently, which can move a pixel across an operation's threshold.
    exact, nearly_all, most = (0.03, 0.3, 0.3) if device.type == "cpu" else (0.2, 1.0, 6.0)
    assert differences.median() < exact
    assert differences.quantile(0.9) < nearly_all
    assert differences.max() < most
    assert loader.dataset.unreadable.count == broken >= 2


@pytest.mark.parametrize("size", [(1, 1), (1, 30), (3, 2)], ids=str)
def test_tiny_images_are_cropped_like_timms(files, device, size):
    for path in (files / "train").glob("*/1*.jpg"):
        path.write_bytes(encode(PHOTO.resize(size)))
        os.utime(path, ns=(0, 2**63))  # a time that overflows a signed 64-bit number of nanoseconds
    loader, keys = on_device(files, device)
    images, targets = joined(loader)
    expected, expected_targets, _ = by_timm(loader.dataset.dataset, keys, **SIZE)
    assert targets == expected_targets
    assert (images.float() - expected).abs().mean(dim=(1, 2, 3)).median() < 0.2


def test_a_file_that_the_device_rejects_does_not_affect_the_other_files(device):
    files = [encode(PHOTO), damage_tables(encode(PHOTO)), encode(PHOTO.convert("L"))]
    images = decode([torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files], device)
    assert [image is None or tuple(image.shape) for image in images] == [(3, 40, 60), True, (3, 40, 60)]


def test_batches_without_jpegs_equal_those_of_the_host_loader(pictures, device, monkeypatch):
    monkeypatch.setattr(encoded, "SMALL", 0)
    of_device, of_host = (
        joined(evaluation_loader(open_split(str(pictures), "", "val"), DATA_CONFIG, device, 0, 4, 0, 1, on_device))
        for on_device in (True, False)
    )
    assert torch.equal(of_device[0], of_host[0])
    assert of_device[1] == of_host[1]


def test_images_do_not_depend_on_the_world_size(photo_folder, device):
    images, targets = joined(on_device(photo_folder, device)[0])
    shares = [joined(on_device(photo_folder, device, rank, 12)[0]) for rank in range(12)]
    order = [(rank, 2 * step + i) for step in range(2) for rank in range(12) for i in range(2)]
    assert [shares[rank][1][i] for rank, i in order] == targets
    # A few pixels may differ, because the batch composition may change the order of summation.
    different = images != torch.stack([shares[rank][0][i] for rank, i in order])
    assert different.float().mean() < 1e-3


@pytest.mark.parametrize(
    "options",
    [{}, {"interpolation": "bicubic"}, {"crop_mode": "squash"}, {"crop_pct": 1.2}, {"input_size": (3, 48, 40)}],
    ids=str,
)
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_images_equal_timms_transform_of_each_image(photo_folder, device, options, workers):
    """Evaluation images equal timm's evaluation transform up to rounding, for JPEG files of several encodings and for
    PNG files. Unreadable files are counted and have the target UNREADABLE.
    """
    config = DATA_CONFIG | dict(input_size=(3, 48, 48), crop_pct=0.875) | options
    dataset = open_split(str(photo_folder), "", "train")
    loader = evaluation_loader(dataset, config, device, workers, 10, 1, 2, augment_on_device=True)
    assert isinstance(loader.images, DeviceLoader)
    images, targets = joined(loader)
    indices = range(1, len(dataset), 2)
    assert len(images) == len(indices)
    transform, broken, differences = create_transform(use_prefetcher=True, **config), 0, []
    for image, target, i in zip(images, targets, indices):
        try:
            expected = Image.open(Path(dataset.reader.root) / dataset.filename(i)).convert("RGB")
        except OSError:
            broken += 1
            assert target == UNREADABLE
            continue
        assert target == "ab".index(dataset.filename(i)[0])
        differences.append((image - torch.as_tensor(transform(expected)).float()).abs())
    assert broken == loader.take_unreadable() >= 2
    # In a resized image of few pixels, many values lie exactly between two grey levels and may round to either level.
    mean, largest = (0.1, 2) if device.type == "cpu" else (0.2, 8)
    assert max(levels.mean() for levels in differences) < mean
    assert max(levels.max() for levels in differences) <= largest


# Tests of the cache of decoded images


def epochs(folder, device, count=3, first=0, first_step=0, **options):
    """Return the batches of `count` epochs, and the loader. The first epoch starts at the step `first_step`."""
    loader, _ = on_device(folder, device, **options)
    found = []
    for epoch in range(first, first + count):
        loader.batches.set_epoch(epoch, first_step if epoch == first else 0)
        found += [(images.cpu(), targets.tolist()) for images, targets in loader]
    return found, loader


def same(found, expected):
    return len(found) == len(expected) > 0 and all(
        torch.equal(images, other) and targets == of_other
        for (images, targets), (other, of_other) in zip(found, expected)
    )


@pytest.mark.parametrize("options", [{}, dict(workers=2), dict(aug_repeats=3, batch_size=6)], ids=str)
def test_cached_images_equal_newly_decoded_images(files, device, monkeypatch, options):
    """Cached images equal newly decoded images, also in a run that resumes in the middle of an epoch."""
    with_memory, _ = epochs(files, device, **options)
    resumed, _ = epochs(files, device, count=2, first=1, first_step=1, **options)
    assert same(resumed, with_memory[-len(resumed) :])
    monkeypatch.setattr(cache, "HOST_BYTES", 0)
    monkeypatch.setattr(cache, "SHARE", 2**50)
    without, loader = epochs(files, device, **options)
    assert not loader.cache.images.are_present.any()
    assert same(with_memory, without)


def overwrite_unnoticed(paths):
    """Overwrite files with zeros, without changing their sizes and times."""
    for path in paths:
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("options", [{}, dict(workers=2), dict(aug_repeats=3, batch_size=6)], ids=str)
def test_a_cached_image_is_not_read_again(files, device, options):
    first, loader = epochs(files, device, count=1, **options)
    # 0.jpg stays intact, because it replaces an unreadable image
    overwrite_unnoticed((files / "train").glob("*/[1-9]*.jpg"))
    loader.batches.set_epoch(0)
    assert same([(images.cpu(), targets.tolist()) for images, targets in loader], first)


@pytest.mark.parametrize(("seconds", "read"), [(-1, range(8, 9)), (10, range(46, 49))])
def test_repeated_augmentation_fills_the_cache_before_the_first_batch(
    files, device, monkeypatch, caplog, seconds, read
):
    """With repeated augmentation, a loader fills the cache for a limited time before the first batch.

    An unreadable image is counted only when a batch contains the image.
    """
    monkeypatch.setattr(device_loader, "FILL_SECONDS", seconds)
    monkeypatch.setattr(plan, "PIECE", 8)
    loader, _ = on_device(files, device, aug_repeats=2)
    monkeypatch.setattr(loader, "gathered", lambda: iter(()))
    assert list(loader) == []
    assert caplog.messages[0].endswith("read (about 0.0027 GiB)")  # decoded images take 3 bytes per pixel
    monkeypatch.setattr(loader, "_loaded", None)
    assert list(loader) == []  # the cache is filled only once
    assert loader.cache.images.are_present.sum() in read
    assert loader.dataset.unreadable.count == 0
    keys = [key for batch in loader.batches for key in batch]
    assert len(keys) == 48  # filling the cache does not change the images of an epoch
    without, _ = on_device(files, device)
    monkeypatch.setattr(without, "gathered", lambda: iter(()))
    assert list(without) == []
    assert not without.cache.images.are_present.any()


def of_length(jpeg, length=40_000):
    """Return a JPEG with a comment that makes the file `length` bytes long."""
    count = length - len(jpeg) - 4
    return jpeg[:2] + b"\xff\xfe" + (count + 2).to_bytes(2, "big") + bytes(count) + jpeg[2:]


@pytest.mark.parametrize("unchanged", ["nothing", "length", "time"])
def test_a_changed_file_is_read_again(files, device, unchanged):
    paths = sorted((files / "train").glob("*/1*.jpg"))
    for path in paths:
        path.write_bytes(of_length(path.read_bytes()))
    _, loader = epochs(files, device)
    for i, path in enumerate(paths):
        content = encode(PHOTO.rotate(180).resize((300, 200) if i % 2 else (50, 40)))
        before = path.stat().st_mtime_ns
        path.write_bytes(of_length(content) if unchanged == "length" else content)
        os.utime(path, ns=(0, before + (unchanged != "time")))
    expected, _ = epochs(files, device)
    for epoch in range(3):
        loader.batches.set_epoch(epoch)
        again = [(images.cpu(), targets.tolist()) for images, targets in loader]
        assert same(again, expected[2 * epoch : 2 * epoch + 2])


@pytest.mark.parametrize(("room", "stays"), [(500_000, False), (10_000_000, True)])  # decoded images take 2.5 MB
def test_images_are_cached_only_if_all_fit_and_the_cache_is_logged(files, device, monkeypatch, caplog, room, stays):
    monkeypatch.setattr(cache, "HOST_BYTES", room)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (cache.SHARE * room, None))
    _, loader = epochs(files, device, count=1)
    assert loader.cache.images.are_present.any() == stays
    line = f"52 images stay decoded on {device} after the first read (about 0.0023 GiB)"
    assert [message for message in caplog.messages if "decoded on" in message] == [line] * stays
    caplog.clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")  # only rank 0 logs the line
    assert cache.DecodedCache(3, device).reserve(1)
    assert caplog.messages == []
    assert [cache.DecodedCache(room + more, device).reserve(1) for more in (0, 1)] == [True, False]
    few = cache.DecodedCache(3, device, room=2 * 48)
    images = DecodedImages.of([torch.zeros(3, 4, 4, dtype=torch.uint8)] * 3)
    few.add(np.arange(3), images, np.zeros(3), np.zeros((3, 2)))
    assert few.images.are_present.tolist() == [True, True, False]


def test_repeated_evaluations_read_files_once(files, device):
    loader = evaluation_loader(open_split(str(files), "", "val"), DATA_CONFIG, device, 0, 3, 0, 1, True, is_reused=True)
    first = joined(loader)
    overwrite_unnoticed((files / "val").glob("*/[0-9].jpg"))
    again = joined(loader)
    assert torch.equal(first[0], again[0])
    assert first[1] == again[1]
    once = evaluation_loader(open_split(str(files), "", "val"), DATA_CONFIG, device, 0, 3, 0, 1, True)
    assert once.images.cache.room == 0


# Tests of the device loader's thread


def test_repeated_copies_of_a_file_are_decoded_once(photo_folder, device, monkeypatch):
    monkeypatch.setattr(cache, "HOST_BYTES", 0)
    monkeypatch.setattr(cache, "SHARE", 2**50)
    counts = []
    monkeypatch.setattr(preparation, "decode", lambda files, on: counts.append(len(files)) or decode(files, on))
    loader, keys = on_device(photo_folder, device, aug_repeats=3)
    images, _ = joined(loader)
    for count, first in zip(counts, (0, 24), strict=True):
        assert len({index for index, _ in keys[first : first + 24]}) == 8
        assert count <= 8
    assert torch.equal(images, joined(on_device(photo_folder, device, aug_repeats=3, batch_size=6)[0])[0])
    monkeypatch.setattr(preparation, "PIXELS_AT_ONCE", 10_000)  # decode few files at a time
    assert torch.equal(images, joined(on_device(photo_folder, device, aug_repeats=3)[0])[0])


@pytest.fixture
def six_batches(photo_folder, device, monkeypatch):
    loader, _ = on_device(photo_folder, device, global_batch_size=4)
    monkeypatch.setattr(TrainingBatches, "steps", 6)
    loader.batches.num_images = 24
    return loader


def test_the_thread_prefetches_at_most_two_batches(six_batches, monkeypatch):
    begun, prepare = [], six_batches.prepare
    monkeypatch.setattr(six_batches, "prepare", lambda batch: begun.append(None) or prepare(batch))
    for taken, _ in enumerate(six_batches, start=1):
        time.sleep(0.05)
        assert taken <= len(begun) <= taken + 2
    assert taken == len(begun) == 6


def test_waiting_times_for_the_model_and_the_thread_are_measured(six_batches, monkeypatch):
    slow = SimpleNamespace(synchronize=lambda: time.sleep(0.05))
    monkeypatch.setattr(DeviceLoader, "_record_use", lambda _: slow)
    prepare = six_batches.prepare
    monkeypatch.setattr(six_batches, "prepare", lambda batch: time.sleep(0.02) or prepare(batch))
    begin = time.perf_counter()
    list(six_batches)
    for_model, for_thread = six_batches.waits
    assert for_model > 2 * 0.05  # the last three batches wait until the model has used earlier ones
    assert for_thread > 5 * 0.02
    assert for_model + for_thread < time.perf_counter() - begin


def test_a_batch_is_prepared_after_the_model_has_used_the_third_batch_before_it(six_batches, monkeypatch):
    taken, noted, prepare = [], [], six_batches.prepare

    def use_of_last_batch(_):
        name = f"wait for the use of {len(taken) - 1}"
        return SimpleNamespace(synchronize=lambda: noted.append(name))

    monkeypatch.setattr(DeviceLoader, "_record_use", use_of_last_batch)
    monkeypatch.setattr(six_batches, "prepare", lambda batch: noted.append("prepare") or prepare(batch))
    for batch in six_batches:
        taken.append(batch)
    waits = (name for number in range(3) for name in (f"wait for the use of {number}", "prepare"))
    assert noted == ["prepare", "prepare", "prepare", *waits]


def test_an_epoch_that_is_stopped_early_leaves_no_thread(six_batches):
    threads = set(threading.enumerate())
    batches = iter(six_batches)
    next(batches)
    assert len(set(threading.enumerate()) - threads) >= 1
    batches.close()
    assert set(threading.enumerate()) <= threads


def test_an_exception_in_the_thread_is_raised_with_its_traceback(six_batches, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("of the code")

    monkeypatch.setattr(preparation, "crop_resize_flip", fail)
    with pytest.raises(ZeroDivisionError, match="of the code") as caught:
        list(six_batches)
    assert [entry.name for entry in caught.traceback][-3:] == ["_decode_and_transform", "_transform", "fail"]
