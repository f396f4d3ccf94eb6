"""The loaders' processes: how many a machine gets, in which memory they hand over images, and how they are missed."""

import multiprocessing
import os
import shutil
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_data import CPU, DATA_CONFIG, small_config

from vil.config import ConfigError
from vil.data import workers
from vil.data.loaders import describe, evaluation_loader, micro_batches, training_loader
from vil.data.readers import ImageReader
from vil.data.samplers import TrainingBatches
from vil.data.splits import open_split
from vil.data.workers import share_cores

GPU = torch.device("cuda")
MIB = 2**20


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes believe of a machine's cores and control groups (by file), and of local processes."""
    for name in ("CGROUPS", "GROUPS_OF_PROCESS"):
        monkeypatch.setattr(workers, name, tmp_path / name)

    def make(cores, groups="", processes=None, **files):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
        (tmp_path / "GROUPS_OF_PROCESS").write_text(groups)
        for name, content in files.items():
            path = tmp_path / "CGROUPS" / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if processes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))

    return make


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("", {}, 24),
        ("0::/\n", {"cpu_DOT_max": "600000 100000\n"}, 6),
        ("0::/\n", {"cpu_DOT_max": "max 100000\n"}, 24),
        ("0::/\n", {"cpu_DOT_max": "3200000 100000\n"}, 24),
        ("0::/\n", {"cpu_DOT_max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu_DOT_max": "50000 100000\n"}, 1),
        ("0::/outside/the/container\n", {"cpu_DOT_max": "600000 100000\n"}, 6),
        ("0::/job/step\n", {"job__cpu_DOT_max": "800000 100000\n", "job__step__cpu_DOT_max": "max 100000\n"}, 8),
        ("0::/job/step\n", {"job__cpu_DOT_max": "max 100000\n", "job__step__cpu_DOT_max": "400000 50000\n"}, 8),
        ("0::/job\n", {"job__cpu_DOT_max": "nonsense\n"}, 24),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n",
            {"cpu,cpuacct__x__cpu_DOT_cfs_quota_us": "500000\n", "cpu,cpuacct__x__cpu_DOT_cfs_period_us": "100000\n"},
            5,
        ),
        (
            "3:cpu,cpuacct:/x\n",
            {"cpu,cpuacct__cpu_DOT_cfs_quota_us": "-1\n", "cpu,cpuacct__cpu_DOT_cfs_period_us": "100000\n"},
            24,
        ),
    ],
)
def test_a_process_may_use_the_cores_it_is_bound_to_within_its_containers_quota(machine, groups, files, cores):
    machine(24, groups, **files)
    assert workers.usable_cores() == cores


@pytest.mark.parametrize(
    ("cores", "processes", "expected"),
    [(16, None, 14), (64, 4, 14), (8, 1, 6), (4, 1, 3), (2, 1, 1), (1, 1, 1), (8, 8, 1), (6, 8, 1), (256, 1, 16)],
)
def test_a_gpus_process_leaves_itself_a_core_or_two_and_loads_with_the_others(machine, cores, processes, expected):
    machine(cores, processes=processes)
    assert workers.default_workers(GPU) == expected


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 16)])
def test_a_cpu_that_trains_has_most_cores_for_that(machine, cores, expected):
    machine(cores)
    assert workers.default_workers(CPU) == expected


@pytest.mark.parametrize(("wanted", "threads"), [(0, 6), (2, 4), (5, 1), (9, 1), (None, 5)])
def test_workers_get_cores_of_their_own(machine, monkeypatch, wanted, threads):
    machine(6)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        share_cores(CPU, wanted)
        monkeypatch.delenv("OMP_NUM_THREADS")
        share_cores(GPU, wanted)
        assert torch.get_num_threads() == 3  # who says how many, or trains on a GPU, keeps them
        share_cores(CPU, wanted)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# shared memory


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """Makes believe of so much free memory."""

    def make(mebibytes):
        monkeypatch.setattr(workers, "SHARED_MEMORY", tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(mebibytes * MIB)))

    return make


def plan(wanted=None, batch_size=256, pieces=1000, piece_mib=10.0, on_device=False):
    made = workers.choose_settings(wanted, GPU, batch_size, pieces, int(piece_mib * MIB), on_device)
    return made.workers, made.prefetch


def test_workers_are_no_more_than_there_is_work_for(machine, shared_memory):
    machine(16)
    shared_memory(10_000)
    assert plan() == (14, 2)
    assert plan(pieces=3)[0] == 3
    assert plan(pieces=0)[0] == 1
    assert plan(wanted=30, pieces=3)[0] == 30  # who says how many gets them
    assert plan(wanted=0) == (0, None)


def test_a_few_workers_prepare_whole_batches_ahead(machine, shared_memory):
    machine(16)
    shared_memory(10_000)
    for wanted, batch_size in ((2, 256), (1, 1024), (14, 1024), (4, 8)):
        count, prefetch = plan(wanted, batch_size)
        assert prefetch >= 2
        assert count * prefetch * workers.PIECE >= 3 * batch_size


