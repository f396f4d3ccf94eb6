"""Multi-query associative recall (Arora et al., "Zoology", 2023): Longhorn, Mamba and attention in one harness.

    python -m research.recall --lengths 512 --seeds 4 --minutes 9 --out output/recall.json    # again and again
    python -m research.recall --report output/recall.json output/more.json --out output/all.json --plot output/all.png

A sequence lists key-value pairs and then repeats every key once, at distances that follow a power law; at each repeated
key the model must name its value. A run is a mixer, a width, a length, a learning rate and a seed. Runs in the file
`--out` are not done again; those that are unfinished when the time is up go on from their last epoch with the next
call, from the folder FILE.states. One call at a time writes to a file: calls side by side have files of their own,
which `--report` joins. One process a GPU trains several runs at a time, each as CUDA graphs on a stream of its own.

The harness follows Zoology's at d88d6f5 (2026-01) with its configuration of figure 2 (iclr24_zoology_figure2): two
layers of width C for every mixer, no MLP; Mamba's block with RMSNorm; attention with a LayerNorm before and one behind
it, position embeddings, dropout of 0.1 on embeddings and attention; LayerNorm and the tied embedding as head; its
initialisation; token 0 between queries; AdamW with weight decay 0.1 on everything; a cosine by epochs to 0 without
warm-up; 64 epochs of the same batches in the same order; the end of a run above 99%. Data are the same for all runs:
the seed decides on weights and dropout, whatever runs beside it. These differ:
  - the loss is that of logits: that commit's forward returns embeddings, so that it cannot train on tokens as it is;
  - the length of 512 tokens is among the lengths: that configuration has commented it out;
  - products and activations are bf16 (`--precision fp32`: TF32 products); the residual stream, weights, norms and
    states are fp32 as there, and accuracy is measured with fp32 activations, on a GPU with TF32 products;
  - sequences that fill no whole batch are left out: the last 32 of the 100,000 at 512 tokens;
  - the random numbers are others: of the data one draw that follows the same distribution;
  - Longhorn, which Zoology does not have, takes the place of Mamba's recurrence with the weights of this package's
    blocks and their initialisation; all else of it is Mamba's block;
  - learning rates: around those at which recurrent models learn, not 1e-4 to 1e-2.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from queue import Empty

import torch
import torch.multiprocessing as multiprocessing
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from research.recall_model import MIXERS, RecallModel, recall_examples
from research.recall_results import Run, merged, plot, report, write
from vil.files import write_atomically
from vil.info import git_commit
from vil.training.gradients import FlatGradients

# Zoology's figure 2, which the Longhorn paper follows: pairs and batch size by the length of the sequence
PAIRS = {64: 4, 128: 8, 256: 16, 512: 64}
BATCH = {64: 512, 128: 512, 256: 256, 512: 128}
LEARNING_RATES = [1e-3, 2.2e-3, 4.6e-3, 1e-2]
DATA_SEED = 123
PIECE = 8192  # parameters that a multiprocessor updates: AdamW's kernel would give it 65,536 of one tensor
STEPS_A_TURN = 16  # steps that a run queues before the next run's turn
SECONDS_BETWEEN_SAVES = 60
DONE = object()


@functools.cache
def shared_examples(count: int, length: int, pairs: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The examples of `recall_examples`, made once for all runs of a process."""
    examples = recall_examples(count, length, pairs, seed, device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # all streams read them
    return examples


def examples_of(run: Run, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """The examples that a run trains on, and those that it is tested on."""
    counts = (run.train_examples, DATA_SEED), (run.test_examples, DATA_SEED + 1)
    return tuple(shared_examples(count, run.length, run.pairs, seed, device) for count, seed in counts)


class Training:
    """A run's model and optimizer on a device, and a step of them over the training examples."""

    def __init__(self, run: Run, examples: tuple[Tensor, ...], device: torch.device):
        self.run, self.examples, self.device = run, examples, device
        self.generator = torch.default_generator
        if device.type == "cuda":
            # In PyTorch 2.11 all graphs of a generator's state read seed and offset in one place on the device, where
            # each replay, on whatever stream, writes its own. A graph that is captured from here on has the run's.
            self.generator = torch.Generator(device)
            torch.cuda.default_generators[device.index].graphsafe_set_state(self.generator)
        torch.manual_seed(run.seed)
        self.model = RecallModel(run.mixer, run.width, run.length).to(device)
        run.parameters = sum(p.numel() for p in self.model.parameters())
        self.loss_of, zero = RecallModel.loss, functools.partial(torch.zeros, (), device=device)
        if device.type == "cuda":
            self.loss_of = torch.compile(RecallModel.loss, dynamic=False)
        self.rate, self.total_loss, self.largest_norm = zero(), zero(), zero()
        self.first, self.places = zero(dtype=torch.long), torch.arange(run.batch, device=device)
        self.gradients = FlatGradients(self.model.parameters())
        self.weights = torch.zeros_like(self.gradients.flat)
        for parameter, view in zip(self.gradients.parameters, self.gradients.views(self.weights)):
            parameter.data = view.copy_(parameter.data)
        pieces = self.weights.split(PIECE)
        for piece, gradient in zip(pieces, self.gradients.flat.split(PIECE)):
            piece.grad = gradient
        self.optimizer = torch.optim.AdamW(
            pieces, self.rate, weight_decay=run.weight_decay, fused=True, capturable=device.type == "cuda"
        )
        self.step = self._tried(self._step)

    def _step(self) -> None:
        rows = self.first + self.places
        self.first.add_(self.run.batch)
        bf16 = self.run.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            loss = self.loss_of(self.model, *(t[rows] for t in self.examples))
        self.gradients.zero()
        self.gradients.add(loss)
        norm = self.gradients.norm()
        self.optimizer.step()
        self.total_loss.add_(loss.detach())
        self.largest_norm.copy_(torch.maximum(self.largest_norm, norm))

    def _tried(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step, on a GPU as a graph, which costs the host one launch, with the optimizer's state in place.

        The learning rate is still 0: what the steps here leave is undone, or set anew with each epoch.
        """
        step()
        if self.device.type == "cuda":
            self.first.zero_()
            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                step()
            step = graph.replay
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        return step

    def begin_epoch(self, epoch: int) -> None:
        self.rate.fill_(self.run.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.run.epochs)))
        for sums in (self.first, self.total_loss, self.largest_norm):
            sums.zero_()

    def begin_turn(self, step: int) -> None:
        """Dropout from here on follows from the run and the step, whatever others have drawn in their turns."""
        self.generator.manual_seed(1_000_003 * self.run.seed + step)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training goes on from, by name."""
        named = {"weights": self.weights}
        for i, state in enumerate(self.optimizer.state.values()):
            named |= {f"{of}/{i}": value for of, value in state.items()}
        return named

    def save(self, path: Path) -> None:
        tensors = {name: t.cpu() for name, t in self.tensors().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save(tensors, {"run": json.dumps(asdict(self.run))}))

    def load(self, path: Path) -> None:
        """Goes on from what `save` wrote.

        Raises:
            ValueError: It is the state of a run with other settings.
        """
        with safe_open(path, "pt") as file:
            saved = Run(**json.loads(file.metadata()["run"]))
            if saved.key != self.run.key:
                raise ValueError(f"{path} is the state of another run ({saved}); remove it, or give another --out")
            for name, tensor in self.tensors().items():
                tensor.copy_(file.get_tensor(name))
        for name in ("accuracy", "loss", "gradient_norm", "sittings"):
            setattr(self.run, name, getattr(saved, name))

    @torch.no_grad()
    def accuracy(self, pairs: Tensor, queries: Tensor) -> Tensor:
        """Percent of the queries whose value has the largest logit, on the device."""
        self.model.eval()
        parts = zip(pairs.split(self.run.batch), queries.split(self.run.batch))
        correct = sum((self.model(p, q).argmax(-1) == p[:, 1::2]).sum() for p, q in parts)
        self.model.train()
        return 100 * correct / queries.numel()


def train(
    run: Run, examples: Callable[[Run], tuple], device: torch.device, deadline: float, state: Path | None = None
) -> Iterator[None]:
    """Trains in turns: every `next` queues some steps on the device. The results are in `run` at the end.

    Ends when the run does: with its last epoch, or above `stop_at` percent, or with a value that is not finite. Once
    the deadline has passed it ends with the epoch it is in, and leaves what the next call needs in the file `state`.
    """
    start = saved = time.time()
    shown, test = examples(run)
    training = Training(run, shown, device)
    if state and state.exists():
        training.load(state)
    machine = dict(commit=git_commit(), device=device_name(device), torch=torch.__version__)
    run.sittings.append(dict(machine, epochs=0, seconds=0.0))
    steps = run.train_examples // run.batch
    turn = None
    while not run.ended:
        epoch = len(run.accuracy)
        training.begin_epoch(epoch)
        for i in range(steps):
            if i % STEPS_A_TURN == 0:
                training.begin_turn(epoch * steps + i)
            training.step()
            if (i + 1) % STEPS_A_TURN == 0:
                before, turn = turn, queued(device)
                yield from ended(before)
                yield
        results = torch.stack([training.accuracy(*test), training.total_loss / steps, training.largest_norm])
        yield from ended(queued(device))
        accuracy, *rest = results.tolist()
        run.accuracy.append(accuracy)
        for values, value in zip((run.loss, run.gradient_norm), rest):
            values.append(value if math.isfinite(value) else None)
        run.sittings[-1] |= dict(epochs=run.sittings[-1]["epochs"] + 1, seconds=round(time.time() - start, 1))
        now = time.time()
        if not run.ended and state and (now > deadline or now > saved + SECONDS_BETWEEN_SAVES):
            training.save(state)
            saved = now
        if now > deadline:
            return


def queued(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that this stream has been given."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def ended(event: torch.cuda.Event | None) -> Iterator[None]:
    """Gives others their turns until the event has come: a run queues no more than two turns of steps."""
    while event and not event.query():
        yield


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def state_file(out: Path | None, run: Run) -> Path | None:
    """Where a run's state is kept until it ends: 12 bytes a parameter."""
    if out is None:
        return None
    digest = hashlib.sha256(json.dumps(run.key).encode()).hexdigest()[:12]
    return out.with_suffix(".states") / f"{run.mixer}-{run.lr:g}-{run.seed}-{digest}.safetensors"


def work(
    index: int, device_type: str, hands: list[list[Run]], results, at_a_time: int, deadline: float, out: Path | None
) -> None:
    """One process: trains the runs of its hand, `at_a_time` of them in turns."""
    device = torch.device(device_type, index if device_type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 1000  # it counts every shape of every mixer

    examples = functools.partial(examples_of, device=device)
    waiting, reported = list(reversed(hands[index])), time.time()
    active: list[tuple[Run, Iterator[None], torch.cuda.Stream | None]] = []
    while active or (waiting and time.time() < deadline):
        while waiting and len(active) < at_a_time and time.time() < deadline:
            run = waiting.pop()
            stream = torch.cuda.Stream() if device.type == "cuda" else None
            active.append((run, train(run, examples, device, deadline, state_file(out, run)), stream))
        for entry in list(active):
            run, turns, stream = entry
            with torch.cuda.stream(stream):
                if next(turns, DONE) is DONE:
                    active.remove(entry)
                    results.put(run)
        if time.time() > reported + 30:
            reported = time.time()
            places = [
                f"{r.mixer} {r.lr:g} {r.seed}: {len(r.accuracy)}, {(r.accuracy or [0])[-1]:.0f}%" for r, *_ in active
            ]
            print(f"  epochs done and accuracy: {'; '.join(places)}; {len(waiting)} wait", flush=True)
    results.put(None)


def train_all(
    runs: list[Run], device: str, at_a_time: int, minutes: float, out: Path | None, done: Callable[[Run], None]
) -> None:
    """Trains on all GPUs of this machine, or on the CPU; `done` gets each run when it ends or its time is up."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = torch.cuda.device_count() if device == "cuda" else 1
    hands = [runs[i::processes] for i in range(processes)]
    arguments = (device, hands, results, at_a_time, time.time() + 60 * minutes, out)
    workers = multiprocessing.spawn(work, arguments, processes, join=False)
    while processes:
        try:
            run = results.get(timeout=1)
        except Empty:
            workers.join(timeout=0)  # raises what a worker raised
            continue
        if run is None:
            processes -= 1
        else:
            done(run)
    while not workers.join():
        pass


def to_do(runs: Iterable[Run], finished: Iterable[Run], out: Path | None) -> list[Run]:
    """The runs that are not finished in the order of their turn: those begun first, and then seed by seed, so that what
    is there when time is up is balanced."""
    have = {run.key for run in finished}

    def order(run: Run) -> tuple:
        state = state_file(out, run)
        return not (state and state.exists()), run.seed, -run.cost

    return sorted((run for run in runs if run.key not in have), key=order)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(PAIRS), metavar="T")
    parser.add_argument("--pairs", type=int, help="key-value pairs (default: Zoology's for the length)")
    parser.add_argument("--batch", type=int, help="batch size (default: Zoology's for the length)")
    parser.add_argument("--widths", nargs="+", type=int, default=[64], metavar="C")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=LEARNING_RATES, metavar="LR")
    parser.add_argument("--seeds", type=int, default=4, help="seeds 0, 1, ... of every setting")
    parser.add_argument("--epochs", type=int, default=64)
    parser.add_argument("--train-examples", type=int, default=100_000)
    parser.add_argument("--test-examples", type=int, default=3_000)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of products and activations")
    parser.add_argument("--stop-at", type=float, default=99.0, help="accuracy in percent above which a run ends")
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--runs-per-gpu", type=int, default=6, help="runs that a GPU trains at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after this every run ends with its epoch")
    parser.add_argument("--out", type=Path, help="JSON of finished runs, which are kept and added to")
    parser.add_argument("--plot", type=Path, help="PNG of all runs")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="no runs: merge these files into --out")
    options = parser.parse_args()
    for length in options.lengths:
        if length not in PAIRS and not (options.pairs and options.batch):
            parser.error(f"for {length} tokens give --pairs and --batch")
    start = time.perf_counter()
    if options.report:
        finished = merged(options.report)
    else:
        lock = FileLock(options.out.with_suffix(".lock"), timeout=0) if options.out else contextlib.nullcontext()
        try:
            with lock:
                finished = merged([options.out]) if options.out and options.out.exists() else []
                run_all(options, finished)
        except Timeout:
            parser.error(
                f"another call writes to {options.out}: wait for it, or give another --out, and join both with --report"
            )
        print(f"{time.perf_counter() - start:.0f} s\n")
    if options.report and options.out:
        write(finished, options.out)
    print(report(finished))
    if options.plot:
        plot(finished, options.plot)


def run_all(options: argparse.Namespace, finished: list[Run]) -> None:
    """Runs what the options ask for and `finished` lacks, and adds it there."""
    names = ("epochs", "train_examples", "test_examples", "weight_decay", "stop_at", "precision")
    shared = {name: getattr(options, name) for name in names}
    runs = [
        Run(mixer, length, width, lr, seed, options.pairs or PAIRS[length], options.batch or BATCH[length], **shared)
        for mixer in options.mixers for length in options.lengths for width in options.widths
        for lr in options.learning_rates for seed in range(options.seeds)
    ]  # fmt: skip
    waiting = to_do(runs, finished, options.out)
    print(f"{len(runs)} runs, of which {len(waiting)} are to do", flush=True)

    def done(run: Run) -> None:
        seconds, epochs = run.sittings[-1]["seconds"], run.sittings[-1]["epochs"]
        state = state_file(options.out, run)
        print(
            f"{run}: {run.accuracy[-1]:5.1f} % after {len(run.accuracy)} of {run.epochs} epochs, {epochs} of them in "
            f"{seconds:.0f} s{'' if run.ended else ' (to be continued)'}",
            flush=True,
        )
        if run.ended:
            finished.append(run)
            if options.out:
                write(finished, options.out)
                state.unlink(missing_ok=True)

    if waiting:
        train_all(waiting, options.device, options.runs_per_gpu, options.minutes, options.out, done)


if __name__ == "__main__":
    main()
