"""Time a block's bidirectional scan, compared with published kernels and with the hardware limits of this GPU.

    python benchmarks/scan.py --json benchmarks/results/h200_scan.json     # then benchmarks/tables.py
    python benchmarks/scan.py --shapes 4,768,1025 --backends cuda --dtype float16

Forward and backward are each captured in a CUDA graph, whose replays are timed with events; the program prints the
median in microseconds. `forward` is the training forward, which also saves states for backward. `backward` computes the
gradients of every input. `times` is the time of the papers' own kernels on an H200, with one call for each direction,
divided by the measured time.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import triton
from tables import results, write_results

from vil.info import git_commit
from vil.kernels.scan import scan_op
from vil.kernels.scan.chunks import chunk_state_count

# Microseconds of the published kernels' forward and backward pass by shape (B, D, L), on an H200 in bf16.
PUBLISHED = {
    "longhorn": {tuple(scan["shape"]): tuple(scan["published_us"]) for scan in results("h200_published")["scans"]},
    "selective": {
        (128, 384, 197): (772, 2465),
        (128, 768, 197): (1516, 4820),
        (1, 768, 197): (44, 131),
        (8, 768, 6085): (2174, 8281),
    },
}
# fp32 instructions per state element: update and output (forward); recomputation and gradients (backward)
INSTRUCTIONS = {"longhorn": (4, 17), "selective": (5, 19)}
STATE_SIZE = 16
LANES = 128  # fp32 units per streaming multiprocessor
REVERSE = [False, True]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="*", type=lambda s: tuple(map(int, s.split(","))), help="B,D,L")
    parser.add_argument("--backends", nargs="*", default=["cuda", "triton"])
    parser.add_argument("--recurrences", nargs="*", default=["longhorn", "selective"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="write every result to this file, for tables.py")
    options = parser.parse_args()

    bandwidth, clock = copy_bandwidth(), max_clock()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {cuda_core()}"
    print(f"{device}\nPython {platform.python_version()}, commit {git_commit()}, {options.dtype}, N = {STATE_SIZE}")
    print(
        f"floors: copy {bandwidth / 1e12:.2f} TB/s as measured here, fp32 issue at the maximal {clock / 1e9:.2f} GHz\n"
    )
    columns = [f"{name}, us | times | of fp32 floor | of byte floor" for name in ("forward", "backward")]
    print(f"| recurrence | B, D, L | backend | {' | '.join(columns)} |\n|{' --- |' * 11}")
    rows = []
    for recurrence in options.recurrences:
        for shape, backend in itertools.product(options.shapes or PUBLISHED[recurrence], options.backends):
            rows.append(measure(recurrence, shape, backend, getattr(torch, options.dtype), bandwidth, clock))
            print(line(rows[-1]), flush=True)
    if options.json:
        write_results(options.json, rows, device=device, commit=git_commit(), command=" ".join(sys.argv))


def measure(recurrence, shape, backend, dtype, bandwidth: float, clock: float) -> dict:
    times = time_backend(backend, recurrence, *shape, dtype)
    issue, moved = zip(*floors(recurrence, *shape, dtype, bandwidth, clock))
    found = dict(recurrence=recurrence, shape=list(shape), backend=backend)
    found |= {f"{name}_us": round(us, 1) for name, us in zip(("forward", "backward"), times)}
    found["of_fp32_floor"] = [round(least / us, 2) for least, us in zip(issue, times)]
    return found | {"of_byte_floor": [round(least / us, 2) for least, us in zip(moved, times)]}


def line(row: dict) -> str:
    cells = [row["recurrence"], ", ".join(map(str, row["shape"])), row["backend"]]
    published = PUBLISHED[row["recurrence"]].get(tuple(row["shape"]), (None, None))
    for i, us in enumerate((row["forward_us"], row["backward_us"])):
        times = f"{published[i] / us:.1f}" if published[i] else "-"
        cells += [f"{us:.1f}", times, f"{row['of_fp32_floor'][i]:.2f}", f"{row['of_byte_floor'][i]:.2f}"]
    return f"| {' | '.join(cells)} |"


def time_backend(backend: str, recurrence: str, B: int, D: int, L: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the time of the forward and of the backward pass of the scan with a backend, in microseconds."""
    g = torch.Generator("cuda").manual_seed(0)

    def randn(*shape, dtype=dtype):
        return torch.randn(shape, generator=g, device="cuda", dtype=dtype)

    G, N = len(REVERSE), STATE_SIZE
    tensors = [randn(G, B, L, D), randn(G, B, L, D), randn(G, B, L, N), randn(G, B, L, N)]
    tensors.append(-3 * randn(G, D, N, dtype=torch.float32).abs() if recurrence == "selective" else None)
    tensors += [randn(G, D, dtype=torch.float32), randn(G, D, dtype=torch.float32)]
    dy = randn(G, B, L, D)
    _, states = scan_op.scan(backend, recurrence, *tensors, REVERSE, True)
    forward = microseconds(lambda: scan_op.scan(backend, recurrence, *tensors, REVERSE, True))
    backward = microseconds(lambda: scan_op.scan_backward(backend, recurrence, dy, *tensors, states, REVERSE))
    return forward, backward


def microseconds(f, calls: int = 10, replays: int = 11) -> float:
    """Return the median time of a call over replays of a CUDA graph with several calls."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            f()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def floors(recurrence, B, D, L, dtype, bandwidth: float, clock: float) -> list[tuple[float, float]]:
    """Return lower bounds per pass in microseconds: time to issue the fp32 instructions, and time to move the bytes."""
    G, size = len(REVERSE), dtype.itemsize
    elements, keys = G * B * L * D, G * B * L * STATE_SIZE
    kept = G * B * D * chunk_state_count(L) * STATE_SIZE * 4
    per_second = torch.cuda.get_device_properties(0).multi_processor_count * LANES * clock
    forward_bytes = (3 * elements + 2 * keys) * size + kept
    backward_bytes = (5 * elements + 4 * keys) * size + kept
    return [
        (elements * STATE_SIZE * instructions / per_second * 1e6, moved / bandwidth * 1e6)
        for instructions, moved in zip(INSTRUCTIONS[recurrence], (forward_bytes, backward_bytes))
    ]


def copy_bandwidth() -> float:
    """Return the bandwidth of a large copy on this GPU, in bytes read and written per second."""
    source, target = torch.ones(2, 2**29, device="cuda")
    return 2 * source.nbytes / microseconds(lambda: torch.neg(source, out=target)) * 1e6


def max_clock() -> float:
    """Return the maximum clock in hertz that the driver reports."""
    query = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 1e6


def cuda_core() -> str:
    try:
        import cuda.core
    except ImportError:
        return "no cuda.core"
    return f"cuda.core {cuda.core.__version__}"


if __name__ == "__main__":
    main()
