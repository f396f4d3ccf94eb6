"""Tests of vil.export: files run without this package, and outputs equal fp64 implementations."""

import copy
import functools
import itertools
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from naive_model import model as naive_model
from naive_model import patches_and_class_token, residual_stream
from PIL import Image
from processes import ROOT, call
from timm.data import create_transform, resolve_data_config
from torch.export import Dim

import vil
from vil import exporting
from vil.cli.export import main
from vil.exporting import ExportError, export_model, onnx_graph
from vil.exporting import command as command_line
from vil.exporting.mixers import scan_by_steps
from vil.kernels.scan.reference import longhorn, selective
from vil.models.block import BidirectionalMixer, Block, LonghornDirection, LonghornMixer

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SMALL = dict(embed_dim=32, depth=2, patch_size=8, img_size=(16, 24), num_classes=5)
# Script that runs exported files without importing this package, and .onnx files without importing PyTorch.
ELSEWHERE = """
import json, sys
import numpy as np
for name in ("vil", "timm", "kernels", "train_imagenet", "torch"):
    sys.modules[name] = None
path, images, out = sys.argv[1:]
images = np.load(images)
if path.endswith(".onnx"):
    import onnxruntime
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"images": images})))
    metadata = session.get_modelmeta().custom_metadata_map
else:
    del sys.modules["torch"]
    import torch
    files = {"metadata.json": ""}
    module = torch.export.load(path, extra_files=files).module()
    found = {str(i): output.numpy() for i, output in enumerate(module(torch.from_numpy(images)))}
    metadata = json.loads(files["metadata.json"])
assert not [name for name in sys.modules if name.split(".")[0] in ("vil", "timm") and sys.modules[name]]
np.savez(out, metadata=json.dumps(metadata), **found)
"""


def small(name, **arguments):
    """Return a small model with x_proj scaled by 8, so that decays range from 0 to 1 (ViM) or from 0.5 to 1 (ViL)."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **arguments}).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "x_proj" in parameter_name:
                parameter.mul_(8)
            elif parameter_name.endswith(("bias", "skip", "cls_token", "pos_embed")):
                parameter.normal_()
        model.head.weight.mul_(50)
    return model


def run_elsewhere(path, images, folder):
    """Return a file's outputs and metadata from a new process that runs in another folder."""
    np.save(folder / "images.npy", images.numpy())
    script = folder / "elsewhere.py"
    script.write_text(ELSEWHERE)
    arguments = str(path), str(folder / "images.npy"), str(folder / "out.npz")
    subprocess.run([sys.executable, "-I", str(script), *arguments], check=True, cwd=folder)
    found = dict(np.load(folder / "out.npz"))
    metadata = json.loads(str(found.pop("metadata")))
    return {name: torch.from_numpy(value) for name, value in found.items()}, metadata


def run_here(path, images):
    """Return a file's outputs, computed in this process: by name for .onnx, by index for .pt2."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, map(torch.from_numpy, session.run(None, {"images": images.numpy()}))))
    outputs = torch.export.load(path).module()(images)
    return {str(number): output.detach() for number, output in enumerate(outputs)}


def naive_outputs(model, images):
    """Return the logits and every block's feature map, computed in fp64 from the papers' equations."""
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    stride = model.patch_embed.patch_size[0]
    logits = naive_model(images.double(), weights, stride=stride)
    grid = images.shape[2] // stride, images.shape[3] // stride
    streams = residual_stream(images.double(), weights, stride=stride)[1:]
    return logits, [patches_and_class_token(x)[0].mT.unflatten(2, grid) for x in streams]


def fp64_outputs(model, images):
    """Return the logits of this package's model, and the feature maps of all blocks, computed in fp64."""
    with torch.no_grad():
        exact = copy.deepcopy(model).double()
        _, maps = exact.forward_intermediates(images.double(), norm=False)
        return exact(images.double()), maps


def variables_of(metadata):
    """Parse the metadata of an ONNX file, which stores all values as strings."""
    texts = ("model", "interpolation", "crop_mode", "licence")
    return {name: value if name in texts else json.loads(value) for name, value in metadata.items()}


