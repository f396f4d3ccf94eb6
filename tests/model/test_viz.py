"""Tests of vil.viz: plots show values that independent code computes from the model."""

import io
import sys

import models
import naive_model
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from figures import drawn, kept_figures
from matplotlib.colors import LogNorm
from models import random_images, with_random_parameters
from PIL import Image
from processes import call
from torchvision import transforms

from vil.checkpoint import save_checkpoint
from vil.cli.viz import main
from vil.config import Config
from vil.models.block import LonghornMixer
from vil.visualization import (
    class_evidence,
    deletion_curve,
    effective_receptive_field,
    patch_maps,
    patch_sums,
    plot_receptive_fields,
    plot_scans,
    plot_why,
    reading,
    trace_scans,
)
from vil.visualization import command as viz

# With 15 patches (16 tokens), the class token's position in the sequence differs between the two directions.
GRID, TOKENS, CLASS_TOKEN = (3, 5), 16, 7


def small(name="vil_tiny", size=(24, 40), **kwargs):
    arguments = dict(img_size=size, patch_size=8, num_classes=3)
    return with_random_parameters(models.small(name, **arguments, **kwargs)).eval()


@pytest.fixture
def images():
    return random_images(2, 3, 24, 40, dtype=torch.float64)


def lines_of(pool):
    """Return the tokens that each scan step reads, in order: a single token, or a row or column in pooled blocks."""
    if pool is None:
        return [[token] for token in range(TOKENS)]
    patches = torch.tensor([token for token in range(TOKENS) if token != CLASS_TOKEN]).view(GRID)
    lines = (patches.T if pool == "columns" else patches).tolist()
    return [*lines[: len(lines) // 2], [CLASS_TOKEN], *lines[len(lines) // 2 :]]


def expected_trace(model, block, g, images):
    """Compute a direction's trace (relevance, step size, state norm) by scanning single tokens and querying states."""
    w = {name: p.detach() for name, p in model.named_parameters()}
    lines, names = lines_of(model.blocks[block].pool), naive_model.OURS["directions"][g]
    if model.pooled:  # the pooled block itself is tested in tests/model/test_pooled.py
        tokens = model.embed(images).detach()
        for earlier in model.blocks[:block]:
            tokens = earlier(tokens, grid=GRID).detach()
    else:
        tokens = naive_model.residual_stream(images, w, stride=8)[block]
    w = list(naive_model.block_weights(w))[block]
    u, _ = F.linear(naive_model.rms_norm(tokens, w["norm.weight"]), w["mixer.in_proj.weight"]).chunk(2, dim=-1)
    order = [token for line in lines for token in line if token != CLASS_TOKEN]
    order.insert(CLASS_TOKEN, CLASS_TOKEN)
    u = u[:, order]
    v, _, _, _, rates = naive_model.recurrence_inputs(u.flip(1) if g else u, w, names)
    v = (v.flip(1) if g else v)[:, torch.tensor(order).argsort()]
    v = torch.stack([v[:, line].mean(1) for line in (reversed(lines) if g else lines)], dim=1)
    b, k, q = F.linear(v, w[names["x_proj"]]).split([w[names["step"] + ".weight"].shape[1], 16, 16], dim=-1)
    logits = F.linear(b, w[names["step"] + ".weight"], w[names["step"] + ".bias"])
    place = (list(reversed(lines)) if g else lines).index([CLASS_TOKEN])
    relevance = []
    # Scans are linear in v, so the contribution of each token, row or column can be computed separately.
    for line in torch.eye(len(lines), dtype=v.dtype):
        alone = naive_model.scan(line[:, None] * v, logits, k, q, rates)
        relevance.append(alone[:, place].norm(dim=-1))
    states = [naive_model.scan(v, logits, k, n.expand_as(q), rates) for n in torch.eye(q.shape[-1], dtype=v.dtype)]
    step = torch.sigmoid(logits) if rates is None else torch.log1p(logits.exp())
    found = torch.stack(relevance, dim=1), step.mean(-1), torch.stack(states).square().sum((0, 3)).sqrt()
    of_lines = [values.flip(1) if g else values for values in found]
    line_of = [next(i for i, line in enumerate(lines) if token in line) for token in range(TOKENS)]
    return [values[:, line_of] for values in of_lines]


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny", "vil_tiny_pooled", "vim_tiny_pooled"])
def test_a_trace_has_each_directions_relevance_step_size_and_state_norm(name, images):
    """A trace has each direction's relevance, step size and state norm, as computed by scans of single tokens.

    The first block of a pooled model reads rows, the second block columns.
    """
    model = small(name)
    traces = trace_scans(model, images)
    assert len(traces) == 2
    read = 0
    for block, trace in enumerate(traces):
        for g in range(2):
            expected = expected_trace(model, block, g, images)
            for found, truth in zip((trace.relevance, trace.step, trace.state_norm), expected):
                assert found.shape == (2, 2, TOKENS)
                torch.testing.assert_close(found[:, g], truth, rtol=1e-9, atol=1e-12)
        relevance = patch_maps(model, trace.relevance, images.shape).sum(1)
        read = read + relevance / relevance.sum((1, 2), keepdim=True) / 2
    torch.testing.assert_close(reading(model, images), read)
    assert read.sum((1, 2)).tolist() == pytest.approx([1, 1])
    # Traces of bf16 models are computed in fp32.
    for trace in trace_scans(model.bfloat16(), images.bfloat16()):
        assert [values.dtype for values in (trace.relevance, trace.step, trace.state_norm)] == [torch.float32] * 3


def test_maps_are_rows_of_patches_without_the_class_token():
    values = torch.arange(4.0 * TOKENS).view(2, 2, TOKENS)
    maps = patch_maps(small(), values, (2, 3, 24, 40))
    assert maps.shape == (2, 2, *GRID)
    first = 3 * TOKENS
    assert maps[1, 1].flatten().tolist() == [first + i for i in range(TOKENS) if i != CLASS_TOKEN]
    dynamic = small(size=(16, 16), dynamic_img_size=True)
    assert torch.equal(patch_maps(dynamic, values, (24, 33)), maps)


# The central patch is in the third row of four and in the third column of five.
@pytest.mark.parametrize(("size", "token", "place"), [((32, 40), "centre", 12), ((24, 40), "class", None)])
def test_the_receptive_field_is_the_gradient_of_a_tokens_features(size, token, place):
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
    dynamic = small(size=16, dynamic_img_size=True)  # the central patch depends on the size of the images
    field = effective_receptive_field(dynamic, images, token)
    dynamic.set_input_size(size)
    torch.testing.assert_close(effective_receptive_field(dynamic, images, token), field)


class SeesOnePixel(torch.nn.Module):
    """Model whose class 0 becomes more likely if pixel (9, 33) is redder or any pixel is greener."""

    def forward(self, images):
        logits = 3 * images[:, 0, 9, 33] + images[:, 1].mean((1, 2))
        return torch.stack([logits, torch.zeros_like(logits)], dim=1)


def test_class_evidence_locates_the_pixels_and_sums_to_the_gain_in_probability(images):
    blank = images.mean((2, 3), keepdim=True).expand_as(images)
    for model, classes in ((SeesOnePixel(), torch.tensor([0, 1])), (small(depth=1), None)):
        found = class_evidence(model, images, classes, steps=100)
        assert found.shape == (2, 24, 40)
        numbers = model(images).argmax(-1) if classes is None else classes
        gain = (model(images).softmax(-1) - model(blank).softmax(-1)).gather(1, numbers[:, None])[:, 0]
        torch.testing.assert_close(found.sum((1, 2)), gain.detach(), rtol=1e-3, atol=1e-5)
    found = class_evidence(SeesOnePixel(), images)
    assert torch.equal(found, class_evidence(SeesOnePixel(), images, steps=16))
    assert found.abs().flatten(1).argmax(1).tolist() == [9 * 40 + 33] * 2
    assert patch_sums(small(), class_evidence(SeesOnePixel(), images)).abs().flatten(1).argmax(1).tolist() == [9] * 2
    values = torch.rand(2, 24, 40, dtype=torch.float64)
    truth = values.unflatten(2, (5, 8)).unflatten(1, (3, 8)).sum((2, 4))
    torch.testing.assert_close(patch_sums(small(size=48, dynamic_img_size=True), values), truth)


def test_a_deletion_curve_is_the_probability_after_occlusion_by_the_mean_colour(images):
    model, maps = small(), torch.rand(2, *GRID)
    curve = deletion_curve(model, images, maps, torch.tensor([2, 0]), steps=5)
    for i, number in enumerate((2, 0)):
        hidden, expected = images[i : i + 1].clone(), []
        ranked = maps[i].flatten().argsort(descending=True).tolist()
        for step in range(6):
            for cell in ranked[max(0, 3 * step - 3) : 3 * step]:
                row, column = divmod(cell, GRID[1])
                part = slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8)
                hidden[0, :, part[0], part[1]] = images[i].mean((1, 2))[:, None, None]
            expected.append(model(hidden).softmax(-1)[0, number].item())
        assert curve[i].tolist() == pytest.approx(expected)
    curve, blank = deletion_curve(model, images, maps), images.mean((2, 3), keepdim=True).expand_as(images)
    assert curve.shape == (2, 11)  # the default of ten steps gives 11 points
    for step, seen in ((0, images), (10, blank)):
        expected = model(seen).softmax(-1).gather(1, model(images).argmax(-1, keepdim=True))[:, 0]
        torch.testing.assert_close(curve[:, step], expected.detach())


def test_visualization_leaves_the_model_unchanged(images):
    model = small().requires_grad_(False)
    before = model(images)
    trace_scans(model, images)
    effective_receptive_field(model, images, "class")
    class_evidence(model, images)
    assert torch.equal(model(images), before)
    assert not images.requires_grad
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="image size must be"):
        trace_scans(model, images[..., :8])
    assert not any(module._forward_hooks for module in model.modules())


