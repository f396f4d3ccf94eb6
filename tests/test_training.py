"""Training as a user runs it: configs, data, real processes (also killed ones), checkpoints, and bad input."""

import csv
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from conftest import CLASSES, TRAIN_IMAGES
from processes import ROOT, SMALL, run, train_command

from train_imagenet import Trainer
from vil.training import checkpoint
from vil.training.config import Config, ConfigError, load_config
from vil.training.models import create_model
from vil.training.summary import Reporter

MEASURED = ("images_per_second", "data_wait_percent", "peak_memory_gib")  # these differ from run to run


def small_config(image_folder, **options) -> Config:
    return Config(**SMALL | dict(data_dir=str(image_folder), workers=0, experiment="run") | options)


def summary(folder):
    with open(folder / "run" / "summary.csv") as file:
        return [{k: float(v) for k, v in row.items() if k not in MEASURED} for row in csv.DictReader(file)]


# configs


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_loads_and_is_named_after_its_run(path):
    config = load_config("", ["-c", str(path)])
    assert config.experiment == path.stem


@pytest.mark.parametrize(
    ("name", "batch", "lr", "weight_decay", "drop_path"),
    [("tiny", 1024, 1e-3, 0.1, 0.0), ("small", 512, 1e-3, 0.05, 0.05)],
)
@pytest.mark.parametrize("family", ["vil", "vim"])
def test_recipes_are_those_published_with_vim(family, name, batch, lr, weight_decay, drop_path):
    config = load_config("", ["-c", str(ROOT / f"configs/{family}_{name}.yaml")])
    assert (config.model, config.epochs) == (f"{family}_{name}", 300)
    assert (config.global_batch_size, config.lr, config.weight_decay) == (batch, lr, weight_decay)
    assert (config.drop_path, config.clip_grad, config.aug_repeats) == (drop_path, None, 3)
    plus = load_config("", ["-c", str(ROOT / f"configs/{family}_{name}_plus.yaml")])
    assert (plus.epochs, plus.global_batch_size, plus.lr, plus.min_lr) == (30, 1024, 1e-5, 1e-5)
    assert (plus.model_kwargs, plus.weight_decay, plus.drop_path) == ({"stride": 8}, 1e-8, 0.0)


