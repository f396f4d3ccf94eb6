"""Tests of checkpoint intervals and signals: Ctrl-C during training leaves a checkpoint, a message and status 75."""

import contextlib
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from faults import Torchrun, assert_same, before, signals
from processes import ROOT, Forked, become, draw_nothing, free_port, in_processes, train_command

from vil import checkpoint, distributed
from vil.training import interruption
from vil.training.interruption import PREEMPTED, CheckpointTimer, Decision, LoadingWatch, SignalWatch
from vil.training.update import Update

COUNT = int(os.environ.get("INTERRUPTS", 4))
SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
OPTIONS = dict(global_batch_size=8, epochs=3, checkpoint_interval=None)


@pytest.fixture
def clock(monkeypatch):
    """Return a fake clock, from whose attribute `seconds` timers read the time."""
    clock = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(interruption, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    return clock


def timer_of(interval, step=0):
    return CheckpointTimer(interval, step, SimpleNamespace(received=False), LoadingWatch())


@pytest.mark.parametrize("minutes", [1, 30])
def test_a_checkpoint_is_due_after_each_interval_of_minutes(clock, minutes):
    timer = timer_of(f"{minutes}m")
    for _ in range(2):
        clock.seconds += 60 * minutes - 1
        assert timer.decide(10**9) == Decision()
        clock.seconds += 1
        assert timer.decide(10**9) == Decision(is_due=True)


def test_a_checkpoint_is_due_after_each_interval_of_steps_from_the_first_step(clock):
    timer = timer_of("500", step=70)
    assert [step for step in range(71, 2000) if timer.decide(step).is_due] == [570, 1070, 1570]
    clock.seconds += 1e9
    assert not timer.decide(2069).is_due
    # a checkpoint due at step 2070 is written at step 2090, so the next checkpoint is due at step 2590
    assert timer.decide(2090).is_due
    assert [timer.decide(step).is_due for step in (2589, 2590)] == [False, True]
    assert not timer_of(None).decide(10**12).is_due


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_makes_a_checkpoint_due_and_stops_the_run(number, monkeypatch):
    def nobody_reads(*_):
        raise BrokenPipeError

    before = {other: signal.getsignal(other) for other in interruption.SIGNALS}
    signals = SignalWatch()
    timer = CheckpointTimer(None, 0, signals, LoadingWatch())
    assert not timer.decide(1).writes_checkpoint
    with monkeypatch.context() as closed:
        closed.setattr(os, "write", nobody_reads)
        os.kill(os.getpid(), number)
    decision = timer.decide(2)
    assert (decision.writes_checkpoint, decision.stops) == (True, True)
    if number == signal.SIGINT:  # a second Ctrl-C raises KeyboardInterrupt, as Python does by default
        assert signal.getsignal(number) == signal.default_int_handler
    else:
        os.kill(os.getpid(), number)  # the process survives a second signal of a scheduler
    signals.restore_handlers()
    assert {other: signal.getsignal(other) for other in interruption.SIGNALS} == before


def what_timers_say(rank):
    """Return for each of five steps whether a rank's timer saves and stops. Rank 1 gets SIGTERM in step 5."""
    distributed.init_process_group("cpu")
    clock = SimpleNamespace(seconds=0.0)
    interruption.time = SimpleNamespace(monotonic=lambda: clock.seconds)
    timer, said = CheckpointTimer("1m", 0, SignalWatch(), LoadingWatch()), []
    for step in range(1, 6):
        clock.seconds += (30.0, 20.0)[rank]
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        decision = timer.decide(step)
        said.append((decision.writes_checkpoint, decision.stops))
    distributed.destroy_process_group()
    return said


def test_processes_save_and_stop_after_the_same_step():
    no, save, stop = (False, False), (True, False), (True, True)
    for ended in in_processes(2, what_timers_say):
        assert ended.value == [no, save, no, save, stop], ended.errors


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_interrupted_at_random_times_equals_an_uninterrupted_one(undisturbed, start, processes):
    """A run that SIGINT stops at random times, in all ranks at once, ends like an uninterrupted run."""
    print(f"FAULTS_SEED={SEED}")
    rng, interrupted = random.Random(SEED), 0
    while True:
        run = start(processes, workers=1, **OPTIONS)
        if interrupted < COUNT:
            run.wait_until_it_heeds_signals()
            time.sleep(rng.uniform(0, 0.3))
            run.signal(signal.SIGINT)
        begin = time.monotonic()
        codes = run.wait(120)
        log = run.said()
        assert "Traceback" not in log
        assert "Exception ignored" not in log
        if codes == [0] * processes:
            break
        assert codes == [PREEMPTED] * processes
        assert time.monotonic() - begin < 60
        interrupted += 1
        assert log.count("stopped by a signal: ") == interrupted  # only one process logs the message
        assert log.count("finishing the step and ") <= interrupted
        assert log.count("--resume auto resumes from there") == interrupted
        checkpoint.Checkpoint(run.folder / "last.pt").training_state()
    assert interrupted > 0
    assert_same(run.result(), undisturbed(processes, **OPTIONS).result())


def start_in_a_terminal(command):
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def press(process, number=signal.SIGINT):
    """Send SIGINT or another signal to a process group, wait for the exit, and return the process's stderr."""
    os.killpg(process.pid, number)
    return process.communicate(timeout=120)[1]


def wait_for_a_checkpoint(process, folder):
    while not (last := folder / "run" / "last.pt").exists():
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.01)
    return last


