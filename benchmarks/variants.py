"""Measure how much each kernel variant speeds up whole models, compared with the kernels that run without it.

    python benchmarks/variants.py
    python benchmarks/variants.py --variants gate_outproj_bwd_sm90 --cases vil_small,train,224,128
    python benchmarks/variants.py --variants "forward_simt, 4 x 1" --no-amp     # in fp32
    python benchmarks/variants.py --device cpu                                  # about a minute of one core

On a GPU, each row compares a model with all variants to the same model without one of them. Both are captured as CUDA
graphs, whose replays alternate. A variant is removed by replacing an entry of the tables or conditions that choose
kernels, and by forgetting the plans that were recorded with the variant. "unused" means that the model launches the
same kernels with and without the variant. Without --cases, the last row compares the Triton scan with the PyTorch scan
in unfused blocks.

On a CPU, each row has the CPU time of a step on one thread in plain PyTorch, and the speedups with the fused block and
with the scan in unfused blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from throughput import Case, build_step, capture, described, seconds

from vil.kernels import backends
from vil.kernels.block import (
    consecutive,
    conv_xproj,
    gate_outproj,
    gate_outproj_bwd_sm90,
    gate_outproj_sm90,
    kernels,
    step_proj_bwd,
)
from vil.kernels.cuda import launches
from vil.kernels.embedding import embed_op
from vil.kernels.scan import cuda_scan, heuristics, scan_op
from vil.models.dispatch import set_fused

ROUNDS, LEAST = 3, 0.06  # number of timed rounds per CUDA graph, and approximate seconds per round
TRAIN, BATCH, SINGLE = "train,224,128", "infer,224,256", "infer,224,1"
MIDDLE_TRAIN, SMALL_TRAIN = "train,224,64", "train,224,8"
LARGE_TRAIN, LARGE = "train,1248,4", "infer,1248,8"
CPU_ROUNDS = 4
CPU_CASES = [
    ("vil_tiny", "infer,224,1"), ("vil_tiny", "train,224,2"), ("vil_tiny_pooled", "infer,224,1"),
    ("vil_tiny_pooled", "train,224,2"), ("vil_small", "infer,224,1"),
]  # fmt: skip


class Variant(NamedTuple):
    """Benchmark of a kernel variant against the kernels that run without the variant."""

    instead: str  # description of the kernels that run without the variant
    without: Callable[[], contextlib.AbstractContextManager]  # context in which models do not use the variant
    cases: dict[str, list[str]]  # benchmark cases by model


def no(*_, **__) -> bool:
    return False


def replaced(module: object, name: str, value: object) -> Callable:
    return lambda: mock.patch.object(module, name, value)


def table(entries: dict, longhorn: list) -> Callable:
    return lambda: mock.patch.dict(entries, longhorn=longhorn)


def segments_by_simt(kind: str, recurrence: str, N: int, itemsize: int) -> object:
    return heuristics.SEGMENT_STATES[recurrence]


def tiny(*cases: str) -> dict[str, list[str]]:
    return {"vil_tiny": list(cases)}


def small(*cases: str) -> dict[str, list[str]]:
    return {"vil_small": list(cases)}


def both(*cases: str) -> dict[str, list[str]]:
    return {"vil_small": list(cases), "vil_small_pooled": list(cases)}


SIMT, MMA, BACKWARD = heuristics.FORWARD_SIMT["longhorn"], heuristics.FORWARD_MMA, heuristics.BACKWARD["longhorn"]
ON_HOPPER = SimpleNamespace(fits=no, shares=gate_outproj_sm90.shares)
VARIANTS = {
    "forward_mma": Variant(
        "forward_simt", replaced(heuristics, "FORWARD_MMA", []), small(SINGLE, SMALL_TRAIN, LARGE, LARGE_TRAIN)
    ),
    "forward_mma, 3 consumers": Variant(
        "6 consumers", replaced(heuristics, "FORWARD_MMA", MMA[:1]), small(SINGLE, SMALL_TRAIN, LARGE_TRAIN)
    ),
    "forward_mma, 6 consumers": Variant("3 consumers", replaced(heuristics, "FORWARD_MMA", MMA[1:]), small(LARGE)),
    "forward_simt, 16 x 4": Variant("16 x 2", table(heuristics.FORWARD_SIMT, SIMT[1:]), both(TRAIN, BATCH)),
    "forward_simt, 16 x 2": Variant(
        "16 x 4, 4 x 1", table(heuristics.FORWARD_SIMT, [SIMT[0], SIMT[2]]), tiny(TRAIN) | both(MIDDLE_TRAIN)
    ),
    "forward_simt, 4 x 1": Variant("16 x 2", table(heuristics.FORWARD_SIMT, SIMT[:2]), both(SINGLE, SMALL_TRAIN)),
    "backward, 4 channels": Variant("2 channels", table(heuristics.BACKWARD, BACKWARD[1:]), both(TRAIN, LARGE_TRAIN)),
    "backward, 2 channels": Variant("4 channels", table(heuristics.BACKWARD, BACKWARD[:1]), both("train,224,16")),
    "segment_gradients_mma": Variant(
        "segment_states", replaced(heuristics, "segment_variant", segments_by_simt), small(SMALL_TRAIN, LARGE_TRAIN)
    ),
    "segments": Variant("one segment", replaced(heuristics, "LAUNCHES", math.inf), small(SMALL_TRAIN, LARGE_TRAIN)),
    "gate_outproj_sm90 and its backward": Variant(
        "gate, product, norm", replaced(gate_outproj_sm90, "fits", no), both(TRAIN, BATCH, LARGE, LARGE_TRAIN)
    ),
    "gate_outproj_bwd_sm90": Variant(
        "product, gate_backward", replaced(gate_outproj_bwd_sm90, "forward", ON_HOPPER), both(TRAIN, LARGE_TRAIN)
    ),
    "gate_outproj_of_few": Variant(
        "gate, product", replaced(gate_outproj, "cta_count", lambda T, C: 1 << 30), both(SINGLE)
    ),
    "conv_xproj": Variant("conv, products", replaced(conv_xproj, "fits", no), small(TRAIN, BATCH, LARGE, LARGE_TRAIN)),
    "step_proj_bwd": Variant("products", replaced(step_proj_bwd, "fits", no), both(TRAIN)),
    "scan_image": Variant(
        "products, scan",
        replaced(kernels, "scans_images", no),
        {name: [TRAIN, BATCH, SMALL_TRAIN] for name in ("vil_small_pooled", "vil_tiny_pooled")},
    ),
    "in_proj_pool_sm90": Variant(
        "product, pool",
        replaced(kernels, "empty_in_proj_tiles", lambda *_: None),
        {name: [TRAIN, BATCH] for name in ("vil_small_pooled", "vil_tiny_pooled")},
    ),
    "patchify, add_embeddings": Variant(
        "PyTorch code",
        replaced(embed_op, "runs_kernels", no),
        {name: [TRAIN, BATCH, SINGLE] for name in ("vil_small_pooled", "vil_tiny_pooled", "vil_small")},
    ),
    "scan_lines": Variant("products, scan", replaced(kernels, "scans_lines", no), {"vil_small_pooled": [SINGLE]}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="NAME")
    parser.add_argument("--cases", nargs="+", help="MODEL,TASK,PIXELS,BATCH")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True, help="bf16 autocast on GPUs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    device, start = torch.device(options.device), time.perf_counter()
    if device.type == "cpu":
        cpu_variants(device)
        return
    torch.cuda.set_stream(torch.cuda.Stream())
    print(f"{described(device)}, {'bf16 autocast' if options.amp else 'fp32'}, CUDA graphs\n")
    print("| model | case | variant | instead | images/s | without it | gain |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    cases: dict[tuple[str, str], list[str]] = {}
    for name in options.variants:
        for model, texts in VARIANTS[name].cases.items():
            for text in texts:
                cases.setdefault((model, text), []).append(name)
    for (model, text), names in cases.items():
        if not options.cases or f"{model},{text}" in options.cases:
            compare(model, Case.parse(text), names, device, options.amp)
            gc.collect()
            torch.cuda.empty_cache()
    if not options.cases:
        scan_backends(device)
    print(f"\n{time.perf_counter() - start:.0f} s")


def compare(model: str, case: Case, names: list[str], device: torch.device, amp: bool) -> None:
    """Print the speedup by each of the kernel variants `names` for one model and one benchmark case."""
    with forgotten_plans(), launched() as used:
        step = build_step(model, case, False, device, amp)
        with_all = capture(step)
    for name in names:
        variant = VARIANTS[name]
        with variant.without(), forgotten_plans(), launched() as others:
            step()
            without = None if others == used else capture(step)
        if without is None:
            row(model, case, name, variant.instead, None)
            continue
        row(model, case, name, variant.instead, in_turn(case, [with_all, without], device))
        del without


def scan_backends(device: torch.device) -> None:
    """Print how much faster unfused blocks are with the Triton scan than with the plain PyTorch scan."""
    case, graphs = Case("infer", 224, 8), []
    for backend in ("triton", "reference"):
        with scans_by(backend):
            graphs.append(capture(build_step("vil_tiny", case, False, device)))
    row("vil_tiny", case, "triton_scan, unfused blocks", "torch_scan", in_turn(case, graphs, device))


@contextlib.contextmanager
def scans_by(backend: str) -> Iterator[None]:
    """Make all models use the scan backend `backend` within the context."""
    with mock.patch.object(backends, "_backend_for", return_value=backend):
        scan_op._module.cache_clear()
        yield
    scan_op._module.cache_clear()


def cpu_variants(device: torch.device) -> None:
    """Print the speedup of the fused block and of the scan over plain PyTorch for each model and task, on a CPU."""
    torch.set_num_threads(1)
    print(f"{described(device)}, fp32, one thread\n")
    print("| model | case | fused block | scan in unfused blocks | plain PyTorch, CPU ms |")
    print("| --- | --- | --- | --- | --- |")
    for model, text in CPU_CASES:
        case = Case.parse(text)
        fused = cpu_seconds(model, case, device, True, "cpu")
        scan = cpu_seconds(model, case, device, False, "cpu")
        plain = cpu_seconds(model, case, device, False, "reference")
        speedups = [f"{plain / seconds:.1f} x" for seconds in (fused, scan)]
        print(f"| {' | '.join([model, str(case), *speedups, f'{1e3 * plain:.0f}'])} |", flush=True)


def cpu_seconds(model: str, case: Case, device: torch.device, fused: bool, backend: str) -> float:
    """Return the CPU seconds of a model's step in fp32, as the minimum over CPU_ROUNDS steps."""
    set_fused(fused)
    times = []
    with scans_by(backend):
        step = build_step(model, case, False, device, amp=False)
        for _ in range(CPU_ROUNDS):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
    set_fused(True)
    return min(times)


