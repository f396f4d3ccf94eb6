"""Vision Longhorn: image backbones with a linear-time recurrence. `import vil` registers its models with timm."""

from importlib.metadata import PackageNotFoundError, version

from .block import Longhorn
from .factory import from_checkpoint
from .predict import predict
from .vision_longhorn import VisionLonghorn

__all__ = ["Longhorn", "VisionLonghorn", "from_checkpoint", "predict"]

try:
    __version__ = version("vision-longhorn")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "unknown"
