"""Tests of failing disks and mounts: the run retries, or saves a checkpoint and stops, instead of skipping images."""

import errno
import functools
import io
import json
import os
import re
import resource
import shutil
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import assert_same, before
from PIL import Image
from processes import call, in_processes, run, script, train_command

from vil import checkpoint
from vil.checkpoint import CheckpointError
from vil.cli import predict, viz
from vil.config import Config, ConfigError
from vil.data.device.cache import DecodedCache
from vil.data.device.decoded import DecodedImages
from vil.data.loaders import evaluation_loader, training_loader
from vil.data.samplers import TrainingBatches
from vil.data.sources.images import read_image
from vil.data.sources.splits import open_split, open_splits
from vil.fault_tolerance import machine_errors
from vil.fault_tolerance.machine_errors import MachineError
from vil.training.best import BestCheckpoint
from vil.training.history import best_row
from vil.training.resumption import find_resumed
from vil.training.update import Update
from vil.weight_files import BrokenCheckpointError

CPU = torch.device("cpu")
DATA_CONFIG = dict(
    input_size=(3, 32, 32), interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, crop_mode="center"
)  # fmt: skip


# Reads of the file FAILING fail with EIO, like reads of a broken disk.
FAILING = Path("/sys/devices/system/cpu/cpu0/power/autosuspend_delay_ms")


@pytest.fixture(autouse=True)
def short_back_offs(monkeypatch):
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0.01, 0.02))


def retry_briefly():
    machine_errors.BACK_OFFS = (0.01, 0.02)


@pytest.fixture
def data(image_folder, tmp_path):
    """Return a copy of the image folder, so that a test may change its files."""
    return shutil.copytree(image_folder, tmp_path / "data")


def break_disk(paths):
    """Replace each file by a link to a file whose reads fail with EIO."""
    for path in paths:
        path.unlink()
        path.symlink_to(FAILING)


def mend_disk(contents):
    """Restore the content of each file."""
    for path, content in contents.items():
        (intact := path.with_name(f".{path.name}")).write_bytes(content)
        intact.replace(path)


def break_in_step(step, paths, back_offs=(0.01, 0.02)):
    machine_errors.BACK_OFFS = back_offs
    before(Update, "__call__", functools.partial(break_disk, paths), step)


def contents_of(folder):
    if not FAILING.exists():
        pytest.skip("this system has no file whose reads fail")
    return {path: path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_cannot_read_images_saves_its_last_step_and_stops(start, data, undisturbed, workers):
    intact = contents_of(data / "train")
    options = dict(data_dir=str(data), workers=workers, checkpoint_interval=None)
    stopped = start(1, prepare=functools.partial(break_in_step, 3, [*intact]), **options)
    assert stopped.wait() == [1]
    said = stopped.said()
    assert "Traceback" not in said
    assert re.search(r"cannot read \S*/train/\S*: Input/output error", said)
    saved = checkpoint.Checkpoint(stopped.folder / "last.pt").training_state()
    assert f"holds step {len(saved['progress']['losses'])} of epoch {len(saved['history']) + 1}" in said
    mend_disk(intact)
    assert_same(start(1, **options).finished(), undisturbed(1).result())


def test_all_ranks_save_and_stop_if_one_rank_cannot_read_images(start, data, undisturbed):
    intact = contents_of(data / "train" / "dog")
    options = dict(data_dir=str(data), checkpoint_interval=None)
    two = start(2, prepare=functools.partial(break_in_step, 3, [*intact]), **options)
    assert two.wait() == [1, 1]
    assert "has died" not in two.said()  # no rank exits before the others
    assert two.said().count("stopped because images could not be read") == 1
    mend_disk(intact)
    assert_same(start(2, **options).finished(), undisturbed(2).result())


def test_an_evaluation_that_failed_to_read_images_is_repeated_after_resuming(start, data, undisturbed):
    intact = contents_of(data / "val" / "ant")
    options = dict(data_dir=str(data), checkpoint_interval=None)
    one = start(1, prepare=functools.partial(break_in_step, 3, [*intact]), **options)
    assert one.wait() == [1]
    stopped = one.result()
    assert (stopped["epoch"], len(stopped["losses"])) == (0, 8)
    assert not (one.folder / "best.pt").exists()
    mend_disk(intact)
    assert_same(start(1, **options).finished(), undisturbed(1).result())


def test_a_run_retries_until_the_disk_recovers(start, data, undisturbed):
    intact = contents_of(data / "train" / "dog")
    one = start(1, prepare=functools.partial(break_in_step, 3, [*intact], (0.01,) * 3000), data_dir=str(data))
    while not all(path.is_symlink() for path in intact):
        assert one.is_running()
    time.sleep(0.5)  # wait until the run reads a broken file
    assert one.is_running()
    mend_disk(intact)
    assert_same(one.finished(), undisturbed(1).result())


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOENT, errno.EMFILE])
def test_io_errors_are_machine_errors_and_decoder_errors_are_not(number):
    assert machine_errors.is_machine_error(OSError(number, os.strerror(number)))
    assert not machine_errors.is_machine_error(OSError(errno.EINVAL, os.strerror(errno.EINVAL)))
    assert not machine_errors.is_machine_error(OSError("truncated"))  # decoders raise OSError without an errno


