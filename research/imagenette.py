"""Full-size models trained from scratch on Imagenette at 224 pixels (research/imagenette.md).

    python -m research.imagenette --data-dir data/imagenette --jobs 2 --out output/imagenette.json

Each model chooses its learning rate on a held-out part of the training images, with a seed that is not reported. The
reported accuracy is the top-1 of the EMA weights after the last epoch on the official validation images.

The program trains the runs in the order that research/imagenette.md specifies. A run that the JSON file already has is
not trained again. Unknown options are treated as options of `train_imagenet.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from research import transfer
from research.clothing_fair import do_all
from research.compare import BySeed, holm, listed, spread, welch
from research.cost import cost_table, throughput
from research.seeds import ROOT, digest_of, machine
from research.transfer import Results
from vil.data.sources.splits import open_split
from vil.evaluation.markdown import markdown_table

Rows = Sequence[dict[str, Any]]

CONFIG = ROOT / "research" / "configs" / "imagenette.yaml"
POOLED, VIL, VIM, DEIT = TINY = "vil_tiny_pooled", "vil_tiny", "vim_tiny", "deit_tiny_patch16_224"
SMALL_POOLED, SMALL_DEIT = SMALL = "vil_small_pooled", "deit_small_patch16_224"
RESNET = "resnet50"
STAGES = ((TINY, range(5)), ((RESNET,), range(1)), (SMALL, range(3)))  # models and seeds of each stage
SEEDS = {model: seeds for models, seeds in STAGES for model in models}
TESTED = ((VIL, VIM), (POOLED, VIL), (POOLED, DEIT), (SMALL_POOLED, SMALL_DEIT))
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
FIRST_RATES = RATES[1:-1]  # if the first or last of FIRST_RATES is best, its neighbor in RATES is also tried
CHOICE_SEED, CHOICE_EPOCHS, HELD_OUT = 100, 50, 0.1
TRAIN_SPLIT, TEST_SPLIT = "train", "val"
IMAGES = 9_469  # number of training images
LEVELS = (80, 85, 90)  # target accuracies of the cost table, in percent


class Run(NamedTuple):
    """A training run; `rehearse` is True if the run serves to choose the learning rate."""

    model: str
    setting: float  # learning rate of the run
    seed: int
    rehearse: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.setting:g}, seed {self.seed}{' (to choose)' * self.rehearse}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the splits train and val")
    parser.add_argument("--jobs", type=int, default=1, help="number of simultaneous runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all runs; existing runs are kept")
    options, words = parser.parse_known_args()
    about = {
        "images": [digest_of(open_split(str(options.data_dir), "", name)) for name in (TRAIN_SPLIT, TEST_SPLIT)],
        "config": yaml.safe_load(CONFIG.read_text()), "options": words,
    }  # fmt: skip
    results = Results(options.out, about, dict(machine(), jobs=options.jobs), {})
    with TemporaryDirectory(dir=transfer.fast_folder(options.jobs)) as folder, transfer.processes(options.jobs) as pool:
        do_all(results, pool, options.jobs, partial(train, options.data_dir, words, folder), planned)
    print(f"{results.seconds:.0f} s", rates_table(results.rows), models_table(results.rows), sep="\n\n")
    print(differences_table(results.rows))
    print(minutes_table(results.rows, throughput()))


def train(data: Path, words: list[str], folder: str, run: Run) -> dict[str, Any]:
    """Train one run and return the accuracies, the losses and the duration."""
    words = ["-c", str(CONFIG), "--model", run.model, *words]
    if run.rehearse:
        words += ["--epochs", str(CHOICE_EPOCHS), "--val-fraction", str(HELD_OUT)]
    return transfer.train_on(data, words, folder, run)


def planned(rows: Rows) -> Iterator[Run]:
    """Yield the finished runs and the runs that can be trained now, in the preregistered order."""
    for models, seeds in STAGES:
        yield from (Run(model, rate, CHOICE_SEED, True) for model in models for rate in rates_to_try(rows, model))
        rates = {model: chosen(rows, model) for model in models}
        yield from (Run(model, rate, seed, False) for seed in seeds for model, rate in rates.items() if rate)


def own(rows: Rows, model: str, rehearse: bool) -> Rows:
    return [row for row in rows if row["model"] == model and row["rehearse"] == rehearse]


def tried(rows: Rows, model: str) -> dict[float, float]:
    """Return a model's top-1 on the held-out training images by learning rate."""
    return {row["setting"]: row["top1"] for row in sorted(own(rows, model, True), key=lambda row: row["setting"])}


