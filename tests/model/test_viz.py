"""vil.viz: what it shows is what the model computes."""

import sys

import models
import naive_model
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from matplotlib.colors import LogNorm
from models import random_images, with_random_parameters
from PIL import Image
from torchvision import transforms

from vil import viz
from vil.checkpoint import save_checkpoint
from vil.config import Config
from vil.viz import effective_receptive_field, patch_maps, plot_receptive_fields, plot_scans, trace_scans

# An odd number of patches and an even one of tokens: the class token is at another place from either end.
GRID, TOKENS, CLASS_TOKEN = (3, 5), 16, 7


def small(name="vil_tiny", size=(24, 40), **kwargs):
    arguments = dict(img_size=size, patch_size=8, num_classes=3)
    return with_random_parameters(models.small(name, **arguments, **kwargs)).eval()


@pytest.fixture
def images():
    return random_images(2, 3, 24, 40, dtype=torch.float64)


def expected_trace(model, block, g, images):
    """Relevance, step and state norm of one direction by leaving out tokens and asking for each state."""
    w = {name: p.detach() for name, p in model.named_parameters()}
    tokens, names = naive_model.residual_stream(images, w, stride=8)[block], naive_model.OURS["directions"][g]
    w = list(naive_model.block_weights(w))[block]
    u, _ = F.linear(naive_model.rms_norm(tokens, w["norm.weight"]), w["mixer.in_proj.weight"]).chunk(2, dim=-1)
    v, logits, k, q, rates = naive_model.recurrence_inputs(u.flip(1) if g else u, w, names)
    place = TOKENS - 1 - CLASS_TOKEN if g else CLASS_TOKEN
    relevance = []
    for token in torch.eye(TOKENS, dtype=v.dtype):  # both recurrences are linear in v
        alone = naive_model.scan(token[:, None] * v, logits, k, q, rates)
        relevance.append(alone[:, place].norm(dim=-1))
    states = [naive_model.scan(v, logits, k, n.expand_as(q), rates) for n in torch.eye(q.shape[-1], dtype=v.dtype)]
    step = torch.sigmoid(logits) if rates is None else torch.log1p(logits.exp())
    found = torch.stack(relevance, dim=1), step.mean(-1), torch.stack(states).square().sum((0, 3)).sqrt()
    return [values.flip(1) if g else values for values in found]


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny"])
def test_a_trace_is_what_each_direction_reads_writes_and_keeps(name, images):
    model = small(name)
    traces = trace_scans(model, images)
    assert len(traces) == 2
    for block, trace in enumerate(traces):
        for g in range(2):
            expected = expected_trace(model, block, g, images)
            for found, truth in zip((trace.relevance, trace.step, trace.state_norm), expected):
                assert found.shape == (2, 2, TOKENS)
                torch.testing.assert_close(found[:, g], truth, rtol=1e-9, atol=1e-12)


def test_maps_are_rows_of_patches_without_the_class_token():
    values = torch.arange(4.0 * TOKENS).view(2, 2, TOKENS)
    maps = patch_maps(small(), values, (2, 3, 24, 40))
    assert maps.shape == (2, 2, *GRID)
    first = 3 * TOKENS
    assert maps[1, 1].flatten().tolist() == [first + i for i in range(TOKENS) if i != CLASS_TOKEN]
    dynamic = small(size=(16, 16), dynamic_img_size=True)
    assert torch.equal(patch_maps(dynamic, values, (24, 33)), maps)


# of four rows the centre is in the third, of three columns in the second
@pytest.mark.parametrize(("size", "token", "place"), [((32, 24), "centre", 7), ((24, 40), "class", None)])
def test_the_receptive_field_is_how_much_each_pixel_moves_the_tokens_features(size, token, place):
    model = small(size=size)
    images, w = random_images(2, 3, *size, dtype=torch.float64), dict(model.named_parameters())
    leaf = images.clone().requires_grad_()
    patches, class_token = naive_model.patches_and_class_token(naive_model.residual_stream(leaf, w, stride=8)[-1])
    chosen = class_token if token == "class" else patches[:, place]
    (gradient,) = torch.autograd.grad(naive_model.rms_norm(chosen, w["norm.weight"]).sum(), leaf)
    expected = gradient.abs().sum((0, 1))
    with torch.no_grad():
        found = effective_receptive_field(model, images, **({} if token == "centre" else {"token": token}))
    torch.testing.assert_close(found, expected / expected.sum(), rtol=1e-9, atol=1e-12)
    assert not found.requires_grad


