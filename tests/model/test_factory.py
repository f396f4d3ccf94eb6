"""Tests of `vil.from_checkpoint`, which loads a trained model with its preprocessing and class names."""

import argparse

import naive_model
import pytest
import timm
import torch
from fixtures import CLASSES
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models import save_for_hf
from timm.utils import CheckpointSaver

import vil
from vil.checkpoint import Checkpoint, CheckpointError
from vil.config import Config, ConfigError, load_config
from vil.evaluation.settings import ModelOptions, resolve_model
from vil.exporting import export_model
from vil.factory import create_model
from vil.training.building import build_model


@pytest.fixture(scope="module")
def trained(uninterrupted):
    """Return the path and the content of a small run's last.pt."""
    path = uninterrupted / "run" / "last.pt"
    return path, torch.load(path, weights_only=True)


def changed(trained, folder, **parts):
    """Return the path of a copy of last.pt with changed config options or other entries."""
    content = dict(trained[1])
    content["config"] = content["config"] | parts.pop("config", {})
    torch.save(content | parts, folder / "changed.pt")
    return folder / "changed.pt"


def test_the_models_data_config_reproduces_the_accuracy_that_training_reported(trained, image_folder):
    path, saved = trained
    model = vil.from_checkpoint(path)
    assert not model.training
    config = resolve_model_data_config(model)
    assert config["input_size"] == (3, 16, 16)
    transform = create_transform(**config, is_training=False)
    correct = []
    for number, folder in enumerate(sorted((image_folder / "val").iterdir())):
        for file in folder.iterdir():
            with Image.open(file) as image, torch.inference_mode():
                correct.append(model(transform(image.convert("RGB"))[None]).argmax().item() == number)
    assert len(correct) == 28
    assert 100 * sum(correct) / len(correct) == pytest.approx(saved["history"][-1]["eval_top1"])


def test_a_checkpoint_is_loaded_as_a_model_of_feature_maps(trained, tmp_path):
    path, images = trained[0], torch.rand(2, 3, 16, 16)
    whole = vil.from_checkpoint(path)
    features = vil.from_checkpoint(path, features_only=True, out_indices=(0, -1))
    assert not features.training
    assert resolve_model_data_config(features) == resolve_model_data_config(whole)
    blocks = [0, len(whole.blocks) - 1]
    expected = whole.forward_intermediates(images, blocks, norm=False, intermediates_only=True)
    for found, truth in zip(features(images), expected, strict=True):
        assert torch.equal(found, truth)
    resnet = timm.create_model("resnet18", num_classes=3).eval()
    torch.save(resnet.state_dict(), tmp_path / "own.pth")
    features = vil.from_checkpoint(tmp_path / "own.pth", "resnet18", features_only=True)
    expected = resnet.forward_intermediates(torch.ones(1, 3, 64, 64), intermediates_only=True)
    for found, truth in zip(features(torch.ones(1, 3, 64, 64)), expected, strict=True):
        assert torch.equal(found, truth)


