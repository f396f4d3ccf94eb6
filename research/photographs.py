"""Train full-size ViL, ViM, pooled ViL and DeiT on Tiny ImageNet by the protocol of research/photographs.md.

    python -m research.photographs --minutes 9 --out output/photographs.json    # repeat until the study is complete

Each call continues from the results in `--earlier` and the runs in `--folder`, in the protocol's order: a learning rate
for every model, the speed of compiled DeiT, seeds of all models in turn, further seeds if the confidence interval is
too wide, and finally the protocol's extensions. research/seeds.py starts, stops and resumes the runs of
train_imagenet.py. Each finished run is written to `--out`. The predictions of the seeds' last weights for the test
images are written beside `--out`. Test accuracies are computed only when all runs that precede the extensions are
finished.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, NamedTuple

import yaml

from research import seeds
from research.compare import BySeed, holm, listed, spread, welch
from research.predictions import Judged, job_of, joined, name_of
from vil.evaluation.markdown import markdown_table
from vil.fault_tolerance.files import write_atomically
from vil.training.interruption import PREEMPTED

Runs = list[dict[str, Any]]

RESEARCH = seeds.ROOT / "research"
TEST_SPLIT = "test"
VIL, VIM, POOLED, DEIT = MODELS = ["vil_tiny", "vim_tiny", "vil_tiny_pooled", "deit_tiny_patch16_224"]
COMPARED = ((VIL, VIM), (POOLED, VIL), (VIL, DEIT))  # pairs of models compared by Welch's test, with Holm's correction
RATES = (5e-4, 1e-3, 2e-3)
CHOICE_SEED = 100  # seed used only by the runs that select the learning rate or measure compiled DeiT
SEEDS, FURTHER_SEEDS = range(5), range(5, 8)
PROTOCOL = dict.fromkeys(MODELS, FURTHER_SEEDS.stop)  # exclusive upper bound of each model's seeds in the protocol
# Additional seeds were planned after the first differences were known, so no significance test uses them.
EXTENSIONS = ({VIL: 12, VIM: 12}, {VIL: 12, VIM: 20})
WIDEST = 0.5  # largest half-width of a confidence interval, in points, for which no further seeds are trained
MARGIN = 1.0  # two models are equivalent if the confidence interval of their difference is within ±MARGIN points
OPTIONS = {"rates": ["--epochs", "8"], "compiled": ["--epochs", "2", "--torchcompile"], "seeds": []}
DIVERGED = r"the (loss|gradient norm|gradient's norm) is (nan|inf|-inf) at step"


class Cell(NamedTuple):
    """Settings that identify a planned run of the study. `stage` is a key of OPTIONS."""

    stage: str
    model: str
    lr: float
    seed: int

    @property
    def place(self) -> str:
        """Name of the folder for all runs with the same stage and learning rate."""
        return f"{self.stage}-{self.lr:g}"

    def __str__(self) -> str:
        return f"{self.place}/{name_of(self.model, self.seed)}"


Plan = Callable[[Runs], Iterator[list[Cell]]]  # function that yields the planned runs of each stage


def cell_of(run: dict[str, Any]) -> Cell:
    return Cell(*(run[name] for name in Cell._fields))


def stages(runs: Runs) -> Iterator[list[Cell]]:
    """Yield the planned runs of each stage in order. The plan of a stage depends on the results of earlier stages."""
    yield from rate_stages(runs, MODELS, RATES)
    rates = best_rates(runs, MODELS)
    yield [Cell("compiled", DEIT, rates[DEIT], CHOICE_SEED)]
    cells = [Cell("seeds", model, rates[model], seed) for seed in SEEDS for model in MODELS]
    top1 = [top1_to_choose_on([run for run in runs if run["seed"] in SEEDS], model) for model in (VIL, VIM)]
    if all(len(by_seed) == len(SEEDS) for by_seed in top1) and welch(*top1).half_width > WIDEST:
        cells += [Cell("seeds", model, rates[model], seed) for seed in FURTHER_SEEDS for model in (VIL, VIM)]
    yield cells


def rate_stages(runs: Runs, models: Sequence[str], rates: Sequence[float]) -> Iterator[list[Cell]]:
    """Yield the runs that select learning rates: first at `rates`, then beyond the lowest or highest if it is best."""
    yield [Cell("rates", model, lr, CHOICE_SEED) for lr in rates for model in models]
    further = {model: beyond(found, rates) for model, found in accuracy_by_rate(runs, models).items()}
    yield [Cell("rates", model, lr, CHOICE_SEED) for model, lr in further.items() if lr]


def best_rates(runs: Runs, models: Sequence[str]) -> dict[str, float]:
    """Return a dict from model to the learning rate with the best validation top-1 (the lowest on ties)."""
    return {model: max(found, key=found.__getitem__) for model, found in accuracy_by_rate(runs, models).items()}


def to_do(runs: Runs, plan: Plan = stages) -> list[Cell]:
    """Return the planned runs that the first incomplete stage lacks, or [] if all stages are complete."""
    done = {cell_of(run) for run in runs}
    left = ([cell for cell in cells if cell not in done] for cells in plan(runs))
    return next((cells for cells in left if cells), [])


def extension(runs: Runs) -> list[Cell]:
    """Return the planned runs that the first incomplete extension of the protocol lacks, or [] if all are complete."""
    return next((cells for ends in EXTENSIONS if (cells := missing_of(ends, runs))), [])


def missing_of(ends: dict[str, int], runs: Runs) -> list[Cell]:
    """Return the runs without results for each model's additional seeds, `FURTHER_SEEDS.stop` to `ends[model] - 1`."""
    have = {cell_of(run) for run in runs}
    rates = {model: run["lr"] for model in ends for run in of_seeds(runs, model)}
    seeds_behind = range(FURTHER_SEEDS.stop, max(ends.values()))
    cells = [Cell("seeds", m, rates[m], seed) for seed in seeds_behind for m, end in ends.items() if seed < end]
    return [cell for cell in cells if cell not in have]


