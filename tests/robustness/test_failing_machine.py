"""A machine that fails to read a file is not a broken file: the run saves its last step and stops, or reads again."""

import errno
import functools
import importlib
import io
import json
import os
import shutil
import sys
import tarfile

import pytest
import torch
from faults import assert_same
from PIL import Image
from processes import run, script, train_command

from vil import checkpoint
from vil.checkpoint import CheckpointError
from vil.config import Config, ConfigError
from vil.data.device.cache import KeptImages
from vil.data.loaders import evaluation_loader, training_loader
from vil.data.samplers import TrainingBatches
from vil.data.sources.images import read_image
from vil.data.sources.splits import open_split, open_splits
from vil.fault_tolerance import machine_errors
from vil.fault_tolerance.machine_errors import MachineError
from vil.security import sandbox
from vil.training.best import BestCheckpoint
from vil.training.history import best_row
from vil.training.resumption import find_resumed
from vil.weight_files import BrokenCheckpointError

READS = ("open", "read")
CPU = torch.device("cpu")
DATA_CONFIG = dict(
    input_size=(3, 32, 32), interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, crop_mode="center"
)  # fmt: skip


def fail_reads(number, words, counter, call="open", later=False):
    """Make this process fail to open or read files with `words` in their path, as often as the number in a file says.

    `later` lets as many succeed first, and fails from then on.
    """
    import builtins

    original = builtins.open

    def is_failing(path):
        if not isinstance(path, (str, os.PathLike)) or words not in os.fspath(path):
            return False
        with original(counter, "r+") as file:
            left = int(file.read())
            file.seek(0)
            file.write(f"{left - 1:<10}")
        return (left > 0) != later

    def failing_open(path, *arguments, **options):
        if call == "open" and is_failing(path):
            raise OSError(number, os.strerror(number), path)
        file = original(path, *arguments, **options)
        if call == "read" and is_failing(path):
            return _Unreadable(number)
        return file

    builtins.open = failing_open


class _Unreadable(io.BytesIO):
    def __init__(self, number):
        super().__init__(b"x" * 100)
        self.number = number

    def read(self, *_):
        raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def failing(tmp_path):
    """Returns what makes a run's reads fail; `left` says how many of them are still to fail."""
    left = tmp_path / "left"

    def prepare(number, words, times, call="open", later=False):
        left.write_text(f"{times:<10}")
        return functools.partial(_prepare, number, words, str(left), call, later)

    prepare.left = left
    return prepare


def _prepare(number, words, left, call, later):
    machine_errors.BACK_OFFS = (0.01, 0.02)
    fail_reads(number, words, left, call, later)


CAUSES = [(errno.ESTALE, "open"), (errno.EIO, "read"), (errno.EACCES, "open"), (errno.ENOENT, "open")]
CAUSES += [(errno.EMFILE, "open")]


@pytest.mark.parametrize(("number", "call"), CAUSES, ids=str)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_whose_images_cannot_be_read_saves_its_last_step_and_stops(
    start, tmp_path, undisturbed, failing, workers, number, call
):
    """The same images are then read again, and the run ends as if nothing had been."""
    if workers and (number, call) != CAUSES[0]:
        pytest.skip("one cause is enough for workers")
    never = start(
        1, workers=workers, checkpoint_interval=None, prepare=failing(number, "/train/", 20, call, later=True)
    )
    assert never.wait() == [1]
    said = never.said()
    assert "Traceback" not in said
    assert "cannot read" in said
    assert "/train/" in said
    assert os.strerror(number) in said
    saved = checkpoint.Checkpoint(never.folder / "last.pt").run()
    assert f"holds step {len(saved['progress']['losses'])} of epoch {len(saved['history']) + 1}" in said
    again = start(1, workers=workers, checkpoint_interval=None)
    assert_same(again.finished(), undisturbed(1).result())


def test_all_processes_save_and_stop_if_one_cannot_read_its_images(start, undisturbed, failing):
    two = start(2, checkpoint_interval=None, prepare=failing(errno.EIO, "train/dog/1.png", 10**6))
    assert two.wait() == [1, 1]
    assert "gone" not in two.said()  # nobody ended before the others
    assert two.said().count("stopped because images could not be read") == 1
    assert_same(start(2, checkpoint_interval=None).finished(), undisturbed(2).result())


