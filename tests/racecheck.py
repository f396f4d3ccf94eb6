"""What NVIDIA's racecheck says of kernels that are right, of the same with a planted race, and of two of our own.

    python3 tests/racecheck.py [--sanitizer PATH] [word ...]  # all, or those with a word in their names, as a table
    compute-sanitizer --tool racecheck --print-limit 20 python3 tests/racecheck.py --run block  # one; `block:racy` too
    python3 tests/racecheck.py --compile FOLDER  # needs no GPU; `--cubins FOLDER` then runs what this compiler made

In the small kernels two warps write slots of shared memory and two others read what another thread wrote; PATTERNS says
how they wait for each other. Where a race is planted, readers read a slot first and wait for it then: as many barriers
are passed as before, so nothing hangs. Ours are those of which racecheck reports hazards: as they are, with barriers of
other kinds, and with a race of the same sort planted.
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
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np

LIMIT = 60  # seconds for one kernel
STEPS, SLOT_WORDS, CTAS = 8, 256, 2

KERNEL = r"""
constexpr int PRODUCERS = 64, THREADS = 128, WORDS = 256;
#define DEVICE static __device__ __forceinline__
DEVICE unsigned address(const void *p) { return __cvta_generic_to_shared(p); }
DEVICE void named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void unaligned_sync() { asm volatile("barrier.cta.sync 0;" ::: "memory"); }
static __device__ __noinline__ void sync_in_function() { __syncthreads(); }

DEVICE void copy(int *to, const int *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

struct Barrier { unsigned long long state; };
DEVICE void init(Barrier &b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&b)), "r"(count) : "memory");
}
DEVICE void arrive(Barrier &b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&b)) : "memory");
}
DEVICE void arrive_when_copied(Barrier &b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(&b)) : "memory");
}
DEVICE void wait_for(Barrier &b, int phase) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" ::"r"(address(&b)), "r"(phase) : "memory");
}
DEVICE void copy_bulk(int *to, const int *from, int bytes, Barrier &b) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&b)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                 "r"(address(to)), "l"(from), "r"(bytes), "r"(address(&b)) : "memory");
}
DEVICE void load_matrices(int (&m)[4], const int *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address(row)) : "memory");
}

struct Slots {
    alignas(128) int at[SLOTS][WORDS];
    Barrier full[SLOTS], empty[SLOTS];
};
#define FULL slots.full[i % SLOTS]
#define EMPTY slots.empty[i % SLOTS]
#define PHASE (i / SLOTS % 2)

