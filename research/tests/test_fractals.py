"""Tests of research/fractals.py: images equal those of plain Python loops, and the data set is written correctly."""

import itertools
import json
import math
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from research import fractals
from research.fractals import CHAINS, Fractals, Place, draw_systems, play, render_images, write_fractals
from vil.config import Config, ConfigError
from vil.data.device.encoded import is_plain_jpeg
from vil.data.sources.splits import class_names, open_splits
from vil.fault_tolerance.locks import FolderInUseError

SMALL = dict(classes=3, per_class=4, val_per_class=2, size=32, points=2000)
# Each map of a function system has the coefficients a, b, c, d, e, f and a probability.
SIERPINSKI = [[0.5, 0, 0, 0.5, 0, 0, 1 / 3], [0.5, 0, 0, 0.5, 0.5, 0, 1 / 3], [0.5, 0, 0, 0.5, 0.25, 0.5, 1 / 3]]
FERN = [[0.8, 0.1, -0.2, 0.7, 0.1, 0.3, 0.6], [0.2, -0.5, 0.4, 0.3, -0.4, 0.2, 0.3], [0.1, 0.2, 0.3, -0.4, 0.5, 0, 0.1]]
DIVERGING = [[2, 0, 0, 2, 1, 1, 0.5], [2, 0, 0, 3, 1, 0, 0.5], [0] * 7]


@pytest.fixture(scope="session")
def systems():
    return draw_systems(3, seed=0)


@pytest.fixture
def drawn(systems, monkeypatch):
    """Stub `draw_systems` to return the fixture `systems`, and return a list that records the calls."""
    asked = []

    def draw(count, *of):
        asked.append((count, *of))
        return np.resize(systems, (count, 8, 7))

    monkeypatch.setattr(fractals, "draw_systems", draw)
    return asked


def naive_play(system, start, points, table):
    """Play the chaos game in plain loops. Return the points, and the map that produced each point."""
    steps, found = math.ceil(points / CHAINS), {}
    for chain in range(CHAINS):
        x = y = 0.0
        for step in range(fractals.BURN_IN + steps):
            total, number = 0.0, table[start + step * CHAINS + chain]
            for chosen, (a, b, c, d, e, f, probability) in enumerate(system):  # noqa: B007
                total += probability
                if number <= total:
                    break
            x, y = a * x + b * y + e, c * x + d * y + f
            if step >= fractals.BURN_IN:
                found[step - fractals.BURN_IN, chain] = x, y, chosen
    points = np.array([found[key] for key in sorted(found)])[:points]
    return points[:, :2], points[:, 2]


def naive_render(points, maps, mask, size):
    """Draw the 3x3 patch of each point in plain loops. The points are scaled to the image without its margin."""
    (low_x, low_y), (high_x, high_y) = points.min(0), points.max(0)
    margin, drawn = 6 / 512 * size, np.zeros((size, size), int)
    for (x, y), number in sorted(zip(points.tolist(), maps), key=lambda made: made[1]):
        column = math.floor(margin + (x - low_x) / (high_x - low_x) * (size - 2 * margin))
        row = math.floor(margin + (y - low_y) / (high_y - low_y) * (size - 2 * margin))
        for down in range(3):
            for right in range(3):
                at = row + down - 1, column + right - 1
                if mask[down][right] and min(at) >= 0 and max(at) < size:
                    drawn[at] = 1 + number
    return drawn


def identity(count=1):
    return torch.eye(3, 2).expand(count, 3, 2)


def places(count, split="train", number=0):
    return [Place(split, number, image) for image in range(count)]


def padded(system):
    return np.concatenate([system, np.zeros((8 - len(system), 7))])


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jpg"))}


def test_chains_follow_the_chaos_game():
    starts, count = np.array([7, 123_456]), 2 * CHAINS - 100
    table = fractals.choices(5, fractals.TABLE + 60 * CHAINS).double().numpy()
    points, maps = (found.numpy() for found in play(np.array([SIERPINSKI, FERN]), starts, count, seed=5))
    assert points.shape == (2, count, 2)
    for system, start, points_of_one, maps_of_one in zip((SIERPINSKI, FERN), starts, points, maps):
        expected_points, expected_maps = naive_play(system, start, count, table)
        np.testing.assert_allclose(points_of_one, expected_points, atol=1e-5)
        np.testing.assert_array_equal(maps_of_one, expected_maps)
        assert set(maps_of_one) == {0, 1, 2}


