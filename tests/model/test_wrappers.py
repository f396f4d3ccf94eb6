"""Tests of models wrapped by PyTorch and timm: class names and preprocessing of the inner model are used."""

import logging

import numpy as np
import pytest
import timm
import torch
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import vil
from vil.config import ConfigError
from vil.exporting import export_model
from vil.factory import create_model
from vil.wrappers import unwrapped

NAMES = ["ant", "bee", "cat", "dog"]
OWN = dict(mean=(0.3, 0.5, 0.6), std=(0.4, 0.2, 0.3), crop_pct=0.7, interpolation="bilinear")
WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ModelEma": ModelEma,
    "ModelEmaV2": ModelEmaV2,
    "ModelEmaV3": ModelEmaV3,
    "AveragedModel": AveragedModel,
    "compiled DataParallel": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "DataParallel of compiled": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    "EMA of AveragedModel": lambda model: ModelEmaV3(AveragedModel(model)),
}
# FEW covers nested wrappers, and all attribute names under which wrappers store a model.
FEW = pytest.mark.parametrize("wrapped", ["compiled DataParallel", "ModelEma", "EMA of AveragedModel"], indirect=True)
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)


def named(**arguments):
    model = create_model("vil_tiny", num_classes=4, embed_dim=32, depth=2, **arguments).eval()
    with torch.no_grad():
        model.head.weight.normal_(std=0.3)
    model.pretrained_cfg = dict(model.pretrained_cfg, label_names=NAMES, **OWN)
    return model


@pytest.fixture(params=WRAPPERS)
def wrapped(request):
    torch.manual_seed(0)
    model = named(img_size=(24, 32), patch_size=8)
    return model, WRAPPERS[request.param](model)


def test_a_wrapped_model_predicts_like_the_inner_model(wrapped):
    model, outer = wrapped
    expected, found = vil.predict(model, PIXELS), vil.predict(outer, PIXELS)
    assert [p.label for p in found] == [p.label for p in expected]
    assert {p.label for p in found} == {*NAMES}
    assert [p.probability for p in found] == pytest.approx([p.probability for p in expected], rel=1e-4)


@FEW
def test_a_wrapped_models_export_has_the_inner_models_names_and_preprocessing(wrapped, tmp_path):
    _, outer = wrapped
    export_model(outer, tmp_path / "weights.safetensors")
    config = vil.from_checkpoint(tmp_path / "weights.safetensors").pretrained_cfg
    assert config["label_names"] == NAMES
    assert {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}.items() >= (
        OWN.items()
    )


@FEW
def test_a_wrapped_model_can_be_visualized(wrapped):
    model, outer = wrapped
    images = torch.randn(1, 3, 24, 32)
    for part in (vil.viz.reading, vil.viz.effective_receptive_field):
        torch.testing.assert_close(part(unwrapped(outer), images), part(model, images))
        torch.testing.assert_close(part(outer, images), part(model, images))
    assert vil.viz.patch_sums(outer, images[:, 0]).shape == (1, 3, 4)


def test_a_model_inside_distributed_data_parallel_is_found(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        found = vil.predict(DistributedDataParallel(named(img_size=16, patch_size=8)), PIXELS)
    finally:
        torch.distributed.destroy_process_group()
    assert {p.label for p in found} == {*NAMES}


def test_models_without_a_config_get_a_hint_and_models_without_logits_are_rejected(caplog):
    model = named(img_size=224, patch_size=112)
    with caplog.at_level(logging.WARNING):
        found = vil.predict(nn.Sequential(model), np.zeros((32, 32, 3), np.uint8))
    assert {p.label for p in found} == {"0", "1", "2", "3"}
    assert "Sequential has no pretrained_cfg" in caplog.text
    features = timm.create_model("resnet18", features_only=True)
    with pytest.raises(ConfigError, match="must return a tensor of logits, got list"):
        vil.predict(features, PIXELS)


def test_timms_pretrained_models_with_1000_classes_have_imagenets_class_names():
    """Every pretrained timm model with 1000 classes gets ImageNet's class names.

    In timm 1.0.31, 54 of these 1,321 models have a tag that does not end in "in1k", so the tag is not sufficient to
    recognize ImageNet's classes.
    """
    from vil.classes import names_of

    ids = timm.data.ImageNetInfo().label_names()
    for name in timm.list_pretrained():
        config = timm.get_pretrained_cfg(name)
        if config.num_classes == 1000:
            model = nn.Identity()
            model.num_classes, model.pretrained_cfg = 1000, config.to_dict()
            assert names_of(model) == ids, name
    model.num_classes = 10  # a replaced head has no ImageNet class names
    assert names_of(model) == []
