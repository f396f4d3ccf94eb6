"""benchmarks/seeds.py: runs that are kept and gone on with, judged on a split of their own, compared image by image."""

import csv
import gzip
import json
import math
import shutil
import sys

import naive_evaluation as naive
import numpy as np
import pytest
import yaml
from conftest import CLASSES
from processes import SMALL
from scipy.stats import binomtest

from benchmarks import seeds
from vil.training.models import load_model

MODELS = ["vil_tiny", "vim_tiny"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory, image_folder):
    """A folder with a run of each model, the command line that made it, and what it wrote."""
    root = tmp_path_factory.mktemp("seeds")
    config = dict(SMALL, data_dir=str(image_folder), epochs=2, workers=1)
    (root / "small.yaml").write_text(yaml.safe_dump(config))
    command = ["seeds.py", "-c", root / "small.yaml", "--folder", root / "runs", "--models", *MODELS, "--seeds", "1"]
    command += ["--jobs", "2", "--test-split", "val", "--out", root / "out.json", "--plot", root / "out.png"]
    return root, [str(word) for word in [*command, "--device", "cpu"]]


def call(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", command)
    seeds.main()


def test_a_study_that_is_out_of_time_goes_on_and_ends_once(kept, monkeypatch, capsys):
    root, command = kept
    shutil.rmtree(root / "runs", ignore_errors=True)  # of the test of `--earlier`, where that came first
    with pytest.raises(SystemExit) as stopped:
        call([*command, "--minutes", "0"], monkeypatch)
    assert stopped.value.code == 75
    assert "not done yet: vil_tiny-0, vim_tiny-0" in capsys.readouterr().err
    call(command, monkeypatch)
    call(command, monkeypatch)  # finds all of it done
    for model in MODELS:
        sessions = (root / "runs" / f"{model}-0" / "sessions.jsonl").read_text().splitlines()
        assert [json.loads(line)["epochs"] for line in sessions] == [2]

    found = json.loads((root / "out.json").read_text())
    rows = list(csv.DictReader(gzip.decompress((root / "out.csv.gz").read_bytes()).decode().splitlines()))
    assert len(rows) == 28
    for run in found["runs"]:
        path = root / "runs" / f"{run['model']}-0"
        saved = yaml.safe_load((path / "config.yaml").read_text())
        arguments = dict(num_classes=4, img_size=16, **SMALL["model_kwargs"])
        model = load_model(run["model"], str(path / "last.pt"), **arguments).eval()
        cfg = model.pretrained_cfg
        summary = list(csv.DictReader((path / "summary.csv").read_text().splitlines()))
        assert (run["epochs"], run["images"], run["updates"]) == (2, 128, 8)
        assert run["curves"]["eval_top1"] == [float(row["eval_top1"]) for row in summary]
        assert run["training_seconds"] == pytest.approx(sum(64 / float(row["images_per_second"]) for row in summary))
        numbers = {name: number for number, name in enumerate(CLASSES)}
        how = dict(input_size=16, crop_pct=0.875, interpolation="bicubic", mean=cfg["mean"], std=cfg["std"])
        names, targets, logits = naive.saved_logits(model, f"{saved['data_dir']}/val", numbers, **how)
        assert [row["image"].split("/")[-1] for row in rows] == names
        assert [int(row["target"]) for row in rows] == targets.tolist()
        taken_for = np.array([int(row[path.name]) for row in rows])
        assert np.all(np.take_along_axis(logits, taken_for[:, None], 1)[:, 0] >= logits.max(axis=1) - 1e-4)
        assert run["top1"] == pytest.approx(100 * (taken_for == targets).mean())
    assert (root / "out.png").read_bytes().startswith(b"\x89PNG")


def test_results_of_a_folder_that_is_gone_are_added(kept, tmp_path, monkeypatch):
    root, command = kept
    if not (root / "out.json").exists():  # the test above has made it
        call(command, monkeypatch)
    out = tmp_path / "more.json"
    changed = {
        str(root / "runs"): tmp_path / "runs",
        str(root / "out.json"): out,
        str(root / "out.png"): tmp_path / "more.png",
    }
    command = [str(changed.get(word, word)) for word in command]
    command[command.index("--models") + 2] = "--earlier"  # in place of the second model
    command.insert(command.index("--earlier") + 1, str(root / "out.json"))
    command[command.index("--seeds") + 1] = "2"
    call(command, monkeypatch)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["vil_tiny-1"]
    before, after = (json.loads(path.read_text())["runs"] for path in (root / "out.json", out))
    assert [(run["model"], run["seed"]) for run in after] == [("vil_tiny", 0), ("vil_tiny", 1), ("vim_tiny", 0)]
    assert [after[0], after[2]] == before
    old, new = (
        list(csv.reader(gzip.decompress(path.with_suffix(".csv.gz").read_bytes()).decode().splitlines()))
        for path in (root / "out.json", out)
    )
    assert [[*row[:3], row[4]] for row in new] == old
    right = np.mean([row[1] == row[3] for row in new[1:]])
    assert after[1]["top1"] == pytest.approx(100 * right)

    with pytest.raises(SystemExit, match="other options: .*cpu.*not .*--lr"):
        call([*command, "--lr", "1e-2"], monkeypatch)
    out.with_suffix(".csv.gz").unlink()
    command[command.index("--earlier") + 1] = str(out)
    with pytest.raises(SystemExit, match="did not judge vil_tiny-0, vil_tiny-1, vim_tiny-0"):
        call(command, monkeypatch)


def test_predictions_are_joined_by_the_names_of_runs():
    targets, images = np.zeros(2, dtype=int), ["a", "b"]
    parts = [
        seeds.Judged(targets, np.array([[1, 2], [3, 4]]), images, ["x", "z"]),
        seeds.Judged(targets, np.array([[5], [6]]), images, ["y"]),
    ]
    assert seeds.joined(parts, ["x", "y", "z"]).predicted_NM.tolist() == [[1, 5, 2], [3, 6, 4]]


def test_predictions_of_other_images_are_not_joined():
    targets, predicted = np.zeros(2, dtype=int), np.zeros((2, 1), dtype=int)
    parts = [seeds.Judged(targets, predicted, images, [run]) for images, run in ((["a", "b"], "x"), (["a", "c"], "y"))]
    with pytest.raises(SystemExit, match="other images"):
        seeds.joined(parts, ["x", "y"])


def test_a_run_that_fails_is_named_with_what_it_said(kept, tmp_path, monkeypatch):
    _, command = kept
    command = [word.replace("small.yaml", "missing.yaml") for word in command]
    with pytest.raises((SystemExit, FileNotFoundError), match="missing"):
        call(command, monkeypatch)


@pytest.mark.parametrize(
    ("names", "jobs", "processes", "expected"),
    [
        (["0", "1", "2", "3"], 2, 1, ["0", "1"]),
        (["4", "7"], 3, 1, ["4", "7", "4"]),
        (["0", "1", "2", "3"], 2, 2, ["0,1", "2,3"]),
        (["0", "1", "2"], 2, 2, ["0,1", "0,1"]),
        (["0"], 1, 2, ["0"]),  # too few: it is for train_imagenet.py to say so
        ([], 2, 1, ["", ""]),
    ],
)
def test_runs_at_a_time_have_gpus_of_their_own(names, jobs, processes, expected):
    shared = seeds.share_gpus(names, jobs, processes)
    assert [shared.get_nowait() for _ in range(shared.qsize())] == expected


def test_images_that_one_model_alone_gets_right_decide():
    targets = np.zeros(100, dtype=int)
    first, second, other_seed = (np.r_[np.zeros(n, dtype=int), np.ones(100 - n, dtype=int)] for n in (80, 70, 5))
    images, names = [str(i) for i in range(100)], ["a-3", "b-3", "b-4"]
    judged = seeds.Judged(targets, np.stack([first, second, other_seed], axis=1), images, names)
    runs = [dict(model="a", seed=3), dict(model="b", seed=3), dict(model="b", seed=4)]
    (line,) = seeds.compare_images(runs, judged).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:6] == ["a, b", "3", "70", "10", "0", "20"]
    assert cells[7] == f"{binomtest(10, 10).pvalue:.2g}"
    b, c, n = 10.5, 0.5, 102  # Wald's interval with half an image more in each cell
    half = 1.96 * math.sqrt(b + c - (b - c) ** 2 / n)
    assert cells[6] == f"+10.00 ({100 * (b - c - half) / n:+.2f} to {100 * (b - c + half) / n:+.2f})"


