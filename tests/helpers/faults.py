"""Training runs in separate processes that tests can signal, kill or deprive of files and memory.

The processes are forked from a process that has imported PyTorch and this package, so runs start without slow imports.
Ranks communicate over gloo on CPUs and over NCCL on GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from processes import ROOT, SMALL, Forked, become, draw_nothing, free_port

from vil import checkpoint

MEASURED = (
    "images_per_second", "data_wait_percent", "gpu_wait_percent", "peak_memory_gib", "eval_images_per_second",
)  # fmt: skip
# each epoch has eight steps, so that a run can be interrupted at many points
OPTIONS = SMALL | dict(global_batch_size=8, epochs=2, workers=0, checkpoint_interval="1", experiment="run")


class Run:
    """One start of train_imagenet.py with several processes, whose run folder is `output`/run.

    Args:
        output: Output folder.
        processes: World size.
        prepare: Function that each process calls before training.
        options: Config options in addition to OPTIONS, and the device (default: CPU).
    """

    def __init__(self, output: Path, processes: int, prepare: Callable[[], None] | None = None, **options):
        self.folder, self.log = output / "run", output / "log.txt"
        for left in self.folder.glob(".last.pt.*"):  # temporary files left by a killed process
            left.unlink()
        config = output / "faults.yaml"
        config.write_text(yaml.safe_dump(OPTIONS | dict(device="cpu", output=str(output), resume="auto") | options))
        port = free_port()
        self.ranks = [
            Forked(target=_train, args=(rank, processes, port, str(config), str(self.log), prepare))
            for rank in range(processes)
        ]
        self.seen = self._last_file()
        for process in self.ranks:
            process.start()

    def wait(self, seconds: float = 300) -> list[int]:
        """Wait for all processes to end by themselves, then return their exit codes (-9 after SIGKILL)."""
        end = time.monotonic() + seconds
        for process in self.ranks:
            process.join(max(0, end - time.monotonic()))
        late = [process for process in self.ranks if process.is_alive()]
        for process in late:
            process.kill()
        assert not late, f"{len(late)} processes are still running after {seconds} s: {self.log.read_text()[-3000:]}"
        return [process.exitcode for process in self.ranks]

    def finished(self, seconds: float = 300) -> dict:
        """Wait for all processes to end without an error, then return the run's result."""
        codes = self.wait(seconds)
        assert codes == [0] * len(codes), self.log.read_text()[-3000:]
        return result(self.folder)

    def is_running(self) -> bool:
        return all(process.is_alive() for process in self.ranks)

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            with contextlib.suppress(ProcessLookupError):  # the process has ended already
                os.kill(self.ranks[rank].pid, number)

    def wait_for_saves(self, count: int) -> None:
        """Wait until the run has written `count` more checkpoints, or a process has ended."""
        while count and self.is_running():
            now = self._last_file()
            if now != self.seen:
                self.seen, count = now, count - 1
            time.sleep(0.001)

    def _last_file(self) -> int | None:
        try:
            return (self.folder / "last.pt").stat().st_ino
        except FileNotFoundError:  # last.pt does not exist yet or, without hard links, is being replaced
            return None

    def wait_until_it_heeds_signals(self) -> None:
        """Wait until all processes have installed signal handlers, because they then have training state to save."""
        while self.is_running() and not all(signal.SIGUSR1 in signals(rank.pid, "SigCgt") for rank in self.ranks):
            time.sleep(0.001)

    def wait_for_words(self, words: str) -> None:
        """Wait until the log contains `words`, or a process has ended."""
        while self.is_running() and words not in self.said():
            time.sleep(0.01)

    def wait_for_a_save_to_begin(self) -> None:
        while not any(self.folder.glob(".last.pt.*")) and self.is_running():
            pass

    def said(self) -> str:
        """Return the log of all processes."""
        return self.log.read_text() if self.log.exists() else ""

    def result(self) -> dict:
        return result(self.folder)


