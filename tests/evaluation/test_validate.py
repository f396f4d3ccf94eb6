"""Tests of validate.py as a user runs it, with one or two models, against `naive_evaluation`, and with bad input."""

import csv
import io
import json
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import tarfile
from contextlib import redirect_stdout

import naive_evaluation as naive
import numpy as np
import pytest
import timm
import torch
from figures import kept_figures
from PIL import Image
from processes import SMALL, call, run, script
from timm.data import ImageNetInfo

from vil.cli import validate
from vil.evaluation import validation
from vil.evaluation.speed import Speed
from vil.exporting import export_model
from vil.factory import from_checkpoint
from vil.fault_tolerance.output import LostResultError, print_result

VIL = dict(img_size=16, **SMALL["model_kwargs"])
VIT = dict(img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=3)
VIT_ARGUMENTS = [f"{name}={value}" for name, value in VIT.items() if name != "img_size"]
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
# preprocessing config in which no value is timm's default
OWN = dict(mean=(0.3, 0.5, 0.6), std=(0.4, 0.2, 0.3), crop_pct=0.7, interpolation="bilinear", crop_mode="squash")
NUMBERS = {f"class{number:02d}": number for number in range(12)}
WORDNET_IDS = ImageNetInfo().label_names()
WORDNET = {name: 85 * i + 7 for i, name in enumerate(WORDNET_IDS[7::85])}
UNREADABLE = "ILSVRC2012_val_00000020.JPEG"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of splits with 12 and 11 classes, and of a split with 12 WordNet IDs as class names.

    The folder also contains the WordNet split as a tar file, and ReaL labels of its images.

    The images are colour gradients, so the pixels that a model receives depend on the crop and the resize.
    """
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, names, count in (("val", NUMBERS, 5), ("other", NUMBERS, 2), ("imagenet", WORDNET, 3)):
        order = iter((1 + rng.permutation(12 * count)).tolist())
        for name in names:
            (root / split / name).mkdir(parents=True)
            for number in (next(order) for _ in range(count)):
                corners = Image.fromarray(rng.integers(0, 256, (2, 2, 3), dtype=np.uint8))
                image = corners.resize((20 + number % 7, 20 + number % 9), Image.Resampling.BILINEAR)
                image.save(root / split / name / f"ILSVRC2012_val_{number:08d}.JPEG", format="PNG")
    shutil.rmtree(root / "other" / "class00")
    (broken,) = root.glob(f"imagenet/*/{UNREADABLE}")
    broken.write_bytes(broken.read_bytes()[:100])
    shutil.make_archive(str(root / "packed"), "tar", root / "imagenet")
    classes = list(WORDNET.values())
    labels = [rng.choice(classes, size, replace=False).tolist() for size in (0, 1, 2, 5, 3, 4) * 6]
    (root / "real.json").write_text(json.dumps(labels))
    return root


def small_model(name, seed, num_classes=12, **options):
    """Return a small model whose head has large random weights, so that the logits depend on the image."""
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=num_classes, **options).eval()
    with torch.no_grad():
        model.head.weight.normal_(std=2.0)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory, folders):
    """Write checkpoints in the training format, .pth files and an exported model. Return the folder and the models."""
    root, models = tmp_path_factory.mktemp("models"), {}
    for name, seed, classes in (("vil", 0, 12), ("more", 2, 1000)):
        weights, ema = (small_model("vil_tiny", seed + i, classes, **VIL) for i in (0, 1))
        models[name], models[name + " ema"] = weights, ema
        config = dict(model="vil_tiny", model_kwargs=SMALL["model_kwargs"], img_size=16, num_classes=classes)
        config |= dict(data_dir=str(folders), dataset="", val_split="other", crop_pct=0.8, interpolation="bilinear")
        states = dict(state_dict=weights.state_dict(), state_dict_ema=ema.state_dict())
        names = list(NUMBERS) if classes == 12 else WORDNET_IDS
        saved = dict(version=3, config=config, label_names=names, **states)
        torch.save(saved, root / f"{name}.pt")
        torch.save(saved | dict(best="state_dict_ema"), root / f"{name} best.pt")
        torch.save(saved | dict(config=config | dict(dataset="wds/shards")), root / f"{name} of shards.pt")
    models["larger"] = small_model("vil_tiny", 0, 12, **VIL | dict(img_size=24))
    models["larger"].load_state_dict(models["vil"].state_dict())
    for name, classes in (("vit", 12), ("more vit", 1000)):
        models[name] = small_model("vit_tiny_patch16_224", 5, classes, **VIT)
        torch.save(models[name].state_dict(), root / f"{name}.pth")
    export_model(from_checkpoint(root / "vil.pt", img_size=(16, 24)), root / "own", **OWN)
    models["own"], models["own square"] = (from_checkpoint(root / "own", **size) for size in ({}, dict(img_size=16)))
    return root, models


@pytest.fixture
def command(models, folders, tmp_path, monkeypatch, capsys):
    """Return a function that runs validate.py in this process, and returns the JSON result and stdout."""

    def speed(model, images, precision):  # fake measurement: the throughput is the number of parameters
        assert len(images) == 7
        assert -5 < images.min() < 0 < images.max() < 5  # images are normalized by mean and std
        with precision:
            assert model(images).shape == (7, model.num_classes)
        return Speed(float(parameters(model)), None)

    monkeypatch.setattr(validation, "measure_speed", speed)

    def command(*words):
        out = tmp_path / "results.json"
        words = [word.format(models=models[0], folders=folders, tmp=tmp_path) for word in words]
        shared = ["--batch-size", "7", "--workers", "0", "--device", "cpu", "--json", str(out)]
        call(validate.main, *shared, *words)
        printed = capsys.readouterr()
        command.errors = printed.err
        return json.loads(out.read_text()) if out.exists() else None, printed.out

    return command


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def pretrained(file, num_classes, **changes):
    """Return `timm.create_model` arguments that load a small model's weights, with the preprocessing `OWN`."""
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in {**OWN, **changes}.items()}
    # Disable custom_load, because timm before 1.0.31 would read the PyTorch file as JAX weights.
    known |= dict(file=file, num_classes=num_classes, custom_load=False)
    cfg = json.dumps(known).replace("{", "{{").replace("}", "}}")
    return [*VIT_ARGUMENTS, f"pretrained_cfg_overlay={cfg}".replace("MODELS", "{models}")]


