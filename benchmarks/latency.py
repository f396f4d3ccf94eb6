"""Measure the CPU latency of the scan, and of models beside timm's models of the same size.

    python benchmarks/latency.py [--models vil_small deit_small_patch16_224] [--threads 2] [--rounds 20]

Competitors take turns in one process, so that other load of the machine affects all of them equally. Each line has the
minimum and the median in milliseconds, and the ratio of the minimum to that of a competitor: models are compared with
the last model, the cpu backend with the reference, and the training step of the demo's model with the same step using
the reference. With one thread, CPU time is measured instead of wall time, because CPU time is meaningful on a busy
machine, too.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F

import vil
from vil.kernels import longhorn_scan, selective_scan
from vil.kernels.scan import interface
from vil.models.dispatch import set_fused

MODELS = ["vil_tiny", "vim_tiny", "deit_tiny_patch16_224", "vil_small", "vim_small", "deit_small_patch16_224"]
SHAPES = [(1, 384, 197), (1, 768, 197), (64, 128, 17)]  # shapes (B, D, L) of the scan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads"
    print(f"{cpu}, torch {torch.__version__}, timm {timm.__version__}, vil {vil.__file__}")
    if options.models:
        for measure in (one_image, step_of_two_images):
            print(measure.__name__)
            report(measure(options.models, options.img_size, options.rounds), options.models[-1])
    for recurrence in ("longhorn", "selective"):
        for shape in SHAPES:
            for name, times in scans(recurrence, *shape, options.rounds).items():
                report({f"{recurrence} {shape} {name}, {backend}": t for backend, t in times.items()})
    report({f"step of the demo's model, {name}": t for name, t in training_steps(options.rounds).items()})


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each function once per round, in turns, and return the milliseconds of each call."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(1e3 * (clock() - start))
    return {name: t[2:] for name, t in times.items()}  # the first two rounds warm up


def report(times: dict[str, list[float]], other: str | None = None) -> None:
    """Print each entry's minimum and median time, and the ratio of its minimum to the minimum of `other`.

    `other` is the last entry by default.
    """
    other = other or [*times][-1]
    for name, t in times.items():
        ratio = min(t) / min(times[other])
        print(f"{name:48} {min(t):9.2f} ms, median {statistics.median(t):9.2f}   {ratio:.2f} x {other}")


def one_image(names: list[str], img_size: int, rounds: int) -> dict[str, list[float]]:
    image = torch.randn(1, 3, img_size, img_size)
    models = {name: timm.create_model(name, img_size=img_size).eval() for name in names}
    with torch.inference_mode():
        return in_turn({name: lambda model=model: model(image) for name, model in models.items()}, rounds)


def step_of_two_images(names: list[str], img_size: int, rounds: int) -> dict[str, list[float]]:
    """Time the forward and backward pass of each model in fp32 on two images."""
    images = torch.randn(2, 3, img_size, img_size)

    def step(model):
        model.zero_grad()
        model(images).square().mean().backward()

    models = {name: timm.create_model(name, img_size=img_size).train() for name in names}
    return in_turn({name: lambda model=model: step(model) for name, model in models.items()}, rounds)


def scans(recurrence: str, B: int, D: int, L: int, rounds: int, N: int = 16) -> dict[str, dict[str, list[float]]]:
    """Time the forward pass (without gradients) and the backward pass of a scan of both directions, by backend."""
    shapes = [(2, B, L, D), (2, B, L, D), (2, B, L, N), (2, B, L, N), (2, D), (2, D)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    scan = longhorn_scan
    if recurrence == "selective":
        scan = selective_scan
        inputs.insert(2, (-torch.rand(2, D, N)).requires_grad_())
    dy = torch.randn(shapes[0])

    def forward(backend):
        with torch.inference_mode():
            scan(*inputs, reverse=(False, True), backend=backend)

    def backward(backend):
        return torch.autograd.grad(outputs[backend], inputs, dy, retain_graph=True)

    backends = ("cpu", "reference")
    outputs = {backend: scan(*inputs, reverse=(False, True), backend=backend) for backend in backends}
    return {
        f.__name__: in_turn({backend: lambda f=f, backend=backend: f(backend) for backend in backends}, rounds)
        for f in (forward, backward)
    }


def training_steps(rounds: int) -> dict[str, list[float]]:
    """Time training steps (forward, backward, AdamW) of the model in configs/digits.yaml, with and without kernels."""
    model = timm.create_model("vil_tiny", embed_dim=64, depth=4, patch_size=8, img_size=32, num_classes=10).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    chosen = interface.choose

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def step_by_the_reference():
        set_fused(False)
        interface.choose = lambda *_: "reference"
        try:
            step()
        finally:
            set_fused(True)
            interface.choose = chosen

    return in_turn({"cpu": step, "reference": step_by_the_reference}, rounds)


if __name__ == "__main__":
    main()
