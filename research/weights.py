"""Train the weights of research/weights.md on Tiny ImageNet and mini-ImageNet together.

    python -m research.weights --minutes 20 --out output/weights.json    # repeat until all runs are finished

Each call continues from the results in `--out`, or in `--earlier` if `--out` does not exist, and from the unfinished
runs in `--folder`. The order is the protocol's: first a learning rate for every model, then one run of each model for
150 epochs at 128 pixels and 10 epochs at 224 pixels. Each finished run is written to `--out`, and its predictions for
the test images are written beside `--out`. Then the weights of a reported run are written to `--folder` in half
precision, and the folder of the run is removed. Test accuracies are computed only when all runs are finished. Unknown
options are treated as options of train_imagenet.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from research import photographs
from research.longer import remove_folders
from research.photographs import Cell, Runs, Study, cell_of, of_seeds, parse_arguments
from research.predictions import Judged, job_of, name_of
from vil.evaluation.comparison import ContingencyTable
from vil.evaluation.markdown import markdown_table
from vil.exporting import export_model
from vil.factory import from_checkpoint

POOLED, SMALL, DEIT = MODELS = ["vil_tiny_pooled", "vil_small_pooled", "deit_tiny_patch16_224"]
TAG = "tiny_mini_in275"
COMPARED = ((POOLED, DEIT), (SMALL, POOLED))  # the first pair decides the criterion, the second pair is an estimate
RATES = (5e-4, 1e-3, 2e-3)
SEED = 0
EPOCHS, FINAL_EPOCHS, FINAL_PIXELS = 150, 10, 224
FINAL_SHARE = 0.1  # peak learning rate of the last phase, as a share of the first phase's
CHOICE = ["--epochs", "8", "--warmup-epochs", "1"]
COMPILED = (DEIT,)  # models that torch.compile speeds up
TINY_ENDING = ".JPEG"  # ending of the image files of Tiny ImageNet; those of mini-ImageNet end in .jpg


def stages(runs: Runs) -> Iterator[list[Cell]]:
    """Yield the planned runs of each stage in order. The plan of a stage depends on the results of earlier stages."""
    yield from photographs.rate_stages(runs, MODELS, RATES)
    rates = photographs.best_rates(runs, MODELS)
    diverged = [run["model"] for run in runs if run["stage"] == "seeds" and "diverged" in run]
    # A run that diverges is trained again with half of its learning rate.
    yield [Cell("seeds", model, rates[model] / 2 ** diverged.count(model), SEED) for model in MODELS]


def to_do(runs: Runs) -> list[Cell]:
    return photographs.to_do(runs, stages)


def reported(runs: Runs, model: str) -> Runs:
    """Return a list with the finished reported run of a model, without runs that diverged. The list may be empty."""
    return [run for run in of_seeds(runs, model) if "diverged" not in run]


def words_of(cell: Cell) -> list[str]:
    """Return the options of research/train.py in which a run differs from the recipe, except the learning rate."""
    last = f"{{epochs: {FINAL_EPOCHS}, img_size: {FINAL_PIXELS}, lr: {FINAL_SHARE * cell.lr:g}, warmup_epochs: 1}}"
    phases = ["--phases", f"{{epochs: {EPOCHS}}}", last]
    return (CHOICE if cell.stage == "rates" else phases) + ["--torchcompile"] * (cell.model in COMPILED)


def write_weights(folder: Path, runs: Runs) -> None:
    """Write the weights of finished runs in half precision, for runs whose checkpoints are in the folder."""
    for run in (run for model in MODELS for run in reported(runs, model)):
        checkpoint = folder / cell_of(run).place / name_of(*job_of(run)) / "last.pt"
        if checkpoint.exists():
            path = folder / f"{run['model']}.{TAG}.safetensors"
            print(export_model(from_checkpoint(checkpoint), path), flush=True)


def keep_weights(folder: Path, runs: Runs) -> None:
    """Write the weights of finished runs, and remove the folders of the runs."""
    write_weights(folder, runs)
    remove_folders(folder, runs)


def right_of_test(runs: Runs, judged: Judged | None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return whether each test image is classified correctly by each model, and whether it is of Tiny ImageNet.

    The results are empty if a run is unfinished.
    """
    if to_do(runs) or not judged:
        return {}, np.zeros(0, dtype=bool)
    columns = dict(zip(judged.runs, judged.right_NM.T))
    is_tiny_N = np.array([name.endswith(TINY_ENDING) for name in judged.images])
    return {model: columns[name_of(model, SEED)] for model in MODELS}, is_tiny_N


def rates_table(runs: Runs) -> str:
    """Return a Markdown table of the top-1 on the selection split by model and learning rate."""
    return photographs.rates_table(runs, MODELS, RATES, stages)


def models_table(runs: Runs, judged: Judged | None) -> str:
    """Return a Markdown table of the models' accuracies. Test accuracies are `-` until all runs are finished."""
    right, is_tiny_N = right_of_test(runs, judged)
    table = [["model", "parameters", "learning rate", "selection split %", "Tiny ImageNet, test %",
              "mini-ImageNet, test %", "all test images %"]]  # fmt: skip
    for model in MODELS:
        own = reported(runs, model)
        cells = [f"{own[0]['parameters']:,}", f"{own[0]['lr']:g}", f"{own[0]['top1']:.2f}"] if own else ["-"] * 3
        tests = ["-"] * 3
        if right:
            parts = (right[model][is_tiny_N], right[model][~is_tiny_N], right[model])
            tests = [f"{100 * part.mean():.2f}" for part in parts]
        table.append([model, *cells, *tests])
    return markdown_table(table)


def differences_table(runs: Runs, judged: Judged | None) -> str:
    """Return a Markdown table of differences in top-1 on the same test images, `-` until all runs are finished."""
    right, is_tiny_N = right_of_test(runs, judged)
    kinds = {"Tiny ImageNet": is_tiny_N, "mini-ImageNet": ~is_tiny_N, "all": np.ones_like(is_tiny_N)}
    table = [["model", "minus", "test images", "points (95% interval over images)"]]
    for first, second in COMPARED:
        for kind, chosen_N in kinds.items():
            cell = "-"
            if right:
                pair = ContingencyTable.of(right[first][chosen_N], right[second][chosen_N])
                low, high = pair.interval
                cell = f"{pair.difference:+.2f} ({low:+.2f} to {high:+.2f})"
            table.append([first, second, kind, cell])
    return markdown_table(table)


def main() -> None:
    options, words = parse_arguments(__doc__, "weights")
    if options.out.exists():
        options.earlier = options.out
    study = Study(options, words, to_do, words_of, may_diverge=("rates", "seeds"), clean_up=keep_weights)
    study.go_on()
    runs, judged = study.runs, study.judged
    print("", rates_table(runs), models_table(runs, judged), differences_table(runs, judged), sep="\n")
    study.check_complete()


if __name__ == "__main__":
    main()
