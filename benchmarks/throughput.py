"""Images a second and peak memory of whole models on a GPU: training steps and inference, bf16 autocast, eager.

    python benchmarks/throughput.py [--models vil_small deit_small_patch16_224]

A training step is forward, backward and fused AdamW on random images that lie on the device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F

import vil  # noqa: F401  registers the models

MODELS = ["vil_tiny", "vim_tiny", "deit_tiny_patch16_224", "vil_small", "vim_small", "deit_small_patch16_224"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--train-batch", type=int, default=128)
    parser.add_argument("--infer-batch", type=int, default=256)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, timm {timm.__version__}")
    print("| model | train images/s | peak GiB | infer images/s |")
    print("| --- | --- | --- | --- |")
    for name in options.models:
        train, peak = train_throughput(name, options.img_size, options.train_batch)
        infer = infer_throughput(name, options.img_size, options.infer_batch)
        print(f"| {name} | {train:.0f} | {peak:.2f} | {infer:.0f} |", flush=True)


def train_throughput(name: str, img_size: int, batch_size: int) -> tuple[float, float]:
    """Images a second, and GiB at the peak."""
    model = timm.create_model(name, img_size=img_size).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images = torch.randn(batch_size, 3, img_size, img_size, device="cuda")
    targets = torch.randint(1000, (batch_size,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    return batch_size / seconds(step), torch.cuda.max_memory_allocated() / 2**30


def infer_throughput(name: str, img_size: int, batch_size: int) -> float:
    model = timm.create_model(name, img_size=img_size).cuda().eval()
    images = torch.randn(batch_size, 3, img_size, img_size, device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        return batch_size / seconds(lambda: model(images))


def seconds(f: Callable[[], object], warm_up: int = 4, calls: int = 10) -> float:
    """Seconds of a call, the mean of some after the GPU has caught up with the first ones."""
    for _ in range(warm_up):
        f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        f()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
