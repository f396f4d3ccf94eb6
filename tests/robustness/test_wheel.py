"""Tests of the wheel, which is built from the checkout and used outside the checkout."""

import csv
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import timm
import torch
import yaml
from processes import ROOT

import vil

# This program uses the installed wheel as a user does. The program cannot import from the checkout.
USE = """
import contextlib, importlib.metadata, json, sys
import timm, torch, vil, vil.cli.main, vil.visualization
from vil.kernels import longhorn_scan
from vil.kernels.cuda.source import SOURCES

torch.manual_seed(0)
model = timm.create_model("vil_tiny", depth=2, img_size=64).eval()
with torch.inference_mode():
    logits = model(torch.rand(2, 3, 64, 64))
found = dict(
    package=vil.__file__,
    version=importlib.metadata.version("vision-longhorn"),
    logits=logits.tolist(),
    kernels={str(path.relative_to(SOURCES)): path.read_text() for path in SOURCES.rglob("*.cu*")},
    scan=list(longhorn_scan(*(torch.rand(1, 3, n) for n in (8, 8, 4, 4))).shape),
)

def command(line):
    with contextlib.suppress(SystemExit):
        vil.cli.main.run(line.split())

photos, on_cpu = sys.argv[1], "--device cpu --workers 0"
small = "--model-kwargs embed_dim=32 depth=1 patch_size=8 --img-size 16 --global-batch-size 8 --pretrained-path none"
train = f"train {photos} {on_cpu} {small} --warmup-epochs 0 --experiment run"
command(f"{train} --epochs 1")
command(f"{train} --epochs 2 --resume auto")
last = "--checkpoint output/run/last.pt"
command(f"validate {photos} {on_cpu} {last} --no-use-ema --json found.json --report report")
command(f"predict {photos}/val/ant --device cpu {last} --csv predictions.csv")
command(f"export {last} --no-use-ema --out exported.safetensors")
command("info")
run = vil.train(photos, "none", device="cpu", workers=0, config="digits", experiment="python", epochs=1)
found["python"] = run.history
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the package's files, because a build leaves files in its source folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "vil", source / "vil", ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, env=environment())
    (built,) = folder.glob("*.whl")
    return built


def environment():
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}


def test_the_wheel_contains_only_the_package(wheel):
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "vil").rglob("*") if "__pycache__" not in path.parts]
    assert held == {str(path.relative_to(ROOT)) for path in files if path.is_file()}
    assert "vil/py.typed" in held
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert wheel.name.startswith(f"vision_longhorn-{citation['version']}-py3-none-any")


def test_the_wheel_trains_and_validates_without_the_checkout(wheel, image_folder, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, env=environment())
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # This .pth file adds the packages of the environment that has PyTorch, except editable installs.
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (empty := tmp_path / "empty").mkdir()
    command = [python, "-I", "-c", USE, str(image_folder)]
    help = subprocess.run([tmp_path / "venv/bin/vil", "--help"], capture_output=True, text=True, check=True)
    assert help.stdout.startswith("usage: vil ")
    ended = subprocess.run(command, capture_output=True, text=True, cwd=empty, env=environment(), timeout=300)
    assert ended.returncode == 0, ended.stderr
    *report, found = ended.stdout.splitlines()
    found = yaml.safe_load(found)
    assert Path(found["package"]).parent == site / "vil"
    assert f"vision-longhorn  {found['version']}" in report
    assert any(line.startswith("commit ") and "unknown: not run from a git checkout" in line for line in report)
    assert found["scan"] == [1, 3, 8]
    kernels = ROOT / "vil" / "kernels"
    assert found["kernels"] == {str(path.relative_to(kernels)): path.read_text() for path in kernels.rglob("*.cu*")}
    run = empty / "output" / "run"
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "info.txt", "summary.csv", "last.pt", "best.pt"}
    *_, row = csv.DictReader((run / "summary.csv").read_text().splitlines())
    assert row["epoch"] == "2"
    validated = json.loads((empty / "found.json").read_text())
    assert validated["images"] == 28
    assert validated["top1"] == pytest.approx(float(row["eval_top1"]))
    assert (empty / "report" / "index.html").exists()
    assert len((empty / "predictions.csv").read_text().splitlines()) == 1 + 7
    assert vil.from_checkpoint(empty / "exported.safetensors").num_classes == 4
    assert [row["epoch"] for row in found["python"]] == [1]
    torch.manual_seed(0)
    model = timm.create_model("vil_tiny", depth=2, img_size=64).eval()
    with torch.inference_mode():
        expected = model(torch.rand(2, 3, 64, 64))
    torch.testing.assert_close(torch.tensor(found["logits"]), expected, rtol=1e-4, atol=1e-5)