def beyond(accuracies: dict[float, float], rates: Sequence[float]) -> float | None:
    """Return the next learning rate outside `rates` if the best one is the lowest or highest, otherwise None."""
    best = max(rates, key=accuracies.__getitem__)
    return {min(rates): min(rates) / 2, max(rates): 2 * max(rates)}.get(best)


def accuracy_by_rate(runs: Runs, models: Sequence[str]) -> dict[str, dict[float, float]]:
    """Return the validation top-1 by model and learning rate, for the runs that select the learning rate."""
    tried = sorted((run for run in runs if run["stage"] == "rates"), key=lambda run: run["lr"])
    return {model: {run["lr"]: run["top1"] for run in tried if run["model"] == model} for model in models}


def of_seeds(runs: Runs, model: str, end: int = FURTHER_SEEDS.stop) -> Runs:
    own = (run for run in runs if run["stage"] == "seeds" and run["model"] == model)
    return sorted((run for run in own if run["seed"] < end), key=lambda run: run["seed"])


def top1_to_choose_on(runs: Runs, model: str, curve: str = "eval_top1") -> BySeed:
    """Return a model's final validation top-1 by seed. For the EMA weights, pass the curve "eval_top1_ema".

    The accuracy of a diverged run is 0%.
    """
    return {run["seed"]: 0.0 if "diverged" in run else run["curves"][curve][-1] for run in of_seeds(runs, model)}


def top1_of_test(runs: Runs, judged: Judged | None, ends: dict[str, int] = PROTOCOL) -> dict[str, BySeed]:
    """Return the test top-1 by model and seed, for seeds below `ends[model]`. Return {} if a run is unfinished."""
    if to_do(runs) or not judged or missing_of(ends, runs):
        return {}
    top1 = dict(zip(judged.runs, 100 * judged.right_NM.mean(axis=0)))
    own = {model: of_seeds(runs, model, end) for model, end in ends.items()}
    return {model: {run["seed"]: float(top1[name_of(*job_of(run))]) for run in own[model]} for model in own}