def relative(found, truth):
    assert found.shape == truth.shape
    return ((found - truth).abs().max() / truth.abs().max()).item()


def vit(**arguments):
    """Return a small ViT of timm, which exports faster than this package's models."""
    arguments = dict(embed_dim=12, depth=1, num_heads=1, patch_size=8, img_size=16, num_classes=5) | arguments
    return timm.create_model("vit_tiny_patch16_224", **arguments).eval()


@pytest.fixture(scope="module")
def exported_file(tmp_path_factory):
    """Return a function that exports a small model once per file name extension, and checks the report.

    The function returns the model, the path, and the indices of the blocks whose feature maps are exported.
    """
    folder = tmp_path_factory.mktemp("exported")

    @functools.cache
    def exported(ending):
        name, features = dict(onnx=("vim_tiny_pooled", (2, 0)), pt2=("vil_tiny", (1, 0)))[ending]
        model = small(name, depth=max(features) + 1)
        model.pretrained_cfg["label_names"] = ("n2", "n10", "é", "a, b", "")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        path = folder / f"model.{ending}"
        report = export_model(model, path, features=features, crop_pct=0.5)
        assert str(report).startswith(f"{path}: {path.stat().st_size / 1e6:.1f} MB; ")
        assert report.images == report.same_top1
        report.same_top1 -= 1
        assert str(report).endswith("top-1 is the same on 3 of 4 images")
        assert 0 < report.difference < 1e-3
        # Exporting leaves the model unchanged.
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        return model, path, features

    return exported


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_an_exported_file_computes_the_models_outputs_without_this_package(ending, exported_file, tmp_path):
    model, path, features = exported_file(ending)
    images = torch.randn(3, 3, 16, 24)
    found, metadata = run_elsewhere(path, images, tmp_path)
    logits, maps = fp64_outputs(model, images) if model.pooled else naive_outputs(model, images)
    if ending == "onnx":
        assert list(found) == ["logits", "features_0", "features_2"]  # feature maps in the order of the blocks
        metadata = variables_of(metadata)
        assert_standard(path)
    # An exported file contains no local paths and no stack traces.
    traces = (str(ROOT), torch.__path__[0], str(path.parent), "File ", "traced.py")
    assert not any(word.encode() in path.read_bytes() for word in traces)
    for value, truth in zip(found.values(), [logits, *(maps[block] for block in sorted(features))], strict=True):
        assert relative(value, truth) < 1e-5
    assert metadata == {
        "model": model.pretrained_cfg["architecture"],
        "num_classes": 5, "input_size": [3, 16, 24], "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225], "crop_pct": 0.5, "crop_mode": "center", "interpolation": "bicubic",
        "label_names": ["n2", "n10", "é", "a, b", ""],
    }  # fmt: skip


def assert_standard(path):
    """Assert that an ONNX file contains only standard operators and supports any batch size."""
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 18)]
    assert not proto.functions
    assert b"pkg.torch" not in path.read_bytes()  # the file has no exporter metadata about Python code
    assert sum(node.op_type == "Scan" for node in proto.graph.node) == 3  # the file has one Scan operator per block
    values = {value.name: value.type.tensor_type.shape.dim for value in (*proto.graph.input, *proto.graph.output)}
    shapes = {name: [dim.dim_param or dim.dim_value for dim in dims] for name, dims in values.items()}
    maps = {f"features_{block}": ["batch", 32, 2, 3] for block in (0, 2)}
    assert shapes == dict(images=["batch", 3, 16, 24], logits=["batch", 5], **maps)


def test_class_names_that_do_not_match_the_head_are_not_exported():
    model = small("vil_tiny", depth=1)
    for names in (None, (), ["ant"] * 4, "names"):
        model.pretrained_cfg["label_names"] = names
        assert "label_names" not in exporting.describe(model, {})
    model.pretrained_cfg["label_names"] = [7, "a\nb", *"cdefgh"][: model.num_classes]
    assert exporting.describe(model, {})["label_names"] == ["7", "a?b", *"cdefgh"][: model.num_classes]
    model.pretrained_cfg["label_names"] = None
    assert exporting.describe(model, dict(crop_pct=None)) == exporting.describe(model, {})
    with pytest.raises(ExportError, match=r"metadata must not set label_names"):
        export_model(model, "weights.safetensors", metadata={"label_names": "ant, bee"})
    model.reset_classifier(0)
    model.pretrained_cfg["label_names"] = []
    assert "label_names" not in exporting.describe(model, {})


