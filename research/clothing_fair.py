"""Fair comparison of training from scratch and fine-tuning on photographs of clothing (research/clothing_fair.md).

    python -m research.clothing_fair --data-dir data/clothing --jobs 6 --out output/clothing_fair.json \\
        --weights weights/vil_tiny_pooled_photographs.safetensors data/deit_tiny_photographs.safetensors \\
        weights/vil_tiny_photographs.safetensors

Each model is trained from scratch and fine-tuned from weights that were pre-trained on Tiny ImageNet, for 20 and for
100 epochs, without layer decay. Each method's learning rate is selected on the split `validation` with a seed that is
not reported. The reported accuracy is the top-1 of the EMA weights after the last epoch on the split `test`.

The program trains the runs in the order that research/clothing_fair.md specifies. Runs in the JSON file are not
repeated. Fine-tuning of a model starts when its weights file exists. Unknown options are treated as options of
`train_imagenet.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from research import transfer
from research.compare import Difference, holm, listed, spread, welch
from research.seeds import ROOT, digest_of, machine
from research.transfer import FINE_TUNED, SCRATCH, Results
from vil.data.sources.splits import open_split
from vil.evaluation.markdown import markdown_table

Rows = Sequence[dict[str, Any]]

CONFIG = ROOT / "research" / "configs" / "finetune.yaml"
RECIPE = ["--layer-decay", "none"]
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
FIRST_RATES = RATES[1:-1]  # learning rates that are tried first with the short budget
SHORT, LONG = BUDGETS = 20, 100  # numbers of epochs of a short run and of a long run
CHOICE_SEED = 100
SEEDS = range(5)
POOLED, DEIT, VIL = "vil_tiny_pooled", "deit_tiny_patch16_224", "vil_tiny"
WEIGHTS = {POOLED: "vil_tiny_pooled_photographs", DEIT: "deit_tiny_photographs", VIL: "vil_tiny_photographs"}


class Way(NamedTuple):
    """Compared method: a model, trained from scratch or fine-tuned, and the number of epochs."""

    model: str
    start: str
    epochs: int


class Run(NamedTuple):
    """Settings of a training run; `rehearse` is True if the run serves to select the learning rate."""

    model: str
    start: str
    epochs: int
    setting: float  # learning rate of the run
    seed: int
    rehearse: bool

    def __str__(self) -> str:
        suffix = " (to choose)" * self.rehearse
        return f"{self.model}, {self.start}, {self.epochs} epochs, {self.setting:g}, seed {self.seed}{suffix}"


STAGES = tuple(
    [Way(model, start, epochs) for model, start in ways]
    for epochs, ways in (
        (SHORT, [(POOLED, SCRATCH), (POOLED, FINE_TUNED), (DEIT, FINE_TUNED)]),
        (LONG, [(POOLED, SCRATCH), (POOLED, FINE_TUNED), (DEIT, FINE_TUNED)]),
        (SHORT, [(DEIT, SCRATCH), (VIL, SCRATCH), (VIL, FINE_TUNED)]),
        (LONG, [(DEIT, SCRATCH), (VIL, SCRATCH), (VIL, FINE_TUNED)]),
    )
)
TESTED = [
    pair
    for epochs in BUDGETS
    for pair in (
        (Way(POOLED, FINE_TUNED, epochs), Way(POOLED, SCRATCH, epochs)),
        (Way(POOLED, FINE_TUNED, epochs), Way(DEIT, FINE_TUNED, epochs)),
    )
]
ESTIMATED = [
    (Way(POOLED, FINE_TUNED, SHORT), Way(POOLED, SCRATCH, LONG)),
    *((Way(DEIT, FINE_TUNED, epochs), Way(DEIT, SCRATCH, epochs)) for epochs in BUDGETS),
    *((Way(VIL, FINE_TUNED, epochs), Way(VIL, SCRATCH, epochs)) for epochs in BUDGETS),
    *((Way(VIL, FINE_TUNED, epochs), Way(DEIT, FINE_TUNED, epochs)) for epochs in BUDGETS),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the splits train, validation and test")
    parser.add_argument("--weights", type=Path, nargs="+", required=True, help="pre-trained weights; may not exist yet")
    parser.add_argument("--jobs", type=int, default=1, help="number of simultaneous runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all runs; existing runs are kept")
    options, training_options = parser.parse_known_args()
    about = {
        "images": [digest_of(open_split(str(options.data_dir), "", name)) for name in ("train", "validation", "test")],
        "config": yaml.safe_load(CONFIG.read_text()), "options": [*RECIPE, *training_options],
        "choice_seed": CHOICE_SEED,
    }  # fmt: skip
    files = {model: path.resolve() for model, name in WEIGHTS.items() for path in options.weights if path.stem == name}
    results = Results(options.out, about, dict(machine(), jobs=options.jobs), {})
    check_weights(results.rows, files)
    words = ["-c", str(CONFIG), *RECIPE, *training_options]
    with TemporaryDirectory(dir=transfer.fast_folder(options.jobs)) as folder, transfer.processes(options.jobs) as pool:
        training = partial(train, options.data_dir, words, files, folder)
        do_all(results, pool, options.jobs, training, lambda rows: planned(rows, with_weights(files)))
    print(f"{results.seconds:.0f} s", rates_table(results.rows), ways_table(results.rows), sep="\n\n")
    print(differences_table(results.rows))


def with_weights(files: dict[str, Path]) -> set[str]:
    """Return the models whose pre-trained weights file exists."""
    return {model for model, path in files.items() if path.exists()}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_weights(rows: Rows, files: dict[str, Path]) -> None:
    """Check that the stored runs were fine-tuned from the given weights files.

    Raises:
        SystemExit: A stored run was fine-tuned from other weights.
    """
    for model in with_weights(files):
        if {row["weights"] for row in rows if row["model"] == model} - {digest(files[model]), None}:
            sys.exit(f"error: stored runs of {model} must start from {files[model]}: give another --out")


def train(data: Path, words: list[str], files: dict[str, Path], folder: str, run: Run) -> dict[str, Any]:
    """Train a run, and return the accuracy, the losses, the duration and the digest of the pre-trained weights."""
    path = files[run.model] if run.start == FINE_TUNED else None
    words = [*words, "--model", run.model, "--epochs", str(run.epochs)]
    words += ["--val-split", "validation" if run.rehearse else "test"]
    words += ["--pretrained-path", str(path)] if path else []
    return transfer.train_on(data, words, folder, run) | dict(weights=digest(path) if path else None)


def do_all(
    results: Results,
    pool: Executor | None,
    jobs: int,
    training: Callable[[Any], dict],
    plan: Callable[[Rows], Iterable],
) -> None:
    """Train the runs that are missing in the results, in the order of `plan`, with `jobs` runs at a time."""
    running: dict[Future, Any] = {}
    while True:
        busy = set(running.values())
        ready = [r for r in plan(results.rows) if r not in results and r not in busy]
        if not pool and ready:
            record(results, ready[0], training(ready[0]))
            continue
        if pool:
            running |= {pool.submit(training, run): run for run in ready[: jobs - len(running)]}
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            record(results, running.pop(future), future.result())


def record(results: Results, run: Any, outcome: dict[str, Any]) -> None:
    results.add(run, outcome)
    results.write()


def planned(rows: Rows, pretrained: Iterable[str]) -> Iterator[Run]:
    """Yield finished runs and runs that can start now, in the order of the plan.

    A run can start if its pre-trained weights exist (unless it trains from scratch) and its learning rate is known.

    Args:
        rows: Finished runs.
        pretrained: Models whose pre-trained weights file exists.
    """
    for ways in STAGES:
        ways = [way for way in ways if way.start == SCRATCH or way.model in pretrained]
        yield from (Run(*way, rate, CHOICE_SEED, True) for way in ways for rate in rates_to_try(rows, way))
        rates = {way: chosen(rows, way) for way in ways}
        yield from (Run(*way, rate, seed, False) for seed in SEEDS for way, rate in rates.items() if rate)


def rates_to_try(rows: Rows, way: Way) -> Sequence[float]:
    """Return the learning rates that a method must try according to the finished runs.

    With the short budget, the method tries FIRST_RATES, and one more learning rate if the best one is the first or the
    last. With the long budget, the method tries the best learning rate of the short budget and its neighbors in RATES.
    """
    if way.epochs == LONG:
        rate = chosen(rows, way._replace(epochs=SHORT))
        return RATES[max(0, RATES.index(rate) - 1) : RATES.index(rate) + 2] if rate else ()
    found = tried(rows, way)
    if not all(rate in found for rate in FIRST_RATES):
        return FIRST_RATES
    best = max(FIRST_RATES, key=lambda rate: found[rate])
    return (*FIRST_RATES, *{FIRST_RATES[0]: RATES[:1], FIRST_RATES[-1]: RATES[-1:]}.get(best, ()))


def own(rows: Rows, way: Any, rehearse: bool) -> Rows:
    """Return the runs of the method `way` (a named tuple) whose field `rehearse` has the given value."""
    settings = way._asdict() | dict(rehearse=rehearse)
    return [row for row in rows if all(row[name] == value for name, value in settings.items())]


def tried(rows: Rows, way: Any) -> dict[float, float]:
    """Return a method's validation top-1 by learning rate, for the runs that select the learning rate."""
    return {row["setting"]: row["top1"] for row in sorted(own(rows, way, True), key=lambda row: row["setting"])}


