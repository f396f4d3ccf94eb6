"""vil.viz: what it shows is what the model computes."""

import sys

import pytest
import timm
import torch
from processes import run
from vil.kernels import longhorn_scan, selective_scan

import vil  # noqa: F401  registers the models
from vil.viz import (
    effective_receptive_field,
    patch_maps,
    plot_receptive_fields,
    plot_scans,
    trace_scans,
)

CLASS_TOKEN = 8  # of 16 patches of 8 pixels in 32 x 32


def small(name, **kwargs):
    torch.manual_seed(0)
    arguments = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_classes=3)
    return timm.create_model(name, **arguments, **kwargs).eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def inputs_of(model, block, images):
    """What each direction of a block hands to its recurrence."""
    x = model.embed(images)
    for earlier in model.blocks[:block]:
        x = earlier(x)
    u, _ = model.blocks[block].mixer.in_proj(model.blocks[block].norm(x)).chunk(2, -1)
    return [(direction, *direction(u)) for direction in model.blocks[block].mixer.directions]


def scan(direction, v, logits, k, q, reverse):
    bias = direction.step_proj.bias
    if hasattr(direction, "A_log"):
        return selective_scan(v, logits, -direction.A_log.exp(), k, q, None, bias, reverse=reverse)
    return longhorn_scan(v, logits, k, q, None, bias, reverse=reverse)


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny"])
def test_relevance_is_what_a_token_adds_to_the_class_tokens_output_of_the_scan(name, images):
    """Both recurrences are linear in v, so leaving out one token's v takes away exactly what it adds."""
    model = small(name)
    with torch.no_grad():
        traces = trace_scans(model, images)
        for g, (direction, v, logits, k, q) in enumerate(inputs_of(model, 1, images)):
            whole = scan(direction, v, logits, k, q, bool(g))[:, CLASS_TOKEN]
            for token in range(17):
                without = v.clone()
                without[:, token] = 0
                added = (whole - scan(direction, without, logits, k, q, bool(g))[:, CLASS_TOKEN]).norm(dim=-1)
                torch.testing.assert_close(traces[1].relevance[:, g, token], added, rtol=1e-3, atol=1e-6)


def test_a_direction_reads_only_what_comes_before_the_class_token_on_its_way(images):
    relevance = trace_scans(small("vil_tiny"), images)[0].relevance
    assert (relevance[:, 0, CLASS_TOKEN + 1 :] == 0).all()
    assert (relevance[:, 1, :CLASS_TOKEN] == 0).all()
    assert (relevance[:, 0, : CLASS_TOKEN + 1] > 0).all()
    assert (relevance[:, 1, CLASS_TOKEN:] > 0).all()


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny"])
def test_the_norm_of_the_state_is_that_of_the_scan_read_by_unit_queries(name, images):
    model = small(name)
    with torch.no_grad():
        found = trace_scans(model, images)[0].state_norm
        for g, (direction, v, logits, k, q) in enumerate(inputs_of(model, 0, images)):
            unit_queries = torch.eye(16)
            states = [scan(direction, v, logits, k, e.expand_as(q).contiguous(), bool(g)) for e in unit_queries]
            torch.testing.assert_close(found[:, g], torch.stack(states).norm(dim=(0, 3)), rtol=1e-4, atol=1e-6)


def test_the_step_is_the_mean_beta(images):
    model = small("vil_tiny")
    torch.nn.init.normal_(model.blocks[0].mixer.directions[1].step_proj.bias)
    with torch.no_grad():
        step = trace_scans(model, images)[0].step
        direction, _, logits, _, _ = inputs_of(model, 0, images)[1]
        torch.testing.assert_close(step[:, 1], (logits + direction.step_proj.bias).sigmoid().mean(-1))


def test_maps_are_rows_of_patches_without_the_class_token(images):
    values = torch.arange(17.0).expand(2, 2, 17)
    maps = patch_maps(small("vil_tiny"), values, images.shape)
    assert maps.shape == (2, 2, 4, 4)
    assert maps[1, 0].flatten().tolist() == [i for i in range(17) if i != CLASS_TOKEN]


def test_the_receptive_field_is_where_a_changed_pixel_changes_the_token(images):
    """Without blocks, a patch's feature sees its own patch alone, and the class token nothing."""
    model = small("vil_tiny")
    field = effective_receptive_field(model, images)
    assert field.shape == (32, 32)
    assert field.sum().item() == pytest.approx(1)
    assert (field > 0).all()
    model.blocks = torch.nn.Sequential()
    outside = torch.ones(32, 32, dtype=torch.bool)
    outside[16:24, 16:24] = False
    field = effective_receptive_field(model, images)
    assert (field[outside] == 0).all()
    assert (field[~outside] > 0).all()


def test_looking_leaves_the_model_as_it_was(images):
    model = small("vil_tiny").requires_grad_(False)
    before = model(images)
    trace_scans(model, images)
    effective_receptive_field(model, images, "class")
    assert torch.equal(model(images), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_pictures_are_drawn(images, tmp_path):
    model = small("vil_tiny")
    plot_scans(model, images, images.sigmoid(), blocks=[1]).savefig(tmp_path / "scans.png")
    plot_receptive_fields({"a": effective_receptive_field(model, images)}).savefig(tmp_path / "fields.png")
    assert (tmp_path / "scans.png").stat().st_size > 5000
    assert (tmp_path / "fields.png").stat().st_size > 5000


def test_the_command_draws_a_checkpoint_on_a_folder(uninterrupted, image_folder, tmp_path):
    words = ["--checkpoint", str(uninterrupted / "run" / "last.pt"), "--out", str(tmp_path / "new" / "folder")]
    words += ["--images", str(image_folder / "val" / "ant"), str(image_folder / "val" / "bee"), "--count", "2"]
    result = run([sys.executable, "-m", "vil.viz", *words])
    assert "over 14 images" in result.stdout
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"scans.png", "fields.png"}
    (tmp_path / "empty").mkdir()
    refused = run([sys.executable, "-m", "vil.viz", *words[:4], "--images", str(tmp_path / "empty")], check=False)
    assert "there are no images in" in refused.stderr


def test_other_models_and_tokens_are_refused(images):
    with pytest.raises(TypeError, match="this is for VisionLonghorn models"):
        trace_scans(timm.create_model("resnet10t"), images)
    with pytest.raises(ValueError, match="'corner' is neither"):
        effective_receptive_field(small("vil_tiny"), images, "corner")
