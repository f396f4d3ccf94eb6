"""Measure throughput, memory and GPU time by kernel of whole models, compared with timm's DeiT.

    python benchmarks/throughput.py --json benchmarks/results/h200_models.json     # then benchmarks/tables.py
    python benchmarks/throughput.py --models vil_small --cases train,224,128 infer,224,1 --modes eager graph
    python benchmarks/throughput.py --models vil_small --resolutions 224 512 1024     # training against resolution

A training step is forward, backward and fused AdamW. Training and inference run under bf16 autocast, on random images
in GPU memory. The modes are `eager`; `compiled`, the whole model by torch.compile without graph breaks; `graph` and
`compiled+graph`, which replay the whole step as a CUDA graph. A cell is images/s / peak GiB allocated. The errors of
failed modes are printed below the tables.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from tables import write_results
from torch.profiler import ProfilerActivity, profile

from vil.factory import create_model
from vil.info import git_commit

MODES = ("eager", "graph", "compiled", "compiled+graph")
MODELS = ["vil_small", "vim_small", "deit_small_patch16_224", "vil_tiny", "vim_tiny", "deit_tiny_patch16_224"]
PATCHES = 128 * 14**2  # most patches per training batch for --resolutions, as many as in 128 images of 224 pixels


class Case(NamedTuple):
    task: str  # "train" or "infer"
    img_size: int
    batch: int

    @classmethod
    def parse(cls, text: str) -> Case:
        task, img_size, batch = text.split(",")
        if task not in ("train", "infer"):
            raise ValueError(task)
        return cls(task, int(img_size), int(batch))

    def __str__(self) -> str:
        return f"{self.task}, {self.img_size}, B {self.batch}"


CASES = [
    Case("train", 224, 128),
    Case("infer", 224, 256),
    Case("infer", 224, 1),
    Case("infer", 1248, 8),
    Case("train", 1248, 4),
]
# groups of kernels: the first pattern that matches a kernel's name determines its group
GROUPS = {
    "scan forward": r"scan_forward",
    "scan backward": r"scan_backward|reduce_partials",
    "scan segments": r"stage_factors|segment_states|segment_gradients|pass_states",
    "attention": r"flash|fmha|sdpa|attention",
    "convolution": r"convol|^conv|conv2d|cudnn|fprop|dgrad|wgrad|nchw",
    "matrix products": r"gemm|nvjet|gemv|splitk|cutlass|cublas|step_proj_backward",
    "norm, gate": r"norm|gate|gammabeta|pack_weights|unpack_gradients",
    "optimizer": r"adam|multi_tensor_apply",
    "other": r"",
}


@dataclass
class Result:
    model: str
    case: Case
    mode: str
    images_per_second: float = 0.0
    peak_gib: float = 0.0
    kernel_ms: dict[str, float] | None = None  # GPU milliseconds per step by kernel group
    error: str | None = None

    def cell(self) -> str:
        digits = 1 if self.images_per_second < 100 else 0
        return "failed" if self.error else f"{self.images_per_second:.{digits}f} / {self.peak_gib:.2f}"


def main() -> None:
    options = parse_options()
    device = torch.device(options.device)
    if device.type == "cuda":
        # Use one capturable stream for everything, because cuBLAS keeps 64 MiB for every stream that trains a model.
        torch.cuda.set_stream(torch.cuda.Stream())
    modes = [mode for mode in MODES if mode in options.modes]
    print(f"{described(device)}, commit {git_commit()}, bf16 autocast\n")
    print("| case | model |", *(f"{mode} |" for mode in modes), "best |")
    print("| --- | --- |", *("--- |" for _ in modes), "--- |")
    results: list[list[Result]] = []
    try:
        for case, model in itertools.product(options.cases, options.models):
            results.append(measure(model, case, modes, device))
            print(row(results[-1]), flush=True)
            if options.json:
                save(options.json, results, device)
        for of_model in results:  # profile after all timings, because a profiler may slow down later launches
            note_kernels(of_model, device)
        if options.json:
            save(options.json, results, device)
    except KeyboardInterrupt:
        print("\ninterrupted: the remaining cases were not measured")
    print("\nGPU time of a step in the best mode in milliseconds, by group of kernels, and time of the whole step:\n")
    print("| case | model | mode |", *(f"{group} |" for group in GROUPS), "sum | step |")
    print("| --- | --- | --- |", *("--- |" for _ in GROUPS), "--- | --- |")
    for of_model in results:
        print(profile_row(of_model))
    for result in (r for of_model in results for r in of_model if r.error):
        print(f"\n{result.model}, {result.case}, {result.mode}: {result.error}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=CASES, metavar="TASK,PIXELS,BATCH")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--resolutions", nargs="+", type=int, help="image sizes to train at, instead of --cases")
    parser.add_argument("--json", type=Path, help="write every result to this file, for tables.py")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.resolutions:
        options.cases = [Case("train", size, max(1, PATCHES // (size // 16) ** 2)) for size in options.resolutions]
    options.models = options.models or MODELS
    return options


def described(device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, timm {timm.__version__}"


def save(path: Path, results: list[list[Result]], device: torch.device) -> None:
    """Write the throughput and memory of each model, case and mode, and kernel times of the fastest mode, to a file."""
    rows = []
    for of_model in results:
        rows.append(dict(model=of_model[0].model, **of_model[0].case._asdict()))
        for r in (r for r in of_model if not r.error):
            rows[-1][r.mode] = dict(images_per_second=round(r.images_per_second, 1), peak_gib=round(r.peak_gib, 2))
        best = best_of(of_model)
        if best and best.kernel_ms:
            rows[-1]["kernel_ms"] = {group: round(ms, 2) for group, ms in best.kernel_ms.items() if ms >= 0.005}
            rows[-1]["step_ms"] = round(1e3 * best.case.batch / best.images_per_second, 2)
    write_results(path, rows, device=described(device), commit=git_commit(), command=" ".join(sys.argv))


def measure(model: str, case: Case, modes: list[str], device: torch.device) -> list[Result]:
    """Measure a model's throughput and memory for one benchmark case in each of `modes`, such as eager or compiled."""
    results = []
    for compiled in (False, True):
        step = None
        for mode in (mode for mode in modes if mode.startswith("compiled") == compiled):
            result = Result(model, case, mode)
            results.append(result)
            try:
                step = step or build_step(model, case, compiled, device)
                measure_step(step, result, device)
            except Exception as error:  # any error is reported below the tables
                result.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        del step
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def note_kernels(results: list[Result], device: torch.device) -> None:
    """Profile a step in the fastest mode, and store the milliseconds per kernel group in the result of this mode."""
    if (best := best_of(results)) and device.type == "cuda":
        step = build_step(best.model, best.case, best.mode.startswith("compiled"), device)
        best.kernel_ms = kernel_milliseconds(step)
        del step
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def build_step(
    model_name: str, case: Case, compiled: bool, device: torch.device, amp: bool = True
) -> Callable[[], object]:
    """Return a training or inference step after a few warm-up calls. If `amp` is true, use bf16 autocast."""
    torch.manual_seed(0)
    model = create_model(model_name, img_size=case.img_size).to(device)
    images = torch.randn(case.batch, 3, case.img_size, case.img_size, device=device)
    targets = torch.randint(1000, (case.batch,), device=device)
    parameters = sorted(model.parameters(), key=torch.Tensor.numel, reverse=True)  # by size, as in training
    optimizer = torch.optim.AdamW(parameters, fused=True, capturable=device.type == "cuda")
    model.train(case.task == "train")
    if compiled:
        model = torch.compile(model, fullgraph=True, dynamic=False)

    def train() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def infer() -> torch.Tensor:
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=amp):
            return model(images)

    step = train if case.task == "train" else infer
    for _ in range(3):
        step()
    return step


