"""What takes two GPUs: kernels away from the current device, training over NCCL, and that under faults."""

import random
import signal
import time

import pytest
import timm
import torch
from faults import Run
from scans import longhorn_inputs
from vil.kernels import longhorn_scan

import vil  # noqa: F401  registers the models
from vil.training.interruption import PREEMPTED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture
def start(tmp_path, image_folder):
    """Starts a `Run` on GPUs, in a folder of its own in the test's."""
    runs = []

    def start(name, processes, **options):
        (tmp_path / name).mkdir(exist_ok=True)
        # of 16 images each of two processes has a whole group of those that are mixed
        options = dict(data_dir=str(image_folder), device="cuda", global_batch_size=16) | options
        runs.append(Run(tmp_path / name, processes, **options))
        return runs[-1]

    yield start
    for other in runs:
        other.kill()


def finished(run):
    codes = run.wait(120)
    assert codes == [0] * len(codes), run.log.read_text()[-3000:]
    return run.result()


def losses(result):
    return [row["train_loss"] for row in result["history"]]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_scan_runs_where_its_tensors_are(backend):
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = [t.detach().to(device).requires_grad_() for t in longhorn_inputs(2, 197, 96, 16, torch.bfloat16)]
        y = longhorn_scan(*inputs, backend=backend)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
        assert {str(t.device) for t in results[-1]} == {device}
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))


def test_a_model_trains_where_it_is():
    gradients = []
    images = torch.randn(4, 3, 32, 32)
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        model = timm.create_model("vil_tiny", img_size=32, depth=2, num_classes=5).to(device)
        with torch.autocast("cuda", torch.bfloat16):
            model(images.to(device)).float().square().sum().backward()
        gradients.append([p.grad.cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


SUMMED = dict(global_batch_size=32, batch_size=8)  # gradients of several micro-batches on each GPU


@pytest.mark.parametrize("options", [{}, {"amp_dtype": "float16"}], ids=str)
def test_two_gpus_train_as_one(start, options):
    one, two = (losses(finished(start(str(n), n, **options))) for n in (1, 2))
    assert two == pytest.approx(one, rel=2e-3)


@pytest.mark.parametrize("processes", [1, 2])
def test_gradients_in_float16_are_measured_and_clipped_without_their_scale(start, processes):
    truth = finished(start("float32", 1, amp=False, clip_grad=0.5))["history"]
    for row, expected in zip(
        finished(start("float16", processes, amp_dtype="float16", clip_grad=0.5))["history"], truth
    ):
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
        assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-2)


@pytest.mark.parametrize("options", [{}, SUMMED, {"grad_checkpointing": True}, {"clip_grad": 0.5}], ids=str)
def test_cuda_graphs_train_as_eager_mode(start, options):
    eager = losses(finished(start("eager", 1, cuda_graphs=False, **options)))
    assert losses(finished(start("1", 1, **options))) == pytest.approx(eager, rel=1e-6)
    assert losses(finished(start("2", 2, **options))) == pytest.approx(eager, rel=2e-3)


def test_compiled_models_train_as_eager_mode(start):
    eager = losses(finished(start("eager", 1, cuda_graphs=False)))
    for processes in (1, 2):
        compiled = losses(finished(start(str(processes), processes, torchcompile=True)))
        assert compiled == pytest.approx(eager, rel=2e-3)


def test_a_run_over_nccl_loses_nothing(start):
    undisturbed = finished(start("undisturbed", 2))
    rng = random.Random(0)
    for attempt in range(3):
        run = start("run", 2)
        run.wait_for_saves(2)
        time.sleep(rng.uniform(0, 0.1))
        run.signal(signal.SIGKILL, attempt % 2)
        begin = time.monotonic()
        codes = run.wait(60)
        print(f"the other process ended {time.monotonic() - begin:.1f} s after SIGKILL to one: {codes}")
        log = run.log.read_text()
        assert (codes[attempt % 2], codes[1 - attempt % 2]) == (-signal.SIGKILL, 1), log
        assert "by peer" in log  # connection closed, or reset
    run = start("run", 2)
    run.wait_for_saves(1)
    run.signal(signal.SIGTERM, 1)
    assert run.wait() == [PREEMPTED, PREEMPTED]
    result = finished(start("run", 2))
    print("bit for bit:", torch.equal(*(torch.tensor(r["losses"]) for r in (result, undisturbed))))
    assert losses(result) == pytest.approx(losses(undisturbed), rel=2e-3)


def test_a_run_goes_on_with_fewer_gpus(start):
    undisturbed = finished(start("undisturbed", 2))
    run = start("run", 2)
    run.wait_for_saves(3)
    run.signal(signal.SIGTERM)
    assert run.wait() == [PREEMPTED, PREEMPTED]
    assert losses(finished(start("run", 1))) == pytest.approx(losses(undisturbed), rel=2e-3)