def chosen(rows: Rows, way: Way) -> float | None:
    """Return the learning rate with the best validation top-1 (the lowest on ties), or None if runs are missing."""
    found, needed = tried(rows, way), rates_to_try(rows, way)
    if not needed or not all(rate in found for rate in needed):
        return None
    return max(found, key=lambda rate: found[rate])


def by_seed(rows: Rows, way: Way) -> dict[int, float]:
    """Return a method's test top-1 by seed, for the runs with the selected learning rate."""
    rate = chosen(rows, way)
    found = (row for row in own(rows, way, False) if row["setting"] == rate)
    return {row["seed"]: row["top1"] for row in sorted(found, key=lambda row: row["seed"])}


def is_complete(top1: dict[int, float]) -> bool:
    return [*top1] == [*SEEDS]


def rates_table(rows: Rows) -> str:
    """Return a Markdown table of each method's validation top-1 by learning rate."""
    table = [["model", "start", "epochs", *(f"{rate:g}" for rate in RATES), "chosen"]]
    for way in (way for ways in STAGES for way in ways):
        found, rate = tried(rows, way), chosen(rows, way)
        cells = [f"{found[rate]:.2f}" if rate in found else "-" for rate in RATES]
        table.append([way.model, way.start, str(way.epochs), *cells, f"{rate:g}" if rate else "-"])
    return markdown_table(table)


