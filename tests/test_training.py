"""Training as a user runs it: configs, data, real processes (also killed ones), checkpoints, and bad input."""

import csv
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest
import torch
import yaml
from conftest import CLASSES, TRAIN_IMAGES, VAL_IMAGES
from processes import ROOT, SMALL, run, train_command
from timm.data import resolve_data_config

from train_imagenet import Trainer
from vil.training import checkpoint, data
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


# data


def global_batches(config, num_images, world_size):
    """The (index, seed) pairs of each global batch of an epoch, over all processes and in order."""
    micro_batch, _ = data.split_global_batch(config, world_size)
    ranks = [data.TrainingBatches(num_images, config, micro_batch, rank, world_size) for rank in range(world_size)]
    for batches in ranks:
        batches.set_epoch(3)
    share = config.global_batch_size // world_size
    pairs = [[pair for batch in batches for pair in batch] for batches in ranks]
    steps = range(ranks[0].steps)
    return [[pair for rank in pairs for pair in rank[step * share : (step + 1) * share]] for step in steps]


@pytest.mark.parametrize("repeats", [0, 3])
def test_global_batches_do_not_depend_on_processes_or_accumulation(image_folder, repeats):
    config = small_config(image_folder, aug_repeats=repeats)
    expected = global_batches(config, 100, world_size=1)
    assert len(expected) == 100 // 16
    for world_size, batch_size in [(2, None), (4, None), (1, 4), (2, 5)]:
        split = small_config(image_folder, aug_repeats=repeats, batch_size=batch_size)
        assert global_batches(split, 100, world_size) == expected


def test_an_epoch_sees_each_image_once_or_as_often_as_augmentation_repeats_it(image_folder):
    once = [i for batch in global_batches(small_config(image_folder, aug_repeats=0), 100, 1) for i, _ in batch]
    assert len(set(once)) == len(once) == 96
    for batch in global_batches(small_config(image_folder, aug_repeats=3, global_batch_size=12), 100, 1):
        indices = [i for i, _ in batch]
        assert sorted(indices.count(i) for i in set(indices)) == [3, 3, 3, 3]
        assert len({seed for _, seed in batch}) == 12  # each copy is augmented differently


def test_epochs_and_seeds_shuffle_differently(image_folder):
    def order(seed, epoch):
        batches = data.TrainingBatches(100, small_config(image_folder, seed=seed), 16, 0, 1)
        batches.set_epoch(epoch)
        return list(batches)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 1)


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, None), (2, 4)])
def test_an_epoch_goes_on_where_it_stopped(image_folder, world_size, batch_size):
    config = small_config(image_folder, batch_size=batch_size)
    micro_batch, accumulation = data.split_global_batch(config, world_size)
    for rank in range(world_size):
        batches = data.TrainingBatches(100, config, micro_batch, rank, world_size)
        batches.set_epoch(5)
        whole = list(zip(batches, batches.first_positions()))
        batches.set_epoch(5, first_step=4)
        assert list(zip(batches, batches.first_positions())) == whole[4 * accumulation :]
        assert len(batches) == len(whole) - 4 * accumulation == 2 * accumulation


def test_evaluation_counts_every_image_once(image_folder):
    for world_size in (1, 2, 3, 5):
        indices = []
        for rank in range(world_size):
            batches = data.EvaluationBatches(28, 4, rank, world_size)
            assert len(batches) == len(list(batches))
            indices += [i for batch in batches for i, _ in batch]
        assert sorted(indices) == list(range(28))


def test_augmentation_on_the_device_does_not_depend_on_the_micro_batch(image_folder):
    config = small_config(image_folder)
    augment = data.BatchAugmentation(config, 4, torch.device("cpu"))
    images, targets = torch.rand(32, 3, 16, 16), torch.arange(32) % 4
    whole = augment(images.clone(), targets, epoch=1, position=64)
    parts = [augment(images[i : i + 8].clone(), targets[i : i + 8], epoch=1, position=64 + i) for i in range(0, 32, 8)]
    assert not torch.equal(whole[0], images)
    for tensor, pieces in zip(whole, zip(*parts)):
        assert torch.equal(tensor, torch.cat(pieces))


def test_workers_start_with_their_loader(image_folder):
    before = set(multiprocessing.active_children())
    trainer = Trainer(small_config(image_folder, workers=2), torch.device("cpu"), 0, 1)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 4  # two for either split
    assert len(list(data.micro_batches(trainer.train_loader, trainer.batches, 0, 1))) == trainer.batches.steps - 1
    assert sum(len(images) for images, _ in trainer.val_loader) == 28
    assert set(multiprocessing.active_children()) - before == workers


def test_a_loader_may_have_no_batch(image_folder):
    """Of an epoch that was left behind its last step; and of a split with fewer images than there are processes."""
    device = torch.device("cpu")
    trainer = Trainer(small_config(image_folder), device, 0, 1)
    assert list(data.micro_batches(trainer.train_loader, trainer.batches, 0, trainer.batches.steps)) == []
    images, data_config = trainer.val_loader.dataset.dataset, resolve_data_config({}, model=trainer.model)
    for rank, count in ((27, 1), (28, 0)):
        loader = data.evaluation_loader(images, data_config, device, 0, 4, rank, world_size=29)
        assert sum(len(batch) for batch, _ in loader) == count


def test_the_optimizer_has_the_largest_parameters_first(image_folder):
    trainer = Trainer(small_config(image_folder), torch.device("cpu"), 0, 1)
    for group in trainer.optimizer.param_groups:
        sizes = [parameter.numel() for parameter in group["params"]]
        assert sizes == sorted(sizes, reverse=True)
    assert len(trainer.optimizer.param_groups) == 2