@pytest.mark.parametrize(("waits", "number"), [(0, signal.SIGINT), (1.5, signal.SIGHUP)])
def test_a_run_interrupted_during_its_imports_prints_one_line(image_folder, tmp_path, monkeypatch, waits, number):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")  # only torchrun's processes exit when the terminal closes
    process = start_in_a_terminal(train_command(tmp_path, image_folder))
    while signal.SIGUSR1 not in signals(process.pid, "SigCgt"):
        assert process.poll() is None
    time.sleep(waits)
    assert press(process, number).strip() == "stopped by a signal before training started, with nothing to save"
    assert process.returncode == PREEMPTED
    assert not (tmp_path / "run" / "last.pt").exists()


def get_a_signal_while_it_starts(rank, variable, closed):
    os.environ[variable] = os.environ.pop("RANK")
    sys.argv = ["train_imagenet.py", "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(ROOT / "train_imagenet.py"), run_name="__main__")
    if closed:
        os.close(2)
    signal.raise_signal(signal.SIGTERM)


def test_a_run_interrupted_during_imports_exits_with_status_75_and_one_line():
    for variable, closed, lines in (("RANK", True, 0), ("RANK", False, 1), ("SLURM_PROCID", False, 1)):
        ended = in_processes(2, get_a_signal_while_it_starts, variable, closed)
        assert [(status, errors.count("with nothing to save")) for _, status, errors in ended] == [(75, lines), (75, 0)]


def assert_stopped(errors, last):
    """Assert that the run stopped with a message about the last checkpoint."""
    assert errors.count("stopped by a signal: ") == 1, errors[-3000:]
    saved = checkpoint.Checkpoint(last).training_state()
    assert f"holds step {len(saved['progress']['losses'])} of epoch {len(saved['history']) + 1}" in errors


def train_in_a_session(command, errors, environment):
    os.setsid()  # with its own session, the run is a process group, as in a terminal
    become(0, 1, 0, os.devnull, errors)
    draw_nothing()
    os.environ.update(environment)
    sys.argv = command[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


class Session:
    """Training run in a forked process with its own session, like a run in its own terminal."""

    def __init__(self, folder, image_folder, **environment):
        self.errors = folder / "errors.txt"
        command = train_command(folder, image_folder, epochs=1000, checkpoint_interval="1")
        self.process = Forked(target=train_in_a_session, args=(command, str(self.errors), environment))
        self.process.start()

    def press_when(self, condition, number):
        """Wait until `condition` holds, send a signal to all processes of the run, and return the run's stderr."""
        while not condition():
            assert self.process.is_alive(), self.errors.read_text()
            time.sleep(0.01)
        os.killpg(self.process.pid, number)
        self.process.join(120)
        assert self.process.exitcode == PREEMPTED
        return self.errors.read_text()


def test_a_run_interrupted_while_it_waits_for_a_rank_that_never_joins_prints_one_line(image_folder, tmp_path):
    port = free_port()
    place = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    run = Session(tmp_path, image_folder, **place)
    errors = run.press_when(lambda: socket.socket().connect_ex(("localhost", port)) == 0, signal.SIGINT)
    assert errors.strip() == "stopped by a signal before training started, with nothing to save"
    assert not (tmp_path / "run" / "last.pt").exists()


def test_ctrl_c_in_a_terminal_saves_and_stops_a_run(image_folder, tmp_path):
    run, last = Session(tmp_path, image_folder), tmp_path / "run" / "last.pt"
    errors = run.press_when(last.exists, signal.SIGINT)
    assert_stopped(errors, last)
    assert "Traceback" not in errors


def test_ctrl_c_in_torchruns_terminal_saves_and_stops_all_ranks(image_folder, tmp_path):
    torchrun = Torchrun(tmp_path, ["--standalone", "--nproc-per-node=2"], data_dir=str(image_folder), epochs=1000)
    torchrun.wait_until((last := tmp_path / "run" / "last.pt").exists)
    os.kill(torchrun.launcher.pid, signal.SIGINT)  # torchrun signals the ranks
    assert torchrun.wait(60) == 1  # torchrun exits with status 1
    assert_stopped(torchrun.said(), last)


STAND_INS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; export SLURM_NODEID=0; exec "$@"',
    "scontrol": """case "$1 $2" in
        'show hostnames') echo 127.0.0.1;;
        'show --oneliner') echo "JobId=$4 ${JOB:-JobState=RUNNING Reason=None PreemptTime=None}";;
        *) echo "$@" >> "$SCONTROL_LOG";;
    esac""",
}


def process_of(*words):
    """Return the /proc folder of a process whose command line contains all `words`, or None."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if all(word.encode() in (process / "cmdline").read_bytes() for word in words):
                return process
    return None


def listening(process):
    """Return the number of ports on which a process listens for connections from other hosts."""
    table = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in table if row[3] == "0A" and not row[1].startswith("0100007F")}
    return sum(os.readlink(file) in sockets for file in (process / "fd").iterdir())


def stand_in_for_slurm(folder, monkeypatch, commands):
    """Put stubs of Slurm's commands on the PATH; `scontrol requeue` appends its arguments to scontrol.txt."""
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environment = dict(SUBMIT_DIR=str(ROOT), JOB_NODELIST="node", JOB_ID=str(os.getpid()), NNODES="1")
    environment |= dict(GPUS_ON_NODE="1", CPUS_PER_TASK="2")
    environment = {f"SLURM_{name}": value for name, value in environment.items()}
    environment |= dict(GPUS="1", SCONTROL_LOG=str(folder / "scontrol.txt"))
    environment["PATH"] = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("status", "job", "requeued"),
    [
        (1, "JobState=RUNNING PreemptTime=None", False),  # a failed run is not requeued, because it would fail again
        (75, "JobState=RUNNING PreemptTime=2026-11-27T12:00:00", True),
        (75, "JobState=CANCELLED PreemptTime=2026-11-27T12:00:00", False),
        (0, "JobState=RUNNING PreemptTime=2026-11-27T12:00:00", False),
    ],
)
def test_a_job_is_requeued_when_it_is_preempted_but_not_when_its_run_fails(
    tmp_path, monkeypatch, status, job, requeued
):
    stand_in_for_slurm(tmp_path, monkeypatch, STAND_INS | {"srun": f"exit {status}"})
    monkeypatch.setenv("JOB", job)
    assert subprocess.run(["bash", str(ROOT / "scripts/slurm.sh")], check=False).returncode == status
    assert (tmp_path / "scontrol.txt").exists() == requeued


