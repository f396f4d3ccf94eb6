"""A run's measurements of itself and its files for people: means and times of an epoch, tables, pictures, logs."""

import csv
import math
import re
import shutil
import statistics
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from figures import kept_figures
from processes import in_processes

from vil import processes
from vil.config import Config, ConfigError
from vil.info import git_commit
from vil.training import summary
from vil.training.summary import Bottleneck, EpochMeter, Reporter


def fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


LOSSES, NORMS = (2.5, 0.1, 0.7), (1.0, float("inf"), 4.0)


def note(meter, losses=LOSSES, norms=NORMS):
    for loss, norm in zip(losses, norms):
        meter.add(torch.tensor(loss), torch.tensor(norm))


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    def strftime(self, form):
        return time.strftime(form)

    def batches(self, count, seconds):
        for batch in range(count):
            self.now += seconds
            yield batch


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(summary, "time", clock)
    return clock


def test_losses_and_norms_are_means_over_the_steps():
    meter = EpochMeter()
    note(meter)
    assert (meter.steps, meter.losses) == (3, [])  # nothing waits for the device
    meter.collect()
    note(meter, [1.5], [math.nan])
    assert meter.steps == 4
    meter.collect()
    meter.collect()
    assert meter.losses == [2.5, fp32(0.1), fp32(0.7), 1.5]
    row = meter.summary(global_batch_size=16)
    assert row["train_loss"] == statistics.fmean([2.5, fp32(0.1), fp32(0.7), 1.5])
    assert row["grad_norm"] == 2.5  # of the steps that the scaler of float16 did not leave out
    meter = EpochMeter()
    note(meter, [1.0], [math.inf])
    meter.collect()
    assert math.isnan(meter.summary(1)["grad_norm"])


def test_times_are_those_from_the_first_wait_for_a_batch_to_the_last_step(clock):
    meter = EpochMeter()
    clock.now += 100  # until the epoch begins
    for _ in meter.timed(clock.batches(5, seconds=3.0)):
        clock.now += 5
        note(meter, [1.0], [1.0])
    clock.now += 2  # the device finishes
    meter.collect()
    clock.now += 1000  # evaluation
    row = meter.summary(global_batch_size=12)
    assert row["images_per_second"] == pytest.approx(5 * 12 / (5 * (3 + 5) + 2))
    assert row["data_wait_percent"] == pytest.approx(100 * 15 / 42)


def test_a_meter_goes_on_where_another_one_stopped(clock):
    whole, first = EpochMeter(), EpochMeter()
    for meter in (whole, first):
        for _ in meter.timed(clock.batches(3, seconds=1.0)):
            clock.now += 2
            note(meter, [0.3], [0.9])
        meter.collect()
    second = EpochMeter()
    second.load_state_dict(first.state_dict())
    clock.now += 1e6  # until the run is resumed
    for meter in (whole, second):
        for _ in meter.timed(clock.batches(2, seconds=4.0)):
            clock.now += 1
            note(meter, [0.7], [1.1])
        meter.collect()
    assert (second.steps, second.losses, second.norms) == (5, whole.losses, whole.norms)
    rows = [meter.summary(8) for meter in (whole, second)]
    assert rows[0] == rows[1]
    assert rows[0]["images_per_second"] == pytest.approx(40 / (3 * 3 + 2 * 5))


def measure(rank):
    processes.join_processes("cpu")
    clock = summary.time = Clock()
    meter = EpochMeter()
    for _ in meter.timed(clock.batches(1, seconds=(1.0, 3.0)[rank])):
        clock.now += (3.0, 1.0)[rank]
        note(meter, [(0.1, 0.2)[rank]], [(1.0, 4.0)[rank]])
    meter.collect()
    row = meter.summary(global_batch_size=16)
    processes.leave_processes()
    return row


def test_means_are_over_all_processes():
    rows = [ended.value for ended in in_processes(2, measure)]
    for row in rows:
        assert row["train_loss"] == (fp32(0.1) + fp32(0.2)) / 2
        assert row["grad_norm"] == 2.5
        assert row["images_per_second"] == 4.0  # 16 are the images of both
        assert row["data_wait_percent"] == 50.0  # 4 of 8 seconds


def looked(clock, steps, caplog):
    """The lines about epochs of steps, each so many seconds for data, for the host's work and for the GPU."""
    bottleneck = Bottleneck()
    with caplog.at_level("WARNING"):
        for epoch in steps:
            meter = EpochMeter()
            for i, (data, host, gpu) in enumerate(epoch, start=1):
                meter.seconds += data + host + gpu
                meter.waited += data
                meter.waited_for_gpu += gpu
                if i % 5 == 0:
                    bottleneck.look(meter, "3 workers")
    return caplog.messages


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ((6, 2, 0.1), r"training waits for images 74% of the time \(3 workers\): more --workers, .* may help"),
        ((2, 5, 0.0), r"the GPU waits for what the host does, 71% of the time: --cuda-graphs, .* may help"),
        ((6, 2, 0.2), None),  # it always has work, for which the host waits
        ((0, 0.1, 9), None),
    ],
)
def test_what_keeps_a_gpu_waiting_is_said_once(clock, caplog, step, said):
    start = [(50, 0, 0)] * 5  # of an epoch, when workers begin to load
    messages = looked(clock, [start, start + [step] * 10, start + [step] * 10], caplog)
    assert len(messages) == (said is not None)
    assert said is None or re.fullmatch(said, messages[0])


