"""Tests of the EXIF orientation of images, and of HEIC files."""

import io
import json
import struct
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pictures import DATA_CONFIG, PHOTO, RECIPE, joined, seed_all, small_config
from PIL import Image, ImageOps
from timm.data import create_transform, del_img_extensions

import vil
from vil.data.device import encoded
from vil.data.loaders import evaluation_loader, training_loader
from vil.data.samplers import TrainingBatches
from vil.data.sources.image_files import HEIC_EXTENSIONS, list_images
from vil.data.sources.images import image_of, read_image
from vil.data.sources.splits import describe_split, open_splits
from vil.evaluation.settings import resolve_data
from vil.security.exif import exif_orientation
from vil.security.image_decoding import UnfitImageError, open_image

FORMATS = ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"]
ORIENTATION = 0x0112
OPTION = "--apply-exif-orientation"


def rotated_file(image, orientation, file_format="JPEG"):
    """Return an image file with an EXIF orientation."""
    tags, file = Image.Exif(), io.BytesIO()
    tags[ORIENTATION] = orientation
    tags[0x010F] = "a camera"
    image.save(file, file_format, exif=tags, quality=90)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Return a folder {train,val}/{a,b} of photos, of which each split has five with an orientation other than 1."""
    for split in ("train", "val"):
        for i, orientation in enumerate((1, 3, 6, 8, 5, 6)):
            path = tmp_path / split / "ab"[i % 2] / (f"{i}.png" if i == 5 else f"{i}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            photo = PHOTO.resize((80 + 10 * i, 70))
            path.write_bytes(rotated_file(photo, orientation, "PNG" if i == 5 else "JPEG"))
    return tmp_path


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", FORMATS)
def test_images_are_rotated_like_pillows_exif_transpose(file_format, orientation, tmp_path):
    data = rotated_file(PHOTO, orientation, file_format)
    (tmp_path / "image").write_bytes(data)
    transposed = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    as_stored = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(read_image(tmp_path / "image"), transposed)
    np.testing.assert_array_equal(image_of(data), as_stored)
    if file_format in ("JPEG", "PNG"):
        assert exif_orientation(data) == exif_orientation(data[:600]) == orientation


def tags(count, *entries, start=8):
    return b"II*\0" + struct.pack("<IH", start, count) + b"".join(struct.pack("<HHII", *entry) for entry in entries)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"II*\0", b"MM\0*\0\0\0\xff", tags(1, start=2**32 - 1), tags(0, (ORIENTATION, 3, 1, 6)), tags(9),
        tags(1, (ORIENTATION, 3, 1, 9)), tags(1, (ORIENTATION, 3, 1, 0)), tags(65535, *[(256, 2, 2**31, 8)] * 5000),
    ],
    ids=lambda content: repr(content[:16]),
)  # fmt: skip
def test_damaged_exif_tags_do_not_rotate_or_reject_an_image(content):
    file = io.BytesIO()
    PHOTO.save(file, "JPEG", exif=b"Exif\0\0" + content)
    assert exif_orientation(file.getvalue()) == 1
    assert image_of(file.getvalue(), is_upright=True).size == PHOTO.size
    file = io.BytesIO()
    PHOTO.save(file, "WEBP", exif=b"Exif\0\0" + content)
    assert image_of(file.getvalue(), is_upright=True).size == PHOTO.size


def transformed(path, transform, seed=None):
    """Apply timm's transform to an image file that PIL has rotated upright."""
    if seed is not None:
        seed_all(seed)
    return torch.as_tensor(transform(ImageOps.exif_transpose(Image.open(path)).convert("RGB")))


