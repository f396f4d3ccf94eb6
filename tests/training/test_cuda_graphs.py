"""Compare CUDA graphs with eager execution, and test functions that cannot be captured."""

import contextlib
import gc
import logging
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from vil.config import Config, ConfigError
from vil.cuda_graphs import Replayed, unchanged
from vil.training.forward_backward import ForwardBackward, largest_that_fits
from vil.training.gradients import FlatGradients
from vil.training.trainer import Trainer
from vil.training.update import Update


def on_a_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")(test))


def as_it_is(x):
    return x


CUDA = torch.device("cuda", 0)


class StandIn:
    """Stub of torch.cuda for testing `Replayed` on a CPU. Replaying a stub graph calls the captured function again."""

    def __init__(self, monkeypatch):
        self.draws, self.mode, self.within, self.waits = torch.zeros(1), 0, [], []
        main, aside = SimpleNamespace(name="main"), SimpleNamespace(name="aside")
        for stream in (main, aside):
            stream.wait_stream = lambda other: self.waits.append(other.name)
        parts = dict(CUDAGraph=lambda: self, graph=self.capture, Stream=lambda: aside, current_stream=lambda: main)
        parts |= dict(stream=contextlib.nullcontext, get_rng_state=self.draws.clone, set_rng_state=self.draws.copy_)
        parts |= dict(get_sync_debug_mode=lambda: self.mode, set_sync_debug_mode=partial(setattr, self, "mode"))
        for name, part in parts.items():
            monkeypatch.setattr(torch.cuda, name, part)

    @contextlib.contextmanager
    def capture(self, graph, capture_error_mode):
        # the capture mode must permit CUDA calls in the loader's thread
        assert (graph, capture_error_mode) == (self, "thread_local")
        self.mode = "capturing"
        yield
        self.mode = 0

    def step(self, draw, x):
        """Function to capture: add to `self.total`, call `draw`, and return 2 * x."""
        self.within.append((self.mode, gc.isenabled()))
        self.draws += 1
        self.total += x.sum() + draw()
        return 2 * x

    def replayed(self, draw, **options):
        self.total = torch.zeros(())
        step = partial(self.step, draw)
        replayed = Replayed(step, [torch.ones(3)], "the test", **options)
        self.replay = lambda: replayed.outputs.copy_(step(*replayed.buffers))
        return replayed


def test_a_function_runs_in_a_trial_then_is_captured_and_replayed(monkeypatch):
    gpu = StandIn(monkeypatch)
    replayed = gpu.replayed(int, changed=())
    assert gpu.within == [(0, True), ("error", True), ("capturing", False)]
    assert (gpu.mode, gpu.draws.item(), gpu.total.item()) == (0, 0, 9)
    assert gpu.waits == ["main", "aside"]  # the streams are synchronized before and after the warm-up
    for x in (torch.arange(3.0), torch.ones(3), torch.ones(5)):
        assert torch.equal(out := replayed(x), 2 * x)
        assert (out is replayed.outputs) == (len(x) == 3)
    gpu.within.clear()
    gpu.replayed(int, tried=True)  # with tried=True, the function is captured without a warm-up
    assert gpu.within == [("capturing", False)]


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_functions_that_sample_on_the_host_are_not_captured(monkeypatch, caplog, draw):
    replayed = StandIn(monkeypatch).replayed(draw)
    (line,) = caplog.messages
    assert line.startswith("cannot capture the test")
    assert line.endswith("samples random numbers on the host")
    assert torch.equal(replayed(torch.arange(3.0)), 2 * torch.arange(3.0))


def test_an_out_of_memory_error_restores_the_state(monkeypatch, caplog):
    def draw():
        raise torch.OutOfMemoryError("no room")

    gpu, changed = StandIn(monkeypatch), torch.ones(3)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.replayed(lambda: changed.zero_() is None or draw(), changed=[changed])
    assert (gpu.mode, gpu.draws.item(), changed.tolist(), caplog.messages) == (0, 0, [1, 1, 1], [])
    assert gpu.waits == ["main", "aside"]