def ways_table(rows: Rows) -> str:
    """Return a Markdown table of each method's test accuracy, which is `-` for a method without all seeds."""
    table = [["model", "start", "epochs", "learning rate", "runs", "test top-1 %, mean ± deviation", "seeds"]]
    for way in (way for ways in STAGES for way in ways):
        top1, rate = by_seed(rows, way), chosen(rows, way)
        cells = [spread(top1.values()), listed(top1.values())] if is_complete(top1) else ["-", "-"]
        table.append([way.model, way.start, str(way.epochs), f"{rate:g}" if rate else "-", str(len(top1)), *cells])
    return markdown_table(table)


def differences_table(rows: Rows) -> str:
    """Return a Markdown table of differences in test accuracy between two methods, if both methods have all seeds.

    The p-values, also with Holm's correction, are shown when all runs of the four registered tests are finished.
    """
    table = [["first", "less", "points (95% interval)", "p (Welch)", "p (Holm)"]]
    gaps = [difference(rows, *pair) for pair in TESTED + ESTIMATED]
    registered = gaps[: len(TESTED)]
    corrected = holm([gap.p_value for gap in registered]) if all(registered) else []
    for i, ((first, second), gap) in enumerate(zip(TESTED + ESTIMATED, gaps)):
        tests = [f"{gap.p_value:.2g}", f"{corrected[i]:.2g}"] if gap and i < len(corrected) else ["-", "-"]
        table.append([said(first), said(second), str(gap) if gap else "-", *tests])
    return markdown_table(table)


def difference(rows: Rows, first: Way, second: Way) -> Difference | None:
    """Compare the test accuracy of two methods by Welch's t-test. Return None if a seed of a method is missing."""
    both = by_seed(rows, first), by_seed(rows, second)
    return welch(*both) if all(map(is_complete, both)) else None


def said(way: Way) -> str:
    return f"{way.model}, {way.start}, {way.epochs} epochs"


def read(path: Path) -> Rows:
    """Return the runs in a results file, or an empty list if the file does not exist."""
    return json.loads(path.read_text())["runs"] if path.exists() else []


if __name__ == "__main__":
    main()
