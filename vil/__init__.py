"""Vision Longhorn: image backbones with a linear-time recurrence. `import vil` registers the models with timm."""

import importlib
from importlib.metadata import PackageNotFoundError, version

from .factory import from_checkpoint
from .models.block import Longhorn
from .models.vision_longhorn import VisionLonghorn
from .prediction import predict

__all__ = ["Longhorn", "VisionLonghorn", "from_checkpoint", "predict"]
LATE = {"export": "vil.exporting", "viz": "vil.visualization"}  # modules imported on first use


def __getattr__(name: str):
    if name in LATE:
        return importlib.import_module(LATE[name])
    raise AttributeError(f"module 'vil' has no attribute {name!r}")


try:
    __version__ = version("vision-longhorn")
except PackageNotFoundError:  # the package runs from a checkout without installation
    __version__ = "unknown"
