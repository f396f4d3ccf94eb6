"""A harder task than the digits that needs no download: capital letters, rendered over photographs, in unseen fonts.

    python benchmarks/glyphs.py data/glyphs
    python benchmarks/seeds.py -c configs/glyphs.yaml

3,120 training and 1,300 validation images of 40x40 pixels, equally many of each of the 26 letters. The letters are
rendered: turned, sheared, of any size, place and colour, and partly transparent. The backgrounds are real: crops of the
two photographs that come with scikit-learn. Validation uses fonts of another family (Computer Modern) than training
(DejaVu and STIX, all from matplotlib), and the other half of each photograph. So this is a test of generalisation on
synthetic images; it says nothing about ImageNet.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 40
FONTS = {"train": ("DejaVuSans*.ttf", "DejaVuSerif*.ttf", "STIXGeneral*.ttf"), "validation": ("cm[rbst]*10.ttf",)}
LETTERS = {"train": 120, "validation": 50}  # images of each letter


def fonts(split: str) -> list[Path]:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    found = sorted(path for pattern in FONTS[split] for path in folder.glob(pattern))
    return [path for path in found if path.stem not in ("cmsy10", "cmtt10")]  # symbols; a typewriter like DejaVu's


def photographs(split: str) -> list[np.ndarray]:
    """One half of each photograph."""
    from sklearn.datasets import load_sample_images

    images = load_sample_images().images
    return [
        image[:, : image.shape[1] // 2] if split == "train" else image[:, image.shape[1] // 2 :] for image in images
    ]


def glyph(letter: str, font: Path, rng: np.random.Generator) -> Image.Image:
    """The letter as a mask, turned and sheared."""
    type_ = ImageFont.truetype(str(font), 64)
    mask = Image.new("L", (128, 128))
    ImageDraw.Draw(mask).text((64, 64), letter, fill=255, font=type_, anchor="mm")
    scale, shear = 128 / SIZE / rng.uniform(0.7, 1.3), rng.uniform(-0.4, 0.4, 2)
    matrix = scale * np.array([[1, shear[0]], [shear[1], 1]])
    centre = np.array([64, 64]) - matrix @ (SIZE / 2 + rng.uniform(-6, 6, 2))
    mask = mask.rotate(rng.uniform(-30, 30), Image.Resampling.BICUBIC)
    coefficients = (*matrix[0], centre[0], *matrix[1], centre[1])
    # from twice the size, so that a small letter is smoothed and not sampled
    fine = tuple(c / 2 if i % 3 < 2 else c for i, c in enumerate(coefficients))
    large = mask.transform((2 * SIZE, 2 * SIZE), Image.Transform.AFFINE, fine, Image.Resampling.BICUBIC)
    return large.resize((SIZE, SIZE), Image.Resampling.BOX)


def background(photographs: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    photograph = photographs[rng.integers(len(photographs))]
    side = int(rng.integers(SIZE, 3 * SIZE))
    top, left = (rng.integers(extent - side + 1) for extent in photograph.shape[:2])
    crop = Image.fromarray(photograph[top : top + side, left : left + side])
    return np.asarray(crop.resize((SIZE, SIZE), Image.Resampling.BOX), dtype=float)


def render(letter: str, font: Path, photographs: list[np.ndarray], rng: np.random.Generator) -> Image.Image:
    back = background(photographs, rng)
    colour = rng.uniform(0, 255, 3)
    while abs(colour.mean() - back.mean()) < 50:
        colour = rng.uniform(0, 255, 3)
    opacity = rng.uniform(0.6, 1.0) * np.asarray(glyph(letter, font, rng), dtype=float)[..., None] / 255
    return Image.fromarray(np.clip(back + opacity * (colour - back), 0, 255).astype(np.uint8))


def write_glyphs(root: Path) -> None:
    """Writes `root`/{train,validation}/{A..Z}/*.png, the same every time."""
    for number, (split, count) in enumerate(LETTERS.items()):
        rng, backs, faces = np.random.default_rng(number), photographs(split), fonts(split)
        for letter in string.ascii_uppercase:
            folder = root / split / letter
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                render(letter, faces[i % len(faces)], backs, rng).save(folder / f"{i:03d}.png")
        print(f"{root / split}: {26 * count} images, fonts {' '.join(path.stem for path in faces)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    write_glyphs(parser.parse_args().root)