def shortened(name):
    return name if len(name) <= 24 else "…" + name[-23:]


def maps_of(figure):
    """Return a figure's axes except colour bars."""
    return [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]


def panels(figure):
    """Return each panel's data and colour limits."""
    axes = maps_of(figure)
    drawn = [axis.get_images()[0] for axis in axes]
    assert all(axis.get_xticks().size == axis.get_yticks().size == 0 for axis in axes)
    return [np.asarray(image.get_array()) for image in drawn], [image.get_clim() for image in drawn]


@pytest.mark.parametrize(("name", "step", "blocks"), [("vil_tiny", "beta", None), ("vim_tiny", "dt", [1])])
def test_the_scan_plot_shows_each_image_beside_its_traces(name, step, blocks, images):
    model, shown = small(name), images.float().sigmoid()
    figure = plot_scans(model, images, shown, ["$1_$", "other"], blocks)
    arrays, limits = panels(figure)
    rows = [(i, b) for i in range(2) for b in blocks or (0, 1)]
    assert len(arrays) == 7 * len(rows)
    for row, (i, b) in enumerate(rows):
        axes = maps_of(figure)[7 * row : 7 * row + 7]
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
    assert len(figure.axes) == 10 * len(rows)  # each row has seven images and three colour bars
    titles = [axis.get_title().replace("\n", " ") for axis in maps_of(figure)[1:7]]
    ways = ("first to last", "last to first")
    assert titles == [f"{field}, {way}" for field in ("relevance", step, "state norm") for way in ways]
    others = [axis.get_title() for axis in maps_of(figure)[7:]]
    assert maps_of(figure)[0].get_title() == "$1_$"
    assert [title for title in others if title] == ["other"]
    figure.savefig(io.BytesIO())  # Saving fails if titles are parsed as TeX.


