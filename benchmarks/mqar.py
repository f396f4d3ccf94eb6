"""Multi-query associative recall (Arora et al., "Zoology", 2023): Longhorn, Mamba and attention in one harness.

    python benchmarks/mqar.py --out docs/results/mqar.json --plot docs/results/mqar.png     # needs GPUs; uses all
    python benchmarks/mqar.py --lengths 64 --epochs 16 --learning-rates 2.2e-3              # a part of it

A sequence lists key-value pairs and then repeats every key once, at distances that follow a power law; at each repeated
key the model must name its value. The model is causal and has two layers: x + mixer(norm(x)), with the tied embedding
of the tokens as head. Of the learning rates the best is kept, as in the paper. One process a GPU trains several runs at
a time, each as CUDA graphs on a stream of its own, because a run alone leaves most of the GPU idle.

    B batch    T tokens    P key-value pairs    C model width    D inner width
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty

import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from vil.kernels import longhorn_scan, selective_scan

from vil.block import LonghornDirection, MambaDirection
from vil.info import git_commit
from vil.training.files import write_atomically

VOCABULARY = 8192
# Zoology's figure 2, which the Longhorn paper follows: pairs and batch size by the length of the sequence
PAIRS = {64: 4, 128: 8, 256: 16, 512: 64}
BATCH = {64: 512, 128: 512, 256: 256, 512: 128}
LEARNING_RATES = [1e-4, 4.6e-4, 2.2e-3, 1e-2]
POWER = 0.01  # the distance i of a query has a probability proportional to i^(POWER - 1)
LAYERS = 2
STEPS_A_TURN = 16  # steps that a run queues before the next run's turn
DONE = object()


class Longhorn(nn.Module):
    """The mixer of this package's blocks in one direction, first token to last: the same weights and operators."""

    direction = LonghornDirection

    def __init__(self, width: int, expand: int = 2, state_size: int = 16, conv_width: int = 4):
        super().__init__()
        inner, rank = expand * width, math.ceil(width / 16)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.weights = self.direction(inner, state_size, rank, conv_width, reverse=False)
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, h_BTC: Tensor) -> Tensor:
        u_BTD, z_BTD = self.in_proj(h_BTC).chunk(2, dim=-1)
        v_BTD = F.silu(causal_conv(u_BTD, self.weights.conv1d))
        step_BTR, k_BTN, q_BTN = self.weights.x_proj(v_BTD).split(self.weights.split, dim=-1)
        y_BTD = self.scan(v_BTD, F.linear(step_BTR, self.weights.step_proj.weight), k_BTN, q_BTN)
        return self.out_proj(y_BTD * F.silu(z_BTD))

    def scan(self, v_BTD: Tensor, step_logits_BTD: Tensor, k_BTN: Tensor, q_BTN: Tensor) -> Tensor:
        return longhorn_scan(v_BTD, step_logits_BTD, k_BTN, q_BTN, self.weights.skip, self.weights.step_proj.bias)


class Mamba(Longhorn):
    direction = MambaDirection

    def scan(self, v_BTD: Tensor, step_logits_BTD: Tensor, k_BTN: Tensor, q_BTN: Tensor) -> Tensor:
        A_DN = -self.weights.A_log.exp()
        bias = self.weights.step_proj.bias
        return selective_scan(v_BTD, step_logits_BTD, A_DN, k_BTN, q_BTN, self.weights.skip, bias)


def causal_conv(u_BTD: Tensor, conv: nn.Conv1d) -> Tensor:
    """The depthwise convolution as shifted products, which the compiler fuses."""
    taps = conv.weight.shape[-1]
    padded = F.pad(u_BTD, (0, 0, taps - 1, 0))
    products = [padded[:, i : i + u_BTD.shape[1]] * conv.weight[:, 0, i] for i in range(taps)]
    return sum(products, start=conv.bias)


class Attention(nn.Module):
    """Causal attention with one head, as in Zoology."""

    def __init__(self, width: int):
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, h_BTC: Tensor) -> Tensor:
        q_B1TC, k_B1TC, v_B1TC = (part.unsqueeze(1) for part in self.in_proj(h_BTC).chunk(3, dim=-1))
        return self.out_proj(F.scaled_dot_product_attention(q_B1TC, k_B1TC, v_B1TC, is_causal=True).squeeze(1))


MIXERS: dict[str, type[nn.Module]] = {"longhorn": Longhorn, "mamba": Mamba, "attention": Attention}