def test_looking_leaves_the_model_as_it_was(images):
    model = small().requires_grad_(False)
    before = model(images)
    trace_scans(model, images)
    effective_receptive_field(model, images, "class")
    assert torch.equal(model(images), before)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="the image is"):
        trace_scans(model, images[..., :8])
    assert not any(module._forward_hooks for module in model.modules())


def panels(figure):
    """What each panel shows, as the numbers that its colours stand for, and their scale."""
    drawn = [axis.get_images()[0] for axis in figure.axes]
    assert all(axis.get_xticks().size == axis.get_yticks().size == 0 for axis in figure.axes)
    return [np.asarray(image.get_array()) for image in drawn], [image.get_clim() for image in drawn]


@pytest.mark.parametrize(("name", "step", "blocks"), [("vil_tiny", "beta", None), ("vim_tiny", "dt", [1])])
def test_the_picture_of_the_scans_shows_each_image_beside_its_traces(name, step, blocks, images):
    model, shown = small(name), images.float().sigmoid()
    figure = plot_scans(model, images, shown, blocks)
    arrays, limits = panels(figure)
    rows = [(i, b) for i in range(2) for b in blocks or (0, 1)]
    assert len(arrays) == 7 * len(rows)
    for row, (i, b) in enumerate(rows):
        axes = figure.axes[7 * row : 7 * row + 7]
        assert axes[0].get_ylabel() == f"block {b}"
        np.testing.assert_array_equal(arrays[7 * row], shown[i].permute(1, 2, 0))
        forwards, backwards = (expected_trace(model, b, g, images) for g in range(2))
        for field in range(3):
            pair = [naive_model.patches_and_class_token(t[field][i][None, :, None])[0] for t in (forwards, backwards)]
            least, most = min(p.min().item() for p in pair), max(p.max().item() for p in pair)
            for g in range(2):
                panel = 7 * row + 1 + 2 * field + g
                np.testing.assert_allclose(arrays[panel], pair[g].view(GRID), rtol=1e-6, atol=1e-12)
                np.testing.assert_allclose(limits[panel], (least, most), rtol=1e-6, atol=1e-12)
            assert axes[1 + 2 * field].get_xlabel() == f"{least:.3g} to {most:.3g}"
    titles = [axis.get_title().replace("\n", " ") for axis in figure.axes[1:7]]
    ways = ("first to last", "last to first")
    assert titles == [f"{field}, {way}" for field in ("relevance", step, "state norm") for way in ways]
    assert not any(axis.get_title() for axis in figure.axes[7:])


def test_the_picture_of_receptive_fields_spans_four_decades_of_each():
    fields = {"one": torch.tensor([[1e-9, 2.0, 3.0], [5.0, 1e-3, 0.0]]), "other": torch.tensor([[0.5, 0.25]])}
    figure = plot_receptive_fields(fields)
    arrays, limits = panels(figure)
    assert [axis.get_title() for axis in figure.axes] == ["one", "other"]
    np.testing.assert_allclose(arrays[0], [[5e-4, 2, 3], [5, 1e-3, 5e-4]])
    np.testing.assert_allclose(arrays[1], [[0.5, 0.25]])
    np.testing.assert_allclose(limits, [(5e-4, 5), (0.5e-4, 0.5)])
    assert all(type(axis.get_images()[0].norm) is LogNorm for axis in figure.axes)


def checkpoint_of_a_run(path, weights, **options):
    """What a run leaves of this model, with an average of its weights that is of no use here."""
    average = {name: torch.zeros_like(t) for name, t in weights.items()}
    config = {**vars(Config(**options)), "num_classes": 3}
    save_checkpoint({"arch": options["model"], "config": config, "model": weights, "model_ema": average}, path)


