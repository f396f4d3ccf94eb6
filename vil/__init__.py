"""Vision Longhorn: image backbones with a linear-time recurrence.

`import vil` registers the models with timm, except in the `vil` command, which registers the models when needed.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .factory import from_checkpoint
    from .models.block import Longhorn
    from .models.vision_longhorn import VisionLonghorn
    from .prediction import predict
    from .training.run import train

__all__ = ["Longhorn", "VisionLonghorn", "from_checkpoint", "predict", "train"]

# public name of this package -> module, and name in the module (None if the public name is the module itself)
SOURCES = {
    "Longhorn": ("vil.models.block", "Longhorn"),
    "VisionLonghorn": ("vil.models.vision_longhorn", "VisionLonghorn"),
    "export": ("vil.exporting", None),
    "from_checkpoint": ("vil.factory", "from_checkpoint"),
    "predict": ("vil.prediction", "predict"),
    "train": ("vil.training.run", "train"),
    "viz": ("vil.visualization", None),
}


def __getattr__(name: str) -> Any:
    if name not in SOURCES:
        raise AttributeError(f"module 'vil' has no attribute {name!r}")
    module, attribute = SOURCES[name]
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported


def __dir__() -> list[str]:  # for completion in notebooks
    return sorted({*globals(), *SOURCES})


def _runs_command() -> bool:
    """Return whether this process runs the `vil` command, also as `python -m vil`."""
    program = (sys.argv or [""])[0]
    if program == "-m":  # during `python -m vil`, sys.argv[0] is "-m" until Python has located the module
        program = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv else ""
    return Path(program).stem == "vil"


if not _runs_command():  # the `vil` command checks the names of its options before importing PyTorch
    from .models import vision_longhorn as _registered  # noqa: F401

try:
    __version__ = version("vision-longhorn")
except PackageNotFoundError:  # the package runs from a checkout without installation
    __version__ = "unknown"
