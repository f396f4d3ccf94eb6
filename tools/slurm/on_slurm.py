"""Tests on a two-node Slurm cluster that interrupted jobs of scripts/slurm.sh resume with identical results.

    make slurm-test    as root, with Debian's slurm-wlm, munge and iproute2; about ten minutes

The reference is a run of two processes on a CPU without Slurm. Weights and losses must be bitwise identical.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from cluster import Cluster, Job, command, wait_until
from faults import OPTIONS, assert_same, result
from processes import ROOT

EPOCHS = 30  # number of epochs per run; a run takes about 20 seconds
RECIPE = dict(checkpoint_interval="none", model_ema_decay=0.9)


@pytest.fixture(scope="module")
def cluster():
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        cluster = Cluster(Path(folder))
        yield cluster
        cluster.stop()


class Training(Job):
    """Job of scripts/slurm.sh that trains in `output`/run."""

    def __init__(self, output, image_folder, *words, epochs=EPOCHS, **options):
        self.folder = output / "run"
        config = output / "small.yaml"
        where = dict(data_dir=str(image_folder), output=str(output), device="cpu", workers=1)
        config.write_text(yaml.safe_dump(OPTIONS | RECIPE | where | dict(epochs=epochs) | options))
        os.chdir(ROOT)  # the script is submitted from the root of the checkout
        machines = "--nodes=2", "--gpus-per-node=1", f"--cpus-per-task={os.cpu_count()}"
        super().__init__(output / "log.txt", *machines, *words, "scripts/slurm.sh", "-c", config)

    def wait_until_it_trains(self, epochs=3):
        """Wait until the run has trained `epochs` more epochs."""
        rows = self.rows()
        wait_until(lambda: self.rows() >= rows + epochs, 120, f"it trains: {self.log}")

    def wait_until_restarted(self, restarts):
        wait_until(lambda: int(self.show()["Restarts"]) == restarts, 120, f"it is queued again: {self.log}")

    def rows(self):
        summary = self.folder / "summary.csv"
        return summary.read_text().count("\n") if summary.exists() else 0

    def assert_ended_like(self, truth, restarts):
        shown = self.wait("COMPLETED")
        assert shown["JobState"] == "COMPLETED", self.text[-3000:]
        assert int(shown["Restarts"]) == restarts, self.text[-3000:]
        assert_same(result(self.folder), truth)


@pytest.fixture
def training(cluster, image_folder, tmp_path):
    jobs = []

    def submit(*words, **options):
        jobs.append(Training(tmp_path, image_folder, *words, **options))
        return jobs[-1]

    yield submit
    for job in jobs:
        print(job.text)
        # cancel the job in case it still runs
        subprocess.run(["scancel", "--signal=KILL", "--full", job.number], capture_output=True)
        subprocess.run(["scancel", job.number], capture_output=True)
        wait_until(lambda: not command("squeue", "-h").strip(), 60, "the queue is empty")


def test_two_nodes_train_what_two_processes_do(cluster, training, undisturbed):
    job = training()
    job.wait_until_it_trains()
    for node in (0, 1):
        processes = cluster.processes(node, "train_imagenet.py")
        assert processes
        for process in processes:  # processes use all cores, although srun gives tasks one core by default
            assert len(os.sched_getaffinity(process)) == os.cpu_count()
    job.assert_ended_like(undisturbed(**RECIPE, epochs=EPOCHS).result(), restarts=0)


def test_the_notice_of_a_preemption_makes_it_save_and_queue_again(training, undisturbed):
    job = training()
    for restarts in (0, 1):
        job.wait_until_it_trains()
        command("scancel", "--signal=USR1", "--batch", job.number)
        job.wait_until_restarted(restarts + 1)
        assert job.text.count("stopped by a signal: ") == restarts + 1
    job.assert_ended_like(undisturbed(**RECIPE, epochs=EPOCHS).result(), restarts=2)


def test_a_time_limit_makes_it_save_and_queue_again_before(training, undisturbed):
    """A run saves a checkpoint and is requeued before the job's time limit.

    The script's --signal asks for a signal five minutes before the limit, which Slurm may send up to 60 seconds early.
    """
    job = training("--time=6", epochs=120)
    assert job.wait("COMPLETED")["JobState"] == "COMPLETED"
    restarts = job.text.count("stopped by a signal: ")
    assert restarts >= 1
    job.assert_ended_like(undisturbed(**RECIPE, epochs=120).result(), restarts)


@pytest.mark.parametrize("partition", ["normal", "graceful"])
def test_a_job_of_a_higher_priority_takes_its_nodes_and_gives_them_back(training, undisturbed, tmp_path, partition):
    """A run whose nodes are taken by a job of higher priority is requeued and resumes.

    Slurm takes the nodes at once, or after a minute of grace in which Slurm signals the step but not the script.
    """
    job = training(f"--partition={partition}")
    job.wait_until_it_trains()
    urgent = Job(tmp_path / "urgent.txt", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    assert urgent.wait("COMPLETED", seconds=100)["JobState"] == "COMPLETED"
    job.assert_ended_like(undisturbed(**RECIPE, epochs=EPOCHS).result(), restarts=1)
    assert job.text.count("stopped by a signal: ") == 1


def test_a_job_that_is_cancelled_saves_and_stays_out_of_the_queue(training, undisturbed):
    job = training()
    job.wait_until_it_trains()
    command("scancel", job.number)
    assert job.wait("CANCELLED")["JobState"] == "CANCELLED"
    wait_until(lambda: not command("squeue", "-h").strip(), 60, "it has left its nodes")
    assert job.show()["JobState"] == "CANCELLED"
    assert job.text.count("stopped by a signal: ") == 1
    again = training()
    again.assert_ended_like(undisturbed(**RECIPE, epochs=EPOCHS).result(), restarts=0)
    assert "resuming after step " in again.text


def test_a_node_that_is_lost_without_a_word_costs_no_more_than_the_steps_since_a_checkpoint(
    cluster, training, undisturbed
):
    job = training(checkpoint_interval="1")
    job.wait_until_it_trains()
    cluster.fail_node(1)
    job.wait_until_restarted(1)
    cluster.start_node(1)
    job.assert_ended_like(undisturbed(**RECIPE, epochs=EPOCHS).result(), restarts=1)


@pytest.mark.parametrize("node", [0, 1])
def test_a_process_that_is_killed_is_started_again_without_the_scheduler(cluster, training, undisturbed, node):
    job = training(checkpoint_interval="1")
    job.wait_until_it_trains()
    # the second pattern matches the training process and its workers, but only the training process is torchrun's child
    launcher = cluster.processes(node, "--node-rank=")
    worker = next(p for p in cluster.processes(node, "-u train_imagenet.py") if parent(p) in launcher)
    os.kill(worker, 9)
    job.assert_ended_like(undisturbed(**RECIPE, epochs=EPOCHS).result(), restarts=0)
    assert job.text.count("resuming after step ") == 1


def test_a_launcher_that_is_killed_fails_the_job_which_can_be_requeued(cluster, training, undisturbed):
    job = training(checkpoint_interval="1")
    job.wait_until_it_trains()
    begin = time.monotonic()
    for process in cluster.processes(1, "torchrun --node-rank="):
        os.kill(process, 9)
    assert job.wait("FAILED")["JobState"] == "FAILED"
    assert time.monotonic() - begin < 60
    command("scontrol", "requeue", job.number)
    job.assert_ended_like(undisturbed(**RECIPE, epochs=EPOCHS).result(), restarts=1)


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