@pytest.mark.parametrize("mask", ["010 111 010", "110 000 001", "000 000 100"])
def test_patches_are_drawn_around_every_point_in_the_order_of_the_maps(mask):
    mask = [[pixel == "1" for pixel in row] for row in mask.split()]
    points, maps = play(np.array([FERN]), np.array([0]), 1000, seed=0)
    drawn = fractals.render(points, maps, identity(), torch.tensor([mask]), 50)[0].numpy()
    expected = naive_render(points[0].double().numpy(), maps[0].numpy(), mask, 50)
    assert all((expected == number).sum() > 20 for number in (1, 2, 3))
    assert (drawn != expected).sum() <= 3 * np.sum(mask)  # rounding moves some points across the border of a pixel
    backwards = fractals.render(points, 2 - maps, identity(), torch.tensor([mask]), 50)[0].numpy()
    assert ((drawn > 0) == (backwards > 0)).all()
    assert (drawn + backwards > 4).any()  # at a pixel that two maps reach, the map with the larger index wins


def test_maps_are_applied_as_often_as_their_probabilities_say():
    probabilities = np.array([0.05, 0.7, 0.25])
    apart = np.zeros((1, 3, 7))  # each map is constant, so a point shows which map was applied
    apart[0, :, 4], apart[0, :, 6] = [1, 2, 3], probabilities
    points, maps = play(apart, np.array([3]), 100_000, seed=0)
    assert torch.equal(points[..., 0], 1.0 + maps)
    counts = np.bincount(maps[0].numpy(), minlength=3)
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
        assert (naive_render(np.array(points[50:]), np.zeros(100_000), centre, 512) > 0).mean() > 0.19


def test_candidates_have_2_to_8_maps_with_uniform_coefficients(monkeypatch):
    monkeypatch.setattr(fractals, "play", lambda systems, *_: (torch.zeros(len(systems), 1, 2), None))
    # With this stub, every sampled function system fills all pixels, so no system is rejected.
    monkeypatch.setattr(fractals, "filling_rate", lambda points, size: torch.ones(len(points)))
    candidates = draw_systems(7000, seed=0)
    exists = candidates[..., 6] > 0
    numbers = np.bincount(exists.sum(1), minlength=10)
    assert numbers.sum() == numbers[2:9].sum() == 7000
    assert np.abs(numbers[2:9] - 1000).max() < 5 * np.sqrt(1000)
    for coefficients in candidates[exists][:, :6].T:
        counts, _ = np.histogram(coefficients, 40, (-1, 1))
        assert counts.sum() == exists.sum()
        assert np.abs(counts / counts.mean() - 1).max() < 5 / np.sqrt(counts.mean())
    assert not candidates[~exists].any()


def test_the_first_classes_do_not_depend_on_their_number(systems):
    assert np.array_equal(draw_systems(1, seed=0), systems[:1])
    assert not np.isin(draw_systems(1, seed=0, purpose=fractals.CLUTTER)[..., 0], [0, *systems[..., 0].ravel()]).all()


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
    rates = fractals.filling_rate(sets, 40)
    np.testing.assert_allclose(rates[:3] * 1600, [100, 90, 2])
    assert 0 < rates[3] < 0.03
    assert rates[4:].tolist() == [0, 0]


def test_a_weight_of_its_own_for_every_coefficient(systems):
    uniform = np.random.default_rng(0).random((500, 8, 6))
    varied = fractals.vary(systems[:1], uniform, 0.3)
    exists = systems[0, :, 6] > 0
    weights = (varied[..., :6] / np.where(systems[:1, :, :6] == 0, 1, systems[:1, :, :6]))[:, exists]
    assert 0.7 <= weights.min() < 0.71
    assert 1.29 < weights.max() <= 1.3
    assert np.abs(np.corrcoef(weights.reshape(500, -1).T) - np.eye(6 * exists.sum())).max() < 0.25
    assert np.array_equal(varied[..., 6], np.broadcast_to(systems[:1, :, 6], (500, 8)))
    assert np.array_equal(fractals.vary(systems, np.zeros((3, 8, 6)), 0), systems)


def test_an_image_does_not_depend_on_how_many_there_are_or_come_with_it(systems):
    options = SMALL | dict(variation=0.4, placement=True, colours=0.3, clutter=1)
    few, many = Fractals(**options), Fractals(**options | dict(per_class=9, classes=7))
    wanted = [Place(split, number, image) for image in (3, 0) for split in fractals.SPLITS for number in (2, 0)]
    images = render_images(systems, systems, few, wanted)
    assert images.shape == (12, 32, 32, 3)
    assert len({image.numpy().tobytes() for image in images}) == 12
    for chosen in ([5], [11, 0, 7], [*range(12), *range(12)]):
        others = [Place("train", 1, 8)] + [wanted[i] for i in chosen]
        assert torch.equal(render_images(systems, systems, many, others)[1:], images[chosen])