AS_SAVED = dict(input_size=(3, 16, 16), crop_pct=0.8, interpolation="bilinear", **IMAGENET)
OF_VIT = dict(input_size=(3, 16, 16), crop_pct=0.9, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
OTHER = dict(input_size=(3, 24, 24), crop_pct=1.0, interpolation="nearest")
OTHER_WORDS = ["--split", "val", "--crop-pct", "1.0", "--interpolation", "nearest", "--img-size", "24", "--no-amp"]
OTHER_WORDS += ["--model-kwargs", "drop_path_rate=0.5"]
VIL_PT = ["--checkpoint", "{models}/vil.pt"]
MORE_PT = ["--checkpoint", "{models}/more.pt", "--split", "imagenet"]
VIT_WORDS = ["--model", "vit_tiny_patch16_224", "--img-size", "16", "--data-dir", "{folders}"]
VIT_12 = [*VIT_WORDS, "--checkpoint", "{models}/vit.pth", "--num-classes", "12", "--model-kwargs", *VIT_ARGUMENTS]


@pytest.mark.parametrize(
    ("words", "model", "split", "options"),
    [
        (VIL_PT, "vil", "other", AS_SAVED),
        ([*VIL_PT, "--use-ema"], "vil ema", "other", AS_SAVED),
        (
            ["--checkpoint", "{models}/vil of shards.pt", "--dataset", "", "--data-dir", "{folders}"],
            "vil", "other", AS_SAVED,
        ),
        (["--checkpoint", "{models}/vil best.pt"], "vil ema", "other", AS_SAVED),
        (["--checkpoint", "{models}/vil best.pt", "--no-use-ema"], "vil", "other", AS_SAVED),
        ([*VIL_PT, *OTHER_WORDS], "larger", "val", AS_SAVED | OTHER),
        (
            [*VIT_WORDS, "--num-classes", "12", "--model-kwargs", *pretrained("MODELS/vit.pth", 12)],
            "vit", "validation", dict(input_size=(3, 16, 16), **OWN),
        ),
        (
            [*VIT_WORDS, "--checkpoint", "{models}/vit.pth", "--model-kwargs", *VIT_ARGUMENTS],
            "vit", "validation", OF_VIT,
        ),
        (
            ["--checkpoint", "{models}/own", "--data-dir", "{folders}"],
            "own", "validation", dict(input_size=(3, 16, 24), **OWN),
        ),
    ],
    ids=[
        "as saved", "EMA", "a folder after shards", "best", "not the average", "options", "pretrained", "only weights",
        "exported",
    ],
)  # fmt: skip
def test_reported_metrics_equal_those_computed_from_saved_logits(
    models, folders, command, words, model, split, options
):
    folder = folders / {"validation": "val"}.get(split, split)
    _, targets, logits = naive.saved_logits(models[1][model], folder, NUMBERS, **options)
    expected = naive.numbers(logits, targets)
    assert 0 < expected["top1"] < expected["top5"] < 100
    result, printed = command(*words)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    low, high = naive.wilson_interval(expected["top1"] / 100 * len(targets), len(targets))
    assert result["top1_interval"] == pytest.approx([low, high], rel=1e-5)
    assert result["images_per_second"] > 0
    name = "vit_tiny_patch16_224" if model == "vit" else "vil_tiny"
    told = dict(model=name, split=split, use_ema=model == "vil ema", data_dir=str(folders), num_classes=12)
    told |= dict(unreadable=0, published={}, parameters=parameters(models[1][model]))
    assert {key: result[key] for key in told} == told
    assert ("; EMA weights" in printed) == told["use_ema"]
    has_both = str(result["checkpoint"]).endswith(".pt") and "state_dict_ema" in torch.load(result["checkpoint"])
    is_raw = has_both and not told["use_ema"]
    assert ("; raw weights (set --use-ema for the EMA weights)" in printed) == is_raw
    if model == "larger":  # command-line model arguments are merged with the checkpoint's
        assert result["model_kwargs"] == SMALL["model_kwargs"] | dict(drop_path_rate=0.5)
    assert printed.startswith(
        f"{name}: top-1 {expected['top1']:.2f}% (95% interval {low:.2f} to {high:.2f}), top-5 {expected['top5']:.2f}%, "
        f"loss {expected['loss']:.4f} on {len(targets)} images, {result['images_per_second']:.0f} images/s"
    )
    assert "published" not in printed


def logits_of_imagenet(model, folders, **options):
    """Return (names, targets, logits) of a split with some of ImageNet's classes, with logits of these classes only."""
    names, targets, logits = naive.saved_logits(model, folders / "imagenet", WORDNET, [UNREADABLE], **options)
    return names, targets, naive.only(logits, list(WORDNET.values()))


def reordered(state, order, head="head"):
    """Return a checkpoint whose class indices, and so the rows of its head and its class names, are permuted."""
    weights = {n: t[order] if n.startswith(f"{head}.") else t for n, t in state["state_dict"].items()}
    return state | dict(state_dict=weights, label_names=[state["label_names"][i] for i in order])


@pytest.mark.parametrize("split", ["val", "other"])
@pytest.mark.parametrize("kind", ["pt", "safetensors", "folder"])
def test_class_indices_follow_the_checkpoints_class_names(models, folders, command, tmp_path, split, kind):
    """A checkpoint whose classes have another order has the accuracy of the original model."""
    expected, _ = command(*VIL_PT, "--split", split)
    state = torch.load(models[0] / "vil.pt", weights_only=True)
    torch.save(reordered(state, [5, 1, 0, 2, 11, 10, 9, 8, 7, 6, 4, 3]), path := tmp_path / "other.pt")
    if kind != "pt":
        name = "other" + ".safetensors" * (kind == "safetensors")
        export_model(from_checkpoint(path), tmp_path / name, **{n: AS_SAVED[n] for n in ("crop_pct", "interpolation")})
        path = tmp_path / name
    found, _ = command("--checkpoint", str(path), "--data-dir", "{folders}", "--split", split)
    assert (found["top1"], found["images"]) == (expected["top1"], expected["images"])
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-2)