extern "C" __global__ void __launch_bounds__(THREADS) pipeline(const int *in, unsigned *out) {
    extern __shared__ __align__(128) char shared[];
    Slots &slots = *reinterpret_cast<Slots *>(shared);
    int thread = threadIdx.x, lane = thread % 32, half = thread / 32 - 2;  // of a slot, which a consuming warp reads
    unsigned sum = 0;
#if MBARRIERS
    if (thread == 0)
        for (int s = 0; s < SLOTS; s++) init(slots.full[s], FULL_COUNT), init(slots.empty[s], 2);
    __syncthreads();
#endif
    // 16 bytes of a slot are a producer's
    auto fill = [&](int i) {
        *reinterpret_cast<int4 *>(&slots.at[i % SLOTS][4 * thread]) =
            *reinterpret_cast<const int4 *>(in + i * WORDS + 4 * thread);
    };
    auto start_copy = [&](int i) {
        if (i < STEPS) copy(&slots.at[i % SLOTS][4 * thread], in + i * WORDS + 4 * thread);
        commit();
    };
    // a consumer takes what another thread wrote, or words of its warp's half by ldmatrix
    auto word = [&](int i, int w) {
        return unsigned(*const_cast<volatile int *>(&slots.at[i % SLOTS][(thread + 33) % 64 * 4 + w]));
    };
    auto read = [&](int i) { sum += (i + 1) * (word(i, 0) + word(i, 1) + word(i, 2) + word(i, 3)); };
    auto read_matrices = [&](int i) {
        int m[4];
        load_matrices(m, &slots.at[i % SLOTS][half * 128 + lane * 4]);
        sum += (i + 1) * unsigned(m[0] + m[1] + m[2] + m[3]);
    };
    // puts three times each word in its place, and then takes what other lanes of the warp put there
    auto overwrite = [&](int i) {
        int *words = &slots.at[i % SLOTS][half * 128], m[4];
        load_matrices(m, words + lane * 4);
        for (int j = 0; j < 4; j++) words[32 * j + lane] = 3 * m[j];
        __syncwarp();
        int4 v = *reinterpret_cast<const int4 *>(words + (lane + 1) % 32 * 4);
        sum += (i + 1) * unsigned(v.x + v.y + v.z + v.w);
    };
    auto give_back = [&](int i) {
        __syncwarp();
        if (lane == 0) arrive(EMPTY);
    };
#if SHAPE == 0  // a loop for each role
    if (thread < PRODUCERS) {
        BEFORE
#pragma unroll 1
        for (int i = 0; i < STEPS; i++) { PRODUCE }
    } else {
#pragma unroll 1
        for (int i = 0; i < STEPS; i++) {
            if (RACY) { READ }
            WAIT
            if (!RACY) { READ }
            DONE
        }
    }
#elif SHAPE == 1  // one loop for both
#pragma unroll 1
    for (int i = 0; i < STEPS; i++) {
        if (thread < PRODUCERS) fill(i);
        if (RACY && thread >= PRODUCERS) read(i);
        __syncthreads();
        if (!RACY && thread >= PRODUCERS) read(i);
    }
#else  // as in the scan: one producer is a step ahead and meets the others' barrier at the start of its loop, the
       // other at its end, and consumers amid theirs; before that the producers meet at barriers of their own
    if (thread < PRODUCERS / 2) {
        named_sync(1, PRODUCERS);
        fill(0);
        named_sync(1, PRODUCERS);
#pragma unroll 1
        for (int i = 1; i <= STEPS; i++) {
            SYNC;
            if (i < STEPS) fill(i);
        }
        SYNC;
    } else if (thread < PRODUCERS) {
        named_sync(1, PRODUCERS);
        named_sync(1, PRODUCERS);
#pragma unroll 1
        for (int i = 0;; i++) {
            if (i < STEPS) fill(i);
            SYNC;
            if (i == STEPS) break;
        }
    } else {
        SYNC;
        unsigned first = word(0, 0);
#if SHAPE == 2
#pragma unroll 1
        for (int i = 0; i + 1 < STEPS; i++) {
            sum += (i + 1) * (first + word(i, 1) + word(i, 2) + word(i, 3));
            if (RACY) first = word(i + 1, 0);
            SYNC;
            if (!RACY) first = word(i + 1, 0);
        }
        sum += STEPS * (first + word(STEPS - 1, 1) + word(STEPS - 1, 2) + word(STEPS - 1, 3));
#else  // the barrier under a condition, so that a predicate (3) or a branch (4) guards it
#pragma unroll 1
        for (int i = 0; i < STEPS; i++) {
            sum += (i + 1) * (first + word(i, 1) + word(i, 2) + word(i, 3));
            if (i + 1 < STEPS) {
                if (RACY) first = word(i + 1, 0);
                SYNC;
                if (!RACY) first = word(i + 1, 0);
#if SHAPE == 4
#pragma unroll 1
                for (int wait = 0; wait < 4; wait++) __nanosleep(20);
#endif
            }
        }
#endif
        SYNC;
    }
#endif
    if (thread >= PRODUCERS) out[blockIdx.x * PRODUCERS + thread - PRODUCERS] = sum;
}
"""

EMPTY_SLOT = "wait_for(EMPTY, PHASE ^ 1); "


def loops(produce: str, wait: str, done: str = "", read: str = "read(i);", before: str = "", **others: object) -> dict:
    return dict(SHAPE=0, PRODUCE=produce, WAIT=wait, DONE=done, READ=read, BEFORE=before) | others


def on_block(sync: str, **others: object) -> dict:
    """One barrier a step for all, at which slots alternate."""
    return loops(f"fill(i); {sync};", f"{sync};", **others)


def on_mbarriers(fill: str, **others: object) -> dict:
    return loops(EMPTY_SLOT + fill, "wait_for(FULL, PHASE);", "give_back(i);", MBARRIERS=1, **others)


PATTERNS: dict[str, tuple[str, dict]] = {
    "block": ("__syncthreads in each role's loop", on_block("__syncthreads()")),
    "one_loop": ("__syncthreads at one place", dict(SHAPE=1)),
    "function": ("__syncthreads in a function that is not inlined", on_block("sync_in_function()")),
    "count": ("bar.sync 0 with the count of threads", on_block("named_sync(0, THREADS)")),
    "named": ("bar.sync 1 with the count of threads", on_block("named_sync(1, THREADS)")),
    "unaligned": ("barrier.cta.sync, which is not .aligned", on_block("unaligned_sync()")),
    "subset": (
        "a barrier of the producers ahead of everybody's",
        loops("fill(i); named_sync(1, PRODUCERS); __syncthreads();", "__syncthreads();"),
    ),
    "arrive": (
        "bar.arrive and bar.sync on four barriers",
        loops(
            "if (i >= SLOTS) named_sync(3 + i % SLOTS, THREADS); fill(i); named_arrive(1 + i % SLOTS, THREADS);",
            "named_sync(1 + i % SLOTS, THREADS);",
            "if (i + SLOTS < STEPS) named_arrive(3 + i % SLOTS, THREADS);",
        ),
    ),
    "ldmatrix": ("__syncthreads, read by ldmatrix", on_block("__syncthreads()", read="read_matrices(i);")),
    "scan": ("__syncthreads as the scan has it", dict(SHAPE=2, SYNC="__syncthreads()")),
    "scan_predicate": ("the same under a predicate", dict(SHAPE=3, SYNC="__syncthreads()")),
    "scan_branch": ("the same under a branch", dict(SHAPE=4, SYNC="__syncthreads()")),
    "scan_count": ("the same with bar.sync 0 and the count", dict(SHAPE=4, SYNC="named_sync(0, THREADS)")),
    "scan_named": ("the same with bar.sync 2 and the count", dict(SHAPE=4, SYNC="named_sync(2, THREADS)")),
    "scan_unaligned": ("the same with barrier.cta.sync", dict(SHAPE=4, SYNC="unaligned_sync()")),
    "scan_function": ("the same in a function", dict(SHAPE=4, SYNC="sync_in_function()")),
    "copy": (
        "cp.async two steps ahead, wait_group, __syncthreads",
        loops(
            "wait_for_copies<1>(); __syncthreads(); start_copy(i + 2);", "__syncthreads();",
            before="start_copy(0); start_copy(1);", SLOTS=4,
        ),
    ),
    "mbarrier": ("stores, mbarriers", on_mbarriers("fill(i); arrive(FULL);")),
    "copy_wait_mbarrier": (
        "cp.async, wait_group, mbarriers", on_mbarriers("start_copy(i); wait_for_copies<0>(); arrive(FULL);")
    ),
    "copy_mbarrier": ("cp.async that arrives at mbarriers", on_mbarriers("start_copy(i); arrive_when_copied(FULL);")),
    "copy_mbarrier_ldmatrix": (
        "the same, read by ldmatrix",
        on_mbarriers("start_copy(i); arrive_when_copied(FULL);", read="read_matrices(i);"),
    ),
    "copy_mbarrier_overwrite": (
        "the same, overwritten by the readers",
        on_mbarriers("start_copy(i); arrive_when_copied(FULL);", read="overwrite(i);"),
    ),
    "bulk": (
        "bulk copies, mbarriers",
        on_mbarriers(
            "if (thread == 0) copy_bulk(slots.at[i % SLOTS], in + i * WORDS, WORDS * 4, FULL);", FULL_COUNT=1
        ),
    ),
}  # fmt: skip

SCAN, GATE = "scan/forward_mma", "block/gate_outproj_sm90"
SYNC = "__syncthreads()"
SCAN_BARRIER = """                    __syncthreads();
                    here = next_states, channels = next_channels;
                }
                read_factors(pair + 2 - PAIRS);