def test_every_image_has_random_numbers_of_its_own():
    twins = np.stack([padded(FERN)] * 2)  # two classes with the same function system
    wanted = [Place(split, number, image) for split in fractals.SPLITS for number in (0, 1) for image in (0, 1)]
    images = render_images(twins, twins, Fractals(**SMALL), wanted)
    assert len({image.numpy().tobytes() for image in images}) == 12
    parts = [fractals._uniform(0, wanted, part, 8) for part in range(3)]
    assert len(np.unique(parts)) == 12 * 8 * 3
    again = fractals._uniform(0, wanted, 0, 8, [0, 1] * 6)
    assert (again == parts[0]).all(1).tolist() == [True, False] * 6


def test_memory_is_bounded_by_points_and_by_pixels():
    for points, size in ((100_000, 256), (100, 256), (1, 16), (100_000, 4096), (10**9, 16)):
        count = fractals.at_once(points, size, "cuda")
        assert count >= 1
        assert count == 1 or max(40 * points, 20 * size**2) * count <= 40 * 2**26
    assert fractals.at_once(20_000, 256, "cpu") > 100


def test_images_that_diverge_are_drawn_again(monkeypatch):
    edge = np.array(FERN)  # about half of this function system's random variations diverge
    edge[0] = [0.97, 0.2, -0.2, 0.97, 0.3, 0, 0.99]
    edge[1:, 6] = 0.005
    edge = padded(edge)[None]
    options = Fractals(**SMALL | dict(per_class=40, variation=0.5))
    uniform = np.random.default_rng(0).random((40, 8, 6))
    once = fractals.filling_rate(play(fractals.vary(edge, uniform, 0.5), np.arange(40), 2000, 0)[0], 32)
    assert 5 < (once < fractals.KEPT).sum() < 35
    images = render_images(edge, edge, options, places(40))
    assert ((images[..., 0] > 0).float().mean((1, 2)) > 0.05).all()
    assert torch.equal(render_images(edge, edge, options, places(40)[30:]), images[30:])
    monkeypatch.setattr(fractals, "ATTEMPTS", 3)
    two = np.stack([padded(SIERPINSKI), padded(DIVERGING)])
    with pytest.raises(ConfigError, match="class 1 has an empty image .*--variation below 0.1"):
        render_images(two, edge, Fractals(**SMALL | dict(variation=0.1)), [*places(3), *places(3, number=1)])


def test_points_that_are_played_again_come_with_their_maps(monkeypatch):
    fern, count = padded(FERN)[None], 1200
    options = Fractals(**SMALL | dict(variation=0, points=count))
    first, _ = fractals._points_that_fill(fern, options, places(40), "cpu")
    rates = fractals.filling_rate(first, 32)
    # half of the images reach the minimum filling rate KEPT in the first attempt
    monkeypatch.setattr(fractals, "KEPT", float(rates.median()))
    points, maps = fractals._points_that_fill(fern, options, places(40), "cpu")
    assert (fractals.filling_rate(points, 32) >= fractals.KEPT).all()
    assert ((points == first).all((1, 2)) == (rates >= fractals.KEPT)).all()
    a, b, c, d, e, f, _ = torch.from_numpy(fern[0]).float()[maps[:, CHAINS:].long()].unbind(-1)
    x, y = points[:, :-CHAINS].unbind(-1)  # coordinates of the previous step's points
    expected = torch.stack([a * x + b * y + e, c * x + d * y + f], dim=-1)
    np.testing.assert_allclose(points[:, CHAINS:], expected, atol=1e-5)


