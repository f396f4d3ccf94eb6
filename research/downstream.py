"""Fine-tune pre-trained weights on five data sets, compared with training from scratch (research/downstream.md).

    python -m research.downstream --data-dir data/downstream --jobs 6 --workers 2 --out output/downstream.json \\
        --weights weights/vil_tiny_pooled_photographs.safetensors data/*.tiny_mini_in275.safetensors

Pooled ViL is trained from scratch, from weights that were pre-trained on Tiny ImageNet ("old weights"), and from
weights that were pre-trained longer on more images ("new weights"). DeiT is fine-tuned from its own new weights. Each
method's learning rate is selected on the split `validation` with a seed that is not reported. The reported accuracy is
the top-1 of the EMA weights after the last epoch on the split `test`, which is evaluated once.

The program trains the runs in the order that research/downstream.md specifies. Runs in the JSON file are not repeated.
A call trains only on the data sets that have a folder in `--data-dir`, and fine-tunes only the weights in `--weights`.
Unknown options are treated as options of `train_imagenet.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from research import clothing_fair, transfer
from research.clothing_fair import CHOICE_SEED, DEIT, POOLED, RATES, SEEDS, Rows, is_complete, own, tried
from research.compare import Difference, holm, listed, spread, welch
from research.seeds import ROOT, digest_of, machine
from research.transfer import FINE_TUNED, SCRATCH, Results
from vil.data.sources.splits import open_split
from vil.evaluation.markdown import markdown_table

Start = tuple[str, str]  # model and initial weights
Files = dict[Start, Path]  # files of pre-trained weights
Digests = dict[str, list[str]]  # digest of each split in SPLITS, by data set

SPLITS = ("train", "validation", "test")
# By default, timm crops test images of DeiT to 90%, and those of ViL to 87.5%.
RECIPE = [*clothing_fair.RECIPE, "--crop-pct", "0.875"]
EPOCHS = {"clothing": 100, "groceries": 80, "caltech101": 80, "aid": 100, "pacs": 40}  # in the order of training
SMALL = "vil_small_pooled"
NAMES = {POOLED: "pooled ViL", DEIT: "DeiT", SMALL: "small pooled ViL"}
OLD, NEW = "old weights", "new weights"
WEIGHTS = {(POOLED, OLD): "vil_tiny_pooled_photographs"}  # names of the weights files without extension
WEIGHTS |= {(model, NEW): f"{model}.tiny_mini_in275" for model in (POOLED, DEIT, SMALL)}
FIRST_RATES = {POOLED: RATES[2:5], DEIT: RATES[1:4], SMALL: RATES[1:4]}
COMPARED = ((POOLED, SCRATCH), (POOLED, OLD), (POOLED, NEW), (DEIT, NEW))
STARTS = (*COMPARED, (DEIT, SCRATCH), (SMALL, NEW))  # no significance test includes the last two methods


class Way(NamedTuple):
    """Compared method: a data set, a model and the initial weights."""

    task: str
    model: str
    start: str


class Run(NamedTuple):
    """Settings of a training run; `rehearse` is True if the run serves to select the learning rate."""

    task: str
    model: str
    start: str
    setting: float  # learning rate of the run
    seed: int
    rehearse: bool

    def __str__(self) -> str:
        suffix = " (to choose)" * self.rehearse
        return f"{self.task}, {self.model}, {self.start}, {self.setting:g}, seed {self.seed}{suffix}"


STAGES = [[Way(task, *start) for start in starts] for starts in (COMPARED, *zip(STARTS[4:])) for task in EPOCHS]
TESTED = [
    (Way(task, POOLED, NEW), Way(task, *other))
    for other in ((DEIT, NEW), (POOLED, SCRATCH), (POOLED, OLD))
    for task in EPOCHS
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help=f"folder of the data sets {', '.join(EPOCHS)}")
    parser.add_argument("--weights", type=Path, nargs="+", default=[], help="files of pre-trained weights")
    parser.add_argument("--jobs", type=int, default=1, help="number of simultaneous runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all runs; existing runs are kept")
    options, training_options = parser.parse_known_args()
    words = [*RECIPE, *training_options]
    config = yaml.safe_load(clothing_fair.CONFIG.read_text())
    about = {"config": config, "options": words, "epochs": EPOCHS, "choice_seed": CHOICE_SEED}
    images = {task: digests(options.data_dir / task) for task in EPOCHS if (options.data_dir / task).exists()}
    files = {way: path.resolve() for way, name in WEIGHTS.items() for path in options.weights if path.stem == name}
    results = Results(options.out, about, dict(machine(), jobs=options.jobs), {})
    if not results.rows:
        results.rows += clothing_runs()
        results.found = len(results.rows)
    check_inputs(results.rows, images, {way: clothing_fair.digest(path) for way, path in files.items()})
    with TemporaryDirectory(dir=transfer.fast_folder(options.jobs)) as folder, transfer.processes(options.jobs) as pool:
        training = partial(train, options.data_dir, words, files, images, folder)
        clothing_fair.do_all(results, pool, options.jobs, training, lambda rows: planned(rows, images, files))
    print(f"{results.seconds:.0f} s", rates_table(results.rows), ways_table(results.rows), sep="\n\n")
    print(differences_table(results.rows), summary_table(results.rows), sep="\n")


def digests(folder: Path) -> list[str]:
    return [digest_of(open_split(str(folder), "", split)) for split in SPLITS]


def clothing_runs() -> list[dict[str, Any]]:
    """Return the runs of the clothing study (clothing_fair.json) that this study reuses, as rows of this study."""
    study = json.loads((ROOT / "research" / "results" / "clothing_fair.json").read_text())
    starts = {(POOLED, SCRATCH): SCRATCH, (POOLED, FINE_TUNED): OLD, (DEIT, SCRATCH): SCRATCH}
    rows = []
    for row in study["runs"]:
        start = starts.get((row["model"], row["start"]))
        if start and row["epochs"] == EPOCHS["clothing"]:
            run = Run("clothing", row["model"], start, row["setting"], row["seed"], row["rehearse"])
            kept = {name: row[name] for name in ("top1", "weights")}
            rows.append({**run._asdict(), **kept, "images": study["images"], "source": "clothing_fair.json"})
    return rows


def check_inputs(rows: Rows, images: Digests, weights: dict[Start, str]) -> None:
    """Check that the stored runs used the given images and weights.

    Args:
        rows: Stored runs.
        images: Digests of the splits of each data set.
        weights: Digest of each weights file, by model and initial weights.

    Raises:
        SystemExit: A stored run used other images or weights.
    """
    for row in rows:
        if row["images"] != images.get(row["task"], row["images"]):
            sys.exit(f"error: stored runs must use the given images of {row['task']}: give another --out")
        if row["weights"] != weights.get((row["model"], row["start"]), row["weights"]):
            sys.exit(f"error: stored runs of {row['model']} must start from the given weights: give another --out")


def train(data: Path, words: list[str], files: Files, images: Digests, folder: str, run: Run) -> dict[str, Any]:
    """Train a run. Return the accuracy, losses and duration, and the digests of the images and pre-trained weights."""
    path = files.get((run.model, run.start))
    words = ["-c", str(clothing_fair.CONFIG), *words, "--model", run.model, "--epochs", str(EPOCHS[run.task])]
    words += ["--val-split", "validation"]
    words += ["--pretrained-path", str(path)] if path else []
    outcome = transfer.train_on(data / run.task, words, folder, run, test_split="" if run.rehearse else "test")
    return outcome | dict(images=images[run.task], weights=clothing_fair.digest(path) if path else None)


def planned(rows: Rows, tasks: Container[str], pretrained: Container[Start]) -> Iterator[Run]:
    """Yield finished runs and runs that can start now, in the order of the plan.

    Args:
        rows: Finished runs.
        tasks: Data sets whose images exist.
        pretrained: Models and initial weights whose weights file exists.
    """
    for stage in STAGES:
        ways = [way for way in stage if way.task in tasks and (way.start == SCRATCH or way[1:] in pretrained)]
        yield from (Run(*way, rate, CHOICE_SEED, True) for way in ways for rate in rates_to_try(rows, way))
        rates = {way: chosen(rows, way) for way in ways}
        yield from (Run(*way, rate, seed, False) for seed in SEEDS for way, rate in rates.items() if rate)


def rates_to_try(rows: Rows, way: Way) -> Sequence[float]:
    """Return the learning rates that a method must try according to the finished runs, in increasing order.

    A method tries FIRST_RATES, and then the neighbors of the best learning rate in RATES until both were tried.
    """
    found, rates = tried(rows, way), FIRST_RATES[way.model]
    while all(rate in found for rate in rates):
        best = RATES.index(max(rates, key=lambda rate: found[rate]))
        more = sorted({*rates, *RATES[max(0, best - 1) : best + 2]})
        if len(more) == len(rates):
            break
        rates = tuple(more)
    return rates


def chosen(rows: Rows, way: Way) -> float | None:
    """Return the learning rate with the best validation top-1 (the lowest on ties), or None if runs are missing."""
    found, rates = tried(rows, way), rates_to_try(rows, way)
    return max(rates, key=lambda rate: found[rate]) if all(rate in found for rate in rates) else None


def by_seed(rows: Rows, way: Way) -> dict[int, float]:
    """Return a method's test top-1 by seed, for the runs with the selected learning rate."""
    rate = chosen(rows, way)
    found = (row for row in own(rows, way, False) if row["setting"] == rate)
    return {row["seed"]: row["top1"] for row in sorted(found, key=lambda row: row["seed"])}