def read_without(rank, path, what):
    """Read an image without permissions or with too few file descriptors, and return the error's message."""
    os.chdir(path.parent)
    if what == "permission":
        path.parent.chmod(0o755)
        path.chmod(0)
        if os.geteuid() == 0:
            os.seteuid(65534)  # drop root's rights, because root could read the file without permission
    else:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        read_image(path.name)
    except MachineError as error:
        return str(error)
    finally:
        if what == "descriptors":
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("what", "reason"), [("permission", "Permission denied"), ("descriptors", "Too many open files")]
)
def test_an_image_without_read_permission_is_reported_with_the_reason(tmp_path, what, reason):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (ended,) = in_processes(1, read_without, tmp_path / "a.png", what)
    assert re.search(rf"^cannot read a.png: {reason}", ended.value or ""), ended


def write_shards(folder):
    """Write two splits with one shard of eight images each, and return a config that reads them."""
    splits = {}
    Image.new("RGB", (32, 24)).save(image := io.BytesIO(), "JPEG")
    for split in ("train", "validation"):
        with tarfile.open(folder / f"{split}-0.tar", "w") as tar:
            for i in range(8):
                for suffix, content in {"jpg": image.getvalue(), "cls": b"%d" % (i % 2)}.items():
                    member = tarfile.TarInfo(f"{i}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        splits[split] = dict(name=split, filenames=[f"{split}-0.tar"], num_samples=8, shard_lengths=[8])
    (folder / "_info.json").write_text(json.dumps(dict(splits=splits)))
    options = dict(dataset="wds/x", num_classes=2, global_batch_size=8, workers=0, aug_repeats=0, epochs=1)
    return Config(data_dir=str(folder), **options)


def test_validation_fails_with_one_line_if_an_image_cannot_be_read(image_folder, uninterrupted, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    (data / "val" / "bee" / "1.png").unlink()
    (data / "val" / "bee" / "1.png").symlink_to("/missing/mount/1.png")
    words = ["--checkpoint", str(uninterrupted / "run" / "best.pt"), "--data-dir", str(data), "--workers", "1"]
    ended = run([*script("validate.py"), *words, "--split", "val"], check=False)
    assert ended.returncode == 1
    assert "bee/1.png" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_evaluating_only_unlabelled_samples_fails(image_folder, uninterrupted, tmp_path):
    image, data = next((image_folder / "val").rglob("*.png")), tmp_path / "data"
    data.mkdir()
    with tarfile.open(data / "val-0.tar", "w") as tar:
        tar.add(image, "0.png")
        (tmp_path / "label").write_text("-1")
        tar.add(tmp_path / "label", "0.cls")
    splits = dict(val=dict(name="val", filenames=["val-0.tar"], shard_lengths=[1], num_samples=1))
    (data / "_info.json").write_text(json.dumps(dict(splits=splits)))
    words = ["--checkpoint", str(uninterrupted / "run" / "best.pt"), "--data-dir", str(data), "--dataset", "wds/x"]
    ended = run([*script("validate.py"), *words, "--workers", "0", "--split", "val"], check=False)
    assert ended.returncode == 1
    assert f"no image of the split 'val' of {data} has a class label" in ended.stderr


def test_evaluating_only_unreadable_images_fails(image_folder, uninterrupted, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    for file in (data / "val").rglob("*.png"):
        file.write_bytes(b"broken")
    best = uninterrupted / "run" / "best.pt"
    words = ["--checkpoint", str(best), "--data-dir", str(data), "--workers", "1", "--split", "val"]
    ended = run([*script("validate.py"), *words], check=False)
    assert ended.returncode == 1
    assert f"no image of the split 'val' of {data} can be read" in ended.stderr
    assert "top-1" not in ended.stdout
    ended = run(train_command(tmp_path, data), check=False)
    assert ended.returncode == 1
    assert "no image of the validation split can be read" in ended.stderr
    assert len(checkpoint.Checkpoint(tmp_path / "run" / "last.pt").training_state()["progress"]["losses"]) > 0


def test_dangling_links_are_rejected_at_the_start(image_folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    for name in ("bee/99.png", "wasp"):  # an image and a class folder are dangling links
        (link := data / "train" / name).symlink_to(tmp_path / "missing" / "mount")
        with pytest.raises(ConfigError, match=f"links in .* have no target, such as .*{name}.*: mount the disk"):
            open_split(str(data), "", "train")
        link.unlink()
    open_split(str(data), "", "train")


def test_a_missing_file_raises_at_once_and_a_failing_disk_raises_a_machine_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "missing.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    intact = contents_of(tmp_path)
    break_disk(intact)
    with pytest.raises(MachineError, match=r"^cannot read .*a.png: Input/output error"):
        read_image(tmp_path / "a.png")
    mend_disk(intact)
    assert read_image(tmp_path / "a.png").size == (8, 8)


def read_without_an_interpreter(rank, path):
    retry_briefly()
    sys.executable = "/bin/false"
    try:
        read_image(path)
    except MachineError as error:
        return str(error)


def test_a_sandbox_that_does_not_start_raises_a_machine_error(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif")
    (ended,) = in_processes(1, read_without_an_interpreter, tmp_path / "a.gif")
    assert re.search(r"cannot read .*a.gif: .*does not start", ended.value or ""), ended


def lose_folder(path):
    """Move the file's folder away, as if the file system had been unmounted."""
    path.parent.rename(path.parent.with_name("elsewhere"))


def break_file(path):
    break_disk(contents_of(path.parent).keys() & {path})


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("fail", "reason"), [(lose_folder, "No such file"), (break_file, "Input/output error")])
def test_an_io_error_in_a_shard_raises_a_machine_error(tmp_path, split, fail, reason):
    pytest.importorskip("webdataset")
    (data := tmp_path / "data").mkdir()
    config = write_shards(data)
    train, val, _ = open_splits(config)
    if split == "train":
        batches = TrainingBatches(len(train), config, 8, 0, 1)
        loader = training_loader(train, config, DATA_CONFIG, CPU, batches, 2).epoch(0)
    else:
        loader = evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1)
    fail(data / f"{split}-0.tar")
    with pytest.raises(MachineError, match=rf"^cannot read .*data/.*{reason}[^\n]*$"):
        list(loader)


def test_a_listed_shard_that_is_missing_is_logged_and_the_other_shards_are_read(tmp_path, capfd, caplog):
    pytest.importorskip("webdataset")
    config = write_shards(tmp_path)
    info = json.loads((tmp_path / "_info.json").read_text())
    info["splits"]["validation"]["filenames"].append("validation-1.tar")
    (tmp_path / "_info.json").write_text(json.dumps(info))
    loader = evaluation_loader(open_splits(config)[1], DATA_CONFIG, CPU, 0, 4, 0, 1)
    assert sum(len(targets) for _, targets in loader) == 8
    assert "validation-1.tar" in caplog.text + capfd.readouterr().err


def test_an_io_error_in_a_tar_file_raises_a_machine_error(image_folder, tmp_path):
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        tar.add(image_folder / "val", "val")
    loader = evaluation_loader(open_split(str(tmp_path), "", "val"), DATA_CONFIG, CPU, 0, 4, 0, 1)
    batches = iter(loader)
    next(batches)  # from now on, the tar file is open
    folder = os.open(tmp_path, os.O_RDONLY)
    there = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    opened = [int(fd) for fd, path in there.items() if path == str(tmp_path / "val.tar")]
    for descriptor in opened:
        os.dup2(folder, descriptor)  # reads of this descriptor now fail with EISDIR
    os.close(folder)
    assert opened
    with pytest.raises(MachineError, match=r"^cannot read .*: Is a directory[^\n]*$"):
        list(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_io_error_on_the_device_path_raises_a_machine_error(image_folder, tmp_path, workers):
    shutil.copytree(image_folder, data := tmp_path / "data")
    dataset = open_split(str(data), "", "train", is_training=True)
    config = Config(global_batch_size=4, workers=workers, aug_repeats=0, augment_on_device=True)
    batches = TrainingBatches(len(dataset), config, 4, 0, 1)
    loader = training_loader(dataset, config, DATA_CONFIG, CPU, batches, 4)
    lose_folder(data / "train")
    with pytest.raises(MachineError, match=r"^cannot read .*data/train/.*: No such file[^\n]*$"):
        list(loader.images)


@pytest.mark.parametrize("command", [predict, viz], ids=["predict", "viz"])
def test_a_command_fails_with_one_line_on_an_io_error(uninterrupted, image_folder, tmp_path, command):
    (folder := tmp_path / "images").mkdir()
    shutil.copy(image_folder / "val" / "ant" / "1.png", folder)
    (folder / "lost.png").symlink_to("/missing/mount/1.png")
    words = ["--images", str(folder), "--out", str(tmp_path / "out")] if command is viz else [str(folder)]
    words = ["--checkpoint", uninterrupted / "run" / "best.pt", *words]
    with pytest.raises(SystemExit, match=r"^error: cannot read .*lost.png.*: No such file[^\n]*mount the disk[^\n]*$"):
        call(command.main, *words)


def open_without_permission(rank, folder):
    """Open a split that has a class folder without permissions, and return the error's message."""
    os.chdir(folder)
    retry_briefly()
    if os.geteuid() == 0:
        os.seteuid(65534)  # drop root's rights, because root could list the folder without permission
    try:
        open_split(".", "", "train")
    except ConfigError as error:
        return str(error)


def test_a_folder_that_cannot_be_listed_is_an_error(data):
    """Opening a split fails if a class folder cannot be listed. Otherwise the class would silently be skipped."""
    for folder in (data, *data.glob("*/"), *data.glob("*/*/")):
        folder.chmod(0o755 if folder.name != "bee" else 0)
    (ended,) = in_processes(1, open_without_permission, data)
    for folder in data.glob("*/bee"):
        folder.chmod(0o755)
    reason = "cannot open the split 'train' of .*Permission denied.*train/bee"
    assert re.search(reason, ended.value or ""), ended


PARTS = dict(config={}, history=[], progress={}, scheduler={}, state_dict={}, optimizer={})


def test_a_checkpoint_with_an_io_error_is_not_renamed_as_broken(tmp_path, monkeypatch):
    for epoch in (1, 2):
        checkpoint.save_checkpoint(PARTS | {"epoch": epoch}, tmp_path / "last.pt", tmp_path / "previous.pt")
    intact = contents_of(tmp_path)
    break_disk([tmp_path / "last.pt"])
    with pytest.raises(CheckpointError, match=r"failed to read .*last.pt: Input/output error") as refused:
        find_resumed("auto", tmp_path)
    assert not isinstance(refused.value, BrokenCheckpointError)
    assert {"last.pt", "previous.pt"} <= {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0.01,) * 3000)
    threading.Timer(0.1, mend_disk, [intact]).start()
    assert find_resumed("auto", tmp_path)[1]["epoch"] == 2


def rows(*epochs):
    return [dict(epoch=i, eval_top1=top1, **count) for i, (top1, count) in enumerate(epochs, start=1)]


def test_an_epoch_evaluated_on_fewer_images_is_not_the_best():
    full, third = dict(eval_images=900), dict(eval_images=300)
    assert best_row(rows((50, full), (100, third), (40, full)))["epoch"] == 1
    assert best_row(rows((100, third), (50, full), (40, full)))["epoch"] == 2
    # history rows of old runs lack eval_images
    assert best_row(rows((50, {}), (60, full), (60, full), (55, {})))["epoch"] == 3


def lose(best):
    best.unlink()


def truncate(best):
    os.truncate(best, best.stat().st_size // 2)


def take_anothers(best):
    saved = checkpoint.Checkpoint(best).content
    for row in saved["history"]:
        row["images_per_second"] += 1
    checkpoint.save_checkpoint(saved, best)


@pytest.mark.parametrize("damage", [lose, truncate, take_anothers])
def test_a_lost_best_checkpoint_is_reported_and_rewritten(image_folder, tmp_path, damage):
    run(train_command(tmp_path, image_folder, epochs=2))
    best = tmp_path / "run" / "best.pt"
    damage(best)
    ended = run(train_command(tmp_path, image_folder, epochs=3, resume="auto"))
    assert ended.stderr.count("It will be rewritten with the best epoch from now on") == 1
    history = checkpoint.Checkpoint(tmp_path / "run" / "last.pt").training_state()["history"]
    held = checkpoint.Checkpoint(best).content["history"]
    assert len(held) in (2, 3)
    assert held == history[: len(held)]
    closing = ended.stdout.splitlines()[-1]
    assert str(best) in closing
    assert BestCheckpoint(tmp_path / "run").find(history) is None or f"holds epoch {len(held)}" in closing


def test_a_run_resumed_in_another_folder_writes_a_best_checkpoint_to_it(image_folder, tmp_path):
    run(train_command(tmp_path, image_folder, epochs=2))
    first = tmp_path / "run" / "last.pt"
    options = dict(epochs=3, resume=str(first), experiment="other")
    ended = run(train_command(tmp_path, image_folder, **options))
    assert "best.pt is missing" in ended.stderr
    assert (tmp_path / "other" / "best.pt").is_file()


def test_a_deleted_best_checkpoint_is_reported_as_missing(image_folder, tmp_path):
    run(train_command(tmp_path, image_folder, epochs=2))
    history = checkpoint.Checkpoint(tmp_path / "run" / "last.pt").training_state()["history"]
    best = BestCheckpoint(tmp_path / "run")
    assert best.find(history) is None
    assert best.row is best_row(history)
    (tmp_path / "run" / "best.pt").unlink()
    assert best.find(history) == "is missing"
    # Without best.pt, any epoch counts as better, so that best.pt is written again.
    assert best.is_beaten_by(dict(history[0], eval_top1=0.0, eval_top1_ema=0.0))


def test_the_cache_counts_the_bytes_of_a_replaced_image_once():
    cache = DecodedCache(2, torch.device("cpu"), room=1000)
    image, index, target = DecodedImages.of([torch.zeros(3, 10, 10, dtype=torch.uint8)]), np.array([0]), np.array([0])
    for number in range(10):
        version = np.array([[number, 0]])
        cache.add(index, image, target, version)
        assert cache.get(index, version).are_present
    assert cache.room == 700