"""
GATE_WAIT = """                wait_for(inputs.full(), inputs.phase());
                unsigned slot = slots + inputs.stage() * SLOT, a[2][4];
"""
OWN_FUNCTION = """static __device__ __noinline__ void sync_block() { __syncthreads (); }
DEVICE void sync_stagers()"""
# name: (kernel, what it is, replacements in its text, of which each must be there)
PROJECT: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "forward_mma": (SCAN, "as it is", []),
    "forward_mma_count": (SCAN, "bar.sync 0 with the count", [
        (SYNC, 'asm volatile("bar.sync 0, %0;" ::"n"(THREADS) : "memory")'),
    ]),
    "forward_mma_named": (SCAN, "bar.sync 2 with the count", [
        (SYNC, 'asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory")'),
    ]),
    "forward_mma_unaligned": (SCAN, "barrier.cta.sync 0", [
        (SYNC, 'asm volatile("barrier.cta.sync 0;" ::: "memory")'), ('"bar.sync 1,', '"barrier.cta.sync 1,'),
    ]),
    "forward_mma_function": (SCAN, "in a function", [
        (SYNC, "sync_block()"), ("DEVICE void sync_stagers()", OWN_FUNCTION),
    ]),
    "forward_mma_twice": (SCAN, "each barrier twice", [(SYNC, "(__syncthreads (), __syncthreads ())")]),
    "forward_mma_late": (SCAN, "consumers wait 20 us behind theirs", [
        (SCAN_BARRIER, SCAN_BARRIER.replace("__syncthreads();", "__syncthreads(); __nanosleep(20000);")),
    ]),
    "forward_mma_early": (SCAN, "producers wait 20 us ahead of theirs", [
        ("        __syncthreads();  // behind the", "        __nanosleep(20000); __syncthreads();  // behind the"),
    ]),
    "forward_mma:racy": (SCAN, "reads ahead of the barrier", [
        (SCAN_BARRIER, """                    here = next_states, channels = next_channels;
                }
                read_factors(pair + 2 - PAIRS);
                if (pair + 2 == PAIRS) __syncthreads();