def in_turn(case: Case, graphs: list[Callable], device: torch.device) -> list[float]:
    """Replay the CUDA graphs alternately, and return the median images/s of each graph."""
    speeds: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, speed in zip(graphs, speeds):
            speed.append(case.batch / seconds(graph, device, rounds=1, least=LEAST))
    return [statistics.median(speed) for speed in speeds]


@contextlib.contextmanager
def launched() -> Iterator[set]:
    """Yield a set that collects the launched or recorded kernels with their macros and numbers of thread blocks."""
    kernels_used: set = set()
    launch = launches.launch

    def noted(source, entry, macros, ctas, *arguments):
        kernels_used.add((source.name, entry, tuple(macros.items()), ctas))
        return launch(source, entry, macros, ctas, *arguments)

    with mock.patch.object(launches, "launch", noted):
        yield kernels_used


@contextlib.contextmanager
def forgotten_plans() -> Iterator[None]:
    """Context that clears all recorded plans and variant choices on entry and on exit."""

    def forget() -> None:
        heuristics.choose.cache_clear()
        for function in (
            consecutive.forward_blocks,
            consecutive.backward_blocks,
            cuda_scan.forward,
            cuda_scan.backward,
            embed_op.forward,
            embed_op.backward,
        ):
            inspect.getclosurevars(function).nonlocals["plans"].clear()

    forget()
    try:
        yield
    finally:
        forget()


def row(model: str, case: Case, name: str, instead: str, speeds: list[float] | None) -> None:
    numbers = ["unused", "", ""]
    if speeds:
        numbers = [f"{speeds[0]:,.1f}", f"{speeds[1]:,.1f}", f"{speeds[0] / speeds[1] - 1:+.1%}"]
    print(f"| {' | '.join([model, str(case), name, instead, *numbers])} |", flush=True)


if __name__ == "__main__":
    main()