def test_the_evidence_plot_overlays_maps_on_each_image_beside_its_curves():
    shown, maps = torch.rand(2, 3, 24, 40), {"signed": torch.randn(2, *GRID), "positive": torch.rand(2, *GRID)}
    maps["signed"][:, 0, 0] = -0.1
    curves = {"signed": torch.rand(2, 11), "chance": torch.rand(2, 11)}
    figure = plot_why(shown, ["a/$1.png", "b/$2.png"], maps, curves)
    axes = maps_of(figure)
    assert [axis.get_title() for axis in axes] == ["a/$1.png", "signed", "positive", "", "b/$2.png", "", "", ""]
    for i in range(2):
        row = axes[4 * i : 4 * i + 4]
        np.testing.assert_array_equal(row[0].get_images()[0].get_array(), shown[i].permute(1, 2, 0))
        for axis, (name, values) in zip(row[1:], maps.items()):
            below, above = axis.get_images()
            assert below.get_extent() == above.get_extent()
            np.testing.assert_array_equal(above.get_array(), values[i])
            most = values[i].abs().max().item()
            assert above.get_clim() == pytest.approx((-most if name == "signed" else 0, most))
            assert above.get_cmap().name == ("RdBu" if name == "signed" else "viridis")
            assert below.get_clim() == (0, 1)
            assert 0 < above.get_alpha() < 1  # the overlay is translucent
        for line, (name, values) in zip(row[3].get_lines(), curves.items()):
            assert line.get_label() == name
            np.testing.assert_allclose(line.get_xydata(), [[10 * n, y] for n, y in enumerate(values[i].tolist())])
        assert row[3].get_ylim() == (-0.03, 1.03)  # all curves have the same y-axis limits
    assert [text.get_text() for text in axes[3].get_legend().get_texts()] == [*curves]
    figure.savefig(io.BytesIO())


