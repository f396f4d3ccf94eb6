"""Tests of a run's summary table, plots and logs to TensorBoard and wandb."""

import csv
import math
import os
import re
import shutil
import struct
import sys
import time
from types import SimpleNamespace

import pytest
import yaml
from figures import kept_figures

from vil.config import Config, ConfigError
from vil.info import git_commit
from vil.training.curve import note_on_losses, plot_history
from vil.training.summary import Reporter, epoch_line


def row(epoch, **values):
    names = ["train_loss", "eval_loss", "eval_loss_ema", "eval_top1", "eval_top1_ema", "eval_top5", "eval_top5_ema"]
    names += ["lr", "grad_norm", "images_per_second", "data_wait_percent", "gpu_wait_percent"]
    names += ["eval_images_per_second", "peak_memory_gib", "unreadable_images"]
    return {"epoch": epoch} | {name: 10 * i + epoch / 8 for i, name in enumerate(names)} | values


HISTORY = [row(1), row(2), row(3, unreadable_images=2.0)]


def test_each_start_of_a_run_appends_its_command_and_environment(tmp_path, monkeypatch):
    saved = dict(model="vil_tiny", epochs=3, aa=None, model_kwargs=dict(depth=2))
    for resume in ("", "--resume"):
        monkeypatch.setattr(sys, "argv", ["train_imagenet.py", "--epochs", "3", *resume.split()])
        Reporter(tmp_path / "new" / "run", Config(), saved, "1 x cpu")
    folder = tmp_path / "new" / "run"
    config = (folder / "config.yaml").read_text()
    assert yaml.safe_load(config) == saved
    assert re.findall(r"^\w+", config, re.M) == list(saved)  # options keep their order
    first, second = (folder / "info.txt").read_text().strip().split("\n\n")
    assert first.splitlines()[0].endswith("  train_imagenet.py --epochs 3")
    assert second.splitlines()[0].endswith("  train_imagenet.py --epochs 3 --resume")
    Reporter(folder, Config(), saved | dict(epochs=9), "1 x cpu", is_finished=True)
    assert (folder / "config.yaml").read_text() == config
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", first.partition("  ")[0])
    assert dict(line.split(maxsplit=1) for line in second.splitlines()[1:-1])["commit"] == git_commit()
    assert second.splitlines()[-1] == "1 x cpu"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "info.txt"]


def test_the_summary_has_one_row_per_epoch(tmp_path, no_pictures):
    report = Reporter(tmp_path, Config(), {}, "1 x cpu")
    history = [HISTORY[0] | dict(phase=1.0), *HISTORY[1:]]  # only the first row has a phase
    for epoch in (1, 2, 3):
        report(history[:epoch])
    with open(tmp_path / "summary.csv") as file:
        rows = [{name: float(value) for name, value in line.items() if value} for line in csv.DictReader(file)]
    assert rows == history
    assert list(rows[0]) == list(history[0])
    assert not list(tmp_path.glob("*.tmp"))


def lines(axis):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()}