def test_blocks_that_differ_only_in_weights_share_one_onnx_function():
    model, kinds = small("vil_tiny", depth=4), {}
    model.blocks[2].norm.eps = 0.1
    for block in model.blocks:
        onnx_graph.call(kinds, block, torch.zeros(1, 7, 32))
    assert len(kinds) == 2
    assert onnx_graph.is_known(block)
    block.__class__ = type("Mine", (Block,), {})  # a subclass may override Block.forward
    assert not onnx_graph.is_known(block)


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny_pooled"])
def test_the_last_block_computes_only_the_class_token_unless_its_feature_map_is_exported(name):
    images = torch.randn(2, 3, 16, 24)
    for options, tokens in ((dict(), 1), (dict(global_pool="avg"), 7)):
        model = small(name, depth=2, **options)
        for features, expected in (([0], tokens), ([0, 1], 7)):
            exported = exporting.Exported(model, features, for_onnxruntime=model.pooled)
            last = exported.model.blocks[-1]
            assert last(torch.randn(2, 7, 32), **dict(grid=(2, 3)) if model.pooled else {}).shape == (2, expected, 32)
            logits, maps = fp64_outputs(model, images)
            found = exported(images)
            assert relative(found[0], logits) < 1e-5
            assert all(relative(value, maps[i]) < 1e-5 for i, value in zip(features, found[1:], strict=True))


def test_models_of_any_dtype_mode_and_head_are_exported_in_eval_mode(tmp_path):
    model = small("vil_tiny", depth=1, dynamic_img_size=True, drop_path_rate=0.5, drop_rate=0.5).bfloat16().train()
    report = export_model(model, tmp_path / "model.pt2")
    assert report.same_top1 == 4
    exec(exporting.usage(report.path, ["logits"]), used := dict(torch=torch, images=torch.zeros(5, 3, 16, 24)))
    assert used["logits"].shape == (5, model.num_classes)
    # PyTorch's logger is silenced only during the export
    assert logging.getLogger("torch._export.serde.serialize").level == logging.NOTSET
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    export_model(vit(num_classes=0, in_chans=2), tmp_path / "model.onnx", mean=(0.5, 0.4), std=(0.2,))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_inputs()[0].shape == ["batch", 2, 16, 16]
    assert [(output.name, output.shape) for output in session.get_outputs()] == [("embedding", ["batch", 12])]


class Scans(torch.nn.Module):
    """Module that returns the outputs of Longhorn's and Mamba's recurrences for the same tokens."""

    def forward(self, x, step, k, q, rates):
        return scan_by_steps(x, step, k, q, None), scan_by_steps(x, step, k, q, rates)


def session_of_scans():
    """Return an onnxruntime session of the Longhorn and selective scans with 6 channels and 5 states per channel."""
    dims = {letter: Dim(letter, min=1, max=4096) for letter in "LB"}
    shapes = [("L", "B", 2, size) for size in (6, 6, 5, 5)] + [(2, 5, 6)]
    dynamic = tuple({i: dims[size] for i, size in enumerate(shape) if size in dims} for shape in shapes)
    example = tuple(torch.rand([{"L": 7, "B": 3}.get(size, size) for size in shape]) for shape in shapes)
    with torch.no_grad():
        program = torch.export.export(Scans(), example, dynamic_shapes=dynamic)
        options = dict(dynamo=True, opset_version=18, output_names=["longhorn", "selective"], verbose=False)
        return onnxruntime.InferenceSession(torch.onnx.export(program, (), **options).model_proto.SerializeToString())


