"""Tests of training in one process: output files, start, resumption, exit status and rejected options."""

import contextlib
import csv
import gc
import itertools
import json
import os
import re
import shutil
import sys
import weakref
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from faults import MEASURED, without_measured
from fixtures import CLASSES, TRAIN_IMAGES
from PIL import Image
from processes import SMALL, call, run, script, train_command
from timm.data import create_transform, resolve_model_data_config

from vil import checkpoint
from vil.cli import train as program
from vil.config import Config, ConfigError, load_config
from vil.cuda_graphs import nothing_collected
from vil.distributed import Rank0Error
from vil.factory import create_model, from_checkpoint
from vil.models import dispatch
from vil.prediction import predict
from vil.training import trainer as training_loop
from vil.training.announce import describe_model
from vil.training.building import build_model
from vil.training.divergence import DivergenceError
from vil.training.interruption import PreemptedError
from vil.training.trainer import Trainer

CPU = torch.device("cpu")
NUMBERS = itertools.count()


def small_config(image_folder, **options) -> Config:
    # each run has its own folder, because a run locks its folder
    output = image_folder.parent / f"output{next(NUMBERS)}" if image_folder else None
    run_options = dict(data_dir=str(image_folder), output=str(output), workers=0, experiment="run", epochs=2)
    return Config(**SMALL | run_options | options)


def trained(image_folder, output, **options):
    """Train a run, and return the history rows without measured values, and the last checkpoint."""
    Trainer(small_config(image_folder, output=str(output), **options), CPU, 0, 1).run()
    saved = checkpoint.Checkpoint(output / "run" / "last.pt").training_state()
    return [without_measured(row) for row in saved["history"]], saved


@pytest.fixture(scope="module")
def whole(image_folder, tmp_path_factory):
    """Return the history rows and the checkpoint of an uninterrupted run of two epochs."""
    return trained(image_folder, tmp_path_factory.mktemp("whole"))


def main(capsys, *words):
    """Run training with a command line, and return the exit status and stderr."""
    with pytest.raises(SystemExit) as stopped:
        call(program.main, "--device", "cpu", *words)
    code = stopped.value.code
    return (1, code) if isinstance(code, str) else (code or 0, capsys.readouterr().err)


def test_a_run_states_the_size_of_its_model_and_how_the_blocks_run(monkeypatch):
    config = Config(model="vil_tiny", model_kwargs=dict(embed_dim=16, depth=2, patch_size=8), img_size=32)
    model = build_model(config, 5)
    count = sum(parameter.numel() for parameter in model.parameters())
    size = f"vil_tiny with embed_dim 16, depth 2, patch_size 8: {count:,} parameters"
    assert describe_model(config, model) == f"{size}; all 2 blocks run as fused kernels"
    model.blocks[1].norm.register_forward_hook(print)
    assert describe_model(config, model) == f"{size}; 1 of 2 blocks run as PyTorch code"
    monkeypatch.setattr(dispatch, "_fused", False)
    assert describe_model(config, model) == f"{size}; 2 of 2 blocks run as PyTorch code"
    assert describe_model(Config(model="test_vit"), torch.nn.Linear(2, 3)) == "test_vit: 9 parameters"


def test_a_run_learns_and_writes_its_files(uninterrupted):
    folder = uninterrupted / "run"
    with open(folder / "summary.csv") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 < row["train_loss"] < 10 and 0 <= row["eval_top1"] <= 100 for row in rows)
    assert {"eval_top1_ema", "eval_loss_ema", "lr", "unreadable_images", "grad_norm", *MEASURED} < set(rows[0])
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    parts = {"state_dict", "state_dict_ema", "optimizer", "scheduler", "amp_scaler", "epoch", "config"}
    assert parts < set(checkpoint.Checkpoint(folder / "last.pt").training_state())
    assert all(row["data_wait_percent"] > 0 for row in rows)
    assert parts - set(torch.load(folder / "best.pt", weights_only=True)) == {"optimizer"}
    with pytest.raises(checkpoint.CheckpointError, match=r"--resume \S+/run/last.pt, or start .* --pretrained"):
        checkpoint.Checkpoint(folder / "best.pt").training_state()
    assert not list(folder.glob(".*.tmp"))