def test_every_image_has_a_patch_and_a_flip_of_its_own(monkeypatch):
    # All points of this function system are three corners of the square, so an image shows only three patches.
    corners = np.zeros((1, 8, 7))
    corners[0, 1, 4] = corners[0, 2, 5] = 1
    corners[0, :3, 6] = 1 / 3
    monkeypatch.setattr(fractals, "KEPT", 0)
    options = Fractals(**SMALL | dict(size=128, variation=0, points=1000))
    images = render_images(corners, corners, options, places(200))[..., 0] > 0
    low, high = slice(3), slice(125, 128)
    seen = torch.stack([images[:, rows, columns] for rows in (low, high) for columns in (low, high)], dim=1)
    assert (seen.sum((1, 2, 3)) == images.sum((1, 2))).all()
    empty = ~seen.any(-1).any(-1)
    assert (empty.sum(1) == 1).all()
    assert (empty.sum(0) > 25).all()  # each of the four flips occurs in more than 25 of 200 images
    patches = seen[empty.roll(1, dims=1)]
    assert (seen[~empty].view(200, 3, 3, 3) == patches[:, None]).all()
    assert len(patches.unique(dim=0)) > 100
    assert (abs(patches.float().mean(0) - 0.5) < 0.18).all()


def test_a_class_has_a_palette_from_which_its_images_keep_their_distance(systems):
    wanted = [Place(split, number, image) for split in fractals.SPLITS for number in range(3) for image in range(10)]
    grey, pure, moved = (
        render_images(systems, systems, Fractals(**SMALL | dict(colours=colours)), wanted).int()
        for colours in (None, 0.0, 0.3)
    )
    palettes = []
    for number in range(3):
        own = [row for row, place in enumerate(wanted) if place.number == number]
        drawn = grey[own][..., 0] > 0
        of_maps, background = pure[own][drawn].unique(dim=0), pure[own][~drawn].unique(dim=0)
        assert len(background) == 1  # all images of a class have the same background in all splits
        assert 1 < len(of_maps) <= (systems[number, :, 6] > 0).sum()
        assert not (of_maps == background).all(1).any()
        palettes += [*of_maps.tolist(), *background.tolist()]
        assert len(moved[own][~drawn].unique(dim=0)) == len(own)
    assert len(set(map(tuple, palettes))) == len(palettes)  # no two classes share a colour
    moves = moved - pure
    assert moves.abs().max() <= 0.3 * 256 + 1
    assert moves.min() < -0.28 * 256
    assert moves.max() > 0.28 * 256
    everything = render_images(systems, systems, Fractals(**SMALL | dict(colours=1.0)), wanted)
    assert {0, 255} <= set(everything.unique().tolist())  # colour values are clipped, not wrapped around
    assert ((everything.int() - pure).abs() < 256).all()


def test_a_point_has_the_colour_of_the_map_that_made_it():
    system = padded(SIERPINSKI)[None]
    options = Fractals(**SMALL | dict(size=128, variation=0, colours=0.0, points=20_000))
    image = render_images(system, system, options, places(1))[0]
    palette = fractals._palettes(options, places(1), np.zeros((1, 9, 3)), "cpu")[0]
    drawn = [(image == colour).all(-1) for colour in palette]
    assert sum(where.sum() for where in drawn[:4]) == 128 * 128
    row, column = (torch.stack([where.nonzero()[:, axis].float().mean() for where in drawn[:4]]) for axis in (0, 1))
    assert abs(row[1] - row[2]) < 4  # the first two maps draw triangles side by side
    assert abs(row[3] - row[1]) > 50
    assert abs(column[1] - column[2]) > 50
    assert abs(column[3] - (column[1] + column[2]) / 2) < 4


def test_placement_turns_shrinks_and_moves_but_cuts_nothing_off(systems):
    frames = fractals._frames(np.random.default_rng(0).random((2000, 4)), 0.5, 1)
    corners = np.array([[-1, -1, 1], [-1, 1, 1], [1, -1, 1], [1, 1, 1]]) @ frames
    assert np.abs(corners).max() <= 1 + 1e-9
    extents = np.ptp(corners, axis=1) / 2  # size of the bounding box of the rotated square
    assert np.allclose(extents[:, 0], extents[:, 1])
    assert 0.5 <= extents.min() < 0.51
    assert 0.99 < extents.max() <= 1
    angles = np.arctan2(frames[:, 0, 1], frames[:, 0, 0])
    assert (np.histogram(angles, 8, (-np.pi, np.pi))[0] > 180).all()
    assert np.allclose(np.linalg.det(frames[:, :2]), (frames[:, 0] ** 2).sum(1))  # frame axes remain perpendicular

    options = Fractals(**SMALL | dict(per_class=60, size=128, variation=0, placement=True))
    centres, extents = [], []
    for image in render_images(systems, systems, options, places(60))[..., 0]:
        where = image.nonzero()
        low, high = where.min(0).values, where.max(0).values
        centres.append((low + high) / 2)
        extents.append((high - low).max())
    assert torch.stack(centres).std(0).min() > 5
    assert 30 < min(extents) < 80
    assert max(extents) > 90