def test_img_size_may_be_set_for_models_without_the_argument(tmp_path):
    model = create_model("resnet18", img_size=64, num_classes=3)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    model.bn1.num_batches_tracked.fill_(100_001)
    torch.save(model.state_dict(), tmp_path / "own.pth")
    loaded = vil.from_checkpoint(tmp_path / "own.pth", "resnet18", img_size=64, num_classes=3)
    export_model(loaded, tmp_path / "own.safetensors")
    # Integer buffers stay exact: 100,001 exceeds the range of fp16.
    assert vil.from_checkpoint(tmp_path / "own.safetensors").bn1.num_batches_tracked == 100_001
    for use_test_size in (False, True):  # both sizes are 64, although timm's pretrained weights have another test size
        assert resolve_model_data_config(loaded, use_test_size=use_test_size)["input_size"] == (3, 64, 64)
    with pytest.raises(ConfigError, match="resnet18 does not support the argument 'depths'; did you mean 'depth'"):
        create_model("resnet18", img_size=64, depths=3)
    # The suggestion must not be the rejected argument, which other models support.
    with pytest.raises(ConfigError, match="vil_tiny does not support the argument 'num_heads'; remove the argument$"):
        create_model("vil_tiny", num_heads=3)
    # densenet121 accepts neither img_size nor drop_path_rate, so both must be dropped.
    create_model("densenet121", img_size=64, drop_path_rate=0.0, growth_rate=4)
    with pytest.raises(
        ConfigError, match=r"model densenet121: .*does not support stochastic depth: set --drop-path 0$"
    ):
        create_model("densenet121", drop_path_rate=0.1)
    words = ["--model", "dla34", "--data-dir", "x", "--drop-path", "0", "--grad-checkpointing"]
    with pytest.raises(ConfigError, match="^dla34 does not support activation checkpointing"):
        build_model(load_config("", words), 4)


@pytest.mark.parametrize(
    ("use_ema", "best", "part"),
    [
        (False, "state_dict_ema", "state_dict"), (True, "state_dict", "state_dict_ema"), (None, None, "state_dict"),
        (None, "state_dict", "state_dict"), (None, "state_dict_ema", "state_dict_ema"),
    ],
)  # fmt: skip
def test_use_ema_selects_the_weights_and_the_default_is_the_better_ones(trained, tmp_path, use_ema, best, part):
    path = changed(trained, tmp_path, **dict(best=best) if best else {})
    found = vil.from_checkpoint(str(path), use_ema=use_ema).state_dict()  # the path may be a string or a Path
    assert found.keys() == trained[1][part].keys()
    assert all(torch.equal(found[name], trained[1][part][name]) for name in found)
    assert not torch.equal(trained[1]["state_dict"]["norm.weight"], trained[1]["state_dict_ema"]["norm.weight"])


def test_preprocessing_equals_that_of_the_run(trained, tmp_path):
    default = vil.from_checkpoint(trained[0])
    own = vil.from_checkpoint(changed(trained, tmp_path, config=dict(crop_pct=0.7, interpolation="bilinear")))
    assert (default.pretrained_cfg["crop_pct"], default.pretrained_cfg["interpolation"]) == (0.875, "bicubic")
    assert (own.pretrained_cfg["crop_pct"], own.pretrained_cfg["interpolation"]) == (0.7, "bilinear")
    assert own.pretrained_cfg is own.default_cfg
    assert own.pretrained_cfg["num_classes"] == own.num_classes == 4
    torch.save(timm.create_model("vil_tiny", depth=1, in_chans=2).state_dict(), tmp_path / "two.pth")
    two = vil.from_checkpoint(tmp_path / "two.pth", "vil_tiny", depth=1, in_chans=2)
    assert two.pretrained_cfg["input_size"] == (2, 224, 224)
    export_model(two, tmp_path / "two.safetensors", mean=[0.5, 0.4], std=[0.2])
    assert vil.from_checkpoint(tmp_path / "two.safetensors").pretrained_cfg["mean"] == [0.5, 0.4]
    # Changing one model's pretrained_cfg does not change the pretrained_cfg of other models.
    assert timm.create_model("vil_tiny", depth=1).pretrained_cfg["crop_pct"] == 0.875


