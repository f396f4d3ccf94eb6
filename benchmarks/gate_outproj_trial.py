"""Time gate_outproj_sm90 with separate gaters, and variants of it, against the kernel of the main branch.

    python benchmarks/gate_outproj_trial.py compile     compile all variants in parallel, to fill the cache of binaries
    python benchmarks/gate_outproj_trial.py kernels     CUDA graphs on rotated inputs, interleaved, medians
    python benchmarks/gate_outproj_trial.py missing     the same of kernels from which a part was removed
    python benchmarks/gate_outproj_trial.py products    matrix products of the backward pass in several forms
    python benchmarks/gate_outproj_trial.py steps       whole steps as CUDA graphs with both kernels, interleaved
"""

import gc
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import timm
import torch

import vil  # noqa: F401
from vil.kernels.block import gate_outproj_sm90 as fused
from vil.kernels.block.gate import GateInputs
from vil.kernels.block.lines import Lines
from vil.kernels.cuda.compiler import cached_cubin
from vil.kernels.cuda.elements import ELEMENT
from vil.kernels.cuda.source import Source

BF16 = torch.bfloat16
MACROS_OF = fused.macros_of
BEFORE = Source("block/gate_outproj_before_sm90", fused.SOURCE.kernels, only_hopper=True)


def macros_before(dtype, C, keep, pooled):
    stages, slots = 5, 2
    barriers, rows = 2 * stages + 2 * 2 * slots, 2 * 64 if pooled else 0
    cta_bytes = stages * C * 32 * 2 + 2 * slots * 3 * 64 * 64 * 2 + barriers * 8 + rows * 4
    kind = dict(INPUT=ELEMENT[dtype], WIDTH=C, KEEP=int(keep), POOLED=int(pooled))
    return dict(**kind, STAGES=stages, SLOTS=slots, CTA_BYTES=cta_bytes)


def replaced(*changes):
    source = Source(fused.SOURCE.name, fused.SOURCE.kernels, only_hopper=True)
    text = source.text
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    source.__dict__["text"] = text
    return source


NO_PREFETCH = ("if (first + i < end) prefetch_to_l2", "if (first + i < end && tokens.all < 0) prefetch_to_l2")
MORE_REGISTERS = ("take_registers<224>", "take_registers<232>"), ("give_registers<56>", "give_registers<40>")
TANH = (
    "g.at[c] = scale * mean.at[c] * g.at[c] * sigmoid(g.at[c]);",
    "g.at[c] = scale * mean.at[c] * silu_of_half(T{}, 0.5f * g.at[c]);",
)
# source and (STAGES, SLOTS, AHEAD) by name
VARIANTS = {
    "before": (BEFORE, None),
    "gaters": (replaced(), (5, 3, 8)),
    "no prefetch": (replaced(NO_PREFETCH), (5, 3, 8)),
    "4 ahead": (replaced(), (5, 3, 4)),
    "4 ahead, 6 stages": (replaced(), (6, 3, 4)),
    "4 ahead, 4 slots": (replaced(), (5, 4, 4)),
    "4 stages, 4 slots": (replaced(), (4, 4, 8)),
    "232 registers": (replaced(*MORE_REGISTERS), (5, 3, 8)),
    "tanh": (replaced(TANH), (5, 3, 8)),
    "unroll 2": (replaced(("#pragma unroll 4", "#pragma unroll 2")), (5, 3, 8)),
    "unroll 8": (replaced(("#pragma unroll 4", "#pragma unroll 8")), (5, 3, 8)),
}
SKIP_X = ("Floats<4> found = load<4>(x + (at + i * 8 * C + n));", "Floats<4> found = {};")
MISSING = {
    "gaters": (replaced(), (5, 3, 8)),
    "without x": (replaced(SKIP_X, NO_PREFETCH), (5, 3, 8)),
    "without norm": (replaced(("if (xhat) store_norm", "if (eps < 0) store_norm")), (5, 3, 8)),
    "without products": (replaced(("multiply_slot(Element{}, sums", "if (lane < 0) multiply_slot(Element{}, sums")), (5, 3, 8)),
    "without gate": (replaced(("Gated found = gate<Element>(first[w], second[w], zs[w], of_token[4 * i].scale);",
                               "Gated found = {first[w] ^ zs[w], second[w]};")), (5, 3, 8)),
    "without inputs": (replaced(("if (token + 4 * i < end) copy(", "if (token < -4 * i) copy("),
                                ("token + 4 * (i + AHEAD) < end) copy(", "token < -4 * (i + AHEAD)) copy(")), (5, 3, 8)),
}
SHAPES = [  # (images, patches in a row, width, keep, pooled)
    (128, 14, 384, True, True), (128, 14, 384, False, True), (256, 14, 384, False, True), (128, 14, 192, True, True),
    (256, 14, 192, False, True), (4, 78, 384, True, True), (128, 14, 384, True, False),
]  # fmt: skip
SETS, ROUNDS, REPLAYS = 3, 7, 4
START = time.perf_counter()