@pytest.mark.parametrize("colours", [None, 0.2])
def test_clutter_is_behind(systems, colours):
    options = SMALL | dict(colours=colours)
    grey, plain, cluttered = (
        render_images(systems, systems, Fractals(**options | changed), places(4)).int()
        for changed in (dict(colours=None), {}, dict(clutter=4))
    )
    front = grey > 0
    assert (cluttered == plain)[front].all()
    pieces = cluttered[((cluttered != plain) & ~front).any(-1)]
    assert len(pieces) > 150
    assert (pieces.amax(-1) == pieces.amin(-1)).all() == (colours is None)
    assert colours or cluttered.max() == 127
    assert len(cluttered[0].flatten(0, 1).unique(dim=0)) > len(plain[0].flatten(0, 1).unique(dim=0)) + 1
    others = render_images(systems, padded(FERN)[None], Fractals(**options | dict(clutter=4)), places(4))
    assert (others == cluttered)[front].all()
    assert (others != cluttered).any()


def test_training_opens_the_folder(tmp_path, drawn):
    small = ["--classes=3", "--per-class=4", "--val-per-class=2", "--test-per-class=1", "--size=32", "--points=2000"]
    fractals.main([str(tmp_path / "out"), *small, "--device=cpu", "--seed=5", "--clutter=1", "--colours=0.2"])
    assert [asked[:3] for asked in drawn] == [(3, 5, fractals.CLASSES), (fractals.CLUTTER_SYSTEMS, 5, fractals.CLUTTER)]
    train, val, classes = open_splits(Config(data_dir=str(tmp_path / "out")))
    assert (len(train), len(val), classes) == (12, 6, 3)
    test, _, _ = open_splits(Config(data_dir=str(tmp_path / "out"), train_split="test"))
    assert len(test) == 3
    assert list(class_names(train)) == list(class_names(test)) == ["c0000", "c0001", "c0002"]
    path = tmp_path / "out" / "train" / "c0002" / "00003.jpg"
    image = Image.open(path)
    assert is_plain_jpeg(path.read_bytes(), image)  # a GPU can decode the file
    assert image.format == "JPEG"
    assert image.mode == "RGB"
    assert image.size == (32, 32)
    record = json.loads((tmp_path / "out" / "fractals.json").read_text())
    assert record["images"] == 21
    assert record["options"]["colours"] == 0.2
    assert record["environment"]["torch"]
    assert len(set(files(tmp_path / "out").values())) == 21  # no two images are equal, within a split or across splits


def test_what_was_stopped_goes_on_to_the_same_files(tmp_path, drawn, monkeypatch, capsys):
    whole, stopped, options = tmp_path / "whole", tmp_path / "stopped", Fractals(**SMALL | dict(test_per_class=0))
    write_fractals(whole, options)
    assert len(files(whole)) == 18
    assert not (whole / "test").exists()
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    saved = itertools.count(1)

    def stop(*arguments, save=fractals._save_jpeg):
        if next(saved) == 10:  # interrupt `main` once, like Ctrl-C
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        save(*arguments)

    monkeypatch.setattr(fractals, "AT_ONCE", dict(cpu=4000))
    with monkeypatch.context() as patch:
        patch.setattr(fractals, "_save_jpeg", stop)
        # an earlier training in this process may have left its own SIGINT handler
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(SystemExit) as stopping:
            fractals.main([str(stopped), *small, "--device=cpu"])
        signal.signal(signal.SIGINT, before)
    assert stopping.value.code == 130
    assert "stopped: run the same command" in capsys.readouterr().err
    # the interrupted run kept only complete classes
    assert sorted(path.name for path in stopped.glob("[tv]*/*")) == ["c0000", "c0001"]
    assert all(len(list(path.iterdir())) == 4 for path in stopped.glob("train/*"))
    before = {path: path.stat().st_mtime_ns for path in stopped.glob("train/*/*")}
    assert json.loads((stopped / "fractals.json").read_text())["images"] == 0
    write_fractals(stopped, options)
    assert files(stopped) == files(whole)
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    assert len(drawn) == 2  # the second call reads the classes from a file instead of sampling them
    assert not (stopped / ".unfinished").exists()
    assert json.loads((stopped / "fractals.json").read_text())["images"] == 18
    monkeypatch.setattr(fractals, "render_images", None)  # complete folders must not be rendered again
    write_fractals(stopped, options)
    assert "all there already" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["saving", "rendering"])