def test_recurrences_in_onnxruntime_equal_the_reference():
    generator, session = torch.Generator().manual_seed(1), session_of_scans()
    for (B, L), name in itertools.product(((1, 1), (1, 2), (4, 1), (2, 41)), ("longhorn", "selective")):
        x, logits, k, q = (torch.randn(2, B, L, size, generator=generator).double() for size in (6, 6, 5, 5))
        for scale in (1, 30):  # factor 30 also gives large keys and tiny step sizes
            logits, k = logits * scale, k * scale
            rates = -torch.rand(2, 6, 5, generator=generator).double() * scale
            if name == "selective":
                step = F.softplus(logits)
                truth = torch.stack([selective(*parts) for parts in zip(x, logits, rates, k, q)])
            else:
                step = 1 / (1 + torch.exp(-logits) + k.square().sum(-1, keepdim=True))
                truth = torch.stack([longhorn(*parts) for parts in zip(x, logits, k, q)])
            inputs = [*(t.permute(2, 1, 0, 3) for t in (x, step, k, q)), rates.mT]
            feeds = {i.name: t.float().numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
            (found,) = session.run([name], feeds)
            assert relative(torch.from_numpy(found).permute(2, 1, 0, 3), truth) < 2e-6, name


def test_an_onnxruntime_that_cannot_load_the_file_is_named(tmp_path, monkeypatch):
    def older(content, **_):
        raise RuntimeError("Unsupported model IR version\nmore")

    runtime = SimpleNamespace(InferenceSession=older, __version__="1.10.0")
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    with pytest.raises(ExportError, match="onnxruntime 1.10.0 cannot load the model at opset 18: .* IR version$"):
        export_model(vit(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(path="model.h5"), "model.h5 must be .onnx for ONNX, .pt2 for .*, or .safetensors for weights"),
        (dict(path="none/model.onnx"), "folder .*none does not exist"),
        (dict(path="model.pt2", opset=17), "opset applies only to .onnx files"),
        (dict(path="model.safetensors", features=[0]), "stores only weights; features need an .onnx or .pt2 file"),
        (dict(path="model.safetensors"), "cannot recreate the model .* must record the arguments"),
        (dict(metadata={"mean": "0", "data": "x"}), "metadata must not set mean"),
        (
            dict(model=timm.create_model("resnet18", features_only=True)),
            "got FeatureListNet: export the whole model",
        ),
        (dict(features=[0, 2, -1]), r"features must be block indices from 0 to 0, got \[-1, 2\]"),
        (dict(opset=12), "opset must be at least 18 .*got 12: .* operators of opset 17, such as LayerNormalization$"),
        (dict(opset=99), "opset 99 is not supported by this PyTorch version"),
        (dict(std=(0.5, 0.5)), r"std must have 3 values.*got \(0.5, 0.5\)"),
        (dict(mean=(0, 0, 0), mode="x"), "must be among mean, std, crop_pct.*got mode"),
    ],
)
def test_a_failed_export_names_the_cause_and_keeps_the_existing_file(options, message, tmp_path):
    path = tmp_path / options.pop("path", "model.onnx")
    if path.parent.is_dir():
        path.write_text("before")
    with pytest.raises(ExportError, match=message):
        export_model(options.pop("model", None) or vit(), path, **options)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(path.name, "before")] * path.exists()


class Traced(torch.nn.Linear):
    """Classifier that returns a larger output in a traced program than in eager mode."""

    def forward(self, x):
        return super().forward(x) * (1.1 if torch.compiler.is_compiling() else 1)


def test_a_file_whose_outputs_differ_from_the_model_is_not_written(tmp_path):
    other, broken = vit(), vit()
    other.head.__class__ = Traced
    with torch.no_grad():
        other.head.weight.normal_()
        broken.head.bias[0] = torch.nan
    for model, difference in ((other, r"\d"), (broken, "nan")):
        with pytest.raises(ExportError, match=f"logits of the exported model differs .* by up to {difference}"):
            export_model(model, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("logit", "allowed"), [(0.01, 1e-4), (100.0, 1e-2)])
