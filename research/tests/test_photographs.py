"""Tests of research/photographs.py: the protocol's order of runs, measurements, and statistics."""

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from statistics import mean, stdev

import numpy as np
import pytest
import yaml
from fixtures import CLASSES

from research import photographs, predictions, seeds, tiny_imagenet
from research.compare import holm, welch
from research.photographs import Cell
from research.predictions import Judged

MODELS = VIL, VIM, POOLED, DEIT = ["vil_tiny", "vim_tiny", "vil_tiny_pooled", "deit_tiny_patch16_224"]
TRIED = {0.0005: 20.0, 0.001: 30.0, 0.002: 25.0}


def a_run(cell, top1, speed=1000.0):
    curves = dict(
        images_per_second=[10.0, speed, speed], eval_top1=[1.0, 2.0, top1], eval_top1_ema=[0.0, 0.0, top1 + 1]
    )
    run = dict(parameters=5_000, images=600_000, top1=top1, curves=curves, machine=dict(gpu="H"))
    return cell._asdict() | run


def searched(**by_model):
    """Return finished runs that select learning rates, with accuracies by model and learning rate."""
    return [
        a_run(Cell("rates", model, rate, 100), top1)
        for model in MODELS
        for rate, top1 in by_model.get(model, TRIED).items()
    ]


def with_seeds(runs, **top1):
    """Return `runs`, a run of compiled DeiT, and runs with the seeds 0, 1, ... and the given validation accuracies."""
    more = [a_run(Cell("seeds", model, 0.001, seed), value) for model in top1 for seed, value in enumerate(top1[model])]
    return [*runs, a_run(Cell("compiled", DEIT, 0.001, 100), 1.0, speed=4000.0), *more]


STEADY = {model: [50.0, 50.1, 50.2, 50.1, 50.0] for model in MODELS}


def test_every_model_tries_all_rates_and_one_more_where_the_best_is_at_an_edge():
    assert photographs.to_do([]) == [Cell("rates", model, rate, 100) for rate in TRIED for model in MODELS]
    low, high = dict(zip(TRIED, (3.0, 2.0, 1.0))), dict(zip(TRIED, (1.0, 2.0, 3.0)))
    runs = searched(vim_tiny=low, deit_tiny_patch16_224=high)
    assert photographs.to_do(runs) == [Cell("rates", VIM, 0.00025, 100), Cell("rates", DEIT, 0.004, 100)]
    runs += [a_run(Cell("rates", VIM, 0.00025, 100), 9.0), a_run(Cell("rates", DEIT, 0.004, 100), 2.9)]
    assert photographs.to_do(runs) == [Cell("compiled", DEIT, 0.002, 100)]
    runs += [a_run(Cell("compiled", DEIT, 0.002, 100), 1.0)]
    chosen = {VIL: 0.001, VIM: 0.00025, POOLED: 0.001, DEIT: 0.002}
    assert photographs.to_do(runs) == [Cell("seeds", m, chosen[m], seed) for seed in range(5) for m in MODELS]
    lines = photographs.rates_table(runs).splitlines()
    assert lines[0] == "| model | 0.00025 | 0.0005 | 0.001 | 0.002 | 0.004 | chosen |"
    assert lines[3] == "| vim_tiny | 9.00 | 3.00 | 2.00 | 1.00 | - | 0.00025 |"
    assert photographs.rates_table(searched()[:-1]).splitlines()[2].endswith("| 30.00 | 25.00 | - |")


