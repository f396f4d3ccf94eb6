#!/bin/bash
# Test and time the kernels of the embedding on a GPU, in at most 120 s. Run in the root of a checkout of the branch
# `embedding` (PYTHONPATH=$PWD). All results are printed and written to $OUT/embedding.txt.
OUT=${OUT:-/tmp/embedding-out}
mkdir -p "$OUT"
work=$(mktemp -d)
export PYTHONPATH=$PWD:$PWD/tests/helpers:$PWD/benchmarks VIL_CACHE_DIR=${VIL_CACHE_DIR:-$work/cache} OMP_NUM_THREADS=2
results=$OUT/embedding.txt
py=$(command -v python || command -v python3)
: > "$results"
step() {  # step SECONDS NAME COMMAND...: run a command with a time limit, and append the last lines to the results
    local limit=$1 name=$2 start=$SECONDS
    shift 2
    timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
    local rc=$?
    { echo; echo "== $name: exit status $rc, $((SECONDS - start)) s"; tail -n 160 "$OUT/$name.log"; } >> "$results"
}
cat > "$work/times.py" <<'PY'
"""Time `model.embed` with the kernels and with PyTorch code, as CUDA graphs whose replays alternate."""

import statistics
import sys
import time
from unittest import mock

import timm
import torch

import vil  # noqa: F401
from vil.kernels.embedding import embed_op

ROUNDS, MS = 7, 25  # timed rounds, and milliseconds of a round
BF16, RESULTS = torch.bfloat16, []


def graph_of(step):
    stream = torch.cuda.current_stream()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        RESULTS.append(step())
    return graph


def microseconds(graph, count):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / count


def compare(name, steps):
    graphs = [graph_of(step) for step in steps]
    counts = [max(3, round(1e3 * MS / microseconds(graph, 3))) for graph in graphs]
    times = [[microseconds(graph, count) for graph, count in zip(graphs, counts)] for _ in range(ROUNDS)]
    new, old = (statistics.median(of) for of in zip(*times))
    print(f"{name:44} new {new:7.1f} us   old {old:7.1f} us   saves {old - new:6.1f} us", flush=True)


def without(step):
    def run():
        with mock.patch.object(embed_op, "runs_kernels", lambda images: False):
            return step()

    return run


def main():
    torch.cuda.set_stream(torch.cuda.Stream())
    for name in ("vil_small_pooled", "vil_tiny_pooled"):
        torch.manual_seed(0)
        model = timm.create_model(name, depth=1).cuda()
        parameters = [model.patch_embed.proj.weight, model.patch_embed.proj.bias, model.cls_token, model.pos_embed]
        images = torch.randn(256, 3, 224, 224, device="cuda")
        dx = torch.randn(128, 197, model.embed_dim, device="cuda")

        def forward():
            with torch.inference_mode(), torch.autocast("cuda", BF16):
                return model.embed(images)

        def training():
            with torch.autocast("cuda", BF16):
                x = model.embed(images[:128])
            return [x.detach(), *torch.autograd.grad(x, parameters, dx)]

        new, old = forward(), without(forward)()
        print(f"{name}: largest difference of tokens {(new - old).abs().max().item():.2e}")
        torch.cuda.reset_peak_memory_stats()
        for label, step in (("new", training), ("old", without(training))):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            print(f"{name}: peak memory of forward and backward of 128 images, {label}: {peak:.0f} MiB")
        compare(f"{name} embed, forward, 256 images", [forward, without(forward)])
        compare(f"{name} embed, forward + backward, 128 images", [training, without(training)])
        if "--kernels" in sys.argv:
            kernels(forward, without(forward), training, without(training))


def kernels(*steps):
    from torch.profiler import ProfilerActivity, profile

    for step in steps:
        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(5):
                step()
            torch.cuda.synchronize()
        print(f"  {getattr(step, '__name__', '')}")
        for event in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total):
            print(f"    {event.self_device_time_total / 5:8.1f} us  {event.count / 5:4.1f} x  {event.key[:90]}")


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s")
PY
cat > "$work/steps.py" <<'PY'
"""Time whole steps with and without the kernels of the embedding (benchmarks/variants.py), in 7 rounds.

`steps.py warm MODEL` only compiles the kernels of a model.
"""

import sys

import torch
import variants
from throughput import Case, build_step

variants.ROUNDS = 7
CASES = "infer,224,256", "train,224,128"
if sys.argv[1:2] == ["warm"]:
    for case in CASES:
        build_step(sys.argv[2], Case.parse(case), False, torch.device("cuda"))
    sys.exit()
cases = [f"{model},{case}" for model in ("vil_small_pooled", "vil_tiny_pooled") for case in CASES]
sys.argv = ["variants.py", "--variants", "patchify, add_embeddings", "--cases", *cases]
variants.main()
PY
{ nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm,power.limit,driver_version --format=csv,noheader; $py -V; } >> "$results" 2>&1
parallel=$($py -c 'import xdist; print("-n 6")' 2> /dev/null)
# At first all kernels are compiled, in parallel to the tests. Times of this phase mean nothing.
for model in vil_small_pooled vil_tiny_pooled; do
    timeout -k 5 50 $py "$work/steps.py" warm $model > "$OUT/warm_$model.log" 2>&1 &
done
step 50 tests $py -m pytest -q -p no:cacheprovider $parallel tests/kernels/test_embedding.py -m gpu
wait
step 25 times $py "$work/times.py" --kernels
step 40 steps $py "$work/steps.py"
cat "$results"
rm -rf "$work"