"""),
    ]),
    "gate_outproj": (GATE, "as it is", []),
    "gate_outproj:racy": (GATE, "reads ahead of the mbarrier", [
        (GATE_WAIT, """                unsigned slot = slots + inputs.stage() * SLOT, a[2][4];
                load_matrices(a[0], slot + of_matrix);
                wait_for(inputs.full(), inputs.phase());
"""),
    ]),
}  # fmt: skip


def names() -> list[str]:
    return [*(name + race for name in PATTERNS for race in ("", ":racy")), *PROJECT]


def description(name: str) -> str:
    if name in PROJECT:
        return PROJECT[name][1]
    return PATTERNS[name.removesuffix(":racy")][0]


def pattern_source(name: str) -> str:
    macros = dict(SLOTS=2, MBARRIERS=0, FULL_COUNT="PRODUCERS", STEPS=STEPS, RACY=int(name.endswith(":racy")))
    macros |= PATTERNS[name.removesuffix(":racy")][1]
    return "".join(f"#define {key} {value}\n" for key, value in macros.items()) + KERNEL


def project_source(name: str) -> str:
    from vil.kernels.cuda import compiler

    text = compiler.source(PROJECT[name][0])
    for old, new in PROJECT[name][2]:
        if old not in text:
            raise SystemExit(f"{name}: the source no longer has\n{old}")
        text = text.replace(old, new)
    return text.replace("__syncthreads ()", SYNC)


def cubin(name: str, text: str, arch: str, macros: dict | None = None) -> bytes:
    """With lines, of a file that is written for the table to quote."""
    file = name.replace(":", "-")
    path = Path(os.environ.get("RACECHECK_FOLDER", tempfile.gettempdir()), f"{file}.cu")
    path.write_text(text)
    if compiled := os.environ.get("RACECHECK_CUBINS"):
        return Path(compiled, f"{file}.cubin").read_bytes()
    from cuda.core import Program, ProgramOptions

    defined = [(key, str(value)) for key, value in (macros or {}).items()] or None
    options = ProgramOptions(name=str(path), arch=arch, std="c++17", lineinfo=True, define_macro=defined)
    return bytes(Program(text, "c++", options).compile("cubin").code)


def compile_all(chosen: list[str], folder: str) -> None:
    os.environ["RACECHECK_FOLDER"] = folder
    for name in chosen:
        if name not in PROJECT:
            code = cubin(name, pattern_source(name), "sm_90")
        elif PROJECT[name][0] == SCAN:
            code = cubin(name, project_source(name), "sm_90", scan_macros())
        else:
            code = cubin(name, project_source(name), "sm_90a", gate_macros())
        Path(folder, name.replace(":", "-") + ".cubin").write_bytes(code)
        print(name, len(code), "bytes")


def run(name: str) -> None:
    of = run_pattern if name not in PROJECT else run_scan if PROJECT[name][0] == SCAN else run_gate
    print("result:", "right" if of(name) else "wrong", flush=True)


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
    code = cubin(name, pattern_source(name), f"sm_{major}{minor}")
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
    of_steps = words.sum(1, dtype=np.int64) * np.arange(1, STEPS + 1) * (3 if "overwrite" in name else 1)
    return bool((sums.sum(1, dtype=np.int64) % 2**32 == of_steps.sum() % 2**32).all())


def own_cubins(name: str):
    """A context in which the project's launches run what `cubin` compiles for this name."""
    from vil.kernels.cuda import compiler

    def cached_cubin(file: str, arch: str, macros: tuple) -> bytes:
        assert file == PROJECT[name][0]
        return cubin(name, project_source(name), arch, dict(macros))

    return mock.patch.object(compiler, "cached_cubin", cached_cubin)


