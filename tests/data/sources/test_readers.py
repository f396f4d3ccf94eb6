"""Tests of readers, which run in workers and return pixels, or encoded bytes for the device to decode."""

import io
import math
import os
from pathlib import Path

import pytest
from pictures import PHOTO, encode, tensor
from PIL import Image
from timm.data import create_transform

from vil.data.device import encoded
from vil.data.device.encoded import EncodedImage, is_plain_jpeg
from vil.data.device.reader import EncodedReader
from vil.data.device.transform_parameters import TransformSampler
from vil.data.sources import readers
from vil.data.sources.images import read_image
from vil.data.sources.splits import open_split

ON_DEVICE = ("grey", "full colour", "wrong tables")  # unusual or damaged files that stay encoded for the device


@pytest.fixture
def encoded_reader(photo_folder):
    transform = create_transform(32, is_training=True, use_prefetcher=True, interpolation="bicubic")
    dataset = open_split(str(photo_folder), "", "train", is_training=True)
    return EncodedReader(dataset, transform, True, TransformSampler(transform))


def test_files_that_a_device_can_decode_stay_encoded(encoded_reader, monkeypatch):
    """Readers return encoded bytes if the file seems to be a plain JPEG, but pixels if the image is small."""
    for i in range(len(encoded_reader)):
        image, path = encoded_reader[i, 0][0], encoded_reader.dataset.reader.samples[i][0]
        if isinstance(image, EncodedImage) and math.prod(image.size) <= encoded.SMALL:
            assert image.data == tensor(read_image(path)).numpy().tobytes()
    monkeypatch.setattr(encoded, "SMALL", 0)
    for i in range(len(encoded_reader)):
        kind = Path(encoded_reader.dataset.filename(i)).stem
        is_encoded = isinstance(encoded_reader[i, 0][0], EncodedImage)
        assert is_encoded == (kind.isdigit() or kind in ON_DEVICE)


@pytest.mark.parametrize("sampling", [0x11, 0x21, 0x12, 0x22, 0x41, 0x14])
def test_jpegs_with_quarter_size_chroma_are_not_decoded_in_hardware(sampling):
    jpeg = bytearray(encode(PHOTO))
    first = jpeg.index(b"\xff\xc0") + 2 + 2 + 1 + 4 + 1  # offset of the first component in the frame header
    jpeg[first + 1] = sampling
    header = Image.open(io.BytesIO(jpeg))
    assert header.layer[0][1:3] == (sampling >> 4, sampling & 15)
    assert is_plain_jpeg(bytes(jpeg), header) == (sampling not in (0x41, 0x14))
    for thumbnail in (b"", b"\xff\xd9"):
        assert not is_plain_jpeg(bytes(jpeg[:2]) + thumbnail + bytes(jpeg[2:-1]), header)  # the end is missing
    header.layers = 6  # simulates a file with two frames
    assert not is_plain_jpeg(bytes(jpeg), header)


def test_a_split_is_judged_by_files_sampled_from_the_whole_split(photo_folder, tmp_path):
    found = readers._sample(range(1000))
    assert len(found) == 32
    assert (found[0], found[-1]) == (0, 961)
    images = open_split(str(photo_folder), "", "val")
    pixels = [math.prod(Image.open(path).size) for path, _ in images.reader.samples]
    assert readers.typical_pixels(images) == sum(pixels) / len(pixels)
    (folder := tmp_path / "odd" / "a").mkdir(parents=True)
    for i, kind in enumerate(("JPEG", "PNG", "JPEG", "GIF", "JPEG")):
        (folder / f"{i}.jpg").write_bytes(encode(PHOTO.resize((9, 9)) if kind == "GIF" else PHOTO, format=kind))
    os.mkfifo(folder / "pipe.jpg")
    images = open_split(str(tmp_path), "", "odd")
    assert readers.has_jpegs(images)  # most of the images are JPEGs
    assert readers.typical_pixels(images) == math.prod(PHOTO.size)  # the mean excludes files that need the sandbox