def test_optimizers_and_schedules_equal_timms(image_folder, tmp_path, no_pictures):
    options = dict(opt="sgd", lr=0.5, sched="step", warmup_epochs=0, weight_decay=0.0)
    trainer = Trainer(small_config(image_folder, output=str(tmp_path), **options), CPU, 0, 1)
    assert type(trainer.state.optimizer) is torch.optim.SGD
    weight = trainer.state.model.head.weight
    before = weight.detach().clone()
    trainer.forward_backward(torch.ones(2, 3, 16, 16), torch.eye(4)[:2])
    gradient = weight.grad.clone()
    trainer.update()
    # The expected value is the first step of Nesterov momentum with timm's default of 0.9.
    torch.testing.assert_close(weight, before - 0.5 * (1 + 0.9) * gradient)
    trainer.run()
    assert [row["lr"] for row in trainer.state.history] == [0.5, 0.5]
    for name in ("sgd", "adafactor"):  # optimizers whose state tensors differ from AdamW's in number or shape
        choices = options | dict(opt=name, lr=0.01, output=str(tmp_path / name))
        trainer = Trainer(small_config(image_folder, **choices, epochs=1), CPU, 0, 1)
        trainer.run()
        Trainer(small_config(image_folder, **choices, epochs=2, resume="auto"), CPU, 0, 1).run()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_run_under_autocast_and_are_recomputed_with_activation_checkpointing(image_folder, checkpointing):
    trainer = Trainer(small_config(image_folder, grad_checkpointing=checkpointing), CPU, 0, 1)
    # the trainer enables autocast only on GPUs, so enable it here
    trainer.forward_backward.precision = trainer.evaluator.precision = torch.autocast("cpu", torch.bfloat16)
    dtypes = []
    trainer.state.model.blocks[0].mixer.in_proj.register_forward_hook(lambda *call: dtypes.append(call[-1].dtype))
    trainer.forward_backward(torch.ones(2, 3, 16, 16), torch.eye(4)[:2])
    assert dtypes == [torch.bfloat16] * (2 if checkpointing else 1)
    trainer.evaluate()
    assert set(dtypes) == {torch.bfloat16}
    trainer.signals.received = True
    assert trainer.evaluate()["eval_images_per_second"] == 0  # evaluation stops early after a signal


def test_evaluation_uses_the_preprocessing_options(image_folder):
    options = dict(crop_pct=0.6, interpolation="bilinear", batch_size=4)
    trainer = Trainer(small_config(image_folder, **options), CPU, 0, 1)
    images, _ = next(iter(trainer.data.val_loader))
    # validation batches are twice as large, because validation stores no activations for backward
    assert len(images) == 2 * 4
    mean_and_std = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    transform = create_transform(16, crop_pct=0.6, interpolation="bilinear", use_prefetcher=True, **mean_and_std)
    paths = [image_folder / "val" / CLASSES[0] / f"{i}.png" for i in range(7)]
    pixels = torch.stack([torch.as_tensor(transform(Image.open(path))) for path in paths])
    mean, std = (torch.tensor(mean_and_std[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(images[:7], (pixels / 255 - mean) / std)
    on_device = Trainer(small_config(image_folder, augment_on_device=True), CPU, 0, 1)
    assert on_device.data.val_loader.images.cache.reserve(1)  # validation images stay in the cache for the next epoch
    # test_vit's weights specify a mean and std of 0.5, so a white pixel is 1
    other = dict(model="test_vit", model_kwargs={}, img_size=160, mixup=0.0, cutmix=0.0, reprob=0.0)
    trainer, white = Trainer(small_config(image_folder, **other), CPU, 0, 1), torch.full((2, 3, 160, 160), 255)
    augment = trainer.data.train_loader.augment
    augmented, _ = augment(white.byte(), torch.zeros(2, dtype=torch.long), augment.sample(2, 160, 160, 0, 0))
    for images in (augmented, trainer.data.val_loader.normalize(white.byte())):
        torch.testing.assert_close(images, torch.ones(2, 3, 160, 160))


def test_unreadable_images_of_both_splits_are_counted(image_folder, tmp_path, no_pictures):
    root = tmp_path / "images"
    shutil.copytree(image_folder, root)
    for path in (root / "train" / "bee" / "3.png", root / "val" / "cat" / "2.png", root / "val" / "dog" / "2.png"):
        path.write_bytes(path.read_bytes()[:100])
    # the epoch has one batch, which contains every training image once
    options = dict(global_batch_size=len(CLASSES) * TRAIN_IMAGES, aug_repeats=0, mixup_prob=0.0, epochs=1)
    rows, _ = trained(root, tmp_path, **options)
    assert rows[0]["unreadable_images"] == 3


def assert_close(found, expected, rtol=1e-4):
    for name, truth in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], truth, rtol=rtol, atol=rtol / 10)


def test_training_does_not_depend_on_the_number_of_workers(whole, image_folder, tmp_path, no_pictures, monkeypatch):
    left_to: list = []
    monkeypatch.setattr(training_loop, "share_cores", lambda *whom: left_to.append(whom))
    rows, saved = trained(image_folder, tmp_path, workers=3)
    assert rows == [pytest.approx(row, rel=1e-5) for row in whole[0]]
    assert_close(saved, whole[1])
    assert left_to == [(CPU, 3)]


def test_a_compiled_run_equals_an_eager_run_without_ema(image_folder, tmp_path, no_pictures, monkeypatch):
    compiled, compile_model = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: compiled.append(m) or compile_model(m, backend="eager"))
    options = dict(batch_size=8, model_kwargs=SMALL["model_kwargs"] | dict(depth=1), model_ema=False, epochs=1)
    (row,), saved = trained(image_folder, tmp_path, torchcompile=True, **options)
    assert compiled
    (expected,), truth = trained(image_folder, tmp_path / "truth", **options)
    assert row == pytest.approx(expected, rel=1e-5)
    assert_close(saved, truth)
    assert not any("ema" in name for name in (*saved, *row))
    assert (tmp_path / "run" / "best.pt").exists()


