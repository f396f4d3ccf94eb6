"""Fractals against plain loops of the chaos game, and the folder of them that training opens."""

import json
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from processes import CONTEXT

from vil.training import fractals as module
from vil.training.config import Config, ConfigError
from vil.training.data import class_names, open_splits
from vil.training.device_loader import is_plain_jpeg
from vil.training.files import FolderInUseError
from vil.training.fractals import (
    BURN_IN,
    CHAINS,
    CLUTTER,
    Fractals,
    choices,
    draw_systems,
    filling_rate,
    main,
    play,
    render,
    render_class,
    vary,
    write_fractals,
)

SMALL = dict(classes=3, per_class=4, val_per_class=2, size=32, points=2000)
# a, b, c, d, e, f and the probability of each map
SIERPINSKI = [[0.5, 0, 0, 0.5, 0, 0, 1 / 3], [0.5, 0, 0, 0.5, 0.5, 0, 1 / 3], [0.5, 0, 0, 0.5, 0.25, 0.5, 1 / 3]]
FERN = [[0.8, 0.1, -0.2, 0.7, 0.1, 0.3, 0.6], [0.2, -0.5, 0.4, 0.3, -0.4, 0.2, 0.3], [0.1, 0.2, 0.3, -0.4, 0.5, 0, 0.1]]
DIVERGING = [[2, 0, 0, 2, 1, 1, 0.5], [2, 0, 0, 3, 1, 0, 0.5], [0] * 7]


@pytest.fixture(scope="session")
def systems():
    return draw_systems(3, seed=0)


@pytest.fixture
def drawn(systems, monkeypatch):
    """No test draws the classes of its folder again."""
    monkeypatch.setattr(module, "draw_systems", lambda count, *_: np.resize(systems, (count, 8, 7)))


def naive_play(system, start, points, table):
    """The chaos game in plain loops."""
    steps, found = math.ceil(points / CHAINS), {}
    for chain in range(CHAINS):
        x = y = 0.0
        for step in range(BURN_IN + steps):
            total, number = 0.0, table[start + step * CHAINS + chain]
            for a, b, c, d, e, f, probability in system:  # noqa: B007
                total += probability
                if number <= total:
                    break
            x, y = a * x + b * y + e, c * x + d * y + f
            if step >= BURN_IN:
                found[step - BURN_IN, chain] = x, y
    return np.array([found[key] for key in sorted(found)])[:points]


def naive_render(points, mask, size):
    """Every point's patch, painted pixel by pixel; the axes scaled to the inside of the margin."""
    (low_x, low_y), (high_x, high_y) = points.min(0), points.max(0)
    margin, drawn = 6 / 512 * size, np.zeros((size, size), bool)
    for x, y in points:
        column = math.floor(margin + (x - low_x) / (high_x - low_x) * (size - 2 * margin))
        row = math.floor(margin + (y - low_y) / (high_y - low_y) * (size - 2 * margin))
        for down in range(3):
            for right in range(3):
                at = row + down - 1, column + right - 1
                if mask[down][right] and min(at) >= 0 and max(at) < size:
                    drawn[at] = True
    return drawn


def identity(count=1):
    return torch.eye(3, 2).expand(count, 3, 2)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jpg"))}


def test_chains_follow_the_chaos_game():
    starts, points = np.array([7, 123_456]), 2 * CHAINS - 100
    table = choices(5, module.TABLE + 60 * CHAINS).double().numpy()
    played = play(np.array([SIERPINSKI, FERN]), starts, points, seed=5).numpy()
    assert played.shape == (2, points, 2)
    for points_of_one, system, start in zip(played, (SIERPINSKI, FERN), starts):
        np.testing.assert_allclose(points_of_one, naive_play(system, start, points, table), atol=1e-5)


@pytest.mark.parametrize("mask", ["010 111 010", "110 000 001", "000 000 100"])
def test_patches_are_drawn_around_every_point(mask):
    mask = [[pixel == "1" for pixel in row] for row in mask.split()]
    points = play(np.array([FERN]), np.array([0]), 1000, seed=0)
    drawn = render(points, identity(), torch.tensor([mask]), 50)[0].numpy()
    expected = naive_render(points[0].double().numpy(), mask, 50)
    assert expected.sum() > 200
    assert (drawn != expected).sum() <= 3 * np.sum(mask)  # of points that rounding put on the other side of a border


