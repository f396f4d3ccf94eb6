"""Tests of how the processes of a run connect, communicate, restart and exit together."""

import contextlib
import functools
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm.utils
import torch
import torch.distributed as dist
from processes import free_port, in_processes, run, script

from vil import distributed
from vil.config import ConfigError
from vil.fault_tolerance import watchdog
from vil.fault_tolerance.signals import signals_handled_in_thread


def meet(rank):
    device, *place = distributed.init_process_group("cpu")
    value = torch.full((2,), 10.0**rank)
    total = distributed.all_reduce_sum(value)
    rows = distributed.all_gather_interleaved(torch.full(((1, 3, 0)[rank],), LARGE + rank))
    outcomes = [str(device), place, dist.get_rank(), total.tolist(), value.tolist(), rows.tolist()]

    calls = []
    sent = {"rank": rank, "list": [1.5, "text", None, True], "tensor": torch.arange(3)}
    outcomes.append(str(distributed.broadcast_from_rank0(lambda: calls.append(rank) or sent)))

    def refuse(error):
        calls.append(rank)
        raise error

    for error in (OSError(f"rank {rank} refuses"), ConfigError()):
        try:
            distributed.broadcast_from_rank0(functools.partial(refuse, error))
        except (type(error), distributed.Rank0Error) as error:
            outcomes.append(str(error))
    with contextlib.suppress(pickle.UnpicklingError):  # PyTorch rejects a pickle that could run code
        outcomes.append(distributed.broadcast_from_rank0(lambda: os.getcwd) is os.getcwd)
    distributed.destroy_process_group()
    return [*outcomes, calls, dist.is_initialized()]


LARGE = 2**24 + 1  # the smallest positive integer that fp32 cannot represent
FROM_FIRST = "{'rank': 0, 'list': [1.5, 'text', None, True], 'tensor': tensor([0, 1, 2])}"


def test_processes_all_reduce_gather_and_receive_what_rank_0_broadcasts():
    for rank, ended in enumerate(in_processes(3, meet)):
        said = ["cpu", [rank, 3], rank, [111.0] * 2, [111.0] * 2]
        said += [[LARGE, *[LARGE + 1] * 3], FROM_FIRST, "rank 0 refuses", ""]
        assert ended.value == [*said, *([True, [0, 0, 0]] if rank == 0 else [[]]), False], ended.errors
        assert (ended.status, ended.errors) == (0, "")


def test_a_single_process_initializes_no_process_group():
    assert distributed.init_process_group("cpu") == (torch.device("cpu"), 0, 1)
    assert not dist.is_initialized()
    value = torch.tensor([3.0])
    assert distributed.all_reduce_sum(value) is value
    assert value.tolist() == [3.0]
    assert distributed.broadcast_from_rank0(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        distributed.broadcast_from_rank0(lambda: 1 / 0)
    distributed.destroy_process_group()
    with ThreadPoolExecutor() as pool:  # signal.set_wakeup_fd fails outside the main thread
        assert pool.submit(distributed.init_process_group, "cpu").result() == (torch.device("cpu"), 0, 1)


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", None), ("cuda", "cpu:gloo,cuda:nccl"), ("cuda:0", "cpu:gloo,cuda:nccl")]
)
@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError(), "unknown reason"), (dist.DistNetworkError("nobody\nthere"), "nobody")]
)
def test_hosts_communicate_over_gloo_and_a_missing_rank_is_reported_in_one_line(
    monkeypatch, device, backend, error, reason
):
    def meet_nobody(process):
        assert (process.device, process.dist_backend) == (device, backend)
        raise error

    monkeypatch.setattr(timm.utils, "init_distributed_device", meet_nobody)
    with pytest.raises(ConfigError, match=f"failed to initialize the process group .*: {reason}. Start"):
        distributed.init_process_group(device)


