"""Training runs of a few real processes that tests can signal, kill and starve, started in a fraction of a second.

The processes are forked from one that has imported everything, and talk over gloo, or on GPUs over NCCL.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from processes import CONTEXT, SMALL, become, free_port

from vil import checkpoint

# eight steps an epoch, so that there is much of it to be interrupted in
OPTIONS = SMALL | dict(global_batch_size=8, epochs=2, workers=0, checkpoint_interval="1", experiment="run")


class Run:
    """The processes of one start of train_imagenet.py, its folder is `output`/run.

    Args:
        output: Where it writes.
        processes: How many.
        prepare: Called in each process before it trains.
        options: Of the config, besides OPTIONS, and the device: a CPU if it is not given.
    """

    def __init__(self, output: Path, processes: int, prepare: Callable[[], None] | None = None, **options):
        self.folder, self.log = output / "run", output / "log.txt"
        for left in self.folder.glob(".last.pt.*"):  # by a process killed before
            left.unlink()
        config = output / "faults.yaml"
        config.write_text(yaml.safe_dump(OPTIONS | dict(device="cpu", output=str(output), resume="auto") | options))
        port = free_port()
        self.ranks = [
            CONTEXT.Process(target=_train, args=(rank, processes, port, str(config), str(self.log), prepare))
            for rank in range(processes)
        ]
        self.seen = self._last_file()
        for process in self.ranks:
            process.start()

    def wait(self, seconds: float = 300) -> list[int]:
        """The exit codes of all processes, which must end by themselves; -9 for one that SIGKILL ended."""
        end = time.monotonic() + seconds
        for process in self.ranks:
            process.join(max(0, end - time.monotonic()))
        late = [process for process in self.ranks if process.is_alive()]
        for process in late:
            process.kill()
        assert not late, f"{len(late)} processes hang after {seconds} s: {self.log.read_text()[-3000:]}"
        return [process.exitcode for process in self.ranks]

    def finished(self, seconds: float = 300) -> dict:
        """Its result, once all processes have ended without an error."""
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
            with contextlib.suppress(ProcessLookupError):  # it ended before
                os.kill(self.ranks[rank].pid, number)

    def wait_for_saves(self, count: int) -> None:
        """Returns once a number of checkpoints have been completed since it was last called, or the run is over."""
        while count and self.is_running():
            now = self._last_file()
            if now != self.seen:
                self.seen, count = now, count - 1
            time.sleep(0.001)

    def _last_file(self) -> int | None:
        try:
            return (self.folder / "last.pt").stat().st_ino
        except FileNotFoundError:  # or between two renamings
            return None

    def wait_until_it_heeds_signals(self) -> None:
        """All processes, as from when they have something to save."""
        while self.is_running() and not all(map(_heeds_signals, self.ranks)):
            time.sleep(0.001)

    def wait_for_words(self, words: str) -> None:
        """Returns once the log has them, or the run is over."""
        while self.is_running() and words not in self.said():
            time.sleep(0.01)

    def wait_for_a_save_to_begin(self) -> None:
        while not any(self.folder.glob(".last.pt.*")) and self.is_running():
            pass

    def said(self) -> str:
        """The log of all processes."""
        return self.log.read_text() if self.log.exists() else ""

    def result(self) -> dict:
        return result(self.folder)


def result(folder: Path) -> dict:
    """What the last checkpoint of a run holds, without what differs from one run to another."""
    saved = checkpoint.read_checkpoint(folder / "last.pt")
    measured = (
        "images_per_second", "data_wait_percent", "gpu_wait_percent", "peak_memory_gib", "eval_images_per_second",
    )  # fmt: skip
    history = [{name: row[name] for name in row if name not in measured} for row in saved["history"]]
    names = ("epoch", "state_dict", "state_dict_ema", "optimizer", "scheduler", "amp_scaler")
    return {name: saved[name] for name in names} | dict(history=history, losses=saved["progress"]["losses"])


def same(value, other) -> bool:
    """Whether two results, or parts of them, are equal, tensors bit for bit."""
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return value == other


def assert_same(result: dict, truth: dict) -> None:
    """Two results are equal, bit for bit."""
    for part in truth:
        assert same(result[part], truth[part]), part


def before(owner: type, method: str, act: Callable[[], None], call: int = 1, rank: int = 0) -> None:
    """Has one process do something before one of its calls of a method; for `prepare`."""
    original, calls = getattr(owner, method), []

    def called(*arguments):
        calls.append(None)
        if os.environ.get("RANK", "0") == str(rank) and len(calls) == call:
            act()
        return original(*arguments)

    setattr(owner, method, called)


def print_digest():
    """Has each process print at its end what its model and its EMA came to; for `prepare`."""
    import train_imagenet

    original = train_imagenet.Trainer.run

    def run(trainer):
        original(trainer)
        tensors = [*trainer.model.state_dict().values(), *trainer.ema.module.state_dict().values()]
        print("digest", hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest(), flush=True)

    train_imagenet.Trainer.run = run


def _train(rank: int, processes: int, port: int, config: str, log: str, prepare: Callable[[], None] | None) -> None:
    import train_imagenet

    become(rank, processes, port, log, log)
    if prepare:
        prepare()
    sys.argv = ["train_imagenet.py", "-c", config]
    train_imagenet.main()


def _heeds_signals(process) -> bool:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