def test_a_worker_that_hangs_ends_the_run(image_folder, monkeypatch):
    monkeypatch.setattr(data, "STALLED", 1)
    monkeypatch.setattr(data.ImageReader, "__getitem__", lambda *_: time.sleep(3600))
    trainer = Trainer(small_config(image_folder, workers=1), torch.device("cpu"), 0, 1)
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        next(data.micro_batches(trainer.train_loader, trainer.batches, 0, 0))


def test_an_unreadable_image_is_named_counted_and_replaced(image_folder, tmp_path, caplog):
    root = tmp_path / "images"
    shutil.copytree(image_folder, root)
    broken = [root / "train" / "bee" / "3.png", root / "val" / "cat" / "2.png"]
    for path in broken:
        path.write_bytes(path.read_bytes()[:100])
    config = small_config(root, aa=None)
    train, val, _ = data.open_splits(config)

    reader = data.ImageReader(train, lambda image: image.size, is_training=True)
    targets = [reader[i, 0][1] for i in range(len(reader))]
    assert (len(targets), reader.skipped) == (4 * TRAIN_IMAGES, 1)
    assert set(targets) == {0, 1, 2, 3}
    assert os.path.join("bee", "3.png") in caplog.text

    reader = data.ImageReader(val, lambda image: image.size, is_training=False)
    targets = [reader[i, 0][1] for i in range(len(reader))]
    assert (targets.count(data.UNREADABLE), reader.skipped) == (1, 1)
    assert os.path.join("cat", "2.png") in caplog.text


def test_tar_files_of_the_splits(image_folder, tmp_path):
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            tar.add(image_folder / split, ".")
    train, val, num_classes = data.open_splits(small_config(tmp_path))
    assert (len(train), len(val), num_classes) == (4 * TRAIN_IMAGES, 4 * VAL_IMAGES, 4)


def test_webdataset_shards_stream_whole_epochs(image_folder, tmp_path):
    info = {"splits": {}}
    for split, shards in (("train", 4), ("validation", 3)):
        paths = sorted((image_folder / {"train": "train", "validation": "val"}[split]).glob("*/*.png"))
        names = [f"{split}-{shard}.tar" for shard in range(shards)]
        for shard, name in enumerate(names):
            with tarfile.open(tmp_path / name, "w") as tar:
                for path in paths[shard::shards]:
                    tar.add(path, f"{path.parent.name}{path.stem}.png")
                    label = tarfile.TarInfo(f"{path.parent.name}{path.stem}.cls")
                    label.size = 1
                    tar.addfile(label, io.BytesIO(str(CLASSES.index(path.parent.name)).encode()))
        lengths = [len(paths[shard::shards]) for shard in range(shards)]
        info["splits"][split] = dict(name=split, num_samples=len(paths), filenames=names, shard_lengths=lengths)
    (tmp_path / "_info.json").write_text(json.dumps(info))

    config = small_config(tmp_path, dataset="wds/x", num_classes=4)
    train, val, num_classes = data.open_splits(config)
    data_config = dict(input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    data_config |= dict(crop_pct=1.0, crop_mode="center", interpolation="bicubic")
    batches = data.TrainingBatches(len(train), config, 16, 0, 1)
    loader = data.training_loader(train, config, data_config, torch.device("cpu"), batches)
    assert len(list(zip(loader, batches.first_positions()))) == batches.steps == 4 * TRAIN_IMAGES // 16
    assert len(list(data.micro_batches(loader, batches, epoch=1, first_step=2))) == batches.steps - 2
    loader = data.evaluation_loader(val, data_config, torch.device("cpu"), 0, 5, 0, 1)
    targets = torch.cat([targets for _, targets in loader])
    assert targets.bincount().tolist() == [VAL_IMAGES] * num_classes


def test_a_validation_split_without_some_class_keeps_the_numbers_of_training(image_folder, tmp_path):
    shutil.copytree(image_folder, tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "val" / "bee")
    _, val, num_classes = data.open_splits(small_config(tmp_path / "images"))
    assert num_classes == 4
    assert {val.reader[i][1] for i in range(len(val))} == {0, 2, 3}


def test_data_that_does_not_fit_is_refused(image_folder, tmp_path):
    with pytest.raises(ConfigError, match="data_dir .*nowhere is not a folder"):
        data.open_splits(small_config(tmp_path / "nowhere"))
    (tmp_path / "train").mkdir()
    shutil.copytree(image_folder / "train", tmp_path / "images" / "train")
    with pytest.raises(ConfigError, match=r"has no split 'validation' \(.*val.*\); it has train"):
        data.open_splits(small_config(tmp_path / "images"))
    shutil.copytree(image_folder / "val", tmp_path / "images" / "val")
    (tmp_path / "images" / "val" / "bee").rename(tmp_path / "images" / "val" / "wasp")
    with pytest.raises(ConfigError, match=r"classes that training has not: \['wasp'\]"):
        data.open_splits(small_config(tmp_path / "images"))
    with pytest.raises(ConfigError, match="has 4 classes but num_classes is 1000"):
        data.open_splits(small_config(image_folder, num_classes=1000))
    with pytest.raises(ConfigError, match="has 68 images, less than one global batch of 1024"):
        data.TrainingBatches(68, small_config(image_folder, global_batch_size=1024), 1024, 0, 1)


def test_a_global_batch_that_cannot_be_shared_is_refused(image_folder):
    assert data.split_global_batch(small_config(image_folder, global_batch_size=96, batch_size=20), 2) == (16, 3)
    with pytest.raises(ConfigError, match="global_batch_size 16 is not a multiple of 3 processes"):
        data.split_global_batch(small_config(image_folder), 3)
    with pytest.raises(ConfigError, match="mixup pairs images"):
        data.split_global_batch(small_config(image_folder, global_batch_size=18), 2)


# runs


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