@pytest.mark.parametrize(("deviation", "more"), [(0.34, False), (0.35, True)])
def test_only_the_deviation_decides_whether_further_seeds_are_trained(deviation, more):
    """Further seeds are requested only if the standard deviation over seeds is too large.

    The interval's half-width is 2.306 sqrt(2/5) standard deviations, or 0.496 and 0.510 points for the two deviations.
    """
    values = [-1.2, -0.4, 0.1, 0.3, 1.2]
    values = [deviation * (value - mean(values)) / stdev(values) for value in values]
    for gap in (0.0, 30.0):
        runs = with_seeds(searched(), **STEADY | {VIL: [40 + v for v in values], VIM: [40 + gap - v for v in values]})
        expected = [Cell("seeds", model, 0.001, seed) for seed in (5, 6, 7) for model in (VIL, VIM)] if more else []
        assert photographs.to_do(runs) == expected
        # DeiT's results do not change which runs are planned
        assert photographs.to_do(runs[:-1]) == [Cell("seeds", DEIT, 0.001, 4), *expected]
        done, left = expected[:5], expected[5:]
        # results of the further runs do not change which runs are planned
        assert photographs.to_do([*runs, *(a_run(cell, 40.0) for cell in done)]) == left


def judged_as(runs, top1, images=1000):
    """Return predictions with an accuracy of `top1[model][seed]` percent for each run."""
    names = [f"{run['model']}-{run['seed']}" for run in runs if run["stage"] == "seeds"]
    places = [name.rsplit("-", 1) for name in names]
    right = [round(images / 100 * top1[model][int(seed)]) for model, seed in places]
    predicted = np.stack([np.arange(images) >= count for count in right], axis=1).astype(int)
    return Judged(np.zeros(images, dtype=int), predicted, [str(i) for i in range(images)], names)


TEST = {
    VIL: [46.1, 45.2, 45.9, 46.4, 45.5],
    # ViM's mean is less than a point below ViL's mean, but the interval of the difference exceeds the margin
    VIM: [45.2, 45.0, 44.1, 44.6, 45.3],
    POOLED: [45.9, 45.8, 46.0, 45.7, 46.2],
    DEIT: [51.0, 52.5, 50.2, 52.4, 51.9],
}


def test_test_images_are_counted_when_the_last_run_is_there():
    runs = with_seeds(searched(), **STEADY)
    runs[-1]["curves"]["images_per_second"] = [10.0, 500.0, 500.0]  # a run on a throttled GPU
    (alone,) = (run for run in runs if run["stage"] == "compiled")
    # The compiled run has two epochs, of which the first includes the compilation.
    alone["curves"]["images_per_second"], alone["machine"] = [10.0, 4000.0], dict(gpu=None)
    judged = judged_as(runs, TEST)
    for table in (photographs.models_table, photographs.differences_table):
        early = table(runs[:-1], judged_as(runs[:-1], TEST))
        assert not any(f"{value:.2f}" in early for value in (mean(TEST[VIL]), *TEST[VIL], STEADY[VIL][2]))
        assert table(runs, judged) != early
    vil, _, _, deit, compiled = (
        line.strip("| ").split(" | ") for line in photographs.models_table(runs, judged).splitlines()[2:]
    )
    assert vil[:4] == [VIL, "5,000", "0.001", "5"]
    assert vil[4:6] == [f"{mean(TEST[VIL]):.2f} ± {stdev(TEST[VIL]):.2f}", "46.10 45.20 45.90 46.40 45.50"]
    assert vil[6:8] == ["50.08 ± 0.08", "51.08 ± 0.08"]
    assert vil[8:] == ["10.0 (H)", "1,000 (H)"]  # training on 600,000 images takes 10 minutes
    assert (deit[8:], compiled[8:]) == (["10.0 (H)", "1,000 (H)"], ["2.5 (CPU)", "4,000 (CPU)"])
    backwards = photographs.models_table(runs[::-1], judged)  # runs may finish in any order
    assert backwards == photographs.models_table(runs, judged)
    # the training time is unknown without the study's runs
    before = photographs.models_table(with_seeds(searched()), None)
    assert before.splitlines()[-1].endswith("| nan (H) | 4,000 (H) |")


