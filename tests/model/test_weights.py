"""Tests of exported .safetensors weight files: contents, metadata, and the weights in the repository."""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

import flops
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from processes import SMALL, call
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.data import resolve_model_data_config
from timm.models import save_for_hf

import vil
from vil import checkpoint
from vil.checkpoint import CheckpointError
from vil.cli import export
from vil.config import Config, ConfigError
from vil.exporting import ExportError, export_model
from vil.factory import create_model

KWARGS = SMALL["model_kwargs"]


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """Return a function that writes a run's best.pt, and returns the file's path and content."""

    def write(**options):
        torch.manual_seed(0)
        config = Config(model="vil_tiny", model_kwargs=KWARGS, crop_pct=0.7, interpolation="bilinear", **options)
        size = {"img_size": config.img_size} if config.img_size else {}
        model, average = (timm.create_model("vil_tiny", num_classes=7, **size, **KWARGS) for _ in range(2))
        state = dict(config=asdict(config) | {"num_classes": 7}, history=[], progress={}, scheduler={})
        state |= dict(state_dict=model.state_dict(), state_dict_ema=average.state_dict(), best="state_dict_ema")
        path = tmp_path_factory.mktemp("run") / "best.pt"
        checkpoint.save_checkpoint(state, path)
        return path, state

    return write


@pytest.fixture(scope="module")
def packed(best, tmp_path_factory):
    """Return the weight file that vil.export writes for a run with 32-pixel images, and the run's EMA weights."""
    path, state = best(img_size=32)
    file = tmp_path_factory.mktemp("weights") / "small.safetensors"
    call(export.main, "--checkpoint", path, "--out", file, "--metadata", "commit=0012", "data=a=b, c")
    return file, state["state_dict_ema"]