def scan(device: str) -> tuple:
    """The smaller variant, one CTA and five tiles for each direction: y, and what it is of."""
    import torch
    from vil.kernels.scan import heuristics, launch

    *_, variant = [v for v in heuristics.forward_variants("longhorn", 16, 2) if hasattr(v, "roles")]
    torch.manual_seed(0)
    G, B, L, D, N = 2, 1, 70, 48, 16
    x, logits = torch.randn(2, G, B, L, D).bfloat16()
    k, q = torch.randn(2, G, B, L, N).bfloat16()
    skip, bias = torch.randn(2, G, D)
    inputs = x, logits, k, q, None, skip, bias
    put = [t if t is None else t.to(device) for t in inputs]
    y, _ = launch.forward("longhorn", *put, [False, True], True, (variant, 2))
    return y, inputs


def run_scan(name: str) -> bool:
    """Checked against the recurrence token by token."""
    import torch

    with own_cubins(name):
        y, (x, logits, k, q, _, skip, bias) = scan("cuda")
    G, B, L, D = x.shape
    truth = torch.zeros(G, B, L, D, dtype=torch.double)
    for g, tokens in ((0, range(L)), (1, reversed(range(L)))):
        S = torch.zeros(B, k.shape[3], D, dtype=torch.double)
        for t in tokens:
            x_t, logits_t, k_t, q_t = (v[g, :, t].double() for v in (x, logits, k, q))
            squares = (k_t * k_t)[:, :, None]
            eps = 1 / (1 + torch.exp(-logits_t - bias[g])[:, None] + squares.sum(1, keepdim=True))
            S = (1 - eps * squares) * S + eps * k_t[:, :, None] * x_t[:, None]
            truth[g, :, t] = (S * q_t[:, :, None]).sum(1) + skip[g] * x_t
    return bool(((y.cpu().double() - truth).abs() < 0.02 * (1 + truth.abs())).all())


