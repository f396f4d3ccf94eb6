"""Tests of research/imagenette.py: the order of runs, the chosen learning rates, and tables."""

import json
from itertools import pairwise

from processes import call
from scipy.stats import ttest_ind

from research import imagenette, transfer
from research.compare import holm
from research.imagenette import DEIT, RESNET, SMALL, SMALL_POOLED, TINY, VIL, Run

FIRST_RATES = (5e-4, 1e-3, 2e-3)


def top1(run):
    """Return an invented accuracy that is best at the learning rate 1e-3, or for DeiT at the lowest learning rate."""
    best = 10000 * run.setting if run.setting <= 1e-3 else 5.0
    return (10 - best if run.model == DEIT else best) + 3 * [*imagenette.SEEDS].index(run.model) + 0.5 * run.seed**1.5


def study(stop=None):
    """Return the rows of a study that trains one run at a time, up to the first run that `stop` accepts."""
    rows, done = [], []
    while missing := [run for run in imagenette.planned(rows) if run not in done]:
        if stop and stop(missing[0]):
            break
        done.append(missing[0])
        rows.append(missing[0]._asdict() | dict(top1=top1(missing[0]), seconds=90.0, top1_by_epoch=[60.0, 85.0]))
    return rows


def test_each_model_tries_its_rates_and_then_all_models_train_one_seed_after_the_other():
    runs = [Run(row["model"], row["setting"], row["seed"], row["rehearse"]) for row in study()]
    assert runs[:12] == [Run(model, rate, 100, True) for model in TINY for rate in FIRST_RATES]
    assert runs[12] == Run(DEIT, 2.5e-4, 100, True)
    best = dict.fromkeys([*TINY, RESNET, *SMALL], 1e-3) | {DEIT: 2.5e-4}
    assert runs[13:33] == [Run(model, best[model], seed, False) for seed in range(5) for model in TINY]
    assert runs[33:37] == [*(Run(RESNET, rate, 100, True) for rate in FIRST_RATES), Run(RESNET, 1e-3, 0, False)]
    assert runs[37:] == [
        *(Run(model, rate, 100, True) for model in SMALL for rate in FIRST_RATES),
        *(Run(model, 1e-3, seed, False) for seed in range(3) for model in SMALL),
    ]


def test_tables_show_complete_models_and_corrected_p_values_at_the_end():
    early = study(stop=lambda run: (run.model, run.seed) == (DEIT, 4))
    assert "| - | - | - |" in imagenette.differences_table(early).splitlines()[4]
    lines = imagenette.models_table(early).splitlines()
    assert lines[3].startswith(f"| {VIL} | 0.001 | 5 | ")
    assert lines[5] == f"| {DEIT} | 0.00025 | 4 | - | - | 1.5 |"
    assert lines[-2:] == [f"| {model} | - | 0 | - | - | - |" for model in SMALL]
    rows = study()
    tests = []
    for pair in imagenette.TESTED:
        accuracies = [[row["top1"] for row in rows if row["model"] == m and not row["rehearse"]] for m in pair]
        tests.append(ttest_ind(*accuracies, equal_var=False).pvalue)
    cells = [line.strip("| ").split(" | ") for line in imagenette.differences_table(rows).splitlines()[2:]]
    assert [line[3:] for line in cells] == [[f"{p:.2g}", f"{q:.2g}"] for p, q in zip(tests, holm(tests))]


def test_a_diverged_run_counts_as_zero_in_all_tables():
    rows = study()
    diverged = next(row for row in rows if (row["model"], row["seed"]) == (VIL, 3))
    diverged |= dict(top1=0.0, top1_by_epoch=[])
    assert " 0.00 " in imagenette.models_table(rows).splitlines()[3]
    line = imagenette.minutes_table(rows, {VIL: 9_469 / 60}).splitlines()[3]
    assert line == f"| {VIL} | 158 | not reached | not reached | not reached | 2.0 |"


def test_minutes_to_an_accuracy_are_shown_when_all_runs_have_finished():
    rows, speeds = study(), {VIL: 9_469 / 60}  # in images/s, so that an epoch takes a minute
    lines = imagenette.minutes_table(rows, speeds).splitlines()
    assert lines[3] == f"| {VIL} | 158 | 2.0 | 2.0 | not reached | 2.0 |"
    assert lines[2] == f"| {imagenette.POOLED} | - | - | - | - | - |"
    assert imagenette.minutes_table(rows[:-1], speeds).splitlines()[3] == f"| {VIL} | - | - | - | - | - |"


def test_the_program_chooses_on_held_out_images_and_resumes(image_folder, tmp_path, monkeypatch, capsys):
    given = []

    def train_on(images, words, _, run):
        given.append((run, words))
        return dict(top1=top1(run), seconds=90.0, top1_by_epoch=[60.0, 85.0])

    monkeypatch.setattr(transfer, "train_on", train_on)
    monkeypatch.setattr(imagenette, "TEST_SPLIT", "validation")
    out = tmp_path / "out.json"
    for _ in range(2):
        call(imagenette.main, "--data-dir", image_folder, "--out", out, "--device", "cpu")
    assert len(json.loads(out.read_text())["runs"]) == len(given) == len(study())
    for run, words in given:
        options = dict(pairwise(words))
        assert (options["--model"], options["--device"]) == (run.model, "cpu")
        assert (options.get("--epochs"), options.get("--val-fraction")) == (
            ("50", "0.1") if run.rehearse else (None, None)
        )
    assert f"| {SMALL_POOLED} | 0.001 | 3 |" in capsys.readouterr().out