class Torchrun:
    """Training run started by torchrun, with the run folder `output`/run.

    torchrun is forked from the tests' fork server, and forks the training processes.

    Args:
        output: Output folder of the run.
        words: Command-line arguments of torchrun.
        name: Base name of the log file and the config file in `output`.
        options: Config options in addition to OPTIONS.
    """

    def __init__(self, output: Path, words: list[str], name: str = "torchrun", **options):
        config, self.log = output / f"{name}.yaml", output / f"{name}.txt"
        config.write_text(yaml.safe_dump(OPTIONS | dict(device="cpu", output=str(output)) | options))
        words = ["--start-method=fork", "--monitor-interval=0.1", *words, "--run-path"]
        words += [str(ROOT / "train_imagenet.py"), "-c", str(config)]
        self.launcher = Forked(target=_launch, args=(words, str(self.log)))
        self.launcher.start()

    @property
    def workers(self) -> list[int]:
        """Process ids of the training processes."""
        children = Path(f"/proc/{self.launcher.pid}/task").glob("*/children")
        return [int(child) for file in children for child in file.read_text().split()]

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.launcher.is_alive(), self.said()[-3000:]
            time.sleep(0.01)

    def wait(self, seconds: float) -> int:
        self.launcher.join(seconds)
        assert self.launcher.exitcode is not None, f"torchrun is still running: {self.said()[-3000:]}"
        return self.launcher.exitcode

    def cut_the_power(self) -> None:
        os.kill(self.launcher.pid, signal.SIGSTOP)  # a stopped torchrun cannot react to the death of its workers
        for process in (*self.workers, self.launcher.pid):
            os.kill(process, signal.SIGKILL)


def result(folder: Path) -> dict:
    """Return the training state and losses of a run's last.pt, without values that differ between identical runs."""
    saved = checkpoint.Checkpoint(folder / "last.pt").training_state()
    history = [without_measured(row) for row in saved["history"]]
    names = ("epoch", "state_dict", "state_dict_ema", "optimizer", "scheduler", "amp_scaler")
    return {name: saved.get(name) for name in names} | dict(history=history, losses=saved["progress"]["losses"])


def without_measured(row: dict) -> dict:
    """Return a history row without measured columns, such as throughput, which differ between identical runs."""
    return {name: value for name, value in row.items() if name not in MEASURED}


def same(value, other) -> bool:
    """Return whether two results (nested containers) are equal, with tensors bitwise identical."""
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return value == other


def assert_same(result: dict, truth: dict) -> None:
    """Assert that two results are bitwise identical."""
    for part in truth:
        assert same(result[part], truth[part]), part


def before(owner: type, method: str, act: Callable[[], None], call: int = 1, rank: int = 0) -> None:
    """Patch a method so that one rank runs `act` immediately before the method's n-th call (n = `call`)."""
    original, calls = getattr(owner, method), []

    def called(*arguments):
        calls.append(None)
        if os.environ.get("RANK", "0") == str(rank) and len(calls) == call:
            act()
        return original(*arguments)

    setattr(owner, method, called)


def _launch(words: list[str], log: str) -> None:
    from torch.distributed.run import main

    os.environ.update(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    become(0, 1, 0, log, log)
    draw_nothing()
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    # Disable PyTorch's parent-death signal, because this package sets its own.
    spawn._prctl_pr_set_pdeathsig = lambda number: None
    main(words)


def _train(rank: int, processes: int, port: int, config: str, log: str, prepare: Callable[[], None] | None) -> None:
    from vil.cli import train as program

    become(rank, processes, port, log, log)
    draw_nothing()
    if prepare:
        prepare()
    sys.argv = ["train_imagenet.py", "-c", config]
    program.main()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def signals(pid: int, what: str) -> set[int]:
    """Return the signals that a process catches, ignores or blocks, from the line SigCgt, SigIgn or SigBlk in /proc."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except FileNotFoundError:
        return set()
    return {number for number in range(1, 65) if int(status[what], 16) >> (number - 1) & 1}
