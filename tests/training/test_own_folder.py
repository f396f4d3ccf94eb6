"""Tests of the options that are chosen for a folder of images."""

import argparse
import functools
import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from PIL import Image
from processes import call

from vil.checkpoint import Checkpoint
from vil.cli import validate
from vil.cli.main import run as run_vil
from vil.config import Config, ConfigError, load_config
from vil.data.sources.splits import open_splits
from vil.errors import CheckpointError
from vil.training import own_folder
from vil.training.own_folder import BLOCKS, IMG_SIZE, choose_recipe, complete_options
from vil.training.trainer import Trainer

complete = functools.partial(complete_options, has_config=False)


def write(root, *folders, count=10):
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.new("RGB", (8, 8)).save(root / folder / f"{i}.png")
    return str(root)


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Return a folder with ten images in each of two class folders. The working folder is empty."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return write(tmp_path / "photos", "cat", "dog")


def test_all_options_are_chosen_and_named_in_the_log(photos, caplog):
    options = complete({"data_dir": photos, "device": "cpu"})
    config = Config(**options)
    assert (config.data_dir, config.train_split, config.val_fraction, config.experiment) == (photos, ".", 0.2, "photos")
    assert (config.model, config.pretrained_path) == ("vil_tiny_pooled", "vil_tiny_pooled.tiny_in200")
    assert (config.img_size, config.model_kwargs) == (IMG_SIZE["cpu"], {"patch_size": 8, "depth": BLOCKS["cpu"]})
    assert (config.global_batch_size, config.layer_decay, config.drop_path, config.smoothing) == (4, None, 0.1, 0.1)
    assert config.epochs == choose_recipe(16, "cpu", {})["epochs"]
    log = caplog.text
    assert "20 images of 2 classes; no validation split, so 20% of each class are held out for validation" in log
    assert "(set --val-fraction)" in log
    for name in ("model", "pretrained_path", "img_size", "model_kwargs", "epochs", "global_batch_size", "lr"):
        assert f"--{name.replace('_', '-')} " in log
    assert "recipe for 16 training images on a CPU" in log


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": 3}, {"lr": 1e-2}, {"global_batch_size": 6}, {"img_size": 96}, {"val_fraction": 0.5},
        {"model_kwargs": {"embed_dim": 16}}, {"model_kwargs": {"depth": 30}},
        {"model": "vil_tiny"}, {"pretrained_path": "vil_tiny.tiny_in200"}, {"model": "vil_small"},
        {"model": "resnet18"}, {"pretrained_path": None},
        {"experiment": "first"}, {"drop_path": 0.0}, {"layer_decay": 0.5}, {"warmup_epochs": 1},
        {"apply_exif_orientation": False},
    ],
)  # fmt: skip
def test_given_options_win(photos, given, caplog):
    options = complete({"data_dir": photos, "device": "cpu", **given})
    config = Config(**options)
    assert {name: options[name] for name in given} == given
    assert config.warmup_epochs < config.epochs
    assert config.global_batch_size <= 16
    for name in given:
        assert f"--{name.replace('_', '-')} " not in caplog.text
    if "vil_tiny" in given.values() or "vil_tiny.tiny_in200" in given.values():
        assert (config.model, config.pretrained_path) == ("vil_tiny", "vil_tiny.tiny_in200")
    # No weights are chosen for models that the weights in the package do not fit.
    if given.get("model") in ("vil_small", "resnet18") or "model_kwargs" in given:
        assert (config.pretrained_path, config.img_size, config.model_kwargs) == (
            None, None, given.get("model_kwargs", {}),
        )  # fmt: skip
        reason = "random weights, because the package has no weights that fit this model"
        assert f"--pretrained-path none ({reason}" in caplog.text
        assert ("set --pretrained" in caplog.text) is ("resnet18" in given.values())


def test_timms_pretrained_weights_replace_random_weights(photos, caplog):
    config = Config(**complete({"data_dir": photos, "device": "cpu", "model": "resnet18", "pretrained": True}))
    assert (config.model, config.pretrained, config.pretrained_path) == ("resnet18", True, None)
    assert "random weights" not in caplog.text
    config = Config(**complete({"data_dir": photos, "device": "cpu", "pretrained": True}))
    assert config.pretrained_path == "vil_tiny_pooled.tiny_in200"  # takes precedence, and is resized by the recipe