@pytest.mark.parametrize(
    ("free", "processes", "expected"),
    [(300, 1, (14, 2)), (200, 1, (14, 1)), (100, 1, (8, 1)), (64, 1, (4, 1)), (30, 1, (1, 1)), (200, 2, (8, 1))],
)
def test_with_little_shared_memory_there_are_fewer_pieces_and_workers_and_a_line_says_so(
    machine, shared_memory, caplog, free, processes, expected
):
    machine(16 * processes, processes=processes)
    shared_memory(free)
    count, prefetch = plan()
    assert (count, prefetch) == expected
    assert processes * (count * prefetch + 2) * 10 <= free
    lines = [record.getMessage() for record in caplog.records]
    if expected == (14, 2):
        assert lines == []
    else:
        (line,) = lines
        assert (
            f"has {free} MiB free: {count} workers with {prefetch} x 64 images prefetched in place of 14 with 2" in line
        )
        assert "--shm-size" in line


def test_too_little_shared_memory_for_one_worker_is_refused_with_what_helps(machine, shared_memory):
    machine(16)
    shared_memory(29)
    with pytest.raises(
        ConfigError, match="has 29 MiB free, and loading .* least 30: .*--shm-size=8g, or .*--workers 0"
    ):
        plan()
    with pytest.raises(ConfigError, match="at least 130:"):  # files that a device reads stay there until it has
        plan(on_device=True)
    assert plan(wanted=0) == (0, None)


class Full:
    """Tells a worker that there is no shared memory left."""

    def __init__(self, monkeypatch):
        parent = os.getpid()
        usage = shutil.disk_usage
        free = lambda folder: usage(folder) if os.getpid() == parent else SimpleNamespace(free=100)  # noqa: E731
        monkeypatch.setattr(shutil, "disk_usage", free)


@pytest.fixture
def ended():
    """Ends what workers a test leaves: PyTorch would give each five seconds."""
    before = set(multiprocessing.active_children())
    yield
    for worker in set(multiprocessing.active_children()) - before:
        worker.kill()
        worker.join()


def small_loader(image_folder, count=1):
    return evaluation_loader(open_split(str(image_folder), "", "val"), DATA_CONFIG, CPU, count, 5, 0, 1)


def test_a_worker_that_finds_shared_memory_full_says_so_in_one_line(image_folder, monkeypatch, ended):
    Full(monkeypatch)
    loader = small_loader(image_folder)
    with pytest.raises(ConfigError) as caught:
        list(loader)
    message = str(caught.value)
    assert message.startswith(f"{workers.SHARED_MEMORY} is full: 0 MiB free")
    assert "--shm-size=8g; --workers 0 needs none" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("number", "remedy"), [(signal.SIGBUS, "/dev/shm is full: .*--shm-size"), (signal.SIGKILL, "fewer --workers")]
)
def test_a_worker_that_is_killed_is_one_line(image_folder, monkeypatch, number, remedy, ended):
    monkeypatch.setattr(ImageReader, "__getitem__", lambda *_: os.kill(os.getpid(), number))
    loader = small_loader(image_folder)
    with pytest.raises(ConfigError, match=remedy) as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("DataLoader worker (pid")


def outlive(worker):
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(60)


def test_a_worker_that_is_killed_while_nobody_waits_for_it_is_one_line(image_folder, ended):
    """PyTorch raises its error in whatever the main thread is at."""
    before = set(multiprocessing.active_children())
    loader = small_loader(image_folder)
    (worker,) = set(multiprocessing.active_children()) - before
    next(iter(loader))
    with pytest.raises(ConfigError, match="fewer --workers"):
        outlive(worker)


def test_an_error_of_other_code_is_not_one_of_the_workers():
    with pytest.raises(RuntimeError, match="of the model"), workers.lost_workers_named():
        raise RuntimeError("of the model")


def test_pieces_make_up_the_batches(image_folder, monkeypatch):
    """Of 28 images, in pieces of at most 3, by one worker or several."""
    monkeypatch.setattr("vil.data.samplers.PIECE", 3)
    monkeypatch.setattr("vil.data.host_loader.PIECE", 3)
    split = open_split(str(image_folder), "", "val")
    whole = [split.reader[i][1] for i in range(28)]
    for count in (0, 1, 3):
        loader = evaluation_loader(split, DATA_CONFIG, CPU, count, 8, 0, 1)
        for _ in range(2):
            batches = list(loader)
            assert [len(images) for images, _ in batches] == [8, 8, 8, 4]
            assert [target for _, targets in batches for target in targets.tolist()] == whole
    trained = small_config(image_folder, workers=2, aug_repeats=0)
    split = open_split(str(image_folder), "", "train", is_training=True)
    batches = TrainingBatches(len(split), trained, 16, 0, 1)
    loader = training_loader(split, trained, DATA_CONFIG, CPU, batches)
    expected = [[split.reader[i][1] for i, _ in batch] for batch in batches]
    assert [targets.tolist() for (_, targets), _ in micro_batches(loader, batches, 0)] == expected


def test_a_loader_says_how_it_loads(image_folder):
    assert describe(small_loader(image_folder, 0)) == ("no workers, decoding and augmenting in the training process")
    assert describe(small_loader(image_folder, 1)) == "1 worker, decoding and augmenting in the workers"
    assert str(workers.LoaderSettings(8, 2, on_device=True)) == "8 workers, decoding and augmenting on the device"


def test_a_batch_of_pieces_is_that_of_the_images(image_folder):
    loader = small_loader(image_folder, 0)
    images, targets = (torch.cat(parts) for parts in zip(*loader))
    assert (images.dtype, targets.dtype) == (torch.uint8, torch.int64)
    assert np.array_equal(targets.bincount(), [7] * 4)