def test_an_evaluation_whose_images_cannot_be_read_is_repeated_when_the_run_is_resumed(start, undisturbed, failing):
    one = start(1, checkpoint_interval=None, prepare=failing(errno.ESTALE, "val/ant/2.png", 10**6))
    assert one.wait() == [1]
    stopped = one.result()
    assert (stopped["epoch"], len(stopped["losses"])) == (0, 8)
    assert not (one.folder / "best.pt").exists()
    assert_same(start(1, checkpoint_interval=None).finished(), undisturbed(1).result())


def test_reads_that_fail_once_or_twice_change_nothing(start, undisturbed, failing):
    assert_same(start(1, prepare=failing(errno.EIO, "train/ant/", 2)).finished(), undisturbed(1).result())


def write_shards(folder):
    """Eight images in each of two splits, a shard each."""
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


def test_validation_ends_with_a_line_if_an_image_cannot_be_read(image_folder, uninterrupted, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    (data / "val" / "bee" / "1.png").unlink()
    (data / "val" / "bee" / "1.png").symlink_to("/missing/mount/1.png")
    words = ["--checkpoint", str(uninterrupted / "run" / "best.pt"), "--data-dir", str(data), "--workers", "1"]
    ended = run([*script("validate.py"), *words, "--split", "val"], check=False)
    assert ended.returncode == 1
    assert "bee/1.png" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_evaluation_of_samples_without_a_class_is_an_error(image_folder, uninterrupted, tmp_path):
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
    assert "no image of the split 'val' has a class" in ended.stderr


def test_an_evaluation_without_a_readable_image_is_an_error(image_folder, uninterrupted, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    for file in (data / "val").rglob("*.png"):
        file.write_bytes(b"broken")
    best = uninterrupted / "run" / "best.pt"
    words = ["--checkpoint", str(best), "--data-dir", str(data), "--workers", "1", "--split", "val"]
    ended = run([*script("validate.py"), *words], check=False)
    assert ended.returncode == 1
    assert "no image of the split 'val' can be read" in ended.stderr
    assert "top-1" not in ended.stdout
    ended = run(train_command(tmp_path, data), check=False)
    assert ended.returncode == 1
    assert "no image of the validation split can be read" in ended.stderr
    assert len(checkpoint.Checkpoint(tmp_path / "run" / "last.pt").run()["progress"]["losses"]) > 0


def test_a_link_without_a_target_is_refused_at_the_start(image_folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    for name in ("bee/99.png", "wasp"):  # an image and a class
        (link := data / "train" / name).symlink_to(tmp_path / "missing" / "mount")
        with pytest.raises(ConfigError, match=f"links in .* have no target, such as .*{name}.*: mount the disk"):
            open_split(str(data), "", "train")
        link.unlink()
    open_split(str(data), "", "train")


def test_a_missing_file_is_not_waited_for_and_a_failing_disk_is_an_error_of_a_line(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "missing.png")
    (tmp_path / "a.png").write_bytes(b"x")
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0,))
    monkeypatch.setattr(os, "stat", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(MachineError, match=r"^cannot read .*a.png: Stale file handle"):
        read_image(tmp_path / "a.png")


def test_a_sandbox_that_does_not_start_is_an_error_of_the_machine(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif")
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0,))
    monkeypatch.setattr(sandbox, "sandbox_of", lambda _: sandbox.Sandbox())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MachineError, match=r"cannot read .*a.gif: .*does not start"):
        read_image(tmp_path / "a.gif")


def lose_folder(path):
    """As when its file system is unmounted."""
    path.parent.rename(path.parent.with_name("elsewhere"))


