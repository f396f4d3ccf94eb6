"""Estimate the GPU hours of training recipes on ImageNet-1k from the measured throughput of each phase.

    python benchmarks/hours.py configs/vil_tiny.yaml configs/vil_tiny_phases.yaml
    python benchmarks/hours.py configs/vil_tiny.yaml configs/vil_tiny_best.yaml --gpus 8
    python benchmarks/hours.py configs/vil_tiny_best.yaml --teacher-checkpoint FILE    # options of train_imagenet.py

Each phase is trained on synthetic data for two epochs, and the second epoch is measured. A recipe's hours include all
its epochs, each with the complete batches of 1,281,167 training images and with 50,000 validation images. Data loading
is not included. The last two columns give the GPU hours relative to the first recipe, in total and per epoch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from end_to_end import IMAGENET, last_epoch, training

from vil.config import Config, load_config

VALIDATION = 50_000  # number of validation images of ImageNet-1k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="config files")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs of this machine")
    parser.add_argument("--images", type=int, default=65536, help="synthetic images of a measured epoch")
    options, passed_on = parser.parse_known_args()
    print(
        "| config | phase | pixels | epochs | images/s | evaluation, images/s | GPU hours | of the first | an epoch |"
    )
    print("|" + " --- |" * 9)
    first = None
    for path in options.configs:
        config, hours = load_config("", ["-c", path]), []
        for number in range(config.num_phases):
            phase = config.of_phase(number)
            speeds = measure(path, config, number, options, passed_on)
            hours.append(gpu_hours(phase, *speeds, options.gpus))
            cells = [config.experiment, number + 1, phase.img_size or "model's", phase.epochs]
            print(f"| {' | '.join(map(str, [*cells, *(f'{speed:.0f}' for speed in speeds)]))} | {hours[-1]:.1f} | | |")
        first = first or (sum(hours), config.total_epochs)
        share, epochs = sum(hours) / first[0], config.total_epochs
        by_epoch = share * first[1] / epochs
        print(
            f"| {config.experiment} | all | | {epochs} | | | {sum(hours):.1f} | {share:.2f} | {by_epoch:.2f} |",
            flush=True,
        )


def gpu_hours(phase: Config, images_per_second: float, evaluated_per_second: float, gpus: int) -> float:
    """Return the GPU hours of all epochs of a phase. Throughputs in images/s are totals over all GPUs."""
    trained = IMAGENET // phase.global_batch_size * phase.global_batch_size
    return gpus * phase.epochs * (trained / images_per_second + VALIDATION / evaluated_per_second) / 3600


def measure(
    path: str, config: Config, number: int, options: argparse.Namespace, passed_on: list[str]
) -> tuple[float, float]:
    """Return the training and evaluation throughput of a phase in images/s."""
    chosen = ["--epochs", "2"]
    if config.phases:
        chosen = ["--phases", json.dumps(config.phases[number] | dict(epochs=2))]
    with tempfile.TemporaryDirectory() as output:
        words = ["--synthetic", str(options.images), "--output", output, "--experiment", "hours", *chosen, *passed_on]
        row = last_epoch([*training(options.gpus, path), *words], Path(output) / "hours")
    return float(row["images_per_second"]), float(row["eval_images_per_second"])


if __name__ == "__main__":
    main()
