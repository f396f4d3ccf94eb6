"""Tests of research/clothing_fair.py: the order of runs, the chosen learning rates, and tables."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from processes import call
from scipy.stats import ttest_ind

from research import clothing_fair, clothing_images, transfer
from research.clothing_fair import DEIT, LONG, POOLED, SHORT, STAGES, VIL, Run, Way
from research.transfer import FINE_TUNED, SCRATCH

ALL = [VIL, DEIT, POOLED]


def top1(run):
    """Return a fake accuracy. From scratch, a learning rate of 1e-3 is best; for fine-tuning, the largest one."""
    best = {1e-3: 30} if run.start == SCRATCH else {}
    return best.get(run.setting, 1000 * run.setting) + 2 * run.seed + ALL.index(run.model) + run.epochs / 10


def rows_of(runs):
    return [run._asdict() | dict(top1=top1(run), weights=None) for run in runs]


def study(pretrained=ALL, stop=None):
    """Return the rows of a study that trains one run at a time, up to the first run that `stop` accepts."""
    rows, done = [], set()
    while missing := [run for run in clothing_fair.planned(rows, pretrained) if run not in done]:
        if stop and stop(missing[0]):
            break
        done.add(missing[0])
        rows += rows_of(missing[:1])
    return rows


def settings(rows, way):
    return [row["setting"] for row in rows if Way(row["model"], row["start"], row["epochs"]) == way and row["rehearse"]]


def test_each_way_tries_its_rates_and_then_trains_each_seed_at_the_best_of_them():
    rows = study()
    for way in (way for ways in STAGES for way in ways):
        own = [row for row in rows if Way(row["model"], row["start"], row["epochs"]) == way and not row["rehearse"]]
        assert [row["seed"] for row in own] == [0, 1, 2, 3, 4]
        rate = 1e-3 if way.start == SCRATCH else 1e-2
        assert {row["setting"] for row in own} == {rate}
        expected = {
            (SCRATCH, SHORT): {1e-4, 3e-4, 1e-3, 3e-3}, (FINE_TUNED, SHORT): {1e-4, 3e-4, 1e-3, 3e-3, 1e-2},
            (SCRATCH, LONG): {3e-4, 1e-3, 3e-3}, (FINE_TUNED, LONG): {3e-3, 1e-2},
        }[way.start, way.epochs]  # fmt: skip
        assert set(settings(rows, way)) == expected
    assert {row["seed"] for row in rows if row["rehearse"]} == {100}


def test_the_lowest_rate_is_joined_by_the_next_lower_one():
    way = Way(POOLED, SCRATCH, SHORT)
    rows = [Run(*way, rate, 100, True)._asdict() | dict(top1=-rate) for rate in (1e-4, 3e-4, 1e-3, 3e-3)]
    assert 3e-5 in clothing_fair.rates_to_try(rows, way)
    assert clothing_fair.chosen(rows, way) is None
    rows.append(Run(*way, 3e-5, 100, True)._asdict() | dict(top1=-1.0))
    assert clothing_fair.chosen(rows, way) == 1e-4


def test_an_early_stop_leaves_seeds_that_are_balanced_over_the_ways_of_a_stage():
    rows = study(stop=lambda run: run.seed == 2)
    counts = [len(clothing_fair.by_seed(rows, way)) for way in STAGES[0]]
    assert counts == [2] * 3
    assert not any(row["epochs"] == LONG and not row["rehearse"] for row in rows)


def test_a_model_without_weights_is_trained_from_scratch_only():
    rows = study(pretrained={POOLED})
    assert {row["model"] for row in rows if row["start"] == FINE_TUNED} == {POOLED}
    assert {row["model"] for row in rows if row["start"] == SCRATCH} == set(ALL)


def test_tables_show_complete_ways_and_p_values_after_the_last_registered_run():
    rows = study(stop=lambda run: run.epochs == LONG and run.seed == 4)
    ways = clothing_fair.ways_table(rows).splitlines()[2:]
    assert ways[0] == f"| {POOLED} | from scratch | 20 | 0.001 | 5 | 38.00 ± 3.16 | 34.00 36.00 38.00 40.00 42.00 |"
    assert ways[3] == f"| {POOLED} | from scratch | 100 | 0.001 | 4 | - | - |"
    differences = clothing_fair.differences_table(rows).splitlines()[2:]
    assert "| -20.00 (" in differences[0]
    assert all(line.endswith("| - | - |") for line in differences)
    rows = study()
    differences = clothing_fair.differences_table(rows).splitlines()[2:]
    own = [[row["top1"] for row in rows if not row["rehearse"] and Way(*(row[n] for n in Way._fields)) == way]
           for way in (Way(POOLED, FINE_TUNED, LONG), Way(DEIT, FINE_TUNED, LONG))]  # fmt: skip
    p_value = ttest_ind(*own, equal_var=False).pvalue
    assert differences[3].split(" | ")[3] == f"{p_value:.2g}"
    assert [line.endswith("| - | - |") for line in differences] == [False] * 4 + [True] * 7


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 4), ("validation", 2), ("test", 2)):
        for kind in ("coat", "hat"):
            (tmp_path / "raw" / split / kind).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (400, 800), (i, 0, 0)).save(tmp_path / "raw" / split / kind / f"{i}.jpg")
    return tmp_path


def test_images_are_shrunk_to_300_pixels_in_the_same_folders(folder):
    call(clothing_images.main, folder / "raw", folder / "small")
    files = sorted(path.relative_to(folder / "small") for path in (folder / "small").glob("*/*/*"))
    assert files == sorted(path.relative_to(folder / "raw") for path in (folder / "raw").glob("*/*/*"))
    assert {Image.open(folder / "small" / file).size for file in files} == {(150, 300)}


def test_the_program_chooses_on_validation_reports_on_test_and_resumes(folder, monkeypatch, capsys):
    given = []

    def train_on(images, words, _, run):
        given.append((run, words))
        return dict(top1=top1(run))

    weights = [folder / f"{name}.safetensors" for name in clothing_fair.WEIGHTS.values()]
    for path in weights:
        path.write_text(path.stem)
    out = folder / "out.json"
    command = ["--data-dir", folder / "raw", "--weights", *weights, "--out", out, "--device", "cpu"]
    monkeypatch.setattr(transfer, "train_on", train_on)
    call(clothing_fair.main, *command)
    count = len(given)
    assert len(json.loads(out.read_text())["runs"]) == count == len(study())
    for run, words in given:
        options = dict(pairwise(words))
        assert options["--val-split"] == ("validation" if run.rehearse else "test")
        assert (options["--model"], options["--epochs"]) == (run.model, str(run.epochs))
        assert options["--layer-decay"] == "none"
        assert ("--pretrained-path" in options) == (run.start == FINE_TUNED)
        assert Path(options.get("--pretrained-path", "-")).stem in (clothing_fair.WEIGHTS[run.model], "-")
    call(clothing_fair.main, *command)
    assert len(given) == count
    assert f"| {POOLED} | fine-tuned | 20 | 0.01 | 5 |" in capsys.readouterr().out
    weights[0].write_text("others")
    with pytest.raises(SystemExit, match="must start from"):
        call(clothing_fair.main, *command)
