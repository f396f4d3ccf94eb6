"""Render a data set of fractal images, with one folder per class, for training without photographs.

    python -m research.fractals data/fractals                         # 1,000 classes of 1,000 images, on a GPU
    python -m research.fractals data/few --classes 10 --per-class 50 --val-per-class 10 --points 10000
    python -m research.fractals data/coloured --test-per-class 50 --points 20000 --placement --colours 0.2

The program writes OUT/{train,validation,test}/{c0000,c0001,...}/*.jpg. Each class folder is written atomically, and the
same command resumes an interrupted run.

A class is an iterated function system: a few affine maps of the plane, of which the chaos game applies one at a time,
chosen at random, to a point. The images of a class are rendered from systems near the class's system. The procedure
follows the paper of FractalDB (Kataoka et al., "Pre-training without Natural Images", ACCV 2020) and its authors' code:

    maps       2 to 8 maps (at most 7 in the authors' code) with coefficients uniform in [-1, 1], applied with
    probabilities in proportion to |det|
    classes    a system becomes a class if 100,000 points fill at least 0.2 of 512 x 512 pixels
    images     the points are scaled to the image, each axis separately, with a margin of 6 pixels in 512. The points
    are plotted as 3x3 patches of grey 127 on black, and the image is flipped.

The procedure differs from the code of FractalDB's authors:

    weights    Every coefficient of every image has its own weight, as in 1p-frac (2024). In FractalDB, the 1,000 images
    of a class are the combinations of 25 weights, each of one parameter of all maps, 4 flips and 10 patches.
    patches    An image has one patch for all points, and the black pixels of the patch do not cover earlier points.
    FractalDB's code samples a patch for every point, and pastes the patch including black pixels over earlier points.
    Therefore, FractalDB's fractals are grainy and fill about half as many pixels.
    chains     Many short chains of the chaos game replace one long chain. The first points
    of each chain, which are not yet close to the attractor, are omitted.
    retries    An image whose points fill almost nothing is sampled again, for example if its maps do not contract.

These options make classes easier or harder to distinguish:

    --variation    each coefficient of an image is the coefficient of its class times a sample from 1 - variation to
    1 + variation
    --points       number of points of an image; few points leave separate dots instead of a filled shape
    --clutter      number of smaller pieces of other systems behind the fractal (not in FractalDB)
    --placement    rotate the fractal by any angle, shrink its rotated bounding square to at least half of the image,
    and move it (not in FractalDB)
    --colours      give each class a colour for each map, used for its points, and one for the background (not in
    FractalDB, whose code cycles hues with the step). An image's colours differ from the class's by up to SHARE of the
    range. With a larger share, colours reveal less about the class. At 0, colours identify the class.

Classes and images depend only on the options, not on how many are rendered at a time or how often a run was
interrupted. Because a GPU and a CPU round differently, a few pixels of an image may differ between GPU and CPU. A
class or an image whose filling rate is close to a threshold may differ completely.

    B  images             M  maximum number of maps         H, W  pixels
    N  points             K  chains of the chaos game       C  colours of an image
"""

from __future__ import annotations

import argparse
import errno
import functools
import itertools
import json
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from PIL import Image
from torch import Tensor

from vil.config import ConfigError
from vil.devices import default_device, known_device
from vil.fault_tolerance.files import write_atomically
from vil.fault_tolerance.locks import FolderInUseError
from vil.info import environment

MOST_MAPS = 8
CHAINS = 512
BURN_IN = 50  # number of first steps that each chain of the chaos game discards
TABLE = 2**22  # number of positions in the table of random numbers at which a chaos game can start
# maximum number of points rendered at a time, by device; a point takes about 40 bytes of memory and a pixel 20 bytes
AT_ONCE = dict(cuda=2**26, cpu=2**22)