def test_the_command_line_overrides_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 5e-4\nepochs: 7\nmodel_ema: true\nopt_betas: [0.8, 0.9]\n")
    words = "--epochs 3 --no-model-ema --model-kwargs depth=2 embed_dim=64 --aa none --scale 0.5 1"
    config = load_config("", ["-c", str(tmp_path / "c.yaml"), *words.split()])
    assert (config.lr, config.epochs, config.model_ema, config.opt_betas) == (5e-4, 3, False, (0.8, 0.9))
    assert (config.model_kwargs, config.aa, config.scale) == ({"depth": 2, "embed_dim": 64}, None, (0.5, 1.0))
    assert [load_config("", words).synthetic for words in ([], ["--synthetic"], ["--synthetic", "99"])] == [
        0,
        1_281_167,
        99,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weight_deacy: 0.1", "unknown option 'weight_deacy' in .*c.yaml; did you mean 'weight_decay'"),
        ("epochs: many", "option 'epochs' in .*c.yaml must be int, not 'many'"),
        ("model_ema: 3", "option 'model_ema' in .*c.yaml must be bool"),
        ("epochs: null", "option 'epochs' in .*c.yaml must be int"),
        ("amp_dtype: float8", "amp_dtype 'float8' is neither"),
        ("checkpoint_interval: 0", "checkpoint_interval '0' is neither minutes .'30m'. nor optimizer steps .'500'."),
        ("checkpoint_interval: 2h", "checkpoint_interval '2h' is neither"),
        ("- lr", "is not a list of 'option: value' lines"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_config_file_is_refused(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config("", ["-c", str(tmp_path / "c.yaml")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--weight-deacy 1", "unknown option 'weight_deacy' on the command line; did you mean 'weight_decay'"),
        ("--lr fast", "option 'lr' in the command line must be float, not 'fast'"),
        ("--model-kwargs depth", "'depth' is not of the form KEY=VALUE"),
        ("-c nowhere.yaml", "cannot read the config nowhere.yaml"),
    ],
)
def test_a_wrong_command_line_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        load_config("", words.split())


# runs


def test_the_optimizer_has_the_largest_parameters_first(image_folder):
    trainer = Trainer(small_config(image_folder), torch.device("cpu"), 0, 1)
    for group in trainer.optimizer.param_groups:
        sizes = [parameter.numel() for parameter in group["params"]]
        assert sizes == sorted(sizes, reverse=True)
    assert len(trainer.optimizer.param_groups) == 2


def test_a_run_learns_and_writes_its_files(uninterrupted):
    folder = uninterrupted / "run"
    rows = summary(uninterrupted)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 < row["train_loss"] < 10 and 0 <= row["eval_top1"] <= 100 for row in rows)
    assert {"eval_top1_ema", "eval_loss_ema", "lr", "unreadable_images"} < set(rows[0])
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((folder / "config.yaml").read_text())["num_classes"] == 4
    for name in ("last.pt", "best.pt"):
        saved = checkpoint.read_checkpoint(folder / name)
        assert {"state_dict", "state_dict_ema", "optimizer", "scheduler", "amp_scaler", "epoch", "config"} < set(saved)
    assert {"grad_norm", "images_per_second", "data_wait_percent", "peak_memory_gib"} < set(saved["history"][0])
    assert "commit" in (folder / "info.txt").read_text()
    assert "torch " in (folder / "info.txt").read_text()
    assert not list(folder.glob("*.tmp"))


def test_noise_takes_the_place_of_a_dataset(tmp_path):
    config = small_config(None, synthetic=100, num_classes=10, output=str(tmp_path), epochs=1, device="cpu")
    Trainer(config, torch.device("cpu"), 0, 1).run()
    (row,) = checkpoint.read_checkpoint(tmp_path / "run" / "last.pt")["history"]
    assert row["train_loss"] > 0
    assert row["data_wait_percent"] < 50


def test_gradient_norm_is_that_before_clipping(image_folder, tmp_path):
    norms = []
    for clip in (None, 0.5):
        output = tmp_path / str(clip)
        trainer = Trainer(
            small_config(image_folder, output=str(output), clip_grad=clip, opt="sgd"), torch.device("cpu"), 0, 1
        )
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.backward(torch.ones(2, 3, 16, 16), torch.eye(4)[:2], synchronize=True)
        norms.append(trainer.update().item())
        moved = torch.stack([(p - b).norm() for p, b in zip(trainer.model.parameters(), before)]).norm().item()
        assert moved > 0
    assert norms[0] == norms[1] > 0.5


def test_logs_are_written_when_asked_for(tmp_path, monkeypatch):
    history = [{"epoch": 1, "train_loss": 2.5}, {"epoch": 2, "train_loss": 1.5}]
    config = Config(log_tensorboard=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(ConfigError, match="log_tensorboard needs a package: pip install tensorboard"):
            Reporter(tmp_path, config, {})
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = Reporter(tmp_path, config, {})
    for rows in (history[:1], history):
        report(rows)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(1, 2.5), (2, 1.5)]


def test_a_summary_that_cannot_be_written_does_not_stop_a_run(tmp_path, caplog):
    report = Reporter(tmp_path / "run", Config(), {})
    shutil.rmtree(tmp_path / "run")
    report([{"epoch": 1, "train_loss": 2.5}])
    assert "could not write the summary" in caplog.text


def test_info_names_versions_and_commit():
    result = run([sys.executable, "-m", "vil.info"])
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["torch"] == torch.__version__.split("+")[0]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", lines["commit"])


@pytest.mark.parametrize(
    ("processes", "options"),
    [(2, {}), (1, {"batch_size": 8}), (1, {"workers": 3}), (1, {"batch_size": 8, "torchcompile": True})],
)
def test_processes_accumulation_workers_and_compiling_do_not_change_training(
    uninterrupted, image_folder, tmp_path, processes, options
):
    run(train_command(tmp_path, image_folder, processes, **options))
    for row, expected in zip(summary(tmp_path), summary(uninterrupted), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    weights, truth = (checkpoint.read_weights(f / "run" / "last.pt", use_ema=False) for f in (tmp_path, uninterrupted))
    for name in truth:
        torch.testing.assert_close(weights[name], truth[name], rtol=1e-4, atol=1e-5)


def test_a_killed_run_resumes_to_the_same_end(uninterrupted, image_folder, tmp_path):
    command = train_command(tmp_path, image_folder)
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""), stderr=subprocess.DEVNULL
    )
    last = tmp_path / "run" / "last.pt"
    while not last.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.read_checkpoint(last)["epoch"] == 1

    refused = run(command, check=False)
    assert refused.returncode == 1
    assert "holds a run: --resume auto goes on with it" in refused.stderr
    run([*command, "--resume", "auto"])
    assert summary(tmp_path) == summary(uninterrupted)
    resumed, truth = (checkpoint.read_checkpoint(f / "run" / "last.pt") for f in (tmp_path, uninterrupted))
    for part in ("state_dict", "state_dict_ema"):
        assert all(torch.equal(resumed[part][name], truth[part][name]) for name in truth[part])


def test_a_run_killed_between_the_last_step_of_an_epoch_and_its_end_resumes(uninterrupted, image_folder, tmp_path):
    command = train_command(tmp_path, image_folder, checkpoint_interval="1")
    run(command)
    folder = tmp_path / "run"
    (folder / "previous.pt").rename(folder / "last.pt")
    before_the_end = checkpoint.read_checkpoint(folder / "last.pt")
    assert len(before_the_end["history"]) == before_the_end["config"]["epochs"] - 1
    assert len(before_the_end["progress"]["losses"]) == TRAIN_IMAGES * len(CLASSES) // SMALL["global_batch_size"]
    run([*command, "--resume", "auto"])
    assert summary(tmp_path) == summary(uninterrupted)
    resumed, truth = (checkpoint.read_checkpoint(f / "run" / "last.pt") for f in (tmp_path, uninterrupted))
    assert all(torch.equal(resumed["state_dict"][name], truth["state_dict"][name]) for name in truth["state_dict"])


def test_resuming_another_model_is_refused(uninterrupted, image_folder):
    command = train_command(uninterrupted, image_folder)
    result = run([*command, "--resume", "auto", "--model", "vim_tiny"], check=False)
    assert "is of a run with model 'vil_tiny', this one has 'vim_tiny'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_loss_that_is_not_finite_stops_the_run_by_name(uninterrupted, image_folder, tmp_path):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    command = train_command(tmp_path, image_folder, lr=1e30, min_lr=1e30)
    result = run([*command, "--resume", "auto", "--epochs", "4"], check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "the loss is nan at step" in result.stderr or "the loss is inf at step" in result.stderr
    assert "of epoch 3, at learning rate 1e+30" in result.stderr
    assert str(tmp_path / "run" / "last.pt") in result.stderr
    assert checkpoint.read_checkpoint(tmp_path / "run" / "last.pt")["epoch"] == 2


def test_fine_tuning_starts_from_weights_of_another_size_and_number_of_classes(uninterrupted):
    path = str(uninterrupted / "run" / "last.pt")
    source = checkpoint.read_weights(path)
    model = create_model("vil_tiny", path, num_classes=4, img_size=32, **SMALL["model_kwargs"])
    assert torch.equal(model.head.weight, source["head.weight"])
    assert model.pos_embed.shape[1] == 17
    model = create_model("vil_tiny", path, num_classes=3, img_size=16, **SMALL["model_kwargs"])
    assert model.head.weight.shape[0] == 3
    assert torch.equal(model.blocks[1].mixer.in_proj.weight, source["blocks.1.mixer.in_proj.weight"])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vil_huge", {}, "cannot create the model vil_huge: Unknown model"),
        ("vil_tiny", {"heads": 3}, "cannot create the model vil_tiny: .*heads"),
        ("vil_tiny", {"img_size": 100}, r"img_size \(100, 100\) is not covered .* use \(96, 96\), or dynamic_img_size"),
    ],
)
def test_a_model_that_cannot_be_is_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        create_model(name, **arguments)