def macros_of(variant, C, keep, pooled):
    source, sizes = variant
    if sizes is None:
        return macros_before(BF16, C, keep, pooled)
    with mock.patch.multiple(fused, STAGES=sizes[0], SLOTS=sizes[1], AHEAD=sizes[2]):
        return MACROS_OF(BF16, C, keep, pooled)


def patched(variant):
    source, _ = variant
    return mock.patch.multiple(
        fused, SOURCE=source, macros_of=lambda dtype, C, keep, pooled: macros_of(variant, C, keep, pooled)
    )


def compile_all() -> None:
    import cuda.core  # importing in several threads at once would fail
    cuda.core.Program
    arch = "sm_90a"
    jobs = {
        (source.text, tuple(sorted(macros_of((source, sizes), C, keep, pooled).items()))): source
        for source, sizes in [*VARIANTS.values(), *MISSING.values()]
        for *_, C, keep, pooled in SHAPES
    }
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: cached_cubin(job[1], arch, job[0][1]), jobs.items()))
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - START:.0f} s", flush=True)


def inputs_of(B, side, C, keep, pooled):
    L, D = side * side + 1, 2 * C
    lines = Lines.of(side, side, True)
    x = torch.randn(B * L, C, device="cuda")
    first = torch.randn(B, L, D, device="cuda").to(BF16)
    second = torch.randn(B, lines.S if pooled else L, D, device="cuda").to(BF16)
    z = torch.randn(B, L, 2 * D, device="cuda").to(BF16)[..., D:]
    tiles = (torch.randn(C, D, device="cuda") / D**0.5).to(BF16)
    mean = torch.empty(B, L, D, device="cuda", dtype=BF16) if keep else None
    scale = torch.rand(B, device="cuda") if keep else None
    return x, GateInputs(first, second, lines if pooled else None), z, scale, tiles, mean, 1e-5


def capture(run, sets):
    for one in sets:
        run(*one)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(4):
            for one in sets:
                kept = [*kept[-2:], run(*one)]
    return graph


def in_turn(graphs, launches):
    times = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * start.elapsed_time(end) / (REPLAYS * launches))
    return {name: statistics.median(found) for name, found in times.items()}


def kernels(variants) -> None:
    print("us | " + " | ".join(f"{B} {side} C{C} {'keep' * k}{' pooled' * p}" for B, side, C, k, p in SHAPES))
    found = {name: [] for name in variants}
    for shape in SHAPES:
        sets = [inputs_of(*shape) for _ in range(SETS)]
        graphs, results = {}, {}
        for name, variant in variants.items():
            with patched(variant):
                try:
                    out, norm = fused.gate_outproj_sm90(*sets[0])
                    results[name] = out.clone(), norm[0].clone(), sets[0][5] if sets[0][5] is None else sets[0][5].clone()
                    graphs[name] = capture(fused.gate_outproj_sm90, sets)
                except Exception as error:
                    print(name, shape, repr(error)[:300], flush=True)
        times = in_turn(graphs, 4 * SETS)
        for name in variants:
            cell = "-"
            if name in times:
                other = results.get("before", next(iter(results.values())))
                equal = all(a is b or torch.equal(a, b) for a, b in zip(results[name], other))
                error = (results[name][0] - other[0]).abs().max().item()
                cell = f"{times[name]:.1f}" + ("" if equal else f" ({error:.1e})")
            found[name].append(cell)
        print(f"{shape}: {time.perf_counter() - START:.0f} s", flush=True)
    for name, cells in found.items():
        print(name, "|", " | ".join(cells), flush=True)


