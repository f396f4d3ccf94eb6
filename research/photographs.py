"""Full-size ViL, ViM, pooled ViL and DeiT on Tiny ImageNet, by the protocol of research/photographs.md.

    python -m research.photographs --minutes 9 --out output/photographs.json    # again and again

Each call goes on where the results so far (`--earlier`) and the runs in `--folder` end, in the protocol's order: a
learning rate for every model, the speed of DeiT compiled, seeds of all models in turn, further seeds if the deviation
asks for them, and behind the protocol its extensions. A run is one of train_imagenet.py, started, stopped and gone on
with as in research/seeds.py. Each is written to `--out` when it ends, with what its last weights take the test images
for. How many of these are right is not counted before the last run is there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any, NamedTuple

import yaml

from research import seeds
from research.compare import BySeed, holm, listed, spread, welch
from research.predictions import Judged, job_of, joined, name_of
from vil.evaluation.comparison import markdown_table
from vil.files import write_atomically
from vil.training.interruption import PREEMPTED

Runs = list[dict[str, Any]]

RESULTS = seeds.ROOT / "research" / "results" / "photographs.json"
TEST_SPLIT = "test"
VIL, VIM, POOLED, DEIT = MODELS = ["vil_tiny", "vim_tiny", "vil_tiny_pooled", "deit_tiny_patch16_224"]
COMPARED = ((VIL, VIM), (POOLED, VIL), (VIL, DEIT))  # by Welch's test, corrected by Holm
RATES = (5e-4, 1e-3, 2e-3)
CHOICE_SEED = 100  # of the runs that rates are chosen on, of no other
SEEDS, FURTHER_SEEDS = range(5), range(5, 8)
PROTOCOL = dict.fromkeys(MODELS, FURTHER_SEEDS.stop)  # below which its seeds are, by model
# the same of what was registered when the differences were known: for estimates alone, in no test
EXTENSIONS = ({VIL: 12, VIM: 12}, {VIL: 12, VIM: 20})
WIDEST = 0.5  # points: half of the interval of ViL less ViM above which there are further seeds
MARGIN = 1.0  # points: within it a difference is none
OPTIONS = {"rates": ["--epochs", "8"], "compiled": ["--epochs", "2", "--torchcompile"], "seeds": []}
DIVERGED = r"the (loss|gradient's norm) is (nan|inf|-inf) at step"


class Cell(NamedTuple):
    """A run of the study; `stage` is one of OPTIONS."""

    stage: str
    model: str
    lr: float
    seed: int

    @property
    def place(self) -> str:
        """Its folder's folder, inside that of the study."""
        return f"{self.stage}-{self.lr:g}"

    def __str__(self) -> str:
        return f"{self.place}/{name_of(self.model, self.seed)}"


def cell_of(run: dict[str, Any]) -> Cell:
    return Cell(*(run[name] for name in Cell._fields))


def stages(runs: Runs) -> Iterator[list[Cell]]:
    """The cells of the protocol in its order; those of a stage follow from the runs of the stages before it."""
    yield [Cell("rates", model, lr, CHOICE_SEED) for lr in RATES for model in MODELS]
    further = {model: beyond(found) for model, found in accuracy_by_rate(runs).items()}
    yield [Cell("rates", model, lr, CHOICE_SEED) for model, lr in further.items() if lr]
    rates = {model: max(found, key=found.__getitem__) for model, found in accuracy_by_rate(runs).items()}
    yield [Cell("compiled", DEIT, rates[DEIT], CHOICE_SEED)]
    cells = [Cell("seeds", model, rates[model], seed) for seed in SEEDS for model in MODELS]
    top1 = [top1_to_choose_on([run for run in runs if run["seed"] in SEEDS], model) for model in (VIL, VIM)]
    if all(len(by_seed) == len(SEEDS) for by_seed in top1) and welch(*top1).half_width > WIDEST:
        cells += [Cell("seeds", model, rates[model], seed) for seed in FURTHER_SEEDS for model in (VIL, VIM)]
    yield cells


def to_do(runs: Runs) -> list[Cell]:
    """The cells of the first stage that is not complete which are missing; none if the study is."""
    done = {cell_of(run) for run in runs}
    left = ([cell for cell in cells if cell not in done] for cells in stages(runs))
    return next((cells for cells in left if cells), [])


def extension(runs: Runs) -> list[Cell]:
    """The cells of the first extension that is not whole which are missing, once the protocol's are there."""
    return next((cells for ends in EXTENSIONS if (cells := missing_of(ends, runs))), [])


