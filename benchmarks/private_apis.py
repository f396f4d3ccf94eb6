"""Measure how much host time this package saves by calling private PyTorch functions, in eager mode on one GPU.

    python benchmarks/private_apis.py

Each row compares eager steps with all functions of vil/kernels/torch_private.py that save host time to steps without
one of them. Rounds of both kinds of steps alternate. `host` is the time until the step has been queued, and `step` the
time until the GPU has finished, both in microseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from throughput import Case, build_step, described

from vil.kernels import torch_private
from vil.kernels.block import block_op

CASES = ["infer,224,1", "train,224,1", "train,224,128"]
MODELS = ["vil_tiny", "vil_small_pooled"]
ROUNDS, STEPS = 7, 4  # few steps per round, because the GPU's launch queue is limited


def public_views(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in like]), like)]


# For each private function: a description of its replacement, and a context that switches to the replacement.
PRIVATE: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager]]] = {
    "unflatten": ("split and view", lambda: mock.patch.object(torch_private, "unflatten", public_views)),
    "observed": ("the dispatcher", lambda: mock.patch.object(block_op, "is_eager", return_value=False)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="TASK,PIXELS,BATCH")
    options = parser.parse_args()
    device, start = torch.device("cuda"), time.perf_counter()
    print(f"{described(device)}, bf16 autocast, eager\n")
    print("| model | case | private | public | host | host, public | saved | step | step, public | saved |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model, text in itertools.product(options.models, options.cases):
        case = Case.parse(text)
        step = build_step(model, case, False, device)
        for name, (public, without) in PRIVATE.items():
            cells = [model, str(case), name, public]
            for private_us, public_us in zip(*in_turn(step, without)):
                cells += [f"{private_us:,.0f}", f"{public_us:,.0f}", f"{1 - private_us / public_us:+.1%}"]
            print(f"| {' | '.join(cells)} |", flush=True)
        del step
        torch.cuda.empty_cache()
    print(f"\n{time.perf_counter() - start:.0f} s")


def in_turn(step: Callable, without: Callable) -> tuple[list[float], list[float]]:
    """Return median (host, total) microseconds per step with a private PyTorch function, and without the function."""
    times: dict[str, list[tuple[float, float]]] = {"private": [], "public": []}
    for _ in range(ROUNDS):
        times["private"].append(round_of(step))
        with without():
            times["public"].append(round_of(step))
    private, public = ([statistics.median(t) for t in zip(*rounds)] for rounds in times.values())
    return private, public


def round_of(step: Callable) -> tuple[float, float]:
    """Return the host's and the total microseconds per step. The host's time ends when the last step is queued."""
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    return 1e6 * (queued - start) / STEPS, 1e6 * (time.perf_counter() - start) / STEPS


if __name__ == "__main__":
    main()
