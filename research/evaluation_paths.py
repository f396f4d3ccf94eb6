"""Does it matter who prepares the images that a model is evaluated on: a GPU, or timm's transform on the CPU?

    python -m research.evaluation_paths                                                       # made images
    python -m research.evaluation_paths --checkpoint best.pt --data-dir /imagenet --split val

Without a checkpoint it draws handwritten digits (scikit-learn's) into JPEG files of 500x375 pixels, trains `vil_tiny`
on them for a few epochs, and evaluates that on both paths.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from sklearn.datasets import load_digits
from timm.data import resolve_data_config

import vil  # noqa: F401  registers the models
from vil import checkpoint
from vil.data.loaders import describe, evaluation_loader
from vil.data.splits import open_split
from vil.devices import autocast
from vil.evaluation.comparison import Predictions
from vil.evaluation.evaluator import Evaluator
from vil.factory import load_model

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--images", type=int, nargs=2, default=[16_384, 10_000], help="to make, of each split")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not options.checkpoint:
            options.data_dir = Path(folder) / "data"
            make_data(options.data_dir, *options.images)
            options.checkpoint = train(options.data_dir, Path(folder), options.epochs)
        compare(options.checkpoint, options.data_dir, options.split)


def make_data(root: Path, train_images: int, val_images: int) -> None:
    digits = load_digits()
    with Pool() as pool:
        for split, count, which in (("train", train_images, slice(0, 1300)), ("val", val_images, slice(1300, None))):
            pictures, targets = digits.images[which], digits.target[which]
            for target in range(10):
                (root / split / str(target)).mkdir(parents=True)
            draw = partial(draw_digit, root / split, pictures, targets)
            pool.map(draw, range(count), chunksize=64)


def draw_digit(folder: Path, pictures: np.ndarray, targets: np.ndarray, seed: int) -> None:
    random_numbers = np.random.default_rng((seed, len(targets)))
    i, side = random_numbers.integers(len(targets)), int(random_numbers.integers(220, 370))
    digit = Image.fromarray((255 / 16 * pictures[i]).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    shapes = Image.fromarray(random_numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
    grain = Image.fromarray(random_numbers.integers(0, 256, (375, 500, 3), dtype=np.uint8))
    image = Image.blend(shapes, grain.filter(ImageFilter.GaussianBlur(0.7)), 0.5).point(lambda value: value // 3)
    colour = Image.new("RGB", (side, side), tuple(random_numbers.integers(160, 256, 3).tolist()))
    place = tuple(int(random_numbers.integers(0, length - side)) for length in (500, 375))
    image.paste(colour, place, digit)
    image.save(folder / str(targets[i]) / f"{seed}.jpg", quality=90)


def train(data_dir: Path, folder: Path, epochs: int) -> str:
    words = f"--epochs {epochs} --warmup-epochs 1 --global-batch-size 128 --model-ema-decay 0.99 --aug-repeats 0"
    words += " --mixup-prob 0 --reprob 0 --hflip 0 --scale 0.5 1 --aa rand-m3-n1 --experiment run"
    command = [sys.executable, str(ROOT / "train_imagenet.py"), "-c", str(ROOT / "configs" / "vil_tiny.yaml")]
    command += ["--data-dir", str(data_dir), "--output", str(folder), *words.split()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return str(folder / "run" / "best.pt")


def compare(path: str, data_dir: Path, split: str) -> None:
    config, device = checkpoint.saved_config(path), torch.device("cuda", 0)
    model = load_model(config["model"], path, num_classes=config["num_classes"]).to(device)
    data_config = resolve_data_config({}, model=model)
    images = open_split(str(data_dir), "", split)
    best = []
    for on_device in (False, True):
        loader = evaluation_loader(images, data_config, device, None, 256, 0, 1, on_device)
        evaluate = Evaluator([model], data_config, device, autocast(device, True, "bfloat16"), 256)
        predictions = Predictions()
        (result,) = evaluate(loader, predictions)
        targets_N, best_NMK, _ = predictions.gather()
        best.append(best_NMK[:, 0, 0])
        print(f"{describe(loader)}: top-1 {result.top1:.3f}% ({result.top1_correct} of {result.images})")
    on_cpu, on_gpu = best
    right = targets_N[on_cpu != on_gpu, None] == np.stack([on_cpu, on_gpu], axis=1)[on_cpu != on_gpu]
    print(f"{(on_cpu != on_gpu).sum()} predictions differ: {right[:, 0].sum()} right on the CPU's images alone, "
          f"{right[:, 1].sum()} on the GPU's alone")  # fmt: skip


if __name__ == "__main__":
    main()
