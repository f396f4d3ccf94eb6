"""Tests of loading ViM's published checkpoint formats, of adapting the weights, and of rejecting other weights."""

import argparse
import functools
from collections import OrderedDict

import naive_model
import pytest
import safetensors.torch
import timm
import torch
from models import SMALL
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models.vision_transformer import VisionTransformer

from vil.factory import create_model


def published(**kwargs):
    return naive_model.published_vim(**{"embed_dim": 32, "depth": 2, "grid": (3, 3), "num_classes": 7, **kwargs})


def training_script_checkpoint(weights):
    """Return a training checkpoint as ViM's main.py saves it, from which timm loads the EMA weights."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(w.clone()) for w in weights.values()])
    sum(p.sum() for p in optimizer.param_groups[0]["params"]).backward()
    optimizer.step()
    return {
        "model": OrderedDict((name, w + 1) for name, w in weights.items()),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": {"base_values": [1e-3], "t_in_epochs": True},
        "epoch": 299,
        "model_ema": OrderedDict(weights),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "args": argparse.Namespace(model="vim_tiny", lr=1e-3, drop_path=0.0, dist_backend="nccl"),
    }


FORMATS = {
    "published": ("checkpoint.pth", lambda path, w: torch.save({"model": w}, path)),
    "state_dict": ("checkpoint.pth", lambda path, w: torch.save(w, path)),
    "safetensors": ("model.safetensors", lambda path, w: safetensors.torch.save_file(w, path)),
    "ddp": ("checkpoint.pth", lambda path, w: torch.save({"model": {"module." + k: v for k, v in w.items()}}, path)),
    "training_script": ("checkpoint.pth", lambda path, w: torch.save(training_script_checkpoint(w), path)),
}
LOADERS = {
    "checkpoint_path": lambda path, **kw: timm.create_model("vim_tiny", checkpoint_path=path, **kw),
    "overlay": lambda path, **kw: timm.create_model(
        "vim_tiny", pretrained=True, pretrained_cfg_overlay=dict(file=path, num_classes=kw["num_classes"]), **kw
    ),
    "load_checkpoint": lambda path, **kw: load_into(timm.create_model("vim_tiny", **kw), path),
}


def load_into(model, path):
    timm.models.load_checkpoint(model, path)
    return model


def save(tmp_path, checkpoint):
    path = str(tmp_path / "checkpoint.pth")
    torch.save(checkpoint, path)
    return path


def pretrained(path, name="vim_tiny", **kwargs):
    """Create a model by timm with pretrained=True, so that timm adapts the head and the input convolution."""
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=dict(file=path), **kwargs)


def logits(model, size=(48, 48), channels=3):
    images = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return images, model.double().eval()(images)


def doubles(weights):
    return {name: w.double() for name, w in weights.items()}


@pytest.mark.parametrize("container", FORMATS)
@pytest.mark.parametrize("loader", [*LOADERS, "pretrained_path"])
def test_a_published_checkpoint_computes_the_published_architectures_outputs(container, loader, tmp_path):
    weights = published()
    name, write = FORMATS[container]
    write(tmp_path / name, weights)
    load = {**LOADERS, "pretrained_path": functools.partial(create_model, "vim_tiny")}[loader]
    images, actual = logits(load(str(tmp_path / name), **SMALL))
    expected = naive_model.model(images, doubles(weights), naive_model.PUBLISHED)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_load_state_dict_accepts_the_content_of_a_published_checkpoint():
    weights = published()
    model = timm.create_model("vim_tiny", **SMALL)
    model.load_state_dict({"model": weights, "epoch": 299})
    assert torch.equal(model.blocks[1].mixer.in_proj.weight, weights["layers.1.mixer.in_proj.weight"])
    assigned = timm.create_model("vim_tiny", device="meta", **SMALL)
    assert not any(assigned.load_state_dict(weights, assign=True))  # no keys are missing or unexpected
    assert assigned.blocks[1].norm.weight.data_ptr() == weights["layers.1.norm.weight"].data_ptr()


def test_another_number_of_classes_gets_a_new_head(tmp_path):
    weights = published(num_classes=1000)
    model = pretrained(save(tmp_path, {"model": weights}), **{**SMALL, "num_classes": 4})
    assert model.head.weight.shape == (4, 32)
    assert model.head.bias.abs().max() == 0
    assert torch.equal(model.norm.weight, weights["norm_f.weight"])
    headless = pretrained(save(tmp_path, {"model": weights}), **{**SMALL, "num_classes": 0})
    images, features = logits(headless)
    head = dict(weight=weights["head.weight"].double(), bias=weights["head.bias"].double())
    expected = naive_model.model(images, doubles(weights), naive_model.PUBLISHED)
    torch.testing.assert_close(torch.nn.functional.linear(features, **head), expected, rtol=0, atol=1e-10)


def test_features_only_loads_without_the_head(tmp_path):
    weights = published(num_classes=1000)
    kwargs = dict(embed_dim=32, depth=2, img_size=48, features_only=True, out_indices=(0, 1))
    features = pretrained(save(tmp_path, weights), **kwargs)
    full = timm.create_model("vim_tiny", checkpoint_path=save(tmp_path, weights), **{**SMALL, "num_classes": 1000})
    images = torch.randn(1, 3, 48, 48)
    for actual, expected in zip(features(images), full.forward_intermediates(images, intermediates_only=True)):
        torch.testing.assert_close(actual, expected)


RESIZED = [((14, 14), dict(img_size=256)), ((3, 3), dict(img_size=80)), ((5, 5), dict(img_size=(48, 96)))]
RESIZED += [((14, 14), dict(img_size=224, stride=8)), ((27, 27), dict(img_size=224))]


@pytest.mark.parametrize(("grid", "target"), RESIZED)
def test_position_embeddings_are_resampled_without_the_class_tokens_row(grid, target, tmp_path):
    weights = published(grid=grid)
    model = timm.create_model("vim_tiny", checkpoint_path=save(tmp_path, {"model": weights}), **{**SMALL, **target})
    old, old_row = naive_model.patches_and_class_token(weights["pos_embed"])
    new, new_row = naive_model.patches_and_class_token(model.pos_embed.detach())
    assert torch.equal(new_row, old_row)
    grids = list(model.patch_embed.grid_size), list(grid)
    assert torch.equal(new, resample_abs_pos_embed(old, *grids, num_prefix_tokens=0))


def test_a_patch_grid_that_is_not_square_is_rejected_unless_it_fits(tmp_path):
    path = save(tmp_path, {"model": published(grid=(3, 4))})
    assert timm.create_model("vim_tiny", checkpoint_path=path, **{**SMALL, "img_size": (48, 64)})
    with pytest.raises(RuntimeError, match="square patch grid.*got 13 tokens"):
        timm.create_model("vim_tiny", checkpoint_path=path, **SMALL)
    with pytest.raises(RuntimeError, match="square patch grid.*got 13 tokens"):
        pretrained(path, **SMALL)
    with pytest.raises(RuntimeError, match="square patch grid.*got 11 tokens"):
        timm.create_model("vim_tiny", **SMALL).load_state_dict(published(grid=(2, 5)))


def test_the_input_convolution_is_summed_for_one_channel_and_resampled_for_another_patch_size(tmp_path):
    weights = published(num_classes=1000)
    path, kernel = save(tmp_path, {"model": weights}), weights["patch_embed.proj.weight"]
    summed = pretrained(path, in_chans=1, **SMALL).patch_embed.proj.weight.detach()
    torch.testing.assert_close(summed, kernel.sum(1, keepdim=True))
    kwargs = {**SMALL, "img_size": 24, "num_classes": 1000}
    resampled = timm.create_model("vim_tiny", checkpoint_path=path, patch_size=8, **kwargs).patch_embed.proj.weight
    assert torch.equal(resampled, resample_patch_embed(kernel, [8, 8]))


def vit_weights(**kwargs):
    return VisionTransformer(embed_dim=32, depth=2, num_heads=2, num_classes=7, **kwargs).state_dict()


def vil_weights():
    return timm.create_model("vil_tiny", **SMALL).state_dict()


OTHERS = {
    "vit": (lambda: vit_weights(img_size=48), "a ViM with embed_dim 32 and depth 2, got an unknown architecture"),
    "vit_registers": (lambda: vit_weights(img_size=64, reg_tokens=4), "got an unknown architecture"),
    "vil": (vil_weights, "a ViM with embed_dim 32 and depth 2, got a ViL with embed_dim 32 and depth 2"),
    "wider": (lambda: published(embed_dim=48), "a ViM with embed_dim 32 and depth 2, got a ViM with embed_dim 48"),
    "deeper": (lambda: published(depth=3), "depth 2, got a ViM with embed_dim 32 and depth 3"),
}
MISMATCHES = [
    (loader, other) for loader in [*LOADERS, "adapted"] for other in OTHERS
    if loader in ("checkpoint_path", "load_checkpoint") or other != "deeper"  # pretrained=True drops the last blocks
]  # fmt: skip


@pytest.mark.parametrize(("loader", "other"), MISMATCHES)
def test_a_checkpoint_of_another_architecture_is_rejected_and_named(other, loader, tmp_path):
    weights, message = OTHERS[other]
    num_classes = 4 if loader == "adapted" else 7
    load = {**LOADERS, "adapted": pretrained}[loader]
    with pytest.raises(RuntimeError, match=message + r".*keys: \d+ (missing|unexpected|with other shapes) \(\w+"):
        load(save(tmp_path, {"model": weights()}), **{**SMALL, "num_classes": num_classes})


def test_pretrained_loads_the_first_blocks_of_a_deeper_checkpoint_if_the_depth_is_given(tmp_path):
    weights = published(depth=3)
    path = save(tmp_path, {"model": weights})
    for num_classes in (7, 4):
        model = pretrained(path, **{**SMALL, "num_classes": num_classes})
        assert len(model.blocks) == 2
        assert torch.equal(model.blocks[1].mixer.in_proj.weight, weights["layers.1.mixer.in_proj.weight"])
        assert torch.equal(model.norm.weight, weights["norm_f.weight"])
    path = save(tmp_path, published(depth=25))
    with pytest.raises(RuntimeError, match="depth 24, got a ViM with embed_dim 32 and depth 25"):
        pretrained(path, embed_dim=32, img_size=48, num_classes=7)


def test_partial_weights_load_with_strict_false():
    model = timm.create_model("vim_tiny", **SMALL)
    weights = {name: w for name, w in published().items() if name.startswith("layers.0.")}
    result = model.load_state_dict(weights, strict=False)
    assert torch.equal(model.blocks[0].mixer.in_proj.weight, weights["layers.0.mixer.in_proj.weight"])
    assert not result.unexpected_keys
    assert all(not name.startswith("blocks.0.") for name in result.missing_keys)
    assert len(result.missing_keys) == len(model.state_dict()) - len(weights)


@pytest.mark.parametrize(("classes", "num_classes"), [(5, 10), (5, 0), (0, 10)])
def test_another_number_of_classes_without_adaptation_is_an_error_with_the_remedy(classes, num_classes, tmp_path):
    weights = published(num_classes=classes)
    path = save(tmp_path, {"model": {name: w for name, w in weights.items() if classes or "head." not in name}})
    kwargs = {**SMALL, "num_classes": num_classes}
    remedy = rf"create the model with num_classes={classes}, .* call reset_classifier\({num_classes}\)$"
    with pytest.raises(RuntimeError, match=f"has {classes} classes, but the model has {num_classes}: {remedy}"):
        timm.create_model("vim_tiny", checkpoint_path=path, **kwargs)
    model = timm.create_model("vim_tiny", checkpoint_path=path, **kwargs | {"num_classes": classes})
    model.reset_classifier(num_classes)
    assert model(torch.zeros(1, 3, *model.patch_embed.img_size)).shape == (1, num_classes or model.embed_dim)
