"""scikit-learn's digits as folders of images: what is held out, and draws of few to learn from."""

import math
import runpy
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from vil.data.digits import split_digits, write_digits

CLASSES = load_digits().target


def sets(*arguments, **options):
    return [set(indices.tolist()) for indices in split_digits(CLASSES, *arguments, **options)]


def test_a_seed_draws_its_own_training_images_and_never_those_that_are_held_out():
    everything, held_out = sets()
    draws = [sets(5, seed=seed) for seed in range(6)]
    for train, validation in draws:
        assert validation == held_out
        assert train <= everything
        assert np.bincount(CLASSES[list(train)]).tolist() == [5] * 10
    assert all(len(first & second) < 10 for i, (first, _) in enumerate(draws) for second, _ in draws[:i])
    assert sets(5, seed=3) == draws[3]
    assert draws[0][0] <= sets(20, seed=0)[0]  # more of the same


def test_a_rehearsal_is_on_training_images_alone():
    everything, held_out = sets()
    for seed in (0, 100):
        train, validation = sets(20, seed=seed, rehearse=True)
        assert train | validation <= everything - held_out
        assert train.isdisjoint(validation)
        assert np.bincount(CLASSES[list(validation)]).tolist() == [45] * 10
        assert np.bincount(CLASSES[list(train)]).tolist() == [20] * 10
    with pytest.raises(ValueError, match="there are 86 images to train on, less than 90"):
        split_digits(CLASSES, 90, 0, rehearse=True)


def test_copies_make_an_epoch_longer_without_more_images(tmp_path):
    write_digits(tmp_path, 2, [3, 7], seed=1, copies=4)
    train, _ = split_digits(CLASSES, 2, 1)
    for digit in (3, 7):
        files = sorted((tmp_path / "train" / str(digit)).iterdir())
        assert len(files) == 8
        assert {int(file.stem[:4]) for file in files} == {i for i in train if CLASSES[i] == digit}
        assert len({file.read_bytes() for file in files}) == 2
    assert all("-" not in file.name for file in tmp_path.glob("validation/*/*"))


def test_more_images_than_there_are_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits", str(tmp_path / "out"), "--train-per-class", "200"])
    monkeypatch.delitem(sys.modules, "vil.data.digits")
    with pytest.raises(SystemExit):
        runpy.run_module("vil.data.digits", run_name="__main__")
    assert "error: of a digit there are 131 images to train on, less than 200" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def written(root):
    """{split: {number of the image: digit}} of a folder of digits."""
    return {
        split: {int(path.stem): int(path.parent.name) for path in root.glob(f"{split}/*/*.png")}
        for split in ("train", "validation")
    }


def test_digits_are_held_out_alike_however_many_are_trained_on(tmp_path, monkeypatch):
    digits = load_digits()
    write_digits(tmp_path / "new" / "all")
    write_digits(tmp_path / "few", 5)
    monkeypatch.setattr("sys.argv", ["digits", str(tmp_path / "command"), "--train-per-class", "5"])
    monkeypatch.delitem(sys.modules, "vil.data.digits")
    runpy.run_module("vil.data.digits", run_name="__main__")
    everything, few = written(tmp_path / "new" / "all"), written(tmp_path / "few")
    assert written(tmp_path / "command") == few
    assert everything["train"].keys().isdisjoint(everything["validation"])
    assert {**everything["train"], **everything["validation"]} == dict(enumerate(digits.target.tolist()))
    assert few["validation"] == everything["validation"]
    assert len(few["validation"]) == math.ceil(1797 / 4) == 450
    held_out = list(everything["validation"].values())
    assert all(abs(held_out.count(digit) - (digits.target == digit).sum() / 4) < 1 for digit in range(10))
    assert sorted(few["train"].values()) == [digit for digit in range(10) for _ in range(5)]
    assert few["train"].items() <= everything["train"].items()
    number, digit = next(iter(few["train"].items()))
    pixels = np.asarray(Image.open(tmp_path / "few" / "train" / str(digit) / f"{number:04d}.png"))
    assert np.abs(pixels / 255 - digits.images[number] / 16).max() <= 0.5 / 255 + 1e-9
