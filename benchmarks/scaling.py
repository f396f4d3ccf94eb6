"""Training on 1, 2, 4, ... GPUs of one machine with noise for images: how much of each GPU's speed is left.

    python benchmarks/scaling.py --gpus 1 2 4
    python benchmarks/scaling.py --gpus 1 2 4 --same-global-batch    # the recipe's 1024 images a step, accumulated
    python benchmarks/scaling.py --gpus 1 2 4 --no-cuda-graphs       # options it does not know go to train_imagenet.py

Runs train_imagenet.py as users do: with EMA, mixup and random erasing, bf16, AdamW. The second epoch counts.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measure(gpus: int, options: argparse.Namespace, passed_on: list[str]) -> dict[str, float]:
    """The last row of a run's summary.csv."""
    batch = 1024 if options.same_global_batch else gpus * options.batch_size
    images = batch * max(1, gpus * options.images // batch)
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command += ["train_imagenet.py", "-c", f"configs/{options.model}.yaml", "--output", output, "--epochs", "2"]
        command += ["--synthetic", str(images), "--global-batch-size", str(batch)]
        command += ["--batch-size", str(options.batch_size), "--experiment", "scaling", "--workers", "0"]
        command += passed_on
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        with open(Path(output) / "scaling" / "summary.csv") as file:
            return {name: float(value) for name, value in list(csv.DictReader(file))[-1].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", default="vil_tiny", help="name of a config")
    parser.add_argument("--batch-size", type=int, default=256, help="images that a GPU holds at once")
    parser.add_argument("--images", type=int, default=40960, help="images an epoch and GPU")
    parser.add_argument("--same-global-batch", action="store_true", help="1024 images a step over all GPUs")
    options, passed_on = parser.parse_known_args()
    print("| GPUs | images/s | efficiency | peak memory a GPU (GiB) |\n| --- | --- | --- | --- |")
    alone = None
    for gpus in options.gpus:
        row = measure(gpus, options, passed_on)
        rate = row["images_per_second"]
        alone = alone or rate / gpus
        print(f"| {gpus} | {rate:.0f} | {rate / gpus / alone:.1%} | {row['peak_memory_gib']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
