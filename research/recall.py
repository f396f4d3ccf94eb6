"""Train Longhorn, Mamba and attention on multi-query associative recall (Arora et al., "Zoology", 2023).

    python -m research.recall --lengths 512 --seeds 4 --minutes 9 --out output/recall.json    # repeat
    python -m research.recall --report output/recall.json output/more.json --out output/all.json --plot output/all.png

A sequence lists key-value pairs and then repeats every key once, at distances that follow a power law. At each repeated
key the model must predict the key's value. A run is a mixer, a width, a length, a learning rate and a seed. Runs in the
file `--out` are not repeated. Runs that are unfinished when the time is up resume from their last epoch in the next
call, from files in the folder `--out` with the suffix .states. Parallel calls need different files `--out`, which
`--report` joins. One process for each GPU trains several runs at a time, each as CUDA graphs on its own stream.

The program follows Zoology's harness at commit d88d6f5 (2026-01) with Zoology's configuration of figure 2
(iclr24_zoology_figure2):
  - two layers of width C for every mixer, without an MLP, with Zoology's initialization;
  - Mamba's block with RMSNorm;
  - attention with a LayerNorm before and after attention, position embeddings, and dropout of 0.1 on embeddings and
  attention;
  - LayerNorm and the tied embedding as head;
  - token 0 between queries;
  - AdamW with weight decay 0.1 on all parameters, and a cosine schedule by epochs to 0 without warm-up;
  - 64 epochs of the same batches in the same order, and early stopping above 99%.

All runs use the same data. The seed of a run determines the run's weights and dropout, and simultaneous runs do not
change them. The program differs from Zoology's harness in the following points:
  - the loss is computed from logits, because Zoology's forward at d88d6f5 returns embeddings and cannot train on
  tokens;
  - the lengths include 512 tokens, which Zoology's configuration has commented out;
  - matrix products and activations are bf16 (with `--precision fp32`, matrix products use TF32); the residual stream,
  weights, norms and states are fp32 as in Zoology, and accuracy is measured with fp32 activations, on a GPU with TF32
  matrix products;
  - sequences of an incomplete batch are left out, for example the last 32 of the 100,000 sequences of 512 tokens;
  - random numbers differ, so the data are another sample of the same distribution;
  - Longhorn, which Zoology does not have, replaces Mamba's recurrence, with the weights of this package's blocks and
  their initialization; all other parts are Mamba's block;
  - the tried learning rates are close to those at which recurrent models learn, instead of 1e-4 to 1e-2.
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
from vil.fault_tolerance.files import write_atomically
from vil.info import git_commit
from vil.training.gradients import FlatGradients

# Numbers of key-value pairs and batch sizes by sequence length, as in figure 2 of the Zoology paper
PAIRS = {64: 4, 128: 8, 256: 16, 512: 64}
BATCH = {64: 512, 128: 512, 256: 256, 512: 128}
LEARNING_RATES = [1e-3, 2.2e-3, 4.6e-3, 1e-2]
DATA_SEED = 123
# maximum number of parameters per optimizer tensor; small tensors spread the update over more thread blocks, because
# one thread block of AdamW's fused kernel updates up to 65,536 parameters of a tensor
PIECE = 8192
STEPS_A_TURN = 16  # number of training steps that a run queues on the GPU before another run queues steps
SECONDS_BETWEEN_SAVES = 60
DONE = object()


@functools.cache
def shared_examples(count: int, length: int, pairs: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return key-value pairs and query positions from `recall_examples`, cached for all runs of a process."""
    examples = recall_examples(count, length, pairs, seed, device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the examples must be complete before other CUDA streams read them
    return examples


def examples_of(run: Run, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the training and the test examples of a run."""
    counts = (run.train_examples, DATA_SEED), (run.test_examples, DATA_SEED + 1)
    return tuple(shared_examples(count, run.length, run.pairs, seed, device) for count, seed in counts)


class Training:
    """Model and optimizer of a run, and a training step that is replayed as a CUDA graph on a GPU."""

    def __init__(self, run: Run, examples: tuple[Tensor, ...], device: torch.device):
        self.run, self.examples, self.device = run, examples, device
        self.generator = torch.default_generator
        if device.type == "cuda":
            # In PyTorch 2.11, graphs captured with one generator share its seed and offset in GPU memory.
            # Each run needs a separate generator, because graph replays on other streams would change the seed.
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
        """Warm up a training step, and return the step, or on a GPU a replay of its CUDA graph.

        The warm-up steps have a learning rate of 0, so they do not change the weights. `_tried` resets the optimizer
        state, and `begin_epoch` resets the sums over steps.
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
        """Seed the generator at the start of each turn of a run, so that dropout does not depend on other runs."""
        self.generator.manual_seed(1_000_003 * self.run.seed + step)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the training state by name."""
        named = {"weights": self.weights}
        for i, state in enumerate(self.optimizer.state.values()):
            named |= {f"{of}/{i}": value for of, value in state.items()}
        return named

    def save(self, path: Path) -> None:
        tensors = {name: t.cpu() for name, t in self.tensors().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save(tensors, {"run": json.dumps(asdict(self.run))}))

    def load(self, path: Path) -> None:
        """Load the training state from a file written by `save`.

        Raises:
            ValueError: The file belongs to a run with other settings.
        """
        with safe_open(path, "pt") as file:
            saved = Run(**json.loads(file.metadata()["run"]))
            if saved.key != self.run.key:
                raise ValueError(
                    f"{path} must be a state of this run, got another run ({saved}): remove it, or choose another --out"
                )
            for name, tensor in self.tensors().items():
                tensor.copy_(file.get_tensor(name))
        for name in ("accuracy", "loss", "gradient_norm", "sittings"):
            setattr(self.run, name, getattr(saved, name))

    @torch.no_grad()
    def accuracy(self, pairs: Tensor, queries: Tensor) -> Tensor:
        """Return the percentage of queries whose correct value has the largest logit, as a tensor on the device."""
        self.model.eval()
        parts = zip(pairs.split(self.run.batch), queries.split(self.run.batch))
        correct = sum((self.model(p, q).argmax(-1) == p[:, 1::2]).sum() for p, q in parts)
        self.model.train()
        return 100 * correct / queries.numel()


def train(
    run: Run, examples: Callable[[Run], tuple], device: torch.device, deadline: float, state: Path | None = None
) -> Iterator[None]:
    """Train a run and store the results in `run`. The generator yields after queuing `STEPS_A_TURN` training steps.

    Training ends after the last epoch, if the accuracy of an epoch exceeds `stop_at` percent, or if a loss or gradient
    norm is not finite. After the deadline, training ends with the current epoch and saves its state to the file `state`
    for the next call.
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
    """Return a CUDA event that follows all work queued on the current stream, or None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def ended(event: torch.cuda.Event | None) -> Iterator[None]:
    """Yield until the GPU has reached `event`, which limits each run to 2 x `STEPS_A_TURN` queued steps."""
    while event and not event.query():
        yield


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def state_file(out: Path | None, run: Run) -> Path | None:
    """Return the path of a run's state file (12 bytes per parameter), which is deleted when the run ends."""
    if out is None:
        return None
    digest = hashlib.sha256(json.dumps(run.key).encode()).hexdigest()[:12]
    return out.with_suffix(".states") / f"{run.mixer}-{run.lr:g}-{run.seed}-{digest}.safetensors"


def work(
    index: int, device_type: str, hands: list[list[Run]], results, at_a_time: int, deadline: float, out: Path | None
) -> None:
    """Train the runs `hands[index]` in a worker process, `at_a_time` of them in turns, and return them by `results`."""
    device = torch.device(device_type, index if device_type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 1000  # torch.compile compiles each model and sequence length separately

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
    """Train on all GPUs of this machine, or on the CPU, and call `done` with each run that ends or runs out of time."""
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
            workers.join(timeout=0)  # `join` raises the exception of a failed worker process
            continue
        if run is None:
            processes -= 1
        else:
            done(run)
    while not workers.join():
        pass


def to_do(runs: Iterable[Run], finished: Iterable[Run], out: Path | None) -> list[Run]:
    """Return the unfinished runs: started runs first, and new runs by seed, so that partial results are balanced."""
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
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds of each setting, from 0")
    parser.add_argument("--epochs", type=int, default=64)
    parser.add_argument("--train-examples", type=int, default=100_000)
    parser.add_argument("--test-examples", type=int, default=3_000)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--precision", choices=["bf16", "fp32"], default="bf16", help="precision of products and activations"
    )
    parser.add_argument("--stop-at", type=float, default=99.0, help="accuracy in percent above which a run ends")
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--runs-per-gpu", type=int, default=6, help="number of runs that a GPU trains at a time")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="time limit, after which every run ends with its current epoch"
    )
    parser.add_argument("--out", type=Path, help="JSON file to which finished runs are added")
    parser.add_argument("--plot", type=Path, help="PNG file with a plot of all runs")
    parser.add_argument(
        "--report", nargs="+", type=Path, metavar="FILE", help="train nothing, but merge these files into --out"
    )
    options = parser.parse_args()
    for length in options.lengths:
        if length not in PAIRS and not (options.pairs and options.batch):
            parser.error(f"--pairs and --batch are required for a length of {length} tokens")
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
                f"another call is writing to {options.out}: wait until it ends, or choose another --out and join both "
                "files with --report"
            )
        print(f"{time.perf_counter() - start:.0f} s\n")
    if options.report and options.out:
        write(finished, options.out)
    print(report(finished))
    if options.plot:
        plot(finished, options.plot)


def run_all(options: argparse.Namespace, finished: list[Run]) -> None:
    """Train the requested runs that the list `finished` lacks, and append each run that ends to `finished`."""
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
