"""Tests of loader workers: number of workers, shared memory, and detection of dead workers."""

import contextlib
import gc
import math
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections import UserList
from types import SimpleNamespace

import pytest
import torch
from faults import signals
from pictures import CPU, CUDA, DATA_CONFIG, joined, training_set
from timm.data.dataset import IterableImageDataset

from vil.config import ConfigError
from vil.data import loaders
from vil.data.host import workers
from vil.data.host.reader import ImageReader
from vil.data.loaders import evaluation_loader
from vil.data.sources.splits import open_split
from vil.fault_tolerance.machine_errors import MachineError
from vil.fault_tolerance.parents import obey_only_parent
from vil.fault_tolerance.workers import explain_lost_workers, worker_errors_explained
from vil.security import sandbox_server

MIB = 2**20
STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["folder", "stream"])


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that simulates a machine's cores, control-group files and number of local ranks."""
    for name in ("CGROUPS", "GROUPS_OF_PROCESS"):
        monkeypatch.setattr(workers, name, tmp_path / name)

    def make(cores, groups="", files=(), processes=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
        (tmp_path / "GROUPS_OF_PROCESS").write_text(groups)
        for name, content in dict(files).items():
            path = tmp_path / "CGROUPS" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content + "\n")
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if processes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))

    return make


def quota(microseconds, folder="cpu,cpuacct"):
    """Return the CPU quota files of cgroups version 1."""
    return {f"{folder}/cpu.cfs_quota_us": microseconds, f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("", {}, 24),
        ("0::/\n", {"cpu.max": "600000 100000"}, 6),
        ("0::/\n", {"cpu.max": "max 100000"}, 24),
        ("0::/\n", {"cpu.max": "3200000 100000"}, 24),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/outside/the/container\n", {"cpu.max": "600000 100000"}, 6),
        ("0::/job/step\n", {"job/cpu.max": "800000 100000", "job/step/cpu.max": "max 100000"}, 8),
        ("0::/job/step\n", {"job/cpu.max": "max 100000", "job/step/cpu.max": "400000 50000"}, 8),
        ("0::/job\n", {"job/cpu.max": "nonsense"}, 24),
        ("4:memory:/x\n3:cpu,cpuacct:/x\n", quota("500000", "cpu,cpuacct/x"), 5),
        ("3:cpu,cpuacct:/x\n", quota("-1"), 24),
    ],
)
def test_usable_cores_are_limited_by_affinity_and_the_containers_quota(machine, groups, files, cores, monkeypatch):
    machine(24, groups, files)
    assert workers.usable_cores() == cores
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS lacks sched_getaffinity
    monkeypatch.setattr(os, "cpu_count", lambda: 24)
    assert workers.usable_cores() == cores


@pytest.mark.parametrize(
    ("device", "cores_processes_expected"),
    [
        # Each GPU's process reserves one or two of several cores. At most 16 of the other cores are for workers.
        (CUDA, "16-1-14 64-4-14 8-1-6 4-1-3 2-1-1 1-1-1 8-8-1 6-8-1 256-1-16"),
        (CPU, "1-1-1 2-1-1 8-1-2 16-1-4 128-1-16"),  # training on a CPU needs most cores for the model
    ],
    ids=str,
)
def test_workers_use_the_cores_that_training_leaves(machine, device, cores_processes_expected):
    for case in cores_processes_expected.split():
        cores, processes, expected = map(int, case.split("-"))
        machine(cores, processes=processes)
        assert workers.default_workers(device) == expected, case


@pytest.mark.parametrize(("wanted", "threads"), [(0, 6), (2, 4), (5, 1), (9, 1), (None, 5)])
@pytest.mark.parametrize("processes", [None, 2])
def test_workers_and_training_use_separate_cores(machine, monkeypatch, wanted, threads, processes):
    machine(6 * (processes or 1), processes=processes)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        workers.share_cores(CPU, wanted)
        monkeypatch.delenv("OMP_NUM_THREADS")
        workers.share_cores(CUDA, wanted)
        assert torch.get_num_threads() == 3  # with OMP_NUM_THREADS or a GPU, the number of threads is kept
        workers.share_cores(CPU, wanted)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# Tests of shared memory


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """Return a function that simulates an amount of free shared memory."""

    def make(mebibytes):
        monkeypatch.setattr(workers, "SHARED_MEMORY", tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(mebibytes * MIB)))

    return make


def chosen(requested=None, batch_size=256, pieces=1000, **options):
    ahead = workers.BATCHES_AHEAD * math.ceil(batch_size / workers.PIECE)
    options = dict(pieces=pieces, ahead=ahead, piece_size=64, piece_bytes=10 * MIB) | options
    return workers.choose_workers(requested, CUDA, **options)


def test_workers_are_at_most_the_number_of_pieces_and_prefetch_whole_batches(machine, shared_memory):
    machine(16)
    shared_memory(10_000)
    assert chosen() == (14, 2)
    assert chosen(pieces=3)[0] == 3
    assert chosen(pieces=0)[0] == 1
    assert chosen(requested=30, pieces=3)[0] == 30  # an explicit number of workers is kept
    assert chosen(requested=0) == (0, None)
    for wanted, batch_size in ((2, 256), (1, 1024), (14, 1024), (4, 8)):
        count, prefetch = chosen(wanted, batch_size)
        assert prefetch >= 2
        assert count * prefetch * workers.PIECE >= 3 * batch_size


