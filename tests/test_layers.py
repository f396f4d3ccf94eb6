"""Tests of imports: no module imports from a higher layer, and the package imports only the packages listed below."""

import ast
import re
import subprocess
import sys

import pytest
from processes import ROOT

# Layers from lowest to highest, one per line. A module may import from its own entry and from entries on earlier lines.
LAYERS = """
    vil.kernels.checks vil.kernels.cache vil.kernels.torch_private
    vil.kernels.cuda vil.kernels.cpu
    vil.kernels.backends
    vil.kernels.scan vil.kernels.augment
    vil.kernels.block
    vil.kernels.embedding
    vil.kernels
    vil.models.tokens vil.models.patches
    vil.models.dispatch vil.models.pretrained vil.models.shipped
    vil.models.block
    vil.models.vision_longhorn
    vil.models
    vil.text vil.wrappers
    vil.errors
    vil.fault_tolerance
    vil.distributed
    vil.config vil.info vil.published
    vil.classes vil.state_dicts vil.security
    vil.weight_files
    vil.checkpoint vil.devices vil.data_config vil.download
    vil.initial_weights
    vil.factory
    vil.data vil.cuda_graphs
    vil.prediction
    vil
    vil.evaluation
    vil.training
    vil.exporting vil.visualization
    vil.cli
    vil.__main__ train_imagenet validate
    research
"""
RANKS = {room: rank for rank, line in enumerate(LAYERS.splitlines()) for room in line.split()}
DEPENDENCIES = "torch torchvision timm huggingface_hub yaml safetensors PIL numpy numba llvmlite jinja2"
OPTIONAL = "triton cuda tqdm sklearn matplotlib onnx onnxruntime onnxscript wandb webdataset pillow_heif"
PATHS = [path for top in ("vil", "research") for path in (ROOT / top).rglob("*.py")]
PATHS += [ROOT / "train_imagenet.py", ROOT / "validate.py"]


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PATHS if "tests" not in path.parts}


def room(module):
    """Return the entry of LAYERS for a module: the module itself, or the closest package that contains it."""
    return module if module in RANKS else room(module.rpartition(".")[0])


def imported(module):
    """Yield the modules that a module imports, also inside functions, but not those that only type checkers import."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    text = re.sub(r"^if TYPE_CHECKING:\n(?:    .*\n)+", "", path.read_text(), flags=re.M)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (name if (name := f"{base}.{alias.name}") in MODULES else base for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_lower_layers_and_declared_dependencies(module):
    names = set(imported(module))
    ours = {room(name) for name in names if name in MODULES}
    assert {other for other in ours if other != room(module) and RANKS[other] >= RANKS[room(module)]} == set()
    others = {name.split(".")[0] for name in names - MODULES.keys()} - sys.stdlib_module_names
    assert others <= {*DEPENDENCIES.split(), *OPTIONAL.split()} or module.startswith("research")


def test_importing_the_package_loads_neither_training_nor_data():
    code = "import sys, timm; before = {*sys.modules}; from vil import from_checkpoint; print(*{*sys.modules} - before)"
    # The documentation names the submodules vil.export and vil.viz, which are imported on first use.
    code += "; import vil; vil.export.export_model, vil.viz.trace_scans"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"vil.data", "vil.evaluation", "vil.training", "matplotlib", "scipy", "tqdm"}
    assert {"vil", "vil.factory"} <= {*loaded}
    assert heavy.isdisjoint(loaded)