def test_the_plot_shows_all_varying_columns_and_marks_the_best_epoch(tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    history = [row(1, eval_top1=90.0), row(2, eval_top1=95.0), row(3, unreadable_images=2.0)]
    for line in history:  # these columns are constant, so their panel is not plotted
        line |= dict(gpu_wait_percent=0, data_wait_percent=0.0)
    Reporter(tmp_path, Config(), {}, "1 x cpu")(history)
    (figure,) = figures
    axes = {axis.get_title(loc="left"): axis for axis in figure.axes}
    columns = {
        "loss": {"training": "train_loss", "validation": "eval_loss", "validation, EMA": "eval_loss_ema"},
        "top-1 (%)": {"model": "eval_top1", "EMA": "eval_top1_ema"},
        "top-5 (%)": {"model": "eval_top5", "EMA": "eval_top5_ema"},
        "images/s": {"training": "images_per_second", "validation": "eval_images_per_second"},
    }
    single = {"learning rate": "lr", "gradient norm": "grad_norm", "unreadable images": "unreadable_images"}
    for title, names in columns.items():
        shown = lines(axes[title])
        for label, name in names.items():
            assert shown.pop(label) == ([1, 2, 3], [line[name] for line in history])
        assert {text.get_text() for text in axes[title].get_legend().get_texts()} == set(names)
        assert list(shown.values()) == [([2, 2], [0, 1])] * (title in ("loss", "top-1 (%)"))
    for title, name in single.items():
        assert list(lines(axes[title]).values()) == [([1, 2, 3], [line[name] for line in history])]
        assert axes[title].get_legend() is None
    assert set(axes) == set(columns) | set(single)
    assert {axis.get_xlabel() for axis in figure.axes} == {"epoch"}
    assert figure.get_suptitle() == "best: top-1 95.00% in epoch 2 (dotted line)"
    png = (tmp_path / "curve.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (1200, 970)


def test_an_outlying_first_epoch_is_cut_off_and_its_value_is_written_below_the_panel(monkeypatch):
    figures = kept_figures(monkeypatch)
    history = [row(epoch, grad_norm=2 + epoch % 3, images_per_second=100 + epoch % 2) for epoch in range(1, 9)]
    history[0] |= dict(grad_norm=41.25, images_per_second=3.0)
    plot_history(history)
    plot_history(history[:4])
    long, short = ({axis.get_title(loc="left"): axis for axis in figure.axes} for figure in figures)
    low, high = long["gradient norm"].get_ylim()
    assert (1.5 < low < 2, 4 < high < 4.5) == (True, True)
    assert long["gradient norm"].get_xlabel() == "epoch (epoch 1 is cut off: 41.2)"
    assert long["images/s"].get_xlabel() == "epoch (epoch 1 is cut off: 3)"  # 3 is the training throughput
    assert long["loss"].get_xlabel() == "epoch"
    assert short["gradient norm"].get_ylim()[1] > 41.25  # a short run shows all epochs


@pytest.mark.parametrize("epochs", [1, 40])
def test_no_legend_overlaps_the_lines_and_no_text_overlaps_another(monkeypatch, epochs):
    figures = kept_figures(monkeypatch)
    plot_history([row(epoch, grad_norm=epoch % 3) for epoch in range(1, epochs + 1)], note_on_losses(Config()))
    (figure,) = figures
    boxes = [text.get_window_extent() for text in figure.texts]
    for axis in figure.axes:
        boxes += [axis.get_window_extent(), axis._left_title.get_window_extent(), axis.xaxis.label.get_window_extent()]
        if axis.get_legend():
            boxes.append(axis.get_legend().get_window_extent())
    boxes = [box.padded(-1) for box in boxes]  # boxes may touch
    assert [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)] == []


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (dict(), "Label smoothing, mixup and cutmix raise only the training loss"),
        (dict(mixup=0, cutmix=0), "Label smoothing raises only the training loss"),
        (dict(mixup_prob=0, smoothing=0), ""),
        (dict(bce_loss=True), "The training loss is binary cross-entropy"),
    ],
)
def test_a_note_explains_why_the_losses_are_not_comparable(options, note):
    assert note_on_losses(Config(**options)).startswith(note)
    assert bool(note_on_losses(Config(**options))) == bool(note)


def test_short_epochs_are_plotted_rarely_and_the_last_epoch_always(tmp_path, monkeypatch):
    now, drawn = [0.0], []

    def plot(history, note):
        drawn.append(len(history))
        now[0] += 3  # plotting takes 3 seconds
        return b""

    monkeypatch.setattr("vil.training.summary.plot_history", plot)
    monkeypatch.setattr("vil.training.summary.time.monotonic", lambda: now[0])
    report = Reporter(tmp_path, Config(epochs=150), {}, "1 x cpu")
    history: list = []
    for epoch in range(1, 151):
        now[0] += 5
        report(history := [*history, row(epoch)])
        if epoch == 65:
            report.finish_plot()  # a stopped run plots the epochs that were not plotted
            assert drawn.pop() == 65
    report.finish_plot()
    assert drawn == [1, 61, 121, 150]