def forget_plans() -> None:
    for found in gc.get_objects():
        if isinstance(found, dict) and found and all(type(plan).__name__ == "Plan" for plan in found.values()):
            found.clear()


def steps() -> None:
    for name, train, batch in (("vil_small_pooled", True, 128), ("vil_small_pooled", False, 256), ("vil_tiny_pooled", True, 128), ("vil_tiny_pooled", False, 256)):
        graphs = {}
        keep = []
        for label in ("before", "gaters"):
            forget_plans()
            with patched(VARIANTS[label]):
                model = timm.create_model(name).cuda().train(train)
                images = torch.randn(batch, 3, 224, 224, device="cuda")
                optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True) if train else None

                def step(model=model, images=images, optimizer=optimizer):
                    with torch.autocast("cuda", BF16), torch.set_grad_enabled(train):
                        out = model(images).float()
                    if train:
                        out.square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=False)
                    return out

                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        step()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        keep.append(step())
                graphs[label] = graph
                keep.append((model, images, optimizer))
        times = in_turn(graphs, 1)
        rates = {label: 1e6 * batch / us for label, us in times.items()}
        print(name, "train" if train else "infer", batch, {k: round(v) for k, v in rates.items()},
              f"{100 * (rates['gaters'] / rates['before'] - 1):+.2f}%", f"{time.perf_counter() - START:.0f} s", flush=True)  # fmt: skip


def products() -> None:
    """Time matrix products of the backward pass in several forms."""
    T = 128 * 197
    f32 = torch.float32

    def parts_of(a, b, n):  # (parts, M, N)
        if T % n:
            return None
        return torch.bmm(a.view(n, T // n, -1).mT, b.view(n, T // n, -1), out_dtype=f32)

    for C in (384, 192):
        E, D = 4 * C, 2 * C
        sets = [
            [torch.randn(T, n, device="cuda").to(BF16) for n in (E, C, C, D)] + [torch.randn(E, C, device="cuda").to(BF16)]
            for _ in range(SETS)
        ]
        runs = {
            "din_proj: duz^T xhat": lambda duz, xhat, dout, gated, w: torch.mm(duz.t(), xhat, out_dtype=f32),
            "din_proj: xhat^T duz": lambda duz, xhat, dout, gated, w: torch.mm(xhat.t(), duz, out_dtype=f32),
            "dout_proj: dout^T gated": lambda duz, xhat, dout, gated, w: torch.mm(dout.t(), gated, out_dtype=f32),
            "dout_proj: gated^T dout": lambda duz, xhat, dout, gated, w: torch.mm(gated.t(), dout, out_dtype=f32),
            "dxhat: duz w": lambda duz, xhat, dout, gated, w: torch.mm(duz, w),
            "dxhat: (w^T duz^T)^T": lambda duz, xhat, dout, gated, w: torch.mm(w.t(), duz.t()),
        }
        for n in (2, 4, 8, 16):
            runs[f"din_proj in {n} parts"] = lambda duz, xhat, dout, gated, w, n=n: parts_of(duz, xhat, n)
            runs[f"din_proj, transposed, in {n} parts"] = lambda duz, xhat, dout, gated, w, n=n: parts_of(xhat, duz, n)
            runs[f"dout_proj in {n} parts"] = lambda duz, xhat, dout, gated, w, n=n: parts_of(dout, gated, n)
            runs[f"dout_proj, transposed, in {n} parts"] = lambda duz, xhat, dout, gated, w, n=n: parts_of(gated, dout, n)
        for library in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            times = in_turn({name: capture(run, sets) for name, run in runs.items()}, 4 * SETS)
            print(f"C = {C}, {library}:", *(f"{name} {us:.1f}" for name, us in times.items()), sep="\n  ", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    {"compile": compile_all, "kernels": lambda: kernels(VARIANTS), "missing": lambda: kernels(MISSING), "steps": steps, "products": products}[sys.argv[1]]()