def assert_same_end(folder, whole):
    saved = checkpoint.Checkpoint(folder / "last.pt").training_state()
    assert [without_measured(row) for row in saved["history"]] == whole[0]
    for part in ("state_dict", "state_dict_ema"):
        assert all(torch.equal(saved[part][name], truth) for name, truth in whole[1][part].items())


def test_a_run_killed_after_the_last_step_of_an_epoch_resumes_with_a_log_message(
    whole, image_folder, tmp_path, no_pictures, caplog
):
    trained(image_folder, tmp_path, checkpoint_interval="1")
    assert "resuming after" not in caplog.text
    last = tmp_path / "run" / "last.pt"
    last.with_name("previous.pt").rename(last)
    before_the_end = checkpoint.Checkpoint(last).training_state()
    assert len(before_the_end["history"]) == before_the_end["config"]["epochs"] - 1
    assert len(before_the_end["progress"]["losses"]) == TRAIN_IMAGES * len(CLASSES) // SMALL["global_batch_size"]
    # 0 stands for an unknown number of images, as in early checkpoints
    checkpoint.save_checkpoint(before_the_end | dict(num_images=0), last)
    trained(image_folder, tmp_path, resume="auto")
    assert "training images, was" not in caplog.text
    assert f"resuming after step 4 of 4 in epoch 2 of 2 from {last}" in caplog.text
    assert_same_end(last.parent, whole)
    before = last.read_bytes()
    for epochs, finished in ((2, "all 2 epochs"), (1, "2 epochs, and --epochs is 1")):
        caplog.clear()
        trained(image_folder, tmp_path, resume="auto", epochs=epochs)
        assert f"{last} has finished {finished}; set a larger --epochs to train longer" in caplog.text
    assert last.read_bytes() == before


@pytest.mark.parametrize(
    ("warmup_epochs", "warmup_lr", "said"), [(5, 1e-6, True), (4, 1e-6, True), (3, 1e-6, False), (5, 1e-3, False)]
)
def test_a_run_that_ends_during_warmup_logs_a_warning(image_folder, caplog, warmup_epochs, warmup_lr, said):
    options = dict(epochs=4, warmup_epochs=warmup_epochs, warmup_lr=warmup_lr)
    trainer = Trainer(small_config(image_folder, **options), CPU, 0, 1)
    expected = f"got {warmup_epochs} of 4: the learning rate never reaches lr"
    assert (expected in caplog.text) is said
    rates = []
    for epoch in range(4):
        trainer.state.scheduler.step(epoch)
        rates.append(trainer.state.learning_rate)
    assert (rates == sorted(rates) and rates[-1] < trainer.config.lr) is said


