"""Images of fractals as a folder of classes: training on as many as one likes, without a photograph.

    python -m vil.training.fractals data/fractals                         # 1,000 classes of 1,000 images, on a GPU
    python -m vil.training.fractals data/few --classes 10 --per-class 50 --val-per-class 10 --points 10000
    python -m vil.training.fractals data/hard --variation 0.4 --points 20000 --clutter 3 --placement --colours

Writes OUT/{train,validation}/{c0000,c0001,...}/*.jpg. A run that was stopped goes on where it was, by the same command.

A class is an iterated function system: a few affine maps of the plane, of which the chaos game applies one at a time,
drawn at random, to a point. Its images are of systems near it. As FractalDB's paper (Kataoka et al., "Pre-training
without Natural Images", ACCV 2020) and its authors' code have it: 2 to 8 maps (their code stops at 7) with coefficients
uniform in [-1, 1], applied with probabilities in proportion to |det|; a system is a class if 100,000 points fill at
least 0.2 of 512 x 512 pixels; points are scaled to the image, each axis by itself, with a margin of 6 pixels in 512,
drawn as 3x3 patches of grey 127 on black, and flipped. Not so: their 1,000 images of a class are 25 weights of it, one
parameter of all its maps at a time, by 4 flips, by 10 draws of patches; here every coefficient of every image has a
weight of its own, as in 1p-frac (2024). An image has one patch, where their code draws one for every point. Many short
chains take the place of one long one, without the points before they come to the attractor. An image whose points fill
next to nothing, as where its maps no longer contract, is drawn again. Clutter, placement and colours are ours, and off
unless asked for.

Classes and images follow from the seed, whatever the number of processes and however often a run was stopped. A GPU and
a CPU round differently: a few pixels differ, and so may a class or an image that is just at a threshold.

    B  images             M  maps, the most of a system     H, W  pixels
    N  points             K  chains of the chaos game       P  images of a class
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from PIL import Image
from torch import Tensor

from ..info import environment
from .config import ConfigError
from .files import FolderInUseError, write_atomically

MOST_MAPS = 8
CHAINS = 512
BURN_IN = 50  # steps of a chain from (0, 0) until its points count
TABLE = 2**22  # places at which a chaos game may start to read the table of random numbers
POINTS_AT_ONCE = dict(cuda=2**26, cpu=2**22)  # a process needs some 40 bytes of memory for each

FILLING, JUDGED_POINTS, JUDGED_SIZE = 0.2, 100_000, 512  # of a class
COARSE_SIZE, COARSE_POINTS = 32, 4096
# of coarse cells: for a candidate to be judged (of 62 classes none had less than 0.44) and an image to be kept
PROMISING, KEPT = 0.3, 0.1
ATTEMPTS = 100  # at an image
MARGIN = 6 / 512  # of the image's side
CLUTTER_SYSTEMS = 256
GREY, QUALITY = 127, 90

SPLITS = ("train", "validation")
# what random numbers are for: the first part of their key after the seed
CLASSES, CLUTTER, CHOICES, FIRST_SPLIT = range(4)


@dataclass(frozen=True)
class Fractals:
    """What a folder holds; the same values give the same images.

    Attributes:
        classes: Their number.
        per_class: Training images of each.
        val_per_class: Validation images of each.
        seed: Of classes and images, at least 0.
        size: Of images, in pixels a side.
        points: Of the chaos game, an image.
        variation: Every coefficient of a class is times a draw from [1 - variation, 1 + variation]; 0 to 1.
        clutter: How many smaller pieces of systems that are no classes are behind the fractal.
        placement: Whether the fractal is rotated, down to half its size and anywhere in the image.
        colours: Whether fractal, clutter and background have random colours, not grey on black.
    """

    classes: int = 1000
    per_class: int = 1000
    val_per_class: int = 50
    seed: int = 0
    size: int = 256
    points: int = 100_000
    variation: float = 0.2
    clutter: int = 0
    placement: bool = False
    colours: bool = False

    def __post_init__(self):
        least = dict(classes=1, per_class=1, val_per_class=1, seed=0, size=16, points=1, clutter=0)
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name} is {getattr(self, name)} but must be at least {value}")
        if not 0 <= self.variation <= 1:
            raise ConfigError(f"variation is {self.variation} but must be between 0 and 1")

    def images(self, split: str) -> int:
        """Of a class."""
        return self.per_class if split == "train" else self.val_per_class


def draw_systems(count: int, seed: int, purpose: int = CLASSES, device: torch.device | str = "cpu") -> np.ndarray:
    """Random systems that fill their image, the first ones the same for any `count`.

    Args:
        count: How many.
        seed: Their seed.
        purpose: CLASSES, or CLUTTER for others.
        device: Where candidates are rendered.

    Returns:
        (count, M, 7) float64: a, b, c, d, e, f of the maps x, y -> a x + b y + e, c x + d y + f, and the probability of
        each, which is 0 for maps that a system does not have.
    """
    random = np.random.default_rng(_key(seed, purpose))
    found: list[np.ndarray] = []
    while len(found) < count:
        maps = random.uniform(-1, 1, (256, MOST_MAPS, 6))
        exists = np.arange(MOST_MAPS) < random.integers(2, MOST_MAPS + 1, (256, 1))
        starts = random.integers(TABLE, size=256)
        systems = _with_probabilities(np.where(exists[..., None], maps, 0))
        coarse = filling_rate(play(systems, starts, COARSE_POINTS, seed, device), COARSE_SIZE)
        promising = (coarse >= PROMISING).numpy(force=True)
        systems, starts = systems[promising], starts[promising]
        fills = [
            filling_rate(play(systems[rows], starts[rows], JUDGED_POINTS, seed, device), JUDGED_SIZE).numpy(force=True)
            for rows in _pieces(len(systems), JUDGED_POINTS, device)
        ]
        found.extend(systems[np.concatenate([[], *fills]) >= FILLING])
    return np.stack(found[:count])


def _with_probabilities(maps_BM6: np.ndarray) -> np.ndarray:
    a, b, c, d = np.moveaxis(maps_BM6[..., :4], -1, 0)
    areas_BM = np.abs(a * d - b * c)
    return np.concatenate([maps_BM6, (areas_BM / areas_BM.sum(1, keepdims=True))[..., None]], axis=-1)


def vary(systems_BM7: np.ndarray, uniform_BM6: np.ndarray, variation: float) -> np.ndarray:
    """Systems near others: every coefficient times a weight from [1 - variation, 1 + variation].

    The maps keep their probabilities, as in the code of FractalDB's authors.

    Args:
        systems_BM7: As of `draw_systems`.
        uniform_BM6: Random numbers in [0, 1) that make the weights.
        variation: At least 0.
    """
    weights_BM6 = 1 + variation * (2 * uniform_BM6 - 1)
    varied = np.broadcast_to(systems_BM7, (*weights_BM6.shape[:2], 7)).copy()
    varied[..., :6] *= weights_BM6
    return varied


@functools.lru_cache(maxsize=4)
def choices(seed: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """The random numbers, uniform in [0, 1), that say which map is next: (length,) float32, longer ones go on."""
    random = np.random.default_rng(_key(seed, CHOICES))
    return torch.from_numpy(random.random(length, dtype=np.float32)).to(device)


def play(
    systems_BM7: np.ndarray, starts_B: np.ndarray, points: int, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Points of the chaos game: K chains a system, all from (0, 0), after their first `BURN_IN` steps.

    Step t of chain k of a system takes the first map of which the sum of probabilities up to it is not below the number
    start + t K + k of the table.

    Args:
        systems_BM7: As of `draw_systems`.
        starts_B: Integers below `TABLE`: where each system starts to read the table.
        points: N, how many.
        seed: Of the table.
        device: Where to play.

    Returns:
        (B, N, 2) float32: x and y, not finite where they diverge. Those of a step are next to each other.
    """
    B, M, _ = systems_BM7.shape
    steps = -(-points // CHAINS)
    sums_BM = torch.from_numpy(systems_BM7[..., 6]).cumsum(1)
    sums_BM = sums_BM.div_(sums_BM[:, -1:].clone()).to(device, torch.float32)  # the last is 1, and all numbers below
    # rows (a, c, b, d, e, f): what x, y and 1 are multiplied by
    maps = torch.from_numpy(systems_BM7[..., [0, 2, 1, 3, 4, 5]]).to(device, torch.float32).reshape(B * M, 6)
    first_B1 = torch.arange(0, B * M, M, device=device)[:, None]
    windows = choices(seed, TABLE + (BURN_IN + steps) * CHAINS, device).unfold(0, CHAINS, 1)
    at_B = torch.from_numpy(starts_B).to(device)

    kept = torch.empty(B, steps, CHAINS, 2, device=device)
    point_BK2 = torch.zeros(B, CHAINS, 2, device=device)
    for step in range(BURN_IN + steps):
        chosen_BK = torch.searchsorted(sums_BM, windows[at_B + step * CHAINS])
        map_BK32 = maps[chosen_BK.add_(first_B1)].view(B, CHAINS, 3, 2)
        out = kept[:, step - BURN_IN] if step >= BURN_IN else None
        point_BK2 = _apply(map_BK32, point_BK2, out)
    return kept.view(B, -1, 2)[:, :points]


def _apply(maps: Tensor, points: Tensor, out: Tensor | None = None) -> Tensor:
    """Affine maps (..., 3, 2) of points (..., 2)."""
    across = torch.addcmul(maps[..., 2, :], maps[..., 0, :], points[..., :1])
    return torch.addcmul(across, maps[..., 1, :], points[..., 1:], out=out)


def filling_rate(points_BN2: Tensor, size: int) -> Tensor:
    """The share of pixels that have a point, in images of `size` pixels a side: (B,); 0 where a point is not finite."""
    return _hits(points_BN2, _identity(len(points_BN2), points_BN2.device), size).mean((1, 2), dtype=torch.float32)


def render(points_BN2: Tensor, frames_B32: Tensor, masks_B33: Tensor, size: int) -> Tensor:
    """Which pixels of an image points are drawn on.

    Args:
        points_BN2: As of `play`. Their bounding box becomes the square from -1 to 1.
        frames_B32: An affine map of that square: the images of (1, 0) and (0, 1), less that of the origin, which is the
            last row. What it leaves inside the square is inside the image and its margin.
        masks_B33: Of booleans, the patch that is drawn for a point, which is at its middle.
        size: H and W.

    Returns:
        (B, H, W) bool: y goes down, and what is outside is on the edge. Nothing where a point is not finite.
    """
    hits_BHW = _hits(points_BN2, frames_B32, size)
    padded = torch.nn.functional.pad(hits_BHW, (1, 1, 1, 1))
    drawn_BHW = torch.zeros_like(hits_BHW)
    for down, right in itertools.product(range(3), range(3)):
        moved_BHW = padded[:, 2 - down : 2 - down + size, 2 - right : 2 - right + size]
        drawn_BHW |= moved_BHW & masks_B33[:, down, right, None, None]
    return drawn_BHW


def _hits(points_BN2: Tensor, frames_B32: Tensor, size: int) -> Tensor:
    low_B2, high_B2 = torch.aminmax(points_BN2, dim=1)
    finite_B = (high_B2 - low_B2).isfinite().all(1)
    margin = MARGIN * size
    half = size / 2 - margin  # an extent of 0 is drawn at the low edge
    scale_B2 = 2 / (high_B2 - low_B2).clamp(min=torch.finfo(torch.float32).tiny)
    # the box to the square, the square by the frame, and that to pixels: one affine map
    linear_B22 = frames_B32[:, :2] * half
    offset_B2 = frames_B32[:, 2] * half + size / 2
    linear_B22 = linear_B22 * scale_B2[..., None]
    middle_B2 = (low_B2 + high_B2) / 2
    offset_B2 = offset_B2 - (linear_B22 * middle_B2[..., None]).sum(1)
    maps_B132 = torch.cat([linear_B22, offset_B2[:, None]], dim=1)[:, None]
    pixels_BN2 = _apply(maps_B132, points_BN2).nan_to_num_().clamp_(0, size - 1).floor_()
    index_BN = torch.add(pixels_BN2[..., 0], pixels_BN2[..., 1], alpha=size).long()
    hits = torch.zeros(len(points_BN2), size * size, dtype=torch.bool, device=points_BN2.device)
    hits.scatter_(1, index_BN, True)
    return hits.view(-1, size, size) & finite_B[:, None, None]


def _identity(count: int, device: torch.device) -> Tensor:
    return torch.eye(3, 2, device=device).expand(count, 3, 2)


def render_class(
    systems: np.ndarray,
    clutter: np.ndarray,
    fractals: Fractals,
    split: str,
    number: int,
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """The images of one class in a split, some at a time.

    Args:
        systems: Of all classes, (classes, M, 7), as of `draw_systems`.
        clutter: Systems to take pieces of, (any number, M, 7).
        fractals: What to make.
        split: "train" or "validation".
        number: Of the class.
        device: Where to render.

    Yields:
        (B, 3, H, W) uint8 on the CPU, P images in all.

    Raises:
        ConfigError: A class has next to no images at this variation.
    """
    f, count, system_M7 = fractals, fractals.images(split), systems[number]
    attempts_P = np.zeros(count, dtype=np.int64)

    @functools.cache
    def draws(part: int, attempt: int, width: int) -> np.ndarray:
        """A row for each image, so that an image does not depend on their number."""
        key = _key(f.seed, FIRST_SPLIT + SPLITS.index(split), number, attempt, part)
        return np.random.default_rng(key).random((count, width))

    def play_rows(rows: np.ndarray, points: int) -> Tensor:
        weights = MOST_MAPS * 6
        uniform = np.stack([draws(0, attempts_P[row], weights + 1)[row] for row in rows])
        varied = vary(system_M7[None], uniform[:, :weights].reshape(-1, MOST_MAPS, 6), f.variation)
        return play(varied, (uniform[:, weights] * TABLE).astype(np.int64), points, f.seed, device)

    def settle(rows: np.ndarray, points: int) -> Tensor:
        """Points of images, each drawn again until it fills something."""
        points_BN2 = judged = play_rows(rows, points)
        failed = np.arange(len(rows))
        while True:
            failed = failed[(filling_rate(judged, COARSE_SIZE) < KEPT).numpy(force=True)]
            if not len(failed):
                return points_BN2
            attempts_P[rows[failed]] += 1
            if attempts_P.max() == ATTEMPTS:
                raise ConfigError(
                    f"class {number} has an image that fills nothing after {ATTEMPTS} draws: choose a variation below "
                    f"{f.variation} or more than {f.points} points"
                )
            judged = play_rows(rows[failed], points)
            points_BN2[torch.from_numpy(failed).to(device)] = judged

    for piece in _pieces(count, COARSE_POINTS, device):  # finds most of those that do not, sooner
        settle(np.arange(count)[piece], COARSE_POINTS)

    look = draws(1, 0, 14)
    pieces = draws(2, 0, 9 * f.clutter).reshape(count, f.clutter, 9)
    for piece in _pieces(count, f.points, device):
        rows = np.arange(count)[piece]
        points_BN2 = settle(rows, f.points)
        patch, flips, place, colours = np.split(look[rows], [1, 3, 7], axis=1)
        bits = (1 + np.floor(patch * 511).astype(np.int64)) >> np.arange(9) & 1
        masks_B33 = torch.from_numpy(bits.reshape(-1, 3, 3).astype(bool)).to(device)
        frames_B32 = _frames(place, 0.5, 1) if f.placement else np.tile(np.eye(3, 2), (len(rows), 1, 1))
        frames_B32[:, :2] *= np.where(flips < 0.5, -1, 1)[..., None]  # of the axes before they are rotated

        front_B3, back_B3 = _colours(colours, f.colours)
        images = _fill(back_B3, device).expand(-1, -1, f.size, f.size)
        for i in range(f.clutter):
            which, shades, place = np.split(pieces[rows, i], [2, 5], axis=1)
            others = clutter[(which[:, 0] * len(clutter)).astype(np.int64)]
            starts_B = (which[:, 1] * TABLE).astype(np.int64)
            other_BN2 = play(others, starts_B, -(-f.points // 4), f.seed, device)
            drawn = render(other_BN2, _to_device(_frames(place, 0.2, 0.5), device), masks_B33, f.size)
            shades = np.floor(256 * shades) if f.colours else np.floor(1 + GREY * shades[:, :1]).repeat(3, 1)
            images = torch.where(drawn[:, None], _fill(shades, device), images)
        drawn = render(points_BN2, _to_device(frames_B32, device), masks_B33, f.size)
        yield torch.where(drawn[:, None], _fill(front_B3, device), images).cpu()


def _frames(uniform_B4: np.ndarray, smallest: float, largest: float) -> np.ndarray:
    """Frames (B, 3, 2) that turn the square by any angle, scale what it then covers, and put that anywhere inside."""
    angle, size, *place = uniform_B4.T
    angle, size = 2 * np.pi * angle, smallest + (largest - smallest) * size
    cos, sin = np.cos(angle), np.sin(angle)
    x_axis, y_axis = np.stack([cos, sin], -1), np.stack([-sin, cos], -1)
    shrink = (size / (np.abs(cos) + np.abs(sin)))[:, None]
    offset = (2 * np.stack(place, -1) - 1) * (1 - size)[:, None]
    return np.stack([x_axis * shrink, y_axis * shrink, offset], axis=1)


def _colours(uniform_B6: np.ndarray, coloured: bool) -> tuple[np.ndarray, np.ndarray]:
    """Of the fractal and of the background, which differs by 64 of 256 or more in every channel."""
    if not coloured:
        return np.full((len(uniform_B6), 3), GREY), np.zeros((len(uniform_B6), 3))
    front = np.floor(256 * uniform_B6[:, :3])
    return front, (front + 64 + np.floor(129 * uniform_B6[:, 3:6])) % 256


def _fill(colours_B3: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(colours_B3.astype(np.uint8)).to(device)[..., None, None]


def _to_device(frames: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(frames).to(device, torch.float32)


def _pieces(count: int, points: int, device: torch.device | str) -> Iterator[slice]:
    most = max(1, POINTS_AT_ONCE.get(torch.device(device).type, POINTS_AT_ONCE["cpu"]) // max(points, CHAINS))
    for start in range(0, count, most):
        yield slice(start, start + most)


def _key(seed: int, purpose: int, *rest: int) -> tuple[int, ...]:
    """Of one length, since NumPy takes keys that differ in zeros at the end for the same."""
    return (seed, purpose, *rest, *[0] * (3 - len(rest)))


def write_fractals(out: Path, fractals: Fractals, device: torch.device | str = "cpu", workers: int = 1) -> None:
    """Writes `out`/{train,validation}/c*/*.jpg, `out`/systems.npy with the classes, and `out`/fractals.json.

    What an interrupted run has completed is kept; a class is there whole or not at all.

    Args:
        out: The folder.
        fractals: What to write.
        device: Where to render.
        workers: Processes, each of which renders and writes classes.

    Raises:
        ConfigError: The folder holds other images, or as of `render_class`.
        FolderInUseError: Another run writes there.
    """
    if workers < 1:
        raise ConfigError(f"workers is {workers} but must be at least 1")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but PyTorch finds no GPU here: choose cpu")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            _write(out, fractals, device, workers)
    except Timeout:
        raise FolderInUseError(f"another process writes to {out}: wait for it, or choose another folder") from None


def _write(out: Path, fractals: Fractals, device: torch.device | str, workers: int) -> None:
    from tqdm import tqdm

    record, classes_file, unfinished = out / "fractals.json", out / "systems.npy", out / ".unfinished"
    options = asdict(fractals)
    if record.exists():
        there = json.loads(record.read_text())["options"]
        if different := [name for name in options if options[name] != there.get(name)]:
            raise ConfigError(
                f"{out} has images of other options: "
                + ", ".join(f"{name} {there.get(name)}, not {options[name]}" for name in different)
                + ". Give the same options or choose another folder"
            )
    elif foreign := sorted(path.name for path in out.iterdir() if path.name != ".lock"):
        raise ConfigError(f"{out} holds something else ({', '.join(foreign[:5])}): choose a new folder")
    about = dict(options=options, device=str(device), environment=environment())
    if not record.exists():
        write_atomically(record, json.dumps(about | {"images": 0}, indent=1))
    if not classes_file.exists():  # those of a run that is gone on with: another device might draw others
        systems = draw_systems(fractals.classes, fractals.seed, CLASSES, device)
        write_atomically(classes_file, lambda file: np.save(file, systems))
    systems = np.load(classes_file, allow_pickle=False)
    pool = draw_systems(CLUTTER_SYSTEMS, fractals.seed, CLUTTER, device) if fractals.clutter else systems[:0]

    shutil.rmtree(unfinished, ignore_errors=True)
    digits = max(4, len(str(fractals.classes - 1)))
    jobs = [(split, number, f"{split}/c{number:0{digits}}") for split in SPLITS for number in range(fractals.classes)]
    missing = [job for job in jobs if not (out / job[2]).exists()]
    total = fractals.classes * (fractals.per_class + fractals.val_per_class)
    done = total - sum(fractals.images(split) for split, *_ in missing)
    common = out, unfinished, systems, pool, fractals, device
    with tqdm(total=total, initial=done, unit=" images", unit_scale=True, desc=str(out)) as progress:
        if workers == 1:
            _set_up(*common)
            for job in missing:
                progress.update(_write_class(*job))
        else:
            context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
            started = context.Value("i", 0)
            processes = ProcessPoolExecutor(min(workers, len(missing) or 1), context, _set_up_alone, (started, *common))
            with processes:
                try:
                    for written in as_completed([processes.submit(_write_class, *job) for job in missing]):
                        progress.update(written.result())
                except BaseException:
                    processes.shutdown(wait=False, cancel_futures=True)
                    raise
    if missing:
        write_atomically(record, json.dumps(about | {"images": total}, indent=1))
    shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{out}: {total} images of {fractals.classes} classes" + ("" if missing else ", all there already"))


_common: tuple = ()  # of a process, so that it is not sent with every class


def _set_up(*common) -> None:
    global _common
    _common = common


def _set_up_alone(started, *common) -> None:
    torch.set_num_threads(1)  # there is a process for every core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the first one ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    *rest, device = common
    with started:
        turn, started.value = started.value, started.value + 1
    if str(device) == "cuda":  # any GPU: they share the work
        device = f"cuda:{turn % torch.cuda.device_count()}"
    _set_up(*rest, device)


def _end_with_parent() -> None:
    """A pool's processes would wait for ever when it is killed, and write into the folder of the next run."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _write_class(split: str, number: int, name: str) -> int:
    """Returns how many images it has written."""
    out, unfinished, systems, pool, fractals, device = _common
    folder = unfinished / name
    folder.mkdir(parents=True)
    written = 0
    for images in render_class(systems, pool, fractals, split, number, device):
        for pixels in images.permute(0, 2, 3, 1).numpy():
            Image.fromarray(pixels).save(folder / f"{written:05d}.jpg", quality=QUALITY)
            written += 1
    (out / split).mkdir(exist_ok=True)
    os.rename(folder, out / name)
    return written


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = parser.add_argument, Fractals()
    add("out", type=Path)
    add("--classes", type=int, default=default.classes)
    add("--per-class", type=int, default=default.per_class, help="training images of each class")
    add("--val-per-class", type=int, default=default.val_per_class, help="validation images of each class")
    add("--seed", type=int, default=default.seed)
    add("--size", type=int, default=default.size, help="pixels a side")
    add("--points", type=int, default=default.points, help="of an image; fewer are harder")
    add("--variation", type=float, default=default.variation, help="0 to 1: how much images of a class differ")
    add("--clutter", type=int, default=default.clutter, help="pieces of unlabelled fractals behind")
    add("--placement", action="store_true", help="turn, shrink and move the fractal at random")
    add("--colours", action="store_true", help="random colours, not grey on black")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=cores, help="processes")
    options = vars(parser.parse_args(arguments))
    out, device, workers = (options.pop(name) for name in ("out", "device", "workers"))
    try:
        write_fractals(out, Fractals(**options), device, workers)
    except (ConfigError, FolderInUseError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