def rates_table(rows: Rows) -> str:
    """Return a Markdown table of each method's validation top-1 by learning rate."""
    table = [["images", "model", "start", *(f"{rate:g}" for rate in RATES), "chosen"]]
    for way in all_ways():
        found, rate = tried(rows, way), chosen(rows, way)
        cells = [f"{found[rate]:.2f}" if rate in found else "-" for rate in RATES]
        table.append([*way, *cells, f"{rate:g}" if rate else "-"])
    return markdown_table(table)


def ways_table(rows: Rows) -> str:
    """Return a Markdown table of each method's test accuracy, which is `-` for a method without all seeds."""
    table = [["images", "model", "start", "learning rate", "runs", "test top-1 %, mean ± deviation", "seeds"]]
    for way in all_ways():
        top1, rate = by_seed(rows, way), chosen(rows, way)
        cells = [spread(top1.values()), listed(top1.values())] if is_complete(top1) else ["-", "-"]
        table.append([*way, f"{rate:g}" if rate else "-", str(len(top1)), *cells])
    return markdown_table(table)


def differences_table(rows: Rows) -> str:
    """Return a Markdown table of the registered differences in test accuracy.

    A difference is shown if both methods have all seeds. The p-values, also with Holm's correction, are shown when all
    registered differences are known.
    """
    table = [["images", "pooled ViL with new weights minus", "points (95% interval)", "p (Welch)", "p (Holm)"]]
    gaps = [difference(rows, *pair) for pair in TESTED]
    known = [gap for gap in gaps if gap]
    corrected = holm([gap.p_value for gap in known]) if len(known) == len(TESTED) else []
    for i, ((_, other), gap) in enumerate(zip(TESTED, gaps)):
        tests = [f"{gap.p_value:.2g}", f"{corrected[i]:.2g}"] if gap and corrected else ["-", "-"]
        table.append([other.task, f"{other.model}, {other.start}", str(gap) if gap else "-", *tests])
    return markdown_table(table)


def difference(rows: Rows, first: Way, second: Way) -> Difference | None:
    """Compare the test accuracy of two methods by Welch's t-test. Return None if a seed of a method is missing."""
    both = by_seed(rows, first), by_seed(rows, second)
    return welch(*both) if all(map(is_complete, both)) else None


def summary_table(rows: Rows) -> str:
    """Return a Markdown table for the README: the mean test top-1 of each method (columns) on each data set (rows)."""
    table = [["images", "epochs", *(f"{NAMES[model]}, {start}" for model, start in STARTS)]]
    for task, epochs in EPOCHS.items():
        found = [by_seed(rows, Way(task, *start)) for start in STARTS]
        cells = [spread(top1.values(), 1) if is_complete(top1) else "-" for top1 in found]
        table.append([task, str(epochs), *cells])
    return markdown_table(table)


def all_ways() -> Iterator[Way]:
    return (Way(task, *start) for task in EPOCHS for start in STARTS)


def read(path: Path) -> Rows:
    """Return the runs in a results file. Without the file, return the runs that the clothing study trained."""
    return clothing_fair.read(path) or clothing_runs()


if __name__ == "__main__":
    main()
