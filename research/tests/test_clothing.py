"""Tests of research/clothing.py: chosen settings, the images on which settings are chosen, and tables."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from research import clothing, transfer
from research.transfer import SCRATCH, Run

KINDS = ["coat", "hat"]


@pytest.fixture
def photographs(tmp_path):
    for split, count in (("train", 30), ("validation", 2), ("test", 3)):
        for kind in KINDS:
            (tmp_path / "data" / split / kind).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "data" / split / kind / f"{i:02}.png")
    for name in ("seen", "drawn"):
        (tmp_path / f"{name}.safetensors").write_text(name)
    return tmp_path


def names(images, split):
    return {kind: sorted(path.name for path in (images / split / kind).iterdir()) for kind in KINDS}


@pytest.fixture
def study(photographs, monkeypatch, capsys):
    """Run the program with a stub of the training, and return its results, the runs' arguments, and its stdout."""
    given, asked = [], []

    def train_on(images, words, folder, run):
        splits = {path.name for path in images.iterdir()}
        given.append((run, words, splits, names(images, "train")))
        return dict(top1=1000 * run.setting + run.seed + 10 * ("--pretrained-path" in words))

    def features(probe, way, seed):
        asked.append((way, seed))
        rows = [path.relative_to(probe.data) for path in sorted(probe.data.glob("*/*/*.png"))]
        # the features of the two classes are swapped in the validation split
        hats = [(path.parent.name == "hat") != (path.parts[0] == "validation") for path in rows]
        return {path: np.array([float(hat) + seed, 1.0]) for path, hat in zip(rows, hats)}

    monkeypatch.setattr(transfer, "train_on", train_on)
    monkeypatch.setattr(clothing.Probe, "_features", features)
    weights = [photographs / f"{name}.safetensors" for name in ("seen", "drawn")]
    words = ["--data-dir", photographs / "data", "--weights", *weights, "--seeds", 2, "--device", "cpu"]
    out = photographs / "clothing.json"
    monkeypatch.setattr(sys, "argv", ["clothing", *map(str, words), "--out", str(out)])
    clothing.main()
    before = len(given)
    clothing.main()  # a second call has nothing to train
    assert len(given) == before
    return json.loads(out.read_text()) | dict(asked=asked), given, capsys.readouterr().out


def test_settings_are_chosen_on_validation_and_judged_on_test_from_the_same_draws(study, photographs):
    results, given, _ = study
    chosen = [run for run, *_ in given if run.rehearse]
    assert {(run.way, run.per_class, run.setting) for run in chosen} == {
        (way, n, rate)
        for way in (SCRATCH, "fine-tuned, seen", "fine-tuned, drawn") for n in (0, 20) for rate in clothing.RATES
    }  # fmt: skip
    assert {run.seed for run in chosen} == {100}
    everything = names(photographs / "data", "train")
    drawn: dict = {}
    for run, words, splits, train in given:
        judged = "validation" if run.rehearse else "test"
        assert splits == {"train", judged}
        assert words[words.index("--val-split") + 1] == judged
        assert words[words.index("--epochs") + 1] == {0: "20", 20: "100"}[run.per_class]
        file = {"fine-tuned, seen": "seen", "fine-tuned, drawn": "drawn"}.get(run.way)
        assert [Path(word).stem for word in words if word.endswith(".safetensors")] == [file] * bool(file)
        assert run.rehearse or run.setting == max(clothing.RATES)
        if run.per_class:
            assert {kind: len(files) for kind, files in train.items()} == dict.fromkeys(KINDS, 20)
            assert drawn.setdefault(run.seed, train) == train
        else:
            assert train == everything
    assert len({json.dumps(train) for train in drawn.values()}) == 3
    probes = [run for run in results["runs"] if run["way"].startswith("linear")]
    assert {(run["rehearse"], run["top1"]) for run in probes} == {(True, 0.0), (False, 100.0)}
    assert {run["way"] for run in probes} == {"linear, seen", "linear, drawn", "linear, random"}
    weights = [("linear, seen", 0), ("linear, drawn", 0), *(("linear, random", seed) for seed in (0, 1, 100))]
    assert sorted(results["asked"]) == sorted(weights)  # the features of each weights file were computed only once


def test_results_of_other_images_are_not_added_to(study, photographs):
    image = photographs / "data" / "test" / "hat" / "00.png"
    image.write_bytes(image.read_bytes() + b"\0")
    with pytest.raises(SystemExit, match="images must match the results in .*clothing.json"):
        clothing.main()


def test_features_are_of_every_image_as_it_is_evaluated_and_of_the_ways_weights(photographs, monkeypatch):
    class Mean(torch.nn.Module):
        def forward(self, x):
            return x.mean((2, 3))

    built = []
    monkeypatch.setattr(transfer, "frozen", lambda *words, **named: built.append((*words[:3], named)) or Mean())
    files = {"seen": Path("seen.safetensors"), "drawn": Path("drawn.safetensors")}
    probe = clothing.Probe(photographs / "data", files, "cpu")
    found = probe.features("linear, drawn", 0)
    probe.features("linear, random", 7)
    how = dict(img_size=224)
    assert built == [("vil_tiny", "drawn.safetensors", 0, how), ("vil_tiny", None, 7, how)]
    assert len(found) == 2 * (30 + 2 + 3)
    reds = [found[Path("train", "hat", f"{i:02}.png")] for i in (0, 29)]  # image i has a uniform red level of i / 255
    np.testing.assert_allclose(reds[1] - reds[0], [29 / 255 / 0.229, 0, 0], atol=1e-5)


def test_a_probe_learns_from_the_images_that_training_gets(photographs):
    run = Run("linear, seen", 20, 1.0, 3, False)
    clothing.write_images(photographs / "data", str(photographs), run)
    files = [path.relative_to(photographs / "data") for path in (photographs / "data/train/hat").iterdir()]
    written = names(transfer.images_of(str(photographs), run), "train")["hat"]
    for descending in (False, True):  # the sample does not depend on the order in which a file system lists files
        ordered = sorted(files, reverse=descending)
        assert sorted(path.name for path in clothing.drawn(ordered, run)) == written


def test_the_tables_have_every_way_and_the_differences_of_the_first_weights(study):
    *_, printed = study
    assert "| all | from scratch | 0.01 | 10.50 ± 0.71 | 10.00 11.00 |" in printed
    assert "| 20 | fine-tuned, seen | 0.01 | 20.50 ± 0.71 | 20.00 21.00 |" in printed
    differences = [line.split(" | ")[:4] for line in printed.splitlines() if line.startswith(("| all", "| 20"))][-6:]
    assert [(first, less) for _, first, less, _ in differences] == 2 * [
        ("fine-tuned, seen", SCRATCH), ("fine-tuned, seen", "fine-tuned, drawn"), ("fine-tuned, seen", "linear, seen"),
    ]  # fmt: skip
    assert differences[0][3].startswith("+10.00 (")
    assert differences[5][3].startswith("-79.50 (")