def test_differences_are_by_welchs_test_and_holms_correction():
    runs, pairs = with_seeds(searched(), **STEADY), ((VIL, VIM), (POOLED, VIL), (VIL, DEIT))
    lines = photographs.differences_table(runs, judged_as(runs, TEST)).splitlines()[2:]
    gaps = [welch(*(dict(enumerate(TEST[model])) for model in pair)) for pair in pairs]
    for line, pair, gap, corrected in zip(lines, pairs, gaps, holm([gap.p_value for gap in gaps]), strict=True):
        within = "yes" if pair == (POOLED, VIL) else "no"
        numbers = [f"{gap.half_width:.2f}", f"{gap.p_value:.2g}", f"{corrected:.2g}"]
        assert line.strip("| ").split(" | ") == [*pair, str(gap), *numbers, within]


def test_an_extension_adds_an_estimate_when_it_is_whole_and_changes_nothing_else():
    runs, top1 = with_seeds(searched(), **STEADY), {m: dict(enumerate(TEST[m])) for m in MODELS}
    before = photographs.differences_table(runs, judged_as(runs, TEST))
    models, found = photographs.models_table(runs, judged_as(runs, TEST)), before.splitlines()
    top1[VIL] |= dict(zip(range(8, 12), (46.5, 47.1, 44.9, 45.0)))
    top1[VIM] |= dict(zip(range(8, 20), (43.5, 44.1, 45.9, 46.0, 42.1, 41.0, 45.5, 43.3, 44.4, 44.8, 42.9, 43.7)))
    for models_of_each, its_seeds in (((VIL, VIM), range(8, 12)), ((VIM,), range(12, 20))):
        cells = photographs.extension(runs)
        assert cells == [Cell("seeds", model, 0.001, seed) for seed in its_seeds for model in models_of_each]
        runs += [a_run(cell, 1.0) for cell in cells]
        assert photographs.differences_table(runs[:-1], judged_as(runs[:-1], top1)).splitlines() == found
        gap = welch(top1[VIL], {seed: value for seed, value in top1[VIM].items() if seed < its_seeds.stop})
        row = f"| vil_tiny, 9 seeds | vim_tiny, {its_seeds.stop - 3} seeds | {gap} | {gap.half_width:.2f} | - | - | - |"
        found.append(row)
        assert photographs.differences_table(runs, judged_as(runs, top1)).splitlines() == found
        assert photographs.models_table(runs, judged_as(runs, top1)) == models
    assert photographs.extension(runs) == []


@pytest.fixture
def stubbed(tmp_path, image_folder, monkeypatch):
    """Return folder and arguments of a study whose runs do not train, and a list that collects the runs' arguments."""
    (tmp_path / "images").mkdir()
    for split, name in (("train", "train"), ("choose", "val")):
        (tmp_path / "images" / split).symlink_to(image_folder / name)
    shutil.copytree(image_folder / "val", tmp_path / "images" / "test")
    for name in CLASSES:  # the split `test` has six images per class, and the split `choose` has seven
        (tmp_path / "images" / "test" / name / "0.png").unlink()
    config = dict(data_dir=str(tmp_path / "images"), val_split="choose", img_size=16, epochs=30, global_batch_size=16)
    config["model_kwargs"] = dict(depth=1, patch_size=8)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    started = []

    def train(options, model, seed, words, folder, deadline, gpus):
        if deadline.passed:
            return
        assert signal.getsignal(signal.SIGTERM) == deadline._pass
        started.append((model, seed, words[:2] if words[0] == "--epochs" else [], float(words[-1])))
        if reason := {(VIM, "0.002"): "gradient's norm is nan", (DEIT, "0.0005"): "loss is -inf"}.get(
            (model, words[-1])
        ):
            raise SystemExit(f"{model}-100 ended with status 1: {500 * '.'} the {reason} at step 3 of epoch 2")
        path = folder / f"{model}-{seed}"
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(json.dumps(config | dict(epochs=1, num_classes=4)))
        top1 = TRIED[float(words[-1])]
        columns = dict(images_per_second=100.0, eval_images_per_second=9.0, eval_loss=2.0, eval_top1=top1)
        columns |= dict(eval_top1_ema=top1, lr=1e-5, train_loss=1.0, grad_norm=1.0)
        (path / "summary.csv").write_text(",".join(columns) + "\n" + ",".join(map(str, columns.values())) + "\n")

    def judge(folder, runs, images):
        names = [images.filename(i) for i in range(len(images))]
        targets = np.array([CLASSES.index(name.split("/")[0]) for name in names])
        return Judged(targets, np.ones((len(images), 1), int), names, [f"{runs[0]['model']}-{runs[0]['seed']}"])

    monkeypatch.setattr(seeds, "train", train)
    monkeypatch.setattr(seeds, "judge", judge)
    command = ["photographs.py", "-c", tmp_path / "small.yaml", "--folder", tmp_path / "runs"]
    command += ["--earlier", tmp_path / "out.json", "--out", tmp_path / "out.json"]
    return tmp_path, [str(word) for word in command], started


