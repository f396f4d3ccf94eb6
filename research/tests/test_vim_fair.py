"""Tests of research/vim_fair.py: the causes add up to ViL's lead, and the intervals cover the true differences."""

import json
import shutil
from statistics import mean

import numpy as np
import pytest

from research import tables, vim_fair

NAMES = VIL, VIM, VIL_2E_3, LARGE_DT, FP32 = [
    "ViL, learning rate 1e-3",
    "ViM, learning rate 2e-3",
    "ViL, learning rate 2e-3",
    "ViM, large initial dt",
    "ViM, fp32",
]
MODELS = dict(vil="vil_tiny", large_steps="vim_tiny_large_steps", fp32="vim_tiny")


@pytest.fixture
def results(tmp_path):
    """Return a folder with the photographs study and without new arms."""
    for name in ("photographs.json", "photographs.csv.gz"):
        shutil.copy(tables.RESULTS / name, tmp_path)
    return tmp_path


def add_arm(results, name, top1, **changed):
    """Write the results file of a new arm with the accuracies `top1` by seed."""
    study = json.loads((results / "photographs.json").read_text())
    *images, test_images = study["images"]
    options = ["--lr", "2e-3", *(["--no-amp"] if name == "fp32" else [])]
    runs = [dict(model=MODELS[name], seed=seed, top1=value) for seed, value in top1.items()]
    found = dict(config=study["config"], options=options, images=images, test_images=test_images, runs=runs)
    (results / f"vim_fair_{name}.json").write_text(json.dumps(found | changed))


def cells_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_the_causes_add_up_to_the_lead_of_the_photographs_study(results):
    add_arm(results, "vil", {20: 40.0, 21: 41.0})
    add_arm(results, "large_steps", {20: 36.0, 21: 38.0})
    add_arm(results, "fp32", {20: 34.0, 21: 35.0})
    lead, *causes, precision = cells_of(vim_fair.causes_table(results))
    assert lead == ["ViL's lead", VIL, VIM, "+6.35 (+5.61 to +7.09)", "100"]  # the row of photographs.md
    assert [cause[:3] for cause in [*causes, precision]] == [
        ["learning rate", VIL, VIL_2E_3],
        ["initial dt", LARGE_DT, VIM],
        ["recurrence", VIL_2E_3, LARGE_DT],
        ["precision", FP32, VIM],
    ]
    points = [float(cause[3].split()[0]) for cause in causes]
    assert points == pytest.approx([41.248 - 40.5, 37 - 34.896, 40.5 - 37], abs=0.006)
    assert sum(points) == pytest.approx(6.35, abs=0.02)
    assert sum(int(cause[4]) for cause in causes) == pytest.approx(100, abs=1)
    assert float(precision[3].split()[0]) == pytest.approx(34.5 - 34.896, abs=0.006)


def test_the_interval_of_a_new_arm_is_that_of_students_t_test():
    reference, arm = [41.0, 41.5, 41.3, 40.9], [40.0, 41.0]
    squares = sum((x - mean(group)) ** 2 for group in (reference, arm) for x in group)
    half_width = 2.776 * (squares / 4 * (1 / 4 + 1 / 2)) ** 0.5  # 2.776 is the 97.5% quantile for 4 degrees of freedom
    gap = vim_fair.student(dict(enumerate(reference)), dict(enumerate(arm)))
    assert [gap.low, gap.high] == pytest.approx([0.675 - half_width, 0.675 + half_width], abs=0.001)


def test_an_arm_counts_when_both_of_its_seeds_are_finished(results):
    add_arm(results, "large_steps", {20: 36.0})
    assert cells_of(vim_fair.arms_table(results))[2:] == [[name, "0", "-", "-"] for name in (VIL_2E_3, LARGE_DT, FP32)]
    assert all(cells[3:] == ["-", "-"] for cells in cells_of(vim_fair.causes_table(results))[1:])
    add_arm(results, "large_steps", {20: 36.0, 21: 38.0})
    assert cells_of(vim_fair.arms_table(results))[3] == [LARGE_DT, "2", "37.00 ± 1.41", "36.00 38.00"]
    shown = [cells[0] for cells in cells_of(vim_fair.causes_table(results)) if cells[3] != "-"]
    assert shown == ["ViL's lead", "initial dt"]


@pytest.mark.parametrize(
    "changed", [dict(options=["--lr", "2e-3"]), dict(config=dict(epochs=3)), dict(test_images="others")]
)
def test_runs_with_another_recipe_or_other_images_are_rejected(changed, results):
    add_arm(results, "fp32", {20: 34.0, 21: 35.0}, **changed)
    with pytest.raises(SystemExit, match="vim_fair_fp32.json"):
        vim_fair.read(results)


@pytest.mark.parametrize(
    ("compare", "truth"),
    [
        (lambda top1: vim_fair.student(top1[VIL], top1[VIL_2E_3]), -1.0),
        (lambda top1: vim_fair.student(top1[LARGE_DT], top1[VIM]), 2.0),
        (vim_fair.between_models, 5.0),
    ],
)
def test_intervals_cover_the_true_difference_in_95_of_100_studies(compare, truth):
    """In simulated studies, about 95% of the intervals cover the true difference between two arms.

    The true means are 41 and 42 for ViL, and 35 and 37 for ViM. The true deviations are 0.4 and 1.5.
    """
    random, studies, covered = np.random.default_rng(0), 1000, 0
    runs = {VIL: (41.0, 0.4, 12), VIL_2E_3: (42.0, 0.4, 2), VIM: (35.0, 1.5, 20), LARGE_DT: (37.0, 1.5, 2)}
    for _ in range(studies):
        top1 = {
            name: dict(enumerate(random.normal(center, width, n).tolist())) for name, (center, width, n) in runs.items()
        }
        gap = compare(top1)
        assert gap.mean == pytest.approx((gap.low + gap.high) / 2)
        assert (gap.p_value < 0.05) == (gap.low > 0 or gap.high < 0)
        covered += gap.low < truth < gap.high
    assert covered / studies == pytest.approx(0.95, abs=0.02)


def test_the_variance_of_two_arms_is_pooled_around_the_mean_of_each_arm():
    first, second = [1.0, 3.0], [10.0, 11.0, 15.0]
    squares = sum((x - mean(arm)) ** 2 for arm in (first, second) for x in arm)
    found, degrees = vim_fair.pooled_variance(dict(enumerate(first)), dict(enumerate(second)))
    assert (found, degrees) == (pytest.approx(squares / 3), 3)