@pytest.mark.parametrize("split", ["val", "other"])
def test_two_models_with_different_class_orders_are_compared_by_class_name(models, command, tmp_path, split):
    state = torch.load(models[0] / "vil.pt", weights_only=True)
    torch.save(reordered(state, [*range(11, -1, -1)]), tmp_path / "other.pt")
    for first, second in ((models[0] / "vil.pt", tmp_path / "other.pt"), (tmp_path / "other.pt", models[0] / "vil.pt")):
        result, _ = command("--checkpoint", str(first), "--against", str(second), "--split", split)
        assert result["paired"]["agreement"] == 100
        assert len({row["top1"] for row in result["models"]}) == 1
    unnamed = [*VIT_12, "--split", split] if split == "val" else None  # the model has no class names
    if unnamed:
        straight, _ = command(*unnamed, "--against", "{models}/vil.pt")
        turned, _ = command(*unnamed, "--against", str(tmp_path / "other.pt"))
        assert turned["paired"] == straight["paired"]


def test_models_with_different_classes_are_rejected_naming_the_first_difference(models, command, folders, tmp_path):
    state = torch.load(models[0] / "vil.pt", weights_only=True)
    state["label_names"] = [*state["label_names"][:7], "shark", *state["label_names"][8:]]
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(SystemExit, match="'other' of .* has classes that .*other.pt does not have: 'class07'"):
        command("--checkpoint", "{tmp}/other.pt")
    with pytest.raises(SystemExit, match="class 7 is 'shark' in .*other.pt, but 'class07' in .*vil.pt: the models and"):
        command(*VIL_PT, "--against", "{tmp}/other.pt")
    with pytest.raises(SystemExit, match="class 7 is 'shark' in .*other.pt, but 'class07' in the split 'val'"):
        command(*VIT_12, "--split", "val", "--against", "{tmp}/other.pt")