def fail_to_read(path):
    """Reading the memory of a process at address 0 is a real EIO."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("fail", "reason"), [(lose_folder, "No such file"), (fail_to_read, "Input/output error")])
def test_a_shard_that_the_machine_does_not_give_is_an_error_of_a_line(tmp_path, monkeypatch, split, fail, reason):
    pytest.importorskip("webdataset")
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0, 0))
    (data := tmp_path / "data").mkdir()
    config = write_shards(data)
    train, val, _ = open_splits(config)
    if split == "train":
        batches = TrainingBatches(len(train), config, 8, 0, 1)
        loader = training_loader(train, config, DATA_CONFIG, CPU, batches)
    else:
        loader = evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1)
    fail(data / f"{split}-0.tar")
    with pytest.raises(MachineError, match=rf"^cannot read .*data/.*{reason}[^\n]*$"):
        list(loader)


def test_a_shard_that_the_list_names_and_the_folder_lacks_is_logged_and_the_others_are_read(tmp_path, capfd, caplog):
    pytest.importorskip("webdataset")
    config = write_shards(tmp_path)
    info = json.loads((tmp_path / "_info.json").read_text())
    info["splits"]["validation"]["filenames"].append("validation-1.tar")
    (tmp_path / "_info.json").write_text(json.dumps(info))
    loader = evaluation_loader(open_splits(config)[1], DATA_CONFIG, CPU, 0, 4, 0, 1)
    assert sum(len(targets) for _, targets in loader) == 8
    assert "validation-1.tar" in caplog.text + capfd.readouterr().err


def test_a_tar_file_that_the_machine_does_not_give_is_an_error_of_a_line(image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0, 0))
    with tarfile.open(tmp_path / "val.tar", "w") as tar:
        tar.add(image_folder / "val", "val")
    loader = evaluation_loader(open_split(str(tmp_path), "", "val"), DATA_CONFIG, CPU, 0, 4, 0, 1)
    batches = iter(loader)
    next(batches)  # the reader keeps the file open
    folder = os.open(tmp_path, os.O_RDONLY)
    there = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    opened = [int(fd) for fd, path in there.items() if path == str(tmp_path / "val.tar")]
    for descriptor in opened:
        os.dup2(folder, descriptor)  # reading a folder is a real EISDIR
    os.close(folder)
    assert opened
    with pytest.raises(MachineError, match=r"^cannot read .*: Is a directory[^\n]*$"):
        list(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_images_for_a_device_that_the_machine_does_not_give_are_an_error_of_a_line(
    image_folder, tmp_path, monkeypatch, workers
):
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0, 0))
    shutil.copytree(image_folder, data := tmp_path / "data")
    dataset = open_split(str(data), "", "train", is_training=True)
    config = Config(global_batch_size=4, workers=workers, aug_repeats=0, augment_on_device=True)
    loader = training_loader(dataset, config, DATA_CONFIG, CPU, TrainingBatches(len(dataset), config, 4, 0, 1))
    lose_folder(data / "train")
    with pytest.raises(MachineError, match=r"^cannot read .*data/train/.*: No such file[^\n]*$"):
        list(loader)


@pytest.mark.parametrize("command", ["vil.predict", "vil.viz"])
def test_an_image_that_the_machine_does_not_give_ends_a_command_with_a_line(
    uninterrupted, image_folder, tmp_path, monkeypatch, command
):
    main = importlib.import_module(f"{command}.__main__").main
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0, 0))
    (folder := tmp_path / "images").mkdir()
    shutil.copy(image_folder / "val" / "ant" / "1.png", folder)
    (folder / "lost.png").symlink_to("/missing/mount/1.png")
    words = ["--images", str(folder), "--out", str(tmp_path / "out")] if command == "vil.viz" else [str(folder)]
    monkeypatch.setattr(sys, "argv", [command, "--checkpoint", str(uninterrupted / "run" / "best.pt"), *words])
    with pytest.raises(SystemExit, match=r"^error: cannot read .*lost.png.*: No such file[^\n]*mount the disk[^\n]*$"):
        main()


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(image_folder, tmp_path, monkeypatch):
    """Otherwise its class would be left out."""
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0, 0))
    shutil.copytree(image_folder, data := tmp_path / "data")
    scandir = os.scandir

    def failing(path):
        if str(path).endswith("train/bee"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(ConfigError, match="cannot open the split 'train' of .*Input/output error.*train/bee"):
        open_split(str(data), "", "train")


PARTS = dict(config={}, history=[], progress={}, scheduler={}, state_dict={}, optimizer={})


@pytest.mark.parametrize("call", READS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_an_intact_checkpoint_that_the_disk_does_not_give_stays_where_it_is(tmp_path, monkeypatch, number, call):
    for epoch in (1, 2):
        checkpoint.save_checkpoint(PARTS | {"epoch": epoch}, tmp_path / "last.pt", tmp_path / "previous.pt")
    monkeypatch.setattr(machine_errors, "BACK_OFFS", (0, 0))
    monkeypatch.setattr("builtins.open", open)  # to have it back
    (left := tmp_path / "left").write_text(f"{10**6:<10}")
    fail_reads(number, "last.pt", str(left), call)
    with pytest.raises(CheckpointError, match=rf"last.pt cannot be read: {os.strerror(number)}") as refused:
        find_resumed("auto", tmp_path)
    assert not isinstance(refused.value, BrokenCheckpointError)
    assert {"last.pt", "previous.pt"} <= {path.name for path in tmp_path.iterdir()}
    left.write_text(f"{2:<10}")  # two attempts fail
    assert find_resumed("auto", tmp_path)[1]["epoch"] == 2


def rows(*epochs):
    return [dict(epoch=i, eval_top1=top1, **count) for i, (top1, count) in enumerate(epochs, start=1)]


def test_an_epoch_evaluated_on_fewer_images_is_not_the_best():
    full, third = dict(eval_images=900), dict(eval_images=300)
    assert best_row(rows((50, full), (100, third), (40, full)))["epoch"] == 1
    assert best_row(rows((100, third), (50, full), (40, full)))["epoch"] == 2
    assert best_row(rows((50, {}), (60, full), (60, full), (55, {})))["epoch"] == 3  # rows of old runs lack the number


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
def test_a_lost_best_checkpoint_is_noticed_and_written_again(image_folder, tmp_path, damage):
    run(train_command(tmp_path, image_folder, epochs=2))
    best = tmp_path / "run" / "best.pt"
    damage(best)
    ended = run(train_command(tmp_path, image_folder, epochs=3, resume="auto"))
    assert ended.stderr.count(f"{best} is ") == 1
    assert "It will hold the best of the epochs from here on" in ended.stderr
    history = checkpoint.Checkpoint(tmp_path / "run" / "last.pt").run()["history"]
    held = checkpoint.Checkpoint(best).content["history"]
    assert len(held) in (2, 3)
    assert held == history[: len(held)]
    closing = ended.stdout.splitlines()[-1]
    assert str(best) in closing
    assert BestCheckpoint(tmp_path / "run").find(history) is None or f"holds epoch {len(held)}" in closing


def test_a_run_resumed_in_another_folder_has_a_best_checkpoint_there(image_folder, tmp_path):
    run(train_command(tmp_path, image_folder, epochs=2))
    first = tmp_path / "run" / "last.pt"
    options = dict(epochs=3, resume=str(first), experiment="other")
    ended = run(train_command(tmp_path, image_folder, **options))
    assert "best.pt is missing" in ended.stderr
    assert (tmp_path / "other" / "best.pt").is_file()


def test_the_closing_line_does_not_announce_a_file_that_is_gone(image_folder, tmp_path):
    run(train_command(tmp_path, image_folder, epochs=2))
    history = checkpoint.Checkpoint(tmp_path / "run" / "last.pt").run()["history"]
    best = BestCheckpoint(tmp_path / "run")
    assert best.find(history) is None
    assert best.row is best_row(history)
    (tmp_path / "run" / "best.pt").unlink()
    assert best.find(history) == "is missing"
    assert best.is_beaten_by(dict(history[0], eval_top1=0.0, eval_top1_ema=0.0))  # whatever comes is the best then


def test_the_bytes_of_an_image_that_changed_are_counted_once():
    kept = KeptImages(2, torch.device("cpu"), room=1000)
    image = torch.zeros(3, 10, 10, dtype=torch.uint8)
    for version in range(10):
        kept.add({0: (image, 0, (version, 0))})
        assert kept.get(0, (version, 0)) is not None
    assert kept.room == 700