def test_the_sierpinski_triangle_is_empty_in_the_middle():
    middle = torch.tensor([[[False] * 3, [False, True, False], [False] * 3]])
    points = play(np.array([SIERPINSKI]), np.array([99]), 100_000, seed=1)
    image, small = (render(points, identity(), middle, size)[0].numpy() for size in (256, 64))
    rows, columns = np.nonzero(image)
    margin, inside = 3, 250
    x, y = (columns - margin) / inside, (rows - margin) / inside
    assert (y <= 2 * np.minimum(x, 1 - x) + 0.02).all()  # corners (0, 0), (1, 0) and (1/2, 1)
    upside_down = (y < 0.5 - 0.02) & (y > 1 - 2 * x + 0.04) & (y > 2 * x - 1 + 0.04)
    assert not upside_down.any()
    assert image.sum() / small.sum() == pytest.approx(9, rel=0.1)  # three times as many when twice as large


def test_maps_are_applied_as_often_as_their_probabilities_say():
    probabilities = np.array([0.05, 0.7, 0.25])
    places = np.zeros((1, 3, 7))  # maps that take every point to a place of their own
    places[0, :, 4], places[0, :, 6] = [1, 2, 3], probabilities
    points = play(places, np.array([3]), 100_000, seed=0)[0, :, 0]
    counts = np.bincount(points.long().numpy(), minlength=4)[1:]
    assert (np.abs(counts - 1e5 * probabilities) < 5 * np.sqrt(1e5 * probabilities)).all()


def test_classes_are_drawn_and_judged_as_published(systems):
    assert systems.shape == (3, 8, 7)
    maps, probabilities = systems[..., :6], systems[..., 6]
    assert np.abs(maps).max() <= 1
    areas = np.abs([[np.linalg.det(m[:4].reshape(2, 2)) for m in system] for system in maps])
    np.testing.assert_allclose(probabilities, areas / areas.sum(1, keepdims=True), atol=1e-12)
    rng = random.Random(0)
    for system in systems:
        exists = [row for row in system if row[6]]
        assert len(exists) >= 2
        x, y, points = 0.0, 0.0, []
        for a, b, c, d, e, f, _ in rng.choices(exists, [row[6] for row in exists], k=100_050):  # one long chain
            x, y = a * x + b * y + e, c * x + d * y + f
            points.append((x, y))
        centre = [[False] * 3, [False, True, False], [False] * 3]
        assert naive_render(np.array(points[50:]), centre, 512).mean() > 0.19


def test_the_first_classes_do_not_depend_on_their_number(systems):
    assert np.array_equal(draw_systems(1, seed=0), systems[:1])
    assert not np.isin(draw_systems(1, seed=0, purpose=CLUTTER)[..., 0], [0, *systems[..., 0].ravel()]).all()


def test_filling_rate_counts_pixels():
    grid = torch.cartesian_prod(torch.arange(10.0), torch.arange(10.0))
    beside = grid[grid[:, 0] != 4]
    spread = torch.tensor([[0.0, 0.0], [1e6, 1e6]]).repeat(50, 1)
    line = torch.stack([torch.arange(100.0), torch.full((100,), 5.0)], dim=1)
    infinite = grid.clone()
    infinite[3, 1] = math.inf
    no_number = grid.clone()
    no_number[70, 0] = math.nan
    sets = torch.stack([grid, torch.cat([beside, beside[:10]]), spread, line, infinite, no_number])
    rates = filling_rate(sets, 40)
    np.testing.assert_allclose(rates[:3] * 1600, [100, 90, 2])
    assert 0 < rates[3] < 0.03
    assert rates[4:].tolist() == [0, 0]


def test_a_weight_of_its_own_for_every_coefficient(systems):
    uniform = np.random.default_rng(0).random((500, 8, 6))
    varied = vary(systems[:1], uniform, 0.3)
    exists = systems[0, :, 6] > 0
    weights = (varied[..., :6] / np.where(systems[:1, :, :6] == 0, 1, systems[:1, :, :6]))[:, exists]
    assert 0.7 <= weights.min() < 0.71
    assert 1.29 < weights.max() <= 1.3
    assert np.abs(np.corrcoef(weights.reshape(500, -1).T) - np.eye(6 * exists.sum())).max() < 0.25
    assert np.array_equal(varied[..., 6], np.broadcast_to(systems[:1, :, 6], (500, 8)))
    assert np.array_equal(vary(systems, np.zeros((3, 8, 6)), 0), systems)


