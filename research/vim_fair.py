"""Tables of the study that divides ViL's lead over ViM into its causes (research/vim_fair.md).

The reference runs of ViL and ViM are those of the photographs study. Each new arm of the study changes one setting of a
reference and has a results file, written by research/seeds.py.
"""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from statistics import mean, variance
from typing import Any, NamedTuple

from scipy.stats import t, ttest_ind

from research import photographs, seeds
from research.compare import BySeed, Difference, listed, spread, welch
from vil.evaluation.markdown import markdown_table

SEEDS = [20, 21]  # seeds of the new arms, which no run of the photographs study has
VIL, VIM = "ViL, learning rate 1e-3", "ViM, learning rate 2e-3"  # reference arms
VIL_2E_3, LARGE_DT, FP32 = "ViL, learning rate 2e-3", "ViM, large initial dt", "ViM, fp32"  # new arms


class Arm(NamedTuple):
    """A new arm of the study."""

    file: str  # name of the results file
    model: str
    options: list[str]  # options of research/train.py in addition to the recipe photographs.yaml


ARMS = {
    VIL_2E_3: Arm("vim_fair_vil.json", "vil_tiny", ["--lr", "2e-3"]),
    LARGE_DT: Arm("vim_fair_large_steps.json", "vim_tiny_large_steps", ["--lr", "2e-3"]),
    FP32: Arm("vim_fair_fp32.json", "vim_tiny", ["--lr", "2e-3", "--no-amp"]),
}


def read(results: Path) -> dict[str, BySeed]:
    """Return the test top-1 by arm and seed. A new arm is empty unless all of its seeds are finished.

    Args:
        results: Folder of the results files.

    Raises:
        SystemExit: A new arm has another recipe, other options or other images than the study prescribes.
    """
    reference = results / "photographs.json"
    top1 = photographs.top1_of_test(*photographs.read(reference), photographs.EXTENSIONS[-1])
    found = {VIL: top1[photographs.VIL], VIM: top1[photographs.VIM]}
    recipe = {name: json.loads(reference.read_text())[name] for name in ("config", "images")}
    return found | {name: read_arm(results / arm.file, arm, recipe) for name, arm in ARMS.items()}


def read_arm(path: Path, arm: Arm, recipe: dict[str, Any]) -> BySeed:
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    found["images"].append(found["test_images"])  # photographs.json stores the digests of the three splits in one list
    seeds.check_same(path, found, recipe | dict(options=arm.options), "run the command in research/vim_fair.md")
    top1 = seeds.top1_by_seed(found["runs"]).get(arm.model, {})
    return top1 if [*top1] == SEEDS else {}


def student(first: BySeed, second: BySeed) -> Difference | None:
    """Compare two arms by Student's t-test, with equal variances. Return None if an arm is empty."""
    if not first or not second:
        return None
    test = ttest_ind([*first.values()], [*second.values()])
    low, high = map(float, test.confidence_interval())
    return Difference(mean(first.values()) - mean(second.values()), low, high, float(test.pvalue))


def between_models(top1: dict[str, BySeed]) -> Difference | None:
    """Compare ViL at 2e-3 with ViM with a large initial dt. Return None if one of these arms is empty.

    Two runs are too few to estimate a variance, so the variance of an arm is pooled with that of its reference. The
    degrees of freedom are Satterthwaite's approximation.
    """
    first, second = top1[VIL_2E_3], top1[LARGE_DT]
    if not first or not second:
        return None
    pooled = [pooled_variance(first, top1[VIL]), pooled_variance(second, top1[VIM])]
    squares = [value / len(arm) for (value, _), arm in zip(pooled, (first, second))]
    degrees = sum(squares) ** 2 / sum(square**2 / own for square, (_, own) in zip(squares, pooled))
    gap, error = mean(first.values()) - mean(second.values()), sqrt(sum(squares))
    half_width = float(t.ppf(0.975, degrees)) * error
    return Difference(gap, gap - half_width, gap + half_width, 2 * float(t.sf(abs(gap) / error, degrees)))


def pooled_variance(*arms: BySeed) -> tuple[float, int]:
    """Return the variance of runs around the mean of their arm, and the degrees of freedom of the variance."""
    freedom = [len(arm) - 1 for arm in arms]
    total = sum(own * variance(arm.values()) for own, arm in zip(freedom, arms))
    return total / sum(freedom), sum(freedom)


def arms_table(results: Path) -> str:
    """Return a Markdown table of each arm's test accuracy."""
    table = [["arm", "runs", "test top-1 %, mean ± deviation", "seeds"]]
    for name, top1 in read(results).items():
        cells = [str(len(top1)), spread(top1.values()), listed(top1.values())] if top1 else ["0", "-", "-"]
        table.append([name, *cells])
    return markdown_table(table)


def causes_table(results: Path) -> str:
    """Return a Markdown table of ViL's lead over ViM and of the three differences that add up to the lead.

    The last row lists the effect of fp32, which is not part of the sum.
    """
    top1 = read(results)
    lead = mean(top1[VIL].values()) - mean(top1[VIM].values())
    rows = (
        ("ViL's lead", VIL, VIM, welch(top1[VIL], top1[VIM])),
        ("learning rate", VIL, VIL_2E_3, student(top1[VIL], top1[VIL_2E_3])),
        ("initial dt", LARGE_DT, VIM, student(top1[LARGE_DT], top1[VIM])),
        ("recurrence", VIL_2E_3, LARGE_DT, between_models(top1)),
        ("precision", FP32, VIM, student(top1[FP32], top1[VIM])),
    )
    table = [["cause", "first", "minus", "points (95% interval)", "% of ViL's lead"]]
    for cause, first, second, gap in rows:
        table.append([cause, first, second, *([str(gap), f"{100 * gap.mean / lead:.0f}"] if gap else ["-", "-"])])
    return markdown_table(table)