def test_each_epoch_and_the_end_of_a_run_print_one_line(tmp_path):
    first, best, same, last = row(1), row(2, eval_top1=90.0), row(3, eval_top1_ema=90.0), row(4, eval_top1=50.0)
    assert epoch_line([first, best, same, last], 9) == (
        "epoch 4/9: training loss 0.5000, validation loss 10.5000, top-1 50.00% (EMA 40.50%), best top-1 90.00% "
        "in epoch 3, 90 images/s, 140 unreadable images"
    )
    plain = {name: value for name, value in best.items() if not name.endswith("_ema")} | dict(unreadable_images=0)
    assert epoch_line([plain], 9) == (
        "epoch 2/9: training loss 0.2500, validation loss 10.2500, top-1 90.00%, best top-1 90.00% in epoch 2, "
        "90 images/s"
    )
    closing = Reporter(tmp_path, Config(), {}, "1 x cpu").closing_line([first, best, last])
    files = f"{tmp_path}/best.pt, training curve: {tmp_path}/curve.png"
    assert closing == f"best: top-1 90.00% in epoch 2 (last epoch 50.00%): {files}"
    closing = Reporter(tmp_path, Config(), {}, "1 x cpu").closing_line([first, best, same])
    assert closing == f"best: top-1 90.00% in epoch 3: {files}"


