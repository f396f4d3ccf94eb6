"""Time the weight gradients of a block as one matrix product and as sums over parts of the tokens.

python benchmarks/parts_trial.py products         matrix products by number of parts, without adding the parts
python benchmarks/parts_trial.py steps ROUNDS     training steps as CUDA graphs; import path decides which package
"""

import gc
import statistics
import sys
import time
from unittest import mock

import timm
import torch

import vil  # noqa: F401
from vil.kernels.cuda import products as products_module

BF16 = torch.bfloat16
SHAPES = [  # (model width, tokens)
    (384, 128 * 197), (192, 128 * 197), (768, 64 * 197), (384, 4 * 6085), (384, 32 * 197), (384, 16 * 197), (384, 8 * 197),
    (192, 32 * 197),
]  # fmt: skip


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


def in_turn(graphs, launches, rounds=7, replays=4):
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * start.elapsed_time(end) / (replays * launches))
    return {name: statistics.median(found) for name, found in times.items()}


def products() -> None:
    f32 = torch.float32
    for C, T in SHAPES:
        sets = [[torch.randn(T, n, device="cuda").to(BF16) for n in (4 * C, C, C, 2 * C)] for _ in range(3)]
        graphs = {}
        for n in range(1, 17):
            if T % n:
                continue

            def din(duz, xhat, dout, gated, n=n):
                if n == 1:
                    return torch.mm(duz.t(), xhat, out_dtype=f32)
                return torch.bmm(duz.view(n, T // n, -1).mT, xhat.view(n, T // n, -1), out_dtype=f32)

            def dout(duz, xhat, dout, gated, n=n):
                if n == 1:
                    return torch.mm(dout.t(), gated, out_dtype=f32)
                return torch.bmm(dout.view(n, T // n, -1).mT, gated.view(n, T // n, -1), out_dtype=f32)

            graphs[f"dW_in {n}"], graphs[f"dW_out {n}"] = capture(din, sets), capture(dout, sets)
        times = in_turn(graphs, 12)
        for kind in ("dW_in", "dW_out"):
            print(
                f"C {C} T {T} {kind}:",
                *(f"{k.split()[1]}: {us:.1f}," for k, us in times.items() if k.startswith(kind + " ")),
                flush=True,
            )


def forget_plans() -> None:
    for found in gc.get_objects():
        if type(found) is dict and found and all(type(plan).__name__ == "Plan" for plan in found.values()):
            found.clear()


def over_tokens(parts):
    """Return a replacement of products.over_tokens with fixed numbers of parts for dW_in and dW_out, or None."""
    if parts is None:
        return products_module.over_tokens

    def run(a_TM, b_TN):
        n = parts[0] if a_TM.shape[1] > b_TN.shape[1] else parts[1]  # duz has more columns than xhat
        if n == 1 or a_TM.shape[0] % n or a_TM.shape[0] < 2048:
            return products_module.mm_in_fp32(a_TM.t(), b_TN)[None]
        return products_module.batched_over_tokens(a_TM[None], b_TN[None], n)[0]

    return run


def steps(rounds: int, variants) -> None:
    for name, batch in (("vil_small_pooled", 128), ("vil_tiny_pooled", 128), ("vil_base_pooled", 64), ("vil_small", 128)):
        graphs, kept = {}, []
        for label, parts in variants.items():
            forget_plans()
            function = over_tokens(parts) if variants != BEFORE else None
            with mock.patch.object(products_module, "over_tokens", function, create=True):
                model = timm.create_model(name).cuda()
                images = torch.randn(batch, 3, 224, 224, device="cuda")
                optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

                def step(model=model, images=images, optimizer=optimizer):
                    with torch.autocast("cuda", BF16):
                        out = model(images).float()
                    out.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)

                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for _ in range(3):
                        step()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        step()
                graphs[label] = graph
                kept.append((model, images, optimizer))
        times = in_turn(graphs, 1, rounds, 5)
        print(name, {label: round(1e6 * batch / us) for label, us in times.items()}, f"{time.perf_counter() - START:.0f} s", flush=True)
        del graphs, kept
        torch.cuda.empty_cache()


BEFORE = {"before": None}
VARIANTS = {"chosen": None, "1, 1": (1, 1), "2, 4": (2, 4), "4, 8": (4, 8), "4, 4": (4, 4), "1, 8": (1, 8), "8, 8": (8, 8)}

if __name__ == "__main__":
    START = time.perf_counter()
    torch.manual_seed(0)
    {"products": products, "before": lambda: steps(9, BEFORE), "steps": lambda: steps(7, VARIANTS)}[sys.argv[1]]()
