"""Tests of comparing two models: statistics, tables, plots, throughput, and predictions of several ranks."""

import csv
import io
import itertools
from types import SimpleNamespace

import naive_evaluation as naive
import numpy as np
import pytest
import torch
from figures import kept_figures
from PIL import Image
from processes import in_processes

from vil import distributed
from vil.evaluation import speed
from vil.evaluation.comparison import Comparison, ContingencyTable
from vil.evaluation.markdown import comparison_text
from vil.evaluation.plot import plot_comparison
from vil.evaluation.predictions import PredictionCollector, Predictions
from vil.evaluation.speed import Speed, measure_speed
from vil.evaluation.tables import write_tables


def predictions(targets, best):
    return Predictions.of(targets, best, np.ones(best.shape))


@pytest.mark.parametrize("cells", [(70, 10, 3, 17), (5, 0, 0, 2), (0, 2, 9, 4), (9, 400, 380, 7)])
def test_mcnemar_p_values_and_paired_intervals_equal_the_published_formulas(cells):
    paired = ContingencyTable(*cells)
    assert paired.difference == pytest.approx(100 * (cells[1] - cells[2]) / sum(cells))
    assert paired.p_value == pytest.approx(naive.mcnemar(*cells[1:3]))
    assert paired.interval == pytest.approx(naive.paired_interval(*cells), abs=1e-6)


def test_paired_intervals_are_clipped_at_100_points():
    assert ContingencyTable(both=0, only_first=1, only_second=0, neither=0).interval[1] == 100.0
    assert ContingencyTable(both=0, only_first=0, only_second=1, neither=0).interval[0] == -100.0
    assert [ContingencyTable(both=0, only_first=n, only_second=0, neither=0).difference for n in (0, 1)] == [0.0, 100.0]
    assert [Comparison.of(predictions(np.zeros(n), np.zeros((n, 2, 1)))).agreement for n in (0, 1)] == [0.0, 100.0]


def test_comparison_tables_list_differences_per_class_and_per_confusion(tmp_path):
    rng, names = np.random.default_rng(0), {0: "ant", 1: "bee", 2: "cat", 4: "eel"}  # class 3 has no name
    targets = rng.choice([0, 1, 2, 3, -1], size=90)
    best = np.stack([rng.permuted(np.tile(np.arange(5), (90, 1)), axis=1)[:, :3] for _ in range(2)], axis=1)
    write_tables(tmp_path / "new" / "folder", predictions(targets, best), names)

    files = (tmp_path / "new" / "folder" / name for name in ("classes.csv", "confusions.csv"))
    classes, confusions = (list(csv.DictReader(file.open())) for file in files)
    header = ["class", "name", "images", "top1_first", "top1_second", "difference", "only_first", "only_second"]
    for target, row in enumerate(classes):
        first, second = (best[targets == target][:, m, 0] == target for m in (0, 1))
        _, only_first, only_second, _ = naive.paired(first, second)
        expected = [target, names.get(target, ""), len(first), 100 * first.mean(), 100 * second.mean()]
        expected += [100 * (only_first - only_second) / len(first), only_first, only_second]
        assert row == dict(zip(header, map(str, expected), strict=True))
    assert len(classes) == 4

    expected = {}
    for target, predicted in itertools.permutations(range(5), 2):
        first, second = (int(((targets == target) & (best[:, m, 0] == predicted)).sum()) for m in (0, 1))
        if first != second:
            both_names = names.get(target, ""), names.get(predicted, "")
            expected[target, predicted] = (*both_names, first, second, first - second)
    found = {
        (int(row["class"]), int(row["predicted"])): (row["name"], row["predicted_name"])
        + tuple(int(row[name]) for name in ("first", "second", "difference"))
        for row in confusions
    }
    assert found == expected
    assert list(found) == sorted(found, key=lambda pair: (-abs(found[pair][-1]), pair))
    assert len({abs(row[-1]) for row in found.values()}) > 1
    write_tables(tmp_path, predictions(targets, best[:, [0, 0]]), {})  # equal predictions give an empty table
    assert (tmp_path / "confusions.csv").read_text().split() == ['"class"']