@pytest.mark.parametrize("small", [0, 2**24], ids=["encoded", "decoded by workers"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_loaders_rotate_images_if_the_option_is_set(folder, device, on_device, small, monkeypatch):
    monkeypatch.setattr(encoded, "SMALL", small)  # maximum number of pixels of images that workers decode
    config = small_config(
        folder, apply_exif_orientation=True, augment_on_device=on_device, global_batch_size=6, aug_repeats=0
    )
    train, val, classes = open_splits(config)
    of_val = joined(evaluation_loader(val, DATA_CONFIG, device, 0, 6, 0, 1, on_device))[0]
    batches = TrainingBatches(len(train), config, 6, 0, 1)
    batches.set_epoch(0)
    keys = [key for batch in batches for key in batch]
    of_train = joined(training_loader(train, config, DATA_CONFIG, device, batches, classes))[0]

    size = DATA_CONFIG["input_size"]
    augment = create_transform(size, is_training=True, use_prefetcher=True, mean=DATA_CONFIG["mean"], **RECIPE)
    expected = [transformed(folder / "train" / train.filename(index), augment, seed) for index, seed in keys]
    assert (of_train.float() - torch.stack(expected)).abs().mean() < 1
    resize = create_transform(use_prefetcher=True, **DATA_CONFIG)
    expected = [transformed(folder / "val" / val.filename(i), resize) for i in range(len(val))]
    assert (of_val.float() - torch.stack(expected)).abs().mean() < 1

    config = small_config(folder)
    as_stored = joined(evaluation_loader(open_splits(config)[1], DATA_CONFIG, device, 0, 6, 0, 1, on_device))[0]
    assert (as_stored.float() - torch.stack(expected)).abs().mean() > 5


def test_the_line_of_a_split_counts_the_rotated_files(folder):
    for applied, effect in ((False, f"is ignored without {OPTION}"), (True, "is applied")):
        _, val, _ = open_splits(small_config(folder, apply_exif_orientation=applied))
        assert describe_split("val", val).endswith(f"; 5 of 6 files specify an EXIF rotation, which {effect}")
    for path in (folder / "val").glob("*/*"):
        Image.open(path).save(path, exif=Image.Exif())
    assert "EXIF" not in describe_split("val", open_splits(small_config(folder))[1])


def test_a_photo_and_its_rotated_copy_have_equal_predictions(tmp_path):
    (tmp_path / "upright.png").write_bytes(rotated_file(PHOTO, 1, "PNG"))
    (tmp_path / "rotated.png").write_bytes(rotated_file(PHOTO.transpose(Image.Transpose.ROTATE_90), 6, "PNG"))
    files = [tmp_path / "upright.png", tmp_path / "rotated.png"]
    model = vil.VisionLonghorn(img_size=32, patch_size=8, embed_dim=32, depth=1, num_classes=5).eval()
    expected, _ = vil.predict(model, [np.asarray(PHOTO)] * 2)
    for images in (files, [Image.open(path) for path in files]):
        for found in vil.predict(model, images):
            assert [p.number for p in found] == [p.number for p in expected]
            assert [p.probability for p in found] == pytest.approx([p.probability for p in expected], abs=1e-5)


def test_validation_follows_the_option_of_the_run_unless_the_command_line_sets_it(folder):
    source = SimpleNamespace(options=dict(data_dir=str(folder), apply_exif_orientation=True))
    for given, used in ((None, True), (False, False)):
        assert resolve_data(None, None, "val", source, given).apply_exif_orientation is used
    assert resolve_data(str(folder), None, "val", None).apply_exif_orientation is False


@pytest.mark.parametrize("applied", [False, True])
def test_images_of_shards_are_rotated_if_the_option_is_set(folder, tmp_path, applied):
    pytest.importorskip("webdataset")
    paths = sorted((folder / "val").glob("*/*"))
    for split in ("train", "validation"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            for i, path in enumerate(paths):
                tar.add(path, f"{i}{path.suffix}")
                (tmp_path / "label").write_text(f"{i % 2}")
                tar.add(tmp_path / "label", f"{i}.cls")
    splits = {
        split: dict(name=split, num_samples=6, filenames=[f"{split}.tar"], shard_lengths=[6])
        for split in ("train", "validation")
    }
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
    config = small_config(tmp_path, dataset="wds/x", num_classes=2, apply_exif_orientation=applied)
    sizes = [image.size for image, _ in open_splits(config)[1]]
    opened = [Image.open(path) for path in paths]
    assert sizes == [(ImageOps.exif_transpose(image) if applied else image).size for image in opened]


def test_heic_files_are_read_with_pillow_heif(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    photo = PHOTO.resize((120, 80))
    heif.from_pillow(photo).save(tmp_path / "photo.heic", quality=95)
    (tmp_path / "more.HEIF").write_bytes((tmp_path / "photo.heic").read_bytes())
    difference = np.asarray(read_image(tmp_path / "photo.heic")).astype(int) - np.asarray(photo)
    assert np.abs(difference).mean() < 4
    assert len(list_images(str(tmp_path), str(tmp_path))) == 2


def test_heic_files_without_pillow_heif_cause_a_hint(tmp_path, caplog):
    with pytest.raises(UnfitImageError, match="HEIC images need the package pillow-heif: pip install pillow-heif"):
        open_image(io.BytesIO(b"\0\0\0\x18ftypheic" + bytes(100)))
    (tmp_path / "photo.heic").touch()
    del_img_extensions(HEIC_EXTENSIONS)
    assert not list_images(str(tmp_path), str(tmp_path))
    assert "left out 1 HEIC file in" in caplog.text
    assert "pip install pillow-heif" in caplog.text