def scan_macros() -> dict:
    from vil.kernels.scan import launch

    with mock.patch.object(launch, "launch") as launched:
        scan("cpu")
    file, _, macros, *_ = launched.call_args[0]
    assert file == SCAN
    return macros


def gate_macros() -> dict:
    import torch
    from vil.kernels.block import launch

    return launch._gate_outproj_macros(torch.bfloat16, 192, True)


def run_gate(name: str) -> bool:
    """Two groups of one CTA that take 50 tokens twice; weights of one value, which need no order."""
    import torch
    from vil.kernels.cuda import compiler

    torch.manual_seed(0)
    macros, T, L, eps = gate_macros(), 200, 100, 1e-5
    C = macros["WIDTH"]
    D = 2 * C
    y, uz, x, scales = torch.randn(2, T, D).bfloat16(), torch.randn(T, 2 * D).bfloat16(), torch.randn(T, C), [1.0, 2.0]
    mean, scales = y.float().mean(0), torch.tensor(scales)
    gated = scales.repeat_interleave(L)[:, None] * mean * torch.nn.functional.silu(uz[:, D:].float())
    truth = x + gated.sum(1, keepdim=True) / 64
    put = dict(y=y, z=uz, scales=scales, tiles=torch.full((C, D), 1 / 64).bfloat16(), x=x)
    put = {key: t.cuda() for key, t in put.items()} | {key: torch.empty_like(x).cuda() for key in ("out", "xhat")}
    put |= dict(xhat=put["xhat"].bfloat16(), means=torch.empty_like(y[0]).cuda(), norms=torch.empty(T).cuda())
    put["z"] = put["z"][:, D:]
    entry = re.search(r'extern "C" __global__ void __launch_bounds__\(384, 1\)\s+(\w+)\(', project_source(name))[1]
    with own_cubins(name):
        numbers = dict(eps=eps, tokens=T, length=L, tokens_of_group=50, rounds=2)
        compiler.launch(GATE, entry, macros, 1, 384, put | numbers, macros["BLOCK_BYTES"])
    norm = truth * torch.rsqrt((truth * truth).mean(1, keepdim=True) + eps)
    found = [put[key].cpu().float() for key in ("out", "means", "xhat")]
    return all(((a - b).abs() < 0.03 * (1 + b.abs())).all() for a, b in zip(found, (truth, mean, norm)))


def sanitizer() -> str:
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(path).exists():
        raise SystemExit(
            "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin; --sanitizer says where it is"
        )
    return path


def racecheck(path: str, name: str, how: str, folder: str) -> tuple[str, float]:
    """What it prints for one kernel, and seconds; `how` is "analysis", "hazard" or "trace"."""
    options = ["--racecheck-trace-sync", "yes"] if how == "trace" else ["--racecheck-report", how]
    command = [path, "--tool", "racecheck", *options, "--print-limit", "100000" if how == "trace" else "1000"]
    environment = os.environ | {"RACECHECK_FOLDER": folder, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.monotonic()
    log = Path(folder, f"{name.replace(':', '-')}-{how}.log")
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, sys.executable, __file__, "--run", name], env=environment, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer's own child too
            process.wait()
            file.write(f"\nstopped after {LIMIT} s\n")
    return log.read_text(errors="replace"), time.monotonic() - begin


def places(output: str, folder: str) -> list[str]:
    """The pairs of accesses of an analysis, with their lines of source."""

    def quoted(access: str) -> str:
        at = re.search(r"in (\S+\.cu):(\d+)", access)
        kind = "W" if access.startswith("Write") else "R"
        if not at:
            return f"{kind} {access[-60:]}"
        lines = Path(folder, Path(at[1]).name).read_text().splitlines()
        return f"{kind} {at[2]}: {lines[int(at[2]) - 1].strip()[:90]}"

    found, first = [], ""
    for line in output.splitlines():
        if begins := re.search(r"Race reported between (\w+ access .*)", line):
            first = quoted(begins[1])
        elif second := re.search(r"and (\w+ access .*?)(?: \[(\d+) hazards?\])?$", line):
            found.append(f"{first}  |  {quoted(second[1])}  |  {second[2] or '?'} hazards")
    return found