def test_a_weight_file_has_the_ema_weights_in_fp16_and_the_models_config(packed):
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
    model = vil.from_checkpoint(file)
    assert not model.training
    assert all(torch.equal(tensor, weights[name].half().float()) for name, tensor in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    config = resolve_model_data_config(model)
    assert (config["input_size"], config["crop_pct"], config["interpolation"]) == ((3, 32, 32), 0.7, "bilinear")
    with pytest.raises(CheckpointError, match="small.safetensors does not fit the model"):
        vil.from_checkpoint(file, "vim_tiny")  # vim_tiny cannot load vil_tiny's weights


def test_timm_and_training_load_the_file_with_a_new_head(packed, caplog):
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
    assert f"{len(weights) - 2} of {len(weights)} tensors; new: head\n" in caplog.text
    first = create_model("vil_tiny", str(file), num_classes=10, img_size=32, **{**KWARGS, "depth": 1}).state_dict()
    assert {int(name.split(".")[1]) for name in first if name.startswith("blocks.")} == {0}
    assert all(torch.equal(first[n], weights[n].half().float()) for n in first if not n.startswith("head."))


def test_a_model_of_timms_create_model_is_exported_with_its_arguments(tmp_path):
    given = dict(depth=2, embed_dim=64, patch_size=8, img_size=(32, 48), num_classes=3)
    model = timm.create_model("vil_tiny_pooled", **given).eval()
    vil.export.export_model(model, tmp_path / "own")
    images = torch.rand(2, 3, 32, 48)
    for loaded in (
        vil.from_checkpoint(tmp_path / "own"),
        timm.create_model(f"local-dir:{tmp_path / 'own'}", pretrained=True).eval(),
    ):
        torch.testing.assert_close(loaded(images), model(images), rtol=2e-3, atol=2e-3)


# Models of timm name their head differently, for example `fc` or `head.linear`.
@pytest.mark.parametrize("name", ["resnet10t", "levit_128s"])
def test_training_loads_another_timm_models_file_with_or_without_its_head(name, tmp_path, caplog):
    weights = timm.create_model(name, num_classes=7).state_dict()
    torch.save(weights, tmp_path / "weights.pth")
    own = create_model(name, str(tmp_path / "weights.pth"), num_classes=7).state_dict()
    assert all(torch.equal(own[n], weights[n]) for n in weights)
    torch.save(weights | {"more": torch.ones(1)}, tmp_path / "weights.pth")
    create_model(name, str(tmp_path / "weights.pth"), num_classes=5)
    assert caplog.messages[-1].endswith("; not used: more")


@pytest.mark.parametrize("of_a_run", [True, False])
def test_an_exported_folder_is_read_by_timm_and_vil_with_names_and_preprocessing(
    best, tmp_path, monkeypatch, caplog, of_a_run
):
    if of_a_run:
        path, state = best(img_size=32)
        state["label_names"] = [f"class {number}" for number in range(7)]
        checkpoint.save_checkpoint(state, path)
        model = vil.from_checkpoint(path)
    else:
        model = timm.create_model("resnet10t", num_classes=7).eval()
        model.pretrained_cfg = model.pretrained_cfg | {"label_names": ["x"] * 7, "crop_pct": 0.6}
    folder = tmp_path / "mine"
    caplog.set_level("INFO", "vil.exporting")
    report = export_model(model, f"{folder}/", metadata={"commit": "0012"})
    assert caplog.messages[-1].endswith(f"model = vil.from_checkpoint('{folder}')")
    assert report.path == folder
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    size = (32, 32) if of_a_run else (176, 176)
    images = torch.randn(2, 3, *size)
    folders = [folder]
    if of_a_run:
        folders.append(tmp_path / "timm's")  # a folder with the files of timm's push_to_hf_hub
        save_for_hf(model, folders[-1], model_args=model.model_args, safe_serialization="both")
    by_timm = [timm.create_model(f"local-dir:{path}", pretrained=True).eval() for path in folders]
    for found in (*by_timm, vil.from_checkpoint(folder)):
        assert list(found.pretrained_cfg["label_names"]) == model.pretrained_cfg["label_names"]
        config, expected = resolve_model_data_config(found), resolve_model_data_config(model)
        assert {name: tuple(v) if isinstance(v, list) else v for name, v in config.items()} == expected
        with torch.inference_mode():
            torch.testing.assert_close(found(images), model(images), rtol=0, atol=1e-2)
    picture = np.zeros((*size, 3), np.uint8)
    assert vil.predict(str(folder), picture) == vil.predict(found, picture)
    card = (folder / "README.md").read_text()
    assert "library_name: timm\n" in card
    assert f"{'vil_tiny' if of_a_run else 'resnet10t'}, 7 classes, images of {size[0]}x{size[1]} pixels\n" in card
    assert "- commit: 0012\n" in card
    assert "; class names and preprocessing are in config.json\n" in card
    assert '"local-dir:mine", pretrained=True' in card
    config = (folder / "config.json").read_text()
    assert "license" not in config
    assert "num_classes" not in json.loads(config).get("model_args", {})  # transformers passes this argument itself
    for odd in ("[]", "[" * 10**5, config.replace('"std"', '"std": [1e-50], "x"'), " " * 2**26 + config):
        (folder / "config.json").write_text(odd)
        with pytest.raises(
            CheckpointError,
            match=r"config.json is not a valid config.json of a model: |mine must be .*, got \[1e-50\]",
        ):
            vil.from_checkpoint(folder)
    (folder / "config.json").write_text(re.sub(r'"crop_pct": [\d.]+', '"crop_pct": 0.5', config))
    # config.json, which users may edit, takes precedence over the metadata of the weight file.
    assert vil.from_checkpoint(folder).pretrained_cfg["crop_pct"] == 0.5
    (folder / "config.json").write_text(re.sub(r'"crop_pct": [\d.]+', '"crop_pct": null', config))
    assert vil.from_checkpoint(folder).pretrained_cfg["crop_pct"] == model.pretrained_cfg["crop_pct"]
    (folder / "README.md").write_text(card + "Data: mine")
    monkeypatch.chdir(folder)
    # Exporting again replaces the files in the folder, but keeps a README that was edited.
    assert export_model(model, ".").path == Path()
    assert "README.md exists and was not overwritten" in caplog.text
    assert Path("config.json").read_text() == config
    assert Path("README.md").read_text() == card + "Data: mine"
    Path("README.md").unlink()
    export_model(model, ".", metadata={"commit": "0012"})
    assert Path("README.md").read_text() == card
    (tmp_path / "a file").write_text("")
    Path("config.json").write_text("[1]")
    with pytest.raises(ExportError, match="^folder .*mine contains files that are not from an earlier export: choose"):
        export_model(model, folder)
    assert Path("config.json").read_text() == "[1]"
    with pytest.raises(ExportError, match="a file must be a folder, but a file"):
        export_model(model, tmp_path / "a file")
    (tmp_path / "x.onnx").mkdir()
    with pytest.raises(ExportError, match="x.onnx must be a file, but a folder"):
        export_model(model, tmp_path / "x.onnx")
    with pytest.raises(ExportError, match="mine stores only weights; features need"):
        export_model(model, folder, features=[0])


def test_resuming_from_best_pt_is_rejected_with_the_remedy(best):
    with pytest.raises(
        CheckpointError, match="--resume .*last.pt, or start another run .* --pretrained-path .*best.pt"
    ):
        checkpoint.Checkpoint(best()[0]).training_state()


def test_the_shipped_weights_match_their_model_card(request):
    folder = request.config.rootpath / "vil/weights"
    card = (folder / "README.md").read_text()
    digests = {name: digest for digest, name in re.findall(r"^(\w{64})  (\S+)$", card, re.M)}
    assert digests.keys() == {path.name for path in folder.glob("*.safetensors")}
    lines = card.split("## Model details\n")[1].strip().split("\n\n")[0].replace("`", "").splitlines()
    names, _, *rows = (re.split(r" *\| *", line)[1:-1] for line in lines)
    details = [dict(zip(("name", *(row[0] for row in rows)), column)) for column in list(zip(names, *rows))[1:]]
    assert sorted(of["name"] for of in details) == sorted(timm.list_pretrained("vil*"))
    for of in details:
        data = (folder / of["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digests[of["file"]]
        assert f"{len(data) / 1e6:.1f} MB" == of["file size"]
        model, trained = timm.create_model(of["name"], pretrained=True), vil.from_checkpoint(folder / of["file"])
        assert f"{trained.pretrained_cfg['architecture']}.tiny_in200" == of["name"]
        assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}" == of["parameters, M"]
        assert str(model.num_classes) == of["classes"]
        for loaded, size in ((model, ""), (trained, " in training")):
            patches = loaded.patch_embed
            found = f"{patches.img_size[0]}, {patches.patch_size[0]}"
            assert found == of[f"image size, patch size{size} (pixels)"]
        _, gflops, _, activations = flops.measure(of["name"].split(".")[0], model.patch_embed.img_size[0])
        assert [f"{gflops / 2:.2f}", f"{activations:.1f}"] == [of["GMACs"], of["activations, M"]]


def test_the_code_of_the_model_card_runs(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (60, 40), "teal").save("photo.jpg")
    card = (request.config.rootpath / "vil/weights/README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.M | re.S)
    exec(compile(code, "README.md", "exec"), found := {})
    assert len(found["predictions"]) == 5


def test_rectangular_image_sizes_are_kept_and_other_sizes_resample_positions(best, tmp_path):
    path, state = best(img_size=16)
    file = path
    for size in ((8, 32), (16, 24), (24, 16)):  # numbers of patches relative to `file`: equal, larger, equal
        wide, again, fine = vil.from_checkpoint(file, img_size=size), *(vil.from_checkpoint(file) for _ in range(2))
        again.set_input_size(size)
        assert torch.equal(wide.pos_embed, again.pos_embed)
        fine.set_input_size(size, 4)
        started = create_model("vil_tiny", str(file), num_classes=7, **KWARGS | dict(img_size=size, patch_size=4))
        torch.testing.assert_close(started.pos_embed, fine.pos_embed)
        export_model(fine, tmp_path / "fine.safetensors")
        assert vil.from_checkpoint(tmp_path / "fine.safetensors").patch_embed.grid_size == fine.patch_embed.grid_size
        export_model(again, folder := tmp_path / f"{size[0]}x{size[1]}")
        assert timm.create_model(f"local-dir:{folder}", pretrained=True).patch_embed.img_size == size
        card = (folder / "README.md").read_text()
        assert f"images of {folder.name} pixels\n" in card
        assert "; preprocessing is in config.json\n" in card  # the line ends, because the model has no class names
        export_model(wide, file := tmp_path / f"{size}.safetensors")
        again = vil.from_checkpoint(file)
        assert resolve_model_data_config(again)["input_size"] == (3, *size)
        images = torch.randn(2, 3, *size)
        with torch.inference_mode():
            torch.testing.assert_close(again(images), wide(images), rtol=0, atol=1e-2)
    export_model(vil.from_checkpoint(path), tmp_path / "square.safetensors")
    larger = vil.from_checkpoint(tmp_path / "square.safetensors", img_size=40)
    assert larger.pos_embed.shape == (1, 26, 32)
    assert larger.pos_embed.dtype == torch.float32
    square = vil.from_checkpoint(tmp_path / "square.safetensors")
    square.set_input_size(40)
    torch.testing.assert_close(larger.pos_embed, square.pos_embed)  # position embeddings are resampled in fp32
    state["config"]["img_size"] = 24  # as in a later training phase with larger images
    checkpoint.save_checkpoint(state, path)
    started = create_model("vil_tiny", str(path), num_classes=7, img_size=16, **KWARGS)
    assert torch.equal(started.pos_embed, state["state_dict_ema"]["pos_embed"])
    export_model(create_model("vil_tiny", embed_dim=32, depth=1, img_size=32), tmp_path / "random.safetensors")
    assert vil.from_checkpoint(tmp_path / "random.safetensors").patch_embed.img_size == (32, 32)


def test_any_timm_model_can_be_loaded_and_exported(tmp_path):
    torch.manual_seed(0)
    original = timm.create_model("resnet10t", num_classes=5).eval()
    torch.save(original.state_dict(), tmp_path / "resnet.pth")
    model = vil.from_checkpoint(tmp_path / "resnet.pth", "resnet10t", num_classes=5, img_size=176)
    # timm's config also has a test size, which does not apply to a model created for another size.
    assert "test_input_size" in original.pretrained_cfg
    assert resolve_model_data_config(model, use_test_size=True) == resolve_model_data_config(original)
    images = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), original(images), rtol=0, atol=0)
    report = export_model(model, folder := tmp_path / "resnet")
    assert report.same_top1 == report.images == 4
    assert 0 < report.difference < 1e-2
    again = vil.from_checkpoint(folder).state_dict()
    assert again.keys() == timm.create_model(f"local-dir:{folder}", pretrained=True).state_dict().keys()
    assert again["bn1.num_batches_tracked"].dtype == torch.int64
    assert all(
        torch.equal(again[n], t if n.endswith("tracked") else t.half().float()) for n, t in model.state_dict().items()
    )


def test_weights_beyond_fp16_are_named_and_nothing_is_written(best, tmp_path, monkeypatch):
    model = vil.from_checkpoint(best(img_size=16)[0])
    monkeypatch.setattr("vil.exporting.TOLERANCE_OF_HALVES", 0)
    with pytest.raises(ExportError, match="logits of the exported model differs .* by up to"):
        export_model(model, tmp_path / "folder")
    with torch.no_grad():
        model.norm.weight[3] = 65_600
    with pytest.raises(ExportError, match="at most 65504.*norm.weight"):
        export_model(model, tmp_path / "weights.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (json.dumps({"model": "vil_tiny", "model_kwargs": {"url": "x"}}), "has the model argument 'url'"),
        (json.dumps({"model": "vil_tiny", "img_size": 10**9}), "'img_size' .* must be at most 8192, got 1000000000"),
        ("[1, 2]", "must be a dict, got list"),
        ("[" * 10**5, "must be a dict, got str"),
    ],
)  # fmt: skip
def test_weight_file_metadata_is_validated_like_a_checkpoints_options(tmp_path, config, message):
    path = tmp_path / "given.safetensors"
    save_file({"a": torch.ones(1)}, path, {"producer": "vision-longhorn", "config": config})
    with pytest.raises(ConfigError, match=message) as refused:
        vil.from_checkpoint(path)
    assert "\n" not in str(refused.value)
    save_file({"a": torch.ones(1)}, path, {"format": "pt", "config": json.dumps({"model": "vil_tiny"})})
    assert checkpoint.Checkpoint(path).options == {}  # metadata is ignored unless it names this package as producer


