"""Tests of class names in pretrained weights and teachers: rows of the head are reordered to the run's classes."""

import dataclasses
import re
import shutil

import pytest
import timm
import torch
from fixtures import CLASSES
from pictures import CPU, small_config
from processes import SMALL

from vil import checkpoint
from vil.config import ConfigError
from vil.errors import CheckpointError
from vil.factory import create_model
from vil.training.building import build_model
from vil.training.trainer import Trainer

ARGUMENTS = dict(SMALL["model_kwargs"], img_size=16)


def written(folder, names, model="vil_tiny", **arguments):
    """Write a checkpoint with class names, and return its path and state dict."""
    torch.manual_seed(len(names))
    built = timm.create_model(model, num_classes=len(names), **arguments)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    options = {name: value for name, value in arguments.items() if name != "img_size"}
    config = dict(model=model, model_kwargs=options, img_size=arguments.get("img_size", 224), num_classes=len(names))
    state = dict(config=config, label_names=list(names), state_dict=built.state_dict())
    checkpoint.save_checkpoint(state, folder / "w.pt")
    return folder / "w.pt", built.state_dict()


def started(path, names, **arguments):
    arguments = dict(num_classes=len(names)) | ARGUMENTS | arguments
    model = create_model("vil_tiny", path, label_names=names, **arguments)
    return model.state_dict()


def test_a_head_with_the_same_classes_is_reordered_by_name(tmp_path, caplog):
    path, weights = written(tmp_path, ["1", "10", "11", "2"], **ARGUMENTS)
    same, natural = started(path, ["1", "10", "11", "2"]), started(path, ["1", "2", "10", "11"])
    for name in ("head.weight", "head.bias"):
        assert torch.equal(same[name], weights[name])
        assert torch.equal(natural[name], weights[name][[0, 3, 1, 2]])
    assert torch.equal(natural["norm.weight"], weights["norm.weight"])
    assert "the head's rows were reordered to the class names" in caplog.messages[1]
    assert "rows" not in caplog.messages[0]


@pytest.mark.parametrize(
    ("names", "word"), [(CLASSES, f"; new head for {len(CLASSES)} classes"), (["1", "10", "11", "x"], "class 3 is '2'")]
)
def test_a_head_with_other_classes_is_reinitialized(tmp_path, caplog, names, word):
    path, weights = written(tmp_path, ["1", "10", "11", "2"], **ARGUMENTS)
    found = started(path, names)
    assert torch.equal(found["norm.weight"], weights["norm.weight"])
    for row in weights["head.weight"]:
        assert not (found["head.weight"] == row).all(1).any()
    (line,) = [message for message in caplog.messages if "new head for" in message]
    assert word in line
    assert "new: head" not in line  # the head is mentioned once


def test_a_head_is_kept_if_weights_or_run_have_no_class_names(tmp_path, caplog):
    path, weights = written(tmp_path, ["a", "b", "c"], **ARGUMENTS)
    torch.save(weights, tmp_path / "plain.pth")
    for head in (started(path, [], num_classes=3), started(tmp_path / "plain.pth", ["d", "e", "f"])):
        assert torch.equal(head["head.weight"], weights["head.weight"])
    assert "assumed" not in caplog.text
    started(tmp_path / "plain.pth", ["2", "10", "11"])
    assert "plain.pth stores no class names, so its outputs are assumed to be in the natural order" in caplog.text


def test_both_heads_of_a_distilled_model_are_reordered_by_class_name(tmp_path):
    small = dict(img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=3)
    path, weights = written(tmp_path, ["b", "a"], "deit_tiny_distilled_patch16_224", **small)
    found = create_model("deit_tiny_distilled_patch16_224", path, label_names=["a", "b"], num_classes=2, **small)
    for name in ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias"):
        assert torch.equal(found.state_dict()[name], weights[name].flip(0))


def test_a_run_reorders_the_pretrained_head_by_its_class_folders(image_folder, tmp_path):
    path, weights = written(tmp_path, [*CLASSES[::-1]], **ARGUMENTS)
    config = small_config(image_folder, output=str(tmp_path), pretrained_path=str(path))
    trainer = Trainer(config, CPU, 0, 1)
    assert torch.equal(trainer.state.model.state_dict()["head.weight"], weights["head.weight"].flip(0))
    assert not torch.equal(build_model(config, 4).state_dict()["head.weight"], weights["head.weight"].flip(0))


@pytest.mark.parametrize("resume", ["auto", "run/last.pt"])
@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        (CLASSES[:1], [], f"missing: '{CLASSES[0]}'"),
        ([], [f"new{i}" for i in range(6)], "new: 'new0', 'new1', 'new2', 'new3', 'new4', ..."),
        (CLASSES[1:2], ["wasp"], f"missing: '{CLASSES[1]}'; new: 'wasp'"),
    ],
)
def test_a_run_names_the_classes_that_changed_since_its_checkpoint(
    uninterrupted, image_folder, tmp_path, resume, removed, added, message
):
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    data = shutil.copytree(image_folder, tmp_path / "data")
    for split in ("train", "val"):
        for name in added:
            shutil.copytree(data / split / CLASSES[2], data / split / name)
        for name in removed:
            shutil.rmtree(data / split / name)
    path = resume if resume == "auto" else str(tmp_path / resume)
    config = small_config(data, output=str(tmp_path), experiment="run", resume=path)
    message = rf"the classes differ from those in \S+/run/last.pt \({re.escape(message)}\): restore the class folders"
    with pytest.raises(CheckpointError, match=message):
        Trainer(config, CPU, 0, 1)


def test_a_teachers_logits_are_reordered_to_the_runs_classes(image_folder, tmp_path):
    images, found = torch.randn(2, 3, 16, 16), {}
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        path, weights = written(tmp_path, CLASSES, **ARGUMENTS)
        saved = torch.load(path, weights_only=True)
        turned = {name: t[[*order]] if name.startswith("head.") else t for name, t in weights.items()}
        names = [CLASSES[i] for i in order]
        checkpoint.save_checkpoint(dict(config=saved["config"], label_names=names, state_dict=turned), path)
        config = small_config(image_folder, output=str(tmp_path / str(order)), teacher="vil_tiny")
        config = dataclasses.replace(config, teacher_checkpoint=str(path))
        found[order] = Trainer(config, CPU, 0, 1).teacher(images)
    torch.testing.assert_close(*found.values())


def test_a_teacher_with_other_classes_is_rejected(image_folder, tmp_path):
    path, _ = written(tmp_path, ["ant", "bee", "cat", "wasp"], **ARGUMENTS)
    config = small_config(image_folder, output=str(tmp_path), teacher="vil_tiny", teacher_checkpoint=str(path))
    with pytest.raises(ConfigError, match="class 3 is 'wasp' in the teacher .*w.pt, but 'dog' in this run: choose"):
        Trainer(config, CPU, 0, 1)