def test_the_host_is_two_steps_ahead_of_a_gpu_and_notes_how_long_it_waits(clock, monkeypatch):
    waited_for = []

    class Event:
        def __init__(self, blocking):
            assert blocking  # a host that spins takes a core from the loader
            self.number = len(events)
            events.append(self)

        def record(self):
            pass

        def synchronize(self):
            clock.now += 7
            waited_for.append(self.number)

    events = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    meter = EpochMeter()
    for step in range(5):
        clock.now += 1
        note(meter, [1.0], [1.0])
        assert waited_for == list(range(step - 1))
    assert meter.times == (5 + 3 * 7, 0, 3 * 7)
    meter.collect()
    assert waited_for == [0, 1, 2, 3, 4]
    assert meter.summary(8)["gpu_wait_percent"] == pytest.approx(100 * 35 / 40)


def fill_memory(rank):
    torch.ones(100 * 2**20 // 4)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    meter = EpochMeter()
    note(meter)
    meter.collect()
    return meter.summary(1)["peak_memory_gib"], int(status["VmHWM"].split()[0]) / 2**20


def test_peak_memory_is_what_the_process_has_taken():
    ((taken, truth),) = (ended.value for ended in in_processes(1, fill_memory))
    assert taken == pytest.approx(truth, rel=0.02)


# files


def row(epoch, **values):
    names = ["train_loss", "eval_loss", "eval_loss_ema", "eval_top1", "eval_top1_ema", "eval_top5", "eval_top5_ema"]
    names += ["lr", "grad_norm", "images_per_second", "data_wait_percent", "gpu_wait_percent"]
    names += ["eval_images_per_second", "peak_memory_gib", "unreadable_images"]
    return {"epoch": epoch} | {name: 10 * i + epoch / 8 for i, name in enumerate(names)} | values


HISTORY = [row(1), row(2), row(3, unreadable_images=2.0)]


def test_a_run_says_what_it_was_started_with_each_time(tmp_path, monkeypatch):
    saved = dict(model="vil_tiny", epochs=3, aa=None, model_kwargs=dict(depth=2))
    for resume in ("", "--resume"):
        monkeypatch.setattr(sys, "argv", ["train_imagenet.py", "--epochs", "3", *resume.split()])
        Reporter(tmp_path / "new" / "run", Config(), saved, "1 x cpu")
    folder = tmp_path / "new" / "run"
    config = (folder / "config.yaml").read_text()
    assert yaml.safe_load(config) == saved
    assert re.findall(r"^\w+", config, re.M) == list(saved)  # in the order of the options
    first, second = (folder / "info.txt").read_text().strip().split("\n\n")
    assert first.splitlines()[0].endswith("  train_imagenet.py --epochs 3")
    assert second.splitlines()[0].endswith("  train_imagenet.py --epochs 3 --resume")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", first.partition("  ")[0])
    assert dict(line.split(maxsplit=1) for line in second.splitlines()[1:-1])["commit"] == git_commit()
    assert second.splitlines()[-1] == "1 x cpu"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "info.txt"]


def test_the_table_has_a_row_for_each_epoch(tmp_path, no_pictures):
    report = Reporter(tmp_path, Config(), {}, "1 x cpu")
    for epoch in (1, 2, 3):
        report(HISTORY[:epoch])
    with open(tmp_path / "summary.csv") as file:
        rows = [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]
    assert rows == HISTORY
    assert list(rows[0]) == list(HISTORY[0])
    assert not list(tmp_path.glob("*.tmp"))


def lines(axis):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()}