@pytest.mark.parametrize(
    ("room", "tried", "fits"), [(12, [12], 12), (5, [12, 6, 4], 4), (0, [12, 6, 4, 3, 2, 1], None)]
)
def test_the_largest_micro_batch_that_fits_into_memory_divides_the_batch(room, tried, fits):
    sizes = []

    def try_out(size):
        sizes.append(size)
        if size > room:
            raise torch.OutOfMemoryError("no room")

    assert largest_that_fits(12, try_out) == fits
    assert sizes == tried


class Step:
    """Training step that accumulates gradients of a model with dropout and batch norm."""

    def __init__(self, between=as_it_is):
        torch.manual_seed(0)
        layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 5)]
        self.model, self.between = nn.Sequential(*layers).cuda(), between
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.calls = 0

    def __call__(self, x, targets):
        self.calls += 1
        loss = nn.functional.cross_entropy(self.between(self.model(x)), targets)
        loss.backward()
        return loss.detach()

    @property
    def changed(self):
        return [*(p.grad for p in self.model.parameters()), *self.model.buffers()]


def batches(sizes=(8, 8, 8)):
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        x = torch.randn(size, 16, generator=generator)
        yield x.cuda(), torch.randint(5, (size,), generator=generator).cuda()


def outcome(step, function, sizes=(8, 8, 8)):
    losses = []
    for i, batch in enumerate(batches(sizes)):
        torch.manual_seed(i)  # this seed determines the dropout masks
        losses.append(function(*batch).item())
    return losses, [t.clone() for t in step.changed]


def zeros():
    return torch.zeros(8, 16, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")


def computed_twice(x):
    return torch.utils.checkpoint.checkpoint(nn.functional.dropout, x, use_reentrant=False)


@on_a_gpu
@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 5, 8)], ids=str)
@pytest.mark.parametrize("between", [as_it_is, computed_twice])
def test_a_graph_computes_the_same_as_its_function(between, sizes):
    expected = outcome(step := Step(between), step, sizes)
    step = Step(between)
    replayed = Replayed(step, zeros(), "the test", step.changed)
    calls = step.calls
    torch.testing.assert_close(outcome(step, replayed, sizes), expected, rtol=0, atol=0)
    if between is as_it_is:
        # Batches of the captured size replay the graph, and other batches call the function.
        assert step.calls == calls + sum(size != 8 for size in sizes)


@on_a_gpu
def test_the_trial_run_changes_no_state():
    step = Step()
    before, (_, state) = [t.clone() for t in step.changed], (torch.manual_seed(5), torch.cuda.get_rng_state())
    Replayed(step, zeros(), "the test", step.changed)
    torch.testing.assert_close(step.changed, before, rtol=0, atol=0)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def read_by_the_host(x):
    return x * (2 if x.sum().item() > 1e9 else 1)


def drawn_by_the_host(x):
    return x * random.choice([1, 2])


@on_a_gpu
@pytest.mark.parametrize(
    ("between", "reason"),
    [(read_by_the_host, "synchronizing"), (drawn_by_the_host, "the function samples random numbers on the host")],
)
def test_functions_that_cannot_be_captured_run_in_eager_mode_with_the_reason_logged(between, reason, caplog):
    random.seed(0)
    expected = outcome(step := Step(between), step)
    step = Step(between)
    with caplog.at_level(logging.WARNING):
        replayed = Replayed(step, zeros(), "the test", step.changed)
    (line,) = caplog.messages
    assert line.startswith("cannot capture the test as a CUDA graph, running in eager mode instead: ")
    assert reason in line
    random.seed(0)
    # results may differ by rounding, because cuBLAS may sum in a different order if several streams are active
    torch.testing.assert_close(outcome(step, replayed), expected, rtol=1e-5, atol=1e-5)


@on_a_gpu
def test_an_out_of_memory_error_during_capture_is_raised():
    with pytest.raises(torch.OutOfMemoryError):
        Replayed(lambda x: x.expand(2**50, 4).contiguous(), [torch.zeros(4, device="cuda")], "the test")
    torch.manual_seed(0)
    assert torch.rand(3, device="cuda").isfinite().all()


