"""Milliseconds of one image, batch 1, on this machine's CPU: ours beside timm's models of the same size.

    python benchmarks/latency.py [--models vil_small deit_small_patch16_224] [--threads 2]

The models take turns, so that whatever else the machine does meets all of them; the median of each is reported, and
its ratio to the last model's.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import timm
import torch

import vil  # noqa: F401  registers the models

MODELS = ["vil_tiny", "vim_tiny", "deit_tiny_patch16_224", "vil_small", "vim_small", "deit_small_patch16_224"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    image = torch.randn(1, 3, options.img_size, options.img_size)
    models = {name: timm.create_model(name, img_size=options.img_size).eval() for name in options.models}
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for _ in range(options.rounds + 2):
            for name, model in models.items():
                start = time.perf_counter()
                model(image)
                times[name].append(1e3 * (time.perf_counter() - start))
    print(f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}, timm {timm.__version__}")
    medians = {name: statistics.median(t[2:]) for name, t in times.items()}  # the first two rounds warm up
    for name, median in medians.items():
        print(f"{name:28} {median:8.1f} ms   {median / medians[options.models[-1]]:.2f} x {options.models[-1]}")


if __name__ == "__main__":
    main()