def test_the_picture_shows_every_column_by_epoch(tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    Reporter(tmp_path, Config(), {}, "1 x cpu")(HISTORY)
    (figure,) = figures
    axes = {axis.get_title(): axis for axis in figure.axes}
    columns = {
        "loss": {"training": "train_loss", "validation": "eval_loss", "validation, EMA": "eval_loss_ema"},
        "top-1 (%)": {"model": "eval_top1", "EMA": "eval_top1_ema"},
        "top-5 (%)": {"model": "eval_top5", "EMA": "eval_top5_ema"},
        "images/s": {"training": "images_per_second", "validation": "eval_images_per_second"},
        "the host waits (% of time)": {"for data": "data_wait_percent", "for the GPU": "gpu_wait_percent"},
    }
    single = {"learning rate": "lr", "norm of the gradient": "grad_norm", "peak memory (GiB)": "peak_memory_gib"}
    single["unreadable images"] = "unreadable_images"
    for title, names in columns.items():
        truth = {label: ([1, 2, 3], [line[name] for line in HISTORY]) for label, name in names.items()}
        assert lines(axes[title]) == truth
        assert {text.get_text() for text in axes[title].get_legend().get_texts()} == set(names)
    for title, name in single.items():
        assert list(lines(axes[title]).values()) == [([1, 2, 3], [line[name] for line in HISTORY])]
        assert axes[title].get_legend() is None
    assert set(axes) == set(columns) | set(single)
    assert {axis.get_xlabel() for axis in figure.axes} == {"epoch"}
    png = (tmp_path / "curve.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (1200, 900)


def test_the_picture_has_no_lines_of_an_average_that_is_not_made_or_was_not_yet(tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    without = {name: value for name, value in row(1).items() if not name.endswith("_ema")}
    Reporter(tmp_path, Config(), {}, "1 x cpu")([without])
    Reporter(tmp_path, Config(), {}, "1 x cpu")([without, row(2)])
    assert [sum(len(axis.get_lines()) for axis in figure.axes) for figure in figures] == [12, 15]
    (loss,) = (axis for axis in figures[1].axes if axis.get_title() == "loss")
    ema = lines(loss)["validation, EMA"][1]
    assert math.isnan(ema[0])
    assert ema[1] == row(2)["eval_loss_ema"]


def test_files_that_cannot_be_written_do_not_stop_a_run(tmp_path, caplog):
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    report = Reporter(tmp_path / "run", Config(), {}, "1 x cpu")
    assert f"could not write {tmp_path / 'run'}" in caplog.text
    shutil.rmtree(tmp_path / "run")
    report(HISTORY)
    assert f"could not write the summary in {tmp_path / 'run'}" in caplog.text


# logs


@pytest.mark.parametrize(
    ("option", "package", "module"),
    [("log_tensorboard", "tensorboard", "torch.utils.tensorboard"), ("log_wandb", "wandb", "wandb")],
)
def test_a_log_without_its_package_is_refused(option, package, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{option} needs a package: pip install {package}"):
        Reporter(tmp_path, Config(**{option: True}), {}, "1 x cpu")


def test_tensorboard_gets_every_column_of_every_epoch(tmp_path, no_pictures):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = Reporter(tmp_path, Config(log_tensorboard=True), {}, "1 x cpu")
    for epoch in (1, 2, 3):
        report(HISTORY[:epoch])
        events = EventAccumulator(str(tmp_path)).Reload()  # also while the run goes on
        for name in HISTORY[0]:
            seen = [(event.step, event.value) for event in events.Scalars(name)]
            assert seen == [(line["epoch"], fp32(line[name])) for line in HISTORY[:epoch]]


class Wandb:
    """Stands for the package: its pages by their options, and the rows that each gets with their steps."""

    def __init__(self, *failures):
        self.pages, self.failures = [], list(failures)

    def init(self, **options):
        if self.failures and (failure := self.failures.pop(0)):
            raise failure
        rows = []
        self.pages.append((options, rows))
        return SimpleNamespace(log=lambda values, step: rows.append(self.accepted(step, values)))

    def accepted(self, step, values):
        assert type(step) is int  # it takes no others
        if self.failures and step == 2:
            raise RuntimeError("their server is down")
        return step, values


@pytest.fixture
def wandb(monkeypatch, no_pictures):
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def reporter(folder):
    return Reporter(folder, Config(log_wandb=True, experiment="mine"), dict(epochs=3), "1 x cpu")


def test_a_resumed_run_goes_on_with_its_page_of_wandb(tmp_path, wandb):
    for epochs in ((1, 2), (3,)):
        report = reporter(tmp_path / "run")
        report.catch_up(HISTORY[: epochs[0] - 1])  # nothing that it has not
        for epoch in epochs:
            report(HISTORY[:epoch])
    reporter(tmp_path / "other")
    options = dict(project="vision-longhorn", name="mine", resume="allow", config=dict(epochs=3), dir=tmp_path / "run")
    assert [page | {"id": None} for page, _ in wandb.pages[:2]] == [options | {"id": None}] * 2
    first, second, other = (page["id"] for page, _ in wandb.pages)
    assert first == second != other
    assert re.fullmatch(r"\w{8,}", first)
    assert [rows for _, rows in wandb.pages] == [[(1, HISTORY[0]), (2, HISTORY[1])], [(3, HISTORY[2])], []]


def test_the_epoch_that_a_killed_run_did_not_report_is_logged_when_it_goes_on(tmp_path, wandb):
    reporter(tmp_path)(HISTORY[:1])
    restored = [{name: float(value) for name, value in line.items()} for line in HISTORY]  # as of a checkpoint
    for _ in range(2):
        reporter(tmp_path).catch_up(restored[:2])
    assert [rows for _, rows in wandb.pages] == [[(1, HISTORY[0])], [(2, restored[1])], []]
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 3


def test_a_log_that_fails_does_not_stop_a_run(tmp_path, wandb, caplog):
    """At the start, where it is tried again, or later."""
    wandb.failures = [ConnectionError("no network"), None, None]
    report = reporter(tmp_path / "run")
    assert "Weights & Biases: no network; the next epoch tries again" in caplog.text
    for epoch in (1, 2, 3):
        report(HISTORY[:epoch])
    assert "their server is down; training goes on" in caplog.text
    assert [[step for step, _ in rows] for _, rows in wandb.pages] == [[1, 3]]