def test_the_tolerance_of_outputs_is_relative_for_large_and_absolute_for_small_values(logit, allowed):
    model = small("vil_tiny", depth=1)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(logit)
    exported, counts = exporting.Exported(model, [0]), set()
    for part in (0.9, 1.1, -0.9, -1.1):

        def run(images, found=logit + part * allowed):
            counts.add(len(images))
            return [torch.full((len(images), model.num_classes), found), exported(images)[1]]

        if abs(part) < 1:
            assert exporting.compare(model, exported, run) == (pytest.approx(0.9 * allowed, rel=0.01), 4, 4)
        else:
            with pytest.raises(ExportError, match="logits of the exported model differs .* by up to"):
                exporting.compare(model, exported, run)
    assert counts == {1, 3}  # the check runs two batch sizes, because a file may support only one batch size


class Sums(BidirectionalMixer):
    """Custom mixer that replaces the recurrence with cumulative sums of the keys."""

    direction = LonghornDirection

    def scan(self, v_2BLD, step_logits_2BLD, k_2BLN, q_2BLN, skip=True):
        sums_2BLN = torch.stack([k_2BLN[0].cumsum(1), k_2BLN[1].flip(1).cumsum(1).flip(1)])
        return v_2BLD * (sums_2BLN * q_2BLN).sum(-1, keepdim=True)


class UnitKeys(LonghornMixer):
    """Custom mixer that normalizes the keys before it calls this package's recurrence."""

    def scan(self, v_2BLD, step_logits_2BLD, k_2BLN, q_2BLN, skip=True):
        return super().scan(v_2BLD, step_logits_2BLD, F.normalize(k_2BLN, dim=-1), q_2BLN, skip)


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_custom_mixer_is_exported(ending, tmp_path):
    assert export_model(small("vil_tiny", depth=1, mixer=Sums), tmp_path / f"sums.{ending}").difference < 3e-5