def test_metadata_without_a_value_is_rejected():
    with pytest.raises(SystemExit, match="form KEY=TEXT, got 'commit'"):
        call(export.main, "--out", "x.safetensors", "--metadata", "commit")


def _with_mean_pooling(model):
    model.reset_classifier(3, "avg")


def _pruned(model):
    model.prune_intermediate_layers([0], prune_head=False)


def _with_larger_patches(model):
    model.set_input_size(patch_size=16)


@pytest.mark.parametrize("change", [_with_mean_pooling, _pruned, _with_larger_patches])
def test_a_model_is_exported_as_it_was_changed(change, tmp_path):
    model = timm.create_model("vil_tiny", img_size=32, patch_size=8, stride=8, depth=2, num_classes=3, embed_dim=16)
    change(model)
    export_model(model, tmp_path / "changed.safetensors")
    x = torch.randn(2, 3, 32, 32)
    found = vil.from_checkpoint(tmp_path / "changed.safetensors")(x)
    torch.testing.assert_close(found, model.eval()(x), rtol=2e-3, atol=2e-3)  # the file stores fp16


def test_a_model_that_timm_did_not_create_is_exported_except_as_weights(tmp_path):
    model = vil.VisionLonghorn(img_size=32, patch_size=8, depth=1, num_classes=3, embed_dim=16)
    export_model(model, tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").exists()
    with pytest.raises(ExportError, match="cannot recreate the model .* must record the arguments"):
        export_model(model, tmp_path / "model.safetensors")
