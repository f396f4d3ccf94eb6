"""Weights to hand on, and the benchmark that says what they are worth: its draws, its choices, its statistics."""

import hashlib
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from processes import SMALL
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.stats import t as student
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from timm.data import resolve_model_data_config

import vil
from research import transfer
from vil import checkpoint, export
from vil.config import Config, ConfigError
from vil.data.digits import split_digits, write_digits
from vil.export import ExportError, export_model
from vil.factory import create_model

CLASSES = load_digits().target
KWARGS = SMALL["model_kwargs"]


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """Writes a best.pt of a run, and returns it with what it holds."""

    def write(better="state_dict_ema", **options):
        torch.manual_seed(0)
        config = Config(model="vil_tiny", model_kwargs=KWARGS, crop_pct=0.7, interpolation="bilinear", **options)
        size = {"img_size": config.img_size} if config.img_size else {}
        model, average = (timm.create_model("vil_tiny", num_classes=7, **size, **KWARGS) for _ in range(2))
        state = dict(config=asdict(config) | {"num_classes": 7}, history=[], progress={}, scheduler={}, optimizer={})
        state |= dict(state_dict=model.state_dict(), state_dict_ema=average.state_dict(), best=better)
        path = tmp_path_factory.mktemp("run") / "best.pt"
        checkpoint.save_checkpoint(state, path)
        return path, state

    return write


@pytest.fixture(scope="module")
def packed(best, tmp_path_factory):
    """The file of weights of a run on images of 32 pixels, by the command, and the weights that it was made of."""
    path, state = best(img_size=32)
    file = tmp_path_factory.mktemp("weights") / "small.safetensors"
    words = ["vil.export", "--checkpoint", str(path), "--out", str(file), "--metadata", "commit=0012", "data=a=b, c"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        export.main()
    return file, state["state_dict_ema"]


def test_the_file_has_the_average_rounded_to_halves_and_says_what_it_is(packed):
    file, weights = packed
    found = load_file(file)
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float16
        np.testing.assert_array_equal(tensor.numpy(), weights[name].numpy().astype(np.float16))
    with safe_open(file, "pt") as opened:
        said = opened.metadata()
    assert (said["model"], said["num_classes"], said["input_size"]) == ("vil_tiny", "7", "[3, 32, 32]")
    assert (said["crop_pct"], said["interpolation"], said["mean"]) == ("0.7", "bilinear", "[0.485, 0.456, 0.406]")
    assert (said["commit"], said["data"]) == ("0012", "a=b, c")


def test_the_model_is_packed_where_it_is_better_than_its_average(best, tmp_path):
    path, state = best("state_dict", img_size=(16))
    export_model(vil.from_checkpoint(path), tmp_path / "weights.safetensors")
    found = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(found[name], tensor.half()) for name, tensor in state["state_dict"].items())


