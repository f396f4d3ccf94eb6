"""Fixtures of the package's tests for the tests of the studies, and a fixture that simulates a study's runs."""

from collections import defaultdict

import numpy as np
import pytest
from fixtures import CLASSES, image_folder, no_pictures, process_state  # noqa: F401

from research import seeds
from research.photographs import Cell
from research.predictions import Judged


@pytest.fixture
def simulate(image_folder, tmp_path, monkeypatch):  # noqa: F811
    """Return a function that simulates the runs of a study.

    The function accepts two functions: `start(path)` replaces the training of the run in the folder `path`, and
    `result(cell)` returns the run's result. All predictions of a run are correct. The function returns the words of the
    study's command line, and a dict of the trained models by folder.
    """
    trained = defaultdict(list)

    def simulate(start, result):
        def train(options, model, seed, words, folder, deadline, gpus):
            if not deadline.passed:
                start(folder / f"{model}-{seed}")
                trained[folder.name].append(model)
                (folder / f"{model}-{seed}").mkdir(parents=True, exist_ok=True)

        def read_run(folder, model, seed, images, evaluated):
            stage, _, lr = folder.name.partition("-")
            return result(Cell(stage, model, float(lr), seed))

        monkeypatch.setattr(seeds, "train", train)
        monkeypatch.setattr(seeds, "read_run", read_run)
        return words, trained

    def judge(folder, runs, images):
        files = [images.filename(i) for i in range(len(images))]
        targets = np.array([CLASSES.index(file.split("/")[0]) for file in files])
        # Tiny ImageNet's files end with .JPEG, and mini-ImageNet's files end with .jpg.
        names = [f"{file}{('.JPEG', '.jpg')[i % 2]}" for i, file in enumerate(files)]
        return Judged(targets, targets[:, None], names, [f"{runs[0]['model']}-{runs[0]['seed']}"])

    monkeypatch.setattr(seeds, "judge", judge)
    monkeypatch.setattr(seeds, "is_done", lambda path: path.name.rsplit("-", 1)[0] in trained[path.parent.name])
    (tmp_path / "images").mkdir()
    for split, source in (("train", "train"), ("choose", "val"), ("test", "val")):
        (tmp_path / "images" / split).symlink_to(image_folder / source)
    words = ["--data-dir", tmp_path / "images", "--folder", tmp_path / "runs"]
    words += ["--earlier", tmp_path / "none.json", "--out", tmp_path / "out.json"]
    return simulate
