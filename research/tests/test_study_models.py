"""Tests of research/models.py, and of research/train.py, which trains these models."""

import json
import math
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml
from processes import SMALL, ForkedProgram

from research import seeds

SHAPE = dict(patch_size=8, depth=9, num_heads=12, mlp_ratio=2, qkv_bias=False, img_size=64, num_classes=200)


@pytest.fixture(scope="module")
def published_vit():
    torch.manual_seed(0)
    return timm.create_model("published_vit", drop_path_rate=0.1, **SHAPE)


def test_the_published_vit_is_a_deit_of_another_shape(published_vit):
    expected = timm.create_model("deit_tiny_patch16_224", **SHAPE).eval()
    assert sum(p.numel() for p in published_vit.parameters()) == 2_756_744
    expected.load_state_dict(published_vit.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(published_vit.eval()(images), expected(images))


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("patch_embed.proj.weight", 3 * 8 * 8, 192),
        ("blocks.0.attn.qkv.weight", 192, 3 * 192),
        ("blocks.8.mlp.fc1.weight", 192, 384),
        ("head.weight", 192, 200),
    ],
)
def test_weights_of_the_published_vit_start_with_the_variance_of_glorot_and_bengio(
    name, inputs, outputs, published_vit
):
    weight = published_vit.get_parameter(name)
    assert weight.numel() == inputs * outputs
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (inputs + outputs)), rel=0.03)
    assert weight.abs().max() > 3.5 * weight.std()  # the distribution is normal, not uniform


def test_positions_of_the_published_vit_start_with_variance_one_and_biases_with_zero(published_vit):
    assert published_vit.pos_embed.std().item() == pytest.approx(1, rel=0.05)
    assert published_vit.cls_token.std().item() == pytest.approx(1, rel=0.2)
    biases = {name: p for name, p in published_vit.named_parameters() if name.endswith("bias")}
    assert not any(bias.any() for bias in biases.values())


def test_every_branch_of_the_published_vit_is_dropped_with_the_same_probability(published_vit):
    rates = {branch.drop_prob for block in published_vit.blocks for branch in (block.drop_path1, block.drop_path2)}
    assert rates == {0.1}


def initial_steps(model):
    """Return the initial step sizes dt of all channels of a ViM."""
    biases = [p.detach().double() for name, p in model.named_parameters() if name.endswith("step_proj.bias")]
    return torch.cat(biases).exp().log1p()


def test_the_initial_steps_of_vim_with_large_steps_are_uniform_by_logarithm_between_a_hundredth_and_one():
    exponents = initial_steps(timm.create_model("vim_tiny_large_steps", img_size=64)).log10()
    assert exponents.min() == pytest.approx(-2, abs=0.01)
    assert exponents.max() == pytest.approx(0, abs=0.01)
    shares = torch.histc(exponents.float(), bins=4, min=-2, max=0) / len(exponents)
    assert shares.tolist() == pytest.approx([0.25] * 4, abs=0.02)


def test_vim_with_large_steps_differs_from_vim_only_in_its_initial_steps():
    models = []
    for name in ("vim_tiny", "vim_tiny_large_steps"):
        torch.manual_seed(0)
        models.append(timm.create_model(name, img_size=64, patch_size=4, num_classes=200, depth=2))
    for (name, usual), large in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(usual, large) != name.endswith("step_proj.bias"), name
    torch.testing.assert_close(initial_steps(models[1]), 10 * initial_steps(models[0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("model", "shape", "in_new_interpreter"),
    [("published_vit", dict(num_heads=3), True), ("vim_tiny_large_steps", {}, False)],
)
def test_a_study_trains_a_model_that_is_not_part_of_the_package(
    model, shape, in_new_interpreter, image_folder, tmp_path, monkeypatch
):
    if not in_new_interpreter:
        monkeypatch.setattr(seeds, "subprocess", SimpleNamespace(Popen=ForkedProgram))
    arguments = dict(patch_size=8, embed_dim=24, depth=2) | shape
    config = SMALL | dict(data_dir=str(image_folder), epochs=1, model_kwargs=arguments)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    words = ["-c", tmp_path / "small.yaml", "--models", model, "--seeds", "1", "--out", tmp_path / "out.json"]
    words += ["--test-split", "val", "--device", "cpu", "--no-amp"]
    monkeypatch.setattr("sys.argv", ["seeds", *map(str, words)])
    seeds.main()
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["model"], run["epochs"]) == (model, 1)
