"""Tests of loading other programs' checkpoints: keys under which weights are found, and ambiguous files."""

import logging

import pytest
import safetensors.torch
import timm
import torch
from timm.utils import ModelEmaV3
from torch.optim.swa_utils import AveragedModel

import vil
from vil.checkpoint import Checkpoint, CheckpointError
from vil.config import ConfigError
from vil.factory import create_model, from_checkpoint

ARCHITECTURE = dict(embed_dim=32, depth=2, patch_size=8, img_size=16)
KWARGS = ARCHITECTURE | dict(num_classes=3)


def model_of(seed):
    torch.manual_seed(seed)
    return timm.create_model("vil_tiny", **KWARGS)


MODEL, OTHER = model_of(0), model_of(1)
WEIGHTS, OTHERS = MODEL.state_dict(), OTHER.state_dict()


def prefixed(prefix, weights=WEIGHTS):
    return {prefix + name: tensor for name, tensor in weights.items()}


class Lightning(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        setattr(self, name, torch.compile(MODEL))


def assert_loads(path, truth):
    """Assert that `from_checkpoint` and `create_model` load the weights `truth` from a file."""
    for model in (
        from_checkpoint(path, "vil_tiny", **KWARGS),
        create_model("vil_tiny", path, **KWARGS),
    ):
        found = model.state_dict()
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())


OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
FILES = {
    **{f"key {key}": {key: WEIGHTS, "epoch": 3, "optimizer": OPTIMIZER}
       for key in ("state_dict", "model_state_dict", "model", "net", "module", "ema", "model_ema", "state_dict_ema")},
    "plain": WEIGHTS,
    "nested": {"model": {"state_dict": WEIGHTS}, "epoch": 3},
    "nested averages": {"ema": {"decay": 0.999, "updates": 7, "module": WEIGHTS}},
    "hyperparameters": {"model": {"name": "vil_tiny", "depth": 2}, "state_dict": WEIGHTS},
    "the same twice": {"model": WEIGHTS, "state_dict": {name: tensor.clone() for name, tensor in WEIGHTS.items()}},
    "rng": {"rng_state": torch.get_rng_state(), "model": WEIGHTS},
    "DeepSpeed": {"module": prefixed("module."), "optimizer": None, "global_steps": 7},
    "Lightning": {"state_dict": prefixed("model."), "pytorch-lightning_version": "2.5.0", "loops": {}},
    "Lightning, net": {"state_dict": prefixed("net.")},
    "Lightning, compiled": {"state_dict": Lightning("model").state_dict()},
    "DDP of compiled": {"net": prefixed("module._orig_mod.")},
    "compiled blocks": {n.replace("blocks.0.", "blocks.0._orig_mod."): t for n, t in WEIGHTS.items()},
    "checkpointed": {n.replace("blocks.1.", "blocks.1._checkpoint_wrapped_module."): t for n, t in WEIGHTS.items()},
    "AveragedModel": AveragedModel(MODEL).state_dict(),
    "ModelEmaV3": {"state_dict": ModelEmaV3(MODEL).state_dict()},
    "compiled AveragedModel": prefixed("_orig_mod.module.") | {"_orig_mod.n_averaged": torch.tensor(3)},
    "ModelEmaV3 of AveragedModel": ModelEmaV3(AveragedModel(MODEL)).state_dict(),
    "AveragedModel of AveragedModel": AveragedModel(AveragedModel(MODEL)).state_dict(),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_weights_are_found_in_checkpoints_of_other_programs(name, tmp_path):
    torch.save(FILES[name], tmp_path / "given.pth")
    assert_loads(tmp_path / "given.pth", WEIGHTS)


def test_prefixes_of_parameter_names_in_a_safetensors_file_are_removed(tmp_path):
    safetensors.torch.save_file(prefixed("model."), tmp_path / "given.safetensors")
    assert_loads(tmp_path / "given.safetensors", WEIGHTS)


@pytest.mark.parametrize("keys", [("model", "ema"), ("state_dict", "model_ema"), ("net", "state_dict_ema")])
def test_use_ema_selects_between_weights_and_ema_weights_of_other_programs(keys, tmp_path, caplog):
    path = tmp_path / "given.pth"
    torch.save({keys[0]: WEIGHTS, keys[1]: OTHERS}, path)
    for use_ema, truth in ((None, WEIGHTS), (False, WEIGHTS), (True, OTHERS)):
        for given in (KWARGS, ARCHITECTURE):  # without num_classes, the classes are counted in the file
            found = from_checkpoint(path, "vil_tiny", use_ema=use_ema, **given).state_dict()
            assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())
    assert not caplog.messages
    caplog.set_level(logging.WARNING)
    found = create_model("vil_tiny", path, **KWARGS).state_dict()  # training starts from the EMA weights
    assert all(torch.equal(found[name], tensor) for name, tensor in OTHERS.items())
    assert any(f"EMA weights ['{keys[1]}']" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"model": WEIGHTS, "net": OTHERS}, ["['model']", "['net']"]),
        ({"state_dict": {"model": WEIGHTS, "net": OTHERS}}, ["['state_dict']['model']", "['state_dict']['net']"]),
        ({"student": WEIGHTS, "teacher": OTHERS, "epoch": 3}, ["['student']", "['teacher']", "torch.load(FILE)"]),
        ({"backbone": WEIGHTS, "model": {"name": "vil"}}, ["['backbone']"]),
        ({"state_dict": prefixed("model.") | prefixed("ema_model.", OTHERS)}, ["'model.'", "'ema_model.'"]),
        ({"state_dict": prefixed("net.") | {"criterion.weight": torch.ones(3)}}, ["'net.'", "'criterion.' (1)"]),
        ({"state_dict": prefixed("encoder.backbone.")}, ["If the model is in 'encoder.backbone.', extract {name[17:]"]),
        ({"a": {"b": {"c": WEIGHTS}}, "optimizer": OPTIMIZER}, ["['a']['b']['c']"]),
        ({"model": {"backbone": WEIGHTS}}, ["['model']['backbone']"]),
        ({"model": WEIGHTS | prefixed("module.", OTHERS)}, ["names differ only", "'module.'"]),
    ],
)  # fmt: skip
def test_ambiguous_checkpoints_are_rejected(content, named, tmp_path):
    torch.save(content, tmp_path / "given.pth")
    for load in (lambda path: from_checkpoint(path, "vil_tiny", **KWARGS), lambda path: create_model("vil_tiny", path)):
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            load(tmp_path / "given.pth")
        for words in named:
            assert words in str(caught.value)


