"""The files of a run for people: tables, pictures, logs."""

import csv
import math
import os
import re
import shutil
import struct
import sys
from types import SimpleNamespace

import pytest
import yaml
from figures import kept_figures

from vil.config import Config, ConfigError
from vil.info import git_commit
from vil.training.summary import Reporter


def fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


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


def test_what_stands_where_a_run_writes_neither_holds_it_up_nor_ends_it(tmp_path, monkeypatch, no_pictures):
    for name in ("info.txt", "summary.csv"):
        os.mkfifo(tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["train_imagenet.py", "--data-dir", "caf\udce9"])  # no UTF-8
    report = Reporter(tmp_path, Config(), dict(data_dir="caf\udce9"), "1 x cpu")
    report.catch_up(HISTORY)
    assert "--data-dir caf?\n" in (tmp_path / "info.txt").read_text()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == dict(data_dir="caf\udce9")
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 4


def test_without_matplotlib_a_run_says_at_its_start_that_there_will_be_no_picture(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = Reporter(tmp_path, Config(), {}, "1 x cpu")
    assert re.fullmatch(rf"no {tmp_path}/curve.png: .*matplotlib.*\. pip install matplotlib", caplog.messages[0])
    report(HISTORY)
    assert len(caplog.messages) == 1
    assert (tmp_path / "summary.csv").exists()
    assert not (tmp_path / "curve.png").exists()


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