def rates_to_try(rows: Rows, model: str) -> Sequence[float]:
    """Return the learning rates to try: FIRST_RATES, and one more if the lowest or highest of FIRST_RATES is best."""
    found = tried(rows, model)
    if not all(rate in found for rate in FIRST_RATES):
        return FIRST_RATES
    best = max(FIRST_RATES, key=lambda rate: found[rate])
    return (*FIRST_RATES, *{FIRST_RATES[0]: RATES[:1], FIRST_RATES[-1]: RATES[-1:]}.get(best, ()))


def chosen(rows: Rows, model: str) -> float | None:
    """Return a model's best learning rate (the lowest on ties), or None if a learning rate has not been tried yet."""
    found = tried(rows, model)
    if not all(rate in found for rate in rates_to_try(rows, model)):
        return None
    return max(found, key=lambda rate: found[rate])


def by_seed(rows: Rows, model: str) -> BySeed:
    """Return a model's top-1 on the official validation images by seed, or {} if a seed is missing."""
    found = {row["seed"]: row["top1"] for row in sorted(own(rows, model, False), key=lambda row: row["seed"])}
    return found if [*found] == [*SEEDS[model]] else {}


def rates_table(rows: Rows) -> str:
    """Return a Markdown table of the top-1 on held-out training images by model and learning rate."""
    table = [["model", *(f"{rate:g}" for rate in RATES), "chosen"]]
    for model in SEEDS:
        found, rate = tried(rows, model), chosen(rows, model)
        cells = [f"{found[rate]:.2f}" if rate in found else "-" for rate in RATES]
        table.append([model, *cells, f"{rate:g}" if rate else "-"])
    return markdown_table(table)


def models_table(rows: Rows) -> str:
    """Return a Markdown table of each model's runs and their duration, with test top-1 if the model has all seeds."""
    table = [["model", "learning rate", "runs", "top-1 %, mean ± deviation", "seeds", "minutes of a run"]]
    for model in SEEDS:
        runs, rate, top1 = own(rows, model, False), chosen(rows, model), by_seed(rows, model)
        cells = [spread(top1.values()), listed(top1.values())] if top1 else ["-", "-"]
        minutes = f"{median(row['seconds'] for row in runs) / 60:.1f}" if runs else "-"
        table.append([model, f"{rate:g}" if rate else "-", str(len(runs)), *cells, minutes])
    return markdown_table(table)


def differences_table(rows: Rows) -> str:
    """Return a Markdown table of the preregistered differences, with Holm's p-values if all differences are known."""
    table = [["model", "minus", "points (95% interval)", "p (Welch)", "p (Holm)"]]
    gaps = [welch(by_seed(rows, first), by_seed(rows, second)) for first, second in TESTED]
    known = [gap for gap in gaps if gap]
    corrected = holm([gap.p_value for gap in known]) if len(known) == len(TESTED) else []
    for i, ((first, second), gap) in enumerate(zip(TESTED, gaps)):
        tests = [f"{gap.p_value:.2g}", f"{corrected[i]:.2g}"] if gap and corrected else ["-", "-"]
        table.append([first, second, str(gap) if gap else "-", *tests])
    return markdown_table(table)


def minutes_table(rows: Rows, speeds: dict[str, float]) -> str:
    """Return a Markdown table of the GPU minutes to test accuracies, `-` until all runs are finished.

    Args:
        rows: Finished runs.
        speeds: Training throughput in images/s by model.
    """
    complete = all(by_seed(rows, model) for model in SEEDS)
    curves = {m: [row["top1_by_epoch"] for row in own(rows, m, False)] if complete else [] for m in SEEDS}
    return cost_table(curves, IMAGES, LEVELS, speeds)


if __name__ == "__main__":
    main()
