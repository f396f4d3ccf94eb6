"""Tests of research/transfer.py: chosen settings, runs and result files."""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from faults import is_running
from processes import SMALL, Forked
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC
from timm.data import resolve_model_data_config

import vil
from research import transfer
from vil.config import Config
from vil.data.digits import split_digits
from vil.exporting import export_model

CLASSES = load_digits().target
KWARGS = SMALL["model_kwargs"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return the path of a file with the weights of a small model for images of 32 pixels."""
    folder, arguments = tmp_path_factory.mktemp("weights"), dict(num_classes=7, img_size=32, **KWARGS)
    torch.manual_seed(0)
    save_file(timm.create_model("vil_tiny", **arguments).state_dict(), folder / "state.safetensors")
    model = vil.from_checkpoint(folder / "state.safetensors", "vil_tiny", **arguments)
    export_model(model, folder / "small.safetensors")
    return folder / "small.safetensors"


def rows(way, per_class, top1, rehearse=False, setting=1e-3):
    return [transfer.Run(way, per_class, setting, s, rehearse)._asdict() | {"top1": v} for s, v in enumerate(top1)]


def test_a_setting_is_chosen_by_the_rehearsals_of_its_way_and_size_alone():
    lowest, low, high, *_, highest = transfer.RATES
    own = (transfer.SCRATCH, 5)
    found = rows(*own, [10, 90], True, lowest) + rows(*own, [60, 60], True, low) + rows(*own, [59, 60], True, high)
    found += rows(*own, [1, 2], True, highest)
    others = rows(transfer.FINE_TUNED, 5, [99], True, lowest) + rows(transfer.SCRATCH, 20, [99], True, lowest)
    assert transfer.chosen(found + others + rows(*own, [100, 100], False, lowest), *own) == low


def test_a_setting_that_was_tried_later_and_is_better_takes_the_place_of_the_one_before():
    *before, last = transfer.RATES
    own = (transfer.SCRATCH, 5)
    found = [row for rate in before for row in rows(*own, [50], True, rate)] + rows(
        *own, [40, 41, 42], False, before[0]
    )
    worse, better = (found + rows(*own, [top1], True, last) + rows(*own, [70, 71], False, last) for top1 in (49, 51))
    assert transfer.by_seed(worse, *own) == {0: 40, 1: 41, 2: 42}
    assert transfer.by_seed(better, *own) == {0: 70, 1: 71}


def test_what_a_stopped_call_has_left_is_reported_as_far_as_all_ways_have_it():
    def size(per_class, *seeds_of_ways):
        found = [row for way in transfer.SETTINGS for row in rows(way, per_class, [50], True)]
        # the last entry of `seeds_of_ways` applies to all further methods
        for i, way in enumerate(transfer.SETTINGS):
            seeds = seeds_of_ways[min(i, len(seeds_of_ways) - 1)]
            found += rows(way, per_class, [60 + seed + i * (seed + 1) for seed in range(seeds)])
        return found

    def tables(rows):
        return transfer.ways_table(rows), transfer.differences_table(rows)

    whole = size(20, 2)
    ways, differences = expected = tables(whole)
    assert ways.count("| 20 | ") == len(transfer.SETTINGS)
    assert differences.count("| 20 | ") == len(transfer.COMPARED)
    assert "| 60.50 ± 0.71 | 60.00 61.00 |" in ways
    assert f"| 20 | {transfer.FINE_TUNED} | {transfer.SCRATCH} | +1.50 (" in differences
    # an earlier call was stopped before the learning rate was selected
    assert tables(rows(transfer.SCRATCH, 5, [60, 70], True) + whole) == expected
    # an earlier call was stopped before all methods had been trained
    assert tables(size(5, 4, 3, 0) + whole) == expected
    assert tables(size(20, 4, 3, 2)) == expected  # some methods have more seeds than others
    assert "| 5 | " in tables(size(5, 3) + whole)[0]
    assert transfer.differences_table(size(20, 1)).count("\n") == 2  # one seed permits no significance test


def as_a_run_that_tells_its_process(path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # training ignores SIGTERM until it has written a checkpoint
    path.write_text(f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']}")
    time.sleep(600)


def start_two_and_wait(folder):
    transfer.visible_gpus = lambda: ["5", "7"]
    with transfer.processes(2) as pool:
        for i in range(2):
            pool.submit(as_a_run_that_tells_its_process, folder / str(i))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_processes_have_a_gpu_each_and_end_with_a_benchmark_that_is_killed(tmp_path):
    parent = Forked(target=start_two_and_wait, args=(tmp_path,))
    parent.start()
    told = [tmp_path / "0", tmp_path / "1"]
    while not all(path.exists() and path.read_text() for path in told):
        assert parent.is_alive()
        time.sleep(0.1)
    parent.kill()
    parent.join()
    numbers, gpus = zip(*(path.read_text().split() for path in told))
    assert sorted(gpus) == ["5", "7"]
    deadline = time.monotonic() + 20
    while any(map(is_running, map(int, numbers))):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_without_gpus_every_process_is_told_of_none(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(transfer, "visible_gpus", list)
    monkeypatch.setattr(transfer, "ProcessPoolExecutor", lambda *_, initargs, **__: initargs)
    (gpus,) = transfer.processes(2)
    assert [gpus.get(timeout=20) for _ in range(2)] == ["", ""]


def test_checkpoints_are_in_memory_if_there_is_enough_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**31 + 1))
    assert [transfer.fast_folder(jobs) for jobs in (1, 2, 3)] == [str(tmp_path), str(tmp_path), None]
    monkeypatch.setattr(transfer, "SHARED_MEMORY", tmp_path / "none")  # as on a machine without /dev/shm
    assert transfer.fast_folder(1) is None


def test_an_epoch_is_as_long_for_few_images_as_for_many(monkeypatch, tmp_path):
    copies = []
    monkeypatch.setattr(transfer, "write_digits", lambda *_, **named: copies.append(named["copies"]))
    for per_class in (1, 5, 20, 100):
        transfer.write_images(str(tmp_path), transfer.Run(transfer.SCRATCH, per_class, 1e-3, 0, False))
    assert copies == [80, 16, 4, 1]


def test_outcomes_come_as_they_are_done_and_an_error_calls_off_the_rest():
    started, seen = [], threading.Event()

    def outcome(run):
        started.append(run)
        if run == 2:
            raise RuntimeError("lost")
        return run * 10 if run < 2 else seen.wait(60)

    assert list(transfer.outcomes(None, outcome, [0, 1])) == [(0, 0), (1, 10)]
    with ThreadPoolExecutor(1) as pool:
        assert sorted(transfer.outcomes(pool, outcome, [0, 1])) == [(0, 0), (1, 10)]
        with pytest.raises(RuntimeError, match="lost"):
            list(transfer.outcomes(pool, outcome, [2, 3, 4, 5]))
        seen.set()
    assert 4 not in started


@pytest.fixture
def small_benchmark(weights, tmp_path, monkeypatch, no_pictures):
    """Return a function that runs the study with small models and short runs, and returns the content of its file."""
    settings = {way: values[:2] for way, values in transfer.SETTINGS.items()}
    for name, value in dict(SETTINGS=settings, CHOICE_SEEDS=(100,), EPOCH=20).items():
        monkeypatch.setattr(transfer, name, value)

    def call(weights=weights):
        words = ["transfer.py", "--weights", str(weights), "--per-class", "1", "--seeds", "2", "--device", "cpu"]
        words += ["--out", str(tmp_path / "found.json"), "--global-batch-size", "10", "--epochs", "1"]
        words += ["--img-size", "32", "--warmup-epochs", "0"]
        words += ["--model-kwargs", *(f"{name}={value}" for name, value in KWARGS.items())]
        monkeypatch.setattr(sys, "argv", words)
        transfer.main()
        return json.loads((tmp_path / "found.json").read_text())

    return call


def test_the_benchmark_from_images_to_tables(small_benchmark, weights, tmp_path, capsys):
    found = small_benchmark()
    _, tables = capsys.readouterr().out.split(" s\n\n")
    runs = found["runs"]
    reported = [run for run in runs if not run["rehearse"]]
    assert [run["seed"] for run in runs if run["rehearse"]] == [100] * 12
    assert sorted(run["seed"] for run in reported) == [0] * 6 + [1] * 6
    for run in reported:  # the reported runs use the learning rate or penalty that was best for CHOICE_SEEDS
        tried = {r["setting"]: r["top1"] for r in runs if r["rehearse"] and r["way"] == run["way"]}
        assert tried[run["setting"]] == max(tried.values())
    assert {run["updates"] for run in runs if "updates" in run} == {2}
    first, second, _ = (block.splitlines() for block in tables.split("\n\n"))
    assert len(first) == 2 + len(transfer.SETTINGS)
    assert len(second) == 2 + len(transfer.COMPARED)

    pixels, ways = load_digits().data, (transfer.PROBE_OF_PIXELS, transfer.KERNEL_MACHINE)
    for run in (run for run in runs if run["way"] in ways and run["seed"] in (1, 100)):
        train, held_out = split_digits(CLASSES, 1, run["seed"], run["rehearse"])
        scaled = (pixels - pixels[train].mean(0)) / np.where(pixels[train].std(0) == 0, 1, pixels[train].std(0))
        linear = run["way"] == transfer.PROBE_OF_PIXELS
        inputs = scaled if linear else pixels
        model = LogisticRegression(C=run["setting"], max_iter=5000) if linear else SVC(C=run["setting"])
        right = model.fit(inputs[train], CLASSES[train]).predict(inputs[held_out]) == CLASSES[held_out]
        assert run["top1"] == pytest.approx(100 * right.mean())

    content = json.loads((tmp_path / "found.json").read_text())
    lost = next(i for i, run in enumerate(runs) if run["way"] == transfer.FINE_TUNED and not run["rehearse"])
    again = content["runs"].pop(lost)
    content["calls"][0]["seconds"] = 1000
    (tmp_path / "found.json").write_text(json.dumps(content))
    resumed = small_benchmark()
    printed = capsys.readouterr().out
    # stdout has a line for the run that was repeated, and the total seconds of both calls
    said, seconds = printed.partition(" s\n\n")[0].splitlines()
    # the total seconds are printed after the file is written
    assert 0 <= int(seconds) - 1000 - resumed["calls"][1]["seconds"] < 10, said
    assert {**resumed["runs"][-1], "seconds": 0} == {**again, "seconds": 0}
    assert [call["runs"] for call in resumed["calls"]] == [24, 1]
    assert all(0 <= call["seconds"] < 600 for call in (found["calls"][0], resumed["calls"][1]))
    assert small_benchmark() == resumed  # a third call has nothing to train and does not change the file
    capsys.readouterr()

    earlier = {name: value for name, value in resumed.items() if name != "calls"}
    (tmp_path / "found.json").write_text(json.dumps(earlier))
    with pytest.raises(SystemExit, match=r"found.json of an earlier version"):
        small_benchmark()
    (tmp_path / "found.json").write_text(json.dumps(resumed))

    other = tmp_path / "other.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, other)
    with pytest.raises(SystemExit, match=r"sha256 of the weights must match .*found.json: choose another --out"):
        small_benchmark(other)


def test_both_ways_are_trained_alike_but_for_the_start(small_benchmark, weights, tmp_path, monkeypatch):
    trained = []

    class Recorder:
        steps, setup = 7, "none"

        def __init__(self, config, *process):
            self.run_info = SimpleNamespace(folder=Path(config.output) / config.experiment)
            self.run_info.folder.mkdir()
            images = [Path(config.data_dir).glob(f"{split}/*/*.png") for split in ("train", "validation")]
            trained.append((config, [{int(image.stem[:4]) for image in some} for some in images]))

        def run(self):
            config, _ = trained[-1]
            if before := trained[:-1]:  # results of earlier runs are already in the file
                assert len(json.loads((tmp_path / "found.json").read_text())["runs"]) == len(before)
            reached = dict(eval_top1=99.0, eval_top1_ema=1000 * config.lr, eval_loss=0.0, eval_loss_ema=4.0)
            history = [dict.fromkeys([*reached, "train_loss"], 50.0), reached | dict(train_loss=5.0)]
            self.state = SimpleNamespace(history=history)

    ways = {transfer.SCRATCH: None, transfer.FINE_TUNED: str(weights)}
    lower, higher = transfer.RATES[:2]
    monkeypatch.setattr(transfer, "Trainer", Recorder)
    monkeypatch.setattr(transfer, "SETTINGS", dict.fromkeys(ways, (lower, higher)))
    monkeypatch.setattr(transfer, "COMPARED", transfer.COMPARED[:1])
    runs = small_benchmark()["runs"]
    expected = {(way, rate, 100, True) for way in ways for rate in (lower, higher)}
    expected |= {(way, higher, seed, False) for way in ways for seed in (0, 1)}
    assert {(run["way"], run["setting"], run["seed"], run["rehearse"]) for run in runs} == expected
    own = dict.fromkeys(("lr", "seed", "pretrained_path", "data_dir", "experiment"))
    for run, (config, images) in zip(runs, trained, strict=True):
        assert (config.pretrained_path, config.lr, config.seed) == (ways[run["way"]], run["setting"], run["seed"])
        drawn = split_digits(CLASSES, 1, run["seed"], run["rehearse"])
        assert images == [set(indices.tolist()) for indices in drawn]
        assert asdict(config) | own == asdict(trained[0][0]) | own
        # epochs and device are from the command line, drop_path from the config file
        assert (config.epochs, config.device, config.drop_path) == (1, "cpu", 0.1)
        outcome = run["top1"], run["loss"], run["train_loss"], run["updates"]
        assert outcome == (1000 * config.lr, 4, 5, 7)  # the results are those of the EMA weights after the last epoch
        assert run["top1_by_epoch"] == [50, 1000 * config.lr]


def test_two_processes_cannot_write_the_same_results(tmp_path, monkeypatch):
    monkeypatch.setattr("vil.fault_tolerance.locks.PATIENCE", 0)
    first = transfer.Results(tmp_path / "out.json", {}, {}, {})
    with pytest.raises(SystemExit, match="another process writes"):
        transfer.Results(tmp_path / "out.json", {}, {}, {})
    transfer.Results(tmp_path / "other.json", {}, {}, {})
    del first
    transfer.Results(tmp_path / "out.json", {}, {}, {})


def test_a_diverged_run_has_an_accuracy_of_zero_and_the_curve_of_its_finished_epochs(tmp_path, monkeypatch):
    def diverge(self):
        self.state.history.append(dict(eval_top1_ema=12.345))
        raise transfer.DivergenceError("the loss is nan")

    monkeypatch.setattr(transfer.Trainer, "run", diverge)
    run = transfer.Run(transfer.SCRATCH, 1, 3e-3, 0, False)
    transfer.write_images(str(tmp_path), run)
    words = ["-c", str(transfer.ROOT / "research/configs/transfer.yaml"), "--device", "cpu", "--img-size", "32"]
    words += ["--model-kwargs"]
    words += [f"{name}={value}" for name, value in KWARGS.items()]
    outcome = transfer.train(words, "", str(tmp_path), run)
    assert outcome.pop("seconds") >= 0
    assert outcome.pop("plan")
    assert outcome == {"top1": 0.0, "error": "the loss is nan", "top1_by_epoch": [12.35]}
    assert [*tmp_path.iterdir()] == [transfer.images_of(str(tmp_path), run)]


def test_features_are_the_pooled_class_tokens_of_all_digits(weights):
    config = Config(model="vil_tiny", model_kwargs=KWARGS, img_size=32, crop_pct=1.0)
    features = transfer.Features(config, str(weights), "cpu")
    found = features(transfer.PROBE, 0)
    assert found.shape == (1797, 32)
    assert features(transfer.PROBE, 1) is found
    random = [features(transfer.PROBE_OF_RANDOM, seed) for seed in (0, 1)]
    assert not np.allclose(random[0], random[1])
    states = [transfer.frozen("vil_tiny", None, 0, "cpu", img_size=32, **KWARGS).state_dict() for _ in range(2)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    model = vil.from_checkpoint(weights)
    image = next(features._images(resolve_model_data_config(model) | {"crop_pct": 1.0}))[:2]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.inference_mode():
        expected = model.forward_head(model.forward_features((image / 255 - mean) / std), pre_logits=True)
    torch.testing.assert_close(torch.from_numpy(found[:2]), expected, rtol=1e-4, atol=1e-5)
    shade = image[0, 0].float().mean() / 255  # bicubic resizing roughly preserves the mean of the 64 pixels
    assert shade.item() == pytest.approx(load_digits().images[0].mean() / 16, abs=0.03)
