"""Tests of research/pretraining_images.py: which images are near-duplicates, and the joined folders."""

import tarfile

import numpy as np
import pytest
from PIL import Image
from processes import call

from research import pretraining_images
from research.pretraining_images import read_duplicates


def photograph(seed, size=(240, 180)):
    """Return an invented photograph: random colors on a coarse grid, enlarged."""
    grid = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC)


def square(image, pixels=64):
    """Return the central square of an image, as in Tiny ImageNet."""
    side, (width, height) = min(image.size), image.size
    box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
    return image.resize((pixels, pixels), Image.Resampling.BICUBIC, box)


def write(folder, images):
    for name, image in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name, "JPEG", quality=80)


@pytest.fixture
def folders(tmp_path):
    """Write two small data sets and a folder of test images, and return the paths of the three folders."""
    tinted = Image.merge("RGB", [channel.point(lambda value: value // 4) for channel in photograph(1).split()])
    tall = photograph(5).transpose(Image.Transpose.ROTATE_90)
    write(tmp_path / "tiny", {
        "train/n01/of_mini_test.JPEG": square(photograph(1)), "train/n01/dark.JPEG": square(tinted),
        "train/n01/new.JPEG": square(photograph(2)), "train/n02/of_other_test.JPEG": square(tall),
        "train/n02/of_choose.JPEG": square(photograph(6)), "choose/n01/of_mini_test.JPEG": square(photograph(1), 60),
        "choose/n01/new.JPEG": square(photograph(3)), "test/n01/test.JPEG": square(photograph(4)),
    })  # fmt: skip
    write(tmp_path / "mini", {
        "train/n02/of_tiny_test.jpg": photograph(4, (84, 84)), "train/n03/new.jpg": photograph(7, (84, 84)),
        "choose/n02/kept.jpg": photograph(6, (84, 84)), "test/n03/test.jpg": photograph(1, (84, 84)),
    })  # fmt: skip
    write(tmp_path / "other" / "test", {"a/b/test.jpg": tall})
    return tmp_path / "tiny", tmp_path / "mini", tmp_path / "other" / "test"


LEFT_OUT = {
    "train/n01/of_mini_test.JPEG": ("mini/test", "n03/test.jpg"),
    "choose/n01/of_mini_test.JPEG": ("mini/test", "n03/test.jpg"),
    "train/n02/of_tiny_test.jpg": ("tiny/test", "n01/test.JPEG"),
    "train/n02/of_other_test.JPEG": ("other/test", "a/b/test.jpg"),
    "train/n02/of_choose.JPEG": ("mini/choose", "n02/kept.jpg"),
}


def test_photographs_in_other_sizes_and_crops_are_left_out(folders, tmp_path, capsys):
    tiny, mini, other = folders
    call(pretraining_images.main, tiny, mini, tmp_path / "parts", "--test", other)
    rows = read_duplicates(tmp_path / "parts" / "near_duplicates.csv.gz")
    assert {row.image: (row.folder, row.held_out) for row in reversed(rows)} == LEFT_OUT
    assert all(row.correlation > 0.9 for row in rows)
    with tarfile.open(tmp_path / "parts" / "part-0.tar.gz") as tar:
        packed = {member.name: tar.extractfile(member).read() for member in tar}
    files = [file for folder in (tiny, mini) for file in folder.glob("*/*/*")]
    whole = {"/".join(file.parts[-3:]): file.read_bytes() for file in files}
    assert packed == {name: data for name, data in whole.items() if name not in LEFT_OUT}
    lines = capsys.readouterr().out.splitlines()
    assert "| mini/test | 1 | 0 | 1 | 0 |" in lines
    assert "| all together | 3 | 1 | 1 | 0 |" in lines
    assert "train: 3 images" in lines


def test_an_existing_folder_is_not_overwritten(folders, tmp_path):
    tiny, mini, _ = folders
    with pytest.raises(SystemExit, match="must not exist"):
        call(pretraining_images.main, tiny, mini, tmp_path)