class Study:
    """Study of several models: trains the planned runs and stores the results in the file `options.out`.

    Args:
        options: Options of `parse_arguments`.
        words: Options of research/train.py for all runs.
        missing: Function that returns the runs to train next, given the finished runs, or [] if nothing is left.
        words_of: Function that returns further options of research/train.py for a run.
        may_diverge: Stages whose diverged runs are stored with an accuracy of 0%. A run of another stage that diverges
            stops the study.
        clean_up: Function of the folder and the finished runs, which is called before the first run, because an earlier
            call may have been killed before its clean-up, and after each stored run.

    Raises:
        SystemExit: Earlier results or runs in the folder have another recipe or other images.
    """

    def __init__(
        self, options: argparse.Namespace, words: list[str], missing: Callable[[Runs], list[Cell]],
        words_of: Callable[[Cell], list[str]], may_diverge: Sequence[str] = ("rates",),
        clean_up: Callable[[Path, Runs], None] = lambda folder, runs: None,
    ):  # fmt: skip
        self.missing, self.words_of, self.may_diverge, self.clean_up = missing, words_of, may_diverge, clean_up
        self.options, self.deadline, self.lock = options, seeds.Deadline(options.minutes), Lock()
        self.words = [*words, *(["--data-dir", options.data_dir] if options.data_dir else [])]
        self.splits = seeds.open_splits(options.config, self.words, TEST_SPLIT)
        recipe = dict(config=yaml.safe_load(options.config.read_text()), options=words)
        self.recipe = recipe | dict(images=[seeds.digest_of(split) for split in self.splits])
        self.runs: Runs = []
        self.parts: list[Judged] = []
        if options.earlier.exists():
            found = json.loads(options.earlier.read_text())
            seeds.check_same(options.earlier, found, self.recipe, "choose another --earlier")
            self.runs, judged = read(options.earlier)
            self.parts = [judged] if judged else []
        seeds.keep_recipe(options.folder, self.recipe)
        self.gpus = seeds.share_gpus(seeds.visible_gpus(), options.jobs, 1)

    def go_on(self) -> None:
        """Train the planned runs until all are finished or the time limit is reached."""
        self.clean_up(self.options.folder, self.runs)
        with self.deadline, ThreadPoolExecutor(self.options.jobs) as pool:
            while (cells := self.missing(self.runs)) and all(list(pool.map(self.do, cells))):
                pass

    def do(self, cell: Cell) -> bool:
        """Start or resume a planned run, and return whether the run has finished."""
        folder = self.options.folder / cell.place
        words = [*self.words, *self.words_of(cell), "--lr", f"{cell.lr:g}"]
        try:
            seeds.train(self.options, cell.model, cell.seed, words, folder, self.deadline, self.gpus)
        except SystemExit as error:
            if cell.stage not in self.may_diverge or not re.search(DIVERGED, str(error)):
                raise
            self.add(cell, dict(top1=0.0, diverged=str(error)[-300:]))
            return True
        if not seeds.is_done(folder / name_of(cell.model, cell.seed)):
            return False
        self.add(cell, seeds.read_run(folder, cell.model, cell.seed, *map(len, self.splits[:2])))
        return True

    def add(self, cell: Cell, run: dict[str, Any]) -> None:
        """Add a finished run and write all results.

        If the run belongs to the stage "seeds" and has not diverged, also predict the test images.
        """
        with self.lock:
            if cell.stage == "seeds" and "diverged" not in run:
                self.parts.append(seeds.judge(self.options.folder / cell.place, [run], self.splits[2]))
            self.runs.append(cell._asdict() | run | dict(machine=seeds.machine()))
            if self.judged:
                self.judged.write(seeds.predictions_of(self.options.out))
            write_atomically(self.options.out, json.dumps(self.recipe | dict(runs=self.runs), indent=1) + "\n")
            self.clean_up(self.options.folder, self.runs)

    def check_complete(self) -> None:
        """Check that no planned run is missing.

        Raises:
            SystemExit: A planned run is missing.
        """
        if cells := self.missing(self.runs):
            missing = ", ".join(map(str, cells))
            print(f"not done yet: {missing}, and later stages; run the same command to resume", file=sys.stderr)
            sys.exit(PREEMPTED)

    @property
    def judged(self) -> Judged | None:
        names = [name_of(*job_of(run)) for run in self.runs if has_predictions(run)]
        return joined(self.parts, names) if names else None


def has_predictions(run: dict[str, Any]) -> bool:
    # Files written by research/seeds.py have no "stage".
    return run.get("stage") == "seeds" and "diverged" not in run


def read(results: Path) -> tuple[Runs, Judged | None]:
    """Read the runs and test predictions of a results file. Return [] and None if the file does not exist."""
    runs = json.loads(results.read_text())["runs"] if results.exists() else []
    return runs, Judged.read(seeds.predictions_of(results)) if any(map(has_predictions, runs)) else None


def rates_table(
    runs: Runs, models: Sequence[str] = MODELS, first_rates: Sequence[float] = RATES, plan: Plan = stages
) -> str:
    """Return a Markdown table of the validation top-1 by model and learning rate, and of the chosen learning rates."""
    found = accuracy_by_rate(runs, models)
    rates = sorted({*first_rates, *(rate for by_rate in found.values() for rate in by_rate)})
    table = [["model", *(f"{rate:g}" for rate in rates), "chosen"]]
    for model, by_rate in found.items():
        cells = [f"{by_rate[rate]:.2f}" if rate in by_rate else "-" for rate in rates]
        complete = not any(cell.stage == "rates" for cell in to_do(runs, plan))
        table.append([model, *cells, f"{max(by_rate, key=by_rate.__getitem__):g}" if complete else "-"])
    return markdown_table(table)


def images_per_second(runs: Runs) -> dict[str, float]:
    """Return the training throughput by GPU model: the largest of the runs' median throughputs over epochs.

    Slower runs are ignored, because their GPUs may have been throttled.
    """
    by_gpu: dict[str, list[float]] = {}
    for run in runs:
        speeds = run["curves"]["images_per_second"]
        # The first epoch of a compiled run includes the compilation.
        speed = speeds[-1] if run["stage"] == "compiled" else median(speeds)
        by_gpu.setdefault(run["machine"]["gpu"] or "CPU", []).append(speed)
    return {gpu: max(found) for gpu, found in sorted(by_gpu.items())}


