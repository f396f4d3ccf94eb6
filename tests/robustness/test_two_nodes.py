"""Two launchers with a process each, as on two machines: what the loss of one does to a run.

They meet over the loopback interface, by the static rendezvous of scripts/slurm.sh; tools/slurm has real nodes.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from faults import OPTIONS, assert_same, result
from processes import CONTEXT, ROOT, free_port


class Node:
    """torchrun for one of two nodes, of a run that writes to `output`/run."""

    def __init__(self, number: int, output: Path, image_folder: Path, port: int, max_restarts: int):
        config, self.log = output / f"{number}.yaml", output / f"{number}.txt"
        where = dict(device="cpu", output=str(output), data_dir=str(image_folder), resume="auto")
        config.write_text(yaml.safe_dump(OPTIONS | where))
        words = [f"--node-rank={number}", f"--master-port={port}", f"--max-restarts={max_restarts}"]
        words += ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--monitor-interval=0.1"]
        words += [str(ROOT / "train_imagenet.py"), "-c", str(config)]
        self.launcher = CONTEXT.Process(target=_launch, args=(words, str(self.log)))
        self.launcher.start()

    @property
    def workers(self) -> list[int]:
        """The training process, while there is one."""
        children = Path(f"/proc/{self.launcher.pid}/task").glob("*/children")
        return [int(child) for file in children for child in file.read_text().split()]

    def cut_the_power(self) -> None:
        os.kill(self.launcher.pid, signal.SIGSTOP)  # it is not to learn of its process's end
        for process in (*self.workers, self.launcher.pid):
            os.kill(process, signal.SIGKILL)

    def wait(self, seconds: float) -> int:
        self.launcher.join(seconds)
        assert self.launcher.exitcode is not None, f"it hangs: {self.log.read_text()[-3000:]}"
        return self.launcher.exitcode


def _launch(words, log):
    from torch.distributed.run import main

    os.environ.update(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    os.chdir(ROOT)
    for standard in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    main(words)


@pytest.fixture
def start_nodes(image_folder, tmp_path):
    """Starts both nodes."""
    started = []

    def start(max_restarts=0):
        port = free_port()
        nodes = [Node(number, tmp_path, image_folder, port, max_restarts) for number in range(2)]
        started.extend(nodes)
        return nodes

    yield start
    for node in started:
        if node.launcher.is_alive():
            node.cut_the_power()


def wait_until(condition, nodes):
    while not condition():
        assert all(node.launcher.is_alive() for node in nodes), [node.log.read_text()[-3000:] for node in nodes]
        time.sleep(0.01)


def test_the_loss_of_the_node_where_they_meet_ends_the_other(start_nodes, tmp_path):
    nodes = start_nodes()
    wait_until((tmp_path / "run" / "last.pt").exists, nodes)
    nodes[0].cut_the_power()
    assert nodes[1].wait(60) == 1
    assert "Connection" in nodes[1].log.read_text()


def test_a_process_that_is_killed_is_started_again_and_a_lost_node_by_hand(start_nodes, tmp_path, undisturbed):
    nodes = start_nodes(max_restarts=1)
    wait_until((tmp_path / "run" / "last.pt").exists, nodes)
    (worker,) = nodes[1].workers
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: "going on after step " in nodes[0].log.read_text(), nodes)  # both, each by its launcher
    assert "exitcode: -9" in nodes[1].log.read_text()
    nodes[1].cut_the_power()
    assert nodes[0].wait(60) == 1
    assert [node.wait(120) for node in start_nodes()] == [0, 0]
    assert nodes[0].log.read_text().count("going on after step ") == 2
    assert_same(result(tmp_path / "run"), undisturbed().result())
