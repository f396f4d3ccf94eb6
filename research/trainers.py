"""Table that compares the accuracy of timm's train.py and this package's trainer, for research/trainers.md.

The input folder research/results/trainers has a folder for each run of timm's train.py, with the summary.csv of
train.py. A finished run also has the args.yaml of train.py, and the JSON file of validate.py on the test images. The
runs of this package are those of the photographs study.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from research import photographs
from research.compare import BySeed, listed, spread, welch
from vil.evaluation.markdown import markdown_table

SEEDS = range(5)


def runs_of_timm(folder: Path) -> tuple[BySeed, BySeed]:
    """Return two dicts by seed of timm's finished runs: test top-1, and EMA top-1 on the images for selection."""
    tests, averages = {}, {}
    for seed in SEEDS:
        run = folder / f"deit-{seed}"
        if (run / "test.json").exists():
            tests[seed] = json.loads((run / "test.json").read_text())["top1"]
            *_, last = csv.DictReader((run / "summary.csv").read_text().splitlines())
            averages[seed] = float(last["eval_top1"])
    return tests, averages


def trainers_table(results: Path) -> str:
    """Return a Markdown table of each trainer's accuracy, and of the difference if timm's trainer has all runs."""
    runs, judged = photographs.read(results / "photographs.json")
    ours = photographs.top1_of_test(runs, judged)[photographs.DEIT]
    ours_averaged = photographs.top1_to_choose_on(runs, photographs.DEIT, "eval_top1_ema")
    timms, timms_averaged = runs_of_timm(results / "trainers")
    table = [["trainer", "runs", "test top-1 %, mean ± deviation", "seeds", "EMA weights, selection images %"]]
    for name, tests, averages in (("timm's train.py", timms, timms_averaged), ("this package", ours, ours_averaged)):
        table.append([name, str(len(tests)), spread(tests.values()), listed(tests.values()), spread(averages.values())])
    difference = str(welch(timms, ours)) if [*timms] == [*SEEDS] else "-"
    table.append(["timm's train.py minus this package (95% interval)", "", difference, "", ""])
    return markdown_table(table)
