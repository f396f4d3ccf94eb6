"""Tests of runs with two processes on a CPU under faults: kills, signals, full disks and bad data."""

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from faults import Torchrun, assert_same, before, is_running

from vil import checkpoint
from vil.data.device.augmentation import BatchAugmentation
from vil.evaluation.evaluator import Evaluator
from vil.training import interruption
from vil.training.update import Update

SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
KILLS = int(os.environ.get("KILLS", 5))
PREEMPTED = interruption.PREEMPTED


@pytest.fixture
def rng():
    print(f"FAULTS_SEED={SEED}")
    return random.Random(SEED)


def get_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def get_sigusr1():
    os.kill(os.getpid(), signal.SIGUSR1)


def in_step(step, act, rank):
    return functools.partial(before, Update, "__call__", act, step, rank)


def poison(step, rank):
    """Write a NaN into one rank's images at one step."""
    augmentation, calls = BatchAugmentation, []
    original = augmentation.__call__

    def call(self, *arguments):
        images, targets = original(self, *arguments)
        calls.append(None)
        if os.environ["RANK"] == str(rank) and len(calls) == step:
            images[1, 2, 3, 4] = float("nan")
        return images, targets

    augmentation.__call__ = call


def test_a_run_killed_at_random_times_equals_an_uninterrupted_one(undisturbed, start, rng):
    killed = 0
    while killed < KILLS:
        two = start()
        if killed % 4 == 0:
            two.wait_for_a_save_to_begin()
        else:
            two.wait_for_saves(1)
            time.sleep(rng.uniform(0, 0.1))
        victims = rng.choice([(0,), (1,), (0, 1)])
        two.signal(signal.SIGKILL, *victims)
        codes = two.wait()
        if codes[0] == 0:  # the run finished before the kill, so the remaining kills need a new run
            assert_same(two.result(), undisturbed().result())
            shutil.rmtree(two.folder)
            continue
        # Rank 1 may already have exited with status 0 if the run was about to end.
        assert all(codes[rank] in (-signal.SIGKILL, 0) for rank in victims)
        assert -signal.SIGKILL in codes
        killed += 1
    assert_same(start().finished(), undisturbed().result())


def test_a_preempted_run_resumes_in_the_middle_of_an_epoch(undisturbed, start, rng):
    signalled = in_step(rng.randrange(9, 12), get_sigusr1, rank=1)  # a signal to one rank stops all ranks
    two = start(checkpoint_interval=None, workers=1, prepare=signalled)
    assert two.wait() == [PREEMPTED, PREEMPTED]
    first = two.result()
    assert "stopped by a signal" in two.said()
    assert "Traceback" not in two.said()

    two = start()
    two.wait_for_saves(2)
    two.wait_for_a_save_to_begin()
    two.signal(signal.SIGTERM)
    assert two.wait() == [PREEMPTED, PREEMPTED]
    for name in ("previous.pt", "last.pt"):
        checkpoint.Checkpoint(two.folder / name).training_state()
    assert two.result()["losses"] != first["losses"]
    assert_same(start().finished(), undisturbed().result())


def signal_as_it_evaluates():
    before(Evaluator, "__call__", get_sigterm, rank=1)
    before(Evaluator, "_run", lambda: print("evaluates a batch", flush=True), rank=1)


def test_a_signal_stops_an_evaluation_early(undisturbed, start):
    two = start(checkpoint_interval=None, prepare=signal_as_it_evaluates)
    assert two.wait() == [PREEMPTED, PREEMPTED]
    assert "evaluates a batch" not in two.said()
    stopped = two.result()
    assert (stopped["epoch"], len(stopped["losses"])) == (0, 8)
    assert_same(start().finished(), undisturbed().result())


def test_a_run_resumes_with_another_world_size_in_the_middle_of_an_epoch(uninterrupted, start):
    options = dict(global_batch_size=16, epochs=2)
    two = start(checkpoint_interval=None, prepare=in_step(6, get_sigterm, rank=1), **options)
    assert two.wait() == [PREEMPTED] * 2
    stopped = two.result()
    assert (stopped["epoch"], len(stopped["losses"])) == (1, 2)
    one = start(1, batch_size=8, **options).finished()
    truth = checkpoint.Checkpoint(uninterrupted / "run" / "last.pt").training_state()
    for row, expected in zip(one["history"], truth["history"], strict=True):
        assert row == pytest.approx({name: expected[name] for name in row}, rel=1e-5)


def test_a_nan_followed_by_a_broken_checkpoint_loses_no_progress(undisturbed, start, rng):
    step = rng.randrange(3, 16)
    two = start(prepare=functools.partial(poison, step, rank=1))
    assert two.wait() == [1, 1]
    place = f"step {(step - 1) % 8 + 1} of epoch {(step - 1) // 8 + 1}"
    assert f"the loss is nan at {place}" in two.said()
    saved = checkpoint.Checkpoint(two.folder / "last.pt").training_state()
    assert 8 * saved["epoch"] + len(saved["progress"]["losses"]) == step - 1
    assert all(tensor.isfinite().all() for part in ("state_dict", "state_dict_ema") for tensor in saved[part].values())

    last = two.folder / "last.pt"
    size = rng.randrange(last.stat().st_size)
    os.truncate(last, size)
    assert_same(start().finished(), undisturbed().result())
    assert "last.pt cannot be read as a checkpoint" in two.said()
    assert "previous.pt, the previous checkpoint" in two.said()
    assert last.with_suffix(".broken").stat().st_size == size


def fill_up(path):
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_a_run_stopped_by_a_full_disk_resumes_after_space_is_freed(undisturbed, start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a small disk: {mount.stderr.strip()}")
    try:
        two = start(output=disk)
        two.wait_for_saves(3)
        ballast = disk / "ballast"
        fill_up(ballast)
        codes = two.wait()
        ballast.unlink()
        assert codes[0] == 1
        assert 0 not in codes
        checkpoint.Checkpoint(two.folder / "last.pt").training_state()
        assert not list(two.folder.glob(".*.tmp"))
        two = start(output=disk)
        assert_same(two.finished(), undisturbed().result())
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_torchrun_restarts_a_run_that_lost_a_process_and_a_killed_torchrun_ends_the_run(image_folder, tmp_path):
    words, last = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"], tmp_path / "run" / "last.pt"
    torchrun = Torchrun(tmp_path, words, data_dir=str(image_folder), epochs=1000)
    try:
        torchrun.wait_until(last.exists)
        lost = torchrun.workers
        os.kill(lost[-1], signal.SIGKILL)
        # the run resumes although --resume was not given
        torchrun.wait_until(lambda: "resuming after step " in torchrun.said())
        workers, resumed = torchrun.workers, last.stat().st_ino
        torchrun.wait_until(lambda: last.exists() and last.stat().st_ino != resumed)
    finally:
        torchrun.launcher.kill()
    assert len(workers) == 2
    assert not set(workers) & set(lost)
    begin = time.monotonic()
    while any(map(is_running, workers)):
        assert time.monotonic() - begin < 60
        time.sleep(0.01)
    assert "stopped by a signal" in torchrun.said()