def missing_of(ends: dict[str, int], runs: Runs) -> list[Cell]:
    """The cells below `ends`, by model, and behind the protocol's which are missing."""
    have = {cell_of(run) for run in runs}
    rates = {model: run["lr"] for model in ends for run in of_seeds(runs, model)}
    seeds_behind = range(FURTHER_SEEDS.stop, max(ends.values()))
    cells = [Cell("seeds", m, rates[m], seed) for seed in seeds_behind for m, end in ends.items() if seed < end]
    return [cell for cell in cells if cell not in have]


def beyond(accuracies: dict[float, float]) -> float | None:
    """The rate to try in addition: the next one outside of RATES, if the best of them is at an edge."""
    best = max(RATES, key=accuracies.__getitem__)
    return {min(RATES): min(RATES) / 2, max(RATES): 2 * max(RATES)}.get(best)


def accuracy_by_rate(runs: Runs) -> dict[str, dict[float, float]]:
    """The top-1 to choose rates by, by model and rate."""
    tried = sorted((run for run in runs if run["stage"] == "rates"), key=lambda run: run["lr"])
    return {model: {run["lr"]: run["top1"] for run in tried if run["model"] == model} for model in MODELS}


def of_seeds(runs: Runs, model: str, end: int = FURTHER_SEEDS.stop) -> Runs:
    own = (run for run in runs if run["stage"] == "seeds" and run["model"] == model)
    return sorted((run for run in own if run["seed"] < end), key=lambda run: run["seed"])


def top1_to_choose_on(runs: Runs, model: str, curve: str = "eval_top1") -> BySeed:
    """After the last epoch, on the images to choose on; `eval_top1_ema` is that of the average of the weights."""
    return {run["seed"]: run["curves"][curve][-1] for run in of_seeds(runs, model)}


def top1_of_test(runs: Runs, judged: Judged | None, ends: dict[str, int] = PROTOCOL) -> dict[str, BySeed]:
    """The top-1 on the test images of models' seeds below `ends`, by model and seed; empty before the last run."""
    if to_do(runs) or not judged or missing_of(ends, runs):
        return {}
    top1 = dict(zip(judged.runs, 100 * judged.right_NM.mean(axis=0)))
    own = {model: of_seeds(runs, model, end) for model, end in ends.items()}
    return {model: {run["seed"]: float(top1[name_of(*job_of(run))]) for run in own[model]} for model in own}


class Study:
    """Results so far, in memory and in the file `out`, and the folder in which runs are done.

    Raises:
        SystemExit: Earlier results or runs in the folder are of another recipe or of other images.
    """

    def __init__(self, options: argparse.Namespace, words: list[str]):
        self.options, self.deadline, self.lock = options, seeds.Deadline(options.minutes), Lock()
        self.words = [*words, *(["--data-dir", options.data_dir] if options.data_dir else [])]
        self.splits = seeds.open_splits(options.config, self.words, TEST_SPLIT)
        recipe = dict(config=yaml.safe_load(options.config.read_text()), options=words)
        self.recipe = recipe | dict(images=[seeds.digest_of(split) for split in self.splits])
        self.runs: Runs = []
        self.parts: list[Judged] = []
        if options.earlier.exists():
            found = json.loads(options.earlier.read_text())
            seeds.check_same(options.earlier, found, self.recipe, "give another --earlier")
            self.runs, judged = read(options.earlier)
            self.parts = [judged] if judged else []
        seeds.keep_recipe(options.folder, self.recipe)
        self.gpus = seeds.share_gpus(seeds.visible_gpus(), options.jobs, 1)

    def go_on(self) -> None:
        """Does cells until the time is up or all are there."""
        with self.deadline, ThreadPoolExecutor(self.options.jobs) as pool:
            while (cells := to_do(self.runs) or extension(self.runs)) and all(list(pool.map(self.do, cells))):
                pass

    def do(self, cell: Cell) -> bool:
        """Does what is missing of a cell; False if it is not at its end then."""
        folder = self.options.folder / cell.place
        words = [*self.words, *OPTIONS[cell.stage], "--lr", f"{cell.lr:g}"]
        try:
            seeds.train(self.options, cell.model, cell.seed, words, folder, self.deadline, self.gpus)
        except SystemExit as error:
            if cell.stage != "rates" or not re.search(DIVERGED, str(error)):
                raise
            self.add(cell, dict(top1=0.0, diverged=str(error)[-300:]))
            return True
        if not seeds.is_done(folder / name_of(cell.model, cell.seed)):
            return False
        self.add(cell, seeds.read_run(folder, cell.model, cell.seed, *map(len, self.splits[:2])))
        return True

    def add(self, cell: Cell, run: dict[str, Any]) -> None:
        """Adds a run that has ended, and writes what there is."""
        with self.lock:
            if cell.stage == "seeds":
                self.parts.append(seeds.judge(self.options.folder / cell.place, [run], self.splits[2]))
            self.runs.append(cell._asdict() | run | dict(machine=seeds.machine()))
            if self.judged:
                self.judged.write(seeds.predictions_of(self.options.out))
            write_atomically(self.options.out, json.dumps(self.recipe | dict(runs=self.runs), indent=1) + "\n")

    @property
    def judged(self) -> Judged | None:
        names = [name_of(*job_of(run)) for run in self.runs if run["stage"] == "seeds"]
        return joined(self.parts, names) if names else None


