"""Time that a GPU takes to augment a batch of decoded images, kernel by kernel, and that the host takes to launch it.

    python benchmarks/augmentation.py
    python benchmarks/augmentation.py --batch-size 512 --height 1200 --width 1600

Images are noise; boxes, operations, erasing and mixing are much like those of ViM's recipe, 3-Augment like DeiT III's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from vil.kernels import augment

from vil.data.batched_transforms import (
    ARGUMENTS,
    CODES,
    GEOMETRIC,
    affine_matrix,
    apply_operations,
    crop_resize_flip,
    finish,
)

FILL, MEAN, STD = (124, 116, 104), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
JITTER = ("Brightness", "Contrast", "Color")
RAND_AUGMENT = dict(  # of timm's magnitude 9 or so
    AutoContrast=0, Equalize=0, Invert=0, Rotate=27, Posterize=0, Solarize=26, SolarizeAdd=99, Color=1.8, Contrast=1.8,
    Brightness=1.8, Sharpness=1.8, ShearX=0.27, ShearY=-0.27, TranslateXRel=0.4, TranslateYRel=-0.4,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--height", type=int, default=375, help="of the decoded images")
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--size", type=int, default=224, help="of the augmented ones")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {options.batch_size}")
    print("| part | us an image | ms a batch | of the host | kernels, us a batch |\n| --- | --- | --- | --- | --- |")
    for name, part in parts(options).items():
        gpu_ms, kernels = measure(part, options.repetitions)
        host_ms = measure_host(part, options.repetitions)
        listed = ", ".join(f"{kernel} {1e3 * ms:.0f}" for kernel, ms in kernels.items())
        per_image = 1e3 * gpu_ms / options.batch_size
        print(f"| {name} | {per_image:.2f} | {gpu_ms:.3f} | {host_ms:.3f} | {listed} |", flush=True)


def parts(options) -> dict[str, Callable]:
    random.seed(0)
    torch.manual_seed(0)
    count, size, numbers = options.batch_size, (options.size, options.size), np.random.default_rng(0)
    height, width = options.height, options.width
    images = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, device="cuda")
    crops = images[:, :, : size[0], : size[1]].contiguous()
    decoded, photo = list(images), Image.new("RGB", (width, height))
    boxes = np.array([RandomResizedCropAndInterpolation.get_params(photo, (0.08, 1), (3 / 4, 4 / 3)) for _ in decoded])
    whole, flips, never = np.array([[0, 0, height, width]] * count), numbers.random(count) < 0.5, np.zeros(count, bool)
    shorter = int(options.size / 0.9)
    resized = np.array([[height * shorter // min(height, width), width * shorter // min(height, width)]] * count)
    windows = (resized - options.size) // 2
    erasing = np.zeros((count, 4), np.int32)
    erasing[numbers.random(count) < 0.25] = options.size // 4, options.size // 4, options.size // 2, options.size // 3
    keys = np.arange(count, dtype=np.uint32)
    mixing = np.array([[0, options.size, 0, options.size, 0.3, 0.3], [40, 150, 60, 190, 0, 0.7]] * (count // 2 + 1))
    mixing, partners = mixing[:count].astype(np.float32), np.arange(count)[::-1].copy()

    def operations(draw: Callable[[], list[str]]) -> Callable:
        codes, arguments = encode([draw() for _ in range(count)], size)
        return lambda: apply_operations(crops, codes, arguments, FILL, "bicubic")

    def three_augment() -> list[str]:
        return [random.choice(["Solarize", "Grey", "GaussianBlur"]), *random.sample(JITTER, 3)]

    cases = {
        "crop, resize, flip": lambda: crop_resize_flip(decoded, boxes, flips, size, "bicubic"),
        "evaluation's window": lambda: crop_resize_flip(decoded, whole, never, size, "bicubic", resized, windows),
        "RandAugment": operations(lambda: [random.choice(["", name]) for name in random.choices([*RAND_AUGMENT], k=2)]),
        "3-Augment and jitter": operations(three_augment),
        "erasing, mixup": lambda: finish(crops, MEAN, STD, erasing, keys, "pixel", mixing, partners),
        "normalisation": lambda: finish(crops, MEAN, STD),
    }
    for name in [*RAND_AUGMENT, "GaussianBlur"]:
        cases[f"{name} of all images"] = operations(lambda name=name: [name])
    return cases


def encode(operations: list[list[str]], size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    codes = np.zeros((len(operations), len(operations[0])), np.uint8)
    arguments = np.zeros((*codes.shape, ARGUMENTS))
    for i, turns in enumerate(operations):
        for turn, name in enumerate(turns):
            if name in GEOMETRIC:
                arguments[i, turn] = affine_matrix(name, RAND_AUGMENT[name], *size)
                codes[i, turn] = CODES["Affine"]
            elif name == "GaussianBlur":
                codes[i, turn], arguments[i, turn, 0] = CODES[name], random.uniform(0.1, 2)
            elif name == "Grey":
                codes[i, turn] = CODES["Color"]
            else:
                codes[i, turn], arguments[i, turn, 0] = CODES[name], RAND_AUGMENT.get(name, 0)
    return codes, arguments


def measure(part: Callable, repetitions: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of all and of each kernel on the GPU, which has all to do at hand: medians."""
    kernels, total, real = defaultdict(list), [], augment.launch

    def timed(name, entry, *arguments):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        real(name, entry, *arguments)
        end.record()
        events.append((entry, start, end))

    part()
    with mock.patch.object(augment, "launch", timed):
        for _ in range(repetitions):
            events = []
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # 10 ms, in which the host launches what is to be measured
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            part()
            last.record()
            torch.cuda.synchronize()
            total.append(first.elapsed_time(last))
            sums = defaultdict(float)
            for entry, start, end in events:
                sums[entry] += start.elapsed_time(end)
            for entry, ms in sums.items():
                kernels[entry].append(ms)
    return statistics.median(total), {entry: statistics.median(times) for entry, times in kernels.items()}


def measure_host(part: Callable, repetitions: int) -> float:
    """Milliseconds until the call returns."""
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        part()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