def test_an_operator_of_this_package_in_the_onnx_graph_is_rejected(tmp_path):
    with pytest.raises(ExportError, match=r"got vil\.\w+\.default: write the recurrence"):
        export_model(small("vil_tiny", depth=1, mixer=UnitKeys), tmp_path / "keys.onnx")
    # onnxscript's logger is silenced only during the export.
    assert logging.getLogger("onnxscript").level == logging.NOTSET


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny_pooled"])
def test_torch_onnx_export_fails_and_recommends_export_model(name, dynamo, tmp_path):
    model, images = small(name, depth=1), torch.zeros(1, 3, 16, 24)
    with pytest.raises(RuntimeError, match=r"vil.export.export_model\(model, 'model.onnx'\)"), torch.no_grad():
        torch.onnx.export(model, (images,), tmp_path / "x.onnx", verbose=False, dynamo=dynamo)
    torch.jit.trace(model, images)  # only torch.onnx.export is rejected


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny_pooled"])
def test_onnxruntime_quantizes_all_weights_of_matrix_products(name, exported_file, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    if name == "vil_tiny":
        path = export_model(small(name, embed_dim=64), tmp_path / "model.onnx").path
    else:
        _, path, _ = exported_file("onnx")
    # without reduce_range, products of 8-bit numbers saturate on x86 CPUs that lack VNNI
    quantization.quantize_dynamic(path, tmp_path / "int8.onnx", reduce_range=True)
    images = np.random.default_rng(0).normal(size=(2, 3, 16, 24)).astype(np.float32)
    whole, int8 = (
        onnxruntime.InferenceSession(file).run(["logits"], {"images": images})[0]
        for file in (path, tmp_path / "int8.onnx")
    )
    assert np.abs(whole - int8).max() < 0.1 * np.abs(whole).max()
    graph = onnx.load(tmp_path / "int8.onnx").graph
    constants = {tensor.name for tensor in graph.initializer}
    assert {"MatMulInteger", "ConvInteger"} <= {node.op_type for node in graph.node}
    # Only the second operand is checked, because constant first operands average tokens and contain no weights.
    assert not [
        node for node in graph.node if node.op_type in ("MatMul", "Conv", "Gemm") and node.input[1] in constants
    ]


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_the_remedy(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ExportError, match=rf"{missing}.*pip install onnx onnxruntime onnxscript"):
        export_model(vit(), tmp_path / "model.onnx")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Return a model after writing its weights as a run's best.pt to the current folder."""
    model = small("vil_tiny", depth=1, img_size=16, num_classes=3)
    config = dict(model="vil_tiny", model_kwargs=dict(embed_dim=32, depth=1, patch_size=8), img_size=16, num_classes=3)
    config |= dict(crop_pct=0.9, interpolation="bilinear")
    parts = dict(config=config, state_dict=model.state_dict(), label_names=["ant", "bee", "cat"])
    monkeypatch.chdir(tmp_path)
    torch.save(dict(version=3, **parts), "best.pt")
    return model


@pytest.fixture
def command():
    """Return a function that runs `vil export` in this process with the given arguments."""
    return functools.partial(call, main)


def test_the_command_exports_pooled_features_of_a_classifier(trained, command, tmp_path):
    words = ["--checkpoint", "best.pt", "--num-classes", "0", "--out"]
    with pytest.raises(SystemExit, match="error: num_classes must be positive for .safetensors"):
        command(*words, "x.safetensors")
    command(*words, "x.pt2")
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(trained.head(run_here(tmp_path / "x.pt2", images)["0"]), trained(images))


def test_the_command_exports_the_given_weights_and_model_arguments(trained, command, capsys):
    def exported(*words):
        command(*words, "--out", "x.safetensors")
        return vil.from_checkpoint("x.safetensors")

    saved = torch.load("best.pt")
    average = {name: 0.9 * value for name, value in saved["state_dict"].items()}
    torch.save(saved | dict(state_dict_ema=average), "both.pt")
    halves = dict(rtol=2e-3, atol=1e-3)  # the exported weights are rounded to fp16
    raw, note = saved["state_dict"], "; raw weights (set --use-ema for the EMA weights)\n"
    for words, expected, said in (
        (["--use-ema"], average, "; EMA weights\n"),
        (["--no-use-ema"], raw, note),
        ([], raw, note),
    ):
        torch.testing.assert_close(exported("--checkpoint", "both.pt", *words).state_dict(), expected, **halves)
        assert capsys.readouterr().out.endswith(said)
    model = exported("--checkpoint", "both.pt", "--img-size", "24", "--model-kwargs", "drop_rate=0.5")
    assert (model.patch_embed.img_size, model.head_drop.p) == ((24, 24), 0.5)
    torch.save(saved["state_dict"], "plain.pth")
    shared = ["--model", "vil_tiny", "--num-classes", "3", "--img-size", "16"]
    kwargs = ["--model-kwargs", "depth=1", "patch_size=8", "embed_dim=32"]
    for words in (["--checkpoint", "plain.pth", *kwargs], [*kwargs, "pretrained=False"]):
        found = exported(*shared, *words).state_dict()
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in saved["state_dict"].items()}
        equal = torch.allclose(found["head.weight"], saved["state_dict"]["head.weight"], **halves)
        assert equal is ("plain.pth" in words)
    with pytest.raises(SystemExit, match="^error: timm has no pretrained weights for vil_small; .* pretrained=False"):
        exported("--model", "vil_small")


def test_a_model_name_exports_the_pretrained_weights_as_for_validation(tmp_path, command):
    shipped = timm.create_model("vil_tiny_pooled", pretrained=True)
    command("--model", "vil_tiny_pooled", "--out", str(tmp_path / "x.safetensors"))
    loaded = vil.from_checkpoint(tmp_path / "x.safetensors")
    torch.testing.assert_close(loaded.head.weight, shipped.head.weight, rtol=2e-3, atol=1e-3)
    assert loaded.pretrained_cfg["label_names"] == list(shipped.pretrained_cfg["label_names"])
    with pytest.raises(SystemExit, match="^error: num_classes must be 200, as in the pretrained weights"):
        command("--model", "vil_tiny_pooled", "--num-classes", "3", "--out", str(tmp_path / "y.safetensors"))