def test_an_image_does_not_depend_on_how_many_there_are_or_come_at_once(systems, monkeypatch):
    options = SMALL | dict(variation=0.4, placement=True, colours=True, clutter=1)
    few, many = Fractals(**options), Fractals(**options | dict(per_class=9, classes=7))
    expected = torch.cat(list(render_class(systems, systems, few, "train", 1)))
    assert expected.shape == (4, 3, 32, 32)
    assert len({image.numpy().tobytes() for image in expected}) == 4
    monkeypatch.setattr(module, "POINTS_AT_ONCE", dict(cpu=4000))
    pieces = list(render_class(systems, systems, many, "train", 1))
    assert [len(piece) for piece in pieces] == [2, 2, 2, 2, 1]
    assert torch.equal(torch.cat(pieces)[:4], expected)


def test_images_that_diverge_are_drawn_again(monkeypatch):
    edge = np.array(FERN)  # which no longer contracts in more than half of all images at this variation
    edge[0] = [0.97, 0.2, -0.2, 0.97, 0.3, 0, 0.99]
    edge[1:, 6] = 0.005
    edge = np.concatenate([edge, np.zeros((5, 7))])[None]
    options = Fractals(**SMALL | dict(per_class=40, variation=0.5))
    uniform = np.random.default_rng(0).random((40, 8, 6))
    once = filling_rate(play(vary(edge, uniform, 0.5), np.arange(40), 2000, 0), 32)
    assert 5 < (once < module.KEPT).sum() < 35
    images = torch.cat(list(render_class(edge, edge, options, "train", 0)))
    assert ((images[:, 0] > 0).float().mean((1, 2)) > 0.05).all()
    again = torch.cat(list(render_class(edge, edge, options, "train", 0)))
    assert torch.equal(images, again)
    monkeypatch.setattr(module, "ATTEMPTS", 3)
    with pytest.raises(ConfigError, match="class 0 has an image that fills nothing .* variation below 0.5"):
        list(render_class(np.array([DIVERGING]).repeat(3, 1)[:, :8], edge, options, "train", 0))


def test_plain_images_are_grey_on_black_and_reach_the_margin(systems):
    images = torch.cat(list(render_class(systems, systems, Fractals(**SMALL | dict(size=128)), "validation", 0)))
    assert images.dtype == torch.uint8
    assert images.unique().tolist() == [0, 127]
    for image in images[:, 0]:
        rows, columns = image.nonzero().T
        assert all(-1 <= where.min() - 1 <= 2 and 125 <= where.max() + 1 <= 128 for where in (rows, columns))


def test_colours_differ_from_the_background_in_every_channel(systems):
    options = Fractals(**SMALL | dict(per_class=50, colours=True))
    backgrounds = set()
    for image in torch.cat(list(render_class(systems, systems, options, "train", 0))):
        shades = [channel.unique().tolist() for channel in image]
        assert all(len(shade) == 2 and shade[1] - shade[0] >= 64 for shade in shades)
        backgrounds.add(tuple(image[:, 0, 0].tolist()))
    assert len(backgrounds) > 45


def test_placement_turns_shrinks_and_moves_but_cuts_nothing_off(systems):
    frames = module._frames(np.random.default_rng(0).random((2000, 4)), 0.5, 1)
    corners = np.array([[-1, -1, 1], [-1, 1, 1], [1, -1, 1], [1, 1, 1]]) @ frames
    assert np.abs(corners).max() <= 1 + 1e-9
    extents = np.ptp(corners, axis=1) / 2  # of the square that is turned
    assert np.allclose(extents[:, 0], extents[:, 1])
    assert 0.5 <= extents.min() < 0.51
    assert 0.99 < extents.max() <= 1
    angles = np.arctan2(frames[:, 0, 1], frames[:, 0, 0])
    assert (np.histogram(angles, 8, (-np.pi, np.pi))[0] > 180).all()
    assert np.allclose(np.linalg.det(frames[:, :2]), (frames[:, 0] ** 2).sum(1))  # the axes keep their right angle

    options = Fractals(**SMALL | dict(per_class=60, size=128, variation=0, placement=True))
    centres, extents = [], []
    for image in torch.cat(list(render_class(systems, systems, options, "train", 0)))[:, 0]:
        where = image.nonzero()
        low, high = where.min(0).values, where.max(0).values
        centres.append((low + high) / 2)
        extents.append((high - low).max())
    assert torch.stack(centres).std(0).min() > 5
    assert 30 < min(extents) < 80
    assert max(extents) > 90


