"""Tests of the training loop: numbers equal to those of `naive_training`, log messages, resuming, and best.pt."""

import io
import re
import shutil
import signal
import sys

import numpy as np
import pytest
import timm
import torch
from faults import Run
from naive_training import train
from PIL import Image
from processes import in_processes
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from vil import checkpoint, distributed
from vil.config import Config
from vil.evaluation.evaluator import Evaluation
from vil.exporting import export_model
from vil.factory import from_checkpoint
from vil.training.divergence import DivergenceError, check_divergence
from vil.training.interruption import PreemptedError
from vil.training.progress import Progress
from vil.training.summary import Reporter
from vil.training.trainer import Trainer
from vil.training.trainer import train as train_phases

pytestmark = pytest.mark.usefixtures("no_pictures")

CPU = torch.device("cpu")
CLASSES = 7  # more than five classes, so that top-5 accuracy can be below 100%
# PLAIN disables augmentation. Most numbers in OPTIONS are distinct, so that a test fails if two options are swapped.
PLAIN = dict(aa=None, color_jitter=None, hflip=0.0, scale=(1.0, 1.0), ratio=(1.0, 1.0), reprob=0.0, crop_pct=1.0)
OPTIONS = PLAIN | dict(
    model="vil_tiny", model_kwargs=dict(embed_dim=16, depth=2, patch_size=8), img_size=16, drop_path=0.0, seed=3,
    epochs=4, global_batch_size=16, lr=2e-2, min_lr=3e-3, warmup_epochs=1, warmup_lr=4e-3, weight_decay=0.3,
    opt_betas=(0.85, 0.97), opt_eps=1e-4, layer_decay=None, clip_grad=None, smoothing=0.2, mixup=0.0, cutmix=0.0,
    mixup_prob=0.9, aug_repeats=0, model_ema_decay=0.8, bce_loss=False, bce_target_thresh=None, bce_sum=False,
    distillation="hard", distillation_alpha=0.4, distillation_tau=1.7,
)  # fmt: skip
EVERYTHING = dict(
    layer_decay=0.6, clip_grad=0.7, mixup=0.8, drop_path=0.4, aug_repeats=2, warmup_epochs=2, epochs=5, seed=11
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder {train,val}/{0..6}/*.png of 16 x 16 noise images with the class's grey level in one corner."""
    root, rng = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 6)):
        for target in range(CLASSES):
            (root / split / str(target)).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                pixels[:5, :5] = 30 * target + 20
                Image.fromarray(pixels).save(root / split / str(target) / f"{i}.png")
    return root


def trainer(folder, output, **options):
    settings = dict(data_dir=str(folder), output=str(output), experiment="run", workers=0, log_interval=1)
    return Trainer(Config(**OPTIONS | settings | options), CPU, 0, 1)


def assert_same_run(output, truth, rtol=1e-4):
    """Assert that the files of a run contain the results of `naive_training.train`."""
    last, best = (torch.load(output / "run" / name, weights_only=True) for name in ("last.pt", "best.pt"))
    assert len(last["history"]) == len(truth.rows)
    for row, expected in zip(last["history"], truth.rows):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=rtol)
    scores = [max(row["eval_top1"], row["eval_top1_ema"]) for row in truth.rows]
    best_epoch = max(epoch for epoch, score in enumerate(scores) if score == max(scores))
    for saved, epoch in ((last, len(truth.rows) - 1), (best, best_epoch)):
        assert saved["epoch"] == epoch + 1
        for part, expected in (("state_dict", truth.weights), ("state_dict_ema", truth.averages)):
            assert saved[part].keys() == expected[epoch].keys()
            for name, tensor in expected[epoch].items():
                torch.testing.assert_close(saved[part][name], tensor, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize(
    ("options", "micro_batch"),
    [
        ({}, None),
        (EVERYTHING, None),
        (EVERYTHING | dict(batch_size=5), 4),
        (dict(model="vim_tiny", grad_checkpointing=True, clip_grad=0.1, drop_path=0.3), None),
    ],
    ids=["plain", "everything", "accumulated", "checkpointed"],
)
def test_a_run_equals_the_naive_implementation(folder, tmp_path, options, micro_batch):
    truth = train(folder, OPTIONS | options, micro_batch)
    trainer(folder, tmp_path, **options).run()
    assert_same_run(tmp_path, truth)
    # The runs must have varied accuracies, because equal accuracies would hide errors.
    assert len({row["eval_top1"] for row in truth.rows} | {row["eval_top1_ema"] for row in truth.rows}) > 2
    assert any(row["eval_top1"] < row["eval_top5"] < 100 for row in truth.rows)
    assert max(truth.norms) > options.get("clip_grad", 0)


BINARY = dict(bce_loss=True, clip_grad=None)


@pytest.mark.parametrize(
    "options",
    [
        BINARY, BINARY | dict(bce_target_thresh=0.3, smoothing=0.1), BINARY | dict(mixup=0.8),
        BINARY | dict(mixup=0.8, bce_target_thresh=0.2, bce_sum=True, smoothing=0.0),
    ],
    ids=["smoothed", "threshold", "mixed", "threshold of mixed, sums"],
)  # fmt: skip
def test_binary_cross_entropy_equals_the_naive_implementation(folder, tmp_path, options):
    trainer(folder, tmp_path, epochs=1, **options).run()
    assert_same_run(tmp_path, train(folder, OPTIONS | dict(epochs=1) | options))


@pytest.mark.parametrize(
    "options",
    [
        # test_vit's image size, mean and std differ from the student's
        dict(teacher="test_vit", distillation="hard", mixup=0.8),
        dict(teacher="test_vit", distillation="soft", mixup=0.8),
        dict(teacher="test_resnet", distillation="soft", bce_loss=True, bce_sum=True, batch_size=4),
    ],
    ids=["hard", "soft", "beside bce, accumulated"],
)
def test_a_distilled_run_equals_the_naive_implementation(folder, tmp_path, options):
    torch.manual_seed(5)
    teacher = timm.create_model(options["teacher"], num_classes=CLASSES).eval()
    for parameter in teacher.parameters():
        parameter.data.mul_(1.5)  # makes the teacher's logits larger
    torch.save(teacher.state_dict(), tmp_path / "teacher.pth")
    run = trainer(folder, tmp_path, epochs=1, teacher_checkpoint=str(tmp_path / "teacher.pth"), **options)
    costs = []
    for model, size in (
        (teacher, teacher.default_cfg["input_size"][1:] if "vit" in options["teacher"] else (16, 16)),
        (run.state.model, (16, 16)),
    ):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.eval()(torch.zeros(1, 3, *size))
        costs.append(counter.get_total_flops() / 1e9)
    cost = f"{costs[0]:.3g} GFLOPs per image; training vil_tiny needs {3 * costs[1]:.3g}"
    assert run.setup.endswith(f"; teacher {options['teacher']} needs {cost}")
    run.run()
    truth = train(folder, OPTIONS | dict(epochs=1) | options, options.get("batch_size"), teacher=teacher)
    assert_same_run(tmp_path, truth)
    assert not any(
        "teacher" in name for name in checkpoint.Checkpoint(tmp_path / "run" / "last.pt").training_state()["state_dict"]
    )


def test_phases_equal_the_naive_implementation(folder, tmp_path):
    """A run of two phases, with a teacher of another image size, equals `naive_training`.

    The phases differ in image size, batch size, learning rate, label smoothing and mixup.
    """
    phases = [
        dict(epochs=2, img_size=8, lr=2e-2),
        dict(epochs=3, global_batch_size=8, lr=1e-2, smoothing=0.1, mixup=0.8),
    ]
    kwargs = dict(embed_dim=16, depth=2, patch_size=(4, 2))
    of_teacher = dict(num_classes=CLASSES, depth=1, img_size=12, patch_size=4)
    torch.save(timm.create_model("vil_tiny", **of_teacher).state_dict(), tmp_path / "teacher.pth")
    export_model(from_checkpoint(tmp_path / "teacher.pth", "vil_tiny", **of_teacher), tmp_path / "own", std=[0.5])
    teacher = from_checkpoint(tmp_path / "own")  # the exported model stores its own image size and std
    settings = dict(data_dir=str(folder), output=str(tmp_path), experiment="run", workers=0, log_interval=1)
    settings |= dict(teacher="vil_tiny", teacher_checkpoint=str(tmp_path / "own"))
    train_phases(Config(**OPTIONS | settings | dict(model_kwargs=kwargs, phases=phases)), CPU, 0, 1)
    assert_same_run(tmp_path, train(folder, OPTIONS | dict(model_kwargs=kwargs), phases=phases, teacher=teacher))


def test_two_ranks_with_accumulation_and_distillation_equal_the_naive_implementation(folder, tmp_path):
    teacher = timm.create_model("test_resnet", num_classes=CLASSES).eval()
    torch.save(teacher.state_dict(), tmp_path / "teacher.pth")
    options = OPTIONS | EVERYTHING | dict(batch_size=4)
    options |= dict(teacher="test_resnet", teacher_checkpoint=str(tmp_path / "teacher.pth"))
    two = Run(tmp_path, 2, data_dir=str(folder), checkpoint_interval=None, **_plain(options))
    truth = train(folder, options, micro_batch=4, teacher=teacher)
    assert two.wait() == [0, 0], two.log.read_text()[-3000:]
    said = two.log.read_text()
    assert re.search("^train: ", said, re.M)  # messages have no logging prefix
    setup = "2 x cpu: micro-batches of 4 images, global batch size 16"
    for line in ("an epoch has ", "train: 56 images of", "validation: 42 images of", setup, "best: top-1 "):
        assert said.count(line) == 1, said  # only rank 0 logs the line
    assert_same_run(tmp_path, truth)
    again = _awkward(folder, tmp_path)
    assert Run(tmp_path, 2, **_plain(options | again)).wait() == [0, 0]
    said = two.log.read_text()
    for line in (
        "has no split 'training': train is used instead", "left out 1 link in ",
        "'validation' has no images of 1 of the 7 ", "resuming with 56 training images, was 50",
        "has finished all 5 epochs; set a larger --epochs to train longer",
    ):  # fmt: skip
        assert said.count(line) == 1, said
    assert "initialized from " not in said  # the checkpoint replaces the initial weights


def _awkward(folder, tmp_path):
    """Return options of a run that logs many messages at its start."""
    root, last = tmp_path / "awkward", tmp_path / "run" / "last.pt"
    shutil.copytree(folder, root)
    shutil.rmtree(root / "val" / "6")
    (root / "val" / "0" / "link").symlink_to(tmp_path)
    checkpoint.save_checkpoint(checkpoint.Checkpoint(last).training_state() | dict(num_images=50), last)
    return dict(data_dir=str(root), train_split="training", pretrained_path=str(tmp_path / "run" / "best.pt"))


class Shown:
    """Progress stub that records the displayed losses, and the number of losses read back after each step."""

    def __init__(self, run):
        self.run, self.losses, self.read = run, [], []

    def show(self, loss, learning_rate):
        self.losses.append((loss, learning_rate))

    def finish_step(self):
        self.read.append(len(self.run.state.meter.losses))


def test_losses_are_read_at_each_logging_interval_and_at_an_epochs_end(folder, tmp_path):
    run = trainer(folder, tmp_path, global_batch_size=8, batch_size=4, log_interval=4)
    shown = Shown(run)
    run.train_one_epoch(0, shown)
    losses = run.state.meter.losses
    assert shown.read == [0, 0, 0, 4, 4, 4, 4]
    assert len(losses) == 7
    assert shown.losses == [(losses[3], 4e-3)]
    assert run.bottleneck.interval == 2  # a third of the epoch's 7 steps, rounded down
    assert trainer(folder, tmp_path / "short", global_batch_size=56).bottleneck.interval == 1


def test_a_diverged_run_writes_no_checkpoint(folder, tmp_path):
    run = trainer(folder, tmp_path)
    run.state.meter.add(torch.tensor(1.0), torch.tensor(torch.nan))
    run.signals.received = True
    with pytest.raises(DivergenceError, match="norm is nan at step 1 of epoch 1, .*No checkpoint has been written"):
        run.checkpoint_if_due()
    assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.parametrize(("rank", "hidden"), [(0, False), (1, True)])
def test_a_terminal_shows_one_progress_bar(folder, tmp_path, monkeypatch, rank, hidden):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    run = trainer(folder, tmp_path)
    with Progress(run.run_info, rank, run.setup, [], run.data.batches.steps, 0) as progress:
        assert bool(progress.bar.disable) is hidden


def means_after(rank, folder, output, method):
    """Set BatchNorm's running means to the rank, call a method, and return the means and the unreadable count."""
    options = dict(model="test_byobnet", model_kwargs={}, img_size=None, workers=0, epochs=1, warmup_epochs=0)
    options |= dict(data_dir=str(folder), output=str(output), experiment="run", checkpoint_interval="1")
    run = Trainer(Config(**OPTIONS | options), *distributed.init_process_group("cpu"))
    means = [t for model in run.evaluator.models for name, t in model.named_buffers() if name.endswith("running_mean")]
    for mean in means:
        mean.fill_(rank)
    run.state.meter.add(torch.tensor(1.0), torch.tensor(1.0))
    run.data.train_loader.images.dataset.unreadable.add(rank, "one", OSError())
    row = getattr(run, method)()
    distributed.destroy_process_group()
    return {value for mean in means for value in mean.tolist()}, row and row["unreadable_images"]


@pytest.mark.parametrize(("method", "unreadable"), [("evaluate", 2), ("checkpoint_if_due", None)])
def test_batch_norm_statistics_are_averaged_over_ranks_for_evaluation_and_checkpoints(
    folder, tmp_path, method, unreadable
):
    for ended in in_processes(2, means_after, folder, tmp_path, method):
        assert ended.value == ({0.5}, unreadable), ended.errors


def _plain(options):
    """Convert the tuples among the option values to lists, because YAML has no tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def test_a_run_resumed_with_other_options_uses_them_from_the_next_step(folder, tmp_path, monkeypatch, caplog):
    """Changed options apply from the middle of an epoch on, and the optimizer's state is kept."""
    changes = dict(lr=1e-2, min_lr=1e-3, weight_decay=0.9, opt_betas=(0.5, 0.8), opt_eps=1e-3, clip_grad=0.2)
    changes |= dict(smoothing=0.05, model_ema_decay=0.5)
    first = trainer(folder, tmp_path)
    update, steps = first.update, []

    def interrupted():
        steps.append(update())
        if len(steps) == 5:
            signal.raise_signal(signal.SIGTERM)
        return steps[-1]

    monkeypatch.setattr(first, "update", interrupted)
    with pytest.raises(PreemptedError, match="step 2 of epoch 2, and --resume auto resumes from there"):
        first.run()
    last = tmp_path / "run" / "last.pt"
    saved = checkpoint.Checkpoint(last).training_state()
    assert saved["num_images"] == 56
    checkpoint.save_checkpoint(saved | dict(num_images=50), last)
    bars = []

    class Bar(tqdm):
        """Progress bar that behaves as in a terminal."""

        def __init__(self, **options):
            super().__init__(**options | dict(file=io.StringIO(), disable=False))
            bars.append((self, self.n))

    monkeypatch.setattr("vil.training.progress.tqdm", Bar)
    trainer(folder, tmp_path, resume="auto", **changes).run()
    ((bar, begun),) = bars
    assert (begun, bar.n, bar.total, bar.desc) == (5 * 16, 4 * 3 * 16, 4 * 3 * 16, "epoch 4/4: ")
    said = {"resuming with 56 training images, was 50", f"resuming after step 2 of 3 in epoch 2 of 4 from {last}"}
    assert said < {*caplog.messages}
    assert_same_run(tmp_path, train(folder, OPTIONS, changes=(5, changes)))


@pytest.mark.parametrize(
    ("model", "average", "epoch", "best"),
    [
        ([4, 9, 2, 3, 8], [2, 3, 4, 5, 6], 2, "state_dict"),  # the EMA weights are less accurate in the best epoch
        ([4, 9, 2, 3, 8], [2, 7, 9, 5, 4], 3, "state_dict_ema"),
        # the last epoch wins a tie, and EMA weights win a tie with the model
        ([4, 9, 2, 9, 8], [2, 7, 9, 9, 4], 4, "state_dict_ema"),
        ([4, 9, 2, 3, 8], None, 2, "state_dict"),
    ],
)
def test_the_best_checkpoint_is_the_best_of_model_and_ema_weights(
    folder, tmp_path, monkeypatch, model, average, epoch, best
):
    def evaluate(_):
        counts = [top1[len(run.state.history)] for top1 in (model, average) if top1]
        return [Evaluation(42, count, 42, 1.0, 0, 7.0) for count in counts]

    options = dict(epochs=5, global_batch_size=28, model_ema=average is not None, checkpoint_interval="1")
    run = trainer(folder, tmp_path, **options)
    assert run.evaluator.models == [run.state.model, *([run.state.ema.module] if average else [])]
    run.evaluator = evaluate
    written, save = [], checkpoint.save_checkpoint
    monkeypatch.setattr(checkpoint, "save_checkpoint", lambda *c, **how: written.append(c[1].name) or save(*c, **how))
    monkeypatch.setattr(Reporter, "__call__", lambda _, history: written.append(f"{len(history)} rows"))
    run.run()
    # best.pt is written in an order that loses no result if the run is killed between two writes.
    assert f"last.pt best.pt last.pt {epoch} rows last.pt" in " ".join([*written, "last.pt"])
    assert {row["eval_images_per_second"] for row in run.state.history} == {7.0}
    path = tmp_path / "run" / "best.pt"
    saved = torch.load(path, weights_only=True)
    assert (saved["epoch"], len(saved["history"]), saved["best"]) == (epoch, epoch, best)
    assert (
        saved["progress"]["losses"] == []
    )  # best.pt stores the state at the end of an epoch, before the first step of the next epoch
    weights = checkpoint.Checkpoint(path).weights()  # fine-tuning loads these weights
    assert all(torch.equal(tensor, saved[best][name]) for name, tensor in weights.items())
    assert "best" not in checkpoint.Checkpoint(tmp_path / "run" / "last.pt").training_state()


@pytest.mark.parametrize(("decay", "warned"), [(1.0, True), (0.99996, True), (0.992, True), (0.99, False), (0, False)])
def test_an_ema_that_hardly_changes_logs_a_warning(folder, tmp_path, caplog, decay, warned):
    options = dict(model_ema_decay=decay or 0.992, model_ema=decay > 0)  # a decay of 0 means no EMA
    trainer(folder, tmp_path, global_batch_size=2, **options)
    averaged = 1 / (1 - decay) if decay < 1 else float("inf")
    message = f"model_ema_decay {decay} averages over about {averaged:.0f} steps, but only 112 steps are trained"
    assert (message in caplog.text) is warned
    assert ("Set --model-ema-decay 0.9107 to average over about 11 steps, or train longer" in caplog.text) is warned


@pytest.mark.parametrize("clip_grad", [None, 0.05])
def test_a_loss_scaler_changes_no_step_except_skipped_overflows(folder, tmp_path, clip_grad):
    options = dict(epochs=2, clip_grad=clip_grad)
    scaled = trainer(folder, tmp_path, **options)
    # replace the run's own gradient scaler, which is disabled on a CPU
    scaled.state.scaler = scaled.forward_backward.scaler = scaled.update.scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10
    )
    scaled.run()
    truth = train(folder, OPTIONS | options)
    assert_same_run(tmp_path, truth)

    before = {name: tensor.clone() for name, tensor in scaled.state.model.state_dict().items()}
    scaled.update.gradients.flat.fill_(torch.inf)
    scaled.state.scaler.scale(torch.zeros(()))
    assert not torch.isfinite(scaled.update())
    assert all(torch.equal(tensor, before[name]) for name, tensor in scaled.state.model.state_dict().items())
    assert scaled.state.scaler.get_scale() == 2.0**9
    scaled.state.meter.add(torch.tensor(1.0), torch.tensor(torch.inf))
    check_divergence(scaled.state, tmp_path)  # the scaler skips infinite gradients, so the run continues


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("options", "rtol"),
    [(dict(amp=False), 1e-3), (dict(amp_dtype="float16"), 2e-2), (dict(), 5e-2)],
    ids=["fp32", "fp16", "bf16"],
)
def test_a_gpu_run_equals_the_naive_implementation(folder, tmp_path, options, rtol):
    without = dict(drop_path=0.0)  # a GPU samples other drop-path masks than a CPU
    truth = train(folder, OPTIONS | EVERYTHING | without)
    config = Config(
        **OPTIONS | EVERYTHING | without | options,
        data_dir=str(folder), output=str(tmp_path), experiment="run", workers=0,
    )  # fmt: skip
    gpu = Trainer(config, torch.device("cuda", 0), 0, 1)
    gpu.run()
    assert gpu.state.scaler.is_enabled() == (options.get("amp_dtype") == "float16")
    for row, expected in zip(gpu.state.history, truth.rows, strict=True):
        for name in ("lr", "train_loss", "grad_norm", "eval_loss", "eval_loss_ema"):
            assert row[name] == pytest.approx(expected[name], rel=rtol), name
