"""Tests of the lines that a run prints without a terminal."""

import io
import sys
from types import SimpleNamespace

import pytest

from vil.config import Config
from vil.training import progress as printing
from vil.training.phases import Phase
from vil.training.progress import Progress

ROW = dict(train_loss=1.0, eval_loss=2.0, eval_top1=50.0, images_per_second=80.0)


class Run:
    """A run of five epochs of 100 steps, whose clock a test advances."""

    def __init__(self, monkeypatch, tmp_path, step=0, rank=0, terminal=False, **options):
        self.now, self.lines, self.history = 0.0, [], []
        monkeypatch.setattr(printing, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(printing.tqdm, "write", self.lines.append)
        stderr = io.StringIO()
        stderr.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", stderr)
        config = Config(epochs=5, output=str(tmp_path), experiment="run", **options)
        info = SimpleNamespace(phase=Phase.of(config, 0), folder=tmp_path, options={})
        self.progress = Progress(info, rank, "1 x cpu", [], 100, step)

    def train(self, steps, seconds):
        for number in range(steps):
            self.now += seconds
            if number % 10 == 9:
                self.progress.show(0.5, 1e-3)
            self.progress.finish_step()

    def finish_epoch(self):
        self.history.append(ROW | dict(epoch=len(self.history) + 1))
        self.progress.finish_epoch(self.history)


pytestmark = pytest.mark.usefixtures("no_pictures")


def test_each_epoch_reports_its_time_and_the_remaining_time(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path)
    for epoch, evaluation in enumerate((70, 30)):
        run.progress.start_epoch(epoch)
        run.train(100, seconds=0.5)
        run.now += evaluation
        run.finish_epoch()
    assert [line.partition("images/s, ")[2] for line in run.lines] == [
        "epoch time 02:00, 08:00 remaining",
        "epoch time 01:20, 05:00 remaining",  # 3 epochs are left, and epochs took 1:40 on average
    ]


def test_a_long_epoch_prints_a_line_about_every_minute_unless_a_terminal_shows_a_bar(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path, step=50)
    run.progress.start_epoch(0)
    run.train(30, seconds=10)
    assert run.lines == [
        f"epoch 1/5: step {step}/100, loss 0.5000, learning rate 1.00e-03, {left} remaining"
        for step, left in ((60, "1:13:20"), (70, "1:11:40"), (80, "1:10:00"))
    ]
    for options in (dict(rank=1), dict(terminal=True)):
        run = Run(monkeypatch, tmp_path, **options)
        run.progress.start_epoch(0)
        run.train(30, seconds=10)
        assert run.lines == []


def test_the_remaining_time_of_a_run_with_phases_is_that_of_the_phase(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path, phases=[dict(epochs=2), dict(epochs=3)])
    run.progress.start_epoch(0)
    run.train(100, seconds=0.5)
    run.finish_epoch()
    assert run.lines[0].endswith("epoch time 00:50, 00:50 remaining in this phase")
