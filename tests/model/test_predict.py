"""Tests of vil.predict with images as files, PIL images and arrays, and models as checkpoints and exported files."""

import csv
import io
import json
import os
import runpy
import sys
from functools import partial

import numpy as np
import pytest
import timm
import torch
from models import small, with_random_parameters
from PIL import Image
from processes import call, run
from timm.data import ImageNetInfo

import vil
from vil.checkpoint import CheckpointError, save_checkpoint
from vil.cli.predict import main
from vil.config import ConfigError
from vil.exporting import export_model
from vil.prediction import command
from vil.prediction.classifier import reason_of

NAMES = ["ant", "n01440764", "cat", "dog", "eel", "fox", "gnu"]
SHOWN = ["ant", "tench, Tinca tinca", *NAMES[2:]]
ARGUMENTS = dict(embed_dim=32, depth=2, patch_size=8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a folder of images, whose predictions depend on crop and resize, and of files that are not images."""
    folder = tmp_path_factory.mktemp("photos")
    for i, name in enumerate(("a.png", "b.jpg", "c.webp", "d.tif", "e.bmp", "f.gif", "inner/g.jpeg")):
        corners = np.random.default_rng(i).integers(0, 256, (3, 2, 3), dtype=np.uint8)
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(corners).resize((60 + 3 * i, 40), Image.Resampling.BILINEAR).save(folder / name)
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:60])
    (folder / "notes.txt").write_text("none")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "best.pt"
    model = with_random_parameters(timm.create_model("vil_tiny", num_classes=7, img_size=32, **ARGUMENTS))
    with torch.no_grad():
        model.head.weight.normal_(std=0.2)
    config = dict(model="vil_tiny", model_kwargs=ARGUMENTS, img_size=32, num_classes=7, crop_pct=0.7)
    state = dict(state_dict=model.state_dict(), config=config, label_names=NAMES, best="state_dict")
    save_checkpoint(state, path)
    return path


def expected(checkpoint, picture):
    """Return the model's class probabilities for an image preprocessed by timm's own transform."""
    model = vil.from_checkpoint(checkpoint)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.inference_mode():
        return model(transform(picture.convert("RGB"))[None])[0].softmax(-1).numpy()


def test_predictions_equal_the_models_softmax_for_every_image_source(checkpoint, photos):
    path = photos / "a.png"
    with Image.open(path) as opened:
        truth, pixels = expected(checkpoint, opened), np.asarray(opened)
    order = np.argsort(-truth)[:3]
    model = vil.from_checkpoint(checkpoint).train()
    frozen = model.blocks[0].eval()
    found = vil.predict(model, str(path), topk=3)
    assert (model.training, frozen.training) == (True, False)
    failing = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vil.predict(model, path)
    failing.remove()
    assert (model.training, frozen.training) == (True, False)
    assert [p.number for p in found] == order.tolist()
    assert [p.label for p in found] == [SHOWN[number] for number in order]
    np.testing.assert_allclose([p.probability for p in found], truth[order], rtol=1e-4)
    transparent = np.pad(pixels, [(0, 0), (0, 0), (0, 1)])
    others = [path, Image.fromarray(pixels), pixels, pixels.astype(np.uint16) << 8, transparent]
    again = [*vil.predict(checkpoint, others, topk=3, batch_size=3), vil.predict(checkpoint, pixels, topk=3)]
    # An array (B, H, W, 3) is a batch of images.
    for other in [*again, *vil.predict(model, np.stack([pixels, pixels]), topk=3)]:
        assert [p.label for p in other] == [p.label for p in found]
        assert [p.probability for p in other] == pytest.approx([p.probability for p in found], rel=1e-5)
    assert len(vil.predict(model.eval(), path, topk=100)) == 7
    assert not model.training
    # A GIF image has a palette instead of RGB values.
    assert vil.predict(model, Image.open(photos / "f.gif")) == vil.predict(model, photos / "f.gif")
    for change, tolerance in ((partial(torch.compile, backend="eager"), 1e-6), (torch.nn.Module.bfloat16, 0.02)):
        changed = {p.number: p.probability for p in vil.predict(change(model), path, topk=7)}
        assert [changed[p.number] for p in found] == pytest.approx([p.probability for p in found], abs=tolerance)
        assert sum(changed.values()) == pytest.approx(1, abs=1e-5)


def test_16_bit_images_are_predicted_equally_from_files_arrays_and_pil(checkpoint, tmp_path):
    grey = np.linspace(0, 60000, 40 * 50, dtype=np.uint16).reshape(40, 50)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    truth = expected(checkpoint, Image.fromarray((grey >> 8).astype(np.uint8)))
    for image in (tmp_path / "grey.png", Image.fromarray(grey), Image.open(tmp_path / "grey.png"), grey):
        for prediction in vil.predict(checkpoint, image, topk=7):
            assert prediction.probability == pytest.approx(truth[prediction.number], rel=1e-4)


@pytest.mark.parametrize("suffix", ["onnx", "safetensors"])
def test_an_exported_file_predicts_like_its_checkpoint(suffix, checkpoint, photos, tmp_path):
    file, files = tmp_path / os.fsdecode(b"caf\xe9") / f"model.{suffix}", sorted(photos.glob("*.*"))
    file.parent.mkdir()
    files = [path for path in files if path.stem not in ("broken", "notes")]
    export_model(vil.from_checkpoint(checkpoint), file)
    # Exported .safetensors files store weights in fp16.
    tolerance = dict(rel=1e-4, abs=1e-5) if suffix == "onnx" else dict(rel=0.1, abs=1e-2)
    for image, found in zip(*(vil.predict(of, files, topk=7) for of in (checkpoint, file)), strict=True):
        assert {p.label: p.probability for p in found} == pytest.approx(
            {p.label: p.probability for p in image}, **tolerance
        )


def test_the_command_prints_and_writes_predictions_and_names_unreadable_images(checkpoint, photos, tmp_path, capsys):
    table, entries = tmp_path / "new/found.csv", tmp_path / "found.json"
    words = ["--checkpoint", str(checkpoint), str(photos), str(photos / "notes.txt"), "--topk", "2"]
    words += ["--batch-size", "3", "--csv", str(table), "--json", str(entries), "--device", "cpu"]
    with pytest.raises(SystemExit, match=r"^2 of 9 images cannot be read$"):
        call(main, *words)
    printed, errors = capsys.readouterr()
    assert [name for name in ("broken.png", "notes.txt") if f"{photos / name}' cannot be read" in errors] == [
        "broken.png",
        "notes.txt",
    ]
    rows = {row["file"]: row for row in csv.DictReader(table.open())}
    read = {entry["file"]: entry["predictions"] for entry in json.loads(entries.read_text())}
    assert rows.keys() == read.keys()
    assert len(rows) == 7
    for line in printed.splitlines():
        file, _, said = line.partition(": ")
        first, second = vil.predict(checkpoint, file, topk=2)
        assert said == f"{first.label} {first.probability:.1%}; {second.label} {second.probability:.1%}"
        assert [rows[file][name] for name in ("class", "class_2")] == [first.label, second.label]
        names = [NAMES[first.number], NAMES[second.number]]
        assert [rows[file][name] for name in ("class_name", "class_name_2")] == names
        assert float(rows[file]["probability_2"]) == pytest.approx(second.probability, rel=1e-4)
        for entry, prediction in zip(read.pop(file), (first, second), strict=True):
            expected = dict(number=prediction.number, probability=pytest.approx(prediction.probability, rel=1e-4))
            assert entry == {"class": prediction.label, "class_name": NAMES[prediction.number], **expected}
    assert not read


def test_tables_are_written_even_without_readable_images_and_with_a_broken_pipe(
    checkpoint, photos, tmp_path, monkeypatch
):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    words = ["--checkpoint", checkpoint, photos / "notes.txt", "--csv", tmp_path / "x.csv", "--json", tmp_path / "x"]
    monkeypatch.setattr(sys, "argv", ["vil", "predict", *map(str, words)])
    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(SystemExit, match=r"^1 of 1 image cannot be read$"):
        runpy.run_module("vil", run_name="__main__")
    assert ((tmp_path / "x.csv").read_text(), (tmp_path / "x").read_text()) == ('"file"\n', "[]\n")


def test_the_command_predicts_with_a_named_model_pretrained_or_from_a_file_of_weights(
    checkpoint, photos, capsys, tmp_path
):
    call(main, "--model", "vil_tiny", "--topk", "1", str(photos / "a.png"))
    (best,) = vil.predict(timm.create_model("vil_tiny", pretrained=True), photos / "a.png", topk=1)
    assert capsys.readouterr().out == f"{photos / 'a.png'}: {best.label} {best.probability:.1%}\n"

    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=5)  # the file stores neither the name nor the number of classes
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    call(main, "--model", "resnet10t", "--checkpoint", str(tmp_path / "weights.pth"), str(photos / "a.png"))
    classes = [f"{p.label} {p.probability:.1%}" for p in vil.predict(model, photos / "a.png")]
    assert capsys.readouterr().out == f"{photos / 'a.png'}: {'; '.join(classes)}\n"
    with pytest.raises(SystemExit, match="^error: timm has no pretrained weights for vil_small"):
        call(main, "--model", "vil_small", str(photos / "a.png"))


def test_model_arguments_load_a_file_of_weights_with_other_values_than_the_models_defaults(
    checkpoint, photos, capsys, tmp_path
):
    weights = tmp_path / "weights.pth"
    torch.save(torch.load(checkpoint)["state_dict"], weights)
    model = timm.create_model("vil_tiny", num_classes=7, img_size=32, checkpoint_path=weights, **ARGUMENTS)
    classes = [f"{p.label} {p.probability:.1%}" for p in vil.predict(model, photos / "a.png")]
    words = ["--model-kwargs", *(f"{name}={value}" for name, value in ARGUMENTS.items()), "--img-size", "32"]
    call(main, photos / "a.png", "--model", "vil_tiny", "--checkpoint", weights, *words)
    assert capsys.readouterr().out == f"{photos / 'a.png'}: {'; '.join(classes)}\n"


def test_a_pretrained_model_predicts_at_another_image_size(photos, capsys):
    call(main, "--img-size", "64", "96", "--topk", "1", photos / "a.png")
    model = timm.create_model("vil_tiny_pooled", pretrained=True, img_size=(64, 96))
    (best,) = vil.predict(model, photos / "a.png", topk=1)
    assert capsys.readouterr().out == f"{photos / 'a.png'}: {best.label} {best.probability:.1%}\n"


def test_batches_have_the_requested_size_minus_unreadable_images(checkpoint, photos):
    model, batches = vil.from_checkpoint(checkpoint), []
    seen = lambda _, inputs: batches.append((len(inputs[0]), torch.is_inference_mode_enabled()))  # noqa: E731
    model.register_forward_pre_hook(seen)
    files = [photos / name for name in ("a.png", "b.jpg", "broken.png", "c.webp", "notes.txt", "d.tif", "e.bmp")]
    assert [len(found) > 0 for found in vil.predict(model, files, batch_size=3)] == [1, 1, 0, 1, 0, 1, 1]
    assert batches == [(2, True), (2, True), (1, True)]


def test_unreadable_images_are_named_and_the_others_are_predicted(checkpoint, photos, tmp_path, caplog):
    others = np.zeros((3, 8, 8), np.uint16), Image.new("RGB", (0, 5)), np.zeros((8, 8)), np.zeros(8, np.uint8)
    found = vil.predict(checkpoint, [photos / "a.png", photos / "gone.png", *others, photos / "b.jpg"])
    assert [len(predictions) for predictions in found] == [5, 0, 0, 0, 0, 0, 5]
    alone = [vil.predict(checkpoint, photos / name) for name in ("a.png", "b.jpg")]
    assert alone[0][0].probability != pytest.approx(alone[1][0].probability, rel=1e-3)
    for (first, *_), (same, *_) in zip(found[::6], alone, strict=True):
        assert (first.label, first.probability) == (same.label, pytest.approx(same.probability, rel=1e-4))
    assert f"{str(photos / 'gone.png')!r} has no predictions" in caplog.text
    for array in (others[0], *others[2:]):
        assert f"(H, W, 4) of dtype uint8 or uint16, got {array.shape} of {array.dtype}" in caplog.text
    assert vil.predict(checkpoint, []) == []
    for numbers in (dict(topk=0), dict(batch_size=0)):
        with pytest.raises(ConfigError, match="topk and batch_size must be at least 1, got [05] and (0|32)$"):
            vil.predict(checkpoint, others, **numbers)
    with pytest.raises(ConfigError, match=r"broken.png' cannot be read as an image: .*"):
        vil.predict(checkpoint, photos / "broken.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "whole.jpg")
    (tmp_path / "part.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:-300])
    with pytest.raises(ConfigError, match="part.jpg' cannot be read as an image: Truncated File Read$"):
        vil.predict(checkpoint, tmp_path / "part.jpg")
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(ConfigError, match="empty.jpg' cannot be read as an image: the file is empty$"):
        vil.predict(checkpoint, tmp_path / "empty.jpg")
    # Messages of other libraries are truncated to 200 characters.
    assert reason_of(OSError("n" * 240)) == "n" * 200
    assert reason_of(EOFError()) == "EOFError"  # an exception without a message is named by its type


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (b"\xff\xd8", r"bytes: pass PIL.Image.open\("), (bytearray(b"\xff\xd8"), r"bytearray: pass PIL.Image.open\("),
        (torch.zeros(3, 16, 16), r"Tensor: pass torchvision.transforms.functional.to_pil_image\("),
        (5, "int$"), (None, "NoneType$"), ([1, 2], "(list|int)$"),
    ],
)  # fmt: skip
def test_images_of_other_types_are_rejected_alone_and_in_a_list(image, kind, photos):
    model = small(img_size=16, patch_size=8, num_classes=2)
    for images in (image, [image], [photos / "a.png", image]):
        with pytest.raises(TypeError, match=f"must be a file path, a Pillow image or a NumPy array, got {kind}"):
            vil.predict(model, images)
    with pytest.raises(TypeError, match="got Tensor"):
        vil.predict(model, torch.zeros(2, 3, 16, 16))


def test_unnamed_classes_are_labelled_by_index_and_imagenets_by_description():
    pixels = np.zeros((32, 32, 3), np.uint8)
    model = small(img_size=(24, 32), patch_size=8, num_classes=1000)
    (found,) = vil.predict(model, pixels, topk=1)
    assert found.label == str(found.number)
    model.pretrained_cfg = dict(model.pretrained_cfg, tag="augreg_in1k", num_classes=1000)
    (found,) = vil.predict(model, pixels, topk=1)
    assert found.label == ImageNetInfo().index_to_description(found.number)
    for config in (model.pretrained_cfg, dict(label_names=NAMES)):  # Class names of a replaced head are not used.
        model.reset_classifier(4)
        model.pretrained_cfg = config
        (found,) = vil.predict(model, pixels, topk=1)
        assert found.label == str(found.number)


ODD = [dict(input_size=size) for size in ([3, 16, 20_000], [3, -5, 16], [1, 16, 16], [3, 16], "x")]
ODD += [dict(mean=[1, 2]), dict(mean=["x"] * 3)] + [dict(std=[n] * 3) for n in (0, 1e-50, float("nan"))]
ODD += [dict(crop_pct=1e-9), dict(crop_pct=0), dict(crop_pct="x"), dict(interpolation="7"), dict(crop_mode="7")]
ODD += [dict(label_names=names) for names in (["\x1b[2J"], ["a\nb"], "ab", [["a"]], {"a": 1}, 5)]


def test_onnx_metadata_is_validated_like_a_checkpoints_options(tmp_path):
    onnx, path, pixels = pytest.importorskip("onnx"), tmp_path / "given.onnx", np.zeros((32, 32, 3), np.uint8)
    said = dict(input_size=[3, 8, 8], mean=[0.5] * 3, std=[0.5] * 3, crop_pct=0.9, label_names=["a", "b", "c"])
    said |= dict(crop_mode="center", interpolation="bicubic")
    images, logits = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, 3, *rest])
        for name, rest in (("images", (None, None)), ("logits", ()))
    )
    node = onnx.helper.make_node("ReduceMean", ["images"], ["logits"], axes=[2, 3], keepdims=0)
    odd = onnx.helper.make_node("\x1b[2JNone", ["images"], ["logits"])
    graph = onnx.helper.make_graph([node], "graph", [images], [logits])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    for change in ({}, *ODD, dict(op=odd)):
        if "op" in change:
            model.graph.node[0].CopyFrom(change.pop("op"))
        texts = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in (said | change).items()
        }
        onnx.helper.set_model_props(model, texts)
        onnx.save(model, path)
        if not change and model.graph.node[0].op_type == node.op_type:
            assert {p.label for p in vil.predict(path, pixels)} == {"a", "b", "c"}
            for names in ("ab", "abcd"):
                onnx.helper.set_model_props(model, texts | dict(label_names=json.dumps([*names])))
                onnx.save(model, path)
                with pytest.raises(ConfigError, match=f"has 3 classes but {len(names)} label_names"):
                    vil.predict(path, pixels)
            del texts["label_names"]
            onnx.helper.set_model_props(model, texts)
            onnx.save(model, path)
            assert {p.label for p in vil.predict(path, pixels)} == {"0", "1", "2"}
            continue
        with pytest.raises(
            ConfigError, match=r"given.onnx must be an ONNX file written by vil.export: [^\n]*$"
        ) as refused:
            vil.predict(path, pixels)
        assert str(refused.value).isprintable()
    onnx.helper.set_model_props(model, {n: v if isinstance(v, str) else json.dumps(v) for n, v in said.items()})
    mean = dict(axes=[2, 3], keepdims=0)
    for change, message in (
        (dict(op="Identity"), r"must return logits .* got shape \(1, 3, 8, 8\)"),
        (dict(op="Shape"), r"must return logits .* got shape \(4,\)"),
        (dict(op="ReduceMean", axes=[0, 2, 3], keepdims=0), r"must return logits .* got shape \(3,\)"),
        (dict(op="ReduceMean", axes=[0, 2], keepdims=0), r"must return logits .* got shape \(3, 8\)"),
        (dict(op="ReduceMean", given="x", **mean), r"given.onnx on images of shape \(1, 3, 8, 8\) failed: .*'x'"),
        (dict(op="ReduceMean", side=9, **mean), "given.onnx on images .* Got: 8 Expected: 9"),
    ):  # fmt: skip
        given, side = change.pop("given", "images"), change.pop("side", None)
        of_floats = onnx.TensorProto.INT64 if change["op"] == "Shape" else onnx.TensorProto.FLOAT
        graph = model.graph
        graph.node[0].CopyFrom(onnx.helper.make_node(change.pop("op"), [given], ["logits"], **change))
        graph.input[0].CopyFrom(
            onnx.helper.make_tensor_value_info(given, onnx.TensorProto.FLOAT, [None, 3, side, side])
        )
        graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("logits", of_floats, None))
        onnx.save(model, path)
        with pytest.raises(ConfigError, match=message) as refused:
            vil.predict(path, pixels)
        assert str(refused.value).isprintable()
    model.graph.node[0].output[0] = model.graph.output[0].name = "embedding\x1b"
    onnx.save(model, path)
    with pytest.raises(ConfigError, match=r"given.onnx must have the output 'logits', got embedding\?: "):
        vil.predict(path, pixels)


def test_file_names_cannot_send_control_characters_to_the_terminal(checkpoint, photos, tmp_path):
    (tmp_path / "out").symlink_to(photos)
    (tmp_path / "\x1b[2J\nerror: all is well.png").write_bytes((photos / "a.png").read_bytes())
    words = ["-m", "vil", "predict", "--checkpoint", str(checkpoint), str(tmp_path), str(photos / "a.png")]
    words += ["--topk", "1", "--batch-size", "1"]  # 1 is the smallest valid --topk and --batch-size
    ended = run([sys.executable, *words])
    assert ended.stderr.startswith("left out 1 link in ")  # log messages are printed without a prefix
    first, second = ended.stdout.splitlines()
    assert first.isprintable()
    assert second.startswith(f"{photos / 'a.png'}: ")  # predictions are printed in the order of the arguments


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--topk", "0", "{photos}"], "error: --topk must be at least 1, got 0"),
        (["--topk", "two", "{photos}"], "error: --topk must be an integer, got 'two'$"),
        (["--topkk", "2", "{photos}"], r"error: unknown option 'topkk' .*; did you mean --topk\?$"),
        (
            ["--crop-mode", "border", "{photos}"],
            "error: unknown option 'crop_mode' on .*; vil predict --help lists the options$",
        ),
        (["--classes", "0", "{photos}"], "error: .*classes"),
        (["{photos}", "{tmp}/best.pt"], "error: .*best.pt is a model, not an image: set --checkpoint .*best.pt$"),
        (["{photos}", "{photos}/notes.pt2"], "error: .*notes.pt2 is a torch.export program, .*: set --checkpoint to "),
        (["--device", "gpu", "{photos}"], "error: device must be .*, got 'gpu'; did you mean 'cuda'"),
        (["{tmp}"], "error: there are no images in "),
        (["--device", "toaster", "{photos}"], "error: device must be .*, got 'toaster'"),
        (["{photos}", "--checkpoint", "{tmp}/gone.onnx"], "error: .*gone.onnx does not exist"),
        (["{photos}", "--checkpoint", "{photos}/notes.onnx"], "error: .*notes.onnx must be an ONNX file written by"),
        (
            ["{photos}", "--checkpoint", "{photos}/notes.onnx", "--model", "vil_tiny", "--img-size", "32"],
            "error: .*notes.onnx already contains a model: remove --model, --img-size$",
        ),
        (["{photos}", "--img-size", "0"], "error: --img-size must be at least 1, got "),
        (["--img-size", "32", "{photos}"], "error: .* required: IMAGE.FOLDER; .* before --img-size and --model-kwargs"),
        (["{photos}", "--checkpoint", "{photos}/notes.pt2"], "error: .*notes.pt2 .* is an exported program"),
        # The run folder contains only best.pt.
        (["{photos}", "--checkpoint", "{tmp}/last.pt"], "error: checkpoint .*last.pt does not exist$"),
        (
            ["{photos}", "--checkpoint", "{tmp}"],
            "error: .* is the folder of a run, not a checkpoint: use .*best.pt, or last.pt to resume the run$",
        ),
        *((["{photos}", f"--{word}", "{tmp}"], "error: cannot write ") for word in ("csv", "json")),
    ],
)
def test_invalid_arguments_of_predict_are_reported_in_one_line(words, error, checkpoint, photos, tmp_path):
    for suffix in ("onnx", "pt2"):
        (photos / f"notes.{suffix}").write_text("none")
    (tmp_path / "best.pt").touch()
    words = [word.format(photos=photos, tmp=tmp_path) for word in words]
    with pytest.raises(SystemExit, match=error) as caught:
        call(main, "--checkpoint", checkpoint, *words)
    assert "\n" not in str(caught.value)


def test_the_json_has_no_class_names_if_they_equal_the_labels(checkpoint, photos, capsys, tmp_path):
    saved = torch.load(checkpoint)
    for names in ([*"abcdefg"], None):
        save_checkpoint(saved | dict(label_names=names), tmp_path / "best.pt")
        call(main, "--checkpoint", tmp_path / "best.pt", photos / "a.png", "--topk", "1", "--json", "-")
        ((found,),) = [entry["predictions"] for entry in json.loads(capsys.readouterr().out)]
        assert found.keys() == {"class", "probability", "number"}


def test_json_on_stdout_replaces_the_lines(checkpoint, photos, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call(main, "--checkpoint", checkpoint, str(photos / "a.png"), "--top-k", "2", "--json", "-")
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["file"], len(entry["predictions"])) == (str(photos / "a.png"), 2)
    assert not (tmp_path / "-").exists()


def test_swapped_arguments_and_folders_are_rejected(checkpoint, photos):
    with pytest.raises(ConfigError, match="the first argument must be a model or checkpoint .*, got .*a.png$"):
        vil.predict(photos / "a.png", checkpoint)
    with pytest.raises(ConfigError, match="got the folder .*: pass a list of the folder's files$"):
        vil.predict(checkpoint, str(photos))


def test_models_without_classes_and_missing_checkpoints_are_rejected():
    with pytest.raises(ConfigError, match="num_classes of the model must be at least 1"):
        vil.predict(small(img_size=32, patch_size=8, num_classes=0), np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(ConfigError, match="must accept images of 3 channels, got 1"):
        vil.predict(small(img_size=32, patch_size=8, in_chans=1), np.zeros((32, 32), np.uint8))
    with pytest.raises(ConfigError, match=r"must return logits \(1 images, classes\), got shape \(1, 17, 5\)"):
        vil.predict(small(img_size=32, patch_size=8, num_classes=5, global_pool=""), np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(CheckpointError, match="does not exist"):
        vil.predict("gone.pt", "photo.jpg")


def test_command_defaults_equal_the_functions_and_interruptions_print_one_line(monkeypatch, capsys):
    def stop(options):
        assert (options.topk, options.batch_size) == (5, 32)
        assert (vil.predict.__defaults__, vil.predict.__kwdefaults__) == ((5,), dict(batch_size=32))
        raise ends.pop()

    ends = [OSError(28, "No space left on device", "x.csv"), KeyboardInterrupt()]
    monkeypatch.setattr(command, "predict_files", stop)
    for end in ("130", "^error: .*No space left on device: 'x.csv'$"):
        with pytest.raises(SystemExit, match=end):
            call(main, "--checkpoint", "any.pt", "photo.jpg")
    assert capsys.readouterr().err == "\nstopped\n"


def test_the_command_tells_whether_ema_weights_or_raw_weights_predict(checkpoint, photos, tmp_path, capsys, caplog):
    saved = torch.load(checkpoint)
    average = {name: 0.5 * value for name, value in saved["state_dict"].items()}
    del saved["best"]
    save_checkpoint(saved | dict(state_dict_ema=average), tmp_path / "last.pt")
    save_checkpoint(saved | dict(state_dict=average), tmp_path / "average.pt")
    raw = "raw weights (set --use-ema for the EMA weights)"
    for words, same, said in (([], checkpoint, raw), (["--use-ema"], tmp_path / "average.pt", "EMA weights")):
        caplog.clear()
        call(main, "--checkpoint", tmp_path / "last.pt", *words, photos / "a.png")
        assert caplog.messages == [f"{tmp_path / 'last.pt'}: using the {said}"]
        printed = capsys.readouterr().out
        call(main, "--checkpoint", same, photos / "a.png")
        assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit, match="error: --use-ema needs --checkpoint with a checkpoint of vil train"):
        call(main, "--use-ema", photos / "a.png")
