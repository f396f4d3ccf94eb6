"""Ctrl-C at any moment: a checkpoint, a sentence, status 75, and the run goes on exactly.

INTERRUPTS=50 python -m pytest tests/robustness/test_interrupts.py  presses it as often; FAULTS_SEED repeats moments.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import Run, assert_same
from processes import ROOT, train_command

from vil import checkpoint
from vil.training.interruption import PREEMPTED

COUNT = int(os.environ.get("INTERRUPTS", 6))
SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
OPTIONS = dict(global_batch_size=8, epochs=3, checkpoint_interval=None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, image_folder):
    """What one process and what two come to that nobody interrupts."""

    def result(processes):
        run = Run(tmp_path_factory.mktemp("undisturbed"), processes, data_dir=str(image_folder), **OPTIONS)
        assert run.wait() == [0] * processes, run.log.read_text()[-3000:]
        return run.result()

    return {processes: result(processes) for processes in (1, 2)}


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupted_at_random_moments_a_run_ends_as_if_nothing_had_been(
    undisturbed, image_folder, tmp_path, processes
):
    """All processes at once, as a terminal interrupts them, with loaders' workers."""
    print(f"FAULTS_SEED={SEED}")
    rng, interrupted = random.Random(SEED), 0
    while True:
        run = Run(tmp_path, processes, data_dir=str(image_folder), workers=1, **OPTIONS)
        if interrupted < COUNT:
            run.wait_until_it_heeds_signals()
            time.sleep(rng.uniform(0, 0.4))
            run.signal(signal.SIGINT)
        begin = time.monotonic()
        codes = run.wait(120)
        log = run.log.read_text()
        assert "Traceback" not in log
        assert "Exception ignored" not in log
        if codes == [0] * processes:
            break
        assert codes == [PREEMPTED] * processes
        assert time.monotonic() - begin < 60
        interrupted += 1
        assert log.count("stopped by a signal: ") == interrupted  # a sentence for all processes together
        assert log.count("--resume auto goes on from there") == interrupted
        checkpoint.read_checkpoint(run.folder / "last.pt")
    assert interrupted > 0
    assert_same(run.result(), undisturbed[processes])


def press(process, seconds):
    """Ctrl-C in the process's terminal after a while; what it printed to standard error."""
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=120)[1]


def start(command):
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def test_interrupted_before_it_trains_a_run_says_so_and_nothing_else(image_folder, tmp_path):
    for seconds in (1.0, 2.5):  # while it imports PyTorch and others
        process = start(train_command(tmp_path, image_folder))
        errors = press(process, seconds)
        assert process.returncode == PREEMPTED
        assert errors.strip() == "stopped by a signal before it trained anything"
    assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_in_a_terminal_stops_a_run_and_its_launcher_with_everything_saved(image_folder, tmp_path, processes):
    process = start(train_command(tmp_path, image_folder, processes, epochs=1000))
    while not (last := tmp_path / "run" / "last.pt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    begin = time.monotonic()
    errors = press(process, 0.3)
    assert time.monotonic() - begin < 60
    assert process.returncode == (PREEMPTED if processes == 1 else 1)  # torchrun's own
    assert errors.count("stopped by a signal: ") == 1
    saved = checkpoint.read_checkpoint(last)
    assert f"holds step {len(saved['progress']['losses'])} of epoch {len(saved['history']) + 1}" in errors
    if processes == 1:
        assert "Traceback" not in errors


STAND_INS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; export SLURM_NODEID=0; exec "$@"',
    "scontrol": """case "$1 $2" in
        'show hostnames') echo 127.0.0.1;;
        'show --oneliner') echo "JobId=$4 JobState=RUNNING Reason=None PreemptTime=None";;
        *) echo "$@" >> "$SCONTROL_LOG";;
    esac""",
}


@pytest.mark.parametrize(("script", "number"), [("single_node.sh", signal.SIGINT), ("slurm.sh", signal.SIGUSR1)])
def test_the_scripts_stop_with_everything_saved(image_folder, tmp_path, monkeypatch, script, number):
    """Slurm's own commands by stand-ins; a launcher without a store that anybody on the network could write to."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = dict(GPUS="1", SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_NODELIST="node", SLURM_JOB_ID=str(os.getpid()))
    environment |= dict(
        SLURM_NNODES="1", SLURM_GPUS_ON_NODE="1", SLURM_CPUS_PER_TASK="2", SCONTROL_LOG=str(tmp_path / "scontrol.txt")
    )
    environment["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = train_command(tmp_path, image_folder, epochs=1000)[-2:]
    process = start(["bash", str(ROOT / "scripts" / script), *config])
    while not (last := tmp_path / "run" / "last.pt").exists():
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.01)
    if number == signal.SIGINT:
        errors = press(process, 0.3)
    else:  # as Slurm does: to the script alone
        process.send_signal(number)
        errors = process.communicate(timeout=120)[1]
    assert errors.count("stopped by a signal: ") == 1, errors[-3000:]
    assert checkpoint.read_checkpoint(last)["progress"]["losses"]
    if script == "slurm.sh":
        assert (tmp_path / "scontrol.txt").read_text() == f"requeue {os.getpid()}\n"
    else:
        assert process.returncode == PREEMPTED


def test_a_second_ctrl_c_ends_at_once(image_folder, tmp_path):
    run = Run(tmp_path, 1, wait_in_every_step, data_dir=str(image_folder), **OPTIONS)
    while "a step" not in (run.log.read_text() if run.log.exists() else ""):
        assert run.is_running()
    run.signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.is_running()
    assert "Ctrl-C again ends the run" in run.log.read_text()
    run.signal(signal.SIGINT)
    begin = time.monotonic()
    assert run.wait() == [-signal.SIGINT]
    assert time.monotonic() - begin < 10


def wait_in_every_step():
    import train_imagenet

    original = train_imagenet.Trainer.update

    def update(trainer):
        result = original(trainer)
        print("a step", flush=True)
        time.sleep(60)
        return result

    train_imagenet.Trainer.update = update
