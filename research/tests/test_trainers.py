"""Tests of research/trainers.py: the table compares the trainers once all five runs of timm's train.py have ended."""

import json
import shutil
from statistics import mean

import pytest
from scipy.stats import ttest_ind

from research import tables, trainers


@pytest.fixture
def results(tmp_path):
    """Return a folder with the photographs study and no runs of timm's trainer."""
    for name in ("photographs.json", "photographs.csv.gz"):
        shutil.copy(tables.RESULTS / name, tmp_path)
    return tmp_path


def add_run(results, seed, top1, average):
    run = results / "trainers" / f"deit-{seed}"
    run.mkdir(parents=True)
    (run / "test.json").write_text(json.dumps(dict(top1=top1)))
    (run / "summary.csv").write_text(f"epoch,eval_top1\n0,1.0\n1,{average}\n")


def test_the_difference_needs_all_seeds(results):
    top1 = [26.0, 27.0, 28.0, 27.5, 26.5]
    for seed in range(4):
        add_run(results, seed, top1[seed], 20.0 + seed)
    assert trainers.trainers_table(results).splitlines()[-1].split("|")[3].strip() == "-"
    add_run(results, 4, top1[4], 24.0)
    *_, timms, ours, difference = [line.split(" | ") for line in trainers.trainers_table(results).splitlines()]
    assert timms[1:] == ["5", "27.00 ± 0.79", "26.00 27.00 28.00 27.50 26.50", "22.00 ± 1.58 |"]
    of_package = [float(value) for value in ours[3].split()]
    test = ttest_ind(top1, of_package, equal_var=False)
    interval = [float(value) for value in difference[2].replace("(", "").replace(")", "").split() if value != "to"]
    expected = [mean(top1) - mean(of_package), *test.confidence_interval()]
    assert interval == pytest.approx(expected, abs=0.02)


def test_a_run_without_a_test_result_is_not_counted(results):
    add_run(results, 0, 26.0, 25.0)
    add_run(results, 1, 27.0, 26.0)
    (results / "trainers" / "deit-1" / "test.json").unlink()
    assert trainers.runs_of_timm(results / "trainers") == ({0: 26.0}, {0: 25.0})