def test_a_run_killed_before_writing_its_summary_writes_it_after_resuming(image_folder, tmp_path, no_pictures):
    trained(image_folder, tmp_path, epochs=2)
    summary = tmp_path / "run" / "summary.csv"
    head, *rows = csv.reader(summary.read_text().splitlines())
    summary.write_text("".join(summary.read_text().splitlines(keepends=True)[:2]))
    trained(image_folder, tmp_path, epochs=2, resume="auto")
    again, *reported = csv.reader(summary.read_text().splitlines())
    assert (again, reported) == (head, rows)  # integer columns stay integers after resumption


def test_a_checkpoint_of_another_folder_is_resumed_in_the_new_folder(whole, image_folder, tmp_path, no_pictures):
    (tmp_path / "first").mkdir()
    rows, _ = trained(image_folder, tmp_path / "first", epochs=1)
    path = tmp_path / "first" / "run" / "last.pt"
    before = path.read_bytes()
    options = dict(output=str(tmp_path / "second"), resume=str(path), checkpoint_interval="1")
    trainer = Trainer(small_config(image_folder, **options), CPU, 0, 1)
    assert trainer.steps == TRAIN_IMAGES * len(CLASSES) // SMALL["global_batch_size"]
    assert not trainer.timer.decide(
        trainer.steps
    ).writes_checkpoint  # no checkpoint is due before the first trained step
    trainer.run()
    assert [row["epoch"] for row in trainer.state.history] == [1, 2]
    assert trainer.state.history[0]["train_loss"] == rows[0]["train_loss"]
    assert path.read_bytes() == before


def test_a_run_can_be_started_from_its_written_config(uninterrupted):
    given, written = (load_config("", ["-c", str(uninterrupted / path)]) for path in ("small.yaml", "run/config.yaml"))
    assert vars(written) == vars(given) | dict(num_classes=4)


def test_a_run_resumes_with_the_options_of_its_checkpoint_file(
    whole, image_folder, tmp_path, no_pictures, monkeypatch, capsys
):
    """`--resume FILE` restores the options and the folder of the run, also in another working directory."""
    monkeypatch.chdir(image_folder.parent)
    trained(Path(image_folder.name), tmp_path, checkpoint_interval="3")
    (tmp_path / "run" / "previous.pt").rename(tmp_path / "run" / "last.pt")
    monkeypatch.chdir(tmp_path / "run")
    status, _ = main(capsys, "--resume", "last.pt")
    assert status == 0
    assert_same_end(tmp_path / "run", whole)


