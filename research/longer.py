"""Train full-size ViL, ViM, pooled ViL and DeiT on mini-ImageNet for 100 epochs by the protocol of research/longer.md.

    python -m research.longer --minutes 20 --out output/longer.json    # repeat until the study is complete

Each call continues from the results in `--out`, or in `--earlier` if `--out` does not exist, and from the unfinished
runs in `--folder`. The order is the protocol's: first a learning rate for every model, then the seeds of all models in
turn. Each finished run is written to `--out`, and its predictions for the test images are written beside `--out`. Then
the folder of the run is removed. Test accuracies are computed only when all runs are finished. Unknown options are
treated as options of train_imagenet.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from research import photographs
from research.compare import BySeed, holm, listed, spread, welch
from research.cost import cost_table, throughput
from research.photographs import Cell, Runs, Study, of_seeds, parse_arguments
from research.predictions import Judged, job_of, name_of
from vil.evaluation.markdown import markdown_table

POOLED, VIL, VIM, DEIT = TINY = ["vil_tiny_pooled", "vil_tiny", "vim_tiny", "deit_tiny_patch16_224"]
PUBLISHED = "published_vit"  # DeiT-tiny with the initialization and the stochastic depth of a published ViT
MODELS = [*TINY, PUBLISHED]
COMPARED = ((POOLED, VIL), (POOLED, DEIT), (POOLED, PUBLISHED))  # pairs of models that the significance tests compare
ESTIMATED = ((VIL, VIM),)  # pairs without a significance test, because three seeds are too few
RATES = (7.5e-4, 1.5e-3, 3e-3)
SEEDS = dict.fromkeys(MODELS, range(4)) | dict.fromkeys((VIL, VIM), range(3))
OPTIONS = {"rates": ["--epochs", "10", "--warmup-epochs", "1"], "seeds": []}
COMPILED = (DEIT, PUBLISHED)  # models that torch.compile speeds up
LEVELS = (30, 40, 50, 60)  # accuracies of the cost table, in percent


def stages(runs: Runs) -> Iterator[list[Cell]]:
    """Yield the planned runs of each stage in order. The plan of a stage depends on the results of earlier stages."""
    yield from photographs.rate_stages(runs, MODELS, RATES)
    rates = photographs.best_rates(runs, MODELS)
    numbers = range(max(len(own) for own in SEEDS.values()))
    yield [Cell("seeds", model, rates[model], seed) for seed in numbers for model in MODELS if seed in SEEDS[model]]


def to_do(runs: Runs) -> list[Cell]:
    return photographs.to_do(runs, stages)


def words_of(cell: Cell) -> list[str]:
    """Return the options of research/train.py in which a run differs from the recipe, except the learning rate."""
    return OPTIONS[cell.stage] + ["--torchcompile"] * (cell.model in COMPILED)


def top1_of_test(runs: Runs, judged: Judged | None) -> dict[str, BySeed]:
    """Return the test top-1 by model and seed, or {} if a run is unfinished. The top-1 of a diverged run is 0%."""
    if to_do(runs) or not judged:
        return {}
    top1 = dict(zip(judged.runs, (100 * judged.right_NM.mean(axis=0)).tolist()))
    top1 |= {name_of(*job_of(run)): 0.0 for run in runs if run["stage"] == "seeds" and "diverged" in run}
    return {model: {run["seed"]: top1[name_of(*job_of(run))] for run in of_seeds(runs, model)} for model in MODELS}


def rates_table(runs: Runs) -> str:
    """Return a Markdown table of the top-1 on the selection split by model and learning rate."""
    return photographs.rates_table(runs, MODELS, RATES, stages)


def models_table(runs: Runs, judged: Judged | None) -> str:
    """Return a Markdown table of the models' accuracies. Test accuracies are `-` until all runs are finished."""
    top1 = top1_of_test(runs, judged)
    table = [["model", "parameters", "learning rate", "runs", "test top-1 %, mean ± deviation", "seeds",
              "selection split %"]]  # fmt: skip
    for model in MODELS:
        own = of_seeds(runs, model)
        sizes = [f"{run['parameters']:,}" for run in own if "diverged" not in run]
        cells = [(sizes or ["-"])[0], f"{own[0]['lr']:g}"] if own else ["-", "-"]
        tests = [spread(top1[model].values()), listed(top1[model].values())] if top1 else ["-", "-"]
        chosen = photographs.top1_to_choose_on(runs, model).values()
        table.append([model, *cells, str(len(own)), *tests, spread(chosen) if own else "-"])
    return markdown_table(table)


def differences_table(runs: Runs, judged: Judged | None) -> str:
    """Return a Markdown table of the registered differences in test top-1, `-` until all runs are finished.

    The estimates, which come last, have no p-values.
    """
    top1 = top1_of_test(runs, judged)
    table = [["model", "minus", "points (95% interval)", "p (Welch)", "p (Holm)"]]
    pairs = COMPARED + ESTIMATED
    gaps = [welch(top1[first], top1[second]) for first, second in pairs] if top1 else []
    corrected = holm([gap.p_value for gap in gaps[: len(COMPARED)]])
    for i, pair in enumerate(pairs):
        tests = [f"{gaps[i].p_value:.2g}", f"{corrected[i]:.2g}"] if i < len(corrected) else ["-", "-"]
        table.append([*pair, str(gaps[i]) if gaps else "-", *tests])
    return markdown_table(table)


def minutes_table(runs: Runs, speeds: dict[str, float]) -> str:
    """Return a Markdown table of the GPU minutes to accuracies on the selection split, `-` until all runs are finished.

    Args:
        runs: Finished runs.
        speeds: Training throughput in images/s by model. The published ViT has the operations of DeiT.
    """
    speeds = speeds | ({PUBLISHED: speeds[DEIT]} if DEIT in speeds else {})
    own = {model: [] if to_do(runs) else of_seeds(runs, model) for model in MODELS}
    curves = {m: [run["curves"]["eval_top1"] if "curves" in run else [] for run in own[m]] for m in MODELS}
    images = next((run["images"] // run["epochs"] for found in own.values() for run in found if "images" in run), 0)
    return cost_table(curves, images, LEVELS, speeds)


def remove_folders(folder: Path, runs: Runs) -> None:
    """Remove the folders of finished runs, so that research/sitting.sh moves only checkpoints of unfinished runs."""
    for run in runs:
        shutil.rmtree(folder / photographs.cell_of(run).place / name_of(*job_of(run)), ignore_errors=True)


def main() -> None:
    options, words = parse_arguments(__doc__, "longer")
    if options.out.exists():
        options.earlier = options.out
    study = Study(options, words, to_do, words_of, may_diverge=("rates", "seeds"), clean_up=remove_folders)
    study.go_on()
    runs, judged = study.runs, study.judged
    print("", rates_table(runs), models_table(runs, judged), differences_table(runs, judged), sep="\n")
    print(minutes_table(runs, throughput()))
    study.check_complete()


if __name__ == "__main__":
    main()