def test_the_plot_omits_missing_ema_values_and_zeros(tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    on_cpu = dict(gpu_wait_percent=0.0)
    without = {name: value for name, value in row(1, **on_cpu).items() if not name.endswith("_ema")}
    Reporter(tmp_path, Config(), {}, "1 x cpu")([without])
    Reporter(tmp_path, Config(), {}, "1 x cpu")([without, row(2, **on_cpu)])
    assert [axis.get_title(loc="left") for axis in figures[0].axes] == ["loss", "top-1 (%)"]
    assert [sum(len(axis.get_lines()) for axis in figure.axes) for figure in figures] == [5, 14]
    # a single point is drawn with a marker
    assert [line.get_marker() for line in figures[0].axes[0].get_lines()] == ["o", "o", "None"]
    shown = {axis.get_title(loc="left"): lines(axis) for axis in figures[1].axes}
    waits = shown["host waiting (% of time)"]
    assert waits == {"for data": ([1, 2], [row(epoch)["data_wait_percent"] for epoch in (1, 2)])}
    ema = shown["loss"]["validation, EMA"][1]
    assert math.isnan(ema[0])
    assert ema[1] == row(2)["eval_loss_ema"]


def test_files_that_cannot_be_written_do_not_stop_a_run(tmp_path, caplog):
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    report = Reporter(tmp_path / "run", Config(), {}, "1 x cpu")
    assert f"failed to write config.yaml or info.txt in {tmp_path / 'run'}" in caplog.text
    shutil.rmtree(tmp_path / "run")
    report(HISTORY)
    assert f"cannot write summary.csv or curve.png in {tmp_path / 'run'}" in caplog.text
    (tmp_path / "run" / "curve.png").mkdir(parents=True)
    report(HISTORY)
    assert (tmp_path / "run" / "summary.csv").exists()  # the table is written even if the plot fails


def test_unwritable_paths_in_the_run_folder_do_not_stop_a_run(tmp_path, monkeypatch, no_pictures):
    for name in ("info.txt", "summary.csv"):
        os.mkfifo(tmp_path / name)
    # the command line has a file name that is not valid UTF-8
    monkeypatch.setattr(sys, "argv", ["train_imagenet.py", "--data-dir", "caf\udce9"])
    report = Reporter(tmp_path, Config(), dict(data_dir="caf\udce9"), "1 x cpu")
    report.catch_up(HISTORY)
    assert "--data-dir caf?\n" in (tmp_path / "info.txt").read_text()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == dict(data_dir="caf\udce9")
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 4


def test_without_matplotlib_a_run_logs_at_the_start_that_it_will_not_plot(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = Reporter(tmp_path, Config(), {}, "1 x cpu")
    assert re.fullmatch(
        rf"{tmp_path} will have no augmented.png and curve.png \(.*matplotlib.*\); run pip install matplotlib",
        caplog.messages[0],
    )
    report(HISTORY)
    assert len(caplog.messages) == 1
    assert (tmp_path / "summary.csv").exists()
    assert not (tmp_path / "curve.png").exists()
    assert report.closing_line(HISTORY).endswith(f": {tmp_path}/best.pt")


@pytest.mark.parametrize(
    ("option", "package", "module"),
    [("log_tensorboard", "tensorboard", "torch.utils.tensorboard"), ("log_wandb", "wandb", "wandb")],
)
def test_logging_without_the_package_is_rejected(option, package, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{option} needs the package {package}; run pip install {package}"):
        Reporter(tmp_path, Config(**{option: True}), {}, "1 x cpu")


def test_tensorboard_receives_every_column_of_every_epoch(tmp_path, no_pictures, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.record_writer import RecordWriter

    write = RecordWriter.write  # TensorBoard writes in a thread; rows must be on the disk when the report returns
    monkeypatch.setattr(RecordWriter, "write", lambda *record: time.sleep(0.01) or write(*record))
    report = Reporter(tmp_path, Config(log_tensorboard=True), {}, "1 x cpu")
    for epoch in (1, 2, 3):
        report(HISTORY[:epoch])
        events = EventAccumulator(str(tmp_path)).Reload()  # the log is readable during the run
        for name in HISTORY[0]:
            seen = [(event.step, event.value) for event in events.Scalars(name)]
            assert seen == [(line["epoch"], line[name]) for line in HISTORY[:epoch]]


class Wandb:
    """Stub of wandb that stores each run's options, rows and steps."""

    def __init__(self, *failures):
        self.pages, self.failures = [], list(failures)

    def init(self, **options):
        if self.failures and (failure := self.failures.pop(0)):
            raise failure
        rows = []
        self.pages.append((options, rows))
        return SimpleNamespace(log=lambda values, step: rows.append(self.accepted(step, values)))

    def accepted(self, step, values):
        assert type(step) is int  # wandb accepts only integer steps
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


def test_a_resumed_run_continues_its_wandb_run(tmp_path, wandb, caplog):
    for epochs in ((1, 2), (3,)):
        report = reporter(tmp_path / "run")
        report.catch_up(HISTORY[: epochs[0] - 1])  # the earlier process has already logged these epochs
        for epoch in epochs:
            report(HISTORY[:epoch])
    reporter(tmp_path / "other")
    options = dict(project="vision-longhorn", name="mine", resume="allow", config=dict(epochs=3), dir=tmp_path / "run")
    assert [page | {"id": None} for page, _ in wandb.pages[:2]] == [options | {"id": None}] * 2
    first, second, other = (page["id"] for page, _ in wandb.pages)
    assert first == second != other
    assert re.fullmatch(r"\w{8,}", first)
    assert [rows for _, rows in wandb.pages] == [[(1, HISTORY[0]), (2, HISTORY[1])], [(3, HISTORY[2])], []]
    assert caplog.messages == []


def test_an_epoch_that_a_killed_run_did_not_log_is_logged_after_resuming(tmp_path, wandb):
    reporter(tmp_path)(HISTORY[:1])
    # in a checkpoint, all values may be floats
    restored = [{name: float(value) for name, value in line.items()} for line in HISTORY]
    for epochs in (2, 2, 1):  # the last restart loads the previous checkpoint
        reporter(tmp_path).catch_up(restored[:epochs])
    assert [rows for _, rows in wandb.pages] == [[(1, HISTORY[0])], [(2, restored[1])], [], []]
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 3


def test_a_failing_log_does_not_stop_a_run(tmp_path, wandb, caplog):
    """Training continues if connecting fails, which is retried after each epoch, or if logging fails later."""
    wandb.failures = [ConnectionError("no network"), None, None]
    report = reporter(tmp_path / "run")
    assert "failed to connect to Weights & Biases: no network; trying again after the next epoch" in caplog.text
    for epoch in (1, 2, 3):
        report(HISTORY[:epoch])
    assert "their server is down; training continues" in caplog.text
    assert [[step for step, _ in rows] for _, rows in wandb.pages] == [[1, 3]]
