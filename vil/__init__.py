"""Vision Longhorn: image backbones with a linear-time recurrence. `import vil` registers its models with timm."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_clone = Path(__file__).resolve().parents[1]
_found = find_spec("vil.kernels")  # a clone has them beside this folder, where its own editable installation leads
_kernels = Path(_found.origin).resolve().parent if _found and _found.origin else None
if (_clone / "pyproject.toml").is_file() and _kernels != (_clone / "kernels").resolve():
    raise ImportError(f"vil of {_clone} is not what is installed: `pip install -e {_clone}`, or go elsewhere")

from .block import Longhorn  # noqa: E402
from .factory import from_checkpoint  # noqa: E402
from .predict import predict  # noqa: E402
from .vision_longhorn import VisionLonghorn  # noqa: E402

__all__ = ["Longhorn", "VisionLonghorn", "from_checkpoint", "predict"]


def __getattr__(name: str):
    if name in ("export", "viz"):  # imported when they are needed
        return importlib.import_module(f"vil.{name}")
    raise AttributeError(f"module 'vil' has no attribute {name!r}")


try:
    __version__ = version("vision-longhorn")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "unknown"