def test_a_study_goes_on_from_its_results_on_another_machine_and_from_its_folder(stubbed, monkeypatch, capsys):
    root, command, started = stubbed

    def call(*words):
        monkeypatch.setattr(sys, "argv", [*command, *words])
        photographs.main()

    with pytest.raises(SystemExit) as stopped:
        call("--minutes", "0")
    assert stopped.value.code == 75
    assert "not done yet: rates-0.0005/vil_tiny-100" in capsys.readouterr().err
    assert not started
    assert not (root / "out.png").exists()
    call()
    assert len(started) == len(set(map(str, started))) == 12 + 1 + 20 + 8 + 8
    assert [words for *_, words, _ in started[:12]] == [["--epochs", "8"]] * 12
    assert started[12] == (DEIT, 100, ["--epochs", "2"], 0.001)
    assert started[13:33] == [(model, seed, [], 0.001) for seed in range(5) for model in MODELS]
    assert started[33:41] == [(model, seed, [], 0.001) for seed in range(8, 12) for model in (VIL, VIM)]
    assert started[41:] == [(VIM, seed, [], 0.001) for seed in range(12, 20)]
    assert (root / "out.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((root / "out.json").read_text())
    diverged = [run for run in found["runs"] if "diverged" in run]
    assert [(run["model"], run["lr"], run["top1"]) for run in diverged] == [(DEIT, 0.0005, 0.0), (VIM, 0.002, 0.0)]
    assert diverged[1]["diverged"].endswith("the gradient's norm is nan at step 3 of epoch 2")
    rows = gzip.decompress((root / "out.csv.gz").read_bytes()).decode().splitlines()
    # The file has a header, 24 rows for the test images, and 36 columns for the runs.
    assert (len(rows), rows[0].count(",")) == (25, 1 + 36)
    assert "| vil_tiny | 2" in (shown := capsys.readouterr().out)
    # Each run predicts one class for all images, and a quarter of the images belong to this class.
    assert "25.00 ± 0.00" in shown

    (root / "out.json").write_text(json.dumps(found | dict(runs=found["runs"][:-1])))
    (root / "runs").rename(root / "gone")
    with pytest.raises(SystemExit):
        call("--minutes", "0")
    assert "not done yet: seeds-0.001/vim_tiny-19" in capsys.readouterr().err
    (root / "images").rename(root / "elsewhere")
    # Without run folders, as on a new machine, only the run that out.json lacks is trained.
    call(*(words := ["--data-dir", str(root / "elsewhere")]))
    assert started[49:] == [(VIM, 19, [], 0.001)]
    assert len(json.loads((root / "out.json").read_text())["runs"]) == 49

    (root / "elsewhere" / "test" / "ant" / "1.png").unlink()
    with pytest.raises(SystemExit, match="images must match the runs in .*out.json"):
        call(*words)
    config = root / "small.yaml"
    config.write_text(config.read_text().replace("epochs: 30", "epochs: 3"))
    with pytest.raises(SystemExit, match="config must match the runs in .*out.json"):
        call(*words)
    with pytest.raises(SystemExit, match="config must match the runs in .*study.json"):
        call(*words, "--earlier", str(root / "none.json"))


def test_results_that_are_half_written_are_gone_on_with(stubbed, monkeypatch, capsys):
    _, command, started = stubbed
    monkeypatch.setattr(sys, "argv", command)
    write = seeds.write_atomically

    def stop(path, content):
        write(path, content)
        if len(started) > 13:  # fail between writing the predictions and writing out.json
            raise OSError("no space left")

    with monkeypatch.context() as patch:
        for module in (photographs, predictions):
            patch.setattr(module, "write_atomically", stop)
        with pytest.raises(OSError, match="no space"):
            photographs.main()
    monkeypatch.setattr(sys, "argv", [*command, "--minutes", "0"])
    with pytest.raises(SystemExit):
        photographs.main()
    assert "not done yet: seeds-0.001/" in capsys.readouterr().err


@pytest.mark.parametrize(("reason", "runs"), [("no space left on device", 0), ("the loss is nan at step 3", 13)])
def test_what_fails_otherwise_or_diverges_with_a_seed_that_counts_ends_the_study(reason, runs, stubbed, monkeypatch):
    root, command, _ = stubbed
    succeed = seeds.train

    def train(options, model, seed, words, *rest):
        if seed < 5 or not runs:
            raise SystemExit(f"{model}-{seed} ended with status 1: {reason}")
        succeed(options, model, seed, words, *rest)

    monkeypatch.setattr(seeds, "train", train)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=reason):
        photographs.main()
    assert len(json.loads((root / "out.json").read_text())["runs"] if runs else []) == runs


