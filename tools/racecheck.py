"""Runs NVIDIA's racecheck on kernels that are right, on the same with a planted race, and on two of our own.

    python3 tools/racecheck.py [--sanitizer PATH] [word ...]  # all, or those with a word in their names
    compute-sanitizer --tool racecheck --print-limit 20 python3 tools/racecheck.py --run block  # or block:racy

In the small kernels two warps write slots of shared memory and two others read what another thread wrote; PATTERNS says
how they wait for each other. Where a race is planted, readers read a slot first and wait for it then: as many barriers
are passed as before, so nothing hangs. Whoever changes barriers looks here for the pattern, or adds it: where racecheck
tells right from racy its word is worth something. research/notebooks/2026-11-races.md has what it said.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np

LIMIT = 60  # seconds for one kernel
STEPS, SLOT_WORDS, CTAS = 8, 256, 2

KERNEL = Path(__file__).with_suffix(".cu")

EMPTY_SLOT = "wait_for(EMPTY, PHASE ^ 1); "


def on_mbarriers(fill: str, **others: object) -> dict:
    return dict(PRODUCE=EMPTY_SLOT + fill, WAIT="wait_for(FULL, PHASE);", DONE="give_back(i);", MBARRIERS=1) | others


DEFAULTS = dict(
    SLOTS=2, STEPS=STEPS, LIKE_SCAN=0, MBARRIERS=0, FULL_COUNT="PRODUCERS", EVERY_LANE=0, BEFORE="", DONE=""
)
PATTERNS: dict[str, tuple[str, dict]] = {
    "block": ("__syncthreads in each role's loop", dict(PRODUCE="fill(i); __syncthreads();", WAIT="__syncthreads();")),
    "scan": ("__syncthreads at three places, as in forward_mma", dict(LIKE_SCAN=1)),
    "copy": (
        "cp.async two steps ahead, wait_group, __syncthreads",
        dict(
            BEFORE="start_copy(0); start_copy(1);", WAIT="__syncthreads();", SLOTS=4,
            PRODUCE="wait_for_copies<1>(); __syncthreads(); start_copy(i + 2);",
        ),
    ),
    "mbarrier": ("stores, mbarriers", on_mbarriers("fill(i); arrive(FULL);")),
    "mbarrier_lanes": (
        "the same, every lane that has read arrives, not one for its warp",
        on_mbarriers("fill(i); arrive(FULL);", EVERY_LANE=1),
    ),
    "copy_mbarrier": ("cp.async that arrives at mbarriers", on_mbarriers("start_copy(i); arrive_when_copied(FULL);")),
    "bulk": (
        "bulk copies, mbarriers",
        on_mbarriers("if (thread == 0) start_bulk_copy(i);", FULL_COUNT=1),
    ),
}  # fmt: skip

SCAN, GATE = "scan/forward_mma", "block/gate_outproj_sm90"
EVERY_LANE = [
    (r"lane == 0\) arrive\((\w+\.empty)", r"true) arrive(\1"), (r"\? 4 : 32\b", "? 128 : 32"),
    (r"\? GROUPS \* 4 : 1\b", "? 256 : 1"),
]  # fmt: skip
# name: (kernel, what it is, patterns in its text, each of which must be there, and what replaces them)
PROJECT: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "forward_mma": (SCAN, "as it is", []),
    "forward_mma:racy": (SCAN, "a tile's first factors are read ahead of the barrier", [
        (r"__syncthreads\(\);(\s+[^\n]*next_channels;\s+\}\s+[^\n]*read_factors\(pair \+ 2 - PAIRS[^\n]*\n)",
         r"\1if (pair + 2 == PAIRS) __syncthreads();" "\n"),
    ]),
    "gate_outproj": (GATE, "as it is", []),
    "gate_outproj_lanes": (GATE, "every lane that has read arrives, not one for its warp", EVERY_LANE),
    "gate_outproj_lanes:racy": (GATE, "the same, and nobody waits for y and z", [
        *EVERY_LANE, (r"wait_for\(\w+\.full\(\), \w+\.phase\(\)\);(\s+unsigned slot\b)", r"\1"),
    ]),
}  # fmt: skip


def names() -> list[str]:
    return [*(name + race for name in PATTERNS for race in ("", ":racy")), *PROJECT]


def source(name: str) -> str:
    from vil.kernels.cuda import compiler

    if name not in PROJECT:
        macros = DEFAULTS | PATTERNS[name.removesuffix(":racy")][1] | dict(RACY=int(name.endswith(":racy")))
        shared = [(compiler.SOURCES / f"cuda/{file}.cuh").read_text() for file in ("elements", "async_copies", "sm90")]
        defines = "".join(f"#define {key} {value}\n" for key, value in macros.items())
        return defines + re.sub("#include .*", "", "".join(shared)) + KERNEL.read_text()
    text = compiler.source(PROJECT[name][0])
    for pattern, new in PROJECT[name][2]:
        text, count = re.subn(pattern, new, text)
        if not count:
            raise SystemExit(f"{name}: its source no longer has {pattern}")
    return text


def cubin(name: str, arch: str, macros: dict | None = None) -> bytes:
    """With lines, of a file that is written for the table to quote."""
    from cuda.core import Program, ProgramOptions

    path = Path(os.environ.get("RACECHECK_FOLDER", tempfile.gettempdir()), f"{name.replace(':', '-')}.cu")
    text = source(name)
    path.write_text(text)
    defined = [(key, str(value)) for key, value in (macros or {}).items()] or None
    options = ProgramOptions(name=str(path), arch=arch, std="c++17", lineinfo=True, define_macro=defined)
    return bytes(Program(text, "c++", options).compile("cubin").code)


def run(name: str) -> None:
    if name not in PROJECT:
        right = run_pattern(name)
    else:
        from vil.kernels.cuda import compiler

        def cached_cubin(file: str, arch: str, macros: tuple) -> bytes:
            assert file == PROJECT[name][0]
            return cubin(name, arch, dict(macros))

        with mock.patch.object(compiler, "cached_cubin", cached_cubin):
            right = (scan_is_right if PROJECT[name][0] == SCAN else gate_is_right)()
    print("result:", "right" if right else "wrong", flush=True)


def check(results):
    error, *values = results
    if error.value:
        raise RuntimeError(error)
    return values[0] if values else None


def run_pattern(name: str) -> bool:
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    device = Device(0)
    device.set_current()
    major, minor = device.compute_capability
    code = cubin(name, f"sm_{major}{minor}")
    words = np.random.default_rng(0).integers(1, 1 << 20, (STEPS, SLOT_WORDS), dtype=np.int32)
    sums = np.zeros((CTAS, 64), dtype=np.uint32)
    inputs, outputs = (check(driver.cuMemAlloc(a.nbytes)) for a in (words, sums))
    check(driver.cuMemcpyHtoD(inputs, words.ctypes.data, words.nbytes))
    slots = PATTERNS[name.removesuffix(":racy")][1].get("SLOTS", 2)
    config = LaunchConfig(grid=CTAS, block=128, shmem_size=slots * (4 * SLOT_WORDS + 16))
    stream = device.create_stream()
    launch(stream, config, ObjectCode.from_cubin(code).get_kernel("pipeline"), int(inputs), int(outputs))
    stream.sync()
    check(driver.cuMemcpyDtoH(sums.ctypes.data, outputs, sums.nbytes))
    of_steps = words.sum(1, dtype=np.int64) * np.arange(1, STEPS + 1)
    return bool((sums.sum(1, dtype=np.int64) % 2**32 == of_steps.sum() % 2**32).all())


def scan(device: str) -> tuple:
    """The smaller variant, one CTA and five tiles for each direction: y, and what it is of."""
    import torch
    from vil.kernels.scan import cuda_scan as launch
    from vil.kernels.scan import heuristics

    variants = heuristics.forward_variants("longhorn", 16, 2)
    variant = [v for v in variants if isinstance(v, heuristics.ForwardMma)][-1]
    torch.manual_seed(0)
    G, B, L, D, N = 2, 1, 70, 48, 16
    x, logits = torch.randn(2, G, B, L, D).bfloat16()
    k, q = torch.randn(2, G, B, L, N).bfloat16()
    skip, bias = torch.randn(2, G, D)
    inputs = x, logits, k, q, None, skip, bias
    put = [t if t is None else t.to(device) for t in inputs]
    y, _ = launch.scan_forward("longhorn", *put, [False, True], True, heuristics.Schedule(variant, 2))
    return y, inputs


def scan_is_right() -> bool:
    """Checked against the definition."""
    import torch
    from vil.kernels.scan import naive

    y, (x, step_logits, k, q, _, skip, bias) = scan("cuda")
    double = [t.double() for t in (x, step_logits, k, q, skip, bias)]
    truth = torch.stack([naive.longhorn(*(t[g] for t in double), reverse=bool(g)) for g in range(len(x))])
    return bool(((y.cpu().double() - truth).abs() < 0.02 * (1 + truth.abs())).all())


def gate(device: str) -> tuple:
    """One CTA, whose two groups take 50 tokens twice; weights of one value, which need no order. Results, and truth."""
    import torch
    from vil.kernels.block import launch
    from vil.kernels.cuda import hardware

    torch.manual_seed(0)
    B, L, C, D, eps = 2, 100, 192, 384, 1e-5
    y, uz, x = torch.randn(2, B, L, D).bfloat16(), torch.randn(B, L, 2 * D).bfloat16(), torch.randn(B * L, C)
    scales = torch.tensor([1.0, 2.0])
    mean, z = y.float().mean(0), uz[..., D:].float()
    gated = scales[:, None, None] * mean * torch.nn.functional.silu(z)
    out = x + gated.flatten(0, 1).sum(1, keepdim=True) / 64
    norm = out * torch.rsqrt((out * out).mean(1, keepdim=True) + eps)
    x, y, uz, scales, weights = (t.to(device) for t in (x, y, uz, scales, torch.full((C, D), 1 / 64).bfloat16()))
    with mock.patch.multiple(hardware, multiprocessors=lambda device: 1, is_hopper=lambda device: True):
        found, means, norms = launch.gate_outproj(x, y, uz[..., D:], scales, weights, weights, True, eps)
    return (found, means, norms[0]), (out, mean, norm)


def gate_is_right() -> bool:
    found, truth = gate("cuda")
    return all(bool(((a.cpu().float() - b).abs() < 0.03 * (1 + b.abs())).all()) for a, b in zip(found, truth))


def sanitizer() -> str:
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(path).exists():
        raise SystemExit(
            "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin; --sanitizer says where it is"
        )
    return path


def racecheck(path: str, name: str, folder: str) -> str:
    """Its output for one kernel."""
    log = Path(folder, f"{name.replace(':', '-')}.log")
    command = [path, "--tool", "racecheck", "--print-limit", "1000", sys.executable, __file__, "--run", name]
    environment = os.environ | {"RACECHECK_FOLDER": folder, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer's own child too
            process.wait()
            file.write(f"\nstopped after {LIMIT} s\n")
    return log.read_text(errors="replace")


def places(output: str, folder: str) -> list[str]:
    """The pairs of accesses that are reported, with their lines of source."""

    def quoted(access: str) -> str:
        kind, at = access[0], re.search(r"in (\S+\.cu):(\d+)", access)
        if not at:
            return f"{kind} {access[-60:]}"
        lines = Path(folder, Path(at[1]).name).read_text().splitlines()
        return f"{kind} {at[2]}: {lines[int(at[2]) - 1].strip()[:90]}"

    found, first = [], ""
    for line in output.splitlines():
        if begins := re.search(r"Race reported between (\w+ access .*)", line):
            first = quoted(begins[1])
        elif second := re.search(r"and (\w+ access .*?) \[(\d+) hazards?\]$", line):
            found.append(f"{first}  |  {quoted(second[1])}  |  {second[2]} bytes")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only kernels with one of them in their names")
    parser.add_argument("--run", metavar="NAME", help="run this kernel here and say whether its result is right")
    parser.add_argument("--sanitizer", metavar="PATH", help="another compute-sanitizer than the one found")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--folder", help="where logs and sources go; a temporary one otherwise")
    arguments = parser.parse_args()
    if arguments.run:
        if arguments.run not in names():
            raise SystemExit(f"no {arguments.run}; there are {', '.join(names())}")
        return run(arguments.run)
    chosen = [n for n in names() if not arguments.words or any(word in n for word in arguments.words)]
    folder = arguments.folder or tempfile.mkdtemp(prefix="racecheck-")
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = arguments.sanitizer or sanitizer()
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip()
    print(f"{version}\nlogs and sources are in {folder}\n", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outputs = dict(zip(chosen, pool.map(lambda name: racecheck(path, name, folder), chosen)))
    print("| kernel | how | a race | result | racecheck |\n| --- | --- | --- | --- | --- |")
    for name, output in outputs.items():
        how = PROJECT[name][1] if name in PROJECT else PATTERNS[name.removesuffix(":racy")][0]
        summary = re.search(r"RACECHECK SUMMARY: (.*)", output)
        result = re.search(r"result: (\w+)", output)
        said = summary[1] if summary else "no summary: " + " / ".join(output.split("\n")[-4:])[-200:]
        racy = "planted" if name.endswith(":racy") else "none"
        print(f"| {name} | {how} | {racy} | {result[1] if result else '-'} | {said} |")
    for name, output in outputs.items():
        if found := places(output, folder)[:8]:
            print(f"\n{name}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