def models_table(runs: Runs, judged: Judged | None) -> str:
    """Return a Markdown table of each model's runs and training costs, with accuracies if all stages are complete."""
    top1 = top1_of_test(runs, judged)
    table = [["model", "parameters", "learning rate", "runs", "test top-1 %, mean ± deviation", "seeds",
              "selection split %", "selection split, EMA %", "GPU minutes of training", "images/s"]]  # fmt: skip
    for model, stage in ((VIL, "seeds"), (VIM, "seeds"), (POOLED, "seeds"), (DEIT, "seeds"), (DEIT, "compiled")):
        own = of_seeds(runs, model) if stage == "seeds" else [run for run in runs if run["stage"] == stage]
        name, cells = model + (", compiled" if stage == "compiled" else ""), ["-"] * 4
        if stage == "seeds" and top1:
            others = (top1_to_choose_on(runs, model, curve) for curve in ("eval_top1", "eval_top1_ema"))
            cells = [spread(top1[model].values()), listed(top1[model].values())]
            cells += [spread(found.values()) for found in others]
        if not own:
            table.append([name, "-", "-", "0", *cells, "-", "-"])
            continue
        images = max((run["images"] for run in of_seeds(runs, model)), default=math.nan)
        speeds = images_per_second(own)
        minutes = [f"{images / speed / 60:.1f} ({gpu})" for gpu, speed in speeds.items()]
        shown = [f"{speed:,.0f} ({gpu})" for gpu, speed in speeds.items()]
        rates = ", ".join(f"{rate:g}" for rate in {run["lr"]: 0 for run in own})
        row = [name, f"{own[0]['parameters']:,}", rates, str(len(own)), *cells]
        table.append([*row, "; ".join(minutes), "; ".join(shown)])
    return markdown_table(table)


def differences_table(runs: Runs, judged: Judged | None) -> str:
    """Return a Markdown table that compares ViL and ViM, pooled ViL and ViL, and ViL and DeiT by test accuracy.

    The cells are `-` until all runs that precede the extensions are finished. Each complete extension adds a row for
    ViL and ViM.
    """
    top1 = top1_of_test(runs, judged)
    table = [["model", "minus", "points (95% interval)", "half-width", "p (Welch)", "p (Holm)", f"within ±{MARGIN:g}"]]
    gaps = [welch(top1[first], top1[second]) for first, second in COMPARED] if top1 else []
    corrected = holm([gap.p_value for gap in gaps])
    for i, (first, second) in enumerate(COMPARED):
        cells = ["-"] * 5
        if gaps:
            gap = gaps[i]
            within = "yes" if gap.low >= -MARGIN and gap.high <= MARGIN else "no"
            cells = [str(gap), f"{gap.half_width:.2f}", f"{gap.p_value:.2g}", f"{corrected[i]:.2g}", within]
        table.append([first, second, *cells])
    for more in filter(None, (top1_of_test(runs, judged, ends) for ends in EXTENSIONS)):
        gap, names = welch(more[VIL], more[VIM]), [f"{model}, {len(more[model])} seeds" for model in (VIL, VIM)]
        table.append([*names, str(gap), f"{gap.half_width:.2f}", "-", "-", "-"])
    return markdown_table(table)


def parse_arguments(description: str | None, name: str) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the study `name`, and the options to pass to research/train.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, results = parser.add_argument, RESEARCH / "results" / f"{name}.json"
    add("-c", "--config", type=Path, default=RESEARCH / "configs" / f"{name}.yaml")
    add("--data-dir", help="folder of the images (default: the config's)")
    add("--earlier", type=Path, default=results, help="JSON file of earlier results (default: the published ones)")
    add("--folder", type=Path, default=Path("output") / name, help="folder of this machine's runs")
    add("--jobs", type=int, default=1, help="number of parallel runs, each on its own GPU if there are enough")
    add("--minutes", type=float, default=math.inf, help="time limit, after which running jobs are stopped")
    add("--out", type=Path, required=True, help="JSON file of all runs; other files are written beside it")
    options, words = parser.parse_known_args()
    options.processes = None  # number of torchrun processes per run; None starts a run without torchrun
    return options, words


def main() -> None:
    options, words = parse_arguments(__doc__, "photographs")
    study = Study(options, words, lambda runs: to_do(runs) or extension(runs), lambda cell: OPTIONS[cell.stage])
    study.go_on()
    tables = rates_table(study.runs), models_table(study.runs, study.judged)
    print("\n", "\n".join([*tables, differences_table(study.runs, study.judged)]), sep="")
    study.check_complete()
    shown = [run for model in MODELS for run in of_seeds(study.runs, model)]
    write_atomically(options.out.with_suffix(".png"), seeds.plot(shown))


if __name__ == "__main__":
    main()