def test_one_unexpected_tensor_is_not_reported_as_another_architecture(tmp_path):
    torch.save(WEIGHTS | {"blocks.0.scale": torch.ones(3)}, tmp_path / "given.pth")
    with pytest.raises(CheckpointError, match=r"tensors must match .*1 unexpected \(blocks.0.scale\)"):
        from_checkpoint(tmp_path / "given.pth", "vil_tiny", **KWARGS)


@pytest.mark.parametrize(
    ("other", "given"),
    [(dict(depth=1), "depth=2"), (dict(depth=3, embed_dim=16, patch_size=4), "embed_dim=32, depth=2, patch_size=8")],
)
def test_a_checkpoint_of_another_depth_names_the_arguments_that_fit(other, given, tmp_path):
    path = tmp_path / "given.pth"
    torch.save(WEIGHTS, path)
    message = f"got a ViL with embed_dim 32 and depth 2: create the model with {given}, or load .* vil.from_checkpoint"
    with pytest.raises(RuntimeError, match=message):
        timm.create_model("vil_tiny", **KWARGS | other, checkpoint_path=path)
    torch.save(timm.create_model("vil_tiny", **KWARGS | dict(patch_size=(8, 4))).state_dict(), path)
    with pytest.raises(RuntimeError, match=r"model with depth=2, patch_size=\(8, 4\), or"):
        timm.create_model("vil_tiny", **KWARGS | dict(depth=1), checkpoint_path=path)
    with pytest.raises(RuntimeError, match="got a ViL with embed_dim 32 and depth 2; keys: "):
        timm.create_model("vim_tiny", **KWARGS, checkpoint_path=path)  # no arguments make a ViM of a ViL


def test_parameter_names_that_start_with_model_are_kept(tmp_path):
    own = torch.nn.Module()
    own.model = MODEL
    torch.save(own.state_dict(), tmp_path / "given.pth")
    loaded = torch.nn.Module()
    loaded.model = model_of(2)
    weights = Checkpoint(tmp_path / "given.pth").weights()
    vil.state_dicts.load_weights(loaded, weights, "given.pth")
    assert all(torch.equal(t, WEIGHTS[name.removeprefix("model.")]) for name, t in loaded.state_dict().items())