# An iterated function system becomes a class if 100,000 points fill at least 0.2 of the pixels of a 512 x 512 image.
FILLING, JUDGED_POINTS, JUDGED_SIZE = 0.2, 100_000, 512
COARSE_SIZE, COARSE_POINTS = 32, 4096
PROMISING = 0.3  # minimum share of coarse pixels that a candidate class must fill to be rendered with more points
KEPT = 0.1  # minimum share of coarse pixels that an image must fill; otherwise, the image is sampled again
ATTEMPTS = 100  # maximum number of attempts to sample an image
MARGIN = 6 / 512  # width of the margin around a fractal, relative to the side of the image
CLUTTER_SYSTEMS = 256
LARGEST = 4096  # maximum image side in pixels, because larger pixel indices are not exact in float32
GREY, QUALITY = 127, 90
COLOURS = 1 + MOST_MAPS  # number of colours per class: one for the background and one per affine map

SPLITS = ("train", "validation", "test")
# The key of each random number generator begins with the seed and one of the following purposes.
CLASSES, CLUTTER, CHOICES, PALETTES, FIRST_SPLIT = range(5)


@dataclass(frozen=True)
class Fractals:
    """Options of a data set of fractals. On one device, equal options give equal images.

    Attributes:
        classes: Number of classes.
        per_class: Number of training images of each class.
        val_per_class: Number of validation images of each class.
        test_per_class: Number of images of each class in a third split, which neither training nor model selection
            has seen.
        seed: Seed of classes and images, at least 0.
        size: Side of the images in pixels.
        points: Number of points of the chaos game in each image.
        variation: Every coefficient of a class is multiplied by a sample from [1 - variation, 1 + variation]; 0 to 1.
        clutter: Number of smaller pieces of other systems behind the fractal.
        placement: Whether to rotate the fractal, shrink its rotated bounding square to at least half of the image, and
            move it inside the image.
        colours: None for grey on black. Otherwise each class has a colour for each map and for the background, and an
            image's colours differ from the class's by up to this share of the range of each channel; 0 to 1.
    """

    classes: int = 1000
    per_class: int = 1000
    val_per_class: int = 50
    test_per_class: int = 0
    seed: int = 0
    size: int = 256
    points: int = 100_000
    variation: float = 0.2
    clutter: int = 0
    placement: bool = False
    colours: float | None = None

    def __post_init__(self):
        least = dict(classes=1, per_class=1, val_per_class=1, test_per_class=0, seed=0, size=16, points=1, clutter=0)
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if self.size > LARGEST:
            raise ConfigError(f"size must be at most {LARGEST}, got {self.size}")
        for name in ("variation", "colours"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)}")

    def images(self, split: str) -> int:
        """Return the number of images per class in the split `split`."""
        return dict(zip(SPLITS, (self.per_class, self.val_per_class, self.test_per_class)))[split]


def draw_systems(count: int, seed: int, purpose: int = CLASSES, device: torch.device | str = "cpu") -> np.ndarray:
    """Sample iterated function systems whose points fill an image. A larger `count` only appends systems.

    Args:
        count: Number of systems.
        seed: Seed of the random numbers.
        purpose: CLASSES for the systems of classes, or CLUTTER for the systems of clutter.
        device: Device that renders the candidate systems.

    Returns:
        (count, M, 7) float64: a, b, c, d, e, f of the maps x, y -> a x + b y + e, c x + d y + f, and the probability of
        each map, which is 0 for missing maps.
    """
    random = np.random.default_rng(_key(seed, purpose))
    found: list[np.ndarray] = []
    while len(found) < count:
        maps = random.uniform(-1, 1, (256, MOST_MAPS, 6))
        exists = np.arange(MOST_MAPS) < random.integers(2, MOST_MAPS + 1, (256, 1))
        starts = random.integers(TABLE, size=256)
        systems = _with_probabilities(np.where(exists[..., None], maps, 0))
        coarse = filling_rate(play(systems, starts, COARSE_POINTS, seed, device)[0], COARSE_SIZE)
        promising = (coarse >= PROMISING).numpy(force=True)
        systems, starts = systems[promising], starts[promising]
        for rows in _pieces(len(systems), at_once(JUDGED_POINTS, JUDGED_SIZE, device)):
            points_BN2, _ = play(systems[rows], starts[rows], JUDGED_POINTS, seed, device)
            fills = (filling_rate(points_BN2, JUDGED_SIZE) >= FILLING).numpy(force=True)
            found.extend(systems[rows][fills])
    return np.stack(found[:count])