def test_the_tensors_loaded_from_pretrained_weights_are_logged(tmp_path, caplog):
    def started(source, name="vil_tiny", **arguments):
        torch.save(source, tmp_path / "weights.pth")
        caplog.clear()
        model = create_model(name, str(tmp_path / "weights.pth"), **arguments)
        return model, caplog.text.strip()

    kwargs = dict(SMALL["model_kwargs"], img_size=16)
    source = timm.create_model("vil_tiny", num_classes=4, **kwargs).state_dict()
    model, said = started(source, num_classes=3, **kwargs | dict(img_size=32))
    assert said.endswith(f"weights.pth: {len(source) - 2} of {len(source)} tensors, 1 resampled; new: head")
    assert torch.equal(model.blocks[1].mixer.in_proj.weight, source["blocks.1.mixer.in_proj.weight"])
    deit = dict(depth=1, embed_dim=48, img_size=32, num_classes=4)
    weights = timm.create_model("deit_tiny_patch16_224", **deit).state_dict()
    weights = {name: t.double() / 3 for name, t in weights.items()}  # fp64 weights, rounded to fp32 when loaded
    _, said = started(weights, "deit_tiny_patch16_224", **deit)
    assert re.search("initialized from .*weights.pth: (\\d+) of \\1 tensors$", said)
    more = {f"more.{i}.bias": torch.ones(1) for i in range(6)}
    _, said = started(weights | more, "deit_tiny_patch16_224", **deit | dict(num_classes=5))
    assert said.endswith("; new: head; not used: more.0, more.1, more.2, more.3 and 2 more")
    both = dict(state_dict=weights, state_dict_ema=weights)
    assert "weights.pth (EMA weights): " in started(both, "deit_tiny_patch16_224", **deit)[1]
    assert ", 1 resampled" in started(weights, "deit_tiny_patch16_224", **deit | dict(img_size=64))[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "many"], "error: --epochs must be an integer, got 'many'"),
        (["--data-dir", "nowhere"], "error: the data folder 'nowhere' does not exist: pass "),
        (["--resume", "nowhere.pt", "--data-dir", "IMAGES"], "error: checkpoint nowhere.pt does not exist"),
        (
            ["--resume", "auto", "--data-dir", "IMAGES", "--model", "vim_tiny"],
            "last.pt, got 'vim_tiny': resume with the same value",
        ),
        (
            ["--data-dir", "IMAGES", "--opt", "fusedadamw", "--experiment", "new"],
            "cannot create the optimizer fusedadamw",
        ),
        (["--data-dir", "IMAGES", "--output", "TMP/small file"], "small file"),
        (["--data-dir", "IMAGES", "--output", "TMP/.lock"], "cannot write to TMP/.lock/run: "),
        (["--data-dir", "IMAGES", "--output", "TMP/.holder"], "cannot write to TMP/.holder/run: "),
        *(
            (["--data-dir", "IMAGES", "--output", f"TMP/{name}.pt"], f"TMP/{name}.pt/run/{name}.pt exists but is not")
            for name in ("last", "previous", "best")
        ),
    ],
)
def test_errors_are_printed_in_one_line_with_status_1(uninterrupted, image_folder, tmp_path, capsys, words, message):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    (tmp_path / "small file").touch()
    for name in (".lock", ".holder", "last.pt", "previous.pt", "best.pt"):  # folders named like a run's files
        (tmp_path / name / "run" / name).mkdir(parents=True)
    words = [word.replace("IMAGES", str(image_folder)).replace("TMP", str(tmp_path)) for word in words]
    config = ["-c", uninterrupted / "small.yaml", "--output", tmp_path]
    status, error = main(capsys, *config, *words)
    assert status == 1
    assert error.startswith("error: ")
    assert message.replace("TMP", str(tmp_path)) in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("part", "place", "value"),
    [
        ("optimizer", "step", torch.tensor(-1.0)), ("optimizer", "step", torch.tensor(torch.nan)),
        ("optimizer", "step", "many"), ("optimizer", "step", torch.tensor(True)), ("optimizer", "exp_avg", None),
        ("optimizer", "exp_avg_sq", torch.ones(3)), ("history", "eval_top1", torch.nan), ("history", "epoch", 7),
        ("history", "eval_top1", "high"), ("history", "=1+1", 1.0), ("progress", "norms", [1.0]),
        ("progress", "seconds", "long"),
    ],
)  # fmt: skip
def test_a_training_state_that_no_run_writes_is_rejected(uninterrupted, tmp_path, capsys, part, place, value):
    saved = checkpoint.Checkpoint(uninterrupted / "run" / "last.pt").training_state()
    {**saved, "optimizer": saved["optimizer"]["state"][0], "history": saved["history"][0]}[part][place] = value
    checkpoint.save_checkpoint(saved, tmp_path / "odd.pt")
    words = ["--output", tmp_path, "--epochs", 3, "--resume", tmp_path / "odd.pt"]
    status, error = main(capsys, "-c", uninterrupted / "small.yaml", *words)
    assert status == 1
    assert error.startswith(f"error: {tmp_path / 'odd.pt'} does not fit this run: ValueError: ")
    assert "\n" not in error


def test_garbage_is_collected_before_a_graph_capture_and_not_during_it():
    earlier = torch.nn.Identity()
    earlier.itself, left = [earlier], weakref.ref(earlier)  # only the garbage collector frees a reference cycle
    del earlier
    with nothing_collected():
        assert left() is None
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with nothing_collected():
        pass
    assert not gc.isenabled()  # garbage collection stays disabled if it was disabled
    gc.enable()
    with contextlib.suppress(MemoryError), nothing_collected():
        raise MemoryError  # simulates too little GPU memory for a graph
    assert gc.isenabled()


