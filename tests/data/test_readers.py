"""Files in a loader's process: each becomes an image, bytes for a device to decode, or the next one if it is broken."""

import io
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from fixtures import CLASSES, TRAIN_IMAGES, VAL_IMAGES
from pictures import CPU, DATA_CONFIG, PHOTO, encode, joined, tensor
from PIL import Image
from timm.data import create_transform

from vil.config import ConfigError
from vil.data import encoded, readers
from vil.data.draws import DrawingTransform
from vil.data.encoded import EncodedImage, is_plain_jpeg
from vil.data.images import UNREADABLE, read_image
from vil.data.loaders import evaluation_loader, unreadable_images
from vil.data.readers import EncodedReader, ImageReader
from vil.data.splits import open_split

ON_DEVICE = ("grey", "full colour", "wrong tables")  # of the odd kinds of files


def truncate(path):
    path.write_bytes(path.read_bytes()[:100])


def test_an_unreadable_image_is_named_counted_and_replaced_by_the_next(image_folder, tmp_path, caplog):
    """With the target of the image that takes its place; behind the last comes the first."""
    root = tmp_path / "images"
    shutil.copytree(image_folder, root)
    paths = sorted((root / "train").glob("*/*.png"), key=lambda path: (path.parent.name, int(path.stem)))
    broken, taking = (TRAIN_IMAGES - 1, 2 * TRAIN_IMAGES - 2, 2 * TRAIN_IMAGES - 1, len(paths) - 1), (1, 2, 2, 0)
    for index in broken:
        truncate(paths[index])
    train = open_split(str(root), "", "train", is_training=True)
    reader = ImageReader(train, lambda image: image, is_training=True)
    for index, target in zip(broken, taking):
        image, found = reader[index, 0]
        replacement = paths[target * TRAIN_IMAGES % len(paths)]
        assert found == target == CLASSES.index(replacement.parent.name)
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(replacement)))
        assert os.path.join(paths[index].parent.name, paths[index].name) in caplog.text
    assert reader.unreadable.count == 5  # two in a row make one be met twice
    assert [reader[index, 0][1] for index in (0, TRAIN_IMAGES, 2 * TRAIN_IMAGES)] == [0, 1, 2]
    for path in paths:
        truncate(path)
    with pytest.raises(ConfigError, match="no image of the training split can be read"):
        _ = reader[3, 0]


def test_evaluation_gets_a_blank_image_for_one_that_cannot_be_read(image_folder, tmp_path, caplog, monkeypatch):
    root = tmp_path / "images" / "val"
    shutil.copytree(image_folder / "val", root)
    truncate(root / "cat" / "2.png")
    content = (root / "cat" / "4.png").read_bytes()
    place = content.index(b"IDAT")
    (root / "cat" / "4.png").write_bytes(content[: place - 4] + bytes([0, 0, 0, 5]) + content[place:])  # a wrong length
    Image.new("RGB", (100, 100)).save(root / "dog" / "0.png")  # more than PIL takes for harmless
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1300)
    val = open_split(str(root.parent), "", "val")
    loader = evaluation_loader(val, DATA_CONFIG, CPU, 0, 5, 0, 1)
    images, targets = joined(loader)
    broken = [2 * VAL_IMAGES + 2, 2 * VAL_IMAGES + 4, 3 * VAL_IMAGES]
    assert [i for i, target in enumerate(targets) if target == UNREADABLE] == broken
    assert not images[broken].any()
    assert unreadable_images(loader) == 3
    assert all(os.path.join(*name) in caplog.text for name in (("cat", "2.png"), ("cat", "4.png"), ("dog", "0.png")))


@pytest.fixture
def encoded_reader(photo_folder):
    transform = create_transform(32, is_training=True, use_prefetcher=True, interpolation="bicubic")
    dataset = open_split(str(photo_folder), "", "train", is_training=True)
    return EncodedReader(dataset, transform, True, DrawingTransform(transform))


def test_what_a_device_can_decode_is_left_to_it(encoded_reader, monkeypatch):
    """But for small images, of any kind that is decoded without a guard: their pixels."""
    for i in range(len(encoded_reader)):
        image, path = encoded_reader[i, 0][0], encoded_reader.dataset.reader.samples[i][0]
        if isinstance(image, EncodedImage) and math.prod(image.size) <= encoded.SMALL:
            assert image.data == tensor(read_image(path)).contiguous().numpy().tobytes()
    monkeypatch.setattr(encoded, "SMALL", 0)
    for i in range(len(encoded_reader)):
        kind = Path(encoded_reader.dataset.filename(i)).stem
        is_encoded = isinstance(encoded_reader[i, 0][0], EncodedImage)
        assert is_encoded == (kind.isdigit() or kind in ON_DEVICE)


@pytest.mark.parametrize(("sampling", "known"), [(0x11, True), (0x21, True), (0x12, True), (0x22, True), (0x41, False)])
def test_colours_at_a_quarter_of_the_width_are_not_for_the_hardware(sampling, known):
    jpeg = bytearray(encode(PHOTO))
    first = jpeg.index(b"\xff\xc0") + 2 + 2 + 1 + 4 + 1  # of the components in the frame's header
    jpeg[first + 1] = sampling
    header = Image.open(io.BytesIO(jpeg))
    assert header.layer[0][1:3] == (sampling >> 4, sampling & 15)
    assert is_plain_jpeg(bytes(jpeg), header) == known


def test_a_split_is_judged_by_files_from_all_over_it(photo_folder):
    found = readers._sample(range(1000))
    assert len(found) == 32
    assert (found[0], found[-1]) == (0, 961)
    images = open_split(str(photo_folder), "", "val")
    pixels = [math.prod(Image.open(path).size) for path, _ in images.reader.samples]
    assert readers.typical_pixels(images) == sum(pixels) / len(pixels)