def test_the_published_rehearsal_is_that_of_its_predictions(request):
    """docs/results.md and rehearsal.json by the classes that are in rehearsal.csv.gz alone."""
    docs = request.config.rootpath / "docs"
    runs = json.loads((docs / "results" / "rehearsal.json").read_text())["runs"]
    with gzip.open(docs / "results" / "rehearsal.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    text = (docs / "results.md").read_text()
    assert f"Top-1 on {len(rows):,} images of a test split" in text
    right = {}
    for run in runs:
        name = f"{run['model']}-{run['seed']}"
        right[name] = np.array([row[name] == row["target"] for row in rows])
        assert run["top1"] == pytest.approx(100 * right[name].mean())
        assert len(run["curves"]["train_loss"]) == run["epochs"]
        assert all(math.isfinite(value) for values in run["curves"].values() for value in values)
    assert sum(row["image"].split("/")[0] == f"c{int(row['target']):04d}" for row in rows) == len(rows)
    others = [run for run in runs if run["model"] != "vil_tiny" and f"vil_tiny-{run['seed']}" in right]
    assert others
    for run in others:
        pair = right[f"vil_tiny-{run['seed']}"], right[f"{run['model']}-{run['seed']}"]
        counts = naive.paired(*pair)
        low, high = naive.paired_interval(*counts)
        difference = f"{100 * (counts[1] - counts[2]) / len(rows):+.2f} ({low:+.2f} to {high:+.2f})"
        cells = [f"vil_tiny, {run['model']}", str(run["seed"]), *map(str, counts), difference]
        assert f"| {' | '.join(cells)} | {naive.mcnemar(*counts[1:3]):.2g} |" in text