def test_non_square_images_work_in_training_validation_export_and_prediction(image_folder, tmp_path):
    """Metrics and predictions for 16 x 24 pixels agree with the model's outputs for images of timm's transform."""
    run(train_command(tmp_path, image_folder, img_size=[16, 24], epochs=1))
    run([*train_command(tmp_path, image_folder, epochs=2), "--img-size", "16", "24", "--resume", "auto"])
    best = tmp_path / "run" / "best.pt"
    run([*script("validate.py"), "--checkpoint", str(best), "--device", "cpu", "--json", str(tmp_path / "said.json")])
    said = json.loads((tmp_path / "said.json").read_text())
    run([sys.executable, "-m", "vil", "export", "--checkpoint", str(best), "--out", str(tmp_path / "best.safetensors")])
    models = [from_checkpoint(best), from_checkpoint(tmp_path / "best.safetensors")]
    transform = create_transform((3, 16, 24), crop_pct=0.875, interpolation="bicubic")
    pictures = [Image.open(path) for path in sorted((image_folder / "val").glob("*/*.png"))]
    targets = torch.arange(len(CLASSES)).repeat_interleave(len(pictures) // len(CLASSES))
    for model in models:
        assert resolve_model_data_config(model)["input_size"] == (3, 16, 24)
        with torch.no_grad():
            logits = model(torch.stack([transform(picture) for picture in pictures]))
        assert said["top1"] == pytest.approx(100 * (logits.argmax(1) == targets).double().mean().item())
        assert said["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-3)
        probability, _ = logits[0].softmax(0).max(0)
        (found,) = predict(model, pictures[:1], topk=1)
        assert found[0].probability == pytest.approx(probability.item(), rel=1e-3)


@pytest.mark.parametrize("error", [AssertionError, AttributeError])
def test_a_model_without_activation_checkpointing_support_is_rejected(monkeypatch, error):
    if error is AttributeError:  # models of other packages may lack set_grad_checkpointing
        monkeypatch.delattr(timm.models.dla.DLA, "set_grad_checkpointing")
    with pytest.raises(ConfigError, match="dla46_c does not support activation checkpointing") as refused:
        build_model(Config(model="dla46_c", grad_checkpointing=True), 4)
    assert type(refused.value.__cause__) is error


def test_unexpected_exceptions_keep_their_traceback(monkeypatch, capsys):
    def mistaken(*_):
        raise KeyError("a mistake")

    monkeypatch.setattr(training_loop, "Trainer", mistaken)
    with pytest.raises(KeyError, match="a mistake"):
        main(capsys)


@pytest.mark.parametrize(
    ("error", "said"),
    [(Rank0Error("no room"), "error: no room\n"), (KeyError("a mistake"), "Traceback (most recent call last)")],
)
def test_a_failing_rank_prints_its_error_and_exits_at_once(monkeypatch, tmp_path, capsys, error, said):
    def train(*_):
        print("epoch 1")
        raise error

    monkeypatch.setattr("vil.training.command.train", train)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with open(tmp_path / "output", "w") as output, contextlib.redirect_stdout(output):
        status, errors = main(capsys)
        assert (tmp_path / "output").read_text() == "epoch 1\n"
    assert status == 1
    assert errors.startswith(said)


@pytest.mark.parametrize(("rank", "said"), [("0", True), ("1", False)])
def test_a_preempted_run_exits_with_status_75_and_rank_0_prints_the_message(monkeypatch, capsys, rank, said):
    class Preempted:
        def __init__(self, *_):
            pass

        def run(self):
            monkeypatch.setenv("WORLD_SIZE", "2")
            raise PreemptedError("stopped by SIGTERM; resume with --resume auto")

    monkeypatch.setattr(training_loop, "Trainer", Preempted)
    monkeypatch.setenv("RANK", rank)
    status, error = main(capsys)
    assert status == 75
    assert ("stopped by SIGTERM" in error) is said


def test_a_non_finite_loss_stops_the_run(image_folder, tmp_path, no_pictures):
    trained(image_folder, tmp_path)
    last = tmp_path / "run" / "last.pt"
    before = last.read_bytes()
    message = r"the loss is (nan|inf) at step [1-4] of epoch 3, at learning rate 5.5e\+29"
    with pytest.raises(DivergenceError, match=message) as stopped:
        trained(image_folder, tmp_path, resume="auto", epochs=4, lr=1e30, min_lr=1e29, log_interval=1)
    assert f"--resume auto resumes from {last}" in str(stopped.value)
    assert last.read_bytes() == before