def test_names_in_tables_are_never_read_as_formulas(tmp_path):
    names = ['=HYPERLINK("x")', "+1", "-1", "@x", " =1", "＝1", "＋1", "－1", "＠x", "a\x1b[2J\n", 'b"c,d', "plain"]
    targets = np.arange(len(names))
    best = np.stack([targets, (targets + 1) % len(names)], axis=1)[:, :, None]
    write_tables(tmp_path, predictions(targets, best), dict(enumerate(names)))
    shown = ["'" * (i < 9) + name.replace("\x1b", "?").replace("\n", "?") for i, name in enumerate(names)]
    for table, column in (("classes", "name"), ("confusions", "name"), ("confusions", "predicted_name")):
        text = (tmp_path / f"{table}.csv").read_text()
        assert {row[column] for row in csv.DictReader(text.splitlines())} == {*shown}
        assert all(f',"{name.replace(chr(34), chr(34) * 2)}",' in text for name in shown)


def test_the_comparison_plot_shows_differences_with_intervals_and_class_accuracies(monkeypatch):
    """The plot shows differences with intervals, and accuracies by class. One of the six images is unreadable."""
    targets, figures = np.array([0, 0, 1, 1, 2, -1]), kept_figures(monkeypatch)
    first = [[0, 1], [0, 2], [1, 0], [2, 1], [0, 1], [0, 1]]
    second = [[0, 2], [1, 0], [2, 1], [2, 0], [0, 1], [1, 0]]
    found = predictions(targets, np.stack([first, second], axis=1))
    png = plot_comparison(["one", "other"], Comparison.of(found), found)
    assert Image.open(io.BytesIO(png)).format == "PNG"
    (figure,) = figures
    differences, by_class = figure.axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in differences.lines]
    for y, text, cells in ((0, "top-5, p = 1", (3, 1, 0, 1)), (1, "top-1, p = 0.5", (1, 2, 0, 2))):
        (interval,) = [xs for xs, ys in lines if ys == [y, y]]
        assert interval == pytest.approx(naive.paired_interval(*cells), abs=1e-4)
        assert ([100 * (cells[1] - cells[2]) / 5], [y]) in lines
        (label,) = [t for t in differences.texts if t.get_text() == text]
        assert label.get_position() == pytest.approx((100 * (cells[1] - cells[2]) / 5, y), abs=0.2)
    assert ([0, 0], [0, 1]) in lines  # vertical line at a difference of zero
    assert differences.get_ylim()[0] < 0 < 1 < differences.get_ylim()[1]
    points = sorted(map(tuple, by_class.collections[0].get_offsets().tolist()))
    # The x-axis shows the second model's accuracy per class, the y-axis the first model's accuracy.
    assert points == [(0.0, 0.0), (0.0, 50.0), (50.0, 100.0)]
    assert by_class.lines[0].get_slope() == 1
    labels = differences.get_xlabel(), by_class.get_xlabel(), by_class.get_ylabel()
    assert all(map(str.startswith, labels, ("one minus other", "other", "one")))