def test_clutter_is_behind(systems):
    plain = torch.cat(list(render_class(systems, systems, Fractals(**SMALL), "train", 0)))
    cluttered = torch.cat(list(render_class(systems, systems, Fractals(**SMALL | dict(clutter=4)), "train", 0)))
    assert (cluttered[plain > 0] == 127).all()
    assert ((cluttered > 0) & (plain == 0)).flatten(1).sum(1).min() > 10


def test_training_opens_the_folder(tmp_path, drawn):
    small = ["--classes=3", "--per-class=4", "--val-per-class=2", "--size=32", "--points=2000", "--workers=1"]
    main([str(tmp_path / "out"), *small, "--device=cpu", "--clutter=1"])
    train, val, classes = open_splits(Config(data_dir=str(tmp_path / "out")))
    assert (len(train), len(val), classes) == (12, 6, 3)
    assert list(class_names(train)) == ["c0000", "c0001", "c0002"]
    path = tmp_path / "out" / "train" / "c0002" / "00003.jpg"
    image = Image.open(path)
    assert is_plain_jpeg(path.read_bytes(), image)  # as a GPU decodes them
    assert image.format == "JPEG"
    assert image.mode == "RGB"
    assert image.size == (32, 32)
    record = json.loads((tmp_path / "out" / "fractals.json").read_text())
    assert record["images"] == 18
    assert record["options"]["clutter"] == 1
    assert record["environment"]["torch"]
    assert len(set(files(tmp_path / "out").values())) == 18  # none of the validation images is one of training


def test_two_processes_write_what_one_does_after_an_interruption(tmp_path, drawn, monkeypatch, capsys):
    two, stopped = tmp_path / "two", tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(module.multiprocessing, "get_context", lambda _: CONTEXT)  # which starts sooner
        write_fractals(two, Fractals(**SMALL), workers=2)
    left = iter(range(10))

    def stop(*arguments, save=Image.Image.save, **options):
        if next(left, None) is None:
            raise KeyboardInterrupt
        save(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            write_fractals(stopped, Fractals(**SMALL))
    assert sorted(path.name for path in (stopped / "train").iterdir()) == ["c0000", "c0001"]  # of the third only half
    assert json.loads((stopped / "fractals.json").read_text())["images"] == 0
    write_fractals(stopped, Fractals(**SMALL))
    assert files(stopped) == files(two)
    assert len(files(two)) == 18
    assert not (stopped / ".unfinished").exists()
    monkeypatch.setattr(module, "render_class", None)  # nothing is made any more
    write_fractals(stopped, Fractals(**SMALL))
    assert "all there already" in capsys.readouterr().out


def test_other_options_need_another_folder(tmp_path, drawn, capsys):
    write_fractals(tmp_path / "out", Fractals(**SMALL))
    with pytest.raises(ConfigError, match=r"points 2000, not 3000, clutter 0, not 2\. Give the same options"):
        write_fractals(tmp_path / "out", Fractals(**SMALL | dict(points=3000, clutter=2)))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "photos"), "--classes=2"])
    assert "holds something else (holiday.jpg): choose a new folder" in capsys.readouterr().err
    with module.FileLock(tmp_path / "out" / ".lock"), pytest.raises(FolderInUseError, match="another process writes"):
        write_fractals(tmp_path / "out", Fractals(**SMALL))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--classes=0", "classes is 0 but must be at least 1"),
        ("--variation=1.5", "variation is 1.5 but must be between 0 and 1"),
        ("--size=3", "size is 3 but must be at least 16"),
        ("--workers=0", "workers is 0 but must be at least 1"),
        ("--device=cuda", "PyTorch finds no GPU here: choose cpu"),
    ],
)
def test_wrong_options_are_named(option, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), option])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_what_a_cpu_draws(systems, tmp_path):
    np.testing.assert_array_equal(draw_systems(3, seed=0, device="cuda"), systems)
    options = Fractals(**SMALL | dict(size=128, per_class=20, clutter=2, placement=True))
    on = {d: torch.cat(list(render_class(systems, systems, options, "train", 0, d))) for d in ("cpu", "cuda")}
    differ = (on["cpu"] != on["cuda"]).float().mean((1, 2, 3))
    assert differ.median() < 0.005  # an image that only one of them draws again differs altogether
    assert (differ > 0.05).sum() <= 1
    for workers in (1, 2):
        write_fractals(tmp_path / str(workers), Fractals(**SMALL), "cuda", workers)
    assert files(tmp_path / "1") == files(tmp_path / "2")