def test_tiny_imagenet_is_split_by_names_and_travels_in_parts(tmp_path, monkeypatch, capsys):
    source, parts = tmp_path / "source", tmp_path / "parts"
    rng, content = np.random.default_rng(0), {}
    for label in ("n01", "n02"):
        for i in range(60):
            content[f"train/{label}/images/{label}_{i}.JPEG"] = rng.bytes(20_000)
    for i, label in enumerate(("n02", "n01", "n02")):
        content[f"val/images/val_{i}.JPEG"] = label.encode()
    content["val/val_annotations.txt"] = b"val_0.JPEG\tn02\t0\t0\nval_1.JPEG\tn01\t1\t1\nval_2.JPEG\tn02\t2\t2\n"
    for path, data in content.items():
        (source / "tiny" / path).parent.mkdir(parents=True, exist_ok=True)
        (source / "tiny" / path).write_bytes(data)
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "images"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(sys, "argv", ["tiny_imagenet.py", str(source), str(parts)])
    monkeypatch.setattr(tiny_imagenet, "PART_MEGABYTES", 1)
    tiny_imagenet.main()
    assert "train: 20 images\nchoose: 100 images\ntest: 3 images" in capsys.readouterr().out
    assert len(list(parts.iterdir())) > 1
    for part in parts.iterdir():
        assert part.stat().st_size <= 1e6
        with tarfile.open(part) as tar:
            tar.extractall(tmp_path / "out", filter="data")
    found = {str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in (tmp_path / "out").rglob("*.JPEG")}
    assert found.pop("test/n01/val_1.JPEG") == b"n01"
    assert {name: found.pop(name) for name in list(found) if name.startswith("test/")} == {
        "test/n02/val_0.JPEG": b"n02",
        "test/n02/val_2.JPEG": b"n02",
    }
    assert len(found) == 120
    for name, data in found.items():
        _, label, file = name.split("/")
        assert data == content[f"train/{label}/images/{file}"]
    names = sorted((f"n01_{i}.JPEG" for i in range(60)), key=lambda n: hashlib.sha256(f"0 {n}".encode()).hexdigest())
    assert {f"choose/n01/{name}" for name in names[:50]} == {name for name in found if name.startswith("choose/n01/")}
    with pytest.raises(SystemExit, match="parts must not exist"):
        tiny_imagenet.main()
    for words in (["mv", "tiny/val", "tiny/test"], ["commit", "-qm", "moved"]):
        subprocess.run([*git, *words], check=True)
    with pytest.raises(SystemExit, match="must contain val/val_annotations.txt"):
        tiny_imagenet.files_of(source)


