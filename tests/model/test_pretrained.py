"""Tests of the weights in the package, loaded by timm's `pretrained=True` or by name (`--pretrained-path NAME`)."""

import json
from dataclasses import fields

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from processes import call
from safetensors import safe_open
from safetensors.torch import load_file
from timm.data import resolve_data_config

import vil
from vil.classes import names_of
from vil.cli import predict
from vil.evaluation import models as evaluated
from vil.factory import create_model
from vil.models.shipped import FILES

NAMES = ["vil_tiny.tiny_in200", "vil_tiny_pooled.tiny_in200"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Fail if a test opens a connection."""

    def refuse(*_, **__):
        raise AssertionError("the weights must load without a network")

    monkeypatch.setattr("socket.socket.connect", refuse)


def test_timm_lists_the_weights():
    assert timm.list_pretrained("vi[lm]_*") == NAMES == sorted(FILES)
    assert all(timm.is_model_pretrained(name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tagged", [True, False])
def test_pretrained_models_compute_what_the_trained_model_computes_on_enlarged_images(name, tagged):
    model = timm.create_model(name if tagged else name.split(".")[0], pretrained=True).eval()
    config = resolve_data_config({}, model=model)
    assert (config["input_size"], config["crop_pct"], config["interpolation"]) == ((3, 256, 256), 1.0, "bicubic")
    assert model.num_classes == 200
    small = vil.from_checkpoint(FILES[name])  # weights at the training size: 64 pixels and patches of 4
    assert names_of(model) == small.pretrained_cfg["label_names"]
    # enlarging 16x16 images to 64 or 256 pixels loses no information
    coarse = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = [torch.nn.functional.interpolate(coarse, (n, n), mode="bicubic", antialias=True) for n in (64, 256)]
    with torch.inference_mode():
        expected, logits = small(images[0]), model(images[1])
    assert torch.nn.functional.cosine_similarity(expected, logits).min() > 0.99


@pytest.mark.parametrize(
    "arguments",
    [
        dict(num_classes=10), dict(num_classes=0), dict(features_only=True), dict(dynamic_img_size=True),
        dict(img_size=64, patch_size=4), dict(img_size=(96, 64)), dict(in_chans=1), dict(pretrained_cfg_overlay={}),
        dict(depth=12),
        dict(pretrained_cfg_overlay=dict(crop_pct=0.9)), dict(pretrained_cfg="tiny_in200"), dict(pretrained_cfg=""),
        dict(pretrained_cfg=timm.get_pretrained_cfg("vil_tiny").to_dict()),  # pretrained_cfg may also be a dict
    ],
)  # fmt: skip
def test_the_blocks_are_loaded_with_any_arguments(arguments):
    model = timm.create_model("vil_tiny", pretrained=True, **arguments)
    trained = load_file(FILES["vil_tiny.tiny_in200"])["blocks.3.mixer.in_proj.weight"]
    block = (model.model if "features_only" in arguments else model).blocks[3]
    assert torch.equal(block.mixer.in_proj.weight, trained.float())


def test_overlaid_weights_take_precedence(tmp_path):
    torch.save(timm.create_model("vim_tiny", img_size=32, depth=1).state_dict(), tmp_path / "mine.pth")
    overlay = dict(file=str(tmp_path / "mine.pth"))
    model = timm.create_model("vim_tiny", pretrained=True, img_size=32, depth=1, pretrained_cfg_overlay=overlay)
    assert torch.equal(model.head.weight, torch.load(tmp_path / "mine.pth")["head.weight"])
    assert model.num_classes == 1000


def test_models_without_weights_name_those_that_have_weights():
    with pytest.raises(RuntimeError, match=f"vil_small has no pretrained weights.*{NAMES[1]} or {NAMES[0]}$"):
        timm.create_model("vil_small", pretrained=True)


def test_untrained_models_keep_their_size_and_classes():
    with torch.device("meta"):
        model = timm.create_model("vil_tiny")
    assert (model.num_classes, model.patch_embed.img_size) == (1000, (224, 224))
    assert "label_names" not in model.pretrained_cfg


@pytest.mark.parametrize("name", ["vil_tiny.tiny_in200", "vil_tiny"])
def test_training_starts_from_weights_by_name(name, tmp_path, monkeypatch, caplog):
    model = create_model("vil_tiny", name, img_size=32, depth=1, num_classes=3)
    assert caplog.messages[-1].startswith(f"initialized from {name}: ")
    trained = load_file(FILES["vil_tiny.tiny_in200"])
    assert torch.equal(model.blocks[0].mixer.in_proj.weight, trained["blocks.0.mixer.in_proj.weight"].float())
    monkeypatch.chdir(tmp_path)  # a local file takes precedence over packaged weights with the same name
    torch.save({**trained, "norm.weight": torch.full((192,), 7.0)}, name)
    assert create_model("vil_tiny", name, img_size=32, depth=1, num_classes=3).norm.weight.unique() == 7


def test_validate_evaluates_weights_by_name():
    names = [field.name for field in fields(evaluated.ModelSettings)]
    settings = evaluated.ModelSettings(**dict.fromkeys(names) | dict(model="vil_tiny_pooled", model_kwargs={}))
    assert evaluated.build(settings, torch.device("cpu")).label_names == names_of(timm.create_model(NAMES[1]))


def test_class_names_in_the_package_are_those_of_the_weights():
    for name, file in FILES.items():
        with safe_open(file, "pt") as weights:
            assert list(timm.get_pretrained_cfg(name).label_names) == json.loads(weights.metadata()["label_names"])


def test_predict_without_a_checkpoint_uses_the_pretrained_model(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.full((90, 120, 3), 200, np.uint8)).save("photo.png")
    call(predict.main, "photo.png", "--device", "cpu")
    model = timm.create_model("vil_tiny_pooled", pretrained=True)
    expected = vil.predict(model, "photo.png")
    found = [f"{prediction.label} {prediction.probability:.1%}" for prediction in expected]
    assert capsys.readouterr().out == f"photo.png: {'; '.join(found)}\n"
    assert len(found) == 5
    # the first use of the CPU kernels on a machine logs another message
    (message,) = [record.message for record in caplog.records if record.name == "vil.prediction.loading"]
    assert message.startswith("using vil_tiny_pooled.tiny_in200, which recognizes the 200 classes of Tiny ImageNet")
