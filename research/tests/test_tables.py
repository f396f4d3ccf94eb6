"""Tests of the pages in research/: tables match the raw files, and raw files are consistent."""

import gzip
import hashlib
import json
import math
import sys

import naive_evaluation as naive
import numpy as np
import pytest
from scipy.stats import ttest_ind

from research import seeds, tables


def test_the_pages_have_the_tables_of_the_raw_files():
    """Compare the pages with the raw files; on failure, `python -m research.tables` rewrites the pages."""
    named = set()
    for page in tables.pages():
        text = page.read_text()
        assert tables.filled(text) == text, page.name
        named |= {name for _, name, _ in tables.TABLE.findall(text)}
    assert named == tables.TABLES.keys()


def test_a_table_stands_between_its_marks_and_nothing_else_changes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tables, "TABLES", {"one": lambda: "| 1 |\n", "two": lambda: "| 2 |\n"})
    page = "text\n<!-- table: two -->\nold\n<!-- end -->\n<!-- table: one -->\n<!-- end -->\nmore <!-- end -->\n"
    expected = page.replace("old\n", "| 2 |\n").replace("one -->\n", "one -->\n| 1 |\n")
    assert tables.filled(page) == tables.filled(expected) == expected
    with pytest.raises(KeyError, match="three"):
        tables.filled("<!-- table: three -->\n<!-- end -->")
    files = [tmp_path / "research" / "page.md", tmp_path / "weights" / "README.md"]
    for file, text in zip(files, (page, expected)):
        file.parent.mkdir()
        file.write_text(text)
    monkeypatch.setattr(seeds, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    tables.main()
    assert [file.read_text() for file in files] == [expected, expected]
    assert capsys.readouterr().out == "research/page.md changed\n"


@pytest.mark.parametrize("missing", ["no run", "a seed of a recipe", "the plain ones"])
def test_recipes_are_compared_when_the_last_run_is_there(missing, monkeypatch, tmp_path):
    plain, found = [40.0, 41.5, 40.5, 41.0, 42.0], {"recipes_teacher": [43.0, 44.0, 42.5], "recipes_bce": [41, 40, 42]}
    for name, top1 in found.items():
        seen = top1[:2] if missing == "a seed of a recipe" and name == "recipes_bce" else top1
        runs = [dict(model="vil_tiny", seed=seed, top1=value) for seed, value in enumerate(seen)]
        (tmp_path / f"{name}.json").write_text(json.dumps(dict(runs=runs)))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    by_model = {} if missing == "the plain ones" else {"vil_tiny": dict(enumerate(plain))}
    monkeypatch.setattr(tables.photographs, "top1_of_test", lambda runs, judged: by_model)
    rows = [line.split(" | ")[1:] for line in tables.recipes().splitlines()[2:]]
    if missing != "no run":
        assert all(cell.strip(" |") == "-" for row in rows for cell in row[1:])
        return
    p_values = [ttest_ind(top1, plain, equal_var=False).pvalue for top1 in found.values()]
    assert rows[0][1].startswith("43.17")
    assert rows[0][2].startswith("+2.17")
    assert [float(row[3]) for row in rows] == pytest.approx(p_values, rel=0.05)
    assert float(rows[0][4].strip(" |")) == pytest.approx(2 * p_values[0], rel=0.05)


@pytest.mark.parametrize("name", ["cifar10", "rehearsal", "rehearsal2"])
def test_published_runs_are_those_of_their_predictions(name):
    """Compute the published results again from the file of predictions only."""
    runs, tabled = tables.runs_of(name), tables.TABLES[f"{name}-images"]()
    with gzip.open(tables.RESULTS / f"{name}.csv.gz", "rt") as file:
        head, *rows = [line.strip().split(",") for line in file]
    right = {name: np.array([row[i] == row[1] for row in rows]) for i, name in enumerate(head)}
    for run in runs:
        own = right[f"{run['model']}-{run['seed']}"]
        assert run["top1"] == pytest.approx(100 * own.mean())
        assert all(math.isfinite(value) for values in run["curves"].values() for value in values)
        if run["model"] != "vil_tiny" and f"vil_tiny-{run['seed']}" in right:
            counts = naive.paired(right[f"vil_tiny-{run['seed']}"], own)
            low, high = naive.paired_interval(*counts)
            difference = f"{100 * (counts[1] - counts[2]) / len(rows):+.2f} ({low:+.2f} to {high:+.2f})"
            cells = f"| vil_tiny, {run['model']} | {run['seed']} | {' | '.join(map(str, counts))} | {difference} |"
            assert cells in tabled
    assert len(rows) == {"cifar10": 10_000}.get(name, 25_000)


def test_the_published_repetition_differs_in_time_alone():
    found = {(run["model"], run["seed"]): run for run in tables.runs_of("rehearsal2")}
    again = tables.runs_of("rehearsal2_again")
    assert len(again) == 5
    for one in again:
        other = found[one["model"], one["seed"]]
        assert all(one[name] == other[name] for name in ("parameters", "epochs", "images", "updates", "loss"))
        assert one["training_seconds"] != other["training_seconds"]
        for name, values in one["curves"].items():
            assert len(values) == 12
            assert (values == other["curves"][name]) == (not name.endswith("images_per_second"))


def test_the_studies_of_transfer_are_of_the_weights_that_are_shipped():
    digest = hashlib.sha256((seeds.ROOT / "weights" / "vil_tiny_fractals.safetensors").read_bytes()).hexdigest()
    for name in ("transfer", "transfer_112"):
        assert json.loads((tables.RESULTS / f"{name}.json").read_text())["sha256 of the weights"] == digest


def test_the_best_learning_rate_of_recall_is_the_one_that_ends_highest(monkeypatch):
    run = dict(mixer="longhorn", length=16, width=16, lr=1e-3, pairs=2, parameters=5, accuracy=[10.0, 60.0])
    runs = [run, run | dict(lr=1e-2, accuracy=[90.0, 50.0])]
    runs += [run | dict(lr=1e-2, length=32, pairs=4, parameters=7, accuracy=[80.0])]
    runs += [run | dict(mixer="attention", accuracy=[99.0]), run | dict(width=32, accuracy=[7.0])]
    monkeypatch.setattr(tables, "runs_of", lambda _: runs)
    lines = tables.recall().splitlines()
    assert lines[0] == "| width | mixer | parameters | T 16, 2 pairs | T 32, 4 pairs |"
    assert lines[2:] == [
        "| 16 | longhorn | 5 to 7 | 60.0 (0.001) | 80.0 (0.01) |",
        "| 16 | attention | 5 | 99.0 (0.001) | - |",
        "| 32 | longhorn | 5 | 7.0 (0.001) | - |",
    ]