def test_the_middle_of_an_epoch_needs_the_same_global_batch(tmp_path):
    saved = dict(global_batch_size=16, lr=0.1)
    checkpoint.check_same_run(saved, dict(global_batch_size=32, lr=0.1), tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="middle of an epoch with global_batch_size 16.*has 32"):
        checkpoint.check_same_run(saved, dict(global_batch_size=32, lr=0.1), tmp_path, middle=True)


# checkpoints


@pytest.mark.parametrize(("version", "whose"), [(2, "an older"), (99, "a newer")])
def test_a_checkpoint_of_another_version_is_refused_not_passed_over(version, whose, tmp_path):
    checkpoint.save_checkpoint({"config": {}}, tmp_path / "previous.pt")
    torch.save({"version": version, "config": {}}, tmp_path / "last.pt")
    with pytest.raises(checkpoint.CheckpointError, match=f"last.pt has version {version}, of {whose} train"):
        checkpoint.find_resumed("auto", tmp_path)


def test_the_last_checkpoint_is_kept_until_the_next_is_complete(tmp_path, monkeypatch):
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    for epoch in (1, 2, 3):
        checkpoint.save_checkpoint({"config": {}, "epoch": epoch}, last, previous)
    assert [checkpoint.read_checkpoint(path)["epoch"] for path in (last, previous)] == [3, 2]

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(checkpoint.CheckpointError, match="the disk is gone; the previous .*last.pt is intact"):
        checkpoint.save_checkpoint({"config": {}, "epoch": 4}, last, previous)
    assert [checkpoint.read_checkpoint(path)["epoch"] for path in (last, previous)] == [3, 2]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    path = tmp_path / "last.pt"
    checkpoint.save_checkpoint({"config": {}, "epoch": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            checkpoint.CheckpointError, match=r"could not write .*last.pt \(\d+ MiB free on its disk\).*is intact"
        ):
            checkpoint.save_checkpoint({"config": {}, "epoch": 2, "weights": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.read_checkpoint(path)["epoch"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_a_cut_off_checkpoint_is_refused_wherever_it_is_cut(uninterrupted, tmp_path):
    whole = (uninterrupted / "run" / "last.pt").read_bytes()
    rng = random.Random(0)
    for size in [0, 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(10))]:
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        for read in (checkpoint.read_checkpoint, checkpoint.read_weights, checkpoint.saved_config):
            with pytest.raises(checkpoint.CheckpointError, match="cut.pt cannot be read as a checkpoint"):
                read(tmp_path / "cut.pt")


def test_weights_that_cannot_be_read_are_not_said_not_to_fit(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="^there is no checkpoint .*missing.safetensors$"):
        checkpoint.load_weights(torch.nn.Identity(), tmp_path / "missing.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"no tensors")
    with pytest.raises(checkpoint.CheckpointError, match="cut.safetensors cannot be read as a checkpoint"):
        checkpoint.load_weights(torch.nn.Identity(), tmp_path / "cut.safetensors")
