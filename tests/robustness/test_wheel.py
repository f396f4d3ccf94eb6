"""Tests of the wheel: built from the checkout, installed alone, and used elsewhere."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import timm
import torch
import yaml
from processes import ROOT

from vil.kernels.cuda import compiler

# what a user does first, in a process that cannot see the checkout
USE = """
import importlib.metadata, json, runpy, sys
import timm, torch, vil
from vil.kernels import longhorn_scan
from vil.kernels.cuda import compiler

torch.manual_seed(0)
model = timm.create_model("vil_tiny", depth=2, img_size=64).eval()
with torch.inference_mode():
    logits = model(torch.rand(2, 3, 64, 64))
kernels = [str(path.relative_to(compiler.SOURCES).with_suffix("")) for path in compiler.SOURCES.rglob("*.cu")]
found = dict(
    package=vil.__file__,
    version=importlib.metadata.version("vision-longhorn"),
    logits=logits.tolist(),
    kernels={name: compiler.source(name) for name in kernels},
    scan=list(longhorn_scan(*(torch.rand(1, 3, n) for n in (8, 8, 4, 4))).shape),
)
import vil.cli.validate, vil.viz
sys.argv = ["train", "--synthetic", "8", "--global-batch-size", "8", "--num-classes", "4", "--img-size", "16"]
sys.argv += ["--model-kwargs", "depth=1", "patch_size=8", "--epochs", "1", "--device", "cpu", "--experiment", "run"]
try:
    runpy.run_module("vil.cli.train", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
sys.argv = ["vil.info"]
runpy.run_module("vil.info", run_name="__main__")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the checkout, because building leaves files."""
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


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "vil").rglob("*") if "__pycache__" not in path.parts]
    assert held == {str(path.relative_to(ROOT)) for path in files if path.is_file()}
    assert "vil/py.typed" in held
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert wheel.name.startswith(f"vision_longhorn-{citation['version']}-py3-none-any")


def test_the_wheel_works_away_from_the_checkout(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, env=environment())
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # dependencies from here, but not the checkout: an editable install of it is found by a .pth file of its own
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ended = subprocess.run(
        [python, "-I", "-c", USE], capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "output" / "run" / "best.pt").exists()  # the wheel can train
    *report, found = ended.stdout.splitlines()
    found = yaml.safe_load(found)
    assert Path(found["package"]).parent == site / "vil"
    assert f"vision-longhorn  {found['version']}" in report
    assert any(line.startswith("commit ") and "unknown: not run from a git checkout" in line for line in report)
    assert found["scan"] == [1, 3, 8]
    for path in compiler.SOURCES.rglob("*.cu"):
        name = str(path.relative_to(compiler.SOURCES).with_suffix(""))
        assert found["kernels"].pop(name) == compiler.source(name)
    assert not found["kernels"]
    torch.manual_seed(0)
    model = timm.create_model("vil_tiny", depth=2, img_size=64).eval()
    with torch.inference_mode():
        expected = model(torch.rand(2, 3, 64, 64))
    torch.testing.assert_close(torch.tensor(found["logits"]), expected, rtol=1e-4, atol=1e-5)