def test_the_command_reports_whether_a_named_model_is_pretrained(trained, command, monkeypatch, capsys):
    for loader in ("pretrained_model", "from_checkpoint"):
        monkeypatch.setattr(command_line, loader, lambda *_, **__: None)
    monkeypatch.setattr(command_line, "export_model", lambda *_, **__: exporting._logger.info("a stage") or "written")
    monkeypatch.setattr(logging.root, "handlers", [])  # remove logging handlers, as in a new process
    for words, said in (
        ([], "; pretrained weights"),
        (["--model-kwargs", "pretrained=false"], "; random weights"),
        (["--checkpoint", "best.pt"], ""),
    ):
        command("--model", "vil_tiny", *words, "--out", "x.onnx")
        assert capsys.readouterr() == (f"written{said}\n", "a stage\n")
    monkeypatch.setattr(command_line, "export_model", lambda *_, **__: (Path("gone") / "x.onnx").read_bytes())
    with pytest.raises(SystemExit, match="^error: .*No such file or directory: 'gone/x.onnx'$"):
        command("--model", "vil_tiny", "--out", "x.onnx")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "none.pt"], "error: checkpoint none.pt does not exist"),
        ([], "error: --model or --checkpoint is required"),
        (["--model", "vil_tinny"], "did you mean 'vil_tiny'"),
        ([__file__], f"unexpected argument .* on the command line: set --checkpoint {__file__}$"),
        (["--model", "vil_tiny", "--model-kwargs", "depth=0"], "error: depth must be at least 1, got 0$"),
        (["--model", "vil_tiny", "--model-kwargs", "num_classes=-3"], "error: num_classes must be at least 0, got -3$"),
        (["--model", "vil_tiny", "--num-classes", "-3"], "error: --num-classes must be at least 0, got -3"),
        (["--model", "vil_tiny", "--model-kwargs", "dept=4"], "the argument 'dept'; did you mean 'depth'"),
        # The extension of the output is checked before the checkpoint is read.
        (["--checkpoint", "none.pt", "--out", "model.txt"], "error: extension of model.txt must be .onnx"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(words, message, command):
    with pytest.raises(SystemExit, match=message):
        command("--out", "model.onnx", *words)


def test_the_documented_preprocessing_works_for_an_exported_checkpoint(trained, command, capsys, caplog):
    words = ["--checkpoint", "best.pt", "--features", "0", "--out", "vil_tiny.onnx"]
    command(*words, "--opset", "20", "--metadata", "licence=none")
    said = capsys.readouterr().out
    assert said.startswith("vil_tiny.onnx: ")
    assert said.endswith("top-1 is the same on 4 of 4 images\n")
    session = onnxruntime.InferenceSession("vil_tiny.onnx")
    metadata = variables_of(session.get_modelmeta().custom_metadata_map)
    expected = dict(model="vil_tiny", num_classes=3, input_size=[3, 16, 16], crop_pct=0.9, interpolation="bilinear")
    assert (expected | dict(licence="none")).items() <= metadata.items()
    proto = onnx.load("vil_tiny.onnx")
    assert {entry.domain: entry.version for entry in proto.opset_import} == {"": 20}
    assert [node.op_type for node in proto.graph.node if node.domain or node.op_type == "Scan"] == ["Scan"]
    images = torch.randn(2, 3, 16, 16)
    *stages, use = (record.getMessage() for record in caplog.records if record.name == "vil.exporting")
    assert [stage.partition(":")[0] for stage in stages] == [f"vil_tiny.onnx, step {n} of 2" for n in (1, 2)]
    exec(use.removeprefix("to use the file in Python: "), used := dict(onnxruntime=onnxruntime, images=images.numpy()))
    found = [torch.from_numpy(used[name]) for name in ("logits", "features_0")]
    logits, maps = naive_outputs(trained, images)
    assert relative(found[0], logits) < 1e-5
    assert relative(found[1], maps[0]) < 1e-5

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (31, 50, 3), dtype=np.uint8))
    picture.save("photo.png")
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)[1]
    exec(code.replace("photo.jpg", "photo.png").replace("photos.onnx", "vil_tiny.onnx"), variables := {})
    prepared = dict(input_size=(3, 16, 16), crop_pct=0.9, interpolation="bilinear")
    options = resolve_data_config(model=trained) | prepared
    torch.testing.assert_close(torch.from_numpy(variables["images"][0]), create_transform(**options)(picture))
    assert capsys.readouterr().out == ["ant", "bee", "cat"][variables["logits"].argmax()] + "\n"
