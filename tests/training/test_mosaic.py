"""Tests of the mosaic of augmented images that a run writes at its start."""

import logging
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from figures import kept_figures
from PIL import Image
from timm.data.mixup import mixup_target

from vil.config import Config
from vil.data.device.augmentation import BatchAugmentation
from vil.data.device.batched_transforms import finish
from vil.training.mosaic import COLUMNS, ROWS, Mosaic
from vil.training.trainer import Trainer

DATA = dict(mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3))
NAMES = ["ant", "bee\n$", "a class with a long name"]
MODEL = dict(model="vil_tiny", model_kwargs=dict(embed_dim=16, depth=1, patch_size=8), img_size=16, workers=0)


def mosaic(folder, smoothing=0.1, rank=0, names=NAMES):
    run = SimpleNamespace(folder=folder, label_names=names, phase=SimpleNamespace(config=Config(smoothing=smoothing)))
    return Mosaic(run, DATA, rank)


def tiles(figure):
    return [(axis.get_title(), axis.get_images()[0].get_array()) for axis in figure.axes if axis.get_images()]


@pytest.mark.parametrize("size", [(16, 16), (24, 12)])
def test_the_first_images_are_shown_without_normalization_and_later_ones_are_ignored(size, tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    pixels = torch.randint(256, (48, 3, *size), dtype=torch.uint8)
    targets = torch.arange(48) % 3
    written = mosaic(tmp_path)
    for rows in (slice(20), slice(20, 40), slice(40, 48)):
        written.add(finish(pixels[rows], DATA["mean"], DATA["std"]), targets[rows])
        assert (tmp_path / "augmented.png").exists() == (rows.stop >= ROWS * COLUMNS)
    (figure,) = figures
    assert figure.saved_to == ""  # the PNG is made in memory and written once
    shown = tiles(figure)
    assert [title for title, _ in shown] == [("ant", "bee?$", "a class with a l")[n % 3] for n in range(32)]
    for (_, image), truth in zip(shown, pixels):
        np.testing.assert_allclose(255 * np.asarray(image), truth.permute(1, 2, 0), atol=1e-3)
    assert Image.open(tmp_path / "augmented.png").width == 1200


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_mixed_images_show_both_classes_with_their_shares(smoothing, tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    shares = torch.linspace(0.51, 1, 32)[:, None]
    one, other = (mixup_target(torch.full((32,), n), 3, smoothing=smoothing) for n in (0, 2))
    targets = one * shares + other * (1 - shares)
    mosaic(tmp_path, smoothing).add(torch.zeros(32, 3, 8, 8), targets)
    titles = [title for title, _ in tiles(figures[0])]
    for title, share in zip(titles[:-1], shares):
        assert title == f"ant {float(share):.0%}\na class with a l {1 - float(share):.0%}"
    assert titles[-1] == "ant"


def test_the_labels_agree_with_the_mixing_of_a_batch(tmp_path, monkeypatch):
    """Class n has images of the grey level 100 n, so the level of a mixed image follows from its label."""
    figures = kept_figures(monkeypatch)
    config = Config(mixup=1.0, cutmix=0.0, reprob=0.0, smoothing=0.1)
    targets = torch.arange(32) % 3
    pixels = (100 * targets.to(torch.uint8))[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    augment = BatchAugmentation(config, 3, DATA)
    mosaic(tmp_path).add(*augment(pixels, targets, augment.sample(32, 8, 8, 0, 0)))
    levels = {"ant": 0, "bee?$": 100, "a class with a l": 200}
    shown = tiles(figures[0])
    assert any("\n" in title for title, _ in shown)
    for title, image in shown:
        parts = [line.rpartition(" ") for line in title.split("\n")] if "%" in title else [(title, "", "100%")]
        level = sum(levels[name] * float(share.rstrip("%")) / 100 for name, _, share in parts)
        assert 255 * float(image.mean()) == pytest.approx(level, abs=2.5)


def test_a_run_with_few_images_writes_them_at_its_end_without_empty_rows(tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    written = mosaic(tmp_path)
    written.finish()
    assert not (tmp_path / "augmented.png").exists()
    written.add(torch.zeros(10, 3, 16, 16), torch.zeros(10, dtype=torch.long))
    written.finish()
    (figure,) = figures
    assert len(tiles(figure)) == 10
    assert len(figure.axes) == 2 * COLUMNS
    # Above the first row, the figure has room for only one line of text.
    top = max(axis.get_position().y1 for axis in figure.axes)
    assert (1 - top) * figure.get_figheight() == pytest.approx(0.17)
    later = mosaic(tmp_path)  # a resumed run with too few images for a full mosaic keeps the earlier mosaic
    later.add(torch.zeros(1, 3, 16, 16), torch.zeros(1, dtype=torch.long))
    later.finish()
    assert len(figures) == 1


def test_class_names_that_the_font_lacks_cause_no_warnings(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mosaic(tmp_path, names=["\u732b"]).add(torch.zeros(32, 3, 8, 8), torch.zeros(32, dtype=torch.long))
    assert (tmp_path / "augmented.png").exists()


def test_large_images_are_scaled_down_on_their_device(tmp_path):
    collected = mosaic(tmp_path)
    collected.add(torch.ones(3, 3, 400, 200), torch.zeros(3, dtype=torch.long))
    assert collected.images[0].shape == (3, 3, 160, 80)


def test_a_file_that_cannot_be_written_does_not_stop_a_run(tmp_path, caplog):
    mosaic(tmp_path / "missing").add(torch.zeros(32, 3, 8, 8), torch.zeros(32, dtype=torch.long))
    assert "augmented.png" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_a_run_with_a_mosaic_has_the_weights_of_a_run_without(tmp_path, image_folder, monkeypatch):
    def weights(name):
        options = dict(
            data_dir=str(image_folder), output=str(tmp_path), experiment=name, epochs=1, global_batch_size=16
        )
        trainer = Trainer(Config(**MODEL | options), torch.device("cpu"), 0, 1)
        trainer.run()
        return trainer.state.model.state_dict(), trainer.state.history[-1]["train_loss"]

    shown, loss = weights("shown")
    assert (tmp_path / "shown" / "augmented.png").exists()
    monkeypatch.setattr(Mosaic, "add", lambda *_: None)
    plain, plain_loss = weights("plain")
    assert loss == plain_loss
    assert all(torch.equal(shown[name], plain[name]) for name in plain)
    assert mosaic(tmp_path, rank=1).missing == 0  # only rank 0 collects images
