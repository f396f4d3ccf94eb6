"""Measure the training throughput of recipes from JPEG files.

    python benchmarks/end_to_end.py --gpus 1 2 4
    python benchmarks/end_to_end.py --gpus 1 --configs vil_small --no-cuda-graphs     # train_imagenet.py's options
    python benchmarks/end_to_end.py --gpus 4 --data-dir /imagenet                     # your own files

Without --data-dir, the program creates a data set in memory: 1,000 classes of files of 500x375 pixels and about 100 KB,
with many hard links to each file. A run is `train_imagenet.py -c FILE --data-dir DIR` for two epochs, started by
torchrun if several GPUs are used. The reported rates are those of the second epoch. The column "of noise" is the rate
of the same run with synthetic data, which reads no files. The time of the first step is measured in another run, from
the command to the checkpoint after that step.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from vil.info import format_environment

ROOT = Path(__file__).parents[1]
IMAGENET, EPOCHS = 1_281_167, 300
COLUMNS = (
    "config", "GPUs", "images/s", "of noise", "waits for data", "waits for GPU", "GiB", "evaluation, images/s",
    "first step, s", f"{EPOCHS} epochs, h",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["vil_tiny"], help="names of files in configs/")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1])
    parser.add_argument("--data-dir", type=Path, help="data set to train on, instead of a generated one")
    parser.add_argument("--images", type=int, default=102_400, help="training images of the generated data set")
    parser.add_argument("--distinct", type=int, default=10_000, help="distinct files of the generated data set")
    parser.add_argument(
        "--validation-images", type=int, default=50_000, help="validation images of the generated data set"
    )
    options, passed_on = parser.parse_known_args()
    print(f"{format_environment()}\n{os.cpu_count()} cores; options: {' '.join(passed_on) or 'none'}\n")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        folder = Path(folder)
        data_dir = options.data_dir or make_data(
            folder / "data", options.images, options.validation_images, options.distinct
        )
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        for config in options.configs:
            for gpus in options.gpus:
                measure(config, gpus, data_dir, options, passed_on, folder)


def make_data(folder: Path, images: int, validation_images: int, distinct: int) -> Path:
    """Create a data set with ImageNet's layout. Each image is a hard link to one of `distinct` files."""
    files = [folder / "files" / f"{i}.jpg" for i in range(distinct)]
    files[0].parent.mkdir(parents=True)
    with Pool() as pool:
        pool.starmap(write_image, enumerate(files), chunksize=16)
    print(f"files of {sum(f.stat().st_size for f in files) / distinct / 1e3:.0f} KB", flush=True)
    for split, count in (("train", images), ("val", validation_images)):
        classes = [folder / split / f"{c:04}" for c in range(min(1000, validation_images))]
        for directory in classes:
            directory.mkdir(parents=True)
        for i in range(count):
            os.link(files[i % distinct], classes[i % len(classes)] / f"{i}.jpg")
    return folder


def write_image(seed: int, path: Path) -> None:
    """Write an image of random shapes and grain, 500x375 pixels, with the file size of a typical photo."""
    random_numbers = np.random.default_rng(seed)
    shapes = Image.fromarray(random_numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
    grain = Image.fromarray(random_numbers.integers(0, 256, (375, 500, 3), dtype=np.uint8))
    Image.blend(shapes, grain.filter(ImageFilter.GaussianBlur(0.7)), 0.5).save(path, quality=92)


def measure(config: str, gpus: int, data_dir: Path, options, passed_on: list[str], folder: Path) -> None:
    """Measure the training of a config on `gpus` GPUs, and print a row of the table of throughput."""
    start, name = training(gpus, ROOT / "configs" / f"{config}.yaml"), f"{config}-{gpus}"
    files = [*start, "--data-dir", str(data_dir), "--output", str(folder), *passed_on]
    noise = [*start, "--synthetic", str(options.images // 2), "--output", str(folder), *passed_on]
    first_step = seconds_to_checkpoint([*files, "--experiment", f"{name}-first"], folder / f"{name}-first")
    row = last_epoch([*files, "--epochs", "2", "--experiment", name], folder / name)
    of_noise = last_epoch([*noise, "--epochs", "2", "--experiment", f"{name}-noise"], folder / f"{name}-noise")
    rate, evaluation = (float(row[column]) for column in ("images_per_second", "eval_images_per_second"))
    hours = EPOCHS * (IMAGENET / rate + 50_000 / evaluation) / 3600
    cells = [
        config, gpus, f"{rate:.0f}", f"{float(of_noise['images_per_second']):.0f}",
        f"{float(row['data_wait_percent']):.1f} %", f"{float(row['gpu_wait_percent']):.1f} %",
        f"{float(row['peak_memory_gib']):.2f}", f"{evaluation:.0f}", f"{first_step:.1f}", f"{hours:.2f}",
    ]  # fmt: skip
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def training(gpus: int, config: Path | str) -> list[str]:
    """Return the command that trains a config on `gpus` GPUs."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    return [sys.executable, *launcher, str(ROOT / "train_imagenet.py"), "-c", str(config)]


def last_epoch(command: list[str], folder: Path) -> dict[str, str]:
    """Run a training command, and return the last row of the run's summary.csv."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}:\n{result.stderr[-3000:]}")
    print(*(line for line in result.stderr.splitlines() if "micro-batches of" in line), sep="\n", file=sys.stderr)
    with open(folder / "summary.csv") as file:
        return list(csv.DictReader(file))[-1]


def seconds_to_checkpoint(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--checkpoint-interval", "1"], stdout=subprocess.DEVNULL)
    while not (folder / "last.pt").exists():
        if process.poll() is not None:
            sys.exit(f"{' '.join(command)} ended with status {process.returncode}")
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    process.send_signal(signal.SIGTERM)
    process.wait()
    return seconds


if __name__ == "__main__":
    main()
