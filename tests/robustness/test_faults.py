"""What a run survives: two processes on a CPU that are killed, signalled, starved of disk and fed bad data.

FAULTS_TABLE=FILE writes what was tried and what came of it, for docs/reliability.md; FAULTS_SEED repeats the choices.
"""

import contextlib
import functools
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
from faults import Run
from PIL import Image
from processes import ROOT, train_command

import train_imagenet
from vil import checkpoint, processes
from vil.training import interruption

SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
PREEMPTED = interruption.PREEMPTED
ROWS = []  # of the table


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    if path := os.environ.get("FAULTS_TABLE"):
        with open(path, "w") as file:
            file.write("| fault | what came of it |\n| --- | --- |\n")
            file.writelines(f"| {fault} | {outcome} |\n" for fault, outcome in ROWS)


@pytest.fixture
def rng():
    print(f"FAULTS_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, image_folder):
    """What two processes come to that nothing interrupts."""
    two = Run(tmp_path_factory.mktemp("undisturbed"), 2, print_digest_at_the_end, data_dir=str(image_folder))
    assert two.wait() == [0, 0]
    return two


@pytest.fixture
def start(tmp_path, image_folder):
    """Starts a `Run` in the test's folder on the small images."""
    runs = []

    def start(processes=2, prepare=None, output=tmp_path, **options):
        runs.append(Run(output, processes, prepare, **dict(data_dir=str(image_folder)) | options))
        return runs[-1]

    yield start
    for other in runs:
        other.kill()


def same(value, other) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return value == other


def ended_as_if_undisturbed(run, undisturbed) -> bool:
    codes = run.wait()
    assert codes == [0] * len(codes), run.log.read_text()[-3000:]
    return same(run.result(), undisturbed.result())


def print_digest_at_the_end():
    """Has each process print what its model and its EMA came to."""
    original = train_imagenet.Trainer.run

    def run(trainer):
        original(trainer)
        tensors = [*trainer.model.state_dict().values(), *trainer.ema.module.state_dict().values()]
        print("digest", hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest(), flush=True)

    train_imagenet.Trainer.run = run


def at_step(step, rank, act):
    """Has a process do something in one step, before it updates the weights."""
    original, calls = train_imagenet.Trainer.update, []

    def update(trainer):
        calls.append(None)
        if os.environ["RANK"] == str(rank) and len(calls) == step:
            act()
        return original(trainer)

    train_imagenet.Trainer.update = update


def wait_for_ever():
    """As for a GPU that waits for another one."""
    processes.GRACE = 1
    print("waits", flush=True)
    time.sleep(3600)


def get_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def get_sigkill():
    os.kill(os.getpid(), signal.SIGKILL)


def poison(step, rank):
    """Has a process get a NaN in the images of one step."""
    augmentation, calls = train_imagenet.BatchAugmentation, []
    original = augmentation.__call__

    def call(self, images, *place):
        images, targets = original(self, images, *place)
        calls.append(None)
        if os.environ["RANK"] == str(rank) and len(calls) == step:
            images[1, 2, 3, 4] = float("nan")
        return images, targets

    augmentation.__call__ = call


def test_all_processes_end_with_the_same_weights_and_ema(undisturbed):
    digests = re.findall("digest (.*)", undisturbed.log.read_text())
    assert len(digests) == 2
    assert len(set(digests)) == 1


def test_a_run_killed_at_20_random_points_ends_as_if_nothing_had_been(undisturbed, start, rng):
    slowest, killed = 0.0, 0
    while killed < 20:
        two = start()
        if killed % 4 == 0:
            two.wait_for_a_save_to_begin()
        else:
            two.wait_for_saves(1)
            time.sleep(rng.uniform(0, 0.1))
        victims = rng.choice([(0,), (1,), (0, 1)])
        two.signal(signal.SIGKILL, *victims)
        begin = time.monotonic()
        codes = two.wait()
        if codes[0] == 0:  # it was quicker: another one, for the kills that are left
            assert same(two.result(), undisturbed.result())
            shutil.rmtree(two.folder)
            continue
        slowest = max(slowest, time.monotonic() - begin)
        # the second is done when only the last checkpoint is left to the first
        assert all(codes[rank] in (-signal.SIGKILL, 0) for rank in victims)
        assert -signal.SIGKILL in codes
        killed += 1
    assert ended_as_if_undisturbed(start(), undisturbed)
    ROWS.append(
        (
            "SIGKILL to one of two processes or to both, at 20 random points, every fourth in the middle of saving",
            f"the other process ended within {slowest:.1f} s; losses, weights, EMA and optimizer at the end are the "
            "undisturbed run's, bit for bit",
        )
    )


def test_a_preempted_run_writes_a_checkpoint_and_goes_on_in_the_middle_of_an_epoch(undisturbed, start, rng):
    two = start(checkpoint_interval=None, workers=1)
    two.wait_for_saves(1)  # the end of the first epoch
    time.sleep(rng.uniform(0.02, 0.2))
    two.signal(signal.SIGUSR1, 1)  # one process is enough
    assert two.wait() == [PREEMPTED, PREEMPTED]
    first = two.result()
    assert "stopped by a signal" in two.log.read_text()
    assert "Traceback" not in two.log.read_text()

    two = start()
    two.wait_for_saves(2)
    two.wait_for_a_save_to_begin()
    two.signal(signal.SIGTERM)
    assert two.wait() == [PREEMPTED, PREEMPTED]
    for name in ("previous.pt", "last.pt"):
        checkpoint.read_checkpoint(two.folder / name)
    assert two.result()["losses"] != first["losses"]
    assert ended_as_if_undisturbed(start(), undisturbed)
    status = f"a checkpoint, then status {PREEMPTED} from all processes"
    place = f"here step {len(first['losses'])} of epoch {first['epoch'] + 1}"
    ROWS.append(
        (
            "SIGUSR1 to one of two processes within an epoch, whose loaders have a worker",
            f"{status} ({place}); the resumed run ends as the undisturbed one, bit for bit",
        )
    )
    ROWS.append(("SIGTERM to both in the middle of saving", f"that save is completed; {status}; resumed likewise"))


def test_a_signal_cuts_an_evaluation_short(undisturbed, start):
    two = start(checkpoint_interval=None, prepare=signal_myself_in_evaluation)
    assert two.wait() == [PREEMPTED, PREEMPTED]
    stopped = two.result()
    assert (stopped["epoch"], len(stopped["losses"])) == (0, 8)
    assert ended_as_if_undisturbed(start(), undisturbed)
    ROWS.append(("SIGTERM to one process during evaluation", "as above; the resumed run evaluates again"))


def signal_myself_in_evaluation():
    original = train_imagenet.Evaluator.__call__

    def evaluate(*arguments):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    train_imagenet.Evaluator.__call__ = evaluate


def test_three_processes_go_on_bit_for_bit(start, tmp_path):
    options = dict(processes=3, global_batch_size=12, epochs=1)
    (tmp_path / "whole").mkdir()
    whole = start(output=tmp_path / "whole", **options)
    assert whole.wait() == [0, 0, 0]
    three = start(prepare=functools.partial(at_step, 3, 0, get_sigkill), **options)
    codes = three.wait()
    assert codes == [-signal.SIGKILL, 1, 1]
    assert len(checkpoint.read_checkpoint(three.folder / "last.pt")["progress"]["losses"]) == 2
    assert ended_as_if_undisturbed(start(**options), whole)


def test_a_run_goes_on_with_other_processes_from_the_middle_of_an_epoch(uninterrupted, start):
    options = dict(global_batch_size=16, epochs=2)
    two = start(checkpoint_interval=None, prepare=functools.partial(at_step, 6, 1, get_sigterm), **options)
    assert two.wait() == [PREEMPTED] * 2
    stopped = two.result()
    assert (stopped["epoch"], len(stopped["losses"])) == (1, 2)
    one = start(1, batch_size=8, **options)
    assert one.wait() == [0]
    truth = checkpoint.read_checkpoint(uninterrupted / "run" / "last.pt")
    for row, expected in zip(one.result()["history"], truth["history"], strict=True):
        assert row == pytest.approx({name: expected[name] for name in row}, rel=1e-5)
    ROWS.append(
        (
            "resumed on one process with two micro-batches a step, after the sixth step on two",
            "losses equal those of an uninterrupted run on one process to rounding (1e-5)",
        )
    )


def test_a_process_that_waits_for_something_else_ends_as_well(start):
    two = start(prepare=functools.partial(at_step, 5, 0, wait_for_ever))
    two.wait_for_words("waits")
    two.signal(signal.SIGKILL, 1)
    assert two.wait() == [1, -signal.SIGKILL]
    assert "the process of rank 1 is gone, and this one waits for it" in two.log.read_text()
    ROWS.append(
        ("SIGKILL to one process while the other waits for something else, as for a GPU", "the other ends as well")
    )


def test_a_nan_and_then_a_broken_checkpoint_lose_nothing(undisturbed, start, rng):
    step = rng.randrange(3, 16)
    two = start(prepare=functools.partial(poison, step, rank=1))
    assert two.wait() == [1, 1]
    place = f"step {(step - 1) % 8 + 1} of epoch {(step - 1) // 8 + 1}"
    assert f"the loss is nan at {place}" in two.log.read_text()
    saved = checkpoint.read_checkpoint(two.folder / "last.pt")
    assert 8 * saved["epoch"] + len(saved["progress"]["losses"]) == step - 1
    assert all(tensor.isfinite().all() for part in ("state_dict", "state_dict_ema") for tensor in saved[part].values())
    ROWS.append(
        (
            f"a NaN in the images of one process at a random step ({place})",
            "both stop with status 1, which names the step; the last checkpoint is of the step before; the run resumed "
            "without it ends as the undisturbed one",
        )
    )

    last = two.folder / "last.pt"
    size = rng.randrange(last.stat().st_size)
    os.truncate(last, size)
    assert ended_as_if_undisturbed(start(), undisturbed)
    assert "last.pt cannot be read as a checkpoint" in two.log.read_text()
    assert "previous.pt, the checkpoint before it" in two.log.read_text()
    assert last.with_suffix(".broken").stat().st_size == size


def test_a_checkpoint_cut_or_changed_anywhere_falls_back_to_the_one_before(undisturbed, tmp_path, rng, caplog):
    shutil.copytree(undisturbed.folder, tmp_path, dirs_exist_ok=True)
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    whole = last.read_bytes()
    harmless = 0
    for trial in range(60):
        place = rng.randrange(len(whole))
        flipped = whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]
        last.write_bytes(whole[:place] if trial % 2 else flipped)
        caplog.clear()
        path, saved = checkpoint.find_resumed("auto", tmp_path)
        if path == last:  # a bit that says nothing, such as padding
            assert same(saved["state_dict"], undisturbed.result()["state_dict"])
            assert trial % 2 == 0
            harmless += 1
            continue
        assert path == previous
        assert "last.pt cannot be read as a checkpoint" in caplog.text
    assert harmless < 10
    last.write_bytes(whole[:1000])
    previous.write_bytes(whole[:1000])
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of .* can be read"):
        checkpoint.find_resumed("auto", tmp_path)
    ROWS.append(
        (
            "the newest checkpoint cut off at a random byte (30 times), or one random bit of it changed (30 times)",
            f"the one before it is taken, with a warning, and the broken file kept as last.broken ({harmless} of the "
            "changed bits say nothing, and are not noticed); with both broken the run stops rather than start again",
        )
    )