@on_a_gpu
def test_unchanged_restores_tensors_after_an_error():
    t = torch.ones(3, device="cuda")
    with contextlib.suppress(ZeroDivisionError), unchanged([t]):
        t.zero_()
        _ = 1 / 0
    assert t.tolist() == [1, 1, 1]


@on_a_gpu
@pytest.mark.parametrize("as_graph", [True, False])
def test_updates_are_bitwise_identical_to_pytorchs_optimizer_and_timms_ema(as_graph):
    """Gradient norms of six steps, and the final weights, EMA and optimizer state, equal PyTorch's and timm's."""
    outcomes = []
    for ours in (True, False):
        model = Step().model
        names = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
        groups = [dict(params=list(names[0]), weight_decay=0.1), dict(params=list(names[1]))]
        optimizer = torch.optim.AdamW(groups, fused=True)
        average, gradients = ModelEmaV3(model, decay=0.9), FlatGradients(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        update = Update(model, gradients, optimizer, scaler, average, 0.5, as_graph)
        norms = []
        for step in range(6):
            for group, rate in zip(groups, (0.1 / (1 + step // 2), 0.03)):  # fp32 cannot represent these rates exactly
                group["lr"] = optimizer.param_groups[groups.index(group)]["lr"] = rate
            torch.manual_seed(step)
            gradients.add(model(torch.randn(8, 16, device="cuda")).square().sum())
            model[1].num_batches_tracked.fill_(step)
            if ours:
                norms.append(update().item())
                assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in groups]
                continue
            norms.append(gradients.norm().item())
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, torch.tensor(norms[-1], device="cuda"))
            for group in optimizer.param_groups:
                group["lr"] = float(torch.tensor(group["lr"]))
            optimizer.step()
            average.update(model)
            gradients.zero()
        assert not ours or (isinstance(update.run, Replayed) and update.run.graph is not None) == as_graph
        outcomes.append([norms, model.state_dict(), average.module.state_dict(), optimizer.state_dict()["state"]])
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@on_a_gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_run_uses_the_largest_micro_batch_that_fits(tmp_path, monkeypatch, cuda_graphs):
    """If a batch does not fit, accumulation over smaller micro-batches gives about equal losses and gradient norms."""
    options = dict(synthetic=64, num_classes=4, global_batch_size=32, amp=False, model_ema=False, img_size=32)
    options |= dict(model_kwargs=dict(embed_dim=32, depth=2), output=str(tmp_path), cuda_graphs=cuda_graphs)
    run, runs = ForwardBackward.run, []
    progress = SimpleNamespace(show=lambda *_: None, finish_step=lambda: None)

    def limited(self, images, targets):
        if len(images) > most:
            raise torch.OutOfMemoryError("no room for so many")
        return run(self, images, targets)

    monkeypatch.setattr(ForwardBackward, "run", limited)
    for most in (32, 10):
        runs.append(Trainer(Config(**options, experiment=str(most)), CUDA, 0, 1))
        runs[-1].train_one_epoch(0, progress)
    whole, parts = runs
    assert (whole.forward_backward.micro_batch, parts.forward_backward.micro_batch) == (32, 8)
    assert "micro-batches of 8 images, global batch size 32" in parts.setup
    assert len(parts.state.meter.losses) == 2
    assert parts.state.meter.losses == pytest.approx(whole.state.meter.losses, rel=1e-3)
    assert parts.state.meter.norms == pytest.approx(whole.state.meter.norms, rel=1e-2)  # convolutions compute in TF32


@on_a_gpu
def test_a_gpu_without_memory_for_one_image_is_reported_in_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ForwardBackward, "run", full)
    options = dict(synthetic=8, num_classes=4, global_batch_size=8, model_kwargs=dict(depth=1), output=str(tmp_path))
    with pytest.raises(ConfigError, match="cuda:0 has too little memory to train vil_tiny on one image"):
        Trainer(Config(**options, experiment="run"), CUDA, 0, 1)