def test_numbered_folders_use_imagenets_order_and_real_labels_follow_file_names(models, folders, command, tmp_path):
    state = torch.load(models[0] / "more.pt", weights_only=True)
    rng = np.random.default_rng(0)
    torch.save(reordered(state, rng.permutation(1000).tolist()), tmp_path / "other.pt")
    words = ["--split", "imagenet", "--real-labels", "{folders}/real.json"]
    expected, _ = command("--checkpoint", "{models}/more.pt", *words)
    found, _ = command("--checkpoint", "{tmp}/other.pt", *words)
    assert {n: found[n] for n in ("top1", "top5", "images")} == {n: expected[n] for n in ("top1", "top5", "images")}
    for number in range(1000):
        (tmp_path / "data" / "v2" / str(number)).mkdir(parents=True)
        Image.new("RGB", (16, 16), (number % 256, number // 4, 99)).save(tmp_path / "data/v2" / str(number) / "0.png")
    found, _ = command("--checkpoint", "{models}/more.pt", "--data-dir", "{tmp}/data", "--split", "v2")
    assert found["images"] == 1000


def real_labels(folders, names):
    labels = json.loads((folders / "real.json").read_text())
    return [labels[int(name[15:23]) - 1] for name in names]


@pytest.mark.parametrize("real", [False, True], ids=["targets", "ReaL"])
def test_subsets_of_imagenets_classes_are_evaluated_among_themselves(models, folders, command, caplog, real):
    names, targets, logits = logits_of_imagenet(models[1]["more"], folders, **AS_SAVED)
    expected = naive.numbers(logits, targets, real_labels(folders, names) if real else None)
    assert 0 < expected["top1"] < expected["top5"] < 100
    # The split `packed` stores the images in a .tar file.
    words = ["--real-labels", "{folders}/real.json", "--split", "packed"] if real else []
    result, printed = command(*MORE_PT, *words)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert result["unreadable"] == 1
    assert result["published"] == {"ViL-tiny": [76.4, None], "ViM-tiny": [76.1, 93.0]}
    assert "predictions restricted to the 12 classes of this split" in printed
    assert f" on {result['images']} images, " in printed
    assert "1 unreadable image was skipped" in printed
    assert ("evaluated with ReaL labels, excluding images without a ReaL label" in printed) == real
    assert printed.rstrip().endswith("published top-1 on ImageNet-1k: ViL-tiny 76.4, ViM-tiny 76.1 (top-5 93.0)")


def check_comparison(result, names, targets, logits, allowed=None):
    """Assert that two models' JSON results equal the values computed from their logits."""
    allowed = [{target} for target in targets.tolist()] if allowed is None else allowed
    counted = np.array([bool(own) for own in allowed])
    for row, own in zip(result["models"], logits, strict=True):
        expected = naive.numbers(own, targets, allowed)
        assert 0 < expected["top1"] < 100
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    for name, most in (("top1", 1), ("top5", 5)):
        cells = naive.paired(*(naive.right(own, allowed, most)[counted] for own in logits))
        assert most == 5 or cells[1] != cells[2]
        found = result["paired"][name]
        assert [found[cell] for cell in ("both", "only_first", "only_second", "neither")] == cells
        assert found["difference"] == pytest.approx(100 * (cells[1] - cells[2]) / counted.sum())
        assert found["interval"] == pytest.approx(naive.paired_interval(*cells), abs=1e-4)
        assert found["p_value"] == pytest.approx(naive.mcnemar(*cells[1:3]))
    same = np.equal(*(own.argmax(axis=1) for own in logits))[counted]
    assert result["paired"]["agreement"] == pytest.approx(100 * same.mean())


@pytest.mark.parametrize("case", ["pretrained", "plain", "EMA", "exported"])
def test_two_models_get_the_same_crops_with_their_own_normalization(models, folders, command, caplog, case):
    first, second, split, options = "vil", "vit", "other", AS_SAVED
    differences = [
        "crop_pct 0.8 for both models instead of the second model's 0.7",
        "crop_mode center for both models instead of the second model's squash",
    ]
    if case == "pretrained":  # of the models' mean and std, only the std differs
        arguments = pretrained("MODELS/vit.pth", 12, mean=IMAGENET["mean"])
        words = ["--checkpoint", "{models}/vil.pt", "--against", "vit_tiny_patch16_224", "--img-size", "16"]
        words += ["--num-classes", "12", "--against-model-kwargs", *arguments, "--split", "val"]
        own = dict(std=OWN["std"])
        split, weights = "val", ["{models}/vil.pt", None]
    elif case == "plain":  # the second weight file stores no preprocessing config
        words = ["--checkpoint", "{models}/vil.pt", "--against", "{models}/vit.pth"]
        words += ["--against-model", "vit_tiny_patch16_224", "--against-model-kwargs", *VIT_ARGUMENTS]
        own = dict(mean=OF_VIT["mean"], std=OF_VIT["std"])
        differences = [
            "crop_pct 0.8 for both models instead of the second model's 0.9",
            "interpolation bilinear for both models instead of the second model's bicubic",
        ]
        weights = ["{models}/vil.pt", "{models}/vit.pth"]
    elif case == "exported":  # both models use --img-size, although the exported model's size is not square
        words = ["--checkpoint", "{models}/vil.pt", "--use-ema", "--against", "{models}/own", "--img-size", "16"]
        first, second, own = "vil ema", "own square", dict(mean=OWN["mean"], std=OWN["std"])
        weights = ["{models}/vil.pt", "{models}/own"]
    else:
        words = [*VIT_12, "--against", "{models}/vil.pt", "--against-use-ema"]
        first, second, split, options = "vit", "vil ema", "val", OF_VIT
        own = IMAGENET
        differences = [
            "crop_pct 0.9 for both models instead of the second model's 0.8",
            "interpolation bicubic for both models instead of the second model's bilinear",
        ]
        weights = ["{models}/vit.pth", "{models}/vil.pt"]
    parts = [
        naive.saved_logits(models[1][name], folders / split, NUMBERS, **options | known)
        for name, known in ((first, {}), (second, own))
    ]
    result, printed = command(*words)
    check_comparison(result, *parts[0][:2], [logits for *_, logits in parts])
    said = [line for line in caplog.messages if " images of " not in line]
    assert said == [f"using {difference}" for difference in differences]
    rows = result["models"]
    assert [row["checkpoint"] for row in rows] == [w and w.format(models=models[0]) for w in weights]
    assert [row["use_ema"] for row in rows] == [first == "vil ema", second == "vil ema"]
    said = [
        (w or "pretrained").format(models=models[0]) + ", EMA weights" * row["use_ema"] for w, row in zip(weights, rows)
    ]
    assert f"| weights | {said[0]} | {said[1]} |  |" in printed
    assert "its weights" not in printed
    data = ("data_dir", "dataset", "split", "crop_pct", "crop_mode", "interpolation")
    assert [rows[1][name] for name in data] == [rows[0][name] for name in data]
    # The fake throughput is the number of parameters, so the values show that each model was timed separately.
    assert [row["images_per_second"] for row in rows] == [row["parameters"] for row in rows]
    assert [row["parameters"] for row in rows] == [parameters(models[1][name]) for name in (first, second)]
    names = [row["model"] for row in rows]
    assert names == [models[1][name].pretrained_cfg["architecture"] for name in (first, second)]
    assert f"|  | {names[0]} | {names[1]} | first minus second" in printed
    assert "| top-5 % | " + " | ".join(f"{row['top5']:.2f}" for row in rows) in printed


def test_two_processes_report_the_comparison_of_one_process(models, folders, tmp_path):
    """Evaluation in two processes reports the comparison that one process computes from saved logits.

    The split has ReaL labels by file name, some of ImageNet's classes, and an unreadable image.
    """
    root, loaded = models
    words = ["--checkpoint", str(root / "more.pt"), "--use-ema", "--split", "imagenet"]
    words += ["--against", str(root / "more vit.pth"), "--against-model", "vit_tiny_patch16_224"]
    words += ["--against-model-kwargs", *VIT_ARGUMENTS]
    words += ["--real-labels", str(folders / "real.json"), "--batch-size", "4", "--workers", "1"]
    words += ["--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "csv")]
    ended = run([*script("validate.py"), *words], count=2)
    assert ended.stdout.count("| top-1 % |") == 1
    assert re.findall("(?m)^(.*): 36 images of 12 classes", ended.stderr) == ["imagenet"]
    printed = ended.stdout
    assert "1 unreadable image was skipped" in printed

    names, targets, first = logits_of_imagenet(loaded["more ema"], folders, **AS_SAVED)
    second = logits_of_imagenet(loaded["more vit"], folders, **AS_SAVED | dict(mean=(0.5,) * 3, std=(0.5,) * 3))[2]
    labels = real_labels(folders, names)
    result = json.loads((tmp_path / "out.json").read_text())
    check_comparison(result, names, targets, (first, second), labels)
    assert [row["unreadable"] for row in result["models"]] == [1, 1]
    assert all(row["images_per_second"] > 0 for row in result["models"])

    counted = np.array([bool(own) for own in labels])
    right = np.array([naive.right(logits, labels, 1) for logits in (first, second)])
    rows = list(csv.DictReader((tmp_path / "csv" / "classes.csv").open()))
    assert [row["name"] for row in rows] == list(WORDNET)
    for row in rows:
        of_class = counted & (targets == WORDNET[row["name"]])
        shares = [float(row[name]) for name in ("top1_first", "top1_second")]
        assert shares == pytest.approx(100 * right[:, of_class].mean(axis=1))


def test_a_single_model_gets_tables_and_a_report_page(models, folders, command, tmp_path):
    result, printed = command(*VIL_PT, "--csv", "{tmp}/new", "--report", "{tmp}/page")
    assert printed.endswith(f"\n{tmp_path}/page/index.html\n")
    page = (tmp_path / "page" / "index.html").read_text()
    assert f"<td>{result['top1']:.2f}</td>" in page
    assert f"Validation of vil_tiny on {folders}, other" in page
    assert "top-1" not in command.errors  # stderr does not repeat the lines of stdout
    correct = round(22 * result["top1"] / 100)
    assert page.count("<figure>") == min(32, 22 - correct) + min(16, correct)
    assert all(f'<img src="data:image/jpeg;base64,{start}' in page for start in ("/9j/",))
    _, targets, logits = naive.saved_logits(models[1]["vil"], folders / "other", NUMBERS, **AS_SAVED)
    said = logits.argmax(1)
    classes, confusions = (list(csv.DictReader((tmp_path / f"new/{n}.csv").open())) for n in ("classes", "confusions"))
    expected = [100 * (said[targets == number] == number).mean() for number in range(1, 12)]
    assert [float(row["top1"]) for row in classes] == pytest.approx(expected)
    found = {(int(row["class"]), int(row["predicted"])): int(row["images"]) for row in confusions}
    pairs = list(zip(targets.tolist(), said.tolist()))
    assert found == {pair: pairs.count(pair) for pair in pairs if pair[0] != pair[1]}
    sizes = [int(row["images"]) for row in confusions]
    assert sizes == sorted(sizes, reverse=True)


def test_shards_without_class_names_use_the_checkpoints_names(folders, command, tmp_path):
    pytest.importorskip("webdataset")
    paths = sorted((folders / "other").glob("*/*"))
    with tarfile.open(tmp_path / "other-0.tar", "w") as tar:
        for path in paths:
            for suffix, content in (("png", path.read_bytes()), ("cls", str(NUMBERS[path.parent.name]).encode())):
                entry = tarfile.TarInfo(f"{path.parent.name}{path.stem}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    split = dict(name="other", filenames=["other-0.tar"], num_samples=len(paths), shard_lengths=[len(paths)])
    (tmp_path / "_info.json").write_text(json.dumps(dict(splits=dict(other=split))))
    words = ["--checkpoint", "{models}/vil.pt", "--split", "other"]
    of_shards, _ = command(*words, "--dataset", "wds/x", "--data-dir", "{tmp}", "--csv", "{tmp}/csv")
    assert [row["name"] for row in csv.DictReader((tmp_path / "csv/classes.csv").open())] == list(NUMBERS)[1:]
    of_folders, _ = command(*words)
    assert [of_shards[name] for name in ("top1", "images")] == [of_folders[name] for name in ("top1", "images")]


def test_results_are_written_to_stdout_and_to_new_folders(models, command, tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    shutil.copy(models[0] / "vit.pth", tmp_path / "weights")  # a weight file without an extension is accepted
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").mkdir()  # `--json -` means stdout, even if a folder has this name
    words = ["--checkpoint", "{models}/vil.pt", "--against", "{tmp}/weights", "--json", "-"]
    words += ["--against-model", "vit_tiny_patch16_224", "--against-model-kwargs", *VIT_ARGUMENTS]
    _, printed = command(*words, "--csv", "{tmp}/a/b", "--plot", "{tmp}/c/d/plot.png")
    result = json.loads(printed)  # stdout contains only JSON, and messages go to stderr
    table = command.errors
    for row in result["models"]:
        assert f"{row['top1']:.2f} ({row['top1_interval'][0]:.2f} to " in table
    tables = {path.name: list(csv.DictReader(path.open())) for path in (tmp_path / "a" / "b").iterdir()}
    assert tables.keys() == {"classes.csv", "confusions.csv"}
    assert [row["name"] for row in tables["classes.csv"]] == list(NUMBERS)[1:]
    assert Image.open(tmp_path / "c" / "d" / "plot.png").format == "PNG"
    assert figures[0].axes[0].get_xlabel().startswith("vil_tiny minus vit_tiny_patch16_224")


def test_the_help_explains_every_option_and_states_its_default(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        call(validate.main, "--help")
    printed = capsys.readouterr().out
    lines = re.findall(r"^  (?:-\w(?: [A-Z_]+)?, )?--([\w-]+)(.*(?:\n {4,}.*)*)", printed, re.MULTILINE)
    explained = {name.replace("-", "_"): re.split(r"\s{2,}", text)[-1] for name, text in lines}
    defaults = vars(call(validate.parse_options))
    assert {*explained, "folder"} == {"help", *defaults}
    for name, text in explained.items():
        assert len(text.split()) > 1, name
        if stated := re.search(r"\(default: (.*)\)", text):
            assert str(defaults[name] or "validation") == stated[1]
    assert (defaults["amp"], defaults["model_kwargs"], defaults["device"]) == (True, [], None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model is given: set --checkpoint FILE or --model NAME"),
        *(([*VIL_PT, f"--{word}", "x"], "need a second model; set --against") for word in ("against-model", "plot")),
        (["--model", "vil_small"], "timm has no pretrained weights for vil_small; set --checkpoint FILE"),
        (["--model", "vil_tiny", "--num-classes", "3"], "num_classes must be 200, as in the pretrained weights of vil"),
        (
            [*VIL_PT, "--against", "vim_tiny"],
            "no pretrained weights for vim_tiny; set --checkpoint FILE, or --against FILE",
        ),
        (["output/pets/best.pt"], "best.pt is a weights file, not a folder: set --checkpoint output/pets/best.pt"),
        ([*VIL_PT, "--batchsizes", "64"], "unknown option 'batchsizes' on the command line; did you mean --batch-size"),
        ([*VIL_PT, "--num-workers", "1"], "unknown option 'num_workers' on the command line; did you mean --workers"),
        # the error does not suggest `model_ema`, an option of training only
        ([*VIL_PT, "--ema"], "unknown option 'ema' on the command line; did you mean --use-ema"),
        (["--model", "vil_tiny", "--checkpoint", "nowhere.pt"], "checkpoint nowhere.pt does not exist"),
        ([*VIL_PT, "--num-classes", "10"], "has 12 classes, but the model has 10"),
        ([*VIL_PT, "--model", "vim_tiny"], "does not fit the model"),
        ([*VIL_PT, "--model-kwargs", "depth=3"], "does not fit the model"),
        ([*VIT_12, "--split", "other"], "has 11 classes, but the model has 12 (num_classes)"),
        ([*VIL_PT, "--data-dir", "nowhere"], "error: the data folder 'nowhere' does not exist: pass "),
        ([*VIL_PT, "--split", "holdout"], "has no split 'holdout'"),
        ([*VIL_PT, "--against", "nowhere.pt"], "checkpoint nowhere.pt does not exist"),
        *(
            (
                [*VIL_PT, "--against", f"nowhere{end}", "--against-model", "vil_tiny"],
                f"checkpoint nowhere{end} does not exist",
            )
            for end in (".pth", ".tar", ".safetensors", ".bin")
        ),
        ([*VIL_PT, "--against", "{models}/vit.pth"], "--against-model is required"),
        ([*VIL_PT, "--against", "{models}/vit.pth", "--against-model", "vim_tiny"], "does not fit the model"),
        ([*VIL_PT, "--against", "no_such_model"], "cannot create the model no_such_model"),
        ([*VIL_PT, "--against", "{models}/vil.pt", "--against-model-kwargs", "depth=3"], "does not fit the model"),
        ([*VIL_PT, "--against", "{tmp}/larger.pt"], "must have the same image size, got (16, 16) and (24, 24)"),
        ([*VIL_PT, "--against", "{models}/more.pt"], "the same number of classes, got 12 and 1000"),
        *(
            (["--checkpoint", "nowhere.pt", *words.split()], message)  # options are rejected before files are read
            for words, message in {
                "--batch-size 0": "--batch-size must be at least 1",
                "--workers -1": "at least 0",
                "--workers 100000": "at most 1024",
                "--crop-pct nan": "--crop-pct must be a finite",
                "--interpolation cubic": "unknown interpolation 'cubic'; did you mean 'bicubic'",
                "--img-size 0": "--img-size must be at least 1",
                "--num-classes 0": "at least 1",
                "--json {tmp}": "exists but is not a regular file",
                "--json {tmp}/pipe": "/pipe: the path exists but is not a regular file",
                "--json {models}/vil.pt/out": "cannot write ",
                "--csv {models}/vil.pt/out": "/vil.pt/out/classes.csv: Not a directory",
                "--report {models}/vil.pt": "/vil.pt is not a folder",
                "--against nowhere.pt --plot {models}/vil.pt/out": "cannot write ",
            }.items()
        ),
        ([*VIL_PT, "--real-labels"], "ReaL labels must fit the model and all images"),
        ([*MORE_PT, "--real-labels", "none.json"], "cannot read the ReaL labels"),
    ],
)
def test_invalid_input_is_reported_without_a_traceback(models, folders, command, tmp_path, words, message):
    if "{tmp}/larger.pt" in words:
        larger = torch.load(models[0] / "vil.pt", weights_only=True)
        larger["config"]["img_size"] = 24
        torch.save(larger, tmp_path / "larger.pt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit) as error:
        command(*words)
    assert str(error.value).startswith("error: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_more_processes_than_images_are_rejected(models, folders, tmp_path):
    """The world size must be at most the number of images, because every process needs an image."""
    (path, *_) = (folders / "val" / "class03").iterdir()
    (tmp_path / "val" / "class03").mkdir(parents=True)
    shutil.copy(path, tmp_path / "val" / "class03")
    words = ["--checkpoint", str(models[0] / "vil.pt"), "--data-dir", str(tmp_path), "--split", "val", "--workers", "0"]
    ended = run([*script("validate.py"), *words, "--device", "cpu"], count=2, check=False)
    assert ended.returncode == 1
    assert "error: world size must be at most the number of images, 1, got 2" in ended.stderr


def test_if_files_cannot_be_written_the_result_is_still_printed(command, capsys):
    _shared = multiprocessing.Value("i")  # first shared value, whose file of 4096 bytes would exceed the limit
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # limit files to 100 bytes, like a full disk
    try:
        with pytest.raises(SystemExit, match=r"^error: failed to write the results: .*File too large: "):
            command(*VIL_PT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "top-1" in capsys.readouterr().out


def test_ctrl_c_prints_one_line_and_exits_with_status_130(command, capsys):
    interrupt = logging.Handler()
    interrupt.emit = lambda record: signal.raise_signal(signal.SIGINT)  # Ctrl-C when the first log line is written
    logging.getLogger("vil").addHandler(interrupt)
    try:
        with pytest.raises(SystemExit, match="^130$"):
            command(*VIL_PT)
    finally:
        logging.getLogger("vil").removeHandler(interrupt)
    assert capsys.readouterr() == ("", "\nstopped\n")


def test_results_are_saved_to_files_even_if_stdout_cannot_be_written(models, tmp_path):
    words = ["--checkpoint", str(models[0] / "vil.pt"), "--workers", "0", "--json", str(tmp_path / "out.json")]
    assert run([*script("validate.py"), *words], check=False, output="/dev/full").returncode == 1
    assert json.loads((tmp_path / "out.json").read_text())["images"] == 22
    with open("/dev/full", "w") as lost, redirect_stdout(lost), pytest.raises(LostResultError):
        print_result("top-1")  # closing the file must not write the result again