def test_measured_throughput_excludes_the_first_call(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class Slow(torch.nn.Linear):
        calls = 0

        def forward(self, images):
            self.calls += 1
            clock.now += 10.0 if self.calls == 1 else 0.25  # the first call is slow, as if it compiled
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_inference_mode_enabled()
            assert not self.training
            return super().forward(images)

    model, precision = Slow(4, 4), torch.autocast("cpu", torch.bfloat16)
    assert measure_speed(model, torch.zeros(6, 4), precision) == Speed(6 / 0.25, None)
    assert model.calls == 1 + 4  # one warm-up call, then four timed calls of 0.25 seconds each
    assert measure_speed(model, torch.zeros(6, 4), precision, seconds=0.0) == Speed(6 / 0.25, None)


def model_row(**changes):
    row = dict(model="vil_tiny", weights="a.pt", top1=76.44, top1_interval=(76.07, 76.81), top5=93.25, loss=1.01234)
    row |= dict(parameters=6_853_096, images_per_second=1234.5, peak_mib=100.4, images=50_000)
    return row | dict(published={"ViL-tiny": (76.4, None), "ViM-tiny": (76.1, 93.0)}) | changes


def test_the_printed_table_of_two_models():
    second = model_row(model="vim_tiny", weights="pretrained", top1=75.0, top1_interval=(74.6, 75.4), top5=92.0)
    second |= dict(loss=1.1, parameters=13_706_192, images_per_second=500.0, peak_mib=200.8)
    top1 = dict(both=37000, only_first=1220, only_second=500, neither=11280)
    top1 |= dict(difference=1.44, interval=(1.27, 1.61), p_value=1.234e-5)
    top5 = dict(difference=-1.25, interval=(-1.5, 1.0), p_value=0.04567)
    result = dict(models=[model_row(), second], paired=dict(top1=top1, top5=top5, agreement=80.126), notes=["a note"])
    text = comparison_text(result).splitlines()
    assert text[:12] == [
        "|  | vil_tiny | vim_tiny | first minus second (95% interval), McNemar's test |",
        "| --- | --- | --- | --- |",
        "| weights | a.pt | pretrained |  |",
        "| top-1 % | 76.44 (76.07 to 76.81) | 75.00 (74.60 to 75.40) | +1.44 (+1.27 to +1.61), p = 1.23e-05 |",
        "| top-5 % | 93.25 | 92.00 | -1.25 (-1.50 to +1.00), p = 0.0457 |",
        "| published top-1 / top-5 % | 76.4 / - | 76.1 / 93.0 |  |",
        "| loss | 1.0123 | 1.1000 | -0.0877 |",
        "| parameters | 6,853,096 | 13,706,192 | 0.50 x |",
        "| images/s | 1234 | 500 | 2.47 x |",
        "| peak MiB | 100 | 201 | 0.50 x |",
        "",
        "Of 50000 images, 37000 are classified correctly by both models, 1220 only by the first model, 500 only by the "
        "second model, and 11280 by neither. The models predict the same class for 80.13% of the images.",
    ]
    assert text[12] == "A note."
    result["models"][1]["published"] = {}  # as if no accuracy were published for the second model's weights
    assert "| published top-1 / top-5 % | 76.4 / - | - / - |  |" in comparison_text(result)
    # Peak memory is not measured on a CPU, and the models have no published results.
    result["models"] = [row | dict(peak_mib=None, published={}) for row in result["models"]]
    text = comparison_text(result)
    assert "| peak MiB | - | - |  |" in text
    assert "published top-1" not in text


SPLITS = (8, 7, 6, 3, 2)  # number of images in each split; with 2 images, one rank has none


def gathered(rank):
    distributed.init_process_group("cpu")
    return [gathered_of(rank, images) for images in SPLITS], distributed.destroy_process_group()


def gathered_of(rank, images):
    share = PredictionCollector(2, 9, torch.device("cpu"))
    # logits in bf16, as a model returns under autocast
    mine, logits = torch.arange(rank, images, 3), torch.arange(9.0, dtype=torch.bfloat16)
    for part in mine.split(2) if len(mine) else ():  # logits of model m and image i: the values 0 to 8, rolled by m + i
        share(part, [torch.stack([logits.roll(m + int(i)) for i in part]) for m in (0, 1)])
    targets, best, shares = (found.tolist() for found in share.gather())
    np.testing.assert_allclose(shares, [[np.exp(8.0 - np.arange(5)) / np.exp(np.arange(9.0)).sum()] * 2] * images, 1e-5)
    return [targets, best]


def test_top_5_predictions_of_all_ranks_are_gathered_in_the_order_of_the_split():
    """Predictions are gathered in the split's order, because ReaL labels are assigned by image index.

    Rank r of three ranks evaluates the images r, r + 3, r + 6, ...
    """
    best = [[[[(8 - k + m + i) % 9 for k in range(5)] for m in (0, 1)] for i in range(images)] for images in SPLITS]
    expected = [[list(range(images)), found] for images, found in zip(SPLITS, best)]
    for ended in in_processes(3, gathered):
        assert ended.value == (expected, None), ended.errors