def test_an_empty_experiment_is_named_after_the_folder(photos):
    assert complete({"data_dir": photos, "device": "cpu", "experiment": ""})["experiment"] == "photos"


def test_given_model_arguments_are_added_to_the_chosen_ones(photos, caplog):
    options = complete({"data_dir": photos, "device": "cpu", "model_kwargs": {"depth": 2}})
    assert options["model_kwargs"] == {"patch_size": 8, "depth": 2}
    assert "--model-kwargs patch_size=8\n" in caplog.text


def test_the_chosen_model_arguments_can_be_removed(photos, caplog):
    words = ["--data-dir", photos, "--device", "cpu", "--model-kwargs", "none"]
    assert load_config("", words, complete=complete_options).model_kwargs == {}
    assert "--model-kwargs" not in caplog.text


def test_no_given_model_arguments_keep_the_chosen_ones(photos):
    options = complete({"data_dir": photos, "device": "cpu", "model_kwargs": {}})
    assert options["model_kwargs"] == {"patch_size": 8, "depth": BLOCKS["cpu"]}


def test_a_config_leaves_only_the_splits_to_choose(photos):
    given = {"data_dir": photos, "epochs": 3}
    splits = {"train_split": ".", "val_fraction": 0.2}
    assert complete_options(given, has_config=True) == given | splits


def test_given_splits_are_not_detected(tmp_path, caplog):
    folder = write(tmp_path, "train/cat", "train/dog", "test/cat", "test/dog", "more/cat", "more/dog")
    chosen = complete({"data_dir": folder, "device": "cpu"})
    assert (chosen["train_split"], chosen["val_fraction"]) == ("train", 0.2)
    chosen = complete({"data_dir": folder, "device": "cpu", "val_split": "test"})
    assert (chosen["train_split"], chosen["val_split"], "val_fraction" in chosen) == ("train", "test", False)
    assert f"validation on {folder}/test (set --val-split)" in caplog.text
    chosen = complete({"data_dir": folder, "device": "cpu", "train_split": "more", "val_fraction": 0.5})
    assert (chosen["train_split"], chosen["val_fraction"], chosen["global_batch_size"]) == ("more", 0.5, 4)


def test_images_are_held_out_for_validation_on_request_although_there_is_a_validation_split(tmp_path, caplog):
    folder = write(tmp_path, "train/cat", "train/dog", "val/cat", "val/dog")
    chosen = complete({"data_dir": folder, "device": "cpu", "val_fraction": 0.5})
    assert (chosen["train_split"], chosen["val_fraction"]) == ("train", 0.5)
    assert "2 classes; 50% of each class are held out for validation (set --val-fraction)" in caplog.text
    assert "validation on" not in caplog.text


def test_folders_beside_the_training_split_are_named_if_they_are_not_used(tmp_path, caplog, monkeypatch):
    folder = write(tmp_path, "training/cat", "training/dog", "holdout/cat", "Test/cat", "output/run", ".cache/cat")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.tar").touch()
    monkeypatch.chdir(folder)
    complete({"data_dir": folder, "device": "cpu"})
    assert f"{folder}/training: 20 images of 2 classes" in caplog.text
    assert "; not used: 'Test', 'holdout' (to validate on 'Test', set --val-split Test)\n" in caplog.text
    caplog.clear()
    complete({"data_dir": folder, "device": "cpu", "val_split": "holdout"})
    assert f"validation on {folder}/holdout" in caplog.text
    assert "not used" not in caplog.text


def test_a_tar_file_of_test_images_is_named_if_it_is_not_used(tmp_path, caplog):
    write(tmp_path, "train/cat", "train/dog")
    (tmp_path / "test.tar").touch()
    complete({"data_dir": str(tmp_path), "device": "cpu"})
    assert "not used: 'test' (to validate on 'test', set --val-split test)" in caplog.text


def test_a_class_named_like_a_split_is_used(tmp_path, caplog):
    complete({"data_dir": write(tmp_path, "test", "plane", "car"), "device": "cpu"})
    assert "30 images of 3 classes" in caplog.text
    assert "not used" not in caplog.text