class RecallModel(nn.Module):
    """Logits of the next token at some positions of a sequence. Only attention needs position embeddings."""

    def __init__(self, mixer: str, width: int, length: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width)) if mixer == "attention" else None
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(LAYERS + 1)])
        self.mixers = nn.ModuleList([MIXERS[mixer](width) for _ in range(LAYERS)])

    def forward(self, tokens_BT: Tensor, queries_BP: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions
        for norm, mixer in zip(self.norms, self.mixers):
            x_BTC = x_BTC + mixer(norm(x_BTC))
        x_BPC = x_BTC.gather(1, queries_BP.unsqueeze(-1).expand(-1, -1, x_BTC.shape[-1]))
        return F.linear(self.norms[-1](x_BPC), self.embedding.weight)


def recall_examples(count: int, length: int, pairs: int, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Sequences (count, T), the positions of their queries (count, P) and the values to name there (count, P).

    The sequence is k1 v1 ... kP vP and then, at even distances behind that, every key once; the rest is token 0. Keys
    are distinct tokens of the first half of the vocabulary, values of the second half.

    Raises:
        ValueError: The pairs and their queries do not fit into the sequence.
    """
    if 4 * pairs > length or length % 2:
        raise ValueError(f"{pairs} pairs and their queries need an even length of at least {4 * pairs}, not {length}")
    generator = torch.Generator(device).manual_seed(seed)
    half, slots = VOCABULARY // 2, length // 2 - pairs
    weights = torch.arange(1, slots + 1, device=device).pow(POWER - 1)
    keys, values, gaps = [], [], []
    for start in range(0, count, 8192):
        n = min(8192, count - start)
        keys.append(1 + distinct(torch.ones(half - 1, device=device), n, pairs, generator))
        values.append(half + distinct(torch.ones(half, device=device), n, pairs, generator))
        gaps.append(distinct(weights, n, pairs, generator))
    keys, values, gaps = torch.cat(keys), torch.cat(values), torch.cat(gaps)
    tokens = torch.zeros(count, length, dtype=torch.long, device=device)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    queries = 2 * pairs + 2 * gaps
    return tokens.scatter_(1, queries, keys), queries, values


def distinct(weights: Tensor, count: int, pairs: int, generator: torch.Generator) -> Tensor:
    """(count, pairs) indices, each row drawn one after the other without replacement (the Gumbel-top-k trick)."""
    uniform = torch.rand(count, len(weights), generator=generator, device=weights.device)
    return (weights.log() - uniform.clamp(min=1e-30).log().neg().log()).topk(pairs).indices


@dataclass
class Run:
    """One training run. `accuracy` is that of all queries of the test sequences, in percent, after each epoch."""

    mixer: str
    length: int
    width: int
    lr: float
    pairs: int
    batch: int
    epochs: int
    train_examples: int
    test_examples: int
    weight_decay: float
    stop_at: float
    seed: int
    parameters: int = 0
    seconds: float = 0.0
    accuracy: list[float] | None = None

    @property
    def cost(self) -> float:
        """A guess of how long it takes: the longest runs go first."""
        return self.train_examples * self.epochs * self.length * self.width


def train(run: Run, examples: Callable[[Run], tuple], device: torch.device, deadline: float) -> Iterator[None]:
    """Trains in turns: every `next` queues some steps on the device. The results are in `run` at the end.

    AdamW, a cosine over the epochs without warm-up, the mean cross-entropy of all queries in a batch, fp32 with TF32
    products. Ends early once the accuracy reaches `stop_at` percent, the loss is not finite, or the deadline passes.
    """
    torch.manual_seed(run.seed)
    shuffle = torch.Generator().manual_seed(run.seed)
    start = time.perf_counter()
    (tokens, queries, values), test = examples(run)
    model = RecallModel(run.mixer, run.width, run.length).to(device)
    logits_of = torch.compile(model) if device.type == "cuda" else model
    run.parameters, run.accuracy = sum(p.numel() for p in model.parameters()), []
    rate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, weight_decay=run.weight_decay, fused=True, capturable=device.type == "cuda"
    )
    order, first = torch.arange(len(tokens), device=device), torch.zeros((), dtype=torch.long, device=device)
    places, total_loss = torch.arange(run.batch, device=device), torch.zeros((), device=device)

    def step() -> None:
        batch = order[first + places]
        first.add_(run.batch)
        optimizer.zero_grad()
        logits = logits_of(tokens[batch], queries[batch])
        loss = F.cross_entropy(logits.flatten(0, 1), values[batch].flatten())
        loss.backward()
        optimizer.step()
        total_loss.add_(loss.detach())

    if device.type == "cuda":
        step = captured(step, optimizer)
    for epoch in range(run.epochs):
        rate.fill_(run.lr * 0.5 * (1 + math.cos(math.pi * epoch / run.epochs)))
        order.copy_(torch.randperm(len(tokens), generator=shuffle))
        first.zero_()
        total_loss.zero_()
        for i in range(len(tokens) // run.batch):
            step()
            if i % STEPS_A_TURN == 0:
                yield
        run.accuracy.append(accuracy(model, *test, run.batch))
        run.seconds = time.perf_counter() - start
        if run.accuracy[-1] >= run.stop_at or not math.isfinite(total_loss.item()) or time.time() > deadline:
            return


def captured(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The step as a CUDA graph, which costs the host one launch. The learning rate must still be 0: the step is tried
    out first, and only what that left in the optimizer has to be undone."""
    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    return graph.replay


@torch.no_grad()
def accuracy(model: nn.Module, tokens: Tensor, queries: Tensor, values: Tensor, batch: int) -> float:
    """Percent of the queries whose value has the largest logit."""
    parts = zip(tokens.split(batch), queries.split(batch), values.split(batch))
    correct = sum((model(t, q).argmax(-1) == v).sum() for t, q, v in parts)
    return 100 * correct.item() / values.numel()


def work(index: int, device_type: str, hands: list[list[Run]], results, at_a_time: int, deadline: float) -> None:
    """One process: trains the runs of its hand, `at_a_time` of them in turns."""
    device = torch.device(device_type, index if device_type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 1000  # it counts every shape of every mixer

    @functools.cache
    def made(count: int, length: int, pairs: int, seed: int) -> tuple[Tensor, ...]:
        return recall_examples(count, length, pairs, seed, device)

    def examples(run: Run) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        shape = run.length, run.pairs
        return made(run.train_examples, *shape, 2 * run.seed), made(run.test_examples, *shape, 2 * run.seed + 1)

    waiting = list(reversed(hands[index]))
    active: list[tuple[Run, Iterator[None], torch.cuda.Stream | None]] = []
    while waiting or active:
        while waiting and len(active) < at_a_time:
            run = waiting.pop()
            stream = torch.cuda.Stream() if device.type == "cuda" else None
            active.append((run, train(run, examples, device, deadline), stream))
        for entry in list(active):
            run, turns, stream = entry
            with torch.cuda.stream(stream):
                if next(turns, DONE) is DONE:
                    active.remove(entry)
                    results.put(run)


def train_all(runs: list[Run], device: str, at_a_time: int, minutes: float, done: Callable[[Run], None]) -> None:
    """Trains on all GPUs of this machine, or on the CPU; `done` gets each run when it ends."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = torch.cuda.device_count() if device == "cuda" else 1
    deadline = time.time() + 60 * minutes
    arguments = (device, deal(runs, processes), results, at_a_time, deadline)
    workers = multiprocessing.spawn(work, arguments, processes, join=False)
    missing = len(runs)
    while missing:
        try:
            done(results.get(timeout=1))
            missing -= 1
        except Empty:
            workers.join(timeout=0)  # raises what a worker raised
    while not workers.join():
        pass


def deal(runs: list[Run], processes: int) -> list[list[Run]]:
    """A hand for each process: longest runs first, of equal work, and those that differ in the learning rate together,
    because they share compiled code."""
    groups: dict[tuple, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.cost, reverse=True):
        groups.setdefault((run.mixer, run.length, run.width), []).append(run)
    hands: list[list[Run]] = [[] for _ in range(processes)]
    for group in groups.values():
        min(hands, key=lambda hand: sum(run.cost for run in hand)).extend(group)
    return hands


def best(runs: list[dict]) -> dict[tuple[int, str, int], dict]:
    """Of the runs of a width, mixer and length, the one that ended with the highest accuracy."""
    kept: dict[tuple[int, str, int], dict] = {}
    for run in sorted(runs, key=lambda run: run["accuracy"][-1]):
        kept[run["width"], run["mixer"], run["length"]] = run
    return kept


def markdown(runs: list[dict]) -> str:
    """Test accuracy by length, a row for each width and mixer, and the learning rate that gave it."""
    kept = best(runs)
    lengths = sorted({length for *_, length in kept})
    pairs = {run["length"]: run["pairs"] for run in runs}
    head = ["width", "mixer", "parameters", *(f"T {length}, {pairs[length]} pairs" for length in lengths)]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for width, mixer in sorted({key[:2] for key in kept}, key=lambda key: (key[0], list(MIXERS).index(key[1]))):
        row = [kept.get((width, mixer, length)) for length in lengths]
        cells = [f"{run['accuracy'][-1]:.1f} ({run['lr']:g})" if run else "-" for run in row]
        counts = [run["parameters"] for run in row if run]
        parameters = " to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)}))
        lines.append("| " + " | ".join([str(width), mixer, parameters, *cells]) + " |")
    return "\n".join(lines) + "\n"


def plot(runs: list[dict], path: Path) -> None:
    """Accuracy by length, a panel for each width."""
    from matplotlib.figure import Figure

    kept = best(runs)
    widths = sorted({width for width, *_ in kept})
    figure = Figure(figsize=(1 + 3.6 * len(widths), 3.4), layout="constrained")
    for axis, width in zip(figure.subplots(1, len(widths), sharey=True, squeeze=False)[0], widths):
        for mixer in MIXERS:
            points = sorted((key[2], run["accuracy"][-1]) for key, run in kept.items() if key[:2] == (width, mixer))
            if points:
                axis.plot(*zip(*points), marker="o", label=mixer)
        axis.set(title=f"width {width}", xlabel="tokens", xscale="log", ylim=(-3, 103))
        axis.set_xticks(ticks := sorted({length for *_, length in kept}), [str(t) for t in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("accuracy of recall (%)")
    figure.axes[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(PAIRS), metavar="T")
    parser.add_argument("--pairs", type=int, help="key-value pairs (default: Zoology's for the length)")
    parser.add_argument("--batch", type=int, help="batch size (default: Zoology's for the length)")
    parser.add_argument("--widths", nargs="+", type=int, default=[64], metavar="C")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=LEARNING_RATES, metavar="LR")
    parser.add_argument("--epochs", type=int, default=64)
    parser.add_argument("--train-examples", type=int, default=100_000)
    parser.add_argument("--test-examples", type=int, default=3_000)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--stop-at", type=float, default=99.0, help="accuracy in percent at which a run ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--runs-per-gpu", type=int, default=6, help="runs that a GPU trains at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after this every run ends with its epoch")
    parser.add_argument("--out", type=Path, help="JSON of all runs, rewritten whenever one ends")
    parser.add_argument("--plot", type=Path, help="PNG of the best of each")
    options = parser.parse_args()
    for length in options.lengths:
        if length not in PAIRS and not (options.pairs and options.batch):
            parser.error(f"for {length} tokens give --pairs and --batch")
    shared = {name: getattr(options, name) for name in ("epochs", "train_examples", "test_examples", "weight_decay")}
    runs = [
        Run(mixer, length, width, lr, options.pairs or PAIRS[length], options.batch or BATCH[length],
            stop_at=options.stop_at, seed=options.seed, **shared)
        for mixer in options.mixers for length in options.lengths for width in options.widths
        for lr in options.learning_rates
    ]  # fmt: skip
    machine = dict(
        device=torch.cuda.get_device_name() if options.device == "cuda" else platform.processor(),
        devices=torch.cuda.device_count() if options.device == "cuda" else 1,
        torch=torch.__version__,
        commit=git_commit(),
    )
    finished: list[dict] = []
    start = time.perf_counter()

    def done(run: Run) -> None:
        finished.append(asdict(run))
        ended = f"{run.accuracy[-1]:5.1f} % after {len(run.accuracy)} of {run.epochs} epochs, {run.seconds:.0f} s"
        print(f"{run.mixer}, T {run.length}, width {run.width}, lr {run.lr:g}: {ended}", flush=True)
        if options.out:
            report = dict(machine, seconds=time.perf_counter() - start, runs=finished)
            write_atomically(options.out, json.dumps(report) + "\n")

    train_all(runs, options.device, options.runs_per_gpu, options.minutes, done)
    print(f"\n{machine}, {time.perf_counter() - start:.0f} s\n\n{markdown(finished)}")
    if options.plot:
        plot(finished, options.plot)


if __name__ == "__main__":
    main()
