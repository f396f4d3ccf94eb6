"""ViL, ViM and DeiT of the same width, depth and patches through the full training path, several seeds each.

    python -m vil.training.digits data/digits
    python benchmarks/seeds.py -c configs/digits.yaml --out docs/results/digits.json
    python benchmarks/seeds.py -c configs/digits.yaml --jobs 15 --device cpu      # 15 runs at a time

Every run is `train_imagenet.py` with the same config, budget and recipe; what counts is the accuracy after the last
epoch. A seed decides the initial weights, the order of the images and how they are augmented. The models are compared
by the paired t-test over the seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from scipy.stats import ttest_rel

import vil  # noqa: F401  registers the models
from vil.info import git_commit
from vil.training.comparison import markdown_table
from vil.training.data import open_split
from vil.training.files import write_atomically
from vil.training.models import create_model

ROOT = Path(__file__).parents[1]
MODELS: dict[str, dict[str, Any]] = {"vil_tiny": {}, "vim_tiny": {}, "deit_tiny_patch16_224": {"num_heads": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, default=ROOT / "configs" / "digits.yaml")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="JSON of all runs")
    options, training_options = parser.parse_known_args()
    config = yaml.safe_load(options.config.read_text())

    jobs = [(model, seed) for seed in range(options.seeds) for model in MODELS]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda job: train(options.config, config, *job, training_options, folder), jobs))
    machine = dict(
        commit=git_commit(), torch=torch.__version__, processor=processor(), cores=os.cpu_count(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None, jobs=options.jobs,
        options=training_options,
    )  # fmt: skip
    print(machine, "\n\n" + report(runs))
    if options.out:
        write_atomically(options.out, json.dumps(dict(machine, config=config, runs=runs), indent=1) + "\n")


def train(path: Path, config: dict, model: str, seed: int, options: list[str], folder: str) -> dict[str, Any]:
    """One run of train_imagenet.py; its last row of summary.csv and the median seconds of an epoch's training."""
    arguments = {**config["model_kwargs"], **MODELS[model]}
    command = [sys.executable, "train_imagenet.py", "-c", path.resolve(), "--model", model, "--seed", str(seed)]
    command += ["--output", folder, "--experiment", f"{model}-{seed}", *options]
    command += ["--model-kwargs", *(f"{name}={value}" for name, value in arguments.items())]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{model}, seed {seed}: {result.stderr[-2000:]}")
    rows = list(csv.DictReader((Path(folder) / f"{model}-{seed}" / "summary.csv").read_text().splitlines()))
    saved = yaml.safe_load((Path(folder) / f"{model}-{seed}" / "config.yaml").read_text())
    images, batch = (
        len(open_split(saved["data_dir"], saved["dataset"], saved["train_split"])),
        saved["global_batch_size"],
    )
    images -= images % batch
    built = create_model(model, num_classes=saved["num_classes"], img_size=saved["img_size"], **arguments)
    print(f"{model}, seed {seed}: top-1 {float(rows[-1]['eval_top1']):.2f}", flush=True)
    return {
        "model": model,
        "seed": seed,
        "parameters": sum(p.numel() for p in built.parameters()),
        "epochs": len(rows),
        "top1": float(rows[-1]["eval_top1"]),
        "loss": float(rows[-1]["eval_loss"]),
        "epoch_seconds": median(images / float(row["images_per_second"]) for row in rows),
    }


def report(runs: list[dict[str, Any]]) -> str:
    """Markdown: mean and deviation of every model over the seeds, and its paired difference to the first model."""
    first, *_ = MODELS
    top1 = {model: [run["top1"] for run in runs if run["model"] == model] for model in MODELS}
    head = [
        "model",
        "parameters",
        "top-1 %, mean ± deviation",
        "seeds",
        "s an epoch",
        f"{first} less this (95% interval)",
    ]
    table = [head]
    for model, values in top1.items():
        own = [run for run in runs if run["model"] == model]
        difference = ""
        if model != first and len(values) > 1:
            test = ttest_rel(top1[first], values)
            low, high = test.confidence_interval()
            gap = mean(top1[first]) - mean(values)
            difference = f"{gap:+.2f} ({low:+.2f} to {high:+.2f}), p = {test.pvalue:.3g}"
        deviation = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        listed = " ".join(f"{value:.2f}" for value in values)
        seconds = mean(run["epoch_seconds"] for run in own)
        row = [
            model,
            f"{own[0]['parameters']:,}",
            f"{mean(values):.2f}{deviation}",
            listed,
            f"{seconds:.2f}",
            difference,
        ]
        table.append(row)
    return markdown_table(table)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