def test_splits_with_other_names_are_chosen_or_joined_by_options(tmp_path):
    folder = write(tmp_path, "choose/cat", "choose/dog", "test/cat", "test/dog")
    with pytest.raises(ConfigError, match="set --train-split choose --val-split test"):
        complete({"data_dir": folder, "device": "cpu"})
    chosen = complete({"data_dir": folder, "device": "cpu", "train_split": "choose", "val_split": "test"})
    assert [len({*part.reader.targets}) for part in open_splits(Config(**chosen))[:2]] == [2, 2]
    chosen = complete({"data_dir": folder, "device": "cpu", "train_split": ".", "val_fraction": 0.2})
    assert open_splits(Config(**chosen))[2] == 4


@pytest.mark.parametrize("given", [{}, {"synthetic": 9}, {"dataset": "hfds/x", "data_dir": "."}])
def test_other_data_keep_the_default_options(given):
    assert complete(given) == given


def test_training_continues_the_model_of_timms_checkpoint(photos, tmp_path, caplog):
    file = tmp_path / "last.pth.tar"
    args = argparse.Namespace(img_size=64, model_kwargs={"patch_size": 8})
    torch.save({"arch": "vil_tiny_pooled", "args": args, "state_dict": {}}, file)
    config = Config(**complete({"data_dir": photos, "device": "cpu", "pretrained_path": str(file)}))
    assert (config.model, config.img_size, config.model_kwargs) == ("vil_tiny_pooled", 64, {"patch_size": 8})
    assert "model and weights: --model vil_tiny_pooled --img-size 64 --model-kwargs patch_size=8" in caplog.text


