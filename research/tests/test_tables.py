"""Tests that the tables in research/*.md match the raw results, and that the raw results are consistent."""

import gzip
import json
import math

import naive_evaluation as naive
import numpy as np
import pytest
from scipy.stats import ttest_ind

from research import seeds, tables


def test_the_pages_have_the_tables_of_the_raw_files():
    """The tables in research/*.md equal the raw results. If not, run `python -m research.tables`."""
    named = set()
    for page in tables.pages():
        text = page.read_text()
        assert tables.filled(text) == text, page.name
        named |= {name for _, name, _ in tables.TABLE.findall(text)}
    assert named == tables.TABLES.keys()


def test_a_table_stands_between_its_marks_and_nothing_else_changes(tmp_path):
    of_names = {"one": lambda: "| 1 |\n", "two": lambda: "| 2 |\n"}
    before = "text\n<!-- table: two -->\nold\n<!-- end -->\n<!-- table: one -->\n<!-- end -->\nmore <!-- end -->\n"
    after = before.replace("old\n", "| 2 |\n").replace("one -->\n", "one -->\n| 1 |\n")
    (page := tmp_path / "page.md").write_text(before)
    assert tables.rewrite(page, of_names)
    assert page.read_text() == after
    assert not tables.rewrite(page, of_names)
    assert page.read_text() == after
    with pytest.raises(KeyError, match="three"):
        tables.filled("<!-- table: three -->\n<!-- end -->", of_names)


PLAIN = dict(enumerate([40.0, 41.5, 40.5, 41.0, 42.0]))
BY_RECIPE = dict(recipes_teacher={0: 43.0, 1: 44.0, 2: 42.5}, recipes_bce={0: 41.0, 1: 40.0, 2: 42.0})


def cells_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_recipes_are_compared_by_welchs_test_and_holms_correction():
    p_values = [ttest_ind([*top1.values()], [*PLAIN.values()], equal_var=False).pvalue for top1 in BY_RECIPE.values()]
    rows = cells_of(tables.recipes(PLAIN, BY_RECIPE))
    assert rows[0][2].startswith("43.17")
    assert rows[0][3].startswith("+2.17")
    assert [float(row[4]) for row in rows] == pytest.approx(p_values, rel=0.05)
    assert float(rows[0][5]) == pytest.approx(2 * p_values[0], rel=0.05)


@pytest.mark.parametrize(
    ("plain", "found"), [({}, BY_RECIPE), (PLAIN, BY_RECIPE | dict(recipes_bce={0: 41.0, 1: 40.0}))]
)
def test_recipes_are_not_compared_before_the_last_run_is_there(plain, found):
    rows = cells_of(tables.recipes(plain, found))
    assert [row[1] for row in rows] == [str(len(top1)) for top1 in found.values()]
    assert all(cell == "-" for row in rows for cell in row[2:])


@pytest.mark.parametrize("name", ["cifar10", "rehearsal", "rehearsal2"])
def test_published_runs_are_those_of_their_predictions(name):
    """The published accuracies and comparisons equal those computed from the published predictions."""
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


def test_the_studies_of_transfer_start_from_the_weights_that_the_page_names():
    page = (seeds.ROOT / "research" / "transfer.md").read_text()
    for name in ("transfer", "transfer_112"):
        assert json.loads((tables.RESULTS / f"{name}.json").read_text())["sha256 of the weights"] in page


def test_the_best_learning_rate_of_recall_is_the_one_that_ends_highest():
    run = dict(mixer="longhorn", length=16, width=16, lr=1e-3, pairs=2, parameters=5, accuracy=[10.0, 60.0])
    runs = [run, run | dict(lr=1e-2, accuracy=[90.0, 50.0])]
    runs += [run | dict(lr=1e-2, length=32, pairs=4, parameters=7, accuracy=[80.0])]
    runs += [run | dict(mixer="attention", accuracy=[99.0]), run | dict(width=32, accuracy=[7.0])]
    lines = tables.recall(runs).splitlines()
    assert lines[0] == "| width | mixer | parameters | T 16, 2 pairs | T 32, 4 pairs |"
    assert lines[2:] == [
        "| 16 | longhorn | 5 to 7 | 60.0 (0.001) | 80.0 (0.01) |",
        "| 16 | attention | 5 | 99.0 (0.001) | - |",
        "| 32 | longhorn | 5 | 7.0 (0.001) | - |",
    ]