@pytest.mark.parametrize(
    ("script", "number"),
    [("slurm.sh", signal.SIGTERM), ("slurm.sh", signal.SIGUSR1)]
    + [("single_node.sh", number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
)
def test_a_signalled_job_waits_for_its_run_and_is_requeued(tmp_path, monkeypatch, script, number):
    launcher, passed_on, status = ("srun", "USR1", PREEMPTED) if script == "slurm.sh" else ("torchrun", "TERM", 1)
    run = f'trap "sleep 0.1; touch {tmp_path}/saved; exit {status}" {passed_on}; touch {tmp_path}/begun; '
    run += "while kill -0 $PPID; do sleep 0.01; done"
    stand_in_for_slurm(tmp_path, monkeypatch, STAND_INS | {launcher: run})
    job = subprocess.Popen(["bash", str(ROOT / "scripts" / script)])
    while not ((tmp_path / "begun").exists() and {signal.SIGTERM, signal.SIGUSR1} & signals(job.pid, "SigCgt")):
        assert job.poll() is None
    job.send_signal(number)
    assert job.wait(60) == PREEMPTED
    assert (tmp_path / "saved").exists()
    if script == "slurm.sh":
        assert (tmp_path / "scontrol.txt").read_text() == f"requeue {os.getpid()}\n"


# shell code that records whether a process leads its own session, its network interfaces, folder and arguments
WRITTEN_DOWN = 'session=$(cut -d " " -f 6 /proc/$$/stat); { echo $((session == $$)) $GLOO_SOCKET_IFNAME '
WRITTEN_DOWN += """$NCCL_SOCKET_IFNAME $PWD; printf '%s\\n' "$@"; } > """


@pytest.mark.parametrize(("job", "port"), [(9, 20009), (12_345_678, 25_678)])
def test_jobs_launch_one_process_per_gpu_on_all_nodes(tmp_path, monkeypatch, job, port):
    srun, torchrun = tmp_path / "srun.txt", tmp_path / "torchrun.txt"
    commands = STAND_INS | {"srun": WRITTEN_DOWN + f"{srun}\n" + STAND_INS["srun"].replace("ID=0", "ID=1")}
    commands |= {"torchrun": WRITTEN_DOWN + f"{torchrun}; exit 3", "nvidia-smi": "echo GPU 0; echo GPU 1; echo GPU 2"}
    commands["scontrol"] = commands["scontrol"].replace("echo 127.0.0.1", "echo first; sleep 0.02; echo second")
    stand_in_for_slurm(tmp_path, monkeypatch, commands)
    for name, value in dict(NNODES=2, GPUS_ON_NODE=4, JOB_ID=job).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.delenv("GPUS")
    monkeypatch.chdir(tmp_path)
    words = ["-c", "a b.yaml", "--resume", "other.pt"]  # the last --resume takes precedence
    of_two_nodes = ["--node-rank=1", "--nnodes=2", "--nproc-per-node=4", "--master-addr=first", f"--master-port={port}"]
    of_one = ["--nproc-per-node=3", "--local-addr=127.0.0.1"]
    for script, expected in (("slurm.sh", of_two_nodes), ("single_node.sh", of_one)):
        assert subprocess.run(["bash", str(ROOT / "scripts" / script), *words], check=False).returncode == 3
        (place, *told) = torchrun.read_text().splitlines()
        assert place.split()[-1] == str(ROOT)
        assert {*expected, "--max-restarts=3"} < set(told)
        assert told[-7:] == ["train_imagenet.py", "--resume", "auto", *words]
    assert place.startswith("1 lo lo ")
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=2"} < set(srun.read_text().splitlines())


@pytest.mark.parametrize(("script", "number"), [("single_node.sh", signal.SIGHUP), ("slurm.sh", signal.SIGUSR1)])
def test_a_signal_to_the_job_scripts_saves_and_stops_the_run(image_folder, tmp_path, monkeypatch, script, number):
    """A signal to a job script saves and stops the run. The test uses the real torchrun and stubs of Slurm's commands.

    No store that unpickles data may listen for other hosts.
    """
    stand_in_for_slurm(tmp_path, monkeypatch, STAND_INS)
    config = train_command(tmp_path, image_folder, epochs=1000, checkpoint_interval="1")[-2:]
    process = start_in_a_terminal(["bash", str(ROOT / "scripts" / script), *config])
    last = wait_for_a_checkpoint(process, tmp_path)
    launcher = process_of("--nproc-per-node", str(tmp_path))
    # Only the process group's store listens. torchrun --standalone would open a second store, which unpickles data.
    assert listening(launcher) == 1
    assert script == "slurm.sh" or b"\0GLOO_SOCKET_IFNAME=lo\0" in (launcher / "environ").read_bytes()
    if number == signal.SIGHUP:  # simulates a closed terminal that signals only torchrun
        os.kill(int(launcher.name), signal.SIGHUP)
        errors = process.communicate(timeout=120)[1]
    else:  # with --signal=B:, Slurm signals the batch script but not its processes before the time limit
        options = re.findall("^#SBATCH (.*)", (ROOT / "scripts" / script).read_text(), re.M)
        assert {"--signal=B:USR1@300", "--requeue", "--open-mode=append"} < set(options)
        process.send_signal(number)
        errors = process.communicate(timeout=120)[1]
    assert_stopped(errors, last)
    if script == "slurm.sh":
        assert (tmp_path / "scontrol.txt").read_text() == f"requeue {os.getpid()}\n"


def test_a_second_ctrl_c_exits_immediately(start):
    run = start(1, take_a_minute_in_a_step, **OPTIONS)
    run.wait_for_words("a long step")
    run.signal(signal.SIGINT)
    run.wait_for_words("Ctrl-C again quits without a checkpoint")
    assert run.is_running()
    run.signal(signal.SIGINT)
    assert run.wait(10) == [-signal.SIGINT]


def take_a_minute_in_a_step():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in `vil train`, a second Ctrl-C kills the process
    before(Update, "__call__", take_a_minute, call=2)


def take_a_minute():
    print("a long step", flush=True)
    time.sleep(60)
