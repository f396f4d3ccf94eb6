"""Tests of losing one of two nodes, which are simulated by two launchers with one process each."""

import os
import signal

import pytest
from faults import Torchrun, assert_same, result
from processes import free_port


@pytest.fixture
def start_nodes(image_folder, tmp_path):
    """Return a function that starts two launchers that share a rendezvous."""
    started = []

    def start(max_restarts=0):
        words = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        words += [f"--max-restarts={max_restarts}"]
        options = dict(data_dir=str(image_folder), train_split="training", resume="auto")
        nodes = [Torchrun(tmp_path, [*words, f"--node-rank={n}"], name=str(n), **options) for n in range(2)]
        started.extend(nodes)
        return nodes

    yield start
    for node in started:
        if node.launcher.is_alive():
            node.cut_the_power()


def test_losing_the_rendezvous_node_stops_the_other_node(start_nodes, tmp_path):
    nodes = start_nodes()
    nodes[0].wait_until((tmp_path / "run" / "last.pt").exists)
    nodes[0].cut_the_power()
    assert nodes[1].wait(60) == 1
    assert "Connection" in nodes[1].said()


def test_a_killed_process_is_restarted_and_a_lost_node_can_be_restarted_by_hand(start_nodes, tmp_path, undisturbed):
    nodes = start_nodes(max_restarts=1)
    nodes[0].wait_until((tmp_path / "run" / "last.pt").exists)
    (worker,) = nodes[1].workers
    os.kill(worker, signal.SIGKILL)
    nodes[0].wait_until(lambda: "resuming after step " in nodes[0].said())  # each launcher restarts its process
    assert "exitcode: -9" in nodes[1].said()
    nodes[1].cut_the_power()
    assert nodes[0].wait(60) == 1
    assert [node.wait(120) for node in start_nodes()] == [0, 0]
    assert nodes[0].said().count("resuming after step ") == 2
    assert ["train is used instead" in node.said() for node in nodes] == [True, False]  # rank 0 prints the message
    assert_same(result(tmp_path / "run"), undisturbed().result())