def test_preprocessing_is_read_from_the_weight_file_or_config_json_as_by_timm(trained, tmp_path):
    model, folder = vil.from_checkpoint(trained[0]), tmp_path / "weights"
    said = dict(mean=[0.5, 0.25, 0.5], std=[0.5, 0.25, 0.125], crop_mode="squash")
    export_model(model, folder, **said)
    export_model(model, tmp_path / "weights.safetensors", **said)
    from_folder, from_file = map(vil.from_checkpoint, (folder, tmp_path / "weights.safetensors"))
    by_timm = timm.create_model(f"local-dir:{folder}", pretrained=True)
    seen_by_timm = resolve_model_data_config(by_timm)
    seen_by_timm["input_size"] = tuple(seen_by_timm["input_size"])  # timm 1.0.28 returns a list
    assert seen_by_timm == resolve_model_data_config(from_folder)
    assert resolve_model_data_config(from_folder) == resolve_model_data_config(from_file)
    assert {name: from_file.pretrained_cfg[name] for name in said} == said

    written = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        written.replace("0.125", "1.5").replace("0.875", "0.75").replace("squash", "border")
    )
    changed_by_hand = vil.from_checkpoint(folder).pretrained_cfg
    expected = {**said, "std": [0.5, 0.25, 1.5], "crop_pct": 0.75, "crop_mode": "border"}
    assert {name: changed_by_hand[name] for name in expected} == expected
    validated = resolve_model(ModelOptions(), Checkpoint(folder))
    assert {name: getattr(validated, name) for name in expected} == expected

    export_model(model, tmp_path / "grey.safetensors", std=[0.25])
    # Like timm, repeat a single std value for all channels.
    assert vil.from_checkpoint(tmp_path / "grey.safetensors").pretrained_cfg["std"] == [0.25] * 3

    wrong = [("1.5", "0"), ("1.5", "NaN"), ("1.5", '"1"'), ("0.75", "1e-9"), ("squash", "zoom"), ("{", "[")]
    for old, new in wrong:
        (folder / "config.json").write_text(written.replace("0.125", "1.5").replace("0.875", "0.75").replace(old, new))
        with pytest.raises((CheckpointError, ConfigError), match=f"{folder}[^\n]*$"):
            vil.from_checkpoint(folder)


def test_other_timm_models_are_resized_as_timm_does(tmp_path, recwarn):
    arguments = dict(embed_dim=24, depth=1, num_classes=3)
    timms = timm.create_model("deit_tiny_patch16_224", img_size=32, **arguments).eval()
    torch.save(timms.state_dict(), tmp_path / "deit.pth")
    model = vil.from_checkpoint(tmp_path / "deit.pth", "deit_tiny_patch16_224", img_size=(32, 48), **arguments)
    assert [str(warning.message) for warning in recwarn] == []
    timms.set_input_size((32, 48))
    images = torch.rand(2, 3, 32, 48)
    torch.testing.assert_close(model(images), timms(images))


def test_class_names_are_kept_in_the_model_and_in_exported_weights(trained, tmp_path):
    model = vil.from_checkpoint(trained[0])
    assert model.pretrained_cfg["label_names"] == list(CLASSES)
    export_model(model, tmp_path / "weights.safetensors")
    assert vil.from_checkpoint(tmp_path / "weights.safetensors").pretrained_cfg["label_names"] == list(CLASSES)
    assert "label_names" not in vil.from_checkpoint(trained[0], num_classes=0).pretrained_cfg
    older = changed(trained, tmp_path, label_names=None)
    assert Checkpoint(older).label_names == []
    assert "label_names" not in vil.from_checkpoint(older).pretrained_cfg


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_pooled"])
def test_weights_are_not_loaded_into_a_model_that_reads_tokens_differently(name, tmp_path, caplog):
    other = {"vil_tiny": "vil_tiny_pooled", "vil_tiny_pooled": "vil_tiny"}[name]
    arguments = dict(depth=2, embed_dim=40, img_size=32, num_classes=3)
    path = tmp_path / "weights.safetensors"
    export_model(create_model(name, **arguments), path)
    kinds = ["pooled", "unpooled"] if "pooled" in name else ["unpooled", "pooled"]
    difference = f"has weights of the {kinds[0]} model {name}, but {other} is {kinds[1]}"
    with pytest.raises(ConfigError, match=f"weights.safetensors {difference}: set --model {name}$"):
        vil.from_checkpoint(path, other)
    assert vil.from_checkpoint(path, name).pooled == vil.from_checkpoint(path).pooled == ("pooled" in name)
    create_model(name, str(path), **arguments)
    assert "unpooled" not in caplog.text
    create_model(other, str(path), **arguments)
    assert f"{difference}; prefer" in caplog.text