def test_after_an_error_no_more_is_written(tmp_path, drawn, monkeypatch, where):
    begun, batches, second = [], [], threading.Event()

    def save(path, pixels):
        begun.append(path)
        second.wait(60)  # wait until the second batch has been rendered
        time.sleep(0.05)
        if where == "saving":
            raise OSError("broken")

    def render_some(*arguments):
        batches.append(arguments)
        images = render_images(*arguments)
        if len(batches) == 2:
            second.set()
            if where == "rendering":
                raise OSError("broken")
        return images

    monkeypatch.setattr(fractals, "_save_jpeg", save)
    monkeypatch.setattr(fractals, "render_images", render_some)
    monkeypatch.setattr(fractals, "AT_ONCE", dict(cpu=512 * 200))
    with pytest.raises(OSError, match="broken"):
        write_fractals(tmp_path / "out", Fractals(**SMALL | dict(per_class=80, size=16, points=512)))
    assert len(batches) == 2
    # At most 32 threads save images, so an early error stops most of the 200 images.
    assert len(begun) <= 3 * 32


def test_a_full_disk_is_named_with_the_file(tmp_path, drawn, capsys):
    resource = pytest.importorskip("resource")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | dict(size=128, clutter=3)).items()]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Because of the limit on the file size, a file is written only in part, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        with pytest.raises(SystemExit):
            fractals.main([str(tmp_path / "out"), *words, "--device=cpu"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err
    assert re.search(r"error: .*train.c000\d.0000\d\.jpg.*\. Run the same command to resume\n$", error)
    fractals.main([str(tmp_path / "out"), *words, "--device=cpu"])
    written = files(tmp_path / "out")
    assert len(written) == 18
    assert min(map(len, written.values())) < 6000 < max(map(len, written.values()))
    assert all(content.endswith(b"\xff\xd9") for content in written.values())


def test_other_options_need_another_folder(tmp_path, drawn, capsys):
    write_fractals(tmp_path / "out", Fractals(**SMALL))
    with pytest.raises(ConfigError, match=r"points must be 2000, got 3000, clutter must be 0, got 2"):
        write_fractals(tmp_path / "out", Fractals(**SMALL | dict(points=3000, clutter=2)))
    capsys.readouterr()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(SystemExit):
        fractals.main([str(tmp_path / "photos"), "--classes=2"])
    assert "must be empty, but contains holiday.jpg: choose a new folder" in capsys.readouterr().err
    with (
        fractals.FileLock(tmp_path / "out" / ".lock"),
        pytest.raises(FolderInUseError, match="another process is writing"),
    ):
        write_fractals(tmp_path / "out", Fractals(**SMALL))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--classes=0", "classes must be at least 1, got 0"),
        ("--variation=1.5", "variation must be between 0 and 1, got 1.5"),
        ("--size=3", "size must be at least 16, got 3"),
        ("--size=5000", "size must be at most 4096, got 5000"),
        ("--colours=-0.1", "colours must be between 0 and 1, got -0.1"),
        ("--seed=-1", "seed must be at least 0, got -1"),
        ("--test-per-class=-1", "test_per_class must be at least 0, got -1"),
        ("--device=cuda", "device 'cuda' is not available on this machine: set --device cpu"),
        ("--device=meta", "device 'meta' is not available on this machine"),
        ("--device=foo", "device must be a PyTorch device such as cuda or cpu, got 'foo'"),
    ],
)
def test_wrong_options_are_named(option, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fractals, "_write", None)
    with pytest.raises(SystemExit):
        fractals.main([str(tmp_path / "out"), option])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_what_a_cpu_draws(systems, tmp_path):
    np.testing.assert_array_equal(draw_systems(3, seed=0, device="cuda"), systems)
    options = Fractals(**SMALL | dict(size=128, per_class=20, clutter=2, placement=True, colours=0.2))
    on = {d: render_images(systems, systems, options, places(20), d).cpu() for d in ("cpu", "cuda")}
    differ = (on["cpu"] != on["cuda"]).float().mean((1, 2, 3))
    # An image differs completely if only one device rejects its first variation because of rounding.
    assert differ.median() < 0.005
    assert (differ > 0.05).sum() <= 1
    for count in (2000, 40_000):  # results do not depend on the number of images rendered at a time
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fractals, "AT_ONCE", dict(cuda=count, cpu=1))
            write_fractals(tmp_path / str(count), Fractals(**SMALL), "cuda")
    assert files(tmp_path / "2000") == files(tmp_path / "40000")