def test_a_model_is_loaded_from_the_file_alone(packed):
    file, weights = packed
    model = vil.from_checkpoint(file)
    assert not model.training
    assert all(torch.equal(tensor, weights[name].half().float()) for name, tensor in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    config = resolve_model_data_config(model)
    assert config["input_size"] == (3, 32, 32)
    assert (config["crop_pct"], config["interpolation"]) == (0.7, "bilinear")


def test_timm_and_a_run_start_from_the_file_with_a_head_of_their_own(packed, caplog):
    file, weights = packed
    overlay = dict(pretrained_cfg_overlay=dict(file=str(file), num_classes=7))
    models = [
        timm.create_model("vil_tiny", pretrained=True, num_classes=10, img_size=32, **overlay, **KWARGS),
        create_model("vil_tiny", str(file), num_classes=10, img_size=32, **KWARGS),
    ]
    for model in models:
        own = model.state_dict()
        assert own["head.weight"].shape == (10, 32)
        assert all(torch.equal(own[n], weights[n].half().float()) for n in own if not n.startswith("head."))
    assert f"{len(weights) - 2} of {len(weights)} tensors as they are; new: head.weight, head.bias" in caplog.text


def test_the_weights_that_are_shipped_are_those_of_their_card(request):
    folder = request.config.rootpath / "weights"
    cells = r"`(\S+)` \| `(\w+)`, (\d+) pixels, ([\d,]+) classes \| ([\d,]+) \| ([\d.]+) MB \| `(\w+)`"
    (row,) = re.findall(cells, (folder / "README.md").read_text())
    name, model, size, classes, parameters, megabytes, digest = row
    data = (folder / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == digest
    assert f"{len(data) / 1e6:.1f}" == megabytes
    loaded = vil.from_checkpoint(folder / name)
    assert f"{sum(p.numel() for p in loaded.parameters()):,}" == parameters
    assert (f"{loaded.num_classes:,}", loaded.pretrained_cfg["input_size"][1:]) == (classes, (int(size), int(size)))
    overlay = dict(file=str(folder / name))
    started = timm.create_model(model, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=10)
    for key, tensor in loaded.state_dict().items():
        assert tensor.isfinite().all()
        assert key.startswith("head.") or torch.equal(tensor, started.state_dict()[key])


def test_a_size_that_is_not_square_is_kept_and_another_resamples(best, tmp_path):
    path, _ = best(img_size=16)
    wide = vil.from_checkpoint(path, img_size=(16, 24))
    export_model(wide, tmp_path / "wide.safetensors")
    again = vil.from_checkpoint(tmp_path / "wide.safetensors")
    assert resolve_model_data_config(again)["input_size"] == (3, 16, 24)
    images = torch.randn(2, 3, 16, 24)
    with torch.inference_mode():
        torch.testing.assert_close(again(images), wide(images), rtol=0, atol=1e-2)
    export_model(vil.from_checkpoint(path), tmp_path / "square.safetensors")
    larger = vil.from_checkpoint(tmp_path / "square.safetensors", img_size=40)
    assert larger.pos_embed.shape == (1, 26, 32)
    assert larger.pos_embed.dtype == torch.float32


def test_any_model_of_timm_is_packed(tmp_path):
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet10t", num_classes=5).state_dict(), tmp_path / "resnet.pth")
    model = vil.from_checkpoint(tmp_path / "resnet.pth", "resnet10t", num_classes=5)
    report = export_model(model, tmp_path / "resnet.safetensors")
    assert report.same_top1 == report.images == 4
    assert 0 < report.difference < 1e-2
    again = vil.from_checkpoint(tmp_path / "resnet.safetensors").state_dict()
    assert again["bn1.num_batches_tracked"].dtype == torch.int64
    assert all(
        torch.equal(again[n], t if n.endswith("tracked") else t.half().float()) for n, t in model.state_dict().items()
    )


def test_weights_that_halves_cannot_hold_are_named_and_nothing_is_written(best, tmp_path):
    model = vil.from_checkpoint(best(img_size=16)[0])
    with torch.no_grad():
        model.norm.weight[3] = 65_600
    with pytest.raises(ExportError, match="half precision cannot hold norm.weight: values must be below 65504"):
        export_model(model, tmp_path / "weights.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (json.dumps({"model": "hf-hub:someone/model"}), "is of a model 'hf-hub:someone/model', which is none of"),
        (json.dumps({"model": "vil_tiny", "model_kwargs": {"url": "x"}}), "has an argument 'url' of its model"),
        (json.dumps({"model": "vil_tiny", "img_size": 10**9}), "has img_size 1000000000, and may have at most"),
        ("[1, 2]", "holds list in place of options"),
        ("{" * 10**5, "holds str in place of options"),
        ("[" * 10**5, "holds str in place of options"),
    ],
)  # fmt: skip
def test_what_a_file_of_weights_may_decide_is_what_a_checkpoint_may(tmp_path, config, message):
    path = tmp_path / "given.safetensors"
    save_file({"a": torch.ones(1)}, path, {"producer": "vision-longhorn", "config": config})
    with pytest.raises(ConfigError, match=message) as refused:
        vil.from_checkpoint(path)
    assert "\n" not in str(refused.value)


def test_the_metadata_of_others_decide_nothing(tmp_path):
    path = tmp_path / "others.safetensors"
    save_file({"a": torch.ones(1)}, path, {"format": "pt", "config": json.dumps({"model": "vil_tiny"})})
    assert checkpoint.saved_config(path) == {}


def test_a_word_of_metadata_without_text_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vil.export", "--out", "x.safetensors", "--metadata", "commit"])
    with pytest.raises(SystemExit):
        export.main()
    assert "'commit' is not of the form KEY=TEXT" in capsys.readouterr().err


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
        for i, (way, seeds) in enumerate(zip(transfer.SETTINGS, seeds_of_ways, strict=True)):
            found += rows(way, per_class, [60 + seed + i * (seed + 1) for seed in range(seeds)])
        return found

    whole = size(20, 2, 2, 2, 2, 2)
    expected = transfer.report(whole)
    assert expected.count("| 20 | ") == len(transfer.SETTINGS) + len(transfer.COMPARED)
    assert "| 60.50 ± 0.71 | 60.00 61.00 |" in expected
    assert f"| 20 | {transfer.FINE_TUNED} | {transfer.SCRATCH} | +1.50 (" in expected
    assert transfer.report(rows(transfer.SCRATCH, 5, [60, 70], True) + whole) == expected  # stopped while choosing
    assert transfer.report(size(5, 4, 3, 0, 0, 0) + whole) == expected  # while training
    assert transfer.report(size(20, 4, 3, 2, 2, 2)) == expected  # more seeds than before
    assert "| 5 | " in transfer.report(size(5, 3, 3, 3, 3, 3) + whole)


def test_differences_are_of_pairs_by_students_distribution():
    first, second = [90.0, 92.5, 91.0, 95.0], [88.0, 91.5, 91.5, 90.0]
    gaps = [a - b for a, b in zip(first, second)]
    centre = sum(gaps) / 4
    error = math.sqrt(sum((gap - centre) ** 2 for gap in gaps) / 3 / 4)
    found = transfer.difference(dict(enumerate(first)), {3: 90.0, 0: 88.0, 2: 91.5, 1: 91.5, 7: 0.0})
    half = student.ppf(0.975, 3) * error
    expected = (centre, centre - half, centre + half, 2 * student.sf(abs(centre) / error, 3))
    assert found == pytest.approx(expected)


def test_p_values_are_corrected_for_their_number():
    # by hand: 3 x 0.01, then 2 x 0.04, and the last no less than that before it
    assert transfer.holm([0.04, 0.01, 0.05]) == pytest.approx([0.08, 0.03, 0.08])
    assert transfer.holm([0.9, 0.8]) == [1, 1]


def as_a_run_that_tells_its_process(path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as training does until it has written a checkpoint
    path.write_text(str(os.getpid()))
    time.sleep(600)


def start_two_and_wait(folder):
    with transfer.processes(2) as pool:
        for i in range(2):
            pool.submit(as_a_run_that_tells_its_process, folder / str(i))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_processes_of_a_killed_benchmark_end_too(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=start_two_and_wait, args=(tmp_path,))
    parent.start()
    told = [tmp_path / "0", tmp_path / "1"]
    while not all(path.exists() and path.read_text() for path in told):
        assert parent.is_alive()
        time.sleep(0.1)
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 20
    while any(is_running(int(path.read_text())) for path in told):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(process):
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


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
def small_benchmark(packed, tmp_path, monkeypatch, no_pictures):
    """Calls the benchmark with small models and runs; returns what its file holds."""
    settings = {way: values[:2] for way, values in transfer.SETTINGS.items()}
    for name, value in dict(SETTINGS=settings, CHOICE_SEEDS=(100,), EPOCH=20).items():
        monkeypatch.setattr(transfer, name, value)

    def call(weights=packed[0]):
        words = ["transfer.py", "--weights", str(weights), "--per-class", "1", "--seeds", "2", "--device", "cpu"]
        words += [
            "--out",
            str(tmp_path / "found.json"),
            "--global-batch-size",
            "10",
            "--epochs",
            "1",
            "--img-size",
            "32",
        ]
        words += ["--warmup-epochs", "0", "--model-kwargs", *(f"{name}={value}" for name, value in KWARGS.items())]
        monkeypatch.setattr(sys, "argv", words)
        transfer.main()
        return json.loads((tmp_path / "found.json").read_text())

    return call


def test_the_benchmark_from_images_to_tables(small_benchmark, packed, tmp_path, capsys):
    found = small_benchmark()
    _, tables = capsys.readouterr().out.split(" s\n\n")
    runs = found["runs"]
    reported = [run for run in runs if not run["rehearse"]]
    assert [run["seed"] for run in runs if run["rehearse"]] == [100] * 10
    assert sorted(run["seed"] for run in reported) == [0] * 5 + [1] * 5
    for run in reported:  # with what the rehearsals say
        tried = {r["setting"]: r["top1"] for r in runs if r["rehearse"] and r["way"] == run["way"]}
        assert tried[run["setting"]] == max(tried.values())
    assert {run["updates"] for run in runs if "updates" in run} == {2}
    first, second, _ = (block.splitlines() for block in tables.split("\n\n"))
    assert len(first) == 2 + len(transfer.SETTINGS)
    assert len(second) == 2 + len(transfer.COMPARED)

    run = next(run for run in reported if run["way"] == transfer.PROBE_OF_PIXELS and run["seed"] == 1)
    train, held_out = split_digits(CLASSES, 1, 1)
    pixels = load_digits().data
    scaled = (pixels - pixels[train].mean(0)) / np.where(pixels[train].std(0) == 0, 1, pixels[train].std(0))
    model = LogisticRegression(C=run["setting"], max_iter=5000).fit(scaled[train], CLASSES[train])
    assert run["top1"] == pytest.approx(100 * (model.predict(scaled[held_out]) == CLASSES[held_out]).mean())

    content = json.loads((tmp_path / "found.json").read_text())
    lost = next(i for i, run in enumerate(runs) if run["way"] == transfer.FINE_TUNED and not run["rehearse"])
    again = content["runs"].pop(lost)
    (tmp_path / "found.json").write_text(json.dumps(content))
    resumed = small_benchmark()
    printed = capsys.readouterr().out
    assert printed.partition(" s\n\n")[0].count("\n") == 1  # of the run that was lost
    assert {**resumed["runs"][-1], "seconds": 0} == {**again, "seconds": 0}
    assert [call["runs"] for call in resumed["calls"]] == [20, 1]
    assert small_benchmark() == resumed  # which has nothing to do, and leaves the file as it is
    capsys.readouterr()

    earlier = {name: value for name, value in resumed.items() if name != "calls"}
    (tmp_path / "found.json").write_text(json.dumps(earlier))
    with pytest.raises(SystemExit, match=r"found.json does not say what machine it is of"):
        small_benchmark()
    (tmp_path / "found.json").write_text(json.dumps(resumed))

    other = tmp_path / "other.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(packed[0]).items()}, other)
    with pytest.raises(
        SystemExit, match=r"found.json has results of another sha256 of the weights: give --out another"
    ):
        small_benchmark(other)


def test_both_ways_are_trained_alike_but_for_the_start(small_benchmark, packed, monkeypatch):
    trained = []

    class Recorder:
        steps, plan = 7, "none"

        def __init__(self, config, *process):
            self.folder = Path(config.output) / config.experiment
            self.folder.mkdir()
            images = [Path(config.data_dir).glob(f"{split}/*/*.png") for split in ("train", "validation")]
            trained.append((config, [{int(image.stem[:4]) for image in some} for some in images]))

        def run(self):
            config, _ = trained[-1]
            reached = dict(eval_top1=99.0, eval_top1_ema=1000 * config.lr, eval_loss=0.0, eval_loss_ema=4.0)
            self.history = [dict.fromkeys([*reached, "train_loss"], 50.0), reached | dict(train_loss=5.0)]

    ways = {transfer.SCRATCH: None, transfer.FINE_TUNED: str(packed[0])}
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
        assert images == sets(1, seed=run["seed"], rehearse=run["rehearse"])
        assert asdict(config) | own == asdict(trained[0][0]) | own
        assert (config.epochs, config.device, config.drop_path) == (1, "cpu", 0.1)  # of the command, and of the file
        outcome = run["top1"], run["loss"], run["train_loss"], run["updates"]
        assert outcome == (1000 * config.lr, 4, 5, 7)  # of the average, after the last epoch


def test_a_run_that_is_lost_has_nothing_right_and_says_so(tmp_path, packed, monkeypatch):
    def lost(self):
        raise transfer.DivergenceError("the loss is nan")

    monkeypatch.setattr(transfer.Trainer, "run", lost)
    run = transfer.Run(transfer.SCRATCH, 1, 3e-3, 0, False)
    transfer.write_images(str(tmp_path), run)
    words = [
        "-c",
        str(transfer.ROOT / "research/configs/transfer.yaml"),
        "--device",
        "cpu",
        "--img-size",
        "32",
        "--model-kwargs",
    ]
    words += [f"{name}={value}" for name, value in KWARGS.items()]
    assert transfer.train(words, "", str(tmp_path), run) == {"top1": 0.0, "error": "the loss is nan"}


def test_features_are_the_pooled_class_tokens_of_all_digits(packed):
    file, _ = packed
    config = Config(model="vil_tiny", model_kwargs=KWARGS, img_size=32, crop_pct=1.0)
    features = transfer.Features(config, str(file), "cpu")
    found = features(transfer.PROBE, 0)
    assert found.shape == (1797, 32)
    assert features(transfer.PROBE, 1) is found
    random = [features(transfer.PROBE_OF_RANDOM, seed) for seed in (0, 1)]
    assert not np.allclose(random[0], random[1])
    model = vil.from_checkpoint(file)
    image = next(features._images(resolve_model_data_config(model) | {"crop_pct": 1.0}))[:2]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.inference_mode():
        expected = model.forward_head(model.forward_features((image / 255 - mean) / std), pre_logits=True)
    torch.testing.assert_close(torch.from_numpy(found[:2]), expected, rtol=1e-4, atol=1e-5)
    shade = image[0, 0].float().mean() / 255  # bicubic resizing keeps the mean of the 64 pixels, nearly
    assert shade.item() == pytest.approx(load_digits().images[0].mean() / 16, abs=0.03)
