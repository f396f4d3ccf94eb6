"""The pages of this folder: tables as the raw files have them, links that lead somewhere, raw files that agree."""

import gzip
import hashlib
import json
import math
import re

import naive_evaluation as naive
import numpy as np
import pytest

from research import seeds, tables


def test_the_pages_have_the_tables_of_the_raw_files():
    """Else `python -m research.tables` writes them."""
    named = set()
    for page in tables.pages():
        text = page.read_text()
        assert tables.filled(text) == text, page.name
        named |= {name for _, name, _ in tables.TABLE.findall(text)}
    assert named == tables.TABLES.keys()


def test_a_table_stands_between_its_marks_and_nothing_else_changes(monkeypatch):
    monkeypatch.setattr(tables, "TABLES", {"one": lambda: "| 1 |\n", "two": lambda: "| 2 |\n"})
    page = "text\n<!-- table: two -->\nold\n<!-- end -->\n<!-- table: one -->\n<!-- end -->\nmore <!-- end -->\n"
    expected = page.replace("old\n", "| 2 |\n").replace("one -->\n", "one -->\n| 1 |\n")
    assert tables.filled(page) == tables.filled(expected) == expected
    with pytest.raises(KeyError, match="three"):
        tables.filled("<!-- table: three -->\n<!-- end -->")


@pytest.mark.parametrize("name", ["cifar10", "rehearsal", "rehearsal2"])
def test_published_runs_are_those_of_their_predictions(name):
    """By the classes that are in the file of predictions alone."""
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


def test_links_lead_to_files_and_headings():
    def anchors(path):
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    pages = [*tables.pages(), *(seeds.ROOT / "research" / "notebooks").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    for page, link in ((page, link) for page, link in links if "://" not in link):
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert not heading or heading in anchors(target), f"{page.name}: {link}"