def test_deletion_curves_follow_evidence_relevance_and_the_mean_of_four_random_orders(images, monkeypatch):
    model, images = small(depth=1).float(), images.float()
    monkeypatch.setattr(viz, "class_evidence", lambda model, images: images[:, 0])
    figure, said = viz.why(model, images, images.clamp(0, 1), ["a", "b"])
    maps = patch_sums(model, images[:, 0]), reading(model, images)
    draws = torch.rand(4, *maps[1].shape, generator=torch.Generator().manual_seed(0))
    curves = [deletion_curve(model, images, m) for m in (*maps, *draws)]
    curves = [*curves[:2], sum(curves[2:]) / 4]
    for i in range(2):
        row = maps_of(figure)[4 * i : 4 * i + 4]
        for axis, values in zip(row[1:], maps):
            np.testing.assert_allclose(axis.get_images()[1].get_array(), values[i], rtol=1e-5, atol=1e-9)
        for line, curve in zip(row[3].get_lines(), curves, strict=True):
            np.testing.assert_allclose(line.get_ydata(), curve[i], rtol=1e-5)
    fifths = "evidence {:.2f}, most read {:.2f}, at random {:.2f}".format(*(c[:, 2].mean() for c in curves))
    whole = f"probability of the class {curves[0][:, 0].mean():.2f}, with a fifth of the patches hidden"
    assert said == f"mean over {len(images)} image{'s' * (len(images) > 1)}: {whole}: {fifths}"


def test_the_receptive_field_plot_spans_four_decades():
    fields = {"one": torch.tensor([[1e-9, 2.0, 3.0], [5.0, 1e-3, 0.0]]), "other": torch.tensor([[0.5, 0.25]])}
    figure = plot_receptive_fields(fields)
    arrays, limits = panels(figure)
    assert [axis.get_title() for axis in maps_of(figure)] == ["one", "other"]
    np.testing.assert_allclose(arrays[0], [[5e-4, 2, 3], [5, 1e-3, 5e-4]])
    np.testing.assert_allclose(arrays[1], [[0.5, 0.25]])
    np.testing.assert_allclose(limits, [(5e-4, 5), (0.5e-4, 0.5)])
    assert all(type(axis.get_images()[0].norm) is LogNorm for axis in maps_of(figure))


NAMES = [f"{number}, a name of many words, as ImageNet has them" for number in range(3)]


def checkpoint_of_a_run(path, weights, **options):
    """Write a run's checkpoint with the given weights, and with EMA weights that vil.viz must not use."""
    average = {name: torch.zeros_like(t) for name, t in weights.items()}
    config = {**vars(Config(**options)), "num_classes": 3}
    state = {"arch": options["model"], "config": config, "model": weights, "model_ema": average, "label_names": NAMES}
    save_checkpoint(state, path)