def regions(output: str) -> dict[str, int]:
    """Hazards by kind and KiB of shared memory, and what is said of asynchronous copies."""
    hazards = re.findall(r"(RAW|WAR|WAW) hazard detected at __shared__ (0x[0-9a-f]+)(.*)", output)
    count = Counter(
        f"{kind} {int(at, 16) >> 10} KiB{' (copy)' * ('memcpy_async' in more)}" for kind, at, more in hazards
    )
    return dict(sorted(count.items()))


def traced(output: str) -> dict[str, int]:
    """How often each warp was seen at which kind of synchronization, in the first CTA."""
    found = re.findall(r"^=+ +(\S.*?) called by threads starting at \((\d+),0,0\) in block \(0,0,0\)", output, re.M)
    count = Counter(f"{kind}, warp {int(thread) // 32}" for kind, thread in found)
    return dict(sorted(count.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only kernels with one of them in their names")
    parser.add_argument("--run", metavar="NAME", help="run this kernel here and say whether its result is right")
    parser.add_argument("--compile", metavar="FOLDER", help="write the kernels' machine code for Hopper there, no more")
    parser.add_argument("--cubins", metavar="FOLDER", help="run these instead of compiling")
    parser.add_argument("--sanitizer", metavar="PATH", help="another compute-sanitizer than the one found")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--folder", help="where logs and sources go; a temporary one otherwise")
    arguments = parser.parse_args()
    if arguments.cubins:
        os.environ["RACECHECK_CUBINS"] = str(Path(arguments.cubins).resolve())
    if arguments.run:
        if arguments.run not in names():
            raise SystemExit(f"no {arguments.run}; there are {', '.join(names())}")
        return run(arguments.run)
    chosen = [n for n in names() if not arguments.words or any(word in n for word in arguments.words)]
    folder = arguments.compile or arguments.folder or tempfile.mkdtemp(prefix="racecheck-")
    Path(folder).mkdir(parents=True, exist_ok=True)
    if arguments.compile:
        return compile_all(chosen, folder)
    path = arguments.sanitizer or sanitizer()
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip()
    print(f"{version}\nlogs and sources are in {folder}\n", flush=True)
    jobs = [(n, "analysis") for n in chosen] + [(n, "hazard") for n in chosen if n in PROJECT]
    jobs += [(n, "trace") for n in ("block", "scan", "forward_mma", "copy_mbarrier") if n in chosen]
    jobs.sort(key=lambda job: job[0] not in PROJECT)  # what takes longest first
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outputs = dict(zip(jobs, pool.map(lambda job: racecheck(path, *job, folder), jobs)))
    print("| kernel | how | a race | result | racecheck | s |\n| --- | --- | --- | --- | --- | --- |")
    for name in chosen:
        output, seconds = outputs[name, "analysis"]
        summary = re.search(r"RACECHECK SUMMARY: (.*)", output)
        result = re.search(r"result: (\w+)", output)
        said = summary[1] if summary else "no summary: " + " / ".join(output.split("\n")[-4:])[-200:]
        racy = "planted" if name.endswith(":racy") else "none"
        print(f"| {name} | {description(name)} | {racy} | {result[1] if result else '-'} | {said} | {seconds:.0f} |")
    for (name, how), (output, _) in sorted(outputs.items()):
        most = 8 if name in PROJECT else 2 if name in PATTERNS else 0  # of a planted race in a small kernel: none
        found = (
            places(output, folder)[:most]
            if how == "analysis"
            else [str((regions if how == "hazard" else traced)(output))]
        )
        found += sorted(set(re.findall(r"=+ (Warning: (?!Race).*)", output)))
        if found:
            print(f"\n{name}, {how}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
