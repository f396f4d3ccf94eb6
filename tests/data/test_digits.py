"""Tests of writing scikit-learn's digits as image folders, with held-out images and small training sets."""

import runpy
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from vil.data.digits import split_digits

DIGITS = load_digits()


def sets(*arguments, **options):
    return [set(indices.tolist()) for indices in split_digits(DIGITS.target, *arguments, **options)]


def counts(images):
    """Return the number of images of each digit."""
    return np.bincount(DIGITS.target[list(images)], minlength=10)


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["digits", *map(str, words)])
    monkeypatch.delitem(sys.modules, "vil.data.digits", raising=False)
    runpy.run_module("vil.data.digits", run_name="__main__")


def test_a_quarter_of_every_digit_is_held_out_for_all_seeds():
    everything, held_out = sets()
    assert everything | held_out == set(range(1797))
    assert (len(everything), len(held_out)) == (1347, 450)
    assert np.abs(counts(held_out) - counts(range(1797)) / 4).max() < 1
    draws = [sets(5, seed=seed) for seed in range(6)]
    for train, validation in draws:
        assert validation == held_out
        assert train <= everything
        assert counts(train).tolist() == [5] * 10
    assert all(len(first & second) < 10 for i, (first, _) in enumerate(draws) for second, _ in draws[:i])
    assert sets(5, seed=3) == draws[3]
    assert sets(5) not in draws  # without a seed, other images are chosen than with the seeds 0 to 5
    assert draws[0][0] <= sets(20, seed=0)[0]  # of two sets with the same seed, the larger contains the smaller


def test_a_rehearsal_uses_only_training_images():
    everything, _ = sets()
    train, validation = sets(20, seed=100, rehearse=True)
    assert train | validation <= everything
    assert train.isdisjoint(validation)
    assert (counts(train).tolist(), counts(validation).tolist()) == ([20] * 10, [45] * 10)
    with pytest.raises(ValueError, match="must be at most 86 .*got 90"):
        split_digits(DIGITS.target, 90, 0, rehearse=True)


def test_the_command_writes_one_file_per_image(tmp_path, monkeypatch, capsys):
    command(monkeypatch, tmp_path, "--train-per-class", 5)
    for split, images in zip(("train", "validation"), sets(5)):
        files = {int(path.stem): path for path in tmp_path.glob(f"{split}/*/*.png")}
        assert files.keys() == images
        for number, path in files.items():
            assert int(path.parent.name) == DIGITS.target[number]
            levels = np.asarray(Image.open(path)) / 255 - DIGITS.images[number] / 16
            assert np.abs(levels).max() <= 0.5 / 255 + 1e-9
    with pytest.raises(SystemExit):
        command(monkeypatch, tmp_path / "more", "--train-per-class", 200)
    assert "error: train_per_class must be at most 131" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit):
        command(monkeypatch, tmp_path / "more")
    assert "error: vil.data.digits needs scikit-learn: pip install scikit-learn (" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_copies_lengthen_an_epoch_without_new_images(tmp_path, monkeypatch, capsys):
    words = "--train-per-class 2 --digits 3 7 --seed 1 --copies 4 --rehearse"
    command(monkeypatch, tmp_path, *words.split())
    train, validation = sets(2, 1, rehearse=True)
    written = {int(path.stem) for path in tmp_path.glob("validation/*/*")}
    assert written == {i for i in validation if DIGITS.target[i] in (3, 7)}
    for digit in (3, 7):
        files = sorted((tmp_path / "train" / str(digit)).iterdir())
        assert len(files) == 8
        assert {int(file.stem[:4]) for file in files} == {i for i in train if DIGITS.target[i] == digit}
        assert len({file.read_bytes() for file in files}) == 2
    assert all("-" not in file.name for file in tmp_path.glob("validation/*/*"))
    assert capsys.readouterr().out.endswith("validation: 90 images\n")
