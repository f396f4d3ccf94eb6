"""What may import what: the product stands without the laboratory, and the kernels without the models."""

import ast
import sys

import pytest
from processes import ROOT

DEPENDENCIES = {"torch", "torchvision", "timm", "yaml", "filelock", "safetensors", "PIL", "numpy", "numba", "llvmlite"}
OPTIONAL = {
    "triton",
    "cuda",
    "tqdm",
    "scipy",
    "sklearn",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "wandb",
    "webdataset",
}


def imported_by(folder):
    """(file, module) of every import in a package, wherever it stands; those that are relative have no module."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((str(path.relative_to(ROOT)), name) for name in names)


@pytest.mark.parametrize("folder", ["vil", "kernels"])
def test_the_package_imports_itself_and_its_dependencies_alone(folder):
    allowed = DEPENDENCIES | OPTIONAL | {"vil"} | sys.stdlib_module_names
    found = list(imported_by(ROOT / folder))
    assert len(found) > 100
    assert [(path, name) for path, name in found if name.split(".")[0] not in allowed] == []


def test_kernels_import_nothing_of_the_models():
    found = [(path, name) for path, name in imported_by(ROOT / "kernels") if name.split(".")[0] == "vil"]
    assert [(path, name) for path, name in found if not name.startswith("vil.kernels")] == []