@pytest.fixture
def launched(monkeypatch):
    """Unset the environment variables of launchers, and return a function that sets given environment variables."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_"))] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    return lambda variables: [monkeypatch.setenv(*pair.split("=")) for pair in variables.split()]


PLACE = "MASTER_ADDR=localhost MASTER_PORT=29500"


@pytest.mark.parametrize(
    ("variables", "found", "lacks"),
    [
        # A shell started by salloc can have SLURM_NTASKS and SLURM_PROCID, but has no address of rank 0.
        ("SLURM_NTASKS=4 SLURM_PROCID=0", "SLURM_NTASKS=4", "MASTER_ADDR, MASTER_PORT"),
        (f"SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 {PLACE}", "SLURM_NTASKS=4", "step, got 1"),
        ("SLURM_NTASKS=4", "SLURM_NTASKS=4", "WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT"),
        ("WORLD_SIZE=4", "WORLD_SIZE=4", "RANK, MASTER_ADDR, MASTER_PORT"),
        ("WORLD_SIZE=4 SLURM_NTASKS=1 RANK=0 MASTER_ADDR=x", "WORLD_SIZE=4", "(MASTER_PORT):"),
        (f"WORLD_SIZE=4 RANK=4 {PLACE}", "WORLD_SIZE=4", "rank 4"), ("WORLD_SIZE=", "WORLD_SIZE", "number"),
        (f"WORLD_SIZE=2 RANK=one {PLACE}", "RANK", "number"), ("SLURM_NTASKS=4(x2)", "SLURM_NTASKS", "number"),
        (f"WORLD_SIZE=2 RANK=0 LOCAL_RANK=x {PLACE}", "LOCAL_RANK", "number"),
    ],
)  # fmt: skip
def test_an_incomplete_launcher_environment_is_rejected(launched, variables, found, lacks):
    launched(variables)
    with pytest.raises(ConfigError) as caught:
        distributed.init_process_group("cpu")
    assert found in str(caught.value)
    assert lacks in str(caught.value)
    assert "unset " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "variables",
    ["SLURM_NTASKS=1 SLURM_PROCID=0", "WORLD_SIZE=1 SLURM_NTASKS=4", "RANK=0", "RANK=3", "WORLD_SIZE=1 RANK=x"],
)
def test_a_launcher_of_one_process_needs_no_process_group(launched, variables):
    launched(variables)
    assert distributed.init_process_group("cpu") == (torch.device("cpu"), 0, 1)
    # If a stray RANK made the rank nonzero, this process would not log warnings.
    assert distributed.is_rank0()


@pytest.mark.parametrize("variables", ["WORLD_SIZE=2 RANK=1", "SLURM_NTASKS=2 SLURM_PROCID=1"])
def test_the_second_of_two_processes_is_not_rank_0(launched, variables):
    launched(variables)
    assert not distributed.is_rank0()


@pytest.mark.parametrize("program", ["train_imagenet.py", "validate.py"])
def test_training_and_validation_reject_an_interactive_job_with_several_tasks(launched, program):
    launched("SLURM_NTASKS=4 SLURM_PROCID=0")
    words = ["--model", "vil_tiny", *(["--synthetic"] if program == "train_imagenet.py" else [])]
    ended = run([*script(program), *words, "--device", "cpu"], check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert "SLURM_NTASKS" in line


def test_a_run_may_take_longer_than_gloos_default_timeout(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: (backend, timeout.days))
    assert watchdog.RankWatchdog(0, 2).group == ("gloo", 1000)


def die_in_the_middle(rank):
    watchdog.GRACE = 0.1
    distributed.init_process_group("cpu")
    if rank == 1:
        os._exit(7)
    time.sleep(3600)  # simulates a process that waits for its GPU


def test_all_processes_exit_when_one_is_lost():
    first, second, third = in_processes(3, die_in_the_middle)
    assert (first.status, second.status, third.status) == (1, 7, 1)
    assert "error: the process of rank 1 has died, so this process exits" in first.errors
    assert "error: the process of rank 0 has died, so this process exits" in third.errors


def notice_by_itself(rank):
    watchdog.GRACE = 30
    distributed.init_process_group("cpu")
    if rank == 1:
        os._exit(7)
    try:
        distributed.all_reduce_sum(torch.zeros(1))
    except RuntimeError:
        return "noticed"


def test_a_process_whose_collective_fails_has_time_to_report_the_error():
    first, _ = in_processes(2, notice_by_itself)
    assert (first.value, first.status) == ("noticed", 0)
    assert "has died" not in first.errors


def join_and_leave_late(rank):
    def watch(self, *place):
        make_watch(self, *place)
        time.sleep(rank / 4)
        times.append(time.monotonic())

    make_watch, watchdog.RankWatchdog.__init__, watchdog.GRACE = watchdog.RankWatchdog.__init__, watch, 0
    times: list = []
    distributed.init_process_group("cpu")
    times.append(time.monotonic())
    time.sleep(rank / 2)  # higher ranks end later, as if they still had work to do
    times.append(time.monotonic())
    distributed.destroy_process_group()
    times.append(time.monotonic())
    time.sleep(0.5)  # a process that has destroyed its process group must not count as lost
    return times


def test_processes_start_after_all_have_joined_and_leave_after_all_have_finished():
    ended = in_processes(3, join_and_leave_late)
    assert [(status, errors) for _, status, errors in ended] == [(0, "")] * 3
    (_, first_began, _, first_left), _, (last_joined, _, last_arrived, _) = (e.value for e in ended)
    assert first_began >= last_joined
    assert first_left >= last_arrived


def press_ctrl_c(rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), signals_handled_in_thread():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        return "went on"
    return "interrupted", signal.set_wakeup_fd(-1)


def test_ctrl_c_interrupts_only_the_waiting_main_thread():
    (ended,) = in_processes(1, press_ctrl_c)
    assert (ended.value, ended.errors) == (("interrupted", -1), "")  # no signal writes to the closed pipe


def restart(rank, count):
    """Join a process group like a process of torchrun, which keeps the group's store and counts restarts."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(count))
    distributed.init_process_group("cpu")
    total = distributed.all_reduce_sum(torch.ones(1)).item()
    if count == 0:
        os._exit(7)
    distributed.destroy_process_group()
    return total


def restart_alone(rank):
    distributed.RESTART_TIMEOUT = 0.5
    if rank == 0:
        restart(rank, 2)


def test_restarted_processes_ignore_the_keys_of_earlier_ones_and_wait_a_limited_time():
    port = free_port()
    _store = dist.TCPStore("localhost", port, is_master=True)
    assert [ended.status for ended in in_processes(2, restart, 0, port=port)] == [7, 7]
    for ended in in_processes(2, restart, 1, port=port):
        assert (ended.value, ended.status) == (2.0, 0), ended.errors
    alone, _ = in_processes(2, restart_alone, port=port)
    assert alone.status == 1
    assert "\nerror: not all 2 processes were restarted within 0.5 seconds: restart the run" in alone.errors