def _with_probabilities(maps_BM6: np.ndarray) -> np.ndarray:
    a, b, c, d = np.moveaxis(maps_BM6[..., :4], -1, 0)
    areas_BM = np.abs(a * d - b * c)
    return np.concatenate([maps_BM6, (areas_BM / areas_BM.sum(1, keepdims=True))[..., None]], axis=-1)


def vary(systems_BM7: np.ndarray, uniform_BM6: np.ndarray, variation: float) -> np.ndarray:
    """Multiply each coefficient of the function systems by a weight from [1 - variation, 1 + variation].

    The maps keep their probabilities, as in the code of FractalDB's authors.

    Args:
        systems_BM7: Systems of `draw_systems`.
        uniform_BM6: Random numbers in [0, 1) that determine the weights.
        variation: Largest relative change of a coefficient, at least 0.
    """
    weights_BM6 = 1 + variation * (2 * uniform_BM6 - 1)
    varied = np.broadcast_to(systems_BM7, (*weights_BM6.shape[:2], 7)).copy()
    varied[..., :6] *= weights_BM6
    return varied


@functools.lru_cache(maxsize=4)
def choices(seed: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the uniform random numbers (length,) in [0, 1) by which the chaos game selects maps, as float32.

    A larger `length` only appends numbers.
    """
    random = np.random.default_rng(_key(seed, CHOICES))
    return torch.from_numpy(random.random(length, dtype=np.float32)).to(device)


def play(
    systems_BM7: np.ndarray, starts_B: np.ndarray, points: int, seed: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Run K chains of the chaos game per system, and return their points without the first `BURN_IN` steps.

    All chains start at (0, 0). Step t of chain k applies the first map whose cumulative probability is at least the
    random number at position start + t K + k of the table.

    Args:
        systems_BM7: Systems of `draw_systems`.
        starts_B: Start positions of the systems in the table, integers below `TABLE`.
        points: Number of points N.
        seed: Seed of the table.
        device: Device of the computation.

    Returns:
        Points (B, N, 2) float32 as x and y, ordered by step and not finite if the system diverges; and the index of the
        map that created each point, (B, N) uint8.
    """
    B, M, _ = systems_BM7.shape
    steps = -(-points // CHAINS)
    sums_BM = torch.from_numpy(systems_BM7[..., 6]).cumsum(1)
    # Normalize the cumulative probabilities, because rounding could leave the last one below a random number in [0, 1).
    sums_BM = sums_BM.div_(sums_BM[:, -1:].clone()).to(device, torch.float32)
    # An affine map is stored as rows (a, c), (b, d) and (e, f), which are multiplied by x, y and 1.
    maps = torch.from_numpy(systems_BM7[..., [0, 2, 1, 3, 4, 5]]).to(device, torch.float32).reshape(B * M, 6)
    first_B1 = torch.arange(0, B * M, M, device=device)[:, None]
    windows = choices(seed, TABLE + (BURN_IN + steps) * CHAINS, device).unfold(0, CHAINS, 1)
    at_B = torch.from_numpy(starts_B).to(device)

    kept = torch.empty(B, steps, CHAINS, 2, device=device)
    made_by = torch.empty(B, steps, CHAINS, dtype=torch.uint8, device=device)
    point_BK2 = torch.zeros(B, CHAINS, 2, device=device)
    for step in range(BURN_IN + steps):
        chosen_BK = torch.searchsorted(sums_BM, windows[at_B + step * CHAINS])
        out = None
        if step >= BURN_IN:
            out = kept[:, step - BURN_IN]
            made_by[:, step - BURN_IN] = chosen_BK
        map_BK32 = maps[chosen_BK.add_(first_B1)].view(B, CHAINS, 3, 2)
        point_BK2 = _apply(map_BK32, point_BK2, out)
    return kept.view(B, -1, 2)[:, :points], made_by.view(B, -1)[:, :points]


def _apply(maps: Tensor, points: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply affine maps (..., 3, 2) to points (..., 2)."""
    across = torch.addcmul(maps[..., 2, :], maps[..., 0, :], points[..., :1])
    return torch.addcmul(across, maps[..., 1, :], points[..., 1:], out=out)


def filling_rate(points_BN2: Tensor, size: int) -> Tensor:
    """Return each image's share of size x size pixels with at least one point, or 0 if a point is not finite."""
    B, device = len(points_BN2), points_BN2.device
    index_BN, finite_B = _pixels(points_BN2, torch.eye(3, 2, device=device).expand(B, 3, 2), size)
    hits = torch.zeros(B, size * size, dtype=torch.bool, device=device).scatter_(1, index_BN, True)
    return hits.mean(1, dtype=torch.float32) * finite_B


def render(points_BN2: Tensor, maps_BN: Tensor, frames_B32: Tensor, masks_B33: Tensor, size: int) -> Tensor:
    """Draw a 3x3 patch around each point. In overlapping patches, the affine map with the largest index wins.

    Args:
        points_BN2: Points of `play`. Their bounding box becomes the square from -1 to 1.
        maps_BN: Map indices of `play`.
        frames_B32: Affine map of the square from -1 to 1: the images of (1, 0) and (0, 1) minus the image of the
            origin, and the image of the origin as the last row. Points inside the square are drawn inside the margin.
        masks_B33: Boolean patch that is drawn around each point.
        size: H and W.

    Returns:
        (B, H, W) uint8: 0 for the background, otherwise 1 plus the largest index of a map that drew there. y points
        down, and points outside the image are drawn on its edge. Images with points that are not finite are empty.
    """
    index_BN, finite_B = _pixels(points_BN2, frames_B32, size)
    hits = torch.zeros(len(points_BN2), size * size, dtype=torch.int32, device=points_BN2.device)
    # The maximum makes the result independent of the order of the points.
    hits.scatter_reduce_(1, index_BN, maps_BN.int().add_(1), "amax")
    hits_BHW = hits.to(torch.uint8).view(-1, size, size) * finite_B[:, None, None]
    padded = torch.nn.functional.pad(hits_BHW, (1, 1, 1, 1))
    drawn_BHW = torch.zeros_like(hits_BHW)
    for down, right in itertools.product(range(3), range(3)):
        moved_BHW = padded[:, 2 - down : 2 - down + size, 2 - right : 2 - right + size]
        drawn_BHW = torch.maximum(drawn_BHW, moved_BHW * masks_B33[:, down, right, None, None])
    return drawn_BHW


def _pixels(points_BN2: Tensor, frames_B32: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the row-major pixel index of each point (B, N), and whether all points of an image are finite (B,)."""
    low_B2, high_B2 = torch.aminmax(points_BN2, dim=1)
    finite_B = (high_B2 - low_B2).isfinite().all(1)
    margin = MARGIN * size
    half = size / 2 - margin
    scale_B2 = 2 / (high_B2 - low_B2).clamp(min=torch.finfo(torch.float32).tiny)
    # Compose the affine maps from the bounding box to the square, from the square to the frame, and to pixels.
    linear_B22 = frames_B32[:, :2] * half
    offset_B2 = frames_B32[:, 2] * half + size / 2
    linear_B22 = linear_B22 * scale_B2[..., None]
    middle_B2 = (low_B2 + high_B2) / 2
    offset_B2 = offset_B2 - (linear_B22 * middle_B2[..., None]).sum(1)
    maps_B132 = torch.cat([linear_B22, offset_B2[:, None]], dim=1)[:, None]
    pixels_BN2 = _apply(maps_B132, points_BN2).nan_to_num_().clamp_(0, size - 1).floor_()
    return torch.add(pixels_BN2[..., 0], pixels_BN2[..., 1], alpha=size).long(), finite_B


class Place(NamedTuple):
    """Position of an image in the data set."""

    split: str
    number: int  # index of the image's class
    image: int  # index of the image within the class and split


def render_images(
    systems: np.ndarray,
    clutter: np.ndarray,
    fractals: Fractals,
    places: Sequence[Place],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Render images. Each image is independent of the other images in the call.

    Args:
        systems: Systems of all classes, (classes, M, 7), as returned by `draw_systems`.
        clutter: Systems of the small fractals behind each fractal, (any number, M, 7).
        fractals: Options of the data set.
        places: Positions of the B images in the data set.
        device: Device that renders the images.

    Returns:
        (B, H, W, 3) uint8 on the device.

    Raises:
        ConfigError: An image of a class is still almost empty after `ATTEMPTS` attempts.
    """
    f, B = fractals, len(places)
    points = _points_that_fill(systems, f, places, device)
    uniform = _uniform(f.seed, places, 1, 7 + 3 * COLOURS)
    patch, flips, placement, shades = np.split(uniform, [1, 3, 7], axis=1)
    bits = (1 + np.floor(patch * 511).astype(np.int64)) >> np.arange(9) & 1
    masks_B33 = torch.from_numpy(bits.reshape(-1, 3, 3).astype(bool)).to(device)
    frames_B32 = _frames(placement, 0.5, 1) if f.placement else np.tile(np.eye(3, 2), (B, 1, 1))
    # Changing the signs of the frame's axes flips the fractal before the rotation.
    frames_B32[:, :2] *= np.where(flips < 0.5, -1, 1)[..., None]
    drawn_BHW = render(*points, _to_device(frames_B32, device), masks_B33, f.size)

    palettes_BC3 = _palettes(f, places, shades.reshape(B, COLOURS, 3), device)
    images = palettes_BC3[:, :1, None]
    for piece in _uniform(f.seed, places, 2, 9 * f.clutter).reshape(B, f.clutter, 9).swapaxes(0, 1):
        images = _over(images, *_piece(piece, clutter, f, masks_B33, device))
    return _over(images, drawn_BHW, palettes_BC3)


def _uniform(
    seed: int, places: Sequence[Place], part: int, width: int, attempts: Iterable[int] = itertools.repeat(0)
) -> np.ndarray:
    """Return random numbers (B, width) in [0, 1) that differ by image, by purpose (`part`) and by attempt."""
    found = np.empty((len(places), width))
    rows_of = defaultdict(list)
    for row, (place, attempt) in enumerate(zip(places, attempts)):
        rows_of[place.split, place.number, attempt].append(row)
    for (split, number, attempt), rows in rows_of.items():
        images = [places[row].image for row in rows]
        random = np.random.default_rng(_key(seed, FIRST_SPLIT + SPLITS.index(split), number, attempt, part))
        found[rows] = random.random((max(images) + 1, width))[images]
    return found


def _points_that_fill(
    systems: np.ndarray, f: Fractals, places: Sequence[Place], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Vary the function system of each image's class, and return the points and map indices of the chaos game.

    A variation whose points fill almost nothing is sampled again.
    """
    numbers_B = np.array([place.number for place in places])
    attempts_B, weights = np.zeros(len(places), dtype=np.int64), MOST_MAPS * 6

    def play_some(rows: np.ndarray, points: int) -> tuple[Tensor, Tensor]:
        uniform = _uniform(f.seed, [places[row] for row in rows], 0, weights + 1, attempts_B[rows].tolist())
        varied = vary(systems[numbers_B[rows]], uniform[:, :weights].reshape(-1, MOST_MAPS, 6), f.variation)
        return play(varied, (uniform[:, weights] * TABLE).astype(np.int64), points, f.seed, device)

    for points in (COARSE_POINTS, f.points):  # a first pass with few points finds most empty images at low cost
        failed = np.arange(len(places))
        points_BN2, maps_BN = judged, _ = play_some(failed, points)
        while len(failed := failed[(filling_rate(judged, COARSE_SIZE) < KEPT).numpy(force=True)]):
            attempts_B[failed] += 1
            if attempts_B.max() == ATTEMPTS:
                raise ConfigError(
                    f"class {numbers_B[attempts_B.argmax()]} has an empty image after {ATTEMPTS} attempts: set a "
                    f"--variation below {f.variation}, or --points above {f.points}"
                )
            judged, made_by = play_some(failed, points)
            rows_B = torch.from_numpy(failed).to(device)
            points_BN2[rows_B], maps_BN[rows_B] = judged, made_by
    return points_BN2, maps_BN


def _piece(
    uniform_B9: np.ndarray, clutter: np.ndarray, f: Fractals, masks_B33: Tensor, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Render one small fractal per image. Return the result of `render`, and single-colour palettes (B, C, 3)."""
    which, shades, placement = np.split(uniform_B9, [2, 5], axis=1)
    others = clutter[(which[:, 0] * len(clutter)).astype(np.int64)]
    starts_B = (which[:, 1] * TABLE).astype(np.int64)
    points = play(others, starts_B, -(-f.points // 4), f.seed, device)
    drawn_BHW = render(*points, _to_device(_frames(placement, 0.2, 0.5), device), masks_B33, f.size)
    shades = np.floor(1 + GREY * shades[:, [0, 0, 0]] if f.colours is None else 256 * shades)
    return drawn_BHW, torch.from_numpy(shades.astype(np.uint8)).to(device)[:, None].expand(-1, COLOURS, 3)


def _over(images: Tensor, drawn_BHW: Tensor, palettes_BC3: Tensor) -> Tensor:
    """Paint a fractal (the result of `render`) over images or single-colour backgrounds. Return (B, H, W, 3) uint8."""
    index_BHW = drawn_BHW + torch.arange(0, palettes_BC3[..., 0].numel(), COLOURS, device=images.device)[:, None, None]
    return torch.where(drawn_BHW[..., None] > 0, palettes_BC3.flatten(0, 1)[index_BHW], images)


def _palettes(f: Fractals, places: Sequence[Place], uniform_BC3: np.ndarray, device: torch.device | str) -> Tensor:
    """Return each image's palette (B, C, 3) in uint8: the background colour, then one colour per affine map."""
    if f.colours is None:
        shades = np.zeros(uniform_BC3.shape)
        shades[:, 1:] = GREY
    else:
        numbers = [place.number for place in places]
        own = {n: np.random.default_rng(_key(f.seed, PALETTES, n)).random((COLOURS, 3)) for n in set(numbers)}
        moved = np.stack([own[number] for number in numbers]) + f.colours * (2 * uniform_BC3 - 1)
        shades = np.floor(255.99 * moved.clip(0, 1))
    return torch.from_numpy(shades.astype(np.uint8)).to(device)


def _frames(uniform_B4: np.ndarray, smallest: float, largest: float) -> np.ndarray:
    """Return affine maps (B, 3, 2) that rotate, scale and move a fractal's bounding square inside the image."""
    angle, size, *place = uniform_B4.T
    angle, size = 2 * np.pi * angle, smallest + (largest - smallest) * size
    cos, sin = np.cos(angle), np.sin(angle)
    x_axis, y_axis = np.stack([cos, sin], -1), np.stack([-sin, cos], -1)
    shrink = (size / (np.abs(cos) + np.abs(sin)))[:, None]
    offset = (2 * np.stack(place, -1) - 1) * (1 - size)[:, None]
    return np.stack([x_axis * shrink, y_axis * shrink, offset], axis=1)


def _to_device(frames: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(frames).to(device, torch.float32)


def at_once(points: int, size: int, device: torch.device | str) -> int:
    """Return the number of images of `size` x `size` pixels and `points` points to render at a time."""
    most = AT_ONCE.get(torch.device(device).type, AT_ONCE["cpu"])
    return max(1, most // max(points, CHAINS, size * size // 2))


def _pieces(count: int, most: int) -> Iterator[slice]:
    for start in range(0, count, most):
        yield slice(start, start + most)


def _key(seed: int, purpose: int, *rest: int) -> tuple[int, ...]:
    """Return a NumPy seed of five numbers, because NumPy treats seeds that differ only in trailing zeros as equal."""
    return (seed, purpose, *rest, *[0] * (3 - len(rest)))


def write_fractals(out: Path, fractals: Fractals, device: torch.device | str = "cpu") -> None:
    """Write `out`/{train,validation,test}/c*/*.jpg, the classes as `out`/systems.npy, and `out`/fractals.json.

    Classes that an interrupted run has completed are kept; each class folder is written atomically.

    Args:
        out: Output folder.
        fractals: Options of the data set.
        device: Device that renders the images.

    Raises:
        ConfigError: The folder has images with other options, the device is not available, or an image of a class is
            still almost empty after `ATTEMPTS` attempts.
        FolderInUseError: Another process writes to the folder.
        OSError: A file could not be written; the error names the file.
    """
    known_device(str(device))
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            _refuse_other_images(out, fractals)
            _write(out, fractals, device)
    except Timeout:
        raise FolderInUseError(
            f"another process is writing to {out}: wait until it ends, or choose another folder"
        ) from None


def _refuse_other_images(out: Path, fractals: Fractals) -> None:
    record, options = out / "fractals.json", asdict(fractals)
    if record.exists():
        there = json.loads(record.read_text())["options"]
        if different := [name for name in options if options[name] != there.get(name)]:
            raise ConfigError(
                f"{out} has images with other options: "
                + ", ".join(f"{name} must be {there.get(name)}, got {options[name]}" for name in different)
                + ". Set the same options or choose another folder"
            )
    elif foreign := sorted(path.name for path in out.iterdir() if not path.name.startswith(".")):
        raise ConfigError(f"{out} must be empty, but contains {', '.join(foreign[:5])}: choose a new folder")


def _write(out: Path, fractals: Fractals, device: torch.device | str) -> None:
    record, classes_file, unfinished = out / "fractals.json", out / "systems.npy", out / ".unfinished"
    about = dict(options=asdict(fractals), device=str(device), environment=environment())
    if not record.exists():
        write_atomically(record, json.dumps(about | {"images": 0}, indent=1))
    if not classes_file.exists():  # a resumed run keeps its classes, because another device might sample other classes
        print(f"{out}: drawing {fractals.classes} classes", flush=True)
        systems = draw_systems(fractals.classes, fractals.seed, CLASSES, device)
        write_atomically(classes_file, lambda file: np.save(file, systems))
    systems = np.load(classes_file, allow_pickle=False)
    clutter = draw_systems(CLUTTER_SYSTEMS, fractals.seed, CLUTTER, device) if fractals.clutter else systems[:0]

    digits = max(4, len(str(fractals.classes - 1)))
    folders = {
        (split, number): f"{split}/c{number:0{digits}}"
        for split in SPLITS for number in range(fractals.classes) if fractals.images(split)
    }  # fmt: skip
    total = sum(fractals.images(split) for split, _ in folders)
    missing = {key: name for key, name in folders.items() if not (out / name).exists()}
    shutil.rmtree(unfinished, ignore_errors=True)
    for (split, _), name in missing.items():
        (unfinished / name).mkdir(parents=True)
        (out / split).mkdir(exist_ok=True)
    _save_images(out, unfinished, missing, total, systems, clutter, fractals, device)
    if json.loads(record.read_text())["images"] != total:
        write_atomically(record, json.dumps(about | {"images": total}, indent=1))
    shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{out}: {total} images of {fractals.classes} classes" + ("" if missing else ", all there already"))


def _save_images(
    out: Path,
    unfinished: Path,
    folders: dict[tuple[str, int], str],
    total: int,
    systems: np.ndarray,
    clutter: np.ndarray,
    fractals: Fractals,
    device: torch.device | str,
) -> None:
    """Write the images of each class to its folder below `unfinished`, and move complete folders to `out`."""
    from tqdm import tqdm

    left = {key: fractals.images(key[0]) for key in folders}
    places = [Place(*key, image) for key, count in left.items() for image in range(count)]

    def save(pixels: np.ndarray, place: Place) -> Place:
        _save_jpeg(unfinished / folders[place[:2]] / f"{place.image:05d}.jpg", pixels)
        return place

    def wait_for(saved: Iterable[Place]) -> None:
        for place in saved:
            key = place[:2]
            left[key] -= 1
            if not left[key]:
                os.rename(unfinished / folders[key], out / folders[key])
            progress.update()

    with (
        tqdm(total=total, initial=total - len(places), unit=" images", unit_scale=True, desc=str(out)) as progress,
        ThreadPoolExecutor() as threads,
    ):
        saved: Iterable[Place] = ()
        try:
            for rows in _pieces(len(places), at_once(fractals.points, fractals.size, device)):
                images = render_images(systems, clutter, fractals, places[rows], device).numpy(force=True)
                wait_for(saved)  # images of the previous batch are saved while the next batch is rendered
                saved = threads.map(save, images, places[rows])
            wait_for(saved)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # leaving the `with` block waits for running writes
            raise


def _save_jpeg(path: Path, pixels: np.ndarray) -> None:
    try:
        with open(path, "w+b") as file:
            Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
            file.seek(-2, os.SEEK_END)
            if file.read() != b"\xff\xd9":  # Pillow does not notice partial writes, which lack the end-of-image marker
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = parser.add_argument, Fractals()
    add("out", type=Path)
    add("--classes", type=int, default=default.classes)
    add("--per-class", type=int, default=default.per_class, help="training images of each class")
    add("--val-per-class", type=int, default=default.val_per_class, help="validation images of each class")
    add("--test-per-class", type=int, default=default.test_per_class, help="images of each class in a third split")
    add("--seed", type=int, default=default.seed)
    add("--size", type=int, default=default.size, help="pixels a side")
    add("--points", type=int, default=default.points, help="points in each image; fewer are harder")
    add("--variation", type=float, default=default.variation, help="0 to 1: how much images of a class differ")
    add("--clutter", type=int, default=default.clutter, help="number of pieces of other fractals behind each fractal")
    add("--placement", action="store_true", help="rotate, shrink and move the fractal at random")
    add("--colours", type=float, metavar="SHARE", help="0 to 1: deviation of an image's colours (default: grey)")
    add("--device", default=default_device())
    options = vars(parser.parse_args(arguments))
    out, device = (options.pop(name) for name in ("out", "device"))
    try:
        write_fractals(out, Fractals(**options), device)
    except (ConfigError, FolderInUseError) as error:
        parser.exit(1, f"error: {error}\n")
    except OSError as error:
        parser.exit(1, f"error: {error}. Run the same command to resume\n")
    except KeyboardInterrupt:
        parser.exit(128 + signal.SIGINT, "\nstopped: run the same command to resume\n")


if __name__ == "__main__":
    main()