def test_pretrained_is_timms_option_of_a_new_run(caplog):
    shipped = timm.create_model("vil_tiny", pretrained=True).state_dict()
    config = Config(model="vil_tiny", pretrained=True)
    built = build_model(config, num_classes=3)
    assert built.head.weight.shape == (3, 192)
    assert "initialized from timm's pretrained weights of vil_tiny; new head for 3 classes" in caplog.text
    assert all(torch.equal(built.state_dict()[name], shipped[name]) for name in shipped if "head" not in name)
    assert config.without_initial_weights() == Config(model="vil_tiny")
    with pytest.raises(ConfigError, match="weights for vil_small; set --pretrained-path FILE, or --no-pre"):
        build_model(Config(model="vil_small", pretrained=True), 3)


def test_weights_of_other_programs_require_the_model_name(tmp_path):
    path = tmp_path / "vim.pth"
    torch.save({"model": naive_model.published_vim(embed_dim=40, depth=2, grid=(3, 3), num_classes=7)}, path)
    with pytest.raises(ConfigError, match=r"pass the name .* vil export --checkpoint \S+/vim.pth --model NAME "):
        vil.from_checkpoint(path)
    model = vil.from_checkpoint(path, "vim_tiny", embed_dim=40, depth=2, img_size=48, num_classes=7)
    default = vil.from_checkpoint(path, "vim_tiny", embed_dim=40, depth=2, num_classes=7)
    assert [resolve_model_data_config(m)["input_size"] for m in (model, default)] == [(3, 48, 48), (3, 224, 224)]
    first = create_model("vim_tiny", str(path), embed_dim=40, depth=1, img_size=48, num_classes=7).state_dict()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in first.items())
    assert vil.from_checkpoint(path, "vim_tiny", embed_dim=40, depth=2).num_classes == 7  # as in the file
    with pytest.raises(CheckpointError, match="the checkpoint has 7 classes, but the model has 1000"):
        vil.from_checkpoint(path, "vim_tiny", embed_dim=40, depth=2, img_size=48, num_classes=1000)
    with pytest.raises(CheckpointError, match="does not exist$"):
        vil.from_checkpoint(tmp_path / "nowhere.pt")
    with pytest.raises(CheckpointError, match="exist: resnet18 is the name of a model, not of a file$"):
        vil.from_checkpoint("resnet18")
    with pytest.raises(CheckpointError, match="vil_tiny.tiny_in200 is the name .*; the file with weights of this") as e:
        vil.from_checkpoint("vil_tiny.tiny_in200")
    assert vil.from_checkpoint(str(e.value).split()[-1]).num_classes == 200


def saved_by_timm(folder, kind):
    """Return a small pooled model, and the path at which timm has saved the model."""
    sizes = dict(img_size=32, num_classes=3)
    kwargs = dict(patch_size=8, depth=2, embed_dim=16)
    model = timm.create_model("vil_tiny_pooled", **sizes, **kwargs).eval()
    if kind == "folder":
        save_for_hf(model, folder / "hub", model_args=sizes | kwargs, safe_serialization=True)
        return model, folder / "hub"
    args = argparse.Namespace(
        model="vil_tiny_pooled", num_classes=3, img_size=32, model_kwargs=kwargs | dict(img_size=32)
    )
    optimizer = torch.optim.SGD(model.parameters())
    CheckpointSaver(model, optimizer, args, checkpoint_dir=str(folder)).save_checkpoint(0, 1.0)
    return model, folder / "last.pth.tar"