def test_weights_without_the_name_of_their_model_require_the_name(photos, tmp_path):
    given = {"data_dir": photos, "device": "cpu", "pretrained_path": str(tmp_path / "weights.pt")}
    torch.save({"head.bias": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="weights.pt does not store the name of its model: set --model"):
        complete(given)
    assert complete(given | {"model": "vil_tiny"})["model"] == "vil_tiny"


def test_folders_of_many_images_keep_the_default_recipe(photos, monkeypatch, caplog):
    monkeypatch.setattr(own_folder, "MOST_IMAGES", 15)
    config = Config(**complete({"data_dir": photos, "device": "cpu"}))
    assert (config.pretrained_path, config.epochs) == (None, Config().epochs)
    assert "training starts from random weights with the default options" in caplog.text
    complete({"data_dir": photos, "device": "cpu", "pretrained_path": "vil_tiny.tiny_in200"})
    assert "training starts from vil_tiny.tiny_in200 with the default options" in caplog.text


def test_run_folders_between_the_class_folders_are_rejected(photos, monkeypatch):
    monkeypatch.chdir(photos)
    with pytest.raises(ConfigError, match="--output must be outside .*photos, got .*photos/output: .* read as a class"):
        complete({"data_dir": ".", "device": "cpu"})
    assert complete({"data_dir": ".", "device": "cpu", "output": "../runs"})["experiment"] == "photos"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_recipes_have_enough_steps_and_batches_that_fit(device):
    for num_images in [*range(2, 100), 500, 1000, 3000, 10_000, 100_000]:
        recipe = choose_recipe(num_images, device, {})
        steps = num_images // recipe["global_batch_size"]
        assert steps >= 1
        assert recipe["warmup_epochs"] < recipe["epochs"] / 2
        if num_images >= 50:
            assert steps * recipe["epochs"] >= 500
    shorter = [choose_recipe(number, device, {})["epochs"] for number in (20, 200, 2000, 20_000)]
    assert shorter == sorted(shorter, reverse=True)
    assert "epochs" not in choose_recipe(500, device, {"epochs": 7})
    assert choose_recipe(500, device, {"epochs": 7})["warmup_epochs"] == 0
    # the warm-up of every phase must be short
    assert choose_recipe(500, device, {"phases": [{"epochs": 20}, {"epochs": 10}]})["warmup_epochs"] == 1
    assert choose_recipe(500, device, {"epochs": 30, "phases": [{"lr": 1e-4}]})["warmup_epochs"] == 3


COLORS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a short run on class folders with twelve images of each color, and return the output folder."""
    folder = tmp_path_factory.mktemp("run")
    for name, color in COLORS.items():
        (folder / "colors" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (40, 40), tuple(value + i for value in color)).save(folder / "colors" / name / f"{i}.png")
    given = {"data_dir": str(folder / "colors"), "device": "cpu", "epochs": 2, "model_kwargs": {"depth": 1}}
    config = Config(**complete(given | {"output": str(folder), "workers": 0, "experiment": "run"}))
    Trainer(config, torch.device("cpu"), 0, 1).run()
    return folder


def evaluated(run, *words, capsys):
    """Return the results of `vil validate` for the run's best.pt."""
    call(validate.main, "--checkpoint", run / "run/best.pt", "--json", "-", "--workers", 0, "--device", "cpu", *words)
    return json.loads(capsys.readouterr().out)


def test_a_run_evaluates_its_held_out_images_again(run, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = Checkpoint(run / "run/last.pt").training_state()["history"]
    held_out = evaluated(run, capsys=capsys)
    assert held_out["images"] == history[-1]["eval_images"] == 6
    assert held_out["top1"] == max(max(row["eval_top1"], row["eval_top1_ema"]) for row in history)
    assert (held_out["data_dir"], held_out["split"]) == (str(run / "colors"), ".")
    assert "held-out images: 6 images of 3 classes" in caplog.text

    # evaluate a copy of the folder; --data-dir is the copy's parent folder
    shutil.copytree(run / "colors", tmp_path / "moved/colors")
    assert evaluated(run, "--data-dir", "moved", capsys=capsys)["images"] == 6
    assert evaluated(run, "--split", ".", capsys=capsys)["images"] == 36
    assert "all images: 36 images of 3 classes" in caplog.text
    assert "has changed since training" not in caplog.text

    # evaluate folders with fewer images of the same classes, in class folders or with a validation split
    for name in COLORS:
        (tmp_path / "moved/colors" / name / "0.png").unlink()
    assert evaluated(run, "--data-dir", "moved", capsys=capsys)["images"] == 33
    shutil.copytree(tmp_path / "moved/colors/red", tmp_path / "new/val/red")
    assert evaluated(run, "--data-dir", "new", capsys=capsys)["images"] == 11


def test_a_folder_that_changed_since_training_is_reported(run, capsys, caplog):
    (run / "colors/red/0.png").rename(run / "0.png")
    try:
        assert evaluated(run, capsys=capsys)["images"] == 6
    finally:
        (run / "0.png").rename(run / "colors/red/0.png")
    assert (
        "colors has changed since training (29 training images, was 30): some of the held-out images may" in caplog.text
    )


def test_resuming_keeps_the_options_of_the_run(run, monkeypatch):
    monkeypatch.chdir(run)
    given = {"data_dir": "colors", "device": "cpu", "output": ".", "experiment": "run", "resume": "auto"}
    config = Config(**complete(given))
    assert (config.epochs, config.model_kwargs, config.val_fraction) == (2, {"depth": 1, "patch_size": 8}, 0.2)
    again = Config(**complete(given | {"model_kwargs": {"depth": 1}}))  # repeat the first command's option
    assert again.model_kwargs == config.model_kwargs
    assert config.pretrained_path is None  # a resumed run chooses no pretrained weights
    resumed = Trainer(config, torch.device("cpu"), 0, 1)
    resumed.checkpointer.lock.release()
    assert resumed.run_info.options["pretrained_path"] == "vil_tiny_pooled.tiny_in200"
    assert resumed.run_info.options["resume"] is None
    (run / "run/last.pt").rename(run / "kept.pt")
    (run / "run/last.pt").write_bytes(b"damaged")
    assert Config(**complete(given)).epochs == 2  # last.pt is damaged, so the options are read from previous.pt
    (run / "kept.pt").replace(run / "run/last.pt")
    with pytest.raises(CheckpointError, match="val_fraction must be 0.2, as in .*last.pt, got 0.3"):
        Trainer(Config(**complete(given | {"val_fraction": 0.3})), torch.device("cpu"), 0, 1)


def test_resuming_without_a_checkpoint_keeps_the_options_of_the_run(run, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    shutil.copy(run / "run/config.yaml", tmp_path / "run")
    given = {"data_dir": str(run / "colors"), "output": str(tmp_path), "experiment": "run", "resume": "auto"}
    config = Config(**complete(given | {"device": "cpu", "lr": 1e-3, "workers": 0}))
    assert (config.epochs, config.model_kwargs, config.val_fraction) == (2, {"depth": 1, "patch_size": 8}, 0.2)
    assert (config.pretrained_path, config.lr) == ("vil_tiny_pooled.tiny_in200", 1e-3)
    Trainer(config, torch.device("cpu"), 0, 1)
    assert f"{tmp_path}/run has no checkpoint yet, so training starts from epoch 1" in caplog.text
    assert "initialized from vil_tiny_pooled.tiny_in200" in caplog.text


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ({"pretrained_path": "w.pt"}, {}, "starts from w.pt: to load these weights, set --pretrained-path w.pt"),
        ({"pretrained_path": "w.pt"}, {"pretrained": True}, "set --pretrained-path w.pt"),
        ({"pretrained_path": "w.pt"}, {"pretrained_path": None}, None),
        ({"pretrained": True}, {}, "starts from timm's weights: to load these weights, set --pretrained,"),
        ({"pretrained": True}, {"pretrained": True}, None),
        ({"pretrained_path": ["w.pt"]}, {}, "'pretrained_path' in .*config.yaml must be a text"),
        ({"model": "vil_tiny/../x"}, {}, "which is not a model"),
        ({"train_split": "../../secret"}, {}, "must be a relative path"),
        ({"dataset": "hfds/x"}, {}, "to read this dataset, set --dataset hfds/x"),
        ({"teacher": "resnet18"}, {}, "to use this teacher, set --teacher resnet18"),
        ({"output": "/", "experiment": "x", "resume": "x.pt", "log_wandb": True}, {}, None),
    ],
)
def test_options_of_a_run_without_a_checkpoint_are_checked_like_a_checkpoints(photos, tmp_path, saved, given, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(json.dumps({"epochs": 3, **saved}))
    given = {"data_dir": photos, "output": str(tmp_path), "experiment": "run", "resume": "auto", **given}
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        config = Config(**complete(given))
        assert {name: getattr(config, name) for name in given} == given
        assert (config.epochs, config.log_wandb) == (3, False)


def test_a_resumed_run_names_the_classes_that_changed(run, tmp_path):
    shutil.copytree(run / "colors", tmp_path / "colors")
    (tmp_path / "colors/blue").rename(tmp_path / "colors/black")
    shutil.copytree(tmp_path / "colors/red", tmp_path / "colors/ruby")
    given = {"data_dir": str(tmp_path / "colors"), "device": "cpu", "output": str(run), "experiment": "run"}
    config = Config(**complete(given | {"resume": "auto"}))
    with pytest.raises(CheckpointError, match="missing: 'blue'; new: 'black', 'ruby'"):
        Trainer(config, torch.device("cpu"), 0, 1)


@pytest.mark.parametrize(
    ("folders", "lines"),
    [
        ("cat dog", ["train: 16 images of 2 classes", "validation: 4 images of 2 classes"]),
        ("pets/cat pets/dog/big pets/dog/small", ["train: 24 images of 3", "validation: 6 images of 3"]),
        (
            "data/train/cat data/train/dog data/val/cat data/val/dog",
            ["train: 20 images of 2", "validation: 20 images of"],
        ),
        ("training/cat training/dog test/cat", ["train: 16 images of 2", "validation: 4 images of 2"]),
    ],
)
def test_folders_of_any_layout_train_without_options(tmp_path, folders, lines, monkeypatch, caplog, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "photos", *folders.split())
    short = "--device", "cpu", "--workers", "0", "--epochs", "1", "--model-kwargs", "depth=1"
    with pytest.raises(SystemExit) as ended:
        run_vil(["train", "photos", *short])
    assert ended.value.code in (0, None)
    for line in lines:
        assert line in caplog.text
    run_vil(["validate", "--checkpoint", "output/photos/best.pt", "--device", "cpu", "--workers", "0"])
    assert f"on {lines[1].split()[1]} images" in capsys.readouterr().out


def test_a_flat_folder_is_rejected_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "photos", ".")
    with pytest.raises(
        SystemExit, match="^error: photos has 10 images such as '0.png', '1.png', but no class folders, "
    ):
        run_vil(["train", "photos"])
    assert not (tmp_path / "output").exists()


def test_too_few_images_for_a_config_name_the_command_that_fits(photos):
    with pytest.raises(
        SystemExit, match="batch_size must be at most 16, .* so that `vil train FOLDER` chooses a value"
    ):
        run_vil(["train", photos, "-c", "vil_tiny", "--device", "cpu", "--workers", "0"])