@pytest.mark.parametrize(
    ("words", "options", "files", "blocks"),
    [
        (["--images", "a/deep/0.png"], {}, ["a/deep/0.png"], [0, 2, 3]),
        (
            ["--images", "a", "b", "--count", "1", "--blocks", "1", "0"], dict(crop_pct=0.5, interpolation="nearest"),
            ["a/deep/0.png", "b/deep/0.png", "a/deep/1.png", "b/deep/1.png", "a/deep/2.png"], [1, 0],
        ),
    ],
)  # fmt: skip
def test_the_command_draws_a_checkpoint_on_folders(words, options, files, blocks, tmp_path, monkeypatch, capsys):
    """One image of each folder, then the next of each; pixel by pixel what the figures of those images are."""
    kwargs = dict(embed_dim=16, depth=4, patch_size=8)
    torch.manual_seed(7)
    model = timm.create_model("vil_tiny", num_classes=3, img_size=16, **kwargs).eval()
    weights = model.state_dict()
    checkpoint_of_a_run(tmp_path / "last.pt", weights, model="vil_tiny", img_size=16, model_kwargs=kwargs, **options)
    colours = np.random.default_rng(0)
    for i, name in enumerate(files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise = colours.integers(0, 256, (40, 30 + 10 * i, 3), dtype=np.uint8)
        Image.fromarray(noise).convert("P" if i else "RGB").save(tmp_path / name)
    out = tmp_path / "new" / "folder"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vil.viz", "--checkpoint", "last.pt", "--out", str(out), *words])
    viz.main()

    interpolation = transforms.InterpolationMode(options.get("interpolation", "bicubic"))
    resize = transforms.Resize(int(16 / options.get("crop_pct", 0.875)), interpolation)
    see = transforms.Compose([resize, transforms.CenterCrop(16), transforms.PILToTensor()])
    files = files[:4]  # as many of each folder
    shown = torch.stack([see(Image.open(tmp_path / name).convert("RGB")) for name in files]) / 255
    mean, std = (torch.tensor(t).view(3, 1, 1) for t in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = (shown - mean) / std
    torch.manual_seed(0)
    untrained = timm.create_model("vil_tiny", num_classes=3, img_size=16, **kwargs).eval()
    scans = plot_scans(model, images[:1], shown[:1], blocks)
    fields = {
        f"{name}, {token}": effective_receptive_field(m, images, token)
        for name, m in (("untrained", untrained), ("trained", model))
        for token in ("centre", "class")
    }
    assert {path.name for path in out.iterdir()} == {"scans.png", "fields.png"}
    for name, figure in (("scans.png", scans), ("fields.png", plot_receptive_fields(fields))):
        figure.savefig(tmp_path / name, dpi=110)
        found, expected = (np.asarray(Image.open(folder / name)).astype(int) for folder in (out, tmp_path))
        assert found.shape == expected.shape
        assert (abs(found - expected).max(-1) > 3).mean() < 1e-3  # rounding may take a colour to the next
    said = capsys.readouterr().out
    assert "scans.png: 1 images" in said
    assert f"fields.png: over {len(files)} images" in said


def test_the_command_takes_files_by_name_and_at_most_64_images(tmp_path, monkeypatch, capsys):
    kwargs = dict(embed_dim=16, depth=1, patch_size=8)
    weights = timm.create_model("vim_tiny", num_classes=3, img_size=8, **kwargs).state_dict()
    checkpoint_of_a_run(tmp_path / "last.pt", weights, model="vim_tiny", img_size=8, model_kwargs=kwargs)
    (tmp_path / "many").mkdir()
    for i in range(66):
        Image.new("RGB", (9, 9), (3 * i, 0, 0)).save(tmp_path / "many" / f"{i:02}.png")

    def command(*images):
        words = ["--checkpoint", tmp_path / "last.pt", "--out", tmp_path, "--images", *images]
        monkeypatch.setattr(sys, "argv", ["vil.viz", *map(str, words)])
        viz.main()
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    said = command("many")
    assert "scans.png: 3 images" in said
    assert "over 64 images" in said
    assert "over 1 images" in command("many/05.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.png").write_text("no picture")
    torch.save(weights, tmp_path / "plain.pth")
    for words, message in (
        (["empty"], "--images: there are no images in empty"),
        (["missing.png"], "--images: .missing.png. cannot be read as an image: .*No such file"),
        (["text.png"], "--images: .text.png. cannot be read as an image"),
        (["many", "--count", 0], "--count must be at least 1, not 0"),
        (["many", "--blocks", 0, 1], "--blocks: there is no block 1; the model has 0 to 0"),
        (["many", "--checkpoint", "plain.pth"], "plain.pth is not a checkpoint of train_imagenet"),
        (["many", "--checkpoint", "text.png"], "text.png cannot be read as a checkpoint"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            command(*words)


def test_other_models_and_tokens_are_refused(images):
    other = timm.create_model("resnet10t")
    for look in (trace_scans, effective_receptive_field):
        with pytest.raises(TypeError, match="a ResNet has no scans to look into; this is for VisionLonghorn models"):
            look(other, images)
    with pytest.raises(ValueError, match="'corner' is neither 'centre' nor 'class'"):
        effective_receptive_field(small(), images, "corner")