def fill_up(path):
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_a_full_disk_stops_a_run_that_goes_on_once_there_is_room(undisturbed, start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"needs a small disk of its own: {mount.stderr.strip()}")
    try:
        two = start(output=disk)
        two.wait_for_saves(3)
        ballast = disk / "ballast"
        fill_up(ballast)
        codes = two.wait()
        ballast.unlink()
        assert codes[0] == 1
        assert 0 not in codes
        checkpoint.read_checkpoint(two.folder / "last.pt")
        assert not list(two.folder.glob(".*.tmp"))
        two = start(output=disk)
        assert ended_as_if_undisturbed(two, undisturbed)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    ROWS.append(
        (
            "the disk (a tmpfs of 4 MB) fills up",
            "the run stops with status 1 and says how much room there is; the last checkpoint is intact; with room "
            "made the resumed run ends as the undisturbed one",
        )
    )


def test_a_truncated_jpeg_is_named_and_left_out(start, image_folder, tmp_path):
    root = tmp_path / "jpeg"
    for path in image_folder.glob("*/*/*.png"):
        jpeg = (root / path.relative_to(image_folder)).with_suffix(".jpg")
        jpeg.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).save(jpeg)
    for broken in (root / "train" / "bee" / "3.jpg", root / "val" / "cat" / "2.jpg"):
        os.truncate(broken, broken.stat().st_size // 2)
    two = start(data_dir=str(root), epochs=1, aug_repeats=0)
    assert two.wait() == [0, 0]
    row = two.result()["history"][0]
    assert row["unreadable_images"] >= 1
    assert os.path.join("cat", "2.jpg") in two.log.read_text()
    ROWS.append(
        (
            "truncated JPEGs in both splits",
            f"named in warnings, counted in summary.csv ({row['unreadable_images']:.0f}); training takes the next "
            "image, evaluation leaves it out",
        )
    )


def test_an_empty_class_folder_is_refused(start, image_folder, tmp_path):
    shutil.copytree(image_folder, tmp_path / "images")
    for path in (tmp_path / "images" / "train" / "bee").iterdir():
        path.unlink()
    two = start(data_dir=str(tmp_path / "images"))
    assert two.wait() == [1, 1]
    assert "have no images: bee" in two.log.read_text()
    assert "Traceback" not in two.log.read_text()
    ROWS.append(("an empty class folder in the training split", "refused with its name before anything is trained"))


def children(process: subprocess.Popen) -> list[int]:
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as pids:
        return [int(pid) for pid in pids.read().split()]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_torchrun_starts_a_run_again_that_lost_a_process_and_is_not_outlived(image_folder, tmp_path):
    command = train_command(tmp_path, image_folder, 2, checkpoint_interval="1", epochs=1000)
    place = command.index("torch.distributed.run") + 1
    command[place:place] = ["--max-restarts=1", "--monitor-interval=0.1"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    last, log = tmp_path / "run" / "last.pt", tmp_path / "log.txt"

    def history():
        with contextlib.suppress(checkpoint.CheckpointError):  # none yet, or between two renamings
            return checkpoint.read_checkpoint(last)["history"]
        return []

    def wait_for_the_end_of_an_epoch(before):
        while len(now := history()) <= len(before):
            assert torchrun.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)
        return now

    with open(log, "w") as file, subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file) as torchrun:
        try:
            first = wait_for_the_end_of_an_epoch([])
            lost = children(torchrun)
            os.kill(lost[-1], signal.SIGKILL)
            while any(map(is_running, lost)):
                time.sleep(0.01)
            first = history() or first
            second = wait_for_the_end_of_an_epoch(first)
            workers = children(torchrun)
        finally:
            torchrun.kill()
    assert second[: len(first)] == first  # it was not told to resume, and did
    assert "signal 9" in log.read_text() or "exitcode: -9" in log.read_text()
    ROWS.append(
        (
            "SIGKILL to a worker of `torchrun --max-restarts=1`, which was not told to resume",
            "torchrun names the worker and the signal and starts all again, which go on from the checkpoint",
        )
    )
    assert len(workers) == 2
    assert not set(workers) & set(lost)
    begin = time.monotonic()
    while any(map(is_running, workers)):
        assert time.monotonic() - begin < 300
        time.sleep(0.01)
    assert "stopped by a signal" in log.read_text()
    ROWS.append(("SIGKILL to torchrun itself", "its processes notice, write a checkpoint and end"))