def read(results: Path) -> tuple[Runs, Judged | None]:
    """The runs that a file of results has and what they take the test images for; none if there is no such file."""
    runs = json.loads(results.read_text())["runs"] if results.exists() else []
    judged = any(run.get("stage") == "seeds" for run in runs)  # a file of research/seeds.py has no stages
    return runs, Judged.read(seeds.predictions_of(results)) if judged else None


def rates_table(runs: Runs) -> str:
    """Markdown: the accuracy on the images to choose on by model and learning rate."""
    found = accuracy_by_rate(runs)
    rates = sorted({*RATES, *(rate for by_rate in found.values() for rate in by_rate)})
    table = [["model", *(f"{rate:g}" for rate in rates), "chosen"]]
    for model, by_rate in found.items():
        cells = [f"{by_rate[rate]:.2f}" if rate in by_rate else "-" for rate in rates]
        complete = not any(cell.stage == "rates" for cell in to_do(runs))
        table.append([model, *cells, f"{max(by_rate, key=by_rate.__getitem__):g}" if complete else "-"])
    return markdown_table(table)


def images_per_second(runs: Runs) -> dict[str, float]:
    """An epoch's images in a second of training, by GPU: a run's median, of the fastest run; a GPU may be throttled."""
    by_gpu: dict[str, list[float]] = {}
    for run in runs:
        speeds = run["curves"]["images_per_second"]
        speed = speeds[-1] if run["stage"] == "compiled" else median(speeds)  # the first one compiles
        by_gpu.setdefault(run["machine"]["gpu"] or "CPU", []).append(speed)
    return {gpu: max(found) for gpu, found in sorted(by_gpu.items())}


def models_table(runs: Runs, judged: Judged | None) -> str:
    """Markdown: every model's accuracy, once all of them are to be had, and what it took."""
    top1 = top1_of_test(runs, judged)
    table = [["model", "parameters", "rate", "runs", "test top-1 %, mean ± deviation", "seeds", "choosing split %",
              "its average of weights %", "GPU minutes of training", "images/s"]]  # fmt: skip
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
    """Markdown: the protocol's three comparisons, once the last run is there."""
    top1 = top1_of_test(runs, judged)
    table = [["first", "less", "points (95% interval)", "half of it", "p (Welch)", "p (Holm)", f"within ±{MARGIN:g}"]]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-c", "--config", type=Path, default=seeds.ROOT / "research" / "configs" / "photographs.yaml")
    add("--data-dir", help="of the images (default: the config's), wherever they are now")
    add("--earlier", type=Path, default=RESULTS, help="results so far, if they exist (default: the published ones)")
    add("--folder", type=Path, default=Path("output/photographs"), help="of the runs of this machine")
    add("--jobs", type=int, default=1, help="runs at a time, each on a GPU of its own where there are as many")
    add("--minutes", type=float, default=math.inf, help="after so many it stops what is running")
    add("--out", type=Path, required=True, help="JSON of all runs; the predictions go beside it, in the end a plot")
    options, words = parser.parse_known_args()
    options.processes = None  # of a run, for torchrun
    study = Study(options, words)
    study.go_on()
    tables = rates_table(study.runs), models_table(study.runs, study.judged)
    print("\n", "\n".join([*tables, differences_table(study.runs, study.judged)]), sep="")
    if cells := to_do(study.runs) or extension(study.runs):
        missing = ", ".join(map(str, cells))
        print(f"not done yet: {missing}, and what follows; the same command goes on", file=sys.stderr)
        sys.exit(PREEMPTED)
    shown = [run for model in MODELS for run in of_seeds(study.runs, model)]
    write_atomically(options.out.with_suffix(".png"), seeds.plot(shown))


if __name__ == "__main__":
    main()