@pytest.mark.parametrize("works", [False, True])
def test_a_sitting_whose_package_does_not_work_starts_nothing_and_nobody_waits_for_it(works, tmp_path):
    (tmp_path / "python3").write_text(f"#!/bin/sh\nexit {0 if works else 1}\n")
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "tree").mkdir()
    (tmp_path / "out").mkdir()
    subprocess.run(["git", "init", "-q", tmp_path / "tree"], check=True)
    environment = os.environ | dict(
        HOME=str(tmp_path), OUT=str(tmp_path / "out"), PATH=f"{tmp_path}:{os.environ['PATH']}"
    )

    def call(*words):
        command = ["bash", seeds.ROOT / "research" / "sitting.sh", *words]
        return subprocess.run(command, cwd=tmp_path / "tree", env=environment, check=False, timeout=60).returncode

    assert (call("start", "sh", "-c", "echo 1 > output/photographs.json") == 0) == works
    assert call("wait", "600") == 1
    results = tmp_path / "out" / "results.tar.gz"
    assert results.exists() == works
    if works:
        with tarfile.open(results) as tar:
            assert sorted(tar.getnames()) == ["output/log.txt", "output/photographs.json"]


def test_a_sitting_moves_the_checkpoints_of_several_studies_to_another_machine(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "python3").chmod(0o755)
    for name in ("tree/data/parts", "first", "second"):
        (tmp_path / name).mkdir(parents=True)

    def call(home, out, *words):
        environment = os.environ | dict(HOME=str(home), OUT=str(out), PATH=f"{tmp_path}:{os.environ['PATH']}")
        command = ["bash", seeds.ROOT / "research" / "sitting.sh", *words]
        return subprocess.run(command, cwd=tmp_path / "tree", env=environment, check=False, timeout=60).returncode

    first, second, parts = tmp_path / "first", tmp_path / "second", tmp_path / "tree" / "data" / "parts"
    for name in ("a", "b"):
        command = f"mkdir -p output/{name}; head -c 40000000 /dev/urandom > output/{name}/last.pt"
        assert call(first, first, "start", "sh", "-c", command) == 0
    assert call(first, first, "wait", "60") == 1  # all commands have ended
    for beginning in (0, 4):
        assert call(first, parts, "checkpoints", str(beginning)) == 0
        assert len([*parts.iterdir()]) == (4 if beginning == 0 else 2)
        assert max(piece.stat().st_size for piece in parts.iterdir()) <= 2**24
        assert call(second, second, "restore") == 0
        for piece in parts.iterdir():
            piece.unlink()
    for name in ("a", "b"):
        path = f"sitting/output/{name}/last.pt"
        assert (second / path).read_bytes() == (first / path).read_bytes()


def test_a_stopped_command_may_write_its_checkpoint(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "tree").mkdir()
    environment = os.environ | dict(HOME=str(tmp_path), OUT=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")

    def call(*words):
        command = ["bash", seeds.ROOT / "research" / "sitting.sh", *words]
        return subprocess.run(command, cwd=tmp_path / "tree", env=environment, check=False, timeout=60).returncode

    study = "trap 'sleep 1; echo 1 > output/last.pt; exit' TERM; touch output/started; while :; do sleep 0.1; done"
    assert call("start", "bash", "-c", study) == 0
    while not (tmp_path / "sitting" / "output" / "started").exists():
        time.sleep(0.1)
    assert call("stop") == 0
    assert (tmp_path / "sitting" / "output" / "last.pt").exists()
    assert call("wait", "600") == 1  # all commands have ended