@pytest.mark.parametrize(
    ("free", "processes", "expected"),
    [(300, 1, (14, 2)), (200, 1, (14, 1)), (100, 1, (8, 1)), (64, 1, (4, 1)), (30, 1, (1, 1)), (200, 2, (8, 1))],
)
def test_little_shared_memory_reduces_pieces_and_workers_with_a_log_message(
    machine, shared_memory, caplog, free, processes, expected
):
    machine(16 * processes, processes=processes)
    shared_memory(free)
    count, prefetch = chosen()
    assert (count, prefetch) == expected
    assert processes * (count * prefetch + 2) * 10 <= free
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (expected != (14, 2))
    for line in lines:
        assert f"{free} MiB free: {count} workers prefetch {prefetch} x 64 images, instead of 14 workers with 2" in line
        assert "--shm-size" in line


def test_too_little_shared_memory_for_one_worker_is_rejected_with_the_remedy(machine, shared_memory):
    machine(16)
    shared_memory(29)
    with pytest.raises(
        ConfigError, match="29 MiB free, and loading .* least 30 MiB: .*--shm-size=8g, or .*--workers 0"
    ):
        chosen()
    assert chosen(piece_bytes=None) == (14, 2)  # the pieces do not use shared memory
    machine(16, processes=8)
    with pytest.raises(ConfigError, match="at least 240 MiB:"):  # 8 ranks need 30 MiB each
        chosen()
    assert chosen(requested=0) == (0, None)


def test_shared_memory_is_unlimited_without_a_shared_memory_folder(machine, monkeypatch, tmp_path):
    """Shared memory is unlimited on systems without /dev/shm, such as macOS."""
    machine(16)
    monkeypatch.setattr(workers, "SHARED_MEMORY", tmp_path / "none")
    assert chosen() == (14, 2)
    monkeypatch.setattr(workers, "get_worker_info", lambda: "one")
    workers.into_shared_memory(image := torch.zeros(3, dtype=torch.uint8))
    assert image.is_shared()


# Tests of worker processes


@pytest.fixture
def started(image_folder):
    """Return a function that creates an evaluation loader with workers. The function returns loader and workers."""
    before = set(multiprocessing.active_children())
    new = lambda: set(multiprocessing.active_children()) - before  # noqa: E731

    def make(count=1, batch_size=5, streams=False):
        split = open_split(str(image_folder), "", "val")
        if streams:
            split = IterableImageDataset("", reader=UserList([*split]))
            split.set_loader_cfg = lambda num_workers: None
        loader = evaluation_loader(split, DATA_CONFIG, CPU, count, batch_size, 0, 1)
        if streams:
            next(iter(loader))  # reading a batch starts the workers
        return loader, new()

    yield make
    for worker in new():
        worker.kill()
        worker.join()


def test_a_worker_reports_full_shared_memory_in_one_line(started, monkeypatch):
    parent, usage = os.getpid(), shutil.disk_usage
    free = lambda folder: usage(folder) if os.getpid() == parent else SimpleNamespace(free=100)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", free)
    with pytest.raises(ConfigError) as caught:
        list(started()[0])
    message = str(caught.value)
    assert message.startswith(f"{workers.SHARED_MEMORY} is full: 0 MiB free")
    assert "--shm-size=8g, or set --workers 0" in message
    assert "\n" not in message
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * MIB))
    workers.into_shared_memory(image := torch.zeros(3 * MIB, dtype=torch.uint8))
    assert not image.is_shared()  # only workers use shared memory
    monkeypatch.setattr(workers, "get_worker_info", lambda: "one")
    with pytest.raises(ConfigError, match="2 MiB free, 3 MiB needed for images"):
        workers.into_shared_memory(*image.split([MIB, 2 * MIB]))  # only 2 MiB of shared memory are free