def measure_step(step: Callable[[], object], result: Result, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    call = capture(step) if result.mode.endswith("graph") else step
    result.images_per_second = result.case.batch / seconds(call, device)
    if device.type == "cuda":
        result.peak_gib = torch.cuda.max_memory_allocated() / 2**30


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """Capture a step as a CUDA graph, and return the function that replays the graph."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay


def seconds(call: Callable[[], object], device: torch.device, rounds: int = 3, least: float = 0.2) -> float:
    """Return the seconds of a call: the median over rounds of about `least` seconds each."""

    def round_of(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    round_of(2)
    calls = max(2, round(least / round_of(2)))
    return statistics.median(round_of(calls) for _ in range(rounds))


def kernel_milliseconds(step: Callable[[], object], steps: int = 3) -> dict[str, float]:
    """Return the GPU milliseconds per step by kernel group. CUDA graphs do not change these times."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    groups = dict.fromkeys(GROUPS, 0.0)
    for event in profiler.key_averages():
        groups[group_of(event.key)] += event.self_device_time_total / 1e3 / steps
    return groups


def group_of(kernel: str) -> str:
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE))


def best_of(results: list[Result]) -> Result | None:
    return max((r for r in results if not r.error), key=lambda r: r.images_per_second, default=None)


def row(results: list[Result]) -> str:
    """Format a row of the table of throughput and memory."""
    model, case, best = results[0].model, results[0].case, best_of(results)
    cells = [str(case), model, *(r.cell() for r in results), best.mode if best else "-"]
    return f"| {' | '.join(cells)} |"


def profile_row(results: list[Result]) -> str:
    """Format a row of the table of GPU time by kernel group."""
    model, case, best = results[0].model, results[0].case, best_of(results)
    times = best.kernel_ms if best and best.kernel_ms else {}
    cells = [str(case), model, best.mode if best else "-"]
    cells += [f"{times[group]:.2f}" if times.get(group) else "-" for group in GROUPS]
    cells.append(f"{sum(times.values()):.2f}")
    cells.append(f"{1e3 * case.batch / best.images_per_second:.2f}" if best else "-")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
