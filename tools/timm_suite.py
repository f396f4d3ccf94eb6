"""Run timm's own model tests on this package's models: `python tools/timm_suite.py [--all] [options of pytest]`.

The tests come from the source package of the installed timm. This program selects the tests that timm runs on all of
timm's vision transformers, except the tests of torch.jit.script.
"""

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
import timm

import vil  # noqa: F401  registers the models

# FILTERS is added to timm's test file, so that timm tests forward_intermediates() of this package's models, and tests
# the models like timm's transformers. Listing only this package's models makes the collection of tests faster.
FILTERS = f"""
OWN_MODELS = {timm.list_models(module="vision_longhorn")}
NON_STD_FILTERS += OWN_MODELS
FEAT_INTER_FILTERS += ["vision_longhorn"]


def list_models(*args, **kwargs):
    return [name for name in timm.list_models(*args, **kwargs) if name.split(".")[0] in OWN_MODELS]


"""
ANCHOR = "NUM_NON_STD = len(NON_STD_FILTERS)\n"
TRACED_DEPTH = 4  # number of blocks of models that are traced by torch.fx; includes both pool directions


class Select:
    """Pytest plugin that selects the tests of the given models.

    Tests of torch.jit.script are not selected, because this package does not support TorchScript, which PyTorch has
    deprecated. Tests of torch.fx create models of `TRACED_DEPTH` blocks unless `full_depth` is set, because the time of
    torchvision's tracer is quadratic in the number of blocks.
    """

    def __init__(self, models: list[str], full_depth: bool):
        self.models = models
        self.full_depth = full_depth

    def pytest_collection_modifyitems(self, config, items):
        selected = [item for item in items if self.selects(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
        items[:] = selected

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item):
        create = functools.partial(timm.create_model, depth=TRACED_DEPTH)
        is_shortened = item.name.split("[")[0].endswith("_fx") and not self.full_depth
        with mock.patch.object(item.module, "create_model", create) if is_shortened else contextlib.nullcontext():
            yield

    def selects(self, item) -> bool:
        name = item.callspec.params.get("model_name") if hasattr(item, "callspec") else None
        return name in self.models and "torchscript" not in item.name


def fetch_tests(folder: Path) -> Path:
    """Download the source package of the installed timm, add this package's models to timm's test file, and return
    the path of the test file.
    """
    release = f"timm-{version('timm')}"
    command = ["download", "--quiet", "--no-deps", "--no-binary", "timm", "--dest", folder, release.replace("-", "==")]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    with tarfile.open(folder / f"{release}.tar.gz") as package:
        for name in ("pyproject.toml", "tests/test_models.py"):
            file = folder / release / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(package.extractfile(f"{release}/{name}").read())
    tests = folder / release / "tests" / "test_models.py"
    source = tests.read_text()
    if source.count(ANCHOR) != 1:
        raise SystemExit(
            f"test_models.py of {release} must contain {ANCHOR.strip()!r}: adapt tools/timm_suite.py to the new tests"
        )
    tests.write_text(source.replace(ANCHOR, FILTERS + ANCHOR))
    return tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="test every model at full depth")
    args, pytest_args = parser.parse_known_args()
    models = timm.list_models("*" if args.all else "*_tiny*", module="vision_longhorn")
    os.environ["TORCH_BACKEND"] = "vil"
    with tempfile.TemporaryDirectory() as folder:
        tests = fetch_tests(Path(folder))
        config = tests.parents[1] / "pyproject.toml"
        options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-c", str(config), "--rootdir", str(config.parent)]
        # pytest's exit code is nonzero if no test was selected
        return pytest.main([*options, *pytest_args, str(tests)], plugins=[Select(models, args.all)])


if __name__ == "__main__":
    sys.exit(main())
