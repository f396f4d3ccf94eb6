"""Training runs of a few real processes that tests can signal, kill and starve, started in a fraction of a second.

The processes are forked from one that has imported everything, and talk over gloo, or on GPUs over NCCL.
"""

from __future__ import annotations

import contextlib
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
        while self.is_running() and not (self.log.exists() and words in self.log.read_text()):
            time.sleep(0.01)

    def wait_for_a_save_to_begin(self) -> None:
        while not any(self.folder.glob(".last.pt.*")) and self.is_running():
            pass

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


def assert_same(result: dict, truth: dict) -> None:
    """Two results have the same history and weights, bit for bit."""
    assert result["history"] == truth["history"]
    for part in ("state_dict", "state_dict_ema"):
        assert all(torch.equal(result[part][name], tensor) for name, tensor in truth[part].items())


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
