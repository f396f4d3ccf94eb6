"""Regenerate the result tables in research/*.md from the raw results.

    python -m research.tables

Each table between the lines `<!-- table: NAME -->` and `<!-- end -->` of research/*.md is generated from
research/results. A test compares the committed pages with the output of this program.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from research import (
    clothing,
    clothing_fair,
    cost,
    downstream,
    imagenette,
    longer,
    photographs,
    pretraining_images,
    recall_results,
    seeds,
    trainers,
    transfer,
    vim_fair,
    weights,
)
from research.compare import holm, paired, spread, welch
from research.predictions import Judged, compare_images
from research.recall_model import MIXERS
from vil.evaluation.markdown import markdown_table
from vil.fault_tolerance.files import write_atomically

RESULTS = seeds.ROOT / "research" / "results"
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The keys name result files of studies that compare ViL with ViM, and the values are Markdown links to the studies.
STUDIES = {
    "rehearsal2": "[easier fractals](rehearsal.md#easier-images)",
    "rehearsal": "[fractals](rehearsal.md)",
    "cifar10": "[CIFAR-10](small_images.md#cifar-10)",
    "digits": "[digits](small_images.md#digits)",
    "digits_few": "[20 digits of each class](small_images.md#few-digits)",
}

# The keys name result files of ViL trained with other recipes, and the values describe the recipes.
RECIPES = {"recipes_teacher": "a teacher", "recipes_bce": "3-Augment, binary cross-entropy"}
RECIPE_SEEDS = 3


def runs_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["runs"]


def comparisons() -> str:
    """Return a Markdown table of ViL minus ViM in STUDIES, by paired and Welch's t-test with Holm's correction."""
    vil, vim, deit = seeds.MODELS
    found = {name: seeds.top1_by_seed(runs_of(name)) for name in STUDIES}
    by_test = [[test(top1[vil], top1[vim]) for top1 in found.values()] for test in (paired, welch)]
    corrected = [holm([gap.p_value for gap in gaps]) for gaps in by_test]
    tests = "ViL minus ViM (95% interval), paired by seed", "p (Holm)", "unpaired (Welch)", "p (Holm)"
    table = [["images", "seeds", "ViL %", "ViM %", "DeiT % (seeds)", *tests]]
    for name, *gaps in zip(found, *by_test, *corrected):
        first, second, third = (found[name].get(model, {}) for model in (vil, vim, deit))
        row = [STUDIES[name], str(len(first)), spread(first.values()), spread(second.values())]
        row.append(f"{spread(third.values())} ({len(third)})" if third else "")
        for gap, p_value in zip(gaps[:2], gaps[2:]):
            row += [str(gap), f"{gap.p_value:.2g} ({p_value:.2g})"]
        table.append(row)
    return markdown_table(table)


def equal_time() -> str:
    """Return a Markdown table that compares the accuracy of ViL and ViM at equal training time and after all epochs."""
    head = [
        "images",
        "seconds of training",
        "epochs of ViM in this time",
        "ViL %",
        "ViM % in this time",
        "ViM % at the end",
    ]
    table = [head]
    for name in ("rehearsal", "rehearsal2"):
        runs = runs_of(name)
        vil, vim = ([run for run in runs if run["model"] == model] for model in seeds.MODELS[:2])
        end = vil[0]["epochs"] * seeds.epoch_seconds(vil)
        epochs = int(end / seeds.epoch_seconds(vim))
        curves = ((vil, -1), (vim, epochs - 1), (vim, -1))
        means = [mean(run["curves"]["eval_top1"][i] for run in own) for own, i in curves]
        table.append([STUDIES[name], f"{end:.0f}", str(epochs), *(f"{value:.1f}" for value in means)])
    return markdown_table(table)


def recall(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the best recall by width, mixer and length, with the learning rate in brackets."""
    kept = {}
    for run in sorted(runs, key=lambda run: run["accuracy"][-1]):
        kept[run["width"], run["mixer"], run["length"]] = run
    pairs = {run["length"]: run["pairs"] for run in runs}
    table = [["width", "mixer", "parameters", *(f"T {length}, {n} pairs" for length, n in sorted(pairs.items()))]]
    for width, mixer in sorted({key[:2] for key in kept}, key=lambda key: (key[0], list(MIXERS).index(key[1]))):
        row = [kept.get((width, mixer, length)) for length in sorted(pairs)]
        counts = [run["parameters"] for run in row if run]
        cells = [f"{run['accuracy'][-1]:.1f} ({run['lr']:g})" if run else "-" for run in row]
        table.append([str(width), mixer, " to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)})), *cells])
    return markdown_table(table)


def image_by_image(name: str) -> str:
    return compare_images(runs_of(name), Judged.read(RESULTS / f"{name}.csv.gz"))


def of_photographs(table: Callable[..., str], judged: bool = True) -> str:
    runs, found = photographs.read(RESULTS / "photographs.json")
    return table(runs, found) if judged else table(runs)


def of_fair_clothing(table: Callable[..., str]) -> str:
    return table(clothing_fair.read(RESULTS / "clothing_fair.json"))


def of_downstream(table: Callable[..., str]) -> str:
    return table(downstream.read(RESULTS / "downstream.json"))


def of_longer(table: Callable[..., str], judged: bool = True) -> str:
    runs, found = photographs.read(RESULTS / "longer.json")
    return table(runs, found) if judged else table(runs)


def of_weights(table: Callable[..., str], judged: bool = True) -> str:
    runs, found = photographs.read(RESULTS / "weights.json")
    return table(runs, found) if judged else table(runs)


def of_imagenette(table: Callable[..., str]) -> str:
    return table(clothing_fair.read(RESULTS / "imagenette.json"))


def recipes(plain: dict[int, float], found: dict[str, dict[int, float]]) -> str:
    """Return a Markdown table that compares ViL's test accuracy with other recipes and with the baseline recipe.

    Args:
        plain: Top-1 by seed with the baseline recipe.
        found: Top-1 by seed with each recipe.
    """
    if complete := plain and all(len(top1) == RECIPE_SEEDS for top1 in found.values()):
        gaps = [welch(top1, plain) for top1 in found.values()]
        corrected = holm([gap.p_value for gap in gaps])
    table = [
        ["recipe", "runs", "test top-1 %, mean ± deviation", "minus baseline (95% interval)", "p (Welch)", "p (Holm)"]
    ]
    for i, (name, top1) in enumerate(found.items()):
        cells = ["-"] * 4
        if complete:
            cells = [spread(top1.values()), str(gaps[i]), f"{gaps[i].p_value:.2g}", f"{corrected[i]:.2g}"]
        table.append([RECIPES[name], str(len(top1)), *cells])
    return markdown_table(table)


def of_recipes() -> str:
    runs, judged = photographs.read(RESULTS / "photographs.json")
    plain = photographs.top1_of_test(runs, judged).get(photographs.VIL, {})
    found = {name: seeds.top1_by_seed(photographs.read(RESULTS / f"{name}.json")[0]) for name in RECIPES}
    return recipes(plain, {name: models.get(photographs.VIL, {}) for name, models in found.items()})


def published_vit(name: str) -> str:
    """Return a Markdown table of the published ViT's top-1 in the last and in the best epoch of each run."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    table = [["learning rate", "seed", "top-1 % of the last epoch", "top-1 % of the best epoch", "best epoch"]]
    for run in found["runs"]:
        top1 = run["curves"]["eval_top1"]
        best = max(range(len(top1)), key=top1.__getitem__)
        cells = [f"{run['top1']:.2f}", f"{top1[best]:.2f}", str(best + 1)]
        table.append([f"{found['config']['lr']:g}", str(run["seed"]), *cells])
    return markdown_table(table)


def generated_images() -> str:
    """Return a Markdown table of each method's top-1 on digits, with weights pre-trained on generated images."""
    table = [
        ["pixels", "images per class", "samples", *transfer.SETTINGS, f"{transfer.FINE_TUNED} minus {transfer.SCRATCH}"]
    ]
    for size, name in ((224, "transfer"), (112, "transfer_112")):
        for per_class, ways in transfer.complete(runs_of(name)).items():
            gap = paired(ways[transfer.FINE_TUNED], ways[transfer.SCRATCH])
            cells = [spread(own.values(), digits=1) for own in ways.values()]
            difference = f"{gap.mean:+.1f} ({gap.low:+.1f} to {gap.high:+.1f}), p = {gap.p_value:.2g}"
            table.append([str(size), str(per_class), str(len(ways[transfer.SCRATCH])), *cells, difference])
    return markdown_table(table)


TABLES: dict[str, Callable[[], str]] = {
    "comparisons": comparisons,
    "equal-time": equal_time,
    "recall": lambda: recall(runs_of("mqar")),
    "recall-registered": lambda: recall_results.shares(recall_results.merged([RESULTS / "recall.json"])),
    "photographs-rates": partial(of_photographs, photographs.rates_table, judged=False),
    "photographs": partial(of_photographs, photographs.models_table),
    "photographs-differences": partial(of_photographs, photographs.differences_table),
    "literature": lambda: seeds.report(photographs.read(RESULTS / "literature.json")[0]),
    "published-vit": partial(published_vit, "published_vit"),
    "published-vit-init": partial(published_vit, "published_init"),
    "vim-fair": lambda: vim_fair.arms_table(RESULTS),
    "vim-fair-causes": lambda: vim_fair.causes_table(RESULTS),
    "trainers": lambda: trainers.trainers_table(RESULTS),
    "weights": generated_images,
    "transfer": lambda: transfer.ways_table(runs_of("transfer")),
    "transfer-differences": lambda: transfer.differences_table(runs_of("transfer")),
    "clothing": lambda: transfer.ways_table(runs_of("clothing")),
    "clothing-differences": lambda: clothing.differences_table(runs_of("clothing")),
    "clothing-fair-rates": partial(of_fair_clothing, clothing_fair.rates_table),
    "clothing-fair": partial(of_fair_clothing, clothing_fair.ways_table),
    "clothing-fair-differences": partial(of_fair_clothing, clothing_fair.differences_table),
    "imagenette-rates": partial(of_imagenette, imagenette.rates_table),
    "imagenette": partial(of_imagenette, imagenette.models_table),
    "imagenette-differences": partial(of_imagenette, imagenette.differences_table),
    "imagenette-cost": lambda: imagenette.minutes_table(
        clothing_fair.read(RESULTS / "imagenette.json"), cost.throughput()
    ),
    "downstream": partial(of_downstream, downstream.summary_table),
    "downstream-rates": partial(of_downstream, downstream.rates_table),
    "downstream-seeds": partial(of_downstream, downstream.ways_table),
    "downstream-differences": partial(of_downstream, downstream.differences_table),
    "pretraining-images": lambda: pretraining_images.duplicates_table(
        pretraining_images.read_duplicates(RESULTS / "pretraining_images.csv.gz")
    ),
    "pretraining-rates": partial(of_weights, weights.rates_table, judged=False),
    "pretraining": partial(of_weights, weights.models_table),
    "pretraining-differences": partial(of_weights, weights.differences_table),
    "longer-rates": partial(of_longer, longer.rates_table, judged=False),
    "longer": partial(of_longer, longer.models_table),
    "longer-differences": partial(of_longer, longer.differences_table),
    "longer-cost": lambda: longer.minutes_table(photographs.read(RESULTS / "longer.json")[0], cost.throughput()),
    "recipes": of_recipes,
    **{name: lambda name=name: seeds.report(runs_of(name)) for name in STUDIES},
    **{f"{name}-images": partial(image_by_image, name) for name in ("cifar10", "rehearsal", "rehearsal2")},
}


def pages() -> list[Path]:
    return sorted((seeds.ROOT / "research").glob("*.md"))


def filled(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """Return the text of a Markdown page with its tables regenerated from the raw results.

    Raises:
        KeyError: The page names an unknown table.
    """
    return TABLE.sub(lambda found: found[1] + tables[found[2]]() + found[3], text)


def rewrite(page: Path, tables: dict[str, Callable[[], str]] = TABLES) -> bool:
    """Regenerate the tables in the file of a page, and return whether the page has changed."""
    before = page.read_text()
    after = filled(before, tables)
    if after != before:
        write_atomically(page, after)
    return after != before


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in pages():
        if rewrite(page):
            print(f"{page.relative_to(seeds.ROOT)} changed")


if __name__ == "__main__":
    main()