@pytest.mark.parametrize(
    ("number", "remedy"), [(signal.SIGBUS, "/dev/shm is full; .*--shm-size"), (signal.SIGKILL, "reduce --workers")]
)
def test_a_killed_worker_is_reported_in_one_line(started, monkeypatch, number, remedy):
    monkeypatch.setattr(ImageReader, "__getitem__", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(ConfigError, match=remedy) as caught:
        list(started()[0])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("DataLoader worker (pid")


def outlive(worker):
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(60)


@STREAMS
def test_a_worker_killed_while_idle_is_reported_in_one_line(started, streams):
    """If a worker is killed between two batches, PyTorch raises from a signal handler, and the run reports one line."""
    loader, (worker,) = started(streams=streams)
    next(iter(loader))
    with pytest.raises(ConfigError, match="reduce --workers") as caught:
        outlive(worker)
    assert "\n" not in str(caught.value)


def test_pytorchs_sigchld_handler_is_wrapped_once():
    pytorchs = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        found = [signal.getsignal(signal.SIGCHLD)]
        (thread := threading.Thread(target=explain_lost_workers)).start()
        thread.join()
        for _ in range(3):
            found.append(signal.getsignal(signal.SIGCHLD))
            explain_lost_workers()
    finally:
        signal.signal(signal.SIGCHLD, pytorchs)
    first, after_the_thread, once, twice = found
    assert first is after_the_thread  # Python sets signal handlers only in the main thread
    assert once is twice is not first


def test_an_exception_of_other_code_is_not_reported_as_a_worker_failure():
    with pytest.raises(RuntimeError, match="of the model"), worker_errors_explained():
        raise RuntimeError("of the model")


def test_a_hanging_worker_stops_the_run(started, monkeypatch):
    # The timeout exceeds the time limit for decoding all images that a worker loads at a time.
    assert loaders.STALLED > workers.PIECE * sandbox_server.SECONDS
    monkeypatch.setattr(loaders, "STALLED", 0.2)
    # seconds until PyTorch terminates a worker that does not exit
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(ImageReader, "__getitem__", lambda *_: time.sleep(1))
    with pytest.raises(MachineError, match="^cannot read .*timed out after 0.2 seconds. To continue, .*disk"):
        next(iter(started()[0]))


@STREAMS
def test_a_worker_ignores_all_signals_except_its_parents(started, monkeypatch, streams):
    """Workers survive signals that a scheduler sends to all processes, because the parent still needs images."""
    monkeypatch.setattr("vil.data.loaders.STALLED", 60)
    threads = torch.get_num_threads()
    try:
        # because of set_num_threads, PyTorch starts threads in a worker before the worker sets its signal handlers
        torch.set_num_threads(threads + 2)
        loader, (worker,) = started(batch_size=2, streams=streams)
    finally:
        torch.set_num_threads(threads)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []).isdisjoint({signal.SIGTERM, signal.SIGUSR1})
    expected = [images for images, _ in loader]
    for name in ("-TERM", "-USR1"):
        subprocess.run(["kill", name, str(worker.pid)], check=True)
    assert all(torch.equal(ours, theirs) for (ours, _), theirs in zip(loader, expected, strict=True))
    assert worker.is_alive()
    for kept_out in ("SigIgn", "SigBlk"):  # Ctrl-C reaches all processes of a terminal, also during the worker's start
        assert signal.SIGINT in signals(worker.pid, kept_out)
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(timeout=60)
    assert worker.exitcode == 0


def start_a_worker(pipe):
    """Start a worker that writes its process id to the pipe.

    The pipe closes when the worker and this process have exited.
    """

    def work():
        obey_only_parent()
        os.write(pipe, b"%d" % os.getpid())
        time.sleep(600)

    multiprocessing.get_context("fork").Process(target=work).start()


def test_a_worker_exits_if_its_parent_dies_during_the_start():
    """A worker exits if its parent dies before PyTorch starts to monitor the parent."""
    read, write = os.pipe()
    parent = multiprocessing.get_context("fork").Process(target=start_a_worker, args=(write,))
    parent.start()
    os.close(write)
    worker = int(os.read(read, 100))
    try:
        os.kill(worker, signal.SIGTERM)
        os.kill(worker, signal.SIGUSR1)
        assert not select.select([read], [], [], 0.5)[0]
        parent.kill()
        parent.join()
        assert select.select([read], [], [], 60)[0]
        assert os.read(read, 1) == b""
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_an_unused_loader_in_a_reference_cycle_stops_its_workers_silently(image_folder, monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    loader, _ = training_set(image_folder, workers=2)
    children, loader.itself = loader.loader._iterator._workers, loader
    del loader
    others = set(threading.enumerate())
    gc.collect()
    for thread in set(threading.enumerate()) - others:  # multiprocessing queues have feeder threads
        thread.join()
    assert not said
    assert not any(child.is_alive() for child in children)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_pieces_form_batches_with_any_number_of_workers(image_folder, started, monkeypatch, count):
    """Pieces of at most 3 images form the batches of a split of 28 images with 0, 1 or 3 workers, in every epoch."""
    monkeypatch.setattr("vil.data.plan.PIECE", 3)
    made = []  # loader and worker processes, created in a separate thread
    (thread := threading.Thread(target=lambda: made.extend(started(count, batch_size=9)))).start()
    thread.join()
    loader, processes = made
    assert len(processes) == count
    # the prefetch factor is that of the plan, not PyTorch's default of 2
    assert loader.images.loader.prefetch_factor == loader.images.plan.prefetch != 2
    for _ in range(2):
        assert [len(images) for images, _ in loader] == [9, 9, 9, 1]
        assert joined(loader)[1] == [number for number in range(4) for _ in range(7)]
    # the caller's tensors are not in shared memory
    assert not any(tensor.is_shared() for batch in loader for tensor in batch)
    trained, keys = training_set(image_folder, workers=count, global_batch_size=16)
    expected = [trained.dataset.dataset.reader[index][1] for index, _ in keys]
    assert joined(trained)[1] == expected
