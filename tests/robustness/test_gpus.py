"""Tests that need two GPUs: kernels on a non-current device, training over NCCL, and faults."""

import random
import signal
import time

import pytest
import timm
import torch
from scans import longhorn_inputs

import vil  # noqa: F401  registers the models
from vil.kernels import longhorn_scan
from vil.training.interruption import PREEMPTED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture
def start_on_gpus(start, tmp_path):
    """Return a function that starts a `Run` on GPUs in a named subfolder of the test's folder."""
    # With a global batch of 16 images, each of two ranks has one complete mixup group of 8 images.
    defaults = dict(device="cuda", global_batch_size=16)
    return lambda name, processes, **options: start(processes, output=tmp_path / name, **defaults | options)


def losses(result):
    return [row["train_loss"] for row in result["history"]]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_scan_runs_on_the_device_of_its_tensors(backend):
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = [t.detach().to(device).requires_grad_() for t in longhorn_inputs(2, 197, 96, 16, torch.bfloat16)]
        y = longhorn_scan(*inputs, backend=backend)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
        assert {str(t.device) for t in results[-1]} == {device}
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))


def test_a_model_trains_on_a_non_current_device():
    gradients = []
    images = torch.randn(4, 3, 32, 32)
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        model = timm.create_model("vil_tiny", img_size=32, depth=2, num_classes=5).to(device)
        with torch.autocast("cuda", torch.bfloat16):
            model(images.to(device)).float().square().sum().backward()
        gradients.append([p.grad.cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


SUMMED = dict(global_batch_size=32, batch_size=8)  # each of two GPUs accumulates two micro-batches


@pytest.mark.parametrize("options", [{}, {"amp_dtype": "float16"}], ids=str)
def test_two_gpus_train_like_one(start_on_gpus, options):
    one, two = (losses(start_on_gpus(str(n), n, **options).finished()) for n in (1, 2))
    assert two == pytest.approx(one, rel=2e-3)


@pytest.mark.parametrize("processes", [1, 2])
def test_float16_gradients_are_unscaled_before_logging_and_clipping(start_on_gpus, processes):
    truth = start_on_gpus("float32", 1, amp=False, clip_grad=0.5).finished()["history"]
    scaled = start_on_gpus("float16", processes, amp_dtype="float16", clip_grad=0.5).finished()
    for row, expected in zip(scaled["history"], truth):
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
        assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-2)


@pytest.mark.parametrize("options", [{}, SUMMED, {"grad_checkpointing": True}, {"clip_grad": 0.5}], ids=str)
def test_cuda_graphs_train_like_eager_mode(start_on_gpus, options):
    eager = losses(start_on_gpus("eager", 1, cuda_graphs=False, **options).finished())
    assert losses(start_on_gpus("1", 1, **options).finished()) == pytest.approx(eager, rel=1e-6)
    assert losses(start_on_gpus("2", 2, **options).finished()) == pytest.approx(eager, rel=2e-3)


def test_compiled_models_train_like_eager_mode(start_on_gpus):
    eager = losses(start_on_gpus("eager", 1, cuda_graphs=False).finished())
    for processes in (1, 2):
        compiled = losses(start_on_gpus(str(processes), processes, torchcompile=True).finished())
        assert compiled == pytest.approx(eager, rel=2e-3)


def test_a_run_over_nccl_resumes_after_a_kill_without_losing_progress(start_on_gpus):
    undisturbed = start_on_gpus("undisturbed", 2).finished()
    rng = random.Random(0)
    for attempt in range(3):
        run = start_on_gpus("run", 2)
        run.wait_for_saves(2)
        time.sleep(rng.uniform(0, 0.1))
        run.signal(signal.SIGKILL, attempt % 2)
        begin = time.monotonic()
        codes = run.wait(60)
        print(f"the other process ended {time.monotonic() - begin:.1f} s after SIGKILL to one: {codes}")
        log = run.said()
        assert (codes[attempt % 2], codes[1 - attempt % 2]) == (-signal.SIGKILL, 1), log
        assert "by peer" in log  # Gloo reports a connection that was closed or reset by the peer
    run = start_on_gpus("run", 2)
    run.wait_for_saves(1)
    run.signal(signal.SIGTERM, 1)
    assert run.wait() == [PREEMPTED, PREEMPTED]
    result = start_on_gpus("run", 2).finished()
    print("bit for bit:", torch.equal(*(torch.tensor(r["losses"]) for r in (result, undisturbed))))
    assert losses(result) == pytest.approx(losses(undisturbed), rel=2e-3)