@pytest.mark.parametrize(
    ("words", "options", "files", "blocks"),
    [
        (["--images", "a/deep/0.png", "--count", "1"], {}, ["a/deep/0.png"], [0, 2, 3]),
        (
            ["--images", "a", "b", "--count", "4", "--blocks", "1"], dict(crop_pct=0.5, interpolation="nearest"),
            ["a/deep/0.png", f"b/deep/{'0' * 30}\n.png", "a/deep/1.png", "b/deep/1.png", "a/deep/2.png"], [1],
        ),
    ],
)  # fmt: skip
def test_the_command_plots_a_checkpoint_on_image_folders(words, options, files, blocks, tmp_path, monkeypatch, capsys):
    """The command plots images from alternating folders, with the values that the functions of vil.viz return."""
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
    figures = kept_figures(monkeypatch)
    monkeypatch.setattr(viz, "SHOWN", 2)
    call(main, "--checkpoint", "last.pt", "--out", out, *words)

    interpolation = transforms.InterpolationMode(options.get("interpolation", "bicubic"))
    resize = transforms.Resize(int(16 / options.get("crop_pct", 0.875)), interpolation)
    see = transforms.Compose([resize, transforms.CenterCrop(16), transforms.PILToTensor()])
    shown = torch.stack([see(Image.open(tmp_path / name).convert("RGB")) for name in files]) / 255
    mean, std = (torch.tensor(t).view(3, 1, 1) for t in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = (shown - mean) / std
    torch.manual_seed(0)
    untrained = timm.create_model("vil_tiny", num_classes=3, img_size=16, **kwargs).eval()
    asked, count = images[:4], min(2, len(files))
    with torch.no_grad():
        best = model(images[:count]).softmax(-1).max(-1)
    titles = [  # long names are truncated, so that titles do not overlap
        shortened("/".join(name.split("/")[-2:])).replace("\n", "?") + f"\npredicted: {NAMES[number][:20]} ({p:.1%})"
        for name, p, number in zip(files, *map(torch.Tensor.tolist, best))
    ]
    scans = plot_scans(model, images[:count], shown[:count], titles, blocks)
    why, said = viz.why(model, asked, shown[:count], titles)
    fields = {
        f"{name}, {token}": effective_receptive_field(m, images, token)
        for name, m in (("untrained", untrained), ("trained", model))
        for token in ("centre", "class")
    }
    expected = {"scans.png": scans, "fields.png": plot_receptive_fields(fields), "why.png": why}
    assert {path.name for path in out.iterdir()} == expected.keys()
    found = {figure.saved_to: drawn(figure) for figure in figures}
    for name, figure in expected.items():
        for (words, *numbers), (expected_words, *truth) in zip(found[name], drawn(figure), strict=True):
            assert words == expected_words
            for parts in zip(numbers, truth, strict=True):
                for part, true in zip(*parts, strict=True):
                    np.testing.assert_allclose(part, true, rtol=1e-4, atol=1e-6)
        assert Image.open(out / name).width == pytest.approx(110 * figure.get_figwidth(), abs=1)
    printed = capsys.readouterr().out
    note = "; raw weights (set --use-ema for the EMA weights)\n"
    assert f"why.png: {count} image{'s' * (count > 1)}; {said}{note}" in printed
    assert "hidden: evidence 0." in said
    assert f"fields.png: mean over {len(files)} image" in printed


@pytest.mark.parametrize(
    ("classes", "file", "expected"),
    [
        (["cat", "dog"], "val/dog/1.png", "dog"),
        (["a/cat", "b/cat", "dog"], "val/b/cat/1.png", "b/cat"),  # two class folders are named "cat"
        (["cafe\u0301", "n01440764"], "caf\u00e9/1.png", "cafe\u0301"),  # the class name is in NFD, the path in NFC
        (["cafe\u0301", "n01440764"], "n01440764/1.png", "tench"),
        (["cat", "dog"], "cat.png", None),
        ([], "dog/1.png", None),
    ],
)
def test_the_true_class_is_the_class_with_the_name_of_the_images_folder(classes, file, expected, tmp_path):
    model = timm.create_model(
        "vil_tiny", num_classes=len(classes) or 2, img_size=16, embed_dim=16, depth=1, patch_size=8
    )
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": classes}
    found = viz.true_class_of(tmp_path / file, model)
    assert (found and found.partition(",")[0]) == expected
    (title,) = viz.titles_of(model, [tmp_path / file], [Image.new("RGB", (16, 16))])
    assert title.count("\n") == 1 + (expected is not None)
    assert ("\ntrue: " in title) == (expected is not None)


def test_the_command_accepts_file_names_and_at_most_64_images(tmp_path, monkeypatch, capsys):
    kwargs = dict(embed_dim=16, depth=1, patch_size=8)
    weights = timm.create_model("vim_tiny", num_classes=3, img_size=8, **kwargs).state_dict()
    checkpoint_of_a_run(tmp_path / "last.pt", weights, model="vim_tiny", img_size=8, model_kwargs=kwargs)
    (tmp_path / "many").mkdir()
    for i in range(66):
        Image.new("RGB", (9, 9), (3 * i, 0, 0)).save(tmp_path / "many" / f"{i:02}.png")

    def command(*images):
        call(main, "--checkpoint", tmp_path / "last.pt", "--images", *images)
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write(b"drawn"))
    said = command("many")
    assert "scans.png: 3 images" in said
    assert "over 64 images" in said
    assert (tmp_path / "output/viz/scans.png").exists()
    assert "over 1 image\n" in command("many/05.png")
    for i in range(3):
        (tmp_path / "many" / f"{i:02}.png").write_text("none")
    assert "over 63 images" in command("many")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.png").write_text("no picture")
    torch.save(weights, tmp_path / "plain.pth")
    other, deit = "deit_tiny_patch16_224", dict(embed_dim=12, depth=1, patch_size=8)
    weights = timm.create_model(other, num_classes=3, img_size=8, **deit).state_dict()
    checkpoint_of_a_run(tmp_path / "deit.pt", weights, model=other, img_size=8, model_kwargs=deit)
    for words, message in (
        (["empty"], "--images: found no images in empty"),
        (["missing.png"], "--images: missing.png does not exist"),
        (["text.png"], "--images: none of the files can be read"),
        (["many", "--out", "text.png"], "text.png exists but is not a folder; move it"),
        (["many", "--count", 0], "--count must be at least 1, got 0"),
        (["many", "--blocks", 0, 1], "--blocks must be between 0 and 0 for this model, got 1"),
        (["many", "--blocks", -1], "--blocks must be between 0 and 0 for this model, got -1"),
        (["many", "--checkpoint", "plain.pth"], "plain.pth does not store the name of the model: set --model NAME"),
        (["many", "--checkpoint", "text.png"], "text.png cannot be read as a checkpoint"),
        (["many", "--checkpoint", "deit.pt"], "deit.pt must be a ViL or ViM, got deit_tiny"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            command(*words)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="^error: vil viz needs matplotlib: pip install"):
        command("empty")


def test_the_command_plots_pretrained_weights_and_weights_without_a_model_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 9), (90, 0, 0)).save("red.png")
    compared = []
    monkeypatch.setattr(viz, "receptive_fields", lambda *models_and_images: compared.append(models_and_images[:2]))
    for plot in ("plot_receptive_fields", "plot_scans", "save"):
        monkeypatch.setattr(viz, plot, lambda *_: None)
    monkeypatch.setattr(viz, "why", lambda *_: (None, ""))

    call(main, "--model", "vil_tiny", "red.png")
    assert "why.png: 1 image; pretrained weights\n" in capsys.readouterr().out
    expected = timm.create_model("vil_tiny", pretrained=True)
    torch.save(expected.state_dict(), "plain.pth")
    call(main, "--model", "vil_tiny", "--checkpoint", "plain.pth", "red.png")
    for trained, untrained in compared:
        assert torch.equal(trained.norm.weight, expected.norm.weight)
        assert not torch.equal(untrained.cls_token, expected.cls_token)
        assert trained.patch_embed.img_size == untrained.patch_embed.img_size
    assert compared[0][1].patch_embed.img_size == (256, 256)  # the size of the pretrained weights


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model or --checkpoint is required"),
        (["--model", "vil_tiny", "--use-ema"], "--use-ema needs --checkpoint with a checkpoint of vil train"),
        (["--model", "vil_small"], "timm has no pretrained weights for vil_small; set --checkpoint FILE"),
        (["--model", "resnet18"], "--model must be a ViL or ViM, got resnet18"),
    ],
)
def test_a_model_without_weights_or_of_another_kind_is_rejected(words, message):
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        call(main, *words, "red.png")


def test_other_models_and_unknown_tokens_are_rejected(images):
    other = timm.create_model("resnet10t")
    for look in (trace_scans, effective_receptive_field):
        with pytest.raises(TypeError, match="must be a VisionLonghorn, got ResNet"):
            look(other, images)
    with pytest.raises(TypeError, match="must be LonghornMixer or MambaMixer, got Mine"):
        trace_scans(small(mixer=type("Mine", (LonghornMixer,), {})), images)
    with pytest.raises(ValueError, match="must be 'centre' or 'class', got 'corner'"):
        effective_receptive_field(small(), images, "corner")