@pytest.mark.parametrize("kind", ["checkpoint", "folder"])
def test_the_model_is_read_from_files_of_timm(kind, tmp_path):
    model, path = saved_by_timm(tmp_path, kind)
    loaded = vil.from_checkpoint(path)
    images = torch.rand(2, 3, 32, 32)
    assert loaded.pooled
    assert torch.equal(loaded(images), model(images))
    settings = resolve_model(ModelOptions(checkpoint=str(path)), Checkpoint(path))
    assert (settings.model, settings.num_classes) == ("vil_tiny_pooled", 3)


@pytest.mark.parametrize(
    "part", [dict(arch="rm -rf"), dict(arch=5), dict(args=argparse.Namespace(model_kwargs=dict(mixer="os.system")))]
)
def test_options_of_timm_that_a_checkpoint_must_not_set_are_ignored(part, tmp_path):
    torch.save(dict(arch="vil_tiny", state_dict={"head.bias": torch.zeros(2)}) | part, tmp_path / "last.pth.tar")
    assert Checkpoint(tmp_path / "last.pth.tar").options == {}


def test_weights_of_another_number_of_classes_are_rejected_with_one_remedy(tmp_path):
    path = tmp_path / "resnet.pth"
    torch.save(timm.create_model("resnet18", num_classes=7).state_dict(), path)
    own = tmp_path / "vil.pth"
    torch.save(timm.create_model("vil_tiny", depth=1, num_classes=7).state_dict(), own)
    message = (
        r"the model: the checkpoint has 7 classes, but the model has 9: set num_classes to 7; for a new head, call "
        r"reset_classifier\(9\) on the loaded model$"
    )
    for name, file, arguments in (("resnet18", path, {}), ("vil_tiny", own, dict(depth=1))):
        with pytest.raises(CheckpointError, match=message):
            vil.from_checkpoint(file, name, num_classes=9, **arguments)
    with pytest.raises(CheckpointError, match="size mismatch for layer1(?!.*num_classes)"):
        vil.from_checkpoint(path, "resnet50")
    torch.save(timm.create_model("resnet18", num_classes=7).state_dict() | {"fc.bias": torch.zeros(())}, own)
    with pytest.raises(CheckpointError, match="size mismatch for fc.bias"):
        vil.from_checkpoint(own, "resnet18", num_classes=9)
    with pytest.raises(ConfigError, match="^cannot create the model vil_tiny with the weights in .*resnet.pth: "):
        create_model("vil_tiny", path)
    torch.save({}, path)
    with pytest.raises(CheckpointError, match="resnet.pth does not contain any weights$"):
        vil.from_checkpoint(path, "resnet18")


def test_num_classes_0_returns_the_input_of_the_head(trained, tmp_path):
    """With num_classes=0, a model returns the input of its head, also if the weights file has no head."""
    path, saved = trained
    weights, arguments = saved["state_dict"], dict(img_size=16, **saved["config"]["model_kwargs"])
    torch.save(weights, tmp_path / "plain.pth")
    torch.save({name: t for name, t in weights.items() if "head" not in name}, tmp_path / "headless.pth")
    models = [vil.from_checkpoint(path, num_classes=0)]
    for name in ("plain", "headless"):
        models.append(vil.from_checkpoint(tmp_path / f"{name}.pth", "vil_tiny", num_classes=0, **arguments))
    whole, images = vil.from_checkpoint(path), torch.rand(2, 3, 16, 16)
    for model in models:
        assert not model.training
        assert model.num_classes == model.pretrained_cfg["num_classes"] == 0
        with torch.inference_mode():
            torch.testing.assert_close(whole.head(model(images)), whole(images))


def test_a_model_does_not_keep_the_file_that_initialized_it():
    model = create_model("vil_tiny", "vil_tiny.tiny_in200", num_classes=3, depth=1)
    assert "state_dict" not in model.pretrained_cfg
    assert "pretrained_cfg_overlay" not in model.model_args
