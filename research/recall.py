"""Multi-query associative recall (Arora et al., "Zoology", 2023): Longhorn, Mamba and attention in one harness.

    python -m research.recall --lengths 512 --seeds 4 --minutes 9 --out output/recall.json    # again and again
    python -m research.recall --report output/recall.json output/more.json --out research/results/recall.json

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

    B batch    T tokens    P key-value pairs    C model width    D inner width
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from queue import Empty

import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from vil.kernels import longhorn_scan, selective_scan

from research.causal_conv import silu_of_causal_conv
from vil.block import LonghornDirection, MambaDirection
from vil.evaluation.comparison import markdown_table
from vil.files import write_atomically
from vil.info import git_commit
from vil.training.gradients import FlatGradients

VOCABULARY = 8192
# Zoology's figure 2, which the Longhorn paper follows: pairs and batch size by the length of the sequence
PAIRS = {64: 4, 128: 8, 256: 16, 512: 64}
BATCH = {64: 512, 128: 512, 256: 256, 512: 128}
LEARNING_RATES = [1e-3, 2.2e-3, 4.6e-3, 1e-2]
POWER = 0.01  # the distance i of a query has a probability proportional to i^(POWER - 1)
LAYERS = 2
DROPOUT = 0.1  # attention's
LEARNED = 90.0  # percent: a run that ends above has learned the task
DATA_SEED = 123
PIECE = 8192  # parameters that a multiprocessor updates: AdamW's kernel would give it 65,536 of one tensor
STEPS_A_TURN = 16  # steps that a run queues before the next run's turn
SECONDS_BETWEEN_SAVES = 60
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
        with torch.no_grad():
            self.out_proj.weight.div_(math.sqrt(LAYERS))

    def forward(self, h_BTC: Tensor, wanted_BP: Tensor | None = None) -> Tensor:
        of_u, of_z = self.in_proj.weight.chunk(2)
        u_BTD, z_BPD = F.linear(h_BTC, of_u), F.linear(tokens_at(h_BTC, wanted_BP), of_z)
        conv = self.weights.conv1d
        v_BTD = silu_of_causal_conv(u_BTD, conv.weight.squeeze(1), conv.bias)
        # With zeros for a rank that is a multiple of 8 all rows start where the widest loads can
        rank, *states = self.weights.split
        zeros = -rank % 8
        projected = F.linear(v_BTD, F.pad(self.weights.x_proj.weight, (0, 0, zeros, 0)))
        step_BTR, k_BTN, q_BTN = projected.split((rank + zeros, *states), dim=-1)
        step_logits_BTD = F.linear(step_BTR, F.pad(self.weights.step_proj.weight, (zeros, 0)))
        y_BPD = tokens_at(self.scan(v_BTD, step_logits_BTD, k_BTN, q_BTN), wanted_BP)
        return self.out_proj(y_BPD * F.silu(z_BPD))

    def scan(self, v_BTD: Tensor, step_logits_BTD: Tensor, k_BTN: Tensor, q_BTN: Tensor) -> Tensor:
        return longhorn_scan(v_BTD, step_logits_BTD, k_BTN, q_BTN, self.weights.skip, self.weights.step_proj.bias)


class Mamba(Longhorn):
    direction = MambaDirection

    def scan(self, v_BTD: Tensor, step_logits_BTD: Tensor, k_BTN: Tensor, q_BTN: Tensor) -> Tensor:
        A_DN = -self.weights.A_log.exp()
        bias = self.weights.step_proj.bias
        return selective_scan(v_BTD, step_logits_BTD, A_DN, k_BTN, q_BTN, self.weights.skip, bias)


def tokens_at(t_BTC: Tensor, places_BP: Tensor | None) -> Tensor:
    """The tokens at these places (B, P, C), or all of them."""
    if places_BP is None:
        return t_BTC
    return t_BTC.gather(1, places_BP.unsqueeze(-1).expand(-1, -1, t_BTC.shape[-1]))


class Attention(nn.Module):
    """Causal attention with one head."""

    def __init__(self, width: int):
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        for layer, std in ((self.in_proj, 0.02), (self.out_proj, 0.02 / math.sqrt(2 * LAYERS))):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, h_BTC: Tensor, wanted_BP: Tensor | None = None) -> Tensor:
        q_B1TC, k_B1TC, v_B1TC = (part.unsqueeze(1) for part in self.in_proj(h_BTC).chunk(3, dim=-1))
        dropout = DROPOUT if self.training else 0.0
        y_B1TC = F.scaled_dot_product_attention(q_B1TC, k_B1TC, v_B1TC, dropout_p=dropout, is_causal=True)
        return self.out_proj(tokens_at(y_B1TC.squeeze(1), wanted_BP))


class RecurrentBlock(nn.Module):
    """Mamba's block: x + mixer(norm(x)), with the residual stream x in fp32, of all tokens or the wanted ones."""

    def __init__(self, mixer: nn.Module, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.mixer = mixer

    def forward(self, x_BTC: Tensor, wanted_BP: Tensor | None = None) -> Tensor:
        return tokens_at(x_BTC, wanted_BP) + self.mixer(self.norm(x_BTC), wanted_BP)


class AttentionBlock(nn.Module):
    """Zoology's transformer block whose MLP is the identity, so that a norm is what it adds."""

    def __init__(self, mixer: nn.Module, width: int):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer = mixer

    def forward(self, x_BTC: Tensor, wanted_BP: Tensor | None = None) -> Tensor:
        x_BPC = tokens_at(x_BTC, wanted_BP) + self.mixer(self.norm(x_BTC), wanted_BP)
        return x_BPC + self.second_norm(x_BPC)


MIXERS: dict[str, type[nn.Module]] = {"longhorn": Longhorn, "mamba": Mamba, "attention": Attention}


class RecallModel(nn.Module):
    """The model of sequences as `recall_examples` has them."""

    def __init__(self, mixer: str, width: int, length: int, vocabulary: int = VOCABULARY):
        super().__init__()
        self.length, attends = length, mixer == "attention"
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width)) if attends else None
        block = AttentionBlock if attends else RecurrentBlock
        self.blocks = nn.ModuleList([block(MIXERS[mixer](width), width) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(width)

    def embedded(self, pairs_BS: Tensor, queries_BP: Tensor) -> Tensor:
        """Embeddings of the tokens (B, T, C).

        Token 0, which most are, is not looked up: its gradient is then a sum, and no long queue of atomic additions.
        """
        x_BSC = self.embedding(pairs_BS)
        keys_BPC = x_BSC[:, ::2]
        rest = self.embedding.weight[0].expand(len(x_BSC), self.length - x_BSC.shape[1], -1)
        places = (queries_BP - x_BSC.shape[1]).unsqueeze(-1).expand_as(keys_BPC)
        return torch.cat([x_BSC, rest.scatter(1, places, keys_BPC)], dim=1)

    def forward(self, pairs_BS: Tensor, queries_BP: Tensor) -> Tensor:
        """Logits of the next token at the queries (B, P, vocabulary)."""
        queries_BP = queries_BP.long()
        x_BTC = self.embedded(pairs_BS, queries_BP)
        if self.positions is not None:
            x_BTC = F.dropout(x_BTC + self.positions, DROPOUT, self.training)
        *blocks, last = self.blocks
        for block in blocks:
            x_BTC = block(x_BTC)
        return F.linear(self.norm(last(x_BTC, queries_BP)), self.embedding.weight)

    def loss(self, pairs_BS: Tensor, queries_BP: Tensor) -> Tensor:
        """Mean cross-entropy of the values at the queries, in fp32."""
        logits_BPV = self(pairs_BS, queries_BP).float()
        return F.cross_entropy(logits_BPV.flatten(0, 1), pairs_BS[:, 1::2].flatten().long())


def recall_examples(
    count: int, length: int, pairs: int, seed: int, device: torch.device, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """The pairs k1 v1 ... kP vP of sequences (count, 2P), and where their keys are repeated (count, P), both int32.

    The sequence of T = `length` tokens is the pairs and then, at even distances behind them, every key once; the rest
    is token 0. Keys are distinct tokens of the first half of the vocabulary, values of the second half.

    Raises:
        ValueError: The pairs and their queries do not fit into the sequence.
    """
    if 4 * pairs > length or length % 2:
        raise ValueError(f"{pairs} pairs and their queries need an even length of at least {4 * pairs}, not {length}")
    generator = torch.Generator(device).manual_seed(seed)
    half, slots = vocabulary // 2, length // 2 - pairs
    weights = torch.arange(1, slots + 1, device=device).pow(POWER - 1)
    listed, queries = [], []
    for start in range(0, count, 8192):
        n = min(8192, count - start)
        keys = 1 + distinct(torch.ones(half - 1, device=device), n, pairs, generator)
        values = half + distinct(torch.ones(half, device=device), n, pairs, generator)
        listed.append(torch.stack([keys, values], dim=-1).flatten(1).int())
        queries.append((2 * pairs + 2 * distinct(weights, n, pairs, generator)).int())
    return torch.cat(listed), torch.cat(queries)


def distinct(weights: Tensor, count: int, pairs: int, generator: torch.Generator) -> Tensor:
    """(count, pairs) indices, each row drawn one after the other without replacement (the Gumbel-top-k trick)."""
    uniform = torch.rand(count, len(weights), generator=generator, device=weights.device)
    return (weights.log() - uniform.clamp(min=1e-30).log().neg().log()).topk(pairs).indices


@dataclass
class Run:
    """One training run: its settings, which are its key, and what came out after each epoch.

    `accuracy` is that of all queries of the test sequences, in percent; `loss` the mean of the training steps and
    `gradient_norm` the largest of theirs, None where it was not finite.
    """

    mixer: str
    length: int
    width: int
    lr: float
    seed: int
    pairs: int
    batch: int
    epochs: int
    train_examples: int
    test_examples: int
    weight_decay: float
    stop_at: float
    precision: str = "bf16"
    parameters: int = 0
    accuracy: list[float] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    gradient_norm: list[float | None] = field(default_factory=list)
    sittings: list[dict] = field(default_factory=list)  # commit, device, torch, epochs and seconds of each call

    @property
    def key(self) -> tuple:
        return tuple(getattr(self, name) for name in SETTINGS)

    @property
    def finite(self) -> bool:
        return None not in self.loss + self.gradient_norm

    @property
    def ended(self) -> bool:
        if not self.accuracy:
            return False
        return len(self.accuracy) == self.epochs or self.accuracy[-1] > self.stop_at or not self.finite

    @property
    def cost(self) -> float:
        """A guess of how long it takes."""
        return self.train_examples * self.epochs * self.length * self.width

    def __str__(self) -> str:
        return f"{self.mixer}, T {self.length}, width {self.width}, lr {self.lr:g}, seed {self.seed}"


SETTINGS = [f.name for f in fields(Run)][: [f.name for f in fields(Run)].index("parameters")]


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


def merged(files: Iterable[Path]) -> list[Run]:
    """The runs of several files; of a run that is in more than one, that of the first file."""
    runs: dict[tuple, Run] = {}
    for path in files:
        for run in (Run(**run) for run in json.loads(path.read_text())["runs"]):
            runs.setdefault(run.key, run)
    return list(runs.values())


def write(runs: list[Run], path: Path) -> None:
    write_atomically(path, json.dumps({"runs": [asdict(run) for run in runs]}, allow_nan=False) + "\n")


def experiments(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ in the mixer, the learning rate and the seed alone, by what sets them apart from the others."""
    free = ("mixer", "lr", "seed")
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(replace(run, mixer="", lr=0.0, seed=0).key, []).append(run)
    differ = [i for i, name in enumerate(SETTINGS) if name not in free and len({key[i] for key in groups}) > 1]
    shown = sorted({*differ, SETTINGS.index("length"), SETTINGS.index("width")})
    return {", ".join(f"{SETTINGS[i]} {key[i]}" for i in shown): group for key, group in groups.items()}


def learned(runs: list[Run]) -> int:
    return sum(run.accuracy[-1] > LEARNED for run in runs)


def shares(runs: list[Run]) -> str:
    """A row for each mixer and learning rate, and one over all rates, of one experiment."""
    from scipy.stats import binomtest

    head = ["mixer", "learning rate", "runs", "median %", "best %", f"above {LEARNED:g}% (95% interval of the share)",
            "finite", "epochs"]  # fmt: skip
    table = [head]
    for mixer in MIXERS:
        of_mixer = [run for run in runs if run.mixer == mixer]
        rates = sorted({run.lr for run in of_mixer})
        for rate in [*rates, None] if rates else []:
            some = [run for run in of_mixer if rate in (None, run.lr)]
            ends, n = [run.accuracy[-1] for run in some], len(some)
            low, high = binomtest(learned(some), n).proportion_ci(method="wilson")
            epochs = sorted({min(counts := [len(run.accuracy) for run in some]), max(counts)})
            cells = [mixer, "all" if rate is None else f"{rate:g}", str(n), f"{statistics.median(ends):.1f}",
                     f"{max(ends):.1f}", f"{learned(some)} ({100 * low:.0f} to {100 * high:.0f}%)",
                     str(sum(run.finite for run in some)), " to ".join(map(str, epochs))]  # fmt: skip
            table.append(cells)
    return markdown_table(table)


def verdict(runs: list[Run]) -> str:
    """Longhorn against Mamba over the learning rates and seeds that both have: Fisher's exact test of the shares.

    Runs are pooled over rates. As the design is balanced, differences between rates make that test the more cautious.
    """
    from scipy.stats import fisher_exact

    by_place = {mixer: {(r.lr, r.seed): r for r in runs if r.mixer == mixer} for mixer in ("longhorn", "mamba")}
    both = by_place["longhorn"].keys() & by_place["mamba"].keys()
    if not both:
        return ""
    n, counts = len(both), [learned([of[place] for place in both]) for of in by_place.values()]
    p = fisher_exact([[count, n - count] for count in counts]).pvalue
    first, second = counts
    return (
        f"Above {LEARNED:g}%: Longhorn {first} of {n} runs, Mamba {second} of {n}; "
        f"Fisher's exact test, two-sided: p = {p:.2g}.\n"
    )


def report(runs: list[Run]) -> str:
    parts = [f"{label}\n\n{shares(group)}\n{verdict(group)}" for label, group in experiments(runs).items()]
    return "\n".join(parts)


def plot(runs: list[Run], path: Path) -> None:
    """A row for each experiment: where every run ended, by learning rate, and its accuracy by epoch."""
    from matplotlib.figure import Figure

    groups = experiments(runs)
    colors = {mixer: f"C{i}" for i, mixer in enumerate(MIXERS)}
    figure = Figure(figsize=(9, 0.6 + 3.2 * len(groups)), layout="constrained")
    for (label, group), (ends, curves) in zip(groups.items(), figure.subplots(len(groups), 2, squeeze=False)):
        rates = sorted({run.lr for run in group})
        mixers = [mixer for mixer in MIXERS if any(run.mixer == mixer for run in group)]
        seeds = max(run.seed for run in group) + 1
        for run in group:
            # mixers side by side, and within each its seeds from left to right
            offset = 0.8 * ((mixers.index(run.mixer) + (run.seed + 0.5) / seeds) / len(mixers) - 0.5)
            ends.plot(rates.index(run.lr) + offset, run.accuracy[-1], "o", color=colors[run.mixer], markersize=4)
            curves.plot(range(1, len(run.accuracy) + 1), run.accuracy, color=colors[run.mixer], linewidth=0.7)
        ends.set(title=label, xlabel="learning rate", ylabel="accuracy of recall (%)", ylim=(-3, 103))
        ends.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        ends.axhline(LEARNED, color="grey", linewidth=0.5)
        ends.legend(handles=[ends.plot([], [], "o", color=colors[m], label=m)[0] for m in mixers])
        curves.set(xlabel="epoch", ylim=(-3, 103))
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
