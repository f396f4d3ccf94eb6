"""Fixtures for devices and image folders."""

import random

import numpy as np
import pytest
import torch
from pictures import CPU, PHOTOS, damage_tables, encode, without_adobes_mark
from PIL import Image


@pytest.fixture(params=[CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)], ids=str)
def device(request):
    return request.param


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Return a folder {train,val}/{x,y}/* of noisy colour gradients in the modes RGB, L, P, RGBA and CMYK."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for split, name in (("train", "x"), ("train", "y"), ("val", "x"), ("val", "y")):
        (root / split / name).mkdir(parents=True)
        for i, mode in enumerate(("RGB", "L", "P", "RGBA", "CMYK", "RGB", "RGB", "RGB")):
            corners = Image.fromarray(rng.integers(0, 256, (2, 2, 3), dtype=np.uint8))
            pixels = np.asarray(corners.resize((30 + i, 24 + 2 * i), Image.Resampling.BILINEAR)).astype(int)
            noisy = Image.fromarray((pixels + rng.integers(-30, 31, pixels.shape)).clip(0, 255).astype(np.uint8))
            noisy.convert(mode).save(root / split / name / f"{i}.{'jpg' if mode == 'CMYK' else 'png'}")
    return root


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory):
    """Return a folder {train,val}/{a,b} of photo crops as JPEG files, with unusual and damaged files in train."""
    root = tmp_path_factory.mktemp("photos")
    rng = random.Random(0)
    for split, photos in (("train", 16), ("val", 2)):
        for name, photo in zip("ab", PHOTOS):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(photos):
                left, top = rng.randrange(400), rng.randrange(200)
                crop = photo.crop((left, top, left + rng.randrange(60, 240), top + rng.randrange(60, 227)))
                (folder / f"{i}.jpg").write_bytes(encode(crop))
    for name, photo in zip("ab", PHOTOS):
        small = photo.resize((90, 60))
        whole = encode(small)
        odd = {
            "grey": encode(small.convert("L")),
            "full colour": encode(small, subsampling=0),
            "rgb": encode(small, keep_rgb=True),
            "wrong tables": damage_tables(whole),
            "progressive": encode(small, progressive=True),
            "cmyk": encode(small.convert("CMYK")),
            "cmyk, unmarked": without_adobes_mark(encode(small.convert("CMYK"))),
            "png": encode(small, format="PNG"),
            "truncated": whole[: len(whole) // 2],
            "no header": whole[:100],
        }
        for kind, content in odd.items():
            (root / "train" / name / f"{kind}.jpg").write_bytes(content)
    return root
